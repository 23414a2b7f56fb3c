"""Promise: log probabilities arrive as the official client reads them, streamed or not: one for each token of the usage, those
of the engine's own answer, whatever the vocabulary spells; and what is many at once holds up nobody and breaks no frame."""

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from blocktable import AsyncLLM, SamplingParams
from blocktable.server import engine_sender, frames
from blocktable.server import logprobs as module
from blocktable.server.engine_client import EngineRequest, Piece, PieceLogprobs
from blocktable.server.frames import FrameReader
from blocktable.server.logprobs import ChatWriter, CompletionWriter, Speller
from blocktable.server.openapi import numbers_up_to
from blocktable.server.piece_stream import PieceStream
from blocktable.server.protocol.logprobs import ChatLogprobs, CompletionLogprobs
from blocktable.server.sse import ChatEvents
from blocktable.server.wire import Pieces
from blocktable.text.tokenizer import Tokenizer
from tests.text import vocabularies

from .conftest import MakeServer
from .fake_engine import FakeEngine
from .live import Live

MESSAGES = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"model": "tiny", "temperature": 1, "seed": 3, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
CHAT: dict[str, Any] = ASK | {"messages": MESSAGES, "logprobs": True}


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    return server.openai()


def engine_says(engine: AsyncLLM, prompt: Any, count: int) -> Any:
    params = SamplingParams(seed=3, max_tokens=24, ignore_eos=True, logprobs=count)
    [output] = [output for output in engine.generate_blocking(prompt, params) if output.finished]
    return output.outputs[0]


def test_a_chat_has_those_of_the_engines_own_answer(client: openai.OpenAI, engine: AsyncLLM, server: Live) -> None:
    answer = client.chat.completions.create(**CHAT, top_logprobs=3)
    ids = server.client().post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    direct = engine_says(engine, {"prompt_token_ids": ids}, 3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens == 24
    for shown, token_id, told in zip(content, direct.token_ids, direct.logprobs, strict=True):
        assert shown.token == told[token_id].decoded_token
        assert shown.logprob == pytest.approx(told[token_id].logprob, abs=1e-3)
        best = sorted((one for one in told.values() if one.rank <= 3), key=lambda one: one.rank)
        assert [one.token for one in shown.top_logprobs] == [one.decoded_token for one in best]
        assert all(0 <= math.exp(one.logprob) <= 1 for one in shown.top_logprobs)
    said = b"".join(bytes(shown.bytes) for shown in content)
    assert said.decode(errors="replace") == answer.choices[0].message.content


def test_a_streamed_chat_has_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, top_logprobs=2, n=2)
    content: list[list[Any]] = [[], []]
    for event in client.chat.completions.create(**CHAT, top_logprobs=2, n=2, stream=True):
        for choice in event.choices:
            content[choice.index] += [] if choice.logprobs is None else choice.logprobs.content
    for choice in whole.choices:
        for ours, theirs in zip(choice.logprobs.content, content[choice.index], strict=True):
            assert (ours.token, ours.bytes, [one.token for one in ours.top_logprobs]) == (
                theirs.token,
                theirs.bytes,
                [one.token for one in theirs.top_logprobs],
            )


def check_completions(client: openai.OpenAI) -> None:
    ask = ASK | {"prompt": ["Once", "upon"], "logprobs": 2}
    whole = client.completions.create(**ask)
    found: list[Any] = [{"tokens": [], "text_offset": [], "top_logprobs": []} for _ in whole.choices]
    texts = ["", ""]
    for event in client.completions.create(**ask, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                for name, values in found[choice.index].items():
                    values += getattr(choice.logprobs, name)
    for choice in whole.choices:
        told, streamed = choice.logprobs, found[choice.index]
        assert texts[choice.index] == choice.text
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 24
        assert (told.tokens, told.text_offset) == (streamed["tokens"], streamed["text_offset"])
        assert [list(one) for one in told.top_logprobs] == [list(one) for one in streamed["top_logprobs"]]
        for token, number, top, offset in zip(told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset):
            assert top[token] == number or list(top.values()).count(top[token]) == 1
            assert 1 <= len(top) <= 3
            if not token.startswith("bytes:") and token:
                assert choice.text[offset : offset + len(token)] == token


def test_a_completion_has_its_lists_and_places_streamed_or_not(client: openai.OpenAI) -> None:
    check_completions(client)


def test_who_does_not_ask_gets_null(server: Live, client: openai.OpenAI) -> None:
    assert client.chat.completions.create(**CHAT | {"logprobs": False}).choices[0].logprobs is None
    assert client.completions.create(**ASK, prompt="x").choices[0].logprobs is None
    answer = client.chat.completions.create(**CHAT, top_logprobs=0)
    assert all(one.top_logprobs == [] for one in answer.choices[0].logprobs.content)
    zero = client.completions.create(**ASK, prompt="x", logprobs=0).choices[0].logprobs
    assert [list(one.values()) for one in zero.top_logprobs] == [[number] for number in zero.token_logprobs]
    with server.client().stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True}) as stream:
        assert all('"logprobs":null' in line for line in stream.iter_lines() if line.startswith("data: {"))


