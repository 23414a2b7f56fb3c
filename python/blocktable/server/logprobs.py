"""Log probabilities written as JSON: the records of `protocol/logprobs.py`, token by token, without making them.

Before: pieces bring ids and numbers, packed (`PieceLogprobs`). After: `sse.py` and the replies have bytes. Always: what comes
out is JSON, whatever the vocabulary spells; how a token reads is found once and kept, by its id.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..engine.token_logprobs import TokenLogprobs
from ..text.tokenizer import Tokenizer
from .engine_client import PieceLogprobs, PromptLogprobs

NO_LOGPROBS = b"null"

_encode = msgspec.json.encode


class Speller:
    """How the tokens of one vocabulary read. From any thread."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._fields: dict[int, str] = {}
        self._names: dict[int, str] = {}

    def fields(self, token_id: int) -> str:
        """A token's `token` and `bytes`, written."""
        found = self._fields.get(token_id)
        if found is None:
            text, spelled = self._read(token_id)
            found = self._fields[token_id] = f'"token":{_json(text)},"bytes":{_json(list(spelled))}'
        return found

    def text(self, token_id: int) -> str:
        """A token's `token` alone, written."""
        return self.fields(token_id).removeprefix('"token":').rpartition(',"bytes":')[0]

    def name(self, token_id: int) -> str:
        """A token as one text, written, which tells parts of characters apart."""
        found = self._names.get(token_id)
        if found is None:
            text, spelled = self._read(token_id)
            if text.encode() != spelled:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
            found = self._names[token_id] = _json(text)
        return found

    def _read(self, token_id: int) -> tuple[str, bytes]:
        if self.tokenizer is None:
            text = f"token_id:{token_id}"
            return text, text.encode()
        return self.tokenizer.token_text(token_id), self.tokenizer.spelled_bytes(token_id)


class ChatWriter:
    """Of one request. One piece at a time of each answer."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller

    def write(self, place: int, told: PieceLogprobs) -> bytes:
        """`ChatLogprobs` of the next tokens of answer `place`; null of no tokens."""
        fields = self._speller.fields
        content = []
        for ids, values in _tokens(told):
            top = ",".join([f'{{{fields(one)},"logprob":{value!r}}}' for one, value in zip(ids[1:], values[1:])])
            content.append(f'{{{fields(ids[0])},"logprob":{values[0]!r},"top_logprobs":[{top}]}}')
        return f'{{"content":[{",".join(content)}],"refusal":null}}'.encode() if content else NO_LOGPROBS


class CompletionWriter:
    """Of one request. One piece at a time of each answer, in their order."""

    def __init__(self, speller: Speller, prompts: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> None:
        """`prompts`: token ids of that of each answer."""
        self._speller = speller
        self._prompts = prompts
        self._skip = skip_special_tokens
        self._offsets: dict[int, _Offsets] = {}  # of each answer

    def write(self, place: int, told: PieceLogprobs) -> bytes:
        """`CompletionLogprobs` of the next tokens of answer `place`; null of no tokens."""
        name = self._speller.name
        offsets = self._offsets.get(place)
        if offsets is None:
            offsets = _Offsets(self._speller.tokenizer, self._prompts[place], skip_special_tokens=self._skip)
            self._offsets[place] = offsets
        tokens, own, tops, begins = [], [], [], []
        for ids, values in _tokens(told):
            tokens.append(name(ids[0]))
            own.append(repr(values[0]))
            begins.append(str(offsets.pass_over(ids[0])))
            # Two tokens may read the same: the more probable one is shown.
            top: dict[str, float] = {}
            for one, value in zip([*ids[1:], ids[0]], [*values[1:], values[0]]):
                top.setdefault(name(one), value)
            tops.append(f"{{{','.join([f'{read}:{value!r}' for read, value in top.items()])}}}")
        if not tokens:
            return NO_LOGPROBS
        text = f'{{"tokens":[{",".join(tokens)}],"token_logprobs":[{",".join(own)}],'
        return (text + f'"top_logprobs":[{",".join(tops)}],"text_offset":[{",".join(begins)}]}}').encode()


def write_prompt(speller: Speller, told: PromptLogprobs) -> bytes:
    """`PromptLogprobs` of the protocol."""
    scored = TokenLogprobs(told.num_best, bytearray(told.ids), bytearray(told.values), bytearray(told.ranks))
    places = [b"null"]
    for one in scored.by_token(None):
        shown = [
            f'"{token_id}":{{"logprob":{told.logprob!r},"rank":{told.rank},"decoded_token":{speller.text(token_id)}}}'
            for token_id, told in one.items()
        ]
        places.append(f"{{{','.join(shown)}}}".encode())
    return b"[%b]" % b",".join(places)


class _Offsets:
    """Characters of one answer's text, token after token."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Behind a prompt that says nothing the answer begins the text: decoders drop a space there.
        self._is_beginning = tokenizer is not None and all(
            tokenizer.is_silent(token_id, skip_special_tokens=skip_special_tokens) for token_id in prompt
        )
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0

    def pass_over(self, token_id: int) -> int:
        """Where a token begins: how many characters those before it made, if it does not go on with the last one."""
        tokenizer = self._tokenizer
        if tokenizer is None or tokenizer.is_silent(token_id, skip_special_tokens=self._skip):
            return self._count
        spelled = self._spelled(tokenizer, token_id)
        if spelled[:1] not in _CONTINUATIONS:
            self._count += len(self._utf8.decode(b"", final=True))  # what was open will never be whole
        begins = self._count
        self._count += len(self._utf8.decode(spelled))
        return begins

    def _spelled(self, tokenizer: Tokenizer, token_id: int) -> bytes:
        if self._is_beginning:
            self._is_beginning = False
            if not (tokenizer.is_byte_level or tokenizer.is_byte(token_id)):
                return tokenizer.decode([token_id], skip_special_tokens=self._skip).encode()
        return tokenizer.spelled_bytes(token_id)


_CONTINUATIONS = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))
"""Bytes of UTF-8 that go on with a character."""


def as_record(written: bytes) -> Any:
    """What was written here, in the place of the record that it is."""
    return None if written is NO_LOGPROBS else msgspec.Raw(written)


def _tokens(told: PieceLogprobs) -> zip[tuple[list[int], list[float]]]:
    """For each output token ids and numbers, its own first, then those of the best."""
    width = 1 + told.num_best
    ids = np.frombuffer(told.ids, dtype=np.int32).reshape(-1, width).tolist()
    return zip(ids, np.frombuffer(told.values, dtype=np.float32).reshape(-1, width).tolist())


def _json(value: Any) -> str:
    return _encode(value).decode()
