"""Text as it comes: the pieces of any chunking are the full decode behind the prompt, and never half a character."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable.text import detokenizer as module
from blocktable.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, start_detokenizer
from blocktable.text.tokenizer import Tokenizer

from .samples import SIGNS, chunked, every_block
from .vocabularies import FAMILIES, tiny

Start = Callable[..., Detokenizer]
EURO = ["<0xE2>", "<0x82>", "<0xAC>"]


def push(stream: Detokenizer, token_ids: Iterable[int]) -> str:
    """The text that these tokens bring."""
    return "".join(stream.push_token(token_id) for token_id in token_ids)


def expected_text(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], *, skip: bool) -> str:
    """Decode of prompt and output, without what it has in common with the beginning of the prompt's."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    common = 0
    while common < min(len(before), len(text)) and before[common] == text[common]:
        common += 1
    return text[common:]


def check(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], *, size: int | None, skip: bool, start: Start, seed: int = 0
) -> None:
    """The promise, for one prompt, one output and one chunking. `start` makes the detokenizer, or a faulty one."""
    stream = start(tokenizer, prompt, skip_special_tokens=skip)
    right = expected_text(tokenizer, prompt, output, skip=skip)
    shown, taken = "", 0
    for chunk in chunked(output, size, random.Random(seed)):
        shown += push(stream, chunk)
        taken += len(chunk)
        assert right.startswith(shown), f"{shown!r} is no beginning of {right!r}"
        word = tokenizer.decode([output[taken - 1]], skip_special_tokens=skip)
        if word.isascii() and word.isalpha() and not tokenizer.is_byte(output[taken - 1]):
            # Nothing can be incomplete behind a plain word, so nothing may be held either.
            assert shown == expected_text(tokenizer, prompt, output[:taken], skip=skip)
    assert shown + stream.finish() == right


def is_part(tokenizer: Tokenizer, token_id: int) -> bool:
    """Whether a token of a byte-level vocabulary begins with a byte of a longer character."""
    return tokenizer.token_bytes(token_id, skip_special_tokens=False)[:1] >= b"\x80"


def random_case(tokenizer: Tokenizer, rng: random.Random) -> tuple[list[int], list[int]]:
    """A prompt and an output of random tokens, with many parts of characters, special tokens and ids without a token."""
    ids = range(tokenizer.vocab_size + 3)
    parts = [i for i in ids if tokenizer.is_byte(i) or (tokenizer.is_byte_level and is_part(tokenizer, i))]
    pool = [parts or list(ids), list(ids), [i for i in ids if i not in parts] or list(ids)]
    lengths = rng.choice([0, 1, 3, 12, 70]), rng.choice([1, 2, 6, 20, 130])
    prompt, output = ([rng.choice(pool[rng.choice([0, 0, 1, 2])]) for _ in range(length)] for length in lengths)
    return prompt, output


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, None])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_tokens_in_any_chunks_give_the_full_decode(family: str, size: int | None, rng: random.Random) -> None:
    tokenizer = tiny(family)
    for number in range(60):
        prompt, output = random_case(tokenizer, rng)
        check(tokenizer, prompt, output, size=size, skip=number % 2 == 0, start=start_detokenizer, seed=number)


@pytest.mark.parametrize("family", ["byte level", "byte level in steps", "byte fallback", "byte fallback, spaces kept"])
def test_every_block_of_unicode_streams_whole(family: str) -> None:
    tokenizer = tiny(family)
    prompt = tokenizer.encode("Hello the cat")
    for text in [*SIGNS, *every_block(step=257)]:
        check(tokenizer, prompt, tokenizer.encode(text), size=1, skip=True, start=start_detokenizer)


def test_every_block_of_unicode_streams_whole_from_the_real_vocabulary(smollm2: Tokenizer) -> None:
    prompt = smollm2.encode("Once upon a time")
    for text in [*SIGNS, *every_block(step=97)]:
        output = smollm2.encode(text)
        check(smollm2, prompt, output, size=1, skip=True, start=start_detokenizer)
        assert smollm2.decode(output, skip_special_tokens=False) == text


def test_random_tokens_of_the_real_vocabulary_give_the_full_decode(smollm2: Tokenizer, rng: random.Random) -> None:
    parts = [i for i in range(smollm2.vocab_size) if is_part(smollm2, i)]
    for number in range(300):
        output = [rng.choice(parts if rng.random() < 0.6 else range(smollm2.vocab_size)) for _ in range(rng.randint(1, 25))]
        prompt = [rng.choice(parts) for _ in range(number % 4)]
        check(smollm2, prompt, output, size=None, skip=number % 2 == 0, start=start_detokenizer, seed=number)


@settings(max_examples=150)
@given(family=st.sampled_from(sorted(FAMILIES)), seed=st.integers(0, 2**32), size=st.integers(1, 5), skip=st.booleans())
def test_any_tokens_give_the_full_decode(family: str, seed: int, size: int, skip: bool) -> None:
    tokenizer = tiny(family)
    prompt, output = random_case(tokenizer, random.Random(seed))
    check(tokenizer, prompt, output, size=size, skip=skip, start=start_detokenizer)


