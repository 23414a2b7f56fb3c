"""Promise: a grammar is compiled beside everything else, tenant by tenant in turn: orders behind it are carried out meanwhile,
who leaves while his is compiled leaves nothing behind, and an end waits for none."""

import asyncio
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from blocktable.errors import InvalidGrammarError, ShutDownError
from blocktable.server.engine_client import EngineRequest
from blocktable.server.turns import Turns

from .processes import Launch, Served, read, request

COSTLY = {"json": '{"type": "integer", "multipleOf": 99999989}'}


def shaped(shape: dict[str, Any], name: str, **sampling: Any) -> EngineRequest:
    said = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "structured_outputs": shape} | sampling
    return EngineRequest(request_id=name, prompt_token_ids=[5, 6, 7], sampling=said)


def test_texts_have_their_shape_behind_the_socket(served: Served) -> None:
    pieces = served.run(read(served.client, shaped({"choice": ["yes", "no"]}, "a choice", n=3)))
    texts = ["".join(piece.text for piece in pieces if piece.index == index) for index in range(3)]
    assert set(texts) <= {"yes", "no"}
    assert [piece.finish_reason for piece in pieces if piece.finish_reason is not None] == ["stop"] * 3


def test_others_are_answered_while_a_grammar_is_tried(served: Served) -> None:
    async def main() -> None:
        costly = asyncio.ensure_future(read(served.client, shaped(COSTLY, "costly")))
        for place in range(3):
            assert await read(served.client, request([5, 6], 4, f"beside {place}"))
        assert not costly.done()
        with pytest.raises(InvalidGrammarError, match="takes more than"):
            await costly

    served.run(main())


def test_a_deadline_runs_while_others_are_compiled(served: Served) -> None:
    async def main() -> None:
        costly = asyncio.ensure_future(read(served.client, shaped(COSTLY, "costly")))
        await asyncio.sleep(0.05)
        pieces = await read(served.client, replace(shaped({"choice": ["late"]}, "behind"), queue_deadline_s=0.2))
        assert [piece.finish_reason for piece in pieces] == ["refused"]
        with pytest.raises(InvalidGrammarError):
            await costly

    served.run(main())


def leave(served: Served) -> None:
    async def main() -> None:
        before = (await served.client.snapshot())["stats"]["submitted"]
        costly = asyncio.ensure_future(read(served.client, shaped(COSTLY, "costly")))
        await asyncio.sleep(0.05)
        behind = asyncio.ensure_future(read(served.client, shaped({"choice": ["left"]}, "behind")))
        await asyncio.sleep(0.05)
        behind.cancel()
        with pytest.raises(InvalidGrammarError):
            await costly
        # What comes out of the compiler after it shows that it is empty.
        assert await read(served.client, shaped({"choice": ["after"]}, "last"))
        assert (await served.client.snapshot())["stats"]["submitted"] == before + 1

    served.run(main())


def test_who_leaves_while_his_grammar_is_compiled_leaves_nothing_behind(served: Served) -> None:
    leave(served)


@pytest.mark.parametrize("builder", ["build", "build_deaf"])
def test_nothing_is_compiled_for_who_has_left_and_a_drain_waits_for_none(builder: str, launch: Launch, tmp_path: Path) -> None:
    """A drain beyond its time ends what is compiled. `build_deaf` is the planted fault."""
    noted = tmp_path / "grammars"
    own = Served(launch(builder, fake_grammars_file=str(noted)))
    try:
        with nullcontext() if builder == "build" else pytest.raises(AssertionError):
            leave(own)
        left = "left"  # what `leave` asks for and leaves
        assert (left in noted.read_text().split()) is (builder == "build_deaf")
        assert drains_in_time(own) is (builder == "build")
    finally:
        own.close()


def drains_in_time(own: Served) -> bool:
    """Whether a drain ends what is compiled, and what waits behind it, when its time is over."""

    async def main() -> bool:
        asked = [asyncio.ensure_future(read(own.client, shaped(COSTLY, name))) for name in ("compiled", "behind it")]
        await asyncio.sleep(0.2)
        assert not await own.client.drain(0.05)
        have_ended = all(one.done() for one in asked)
        for one in asked:
            one.cancel()
        ends = await asyncio.gather(*asked, return_exceptions=True)
        return have_ended and [type(end) for end in ends] == [ShutDownError] * 2

    return own.run(main())


def order_of_work(monkeypatch: pytest.MonkeyPatch, *, planted: bool) -> list[str]:
    """Of three tenants who bring 3, 2 and 1 pieces of work while the first of them is done."""
    if planted:
        put = Turns.put
        monkeypatch.setattr(Turns, "put", lambda turns, _, work: put(turns, None, work))
    turns, done = Turns("tested"), []
    begun, all_there, over = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        all_there.wait(30)

    turns.put("a", first)
    begun.wait(30)
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        turns.put(name[0], lambda name=name: done.append(name))
    turns.put("d", over.set) if planted else turns.put("a", over.set)
    all_there.set()
    assert over.wait(30)
    return done


@pytest.mark.parametrize("planted", [False, True])
def test_tenants_have_their_turns(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done = order_of_work(monkeypatch, planted=planted)
    assert (done == ["b1", "c1", "a1", "b2", "a2", "a3"]) is not planted


def test_the_costly_grammars_of_one_tenant_hold_up_no_other(served: Served) -> None:
    async def main() -> None:
        costly = [
            asyncio.ensure_future(read(served.client, replace(shaped(COSTLY, f"costly {place}"), tenant="a")))
            for place in range(4)
        ]
        await asyncio.sleep(0.05)
        assert await read(served.client, replace(shaped({"choice": ["other"]}, "another's"), tenant="b"))
        num_done = sum(one.done() for one in costly)
        # What is compiled already waits for nobody, its own tenant's neither.
        assert await read(served.client, replace(shaped({"choice": ["other"]}, "known"), tenant="a"))
        assert [num_done, sum(one.done() for one in costly)] == [1, 1]
        for one in costly:
            one.cancel()
        await asyncio.gather(*costly, return_exceptions=True)

    served.run(main())
