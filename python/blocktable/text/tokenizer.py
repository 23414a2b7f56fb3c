"""The tokenizer: words to ids, ids to words, and what the detokenizer has to know about the vocabulary.

Before: `model/source.py` loads a transformers tokenizer. After: `engine/request.py` encodes prompts with it,
`detokenizer.py` streams text with it. Safe to call from several threads: it owns a copy of the native tokenizer that
nobody else can reach and that nothing changes after construction. (A transformers tokenizer changes its native one, for
padding and truncation, while it encodes.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers

from ..errors import InvalidInputError, MissingExtraError, UnsupportedModelError
from .tokenizer_parts import TokenizerParts

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""How a vocabulary with byte fallback spells the token of one byte."""


LONG_TEXT = 4096
"""Characters from which on a text is encoded with the interpreter released, which costs some 50 us more."""


class LoadedTokenizer(Protocol):
    """The part of a transformers tokenizer that is read."""

    @property
    def name_or_path(self) -> str:
        """Where it came from."""

    @property
    def eos_token_id(self) -> int | None:
        """Its end token, if it names one."""

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """One, several by name, or none."""

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by the names that chat templates call them."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The conversation as one text, with `tokenize=False`."""


class Tokenizer:
    """Encodes and decodes. Text is what the native tokenizer decodes to: no spaces are tidied up behind it.

    `vocab_size` counts the ids that have a token; `eos_token_id` is the tokenizer's own end token, if it names one;
    `is_byte_level` tells that every token is a run of UTF-8 bytes, so that text is the bytes of all tokens together.
    """

    def __init__(self, loaded: LoadedTokenizer) -> None:
        """Takes a transformers tokenizer with a native ("fast") backend; raises `UnsupportedModelError` for any other."""
        native = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(native, tokenizers.Tokenizer):
            raise UnsupportedModelError(str(loaded.name_or_path), "its tokenizer has no native (tokenizers) backend")
        self._loaded = loaded
        try:
            self._native = _own_copy(native)
        except Exception as error:  # a part of it written in Python has no text form
            raise UnsupportedModelError(str(loaded.name_or_path), f"its tokenizer cannot be copied: {error}") from error
        self._special_ids = frozenset(
            token_id for token_id, token in self._native.get_added_tokens_decoder().items() if token.special
        )
        decoders = _decoder_types(self._native)
        self.is_byte_level = decoders == ["ByteLevel"]
        self.has_byte_fallback = "ByteFallback" in decoders
        self.may_split_characters = "ByteLevel" in decoders
        self._bytes: dict[bool, dict[int, bytes]] = {False: {}, True: {}}
        self._texts: dict[int, str] = {}
        self._before: list[int] | None = None
        self.vocab_size: int = self._native.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = loaded.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` can work."""
        return self._loaded.chat_template is not None

    @property
    def chat_template(self) -> str:
        """The one that writes tools; empty if there is none."""
        found = self._loaded.chat_template
        return found.get("tool_use", found.get("default", "")) if isinstance(found, Mapping) else found or ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the begin or end tokens that the model is used to.

        Raises `UnicodeEncodeError` for a text with lone surrogates: the caller knows which prompt it was.
        """
        text.encode()
        if len(text) < LONG_TEXT:
            encoding = self._native.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Of the native tokenizer's ways only those for batches let other threads run meanwhile.
            [encoding] = self._native.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these ids, from the beginning of a text. An id without a token adds nothing."""
        text: str = self._native.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @property
    def longest_token(self) -> int:
        """Characters of the longest token in the vocabulary: a text of n characters has at least n / longest of them."""
        return max(map(len, self._native.get_vocab(with_added_tokens=True)), default=1)

    def native_text(self) -> str:
        """The native tokenizer in its own JSON; it neither pads nor cuts."""
        return self._native.to_str()

    def parts(self) -> TokenizerParts:
        """The same tokenizer as plain values, for another process: `Tokenizer(parts)`."""
        return TokenizerParts(
            name_or_path=str(self._loaded.name_or_path),
            native=self.native_text(),
            encode_special_tokens=self._native.encode_special_tokens,
            eos_token_id=self.eos_token_id,
            chat_template=self._loaded.chat_template,
            special_tokens=dict(self._loaded.special_tokens_map),
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The messages as the model's chat template writes them.

        A message has a `role` and a `content`: a text, or a list of `{"type": "text", "text": …}` parts, which are joined
        by line ends; other keys are the template's affair, and so are `tools` and `options`. Raises `InvalidInputError`.
        """
        if self._loaded.chat_template is None:
            raise InvalidInputError("messages", messages, "the tokenizer has no chat template: give a plain prompt instead")
        checked = _read_messages(messages)
        try:
            text = self._loaded.apply_chat_template(
                checked, tokenize=False, add_generation_prompt=add_generation_prompt, tools=tools, **options
            )
        except ImportError as error:
            raise MissingExtraError("a chat template", "engine", "jinja2") from error
        except Exception as error:  # a template is a program of the model's maker and may raise anything
            raise InvalidInputError("messages", messages, f"refused by the chat template: {error}") from error
        return str(text)

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of `render_chat`; special tokens come from the template alone. Raises `InvalidInputError`."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        try:
            return self.encode(text, add_special_tokens=False)
        except UnicodeEncodeError as error:
            raise InvalidInputError("messages", messages, f"must be valid Unicode: {error.reason}") from None

    def spelling(self, token_id: int) -> str:
        """How the vocabulary spells a token; empty for an id without one."""
        return self._native.id_to_token(token_id) or ""

    def is_special(self, token: str) -> bool:
        """Whether this text is a special token of the vocabulary."""
        return self._native.token_to_id(token) in self._special_ids

    def is_silent(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether the token adds nothing to a text: a special one that is skipped, or an id without a token."""
        if skip_special_tokens and token_id in self._special_ids:
            return True
        return self._native.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a vocabulary with byte fallback."""
        if not self.has_byte_fallback:
            return False
        token = self._native.id_to_token(token_id)
        return token is not None and BYTE_TOKEN.fullmatch(token) is not None

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        """UTF-8 bytes of a token of a byte-level vocabulary, whole characters or not; empty if it is silent."""
        known = self._bytes[skip_special_tokens]
        found = known.get(token_id)
        if found is None:
            is_skipped = skip_special_tokens and token_id in self._special_ids
            found = known[token_id] = b"" if is_skipped else _bytes_of(self._native.id_to_token(token_id))
        return found

    def known_bytes(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """What `token_bytes` has said so far, by token; it grows with what that is asked."""
        return self._bytes[skip_special_tokens]

    def token_text(self, token_id: int) -> str:
        """The text of one token read alone, as it stands in a running text: a space before it is a part of it, part of a
        character is U+FFFD, and special tokens are spelled out. Empty for an id without a token."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._alone(token_id)
        return found

    def spelled_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of `token_text`, but those that the token really stands for where it is part of a character."""
        if self.is_byte_level:
            return self.token_bytes(token_id, skip_special_tokens=False)
        if self.is_byte(token_id):
            return bytes([int(self.spelling(token_id)[3:5], 16)])
        return self.token_text(token_id).encode()

    def _alone(self, token_id: int) -> str:
        if self.is_byte_level:
            return self.token_bytes(token_id, skip_special_tokens=False).decode(errors="replace")
        if self._native.id_to_token(token_id) is None:
            return ""
        # Behind a letter, because decoders treat the beginning of a text in their own ways.
        if self._before is None:
            self._before = self.encode("a", add_special_tokens=False)[-1:]
        before = self.decode(self._before, skip_special_tokens=False)
        text = self.decode([*self._before, token_id], skip_special_tokens=False)
        return text[len(before) :] if text.startswith(before) else self.decode([token_id], skip_special_tokens=False)


def _own_copy(native: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, in nobody else's hands, that neither cuts nor pads."""
    copy = tokenizers.Tokenizer.from_str(native.to_str())
    copy.encode_special_tokens = native.encode_special_tokens  # not part of the text form
    copy.no_truncation()
    copy.no_padding()
    return copy


def _decoder_types(native: tokenizers.Tokenizer) -> list[str]:
    """Names of the decoder's steps, those inside sequences among them, in order."""

    def names(step: Any) -> list[str]:
        if step["type"] == "Sequence":
            return [name for inner in step["decoders"] for name in names(inner)]
        return [step["type"]]

    return [] if native.decoder is None else names(json.loads(native.decoder.__getstate__()))


def _alphabet() -> dict[str, int]:
    """The byte of each letter that byte-level vocabularies are spelled in (GPT-2, Radford et al. 2019): printable Latin-1
    stands for itself, and the other 68 bytes, in order, are the letters from U+0100 on."""
    plain = [byte for byte in range(256) if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _bytes_of(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes([_BYTE_OF[letter] for letter in token])
    except KeyError:
        # An added token is spelled as it reads. (One that happens to use the alphabet only is read as bytes, as decoding does.)
        return token.encode()


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidInputError("messages", messages, "must be a list of messages")
    if not messages:
        raise InvalidInputError("messages", messages, "must hold at least one message")
    return [_read_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _read_message(field: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidInputError(field, message, "must be a dictionary with `role` and `content`")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidInputError(f"{field}.role", role, "must be a text such as system, user or assistant")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise InvalidInputError(f"{field}.content", content, "must be a text")
    return {**message, "content": "" if content is None else _read_content(f"{field}.content", content)}


def _read_content(field: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidInputError(field, content, "must be a text or a list of text parts")
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidInputError(f"{field}[{place}]", part, 'must be {"type": "text", "text": "…"}: only text is served')
        texts.append(part["text"])
    return "\n".join(texts)