def test_the_space_between_prompt_and_answer_is_there_and_the_prompt_is_not() -> None:
    tokenizer = tiny("byte fallback")
    prompt = tokenizer.encode("Hello")
    stream = start_detokenizer(tokenizer, prompt, skip_special_tokens=True)
    assert push(stream, ids_of(tokenizer, "▁cat")) == " cat"


def test_the_first_space_of_a_text_without_a_prompt_is_dropped_as_the_decode_drops_it() -> None:
    tokenizer = tiny("byte fallback")
    stream = start_detokenizer(tokenizer, ids_of(tokenizer, "<s>"), skip_special_tokens=True)
    assert push(stream, ids_of(tokenizer, "▁cat", "▁the")) == "cat the"


def test_a_run_of_bytes_is_held_until_it_cannot_turn_invalid() -> None:
    tokenizer = tiny("byte fallback")
    prompt = tokenizer.encode("Hello")
    stream = start_detokenizer(tokenizer, prompt, skip_special_tokens=True)
    assert push(stream, ids_of(tokenizer, *EURO)) == ""
    assert push(stream, ids_of(tokenizer, "<0xFF>")) == ""
    assert push(stream, ids_of(tokenizer, "!")) == "\ufffd\ufffd\ufffd\ufffd!"


def run_in_the_prompt(start: Start) -> None:
    """A run of bytes that the output makes invalid, far behind its beginning in the prompt."""
    tokenizer = tiny("byte fallback")
    prompt = [*tokenizer.encode("Hello the cat " * 3), *ids_of(tokenizer, *EURO * 20)]
    check(tokenizer, prompt, ids_of(tokenizer, "<0xFF>", "!", "▁cat"), size=1, skip=True, start=start)


def test_a_run_of_bytes_that_began_in_the_prompt_is_seen_whole() -> None:
    run_in_the_prompt(start_detokenizer)
    with pytest.raises(AssertionError):
        run_in_the_prompt(StartInsideARun)


def test_a_character_that_the_prompt_begins_comes_out_whole() -> None:
    tokenizer = tiny("byte level")
    begin, end = tokenizer.encode("€")[:1], tokenizer.encode("€")[1:]
    assert end, "the tiny vocabulary must split this character"
    stream = start_detokenizer(tokenizer, begin, skip_special_tokens=True)
    assert push(stream, end) == "€"
    # And if it stays incomplete, its U+FFFD belongs to the prompt.
    stream = start_detokenizer(tokenizer, begin, skip_special_tokens=True)
    assert push(stream, tokenizer.encode("at")) + stream.finish() == "at"


def test_incomplete_bytes_at_the_true_end_come_as_the_full_decode_has_them() -> None:
    tokenizer = tiny("byte level")
    output = tokenizer.encode("at") + tokenizer.encode("\U0001f9ff")[:-1]
    stream = start_detokenizer(tokenizer, tokenizer.encode("the"), skip_special_tokens=True)
    assert push(stream, output) == "at"
    assert stream.finish() == "\ufffd"


BEGINNINGS = {
    chr(code).encode()[:length] for code in range(0x80, 0x110000, 64) if not 0xD800 <= code < 0xE000 for length in (1, 2, 3)
}
"""Bytes that begin some character or are one: 64 code points in a row differ in the last byte only."""


def held_bytes_are_right(start: Start) -> bool:
    """Of every two or three bytes those are held, and only those, that a further byte can still make a character of; also
    when the first of them are the prompt's."""
    tokenizer = tiny("byte level")
    ids = {tokenizer.token_bytes(i, skip_special_tokens=True): i for i in reversed(range(tokenizer.vocab_size))}
    word = tokenizer.encode("at")
    for case in itertools.product(
        range(0xBF, 0x100), (0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC2, 0xED), (0x41, 0x80, 0xBF)
    ):
        output = [ids[bytes([byte])] for byte in case]
        for split in (0, 1, 2):
            prompt = [*word, *output[:split]]
            stream = start(tokenizer, prompt, skip_special_tokens=True)
            shown = "".join(push(stream, [i]) for i in output[split:])
            tails = [bytes(case)[-length:] for length in (1, 2, 3)]
            is_open = any(tail in BEGINNINGS and len(tail.decode(errors="ignore")) == 0 for tail in tails)
            text = tokenizer.decode([*word, *output])
            right = expected_text(tokenizer, prompt, output[split:], skip=True)
            if shown != (right.removesuffix("\ufffd") if is_open and text.endswith("\ufffd") else right):
                return False
            if shown + push(stream, word) != expected_text(tokenizer, prompt, [*output[split:], *word], skip=True):
                return False
    return True


def test_exactly_the_bytes_are_held_that_can_still_become_a_character() -> None:
    assert held_bytes_are_right(start_detokenizer)
    assert not held_bytes_are_right(WaitsForSurrogates)


