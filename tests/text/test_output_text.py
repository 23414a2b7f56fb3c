"""One request's text: what ends it, which tokens count, and the same text whatever the chunks."""

import random
from collections.abc import Callable

import pytest

from blocktable.sampling.params import SamplingParams
from blocktable.text.output_text import OutputText
from blocktable.text.tokenizer import Tokenizer

from .samples import SIGNS, chunked
from .vocabularies import tiny

Make = Callable[..., OutputText]


def start(tokenizer: Tokenizer | None, make: Make = OutputText, **options: object) -> OutputText:
    """The text of an answer to "Hello"; the tokenizer's own end token is id 1."""
    params = SamplingParams(max_tokens=None, **options)  # type: ignore[arg-type]
    resolved = params.resolve(vocab_size=1000, eos_token_ids=[1], max_model_len=5000, num_prompt_tokens=2)
    return make(tokenizer, tiny("byte level").encode("Hello") if tokenizer else [5, 6], resolved)


def run(text: OutputText, token_ids: list[int], size: int | None, rng: random.Random) -> str:
    """Everything shown; stops pushing when a stop string ends it."""
    shown = ""
    for chunk in chunked(token_ids, size, rng):
        shown += text.push(chunk)
        assert text.text == shown
        if text.stop_string is not None:
            break
    shown += text.finish()
    assert text.text == shown
    return shown


@pytest.mark.parametrize("size", [1, 2, 3, 5, None])
def test_text_and_token_count_do_not_depend_on_the_chunks(size: int | None, rng: random.Random) -> None:
    tokenizer = tiny("byte level")
    stops = ["\u200d\U0001f467", "ต", "stop", "\ufffd"]
    for sample in [*SIGNS, "don't stop now", "the cat sat"]:
        ids = tokenizer.encode(sample) + tokenizer.encode("\U0001f9ff")[:-1]
        one_by_one, chunks = start(tokenizer, stop=stops), start(tokenizer, stop=stops)
        right = run(one_by_one, ids, 1, rng)
        assert run(chunks, ids, size, rng) == right
        assert (chunks.stop_string, chunks.num_tokens) == (one_by_one.stop_string, one_by_one.num_tokens)
        whole = tokenizer.decode(ids)
        places = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
        assert right == (whole[: min(places) - len(one_by_one.stop_string or "")] if places else whole)


@pytest.mark.parametrize(
    "min_tokens, text, stop, tokens", [(0, "", "a", 1), (1, "a", "a", 2), (5, "aaaaa", "a", 6), (9, "aaaaaaa", None, 7)]
)
def test_a_stop_string_counts_only_after_min_tokens(min_tokens: int, text: str, stop: str | None, tokens: int) -> None:
    tokenizer = tiny("byte level")
    (a,) = tokenizer.encode("a")
    for size in (1, 3, 7):
        output = start(tokenizer, stop="a", min_tokens=min_tokens)
        assert run(output, [a] * 7, size, random.Random(0)) == text
        assert (output.stop_string, output.num_tokens) == (stop, tokens)


def test_a_stop_string_that_began_before_min_tokens_and_ends_after_counts() -> None:
    tokenizer = tiny("byte level")
    ids = [tokenizer.encode(letter)[0] for letter in "xyzw"]
    output = start(tokenizer, stop="yz", min_tokens=2)
    assert run(output, ids, 1, random.Random(0)) == "x"
    assert output.num_tokens == 3


@pytest.mark.parametrize("include, text", [(False, "at"), (True, "at!")])
def test_the_text_of_an_end_token_shows_only_when_asked_for(include: bool, text: str) -> None:
    tokenizer = tiny("byte level")
    ids = tokenizer.encode("at") + tokenizer.encode("!")
    output = start(tokenizer, stop_token_ids=tokenizer.encode("!"), include_stop_str_in_output=include)
    shown = output.push(ids, ended_by_token=True) + output.finish()
    assert shown == output.text == text
    assert output.num_tokens == len(ids), "the end token is an output token whatever shows"
    assert output.stop_string is None


@pytest.mark.parametrize("include, text", [(False, "the "), (True, "the cat")])
def test_a_stop_string_shows_only_when_asked_for(include: bool, text: str) -> None:
    tokenizer = tiny("byte level")
    output = start(tokenizer, stop="cat", include_stop_str_in_output=include)
    assert run(output, tokenizer.encode("the cat sat"), 1, random.Random(0)) == text


def test_an_end_token_brings_out_what_was_held_for_a_stop_string() -> None:
    tokenizer = tiny("byte level")
    output = start(tokenizer, stop="cat!")
    assert output.push(tokenizer.encode("the cat")) == "the "
    assert output.push([1], ended_by_token=True) == ""
    assert output.finish() == "cat"


def test_without_detokenizing_there_is_no_text_and_tokens_are_counted() -> None:
    for output in (start(tiny("byte level"), detokenize=False), start(None)):
        assert output.push([7, 8, 9]) == ""
        assert output.finish() == output.text == ""
        assert output.num_tokens == 3


class StopsAtChunks(OutputText):
    """min_tokens is compared with the tokens of whole chunks."""

    def push(self, token_ids: list[int], *, ended_by_token: bool = False) -> str:  # type: ignore[override]
        self.num_tokens += len(token_ids)
        piece = "".join(map(self._detokenizer.push_token, token_ids))  # type: ignore[union-attr]
        return self._show(self._stops.push(piece, may_stop=self.num_tokens > self._min_tokens))


class OneTooEarly(OutputText):
    """Off by one: the last of the `min_tokens` tokens may end the text."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._min_tokens -= 1


@pytest.mark.parametrize("fault, size", [(StopsAtChunks, 3), (OneTooEarly, 1)])
def test_a_faulty_count_is_caught(fault: Make, size: int) -> None:
    tokenizer = tiny("byte level")
    (a,) = tokenizer.encode("a")
    output = start(tokenizer, fault, stop="a", min_tokens=5)
    assert (run(output, [a] * 7, size, random.Random(0)), output.num_tokens) != ("aaaaa", 6)
