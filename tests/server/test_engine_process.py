"""Promise: an engine in a process of its own answers as one in the same process: exactly, to everybody, with the same errors;
who leaves frees its blocks; a slow reader costs nobody anything."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from blocktable import openmp
from blocktable.errors import (
    EngineDeadError,
    InvalidInputError,
    NeverFitsError,
    NoSuchBlockError,
    QueueFullError,
    ShutDownError,
)
from blocktable.server.engine_client import EngineState
from blocktable.server.engine_sender import Sender
from blocktable.server.packed_map import USES
from blocktable.server.process_client import ProcessClient

from .counting_engine import answer_to
from .processes import Launch, Served, read, request, tokens


def settle(served: Served) -> dict[str, int]:
    """The core's counters once nothing runs."""

    async def settled() -> dict[str, int]:
        while True:
            stats: dict[str, int] = (await served.client.snapshot())["stats"]
            if stats["running"] + stats["waiting"] == 0 and stats["used_blocks"] == 0:
                return stats
            await asyncio.sleep(0.01)

    return served.run(asyncio.wait_for(settled(), 30))


def test_a_hundred_streams_at_once_are_exact(served: Served) -> None:
    async def main() -> None:
        asked = [request([place, 3 * place % 200], 20 + place % 30, f"a{place}") for place in range(100)]
        answers = await asyncio.gather(*(read(served.client, one) for one in asked))
        for one, pieces in zip(asked, answers):
            assert tokens(pieces) == answer_to(one.prompt_token_ids, one.sampling["max_tokens"])
            assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
            assert len(pieces) > 1

    served.run(main())
    settle(served)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")
def test_threads_of_its_model_sleep_soon_while_they_wait(served: Served) -> None:
    environment = Path(f"/proc/{served.supervisor.process_id}/environ").read_bytes().split(b"\0")
    said = [f"{name}={value}".encode() for name, value in openmp.waiting(os.environ).items()]
    assert said
    assert set(said) <= set(environment)


def test_who_does_not_stream_gets_one_piece_with_its_cached_tokens(served: Served) -> None:
    async def main() -> None:
        prompt = list(range(64))
        for cached in (0, 56 + 7):
            [piece] = await read(served.client, request(prompt, 9, f"whole{cached}", is_streamed=False))
            assert piece.token_ids == answer_to(prompt, 9)
            assert piece.num_cached_tokens == cached
            assert piece.text == "".join(served_text(piece.token_ids))

    def served_text(ids: list[int]) -> list[str]:
        return [tokenizer.decode([token]) for token in ids]

    async def parts() -> Any:
        return await served.client.read_tokenizer()

    from blocktable.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(served.run(parts()))
    served.run(main())
    settle(served)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompt_token_ids": []}, InvalidInputError, "at least one"),
    ({"prompt_token_ids": [999]}, InvalidInputError, "vocabulary"),
    ({"prompt_token_ids": [2**40]}, InvalidInputError, "vocabulary"),
    ({"prompt_token_ids": [1] * 5000}, InvalidInputError, "4096"),
    ({"sampling": {"max_tokens": 0}}, InvalidInputError, "max_tokens"),
    ({"sampling": {"max_tokenz": 1}}, InvalidInputError, "max_tokens"),
    ({"sampling": {"temperature": float("nan")}}, InvalidInputError, "temperature"),
    ({"request_id": ""}, InvalidInputError, "request_id"),
    ({"tenant": ""}, InvalidInputError, "tenant"),
    ({"priority": 10**6}, InvalidInputError, "priority"),
    ({"deadline_s": -1.0}, InvalidInputError, "deadline_s"),
    ({"cache_salt": ""}, InvalidInputError, "cache_salt"),
]


@pytest.mark.parametrize(("given", "error", "match"), REFUSED)
def test_refusals_are_those_of_the_engine(served: Served, given: dict[str, Any], error: type[Exception], match: str) -> None:
    before = settle(served)

    async def main() -> None:
        fields: dict[str, Any] = {"request_id": "r", "prompt_token_ids": [1], "sampling": {"max_tokens": 3}}
        from blocktable.server.engine_client import EngineRequest

        with pytest.raises(error, match=match):
            await read(served.client, EngineRequest(**(fields | given)))

    served.run(main())
    after = settle(served)
    assert [after[name] for name in ("free_blocks", "submitted")] == [before[name] for name in ("free_blocks", "submitted")]


