"""The door of the engine for programs that do other things meanwhile: many callers, each with a stream of its own.

Before: a caller, on an event loop or a thread, names a model and options as for `LLM`. After: `step_thread.py` runs what was
asked, beside everybody else's. Always: bad input is refused with a typed error and touches nobody; whoever leaves a stream has
its request ended and its blocks free within one step; an event loop is never held up, neither by a step nor by a long prompt;
nobody waits for an engine that died.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, Unpack

from .._core import Scheduler
from ..checks import text
from ..errors import EngineDeadError, InvalidInputError
from ..retention import KvCacheRetentionConfig
from ..sampling.params import RequestOutputKind, SamplingParams
from ..text.tokenizer import Tokenizer
from .build import Engine, build_engine
from .config import EngineConfig
from .cpu_budget import usable_cpus
from .intake import Job, Wishes, WishOptions
from .mailbox import AsyncMailbox, BlockingMailbox, Mailbox
from .outputs import RequestOutput
from .report import KVReport, make_report
from .step_thread import StepThread, Ticket

LONG_PROMPT = 1000
"""Characters or token ids from which on a prompt is read beside the event loop: shorter ones take well under a millisecond."""

MAX_READERS = 4
"""Threads that read long prompts, at most; fewer where there are fewer CPUs."""


class AsyncLLM:
    """A model, its engine, and a thread that runs its steps. `model`, the options and what they raise: see `LLM`.

    Every method may be called from any thread and any event loop. After a fork the child has to make a new one: there
    everything raises `EngineDeadError`. Dropping the last reference ends the engine, as `shutdown` does.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **options: Any) -> None:
        engine = build_engine(model, tokenizer, options)
        if engine.grammars is not None:
            engine.grammars.prepare()
        self._engine = engine
        self._intake = engine.intake
        self._readers = ThreadPoolExecutor(max(1, min(usable_cpus() - 1, MAX_READERS)), "blocktable-prompts")
        self._thread = StepThread(engine.loop, engine.close)
        # Not at exit, when the thread is also waited for.
        weakref.finalize(self, self._thread.stop).atexit = False
        self._thread.start()

    @property
    def config(self) -> EngineConfig:
        """What the engine was built from, with what the model left to decide."""
        return self._engine.config

    @property
    def engine(self) -> Engine:
        """What was built: to look at, as a server does, not to drive."""
        return self._engine

    @property
    def step_thread(self) -> StepThread:
        """The thread that runs the steps: to look at, likewise."""
        return self._thread

    @property
    def scheduler(self) -> Scheduler:
        """The core's scheduler: to look at (`stats`, `audit`), not to drive."""
        return self._engine.loop.scheduler

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **wishes: Unpack[WishOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt: outputs as they come, the last with `finished` set.

        `prompt`: as in `LLM.generate`, but one. What an output holds says `sampling_params.output_kind`; a reader that comes
        late finds what it missed merged into one output. `request_id` is how the outputs and `abort` call it; None = one that
        nobody has. `wishes` are the fields of `intake.Wishes`: `tenant`, `priority`,
        `queue_deadline_s`, `deadline_s`.

        Leaving the generator (by `break`, an exception, a cancelled task) ends the request within one step. A generator that
        is left by `break` is closed when its last reference goes; `contextlib.aclosing` closes it at once.

        Raises, at the first `anext`: `InvalidInputError`, `NeverFitsError`, `QueueFullError`, `ShutDownError`; at any time:
        `EngineDeadError`. Requests that a shutdown overtakes end with the finish reason `abort`.
        """

        def read() -> Job:
            return self._intake.job(prompt, sampling_params, Wishes.of(wishes))

        return self._answers(read, sampling_params, request_id, is_long=_is_long(prompt) or _is_shaped(sampling_params))

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        cache_salt: str | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        **wishes: Unpack[WishOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, a list of messages with `role` and `content`, as `generate` does."""

        def read() -> Job:
            prompts = self._intake.read_chats(
                messages,
                add_generation_prompt=add_generation_prompt,
                cache_salt=cache_salt,
                kv_cache_retention_config=kv_cache_retention_config,
            )
            return self._intake.only_job(messages, prompts, sampling_params, Wishes.of(wishes))

        # A template is a program: nobody knows how long it takes.
        return self._answers(read, sampling_params, request_id, is_long=True)

    def generate_blocking(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **wishes: Unpack[WishOptions],
    ) -> Iterator[RequestOutput]:
        """As `generate`, for a thread without an event loop: it sleeps between the outputs. Queued at the first `next`."""
        self._thread.check()
        job = self._intake.job(prompt, sampling_params, Wishes.of(wishes))
        name = self._thread.name(request_id)
        mailbox = BlockingMailbox(self._thread.outbox, name, _kind(sampling_params))
        claim = self._claim(mailbox, job)
        try:
            while True:
                output = mailbox.get()
                claim.is_over = output.finished
                yield output
                if output.finished:
                    return
        finally:
            claim.give_up()

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests, in whatever state they are, within one step: their last output comes with the finish reason `abort`.

        Never waits. Ids of requests that have ended, or never were, are passed over.
        """
        is_one = isinstance(request_id, str) or not isinstance(request_id, Iterable)
        names: list[Any] = [request_id] if is_one else list(request_id)
        for name in names:
            text("request_id", name)
        for name in names:
            ticket = self._thread.find(name)
            if ticket is not None:
                self._thread.abort(ticket)

    def explain(self, request_id: str) -> dict[str, Any]:
        """What happened to a request and what it waits for now: see `Scheduler.explain`.

        Known of live requests and of the last 1,024 that ended; raises `InvalidInputError` for others, `UnknownRequestError`
        where the core has forgotten it.
        """
        number = self._thread.number_of(request_id) if isinstance(request_id, str) else None
        if number is None:
            raise InvalidInputError("request_id", request_id, "is not known, not yet or not any more")
        return self.scheduler.explain(number)

    def block_namings(self, block: int) -> list[dict[str, Any]]:
        """Where running requests name a block of the pool: `request_id`, `group`, and `index`, the entry of its table.

        Raises `NoSuchBlockError`."""
        return self._thread.block_namings(block)

    async def get_tokenizer(self) -> Tokenizer:
        """Encodes, decodes and renders chats, from any thread. Raises `InvalidInputError` if the engine has none."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise InvalidInputError("tokenizer", None, "this engine has no tokenizer")
        return tokenizer

    @property
    def is_running(self) -> bool:
        """Whether it takes requests in."""
        return self._thread.is_running

    @property
    def is_stopped(self) -> bool:
        """Whether it takes none in any more."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine died."""
        return self._thread.error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What the engine died of; None while it lives, and after a shutdown."""
        return self._thread.error

    async def check_health(self) -> None:
        """Raises `EngineDeadError` or `ShutDownError` if it takes no requests in any more. See also `stalled_s`."""
        self._thread.check()

    @property
    def stalled_s(self) -> float:
        """Seconds since a step ended, while there is something to do, else 0.0. A step that hangs shows here."""
        return self._thread.still_s()

    async def pin(self, prompt: Any, *, tenant: str | None = None) -> tuple[int, int]:
        """Hold the longest cached prefix of one prompt until `unpin`: see `LLM.pin`."""
        read, wishes = self._intake.only(prompt, self._intake.read(prompt)), Wishes(tenant=tenant)
        return await asyncio.wrap_future(self._thread.call(lambda: self._engine.loop.pin(read, wishes)))

    async def unpin(self, pin: int) -> None:
        """Give the blocks of a pin back. Raises `InvalidInputError` if there is no such pin any more."""
        await asyncio.wrap_future(self._thread.call(lambda: self._engine.loop.unpin(pin)))

    async def reset_prefix_cache(self) -> int:
        """Forget cached prefixes that no running request uses; returns how many blocks forgot theirs."""
        return await asyncio.wrap_future(self._thread.call(self._engine.loop.reset_prefix_cache))

    def kv_report(self) -> KVReport:
        """How the KV blocks were used since the engine started, and what planning cost."""
        stats, sizing = self.scheduler.stats(), self._engine.sizing
        times = self._engine.loop.times
        return make_report(stats, times, block_size=sizing.block_size, bytes_per_block=sizing.bytes_per_block)

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """End every request, the thread, and give the memory back; returns whether that was over in time.

        It waits for the step under way (on an event loop: `await asyncio.to_thread(engine.shutdown)`, or `async with`).
        What ran ends with the finish reason `abort`; what was not queued yet is refused with `ShutDownError`. The second time
        it does nothing.
        """
        self._thread.stop()
        self._readers.shutdown(wait=False)
        return self._thread.join(timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    async def _answers(
        self, read: Callable[[], Job], params: Any, request_id: str | None, *, is_long: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of the job that `read` makes, on another thread if that `is_long`."""
        self._thread.check()
        job = await self._beside(read) if is_long else read()
        mailbox = AsyncMailbox(self._thread.outbox, self._thread.name(request_id), _kind(params))
        claim = self._claim(mailbox, job)
        try:
            while True:
                output = await mailbox.get()
                claim.is_over = output.finished
                yield output
                if output.finished:
                    return
        finally:
            claim.give_up()

    async def _beside(self, read: Callable[[], Job]) -> Job:
        try:
            reading = asyncio.get_running_loop().run_in_executor(self._readers, read)
        except RuntimeError:
            self._thread.check()  # it was shut down since the last check
            raise
        return await reading

    def _claim(self, mailbox: Mailbox, job: Job) -> _Claim:
        ticket = Ticket(mailbox=mailbox, job=job, kind=mailbox.kind)
        self._thread.submit(ticket)
        return _Claim(self._thread, ticket)


class _Claim:
    """Somebody reads this request. When that one is gone, in whatever way, the request is ended."""

    __slots__ = ("_thread", "_ticket", "is_over")

    def __init__(self, thread: StepThread, ticket: Ticket) -> None:
        self._thread = thread
        self._ticket = ticket
        self.is_over = False

    def give_up(self) -> None:
        """Nobody reads it any more."""
        if not self.is_over:
            self.is_over = True
            self._thread.abort(self._ticket)

    # A generator on an event loop that was closed is never closed itself, only forgotten.
    __del__ = give_up


def _kind(params: Any) -> RequestOutputKind:
    return params.output_kind if isinstance(params, SamplingParams) else RequestOutputKind.CUMULATIVE


def _is_long(prompt: Any) -> bool:
    """Whether reading it takes long enough to be noticed by others."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    return isinstance(prompt, str | Sequence) and len(prompt) >= LONG_PROMPT


def _is_shaped(params: SamplingParams | None) -> bool:
    """Whether a grammar has to be compiled."""
    return isinstance(params, SamplingParams) and params.structured_outputs is not None