@pytest.mark.parametrize("family", ["byte level", "byte fallback"])
def test_a_prompt_may_be_an_array(family: str) -> None:
    tokenizer = tiny(family)
    prompt = tokenizer.encode("the cat " * 30)
    stream = start_detokenizer(tokenizer, np.array(prompt, dtype=np.int32), skip_special_tokens=True)
    assert push(stream, np.array(tokenizer.encode("!"), dtype=np.int64).tolist()).strip() == "!"


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = tiny("byte level")
    output = [*tokenizer.encode("at"), *ids_of(tokenizer, "<|end|>"), *tokenizer.encode("the")]
    for skip, text in ((True, "atthe"), (False, "at<|end|>the")):
        stream = start_detokenizer(tokenizer, tokenizer.encode("Hello"), skip_special_tokens=skip)
        assert push(stream, output) + stream.finish() == text


def test_a_window_does_not_grow_with_the_output() -> None:
    for family in ("byte fallback", "word pieces", "unigram"):
        tokenizer = tiny(family)
        stream = start_detokenizer(tokenizer, tokenizer.encode("the cat " * 200), skip_special_tokens=True)
        assert isinstance(stream, WindowDetokenizer)
        for _ in range(300):
            push(stream, tokenizer.encode("the cat"))
            assert len(stream._window) <= module.WINDOW + 1


def ids_of(tokenizer: Tokenizer, *names: str) -> list[int]:
    """Ids of tokens by their spelling."""
    by_name = tokenizer._native.get_vocab(with_added_tokens=True)
    return [by_name[name] for name in names]


# Faults that have been seen elsewhere. Each must fail the promise above on some case.


class EachTokenAlone:
    """Every token decoded by itself."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self.tokenizer, self.skip = tokenizer, skip_special_tokens

    def push_token(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=self.skip)

    def finish(self) -> str:
        return ""


class CutByLength(EachTokenAlone):
    """The piece is what is longer than before, though the text before ended in a replacement character."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        super().__init__(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self.ids = list(prompt)
        self.length = len(tokenizer.decode(self.ids, skip_special_tokens=self.skip))

    def push_token(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=self.skip)
        piece, self.length = text[self.length :], len(text)
        return piece


class NothingBeforeTheEnd(CutByLength):
    """All text in one piece at the end: right, but no stream."""

    def push_token(self, token_id: int) -> str:
        self.ids.append(token_id)
        return ""

    def finish(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=self.skip)[self.length :]


class NoPrompt(WindowDetokenizer):
    """The answer decoded as if nothing came before it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        super().__init__(tokenizer, [], skip_special_tokens=skip_special_tokens)


class NoLastBytes(ByteDetokenizer):
    """What is incomplete at the end is forgotten."""

    def finish(self) -> str:
        return ""


class PromptsReplacement(ByteDetokenizer):
    """The prompt's own incomplete character is counted as output."""

    def _without_prompt(self, text: str) -> str:
        return text


class WaitsForSurrogates(ByteDetokenizer):
    """Half a surrogate is held, as Python's decoder does, although it can never become a character."""

    def _decode(self, taken: bytes) -> str:
        return self._utf8.decode(taken)


class RunsNotHeld(WindowDetokenizer):
    """A byte of a run is shown as soon as it makes a character."""

    def push_token(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        return "" if text.endswith("\ufffd") else self._release(text)


class StartInsideARun(WindowDetokenizer):
    """The window begins a fixed number of tokens back."""

    def _anchored(self, token_ids: list[int], size: int) -> list[int] | None:
        return token_ids[-size:]


class CutAnywhere(WindowDetokenizer):
    """The window is cut to its last tokens whatever they are."""

    def _anchored(self, token_ids: list[int], size: int) -> list[int] | None:
        return token_ids[-1:]


@pytest.mark.parametrize(
    "fault, families",
    [
        (EachTokenAlone, ["byte level", "byte fallback", "word pieces", "unigram", "word ends"]),
        (CutByLength, ["byte level", "byte level in steps", "byte fallback"]),
        (NothingBeforeTheEnd, ["byte level", "byte fallback", "word pieces", "unigram"]),
        (NoPrompt, ["byte fallback", "word pieces", "unigram", "plain words"]),
        (NoLastBytes, ["byte level"]),
        (PromptsReplacement, ["byte level"]),
        (RunsNotHeld, ["byte fallback", "byte fallback, spaces kept"]),
        (CutAnywhere, ["byte fallback, spaces dropped"]),
    ],
)
def test_a_faulty_stream_is_caught(fault: Start, families: list[str], rng: random.Random) -> None:
    def check_many(tokenizer: Tokenizer) -> None:
        for number in range(400):
            prompt, output = random_case(tokenizer, rng)
            check(tokenizer, prompt, output, size=1, skip=True, start=fault, seed=number)

    for family in families:
        with pytest.raises(AssertionError):
            check_many(tiny(family))