def test_two_requests_of_one_id_are_not_mixed_up(served: Served) -> None:
    async def main() -> None:
        async with aclosing(served.client.generate(request([1], 50, "same"))) as first:
            begun = tokens([await anext(first)])
            with pytest.raises(InvalidInputError, match="request_id"):
                await read(served.client, request([2], 5, "same"))
            async for piece in first:
                begun += piece.token_ids
            assert begun == answer_to([1], 50)

    served.run(main())
    settle(served)


@pytest.mark.parametrize("streams", [True, False])
def test_who_leaves_has_its_request_ended_at_once(served: Served, streams: bool) -> None:
    async def main() -> int:
        stream = served.client.generate(request([5], 4000, f"leaves{streams}", is_streamed=streams))
        waiting = asyncio.ensure_future(anext(stream))
        while served.client.progress.num_running == 0:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await stream.aclose()
        steps: int = (await served.client.snapshot())["stats"]["steps"]
        return steps

    steps = served.run(main())
    assert settle(served)["steps"] <= steps + 2


def test_questions_are_answered(served: Served) -> None:
    async def main() -> None:
        await read(served.client, request(list(range(100)), 5, "asked"))
        told = await served.client.explain("asked")
        assert told["place"] == "ended"
        with pytest.raises(InvalidInputError, match="never"):
            await served.client.explain("never")
        client = served.supervisor._client
        assert client is not None
        with pytest.raises(InvalidInputError, match="no question"):
            await client._ask("nonsense")
        assert await served.client.reset_prefix_cache() >= 12
        assert await served.client.reset_prefix_cache() == 0
        block_map = await served.client.block_map()
        assert len(block_map.uses) == served.client.info.num_blocks
        async with aclosing(served.client.generate(request([1] * 9, 500, "named"))) as stream:
            await anext(stream)
            uses = (await served.client.block_map()).uses
            held = [block for block, use in enumerate(uses) if use == USES.index("held")]
            namings = [naming for block in held for naming in await served.client.block_namings(block)]
            assert {"request_id": "named", "group": 0, "index": 0} in namings
        with pytest.raises(NoSuchBlockError, match="999999"):
            await served.client.block_namings(999_999)
        assert any("step_thread.py" in line for line in (await served.client.stall())["stack"])

    served.run(main())


def test_a_slow_reader_is_merged_and_holds_up_nobody(served: Served) -> None:
    async def main() -> None:
        async with aclosing(served.client.generate(request([7], 300, "slow"))) as slow:
            first = await anext(slow)
            other = await read(served.client, request([8], 310, "quick"))
            assert tokens(other) == answer_to([8], 310)
            rest = [piece async for piece in slow]
            assert tokens([first, *rest]) == answer_to([7], 300)
            assert len(rest) == 1, "what came while it slept is one piece"

    served.run(main())
    settle(served)


def test_a_server_that_does_not_read_at_all_is_sent_one_piece_a_request(launch: Launch, tmp_path: Path) -> None:
    """The socket stays full: the engine goes on, and what waits is merged on its side. It is read when all has been said."""
    passes = tmp_path / "passes"

    async def main() -> None:
        client = await ProcessClient.start(launch(fake_passes_file=str(passes)))
        try:
            await client.ready
            assert client._transport is not None
            client._transport.pause_reading()
            asked = [request([place], 400, f"full{place}") for place in range(200)]
            running = [asyncio.create_task(read(client, one)) for one in asked]
            while not passes.exists() or passes.stat().st_size < 400:
                await asyncio.sleep(0.01)
            client._transport.resume_reading()
            answers = await asyncio.gather(*running)
        finally:
            await client.close()
        for one, answer in zip(asked, answers):
            assert tokens(answer) == answer_to(one.prompt_token_ids, 400)
        most = max(len(answer) for answer in answers)
        assert most < 200, "of 400 tokens those came alone that the socket had room for"

    asyncio.run(asyncio.wait_for(main(), 200))