def test_penalties_and_biases_of_a_client_are_the_engines(client: openai.OpenAI) -> None:
    """By their effect: the options reach the logits, in both kinds of requests."""
    for create, ask in (
        (client.completions.create, ASK | {"prompt": "x"}),
        (client.chat.completions.create, ASK | {"messages": MESSAGES}),
    ):
        only = create(**ask | {"logit_bias": {"66": 100}, "temperature": 0})
        text = only.choices[0].text if hasattr(only.choices[0], "text") else only.choices[0].message.content
        assert text == "c" * 24
        options = {"logit_bias": {"66": 50, "67": 49.5}, "frequency_penalty": 2, "temperature": 0}
        both = create(**ask | options)
        text = both.choices[0].text if hasattr(both.choices[0], "text") else both.choices[0].message.content
        assert abs(text.count("c") - text.count("d")) <= 1
        masked = create(**ask | {"extra_body": {"ignore_eos": True, "allowed_token_ids": [70, 71], "bad_words": ["g"]}})
        text = masked.choices[0].text if hasattr(masked.choices[0], "text") else masked.choices[0].message.content
        assert text == "h" * 24


# The writer, beside the records that it stands for.

VOCAB = 272


@pytest.fixture
def speller(tiny_tokenizer: Any) -> Speller:
    return Speller(Tokenizer(tiny_tokenizer))


def some_logprobs(count: int, num_best: int, seed: int = 0) -> PieceLogprobs:
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, VOCAB, size=(count, 1 + num_best), dtype=np.int32)
    values = -np.abs(generator.normal(size=ids.shape) * 3000).clip(0, 9999).astype(np.float32)
    return PieceLogprobs(num_best, ids.tobytes(), values.tobytes())


def test_what_is_written_is_the_record(speller: Speller) -> None:
    tokenizer = speller.tokenizer
    assert tokenizer is not None
    for num_best in (0, 1, 20):
        told = some_logprobs(300, num_best)
        ids = np.frombuffer(told.ids, np.int32).reshape(300, -1)
        values = np.frombuffer(told.values, np.float32).reshape(300, -1).astype(float)
        chat = msgspec.json.decode(ChatWriter(speller).write(0, told), type=ChatLogprobs)
        assert [one.token for one in chat.content] == [tokenizer.token_text(int(one)) for one in ids[:, 0]]
        assert [[top.logprob for top in one.top_logprobs] for one in chat.content] == values[:, 1:].tolist()
        assert [one.logprob for one in chat.content] == values[:, 0].tolist()
        writer = CompletionWriter(speller, [[72]], skip_special_tokens=True)
        record = msgspec.json.decode(writer.write(0, told), type=CompletionLogprobs)
        assert record.token_logprobs == values[:, 0].tolist()
        assert all(len(set(top)) <= 1 + num_best for top in record.top_logprobs)
        assert record.text_offset == sorted(record.text_offset)
    assert ChatWriter(speller).write(0, some_logprobs(0, 2)) == b"null"
    assert CompletionWriter(speller, [[72]], skip_special_tokens=True).write(0, some_logprobs(0, 2)) == b"null"


