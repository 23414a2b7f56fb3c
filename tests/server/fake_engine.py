"""Owns an engine for tests of the HTTP side alone: it says what it is told to, at the pace it is told.

Before: a test scripts it. After: an `EngineClient`. Always: `ended` has each request that was begun and is over, in whatever
way.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from blocktable.server.engine_client import AtOnce, EngineInfo, EngineRequest, EngineState, Piece, Progress, passed_on
from blocktable.text.tokenizer_parts import TokenizerParts

Say = Callable[[EngineRequest], AsyncGenerator[Piece, None]]


async def letters(request: EngineRequest) -> AsyncGenerator[Piece, None]:
    """Three pieces, a millisecond apart."""
    for text in "abc":
        await asyncio.sleep(0.001)
        yield Piece(text, [1], "stop" if text == "c" else None, None, 0)


class FakeEngine:
    """See `EngineClient`."""

    def __init__(self, say: Say = letters) -> None:
        self.say = say
        self.state = EngineState.READY
        self.begun: list[EngineRequest] = []
        self.ended: list[str] = []
        self.num_pieces = 0
        self.info = EngineInfo(
            model="fake",
            dtype="float32",
            max_model_len=256,
            vocab_size=256,
            eos_token_ids=[],
            block_size=16,
            num_blocks=64,
            bytes_per_block=1,
            max_num_seqs=8,
            max_waiting=8,
            max_logprobs=20,
            policy="fcfs",
            device="cpu",
        )
        self.progress = Progress(num_running=0, num_waiting=0, num_steps=0, still_s=0.0, heard_s=0.0)

    async def generate(self, request: EngineRequest, at_once: AtOnce | None = None) -> AsyncGenerator[Piece, None]:
        self.begun.append(request)
        try:
            async for piece in self.say(request):
                self.num_pieces += 1
                if not passed_on(piece, at_once):
                    yield piece
        finally:
            self.ended.append(request.request_id)

    async def read_tokenizer(self) -> TokenizerParts | None:
        return None

    async def snapshot(self) -> dict[str, Any]:
        return {}

    async def stall(self) -> dict[str, Any]:
        return {"waiting": [], "stack": []}

    async def explain(self, request_id: str) -> dict[str, Any]:
        return {}

    async def reset_prefix_cache(self) -> int:
        return 0

    async def drain(self, timeout_s: float) -> bool:
        self.state = EngineState.DRAINING
        return True

    async def close(self) -> None:
        self.state = EngineState.DEAD