def test_a_thousand_waiting_pieces_are_one_frame(served: Served) -> None:
    """Cheap for each token: what lies there when the sender comes by goes together."""
    import socket
    import threading

    from blocktable.engine.mailbox import Outbox
    from blocktable.engine.outputs import CompletionOutput, RequestOutput
    from blocktable.sampling.params import RequestOutputKind
    from blocktable.server.engine_sender import WireMailbox
    from blocktable.server.frames import FrameReader
    from blocktable.server.wire import Beat, Pieces, Report

    ours, theirs = socket.socketpair()
    beats, held = threading.Event(), threading.Event()

    def beat() -> Beat:
        beats.set()
        held.wait(60)
        return Beat(0, 0, 0, 0.0)

    with ours, theirs:
        sender = Sender(theirs, beat_s=0.01, beat=beat, on_end=lambda number: None, on_lost=lambda number: None)
        outbox = Outbox(lambda mailbox: None)
        assert beats.wait(60)
        mailboxes = [WireMailbox(outbox, str(n), RequestOutputKind.DELTA, n, sender) for n in range(1000)]
        for token in range(3):
            for mailbox in mailboxes:
                answer = CompletionOutput(0, "x", [token], finish_reason="length" if token == 2 else None)
                mailbox.append(RequestOutput(mailbox.request_id, None, None, [answer], finished=token == 2))
            outbox.deliver(lambda mailbox: None)
        held.set()
        reader: FrameReader[Any] = FrameReader(Report)
        found: list[Pieces] = []
        while not found:
            found = [record for record in reader.feed(ours.recv(2**20)) if isinstance(record, Pieces)]
        assert len(found) == 1
        assert sorted(found[0].numbers) == list(range(1000))
        assert all(piece.token_ids == [0, 1, 2] and piece.finish_reason == "length" for piece in found[0].pieces)
        sender.close()


def test_a_piece_that_fits_no_frame_ends_its_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    from blocktable.engine.mailbox import Outbox
    from blocktable.engine.outputs import CompletionOutput, RequestOutput
    from blocktable.sampling.params import RequestOutputKind
    from blocktable.server import engine_sender, frames
    from blocktable.server.engine_sender import WireMailbox
    from blocktable.server.frames import FrameReader
    from blocktable.server.wire import Beat, Pieces, Refused, Report

    monkeypatch.setattr(frames, "MAX_FRAME", 5000)
    monkeypatch.setattr(engine_sender, "_split", lambda numbers, pieces: map(Pieces, zip(numbers), zip(pieces)))
    ours, theirs = socket.socketpair()
    lost: list[int] = []
    with ours, theirs:
        sender = Sender(theirs, beat_s=60, beat=lambda: Beat(0, 0, 0, 0.0), on_end=lambda number: None, on_lost=lost.append)
        outbox = Outbox(lambda mailbox: None)
        for number, text in enumerate(["short", "x" * 6000, "short"]):
            mailbox = WireMailbox(outbox, str(number), RequestOutputKind.DELTA, number, sender)
            answer = CompletionOutput(0, text, [1], finish_reason="length")
            mailbox.append(RequestOutput(mailbox.request_id, None, None, [answer], finished=True))
        outbox.deliver(lambda mailbox: None)
        reader: FrameReader[Any] = FrameReader(Report)
        told, refused = [], []
        ours.settimeout(60)
        while len(told) + len(refused) < 3:
            for record in reader.feed(ours.recv(2**20)):
                told += record.numbers if isinstance(record, Pieces) else []
                refused += [record] if isinstance(record, Refused) else []
        assert (sorted(told), [record.number for record in refused], lost) == ([0, 2], [1], [1])
        with pytest.raises(InvalidInputError, match="logprobs.*at most 5000"):
            raise refused[0].error.error()
        sender.close()


def test_a_full_line_refuses_and_a_drain_takes_nothing_more(launch: Launch) -> None:
    async def main() -> None:
        client = await ProcessClient.start(launch(max_num_seqs=2, max_waiting=3, num_blocks=300, fake_step_ms=5.0))
        try:
            with pytest.raises(EngineDeadError, match="still being built"):
                await read(client, request([1], 1, "early"))
            await client.ready
            await fill_drain_and_end(client)
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 200))


async def fill_drain_and_end(client: ProcessClient) -> None:
    with pytest.raises(NeverFitsError):
        await read(client, request([1] * 4000, 90, "never"))
    running = []
    for place in range(5):
        running.append(asyncio.create_task(read(client, request([place], 1000, f"r{place}"))))
        while client.progress.num_running + client.progress.num_waiting <= place:
            await asyncio.sleep(0.01)
    with pytest.raises(QueueFullError) as caught:
        await read(client, request([1], 1, "too many"))
    assert caught.value.limit == 5
    os.kill(client.process_id, signal.SIGSTOP)  # it cannot refuse, its server can
    with pytest.raises(QueueFullError, match="open requests"):
        await read(client, request([1], 1, "still too many"))
    os.kill(client.process_id, signal.SIGCONT)
    draining = asyncio.create_task(client.drain(0.3))
    await asyncio.sleep(0.05)
    assert client.state is EngineState.DRAINING
    with pytest.raises(ShutDownError):
        await read(client, request([1], 1, "late"))
    assert await draining is False
    assert [pieces[-1].finish_reason for pieces in await asyncio.gather(*running)] == ["abort"] * 5
    assert client.num_open == 0
    await client.close()
    with pytest.raises(ProcessLookupError):
        os.kill(client.process_id, 0)