def test_offsets_count_what_is_shown(speller: Speller) -> None:
    """Characters of several tokens count once, special tokens only where they are shown."""
    tokenizer = speller.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("a日b<|end|>🇮c")
    told = PieceLogprobs(0, np.array(ids, dtype=np.int32).tobytes(), np.zeros(len(ids), dtype=np.float32).tobytes())
    for skips, shown in ((True, "a日b🇮c"), (False, "a日b<|end|>🇮c")):
        record = msgspec.json.decode(CompletionWriter(speller, [[72]], skip_special_tokens=skips).write(0, told))
        places = dict(zip(record["tokens"], record["text_offset"]))
        assert {letter: places[letter] for letter in "abc"} == {letter: shown.index(letter) for letter in "abc"}
    assert record["tokens"][1] == "bytes:\\xe6"


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("prompt", [["<s>"], ["<s>", "<|end|>"], ["<s>", "▁the"]])
@pytest.mark.parametrize("name", ["byte fallback", "byte fallback that drops a space", "words that are joined", "words"])
def test_offsets_begin_where_the_text_does(
    name: str, prompt: list[str], planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a prompt that decodes to nothing some decoders drop the answer's first space."""
    make = {
        "byte fallback": lambda: vocabularies.byte_fallback(drops_spaces=0),
        "byte fallback that drops a space": lambda: vocabularies.byte_fallback(drops_spaces=1),
        "words that are joined": vocabularies.unigram,
        "words": vocabularies.byte_level,
    }
    tokenizer = Tokenizer(vocabularies.Loaded(make[name]()))
    known = tokenizer._native.get_vocab()
    answer = [known[one] for one in ("▁cat", "a", "▁the", "a") if one in known] or tokenizer.encode(" cat on")
    before = [known[one] for one in prompt if one in known]
    if planted:
        monkeypatch.setattr(module._Offsets, "_spelled", lambda _, tokenizer, token_id: tokenizer.spelled_bytes(token_id))
    told = PieceLogprobs(0, np.array(answer, dtype=np.int32).tobytes(), np.zeros(len(answer), dtype=np.float32).tobytes())
    writer = CompletionWriter(Speller(tokenizer), [before], skip_special_tokens=True)
    offsets = msgspec.json.decode(writer.write(0, told), type=CompletionLogprobs).text_offset
    whole = [len(tokenizer.decode([*before, *answer[:count]])) for count in range(len(answer))]
    is_right = offsets == [length - len(tokenizer.decode(before)) for length in whole]
    drops = name in ("byte fallback that drops a space", "words that are joined") and tokenizer.decode(before) == ""
    assert is_right is not (planted and drops)


def test_an_engine_without_a_tokenizer_names_tokens_by_their_numbers(serve: MakeServer) -> None:
    async def say(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        yield Piece("", [5], "stop", logprobs=PieceLogprobs(0, b"\x05\0\0\0", b"\0\0\0\0"))

    server = serve(FakeEngine(say))
    body = {"prompt": [1], "logprobs": 0}
    choice = server.client().post("/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["token_id:5"],
        "token_logprobs": [0.0],
        "top_logprobs": [{"token_id:5": 0.0}],
        "text_offset": [0],
    }


def test_pieces_that_wait_are_joined_with_their_log_probabilities() -> None:
    async def main() -> None:
        stream = PieceStream()
        parts = [some_logprobs(2, 1, seed) for seed in range(3)]
        for part in parts:
            stream.put(Piece("x", [1, 2], logprobs=part))
        joined = (await stream.get()).logprobs
        assert joined is not None
        assert (joined.ids, joined.values) == (b"".join(p.ids for p in parts), b"".join(p.values for p in parts))
        stream.put(Piece("x", [1]))
        stream.put(Piece("y", [1], "stop"))
        assert (await stream.get()).logprobs is None

    asyncio.run(main())


def check_frames(num_pieces: int) -> None:
    """Answers that come at once and together are longer than a frame may be."""
    told = some_logprobs(1000, 20)
    pieces = [Piece(str(place), [1] * 1000, "stop", index=place, logprobs=told) for place in range(num_pieces)]
    reader: FrameReader[Pieces] = FrameReader(Pieces)
    found = [
        piece
        for records in engine_sender._split([7] * num_pieces, pieces)
        for record in reader.feed(frames.frame(records))
        for piece in record.pieces
    ]
    assert found == pieces


def test_answers_that_are_long_together_are_sent_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 2**20)
    monkeypatch.setattr(engine_sender, "MAX_PIECES_BYTES", 2**19)
    check_frames(20)
    check_frames(1)
    assert list(engine_sender._split([], [])) == []


def test_numbers_of_tokens_are_described_exactly() -> None:
    import re

    for last in (0, 1, 5, 9, 10, 19, 31, 99, 100, 271, 1000, 1999):
        pattern = re.compile(f"^(?:{numbers_up_to(last)})$")
        assert [number for number in range(3000) if pattern.match(str(number))] == list(range(last + 1))
        assert not any(pattern.match(text) for text in ("", "00", "01", "-1", "1.0", " 1"))


# Planted: each must fail a check above.


def test_events_without_text_that_are_left_out_are_caught(
    server: Live, monkeypatch: pytest.MonkeyPatch, client: openai.OpenAI
) -> None:
    """A token that is half a character has log probabilities all the same."""
    own = ChatEvents._event

    def only_with_text(self: ChatEvents, place: int, piece: Piece, said: bytes, logprobs: bytes) -> bytes:
        return own(self, place, piece, said, logprobs if piece.text else b"null")

    monkeypatch.setattr(ChatEvents, "_event", only_with_text)
    with pytest.raises((AssertionError, ValueError)):
        test_a_streamed_chat_has_the_same(client)


def test_a_frame_that_is_not_split_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_sender, "MAX_PIECES_BYTES", 2**40)
    monkeypatch.setattr(frames, "MAX_FRAME", 2**20)
    with pytest.raises(frames.FrameError):
        check_frames(20)


def test_offsets_of_single_tokens_are_caught(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: lengths of tokens read alone are added up."""

    def alone(self: Any, token_id: int) -> int:
        begins = self._count
        self._count += len(self._tokenizer.token_text(token_id))
        return begins

    monkeypatch.setattr(module._Offsets, "pass_over", alone)
    with pytest.raises(AssertionError):
        check_completions(client)
