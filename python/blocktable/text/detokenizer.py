"""Text as it comes: tokens in, whole characters out.

Before: `output_text.py` pushes each token of a request. After: the pieces, in order, go to the stop strings and the
caller. Always: with P = decode(prompt) and R = decode(prompt + output), the pieces together are R without what it has in
common with the beginning of P. So there is no prompt text in them, the space between prompt and answer is, and U+FFFD
stands only where the full decode has it. A character of several tokens comes when its last one has come; what is still
incomplete at the true end comes then, as the full decode shows it.

There are two ways. In a byte-level vocabulary text is the bytes of all tokens, so an incremental UTF-8 decoder is exact
and costs the same for every token. Any other is decoded in a window of its last tokens, anchored where the decoder can no
longer see the beginning of the text. A run of byte-fallback tokens is held until it ends, because one invalid byte in it
turns all its characters into U+FFFD. (The native `DecodeStream` does not hold it: on 5,000 random sequences of such a
vocabulary it raised on 448 and gave other text than the full decode on 290, tokenizers 0.23.)
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .tokenizer import Tokenizer

TokenIds = Sequence[int] | NDArray[np.integer]

REPLACEMENT = "\ufffd"

WINDOW = 48
"""Tokens of a window before it is cut back to its last ones."""

ANCHOR = 8
"""Tokens that a window keeps at least when it is cut."""


class Detokenizer(Protocol):
    """The text of one request's output. One thread at a time."""

    def push_token(self, token_id: int) -> str:
        """Take the next output token; returns the text that has become whole, perhaps none."""

    def finish(self) -> str:
        """The end is reached: returns what was held back. Nothing is pushed after."""


def start_detokenizer(tokenizer: Tokenizer, prompt_token_ids: TokenIds, *, skip_special_tokens: bool) -> Detokenizer:
    """A detokenizer that continues `prompt_token_ids` (read, not kept)."""
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
    return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)


class ByteDetokenizer:
    """For byte-level vocabularies: the tokens' bytes through an incremental UTF-8 decoder.

    Its replacement rule is that of the native decoder: one U+FFFD for each maximal part of a character (Unicode 3.9, U+FFFD
    substitution of maximal subparts).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: TokenIds, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._known = tokenizer.known_bytes(skip_special_tokens=skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False
        """The bytes so far end inside a character."""
        self._decode(self._last_bytes(prompt_token_ids))
        # The prompt ends inside a character. If that never becomes whole, its U+FFFD is the prompt's.
        self._prompt_is_open = self._is_inside

    def push_token(self, token_id: int) -> str:
        """See `Detokenizer.push_token`."""
        taken = self._known.get(token_id)
        if taken is None:
            taken = self._tokenizer.token_bytes(token_id, skip_special_tokens=self._skip)
        if not self._is_inside and taken.isascii():  # the usual case, by the shortest way
            return taken.decode("ascii")
        text = self._decode(taken)
        return self._without_prompt(text) if self._prompt_is_open else text

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._without_prompt(self._utf8.decode(b"", final=True))

    def _decode(self, taken: bytes) -> str:
        """Text of the bytes that came, without the beginning of a character at their end."""
        text = self._utf8.decode(taken)
        pending = self._utf8.getstate()[0]
        if len(pending) == 2 and pending[0] == 0xED and pending[1] >= 0xA0:
            # Half a surrogate can never become a character, but Python waits for the rest of it.
            text += self._utf8.decode(b"", final=True)
            pending = b""
        self._is_inside = pending != b""
        return text

    def _without_prompt(self, text: str) -> str:
        if not self._prompt_is_open or not text:
            return text
        self._prompt_is_open = False
        return text.removeprefix(REPLACEMENT)

    def _last_bytes(self, token_ids: TokenIds) -> bytes:
        """At least the last 3 bytes of a text: more never decide whether it ends inside a character."""
        tail = b""
        for token_id in reversed(token_ids):
            if len(tail) >= 3:
                break
            tail = self._tokenizer.token_bytes(int(token_id), skip_special_tokens=self._skip) + tail
        return tail


class WindowDetokenizer:
    """For all other vocabularies: a window of the last tokens is decoded, and what is new in it comes out.

    `_window` holds tokens that add something, from a token on where decoding may start; `_known` is its text so far
    without what is held back. The window is cut only where nothing is held.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: TokenIds, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = self._prompt_window(prompt_token_ids)
        self._known = self._decode(self._window)
        self._limit = max(WINDOW, 2 * len(self._window))

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._release(self._decode(self._window))

    def push_token(self, token_id: int) -> str:
        """See `Detokenizer.push_token`."""
        if self._tokenizer.is_silent(token_id, skip_special_tokens=self._skip):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._decode(self._window)
        if self._tokenizer.may_split_characters and text.endswith(REPLACEMENT):
            # At most one character is incomplete, and it shows as one U+FFFD.
            return self._release(text[:-1]) if len(text) > len(self._known) else ""
        piece = self._release(text)
        if len(self._window) > self._limit:
            self._cut()
        return piece

    def _release(self, text: str) -> str:
        """What `text`, the window's, has beyond the known one."""
        common = len(self._known) if text.startswith(self._known) else _common_length(self._known, text)
        self._known = text
        return text[common:]

    def _cut(self) -> None:
        """Keep the last tokens only, if decoding may start there; else let the window grow to twice its size."""
        for size in (ANCHOR, 2 * ANCHOR, 4 * ANCHOR):
            tail = self._anchored(self._window, size)
            if tail is not None:
                self._window, self._known = tail, self._decode(tail)
                self._limit = max(WINDOW, 2 * len(tail))
                return
        self._limit = 2 * len(self._window)

    def _prompt_window(self, token_ids: TokenIds) -> list[int]:
        """The last tokens of the prompt from which decoding gives the same text as from its beginning."""
        size = ANCHOR
        while size < len(token_ids):
            # Silent tokens add nothing, so twice as many tokens are looked at as are wanted.
            tail = self._anchored(self._spoken(token_ids[-2 * size :]), size)
            if tail is not None:
                return tail
            size *= 2
        return self._spoken(token_ids)

    def _anchored(self, token_ids: list[int], size: int) -> list[int] | None:
        """The last `size` tokens or some more, if decoding may start there: not inside a run of bytes, and with a letter or
        sign in them, so that the decoder is past what it does at the beginning of a text (drop a space, join a word)."""
        start = len(token_ids) - size
        while start > 0 and self._tokenizer.is_byte(token_ids[start]):
            start -= 1
        if start <= 0:
            return None
        tail = token_ids[start:]
        text = self._decode(tail)
        if self._tokenizer.may_split_characters and REPLACEMENT in text:
            return None
        return tail if text.strip() else None

    def _spoken(self, token_ids: TokenIds) -> list[int]:
        kept = (int(token_id) for token_id in token_ids)
        return [i for i in kept if not self._tokenizer.is_silent(i, skip_special_tokens=self._skip)]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _common_length(known: str, text: str) -> int:
    """Characters that both begin with. They part only where the prompt ended inside a character or a run of bytes."""
    for place, (before, now) in enumerate(zip(known, text)):
        if before != now:
            return place
    return min(len(known), len(text))
