"""The seam between the HTTP side and an engine, wherever that one runs: what may be asked, and what comes back.

Before: the routes have read, checked and tokenised what a client sent. After: an implementation carries it to an engine,
which in production runs in a process of its own. Always: what crosses is plain records of bounded values, prompts are token
ids; each answer of a request that was taken in ends with exactly one finished `Piece`, or all of them with one typed error of
`errors.py`; leaving a stream ends its request within one step.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from enum import Enum
from typing import Any, Protocol

import msgspec

from ..engine.outputs import FinishReason, RequestMetrics, RequestOutput
from ..text.tokenizer_parts import TokenizerParts
from .packed_map import BlockMap


class EngineState(Enum):
    """Where an engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """It finishes what runs and waits, and takes nothing in."""
    DEAD = "dead"
    """It ended without being asked to. A supervisor may bring it back to `STARTING`."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while an engine lives."""

    model: str
    dtype: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int  # tokens
    num_blocks: int
    bytes_per_block: int
    max_num_seqs: int
    max_waiting: int
    max_logprobs: int
    policy: str
    device: str


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt, how its answer is sampled, and how it is treated."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: dict[str, Any]
    """Arguments of `SamplingParams`, already bounded by the routes; checked once more where the engine runs."""
    cache_salt: str | None = None
    tenant: str | None = None
    """From authenticated context; the domain of its block keys."""
    priority: int = 0
    queue_deadline_s: float | None = None
    deadline_s: float | None = None
    is_streamed: bool = True
    """False: one piece at the end."""
    trace_headers: dict[str, str] = {}
    """Of W3C's trace context, as they came."""


class Times(msgspec.Struct, array_like=True):
    """When things happened to a request in the engine: seconds of the machine's monotonic clock, None for what did not."""

    arrived_s: float
    scheduled_s: float | None = None
    """It was admitted for the first time."""
    first_s: float | None = None
    last_s: float | None = None
    """Of its tokens."""
    preempted: list[tuple[float, float]] = []
    """From when to when it had lost its blocks."""


class PieceLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities of a piece's tokens, packed: see `TokenLogprobs`."""

    num_best: int
    ids: bytes  # [N, 1 + num_best] int32
    values: bytes  # [N, 1 + num_best] float32


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities of a prompt's tokens but the first, packed: see `TokenLogprobs`."""

    num_best: int
    ids: bytes  # [N, 1 + num_best] int32
    values: bytes  # [N, 1 + num_best] float32
    ranks: bytes  # [N] int32


class Piece(msgspec.Struct, array_like=True, gc=False):
    """What is new in an answer since the piece before. What a slow reader missed is merged into one piece."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """None while it goes on; the last piece has one."""
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; on every piece."""
    index: int = 0
    """Which answer of its request: `n` in the sampling asks for several."""
    times: Times | None = None
    """On the last piece of a request."""
    logprobs: PieceLogprobs | None = None
    """If they were asked for."""
    prompt_logprobs: PromptLogprobs | None = None
    """If they were asked for, on the first piece of the output that ends a request: it is not streamed."""


AtOnce = Callable[[Piece], bool]
"""Passes a piece on without waiting. Where it cannot, it has done nothing and returns False."""


def passed_on(piece: Piece, at_once: AtOnce | None) -> bool:
    """Whether `at_once` took a piece, which no end is for."""
    return at_once is not None and piece.finish_reason is None and at_once(piece)


def pieces_of(output: RequestOutput) -> list[Piece]:
    """What an engine's output holds of each answer."""
    pieces = []
    for one in output.outputs:
        told, cached = one.token_logprobs, output.num_cached_tokens
        piece = Piece(one.text, list(one.token_ids), one.finish_reason, one.stop_reason, cached, one.index)
        if told is not None:
            piece.logprobs = PieceLogprobs(told.num_best, bytes(told.ids), bytes(told.values))
        pieces.append(piece)
    scored = output.prompt_token_logprobs
    if output.finished and scored is not None:
        packed = (bytes(part) for part in (scored.ids, scored.values, scored.ranks))
        pieces[0].prompt_logprobs = PromptLogprobs(scored.num_best, *packed)
    if output.finished and output.metrics is not None:
        pieces[-1].times = _times_of(output.metrics)
    return pieces


def _times_of(told: RequestMetrics) -> Times:
    return Times(told.arrival_time, told.scheduled_ts, told.first_token_ts, told.last_token_ts, list(told.preempted))


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine moves, as last heard from it: answered at once, never queued behind work."""

    num_running: int
    num_waiting: int
    num_steps: int
    """Steps since the engine started."""
    still_s: float
    """Seconds since a step ended while there is something to do, else 0."""
    heard_s: float
    """Seconds since the engine was last heard of."""


class EngineClient(Protocol):
    """An engine, from the HTTP side. Every method is called on the event loop of the server."""

    @property
    def info(self) -> EngineInfo:
        """Raises `EngineDeadError` before it was ready for the first time."""

    @property
    def state(self) -> EngineState:
        """Where it is in its life."""

    @property
    def progress(self) -> Progress:
        """How it moves."""

    async def read_tokenizer(self) -> TokenizerParts | None:
        """The engine's tokenizer, as `Tokenizer.parts` gives it; None if it has none. The HTTP side needs no torch and
        no files of the model so. Raises `EngineDeadError` before it was ready for the first time."""

    def generate(self, request: EngineRequest, at_once: AtOnce | None = None) -> AsyncGenerator[Piece, None]:
        """Answer one prompt. A piece that is no end, and comes while the caller waits for it, may be offered to `at_once`; what
        that passes on is not yielded. Raises at the first `anext`: `InvalidInputError`, `NeverFitsError`, `QueueFullError`,
        `ShutDownError`; at any time: `EngineDeadError`."""

    async def snapshot(self) -> dict[str, Any]:
        """Every counter and gauge of the engine and its core, by name, as plain numbers, maps and lists: for metrics."""

    async def stall(self) -> dict[str, Any]:
        """Why it may not move, answered without waiting for the step under way: what waits and for what (`waiting`, at most 100
        requests by id, each with `place` and `waits_for`), and where the thread of the steps stands (`stack`, lines of
        text)."""

    async def explain(self, request_id: str) -> dict[str, Any]:
        """A request's timeline: see `AsyncLLM.explain`, also for what it raises."""

    async def block_map(self) -> BlockMap:
        """What every block is doing: see `Scheduler.block_map`."""

    async def block_namings(self, block: int) -> list[dict[str, Any]]:
        """Where running requests name a block: `request_id`, `group`, and `index`, the entry of its table. Raises
        `NoSuchBlockError`."""

    async def reset_prefix_cache(self) -> int:
        """Forget cached prefixes that no running request uses; returns how many blocks forgot theirs."""

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing in any more; returns whether all requests ended by themselves in time. The rest are aborted."""

    async def close(self) -> None:
        """End the engine. Whatever still runs is aborted."""
