"""Promise: a grammar is compiled beside everything else: orders behind it are carried out meanwhile, and who leaves while his
is compiled leaves nothing behind."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from blocktable.errors import InvalidGrammarError
from blocktable.server.engine_client import EngineRequest

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
        pieces = await read(served.client, replace(shaped({"choice": ["yes"]}, "behind"), queue_deadline_s=0.2))
        assert [piece.finish_reason for piece in pieces] == ["refused"]
        with pytest.raises(InvalidGrammarError):
            await costly

    served.run(main())


def leave(served: Served) -> None:
    async def main() -> None:
        before = (await served.client.snapshot())["stats"]["submitted"]
        costly = asyncio.ensure_future(read(served.client, shaped(COSTLY, "costly")))
        await asyncio.sleep(0.05)
        behind = asyncio.ensure_future(read(served.client, shaped({"choice": ["yes"]}, "behind")))
        await asyncio.sleep(0.05)
        behind.cancel()
        with pytest.raises(InvalidGrammarError):
            await costly
        # What comes out of the compiler after it shows that it is empty.
        assert await read(served.client, shaped({"choice": ["no"]}, "last"))
        assert (await served.client.snapshot())["stats"]["submitted"] == before + 1

    served.run(main())


def test_who_leaves_while_his_grammar_is_compiled_leaves_nothing_behind(served: Served) -> None:
    leave(served)


def test_a_process_that_hears_no_abort_meanwhile_is_caught(launch: Launch) -> None:
    planted = Served(launch("build_deaf"))
    try:
        with pytest.raises(AssertionError):
            leave(planted)
    finally:
        planted.close()


@pytest.mark.parametrize("builder", ["build", "build_deaf"])
def test_nothing_is_compiled_for_who_has_left(builder: str, launch: Launch, tmp_path: Path) -> None:
    """`build_deaf` is the planted fault."""
    noted = tmp_path / "grammars"
    served = Served(launch(builder, fake_grammars_file=str(noted)))
    try:
        with nullcontext() if builder == "build" else pytest.raises(AssertionError):
            leave(served)
    finally:
        served.close()
    left = "yes"  # what `leave` asks for and leaves
    assert (left in noted.read_text().split()) is (builder == "build_deaf")
