"""Promise: n answers to a prompt are one request of the engine, or as few as it can run; each answer is that of its own seed,
in whatever parts they are asked, and comes under its own index."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from statistics import fmean
from typing import Any

import httpx
import pytest

from blocktable import AsyncLLM
from blocktable.server import generation
from blocktable.server.engine_client import EngineRequest, Piece
from blocktable.server.piece_stream import PieceStream

from .conftest import MakeServer
from .counting_engine import answer_to
from .fake_engine import FakeEngine
from .live import events
from .processes import Served, read, request
from .test_engine_process import settle

DRAWN: dict[str, Any] = {"prompt": [5, 6, 7], "n": 5, "seed": 2**63 - 3, "max_tokens": 9, "ignore_eos": True}


async def each_index(request: EngineRequest) -> AsyncGenerator[Piece, None]:
    """Answer i of the request says its seed and i, and then ends."""
    for index in range(request.sampling.get("n", 1)):
        await asyncio.sleep(0)
        yield Piece(f"{request.sampling['seed']}+{index}", [1], "stop", None, 0, index)


def test_the_engine_is_asked_for_as_many_at_once_as_it_can_run(serve: MakeServer) -> None:
    engine = FakeEngine(each_index)  # eight at once
    ask = DRAWN | {"prompt": [[1, 2], [3]], "n": 19, "seed": 2**63 - 9}
    choices = serve(engine).client().post("/v1/completions", json=ask).json()["choices"]
    asked = [(one.prompt_token_ids, one.sampling.get("n", 1), one.sampling["seed"]) for one in engine.begun]
    parts = [(8, 2**63 - 9), (8, 2**63 - 1), (3, -(2**63) + 7)]
    assert sorted(asked) == sorted((prompt, *part) for prompt in ([1, 2], [3]) for part in parts)
    said = [f"{seed}+{index}" for count, seed in parts for index in range(count)]
    assert [choice["text"] for choice in choices] == said * 2
    assert [choice["index"] for choice in choices] == list(range(38))


def whole(make_async: Callable[..., AsyncLLM], serve: MakeServer, ask: dict[str, Any], **options: Any) -> list[str]:
    answer = serve(make_async(**options)).client().post("/v1/completions", json=ask).json()
    return [choice["text"] for choice in answer["choices"]]


def same_in_parts(make_async: Callable[..., AsyncLLM], serve: MakeServer) -> None:
    together = whole(make_async, serve, DRAWN)
    assert len(set(together)) == 5
    assert whole(make_async, serve, DRAWN, max_num_seqs=2) == together
    assert whole(make_async, serve, DRAWN | {"n": 1, "seed": -(2**63) + 1}) == together[4:]


def test_they_are_the_same_in_whatever_parts(make_async: Callable[..., AsyncLLM], serve: MakeServer) -> None:
    same_in_parts(make_async, serve)


def test_parts_that_begin_with_the_same_seed_are_caught(
    make_async: Callable[..., AsyncLLM], serve: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "child_seed", lambda seed, child: seed)
    with pytest.raises(AssertionError):
        same_in_parts(make_async, serve)


def test_a_stream_says_what_the_whole_says(engine: AsyncLLM, serve: MakeServer) -> None:
    client = serve(engine).client()
    right = [choice["text"] for choice in client.post("/v1/completions", json=DRAWN).json()["choices"]]
    ask = DRAWN | {"stream": True, "stream_options": {"include_usage": True}}
    texts = [""] * 5
    *told, done = events(client.post("/v1/completions", json=ask).text)
    for event in told:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert (texts, done) == (right, "[DONE]")
    assert told[-1]["usage"]["completion_tokens"] == 45
    assert sum(choice["finish_reason"] is not None for event in told for choice in event["choices"]) == 5


def test_they_cross_the_processes(served: Served) -> None:
    """Greedy, so that all say the same: the pieces of each are told by their index, and there is one request."""

    async def main() -> None:
        asked = request([7], 30, "several")
        asked.sampling["n"] = 3
        pieces = await read(served.client, asked)
        for index in range(3):
            own = [piece for piece in pieces if piece.index == index]
            assert [token for piece in own for token in piece.token_ids] == answer_to([7], 30)
            assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + ["length"]
        assert served.client.figures.num_open == 0

    before = settle(served)["submitted"]
    served.run(main())
    assert settle(served)["submitted"] == before + 1


def test_what_a_slow_reader_missed_is_one_piece_an_answer() -> None:
    async def main() -> None:
        stream = PieceStream(2)
        for text in "abc":
            stream.put(Piece(text, [1], index=1))
            stream.put(Piece(text.upper(), [2], index=0))
        stream.put(Piece("d", [1], "stop", index=1))
        assert not stream.is_over
        assert await stream.get() == Piece("abcd", [1, 1, 1, 1], "stop", index=1)
        assert await stream.get() == Piece("ABC", [2, 2, 2], index=0)
        stream.put(Piece("D", [2], "length", index=0))
        assert stream.is_over
        assert await stream.get() == Piece("D", [2], "length", index=0)

    asyncio.run(main())


def said(choice: dict[str, Any]) -> tuple[Any, ...]:
    return choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"], choice["stop_reason"]


def check_best(client: httpx.Client) -> None:
    """Three of five to each of two prompts, beside all five."""
    ask = DRAWN | {"prompt": [[5, 6, 7], [9]], "temperature": 1.5, "logprobs": 1, "stop_token_ids": list(range(40))}
    all_told = client.post("/v1/completions", json=ask).json()
    best = client.post("/v1/completions", json=ask | {"n": 3, "best_of": 5}).json()
    right = []
    for first in (0, 5):
        means = {place: fmean(one["logprobs"]["token_logprobs"]) for place, one in enumerate(all_told["choices"])}
        own = sorted(range(first, first + 5), key=lambda place: -means[place])
        right += [all_told["choices"][place] for place in own[:3]]
    # Numbers may part in their last digits: the second time the prompt is found in the cache.
    assert [said(one) for one in best["choices"]] == [said(one) for one in right]
    assert [one["index"] for one in best["choices"]] == list(range(6))
    assert best["usage"]["completion_tokens"] == all_told["usage"]["completion_tokens"]
    assert len({len(one["logprobs"]["tokens"]) for one in all_told["choices"]}) > 1


def test_the_best_of_several_are_told(engine: AsyncLLM, serve: MakeServer) -> None:
    client = serve(engine).client()
    check_best(client)
    ask = {name: value for name, value in DRAWN.items() if name != "n"} | {"best_of": 5}
    [only] = client.post("/v1/completions", json=ask).json()["choices"]
    assert only["logprobs"] is None, "they are asked of the engine, and not for the client"


@pytest.mark.parametrize("planted", ["the first ones", "the longest sum", "the worst"])
def test_a_bad_choice_among_several_is_caught(
    planted: str, engine: AsyncLLM, serve: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mean = generation._mean_logprob
    faults: dict[str, Callable[[Any], float]] = {
        "the first ones": lambda told: 0.0,
        "the longest sum": lambda told: mean(told) * len(told.values),
        "the worst": lambda told: -mean(told),
    }
    monkeypatch.setattr(generation, "_mean_logprob", faults[planted])
    with pytest.raises(AssertionError):
        check_best(serve(engine).client())
