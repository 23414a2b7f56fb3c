"""The door of the engine: prompts in, answers out, from Python.

Before: a caller names a model and options. After: `batch.py` and `step_loop.py` run what was asked. Always: bad input is
refused with a typed error before anything is queued, and the engine goes on; two engines in a process share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from types import TracebackType
from typing import Any, Self, Unpack

from .._core import Scheduler
from ..checks import text
from ..errors import InvalidInputError
from ..retention import KvCacheRetentionConfig
from ..sampling.params import SamplingParams
from .batch import Batch, Stream
from .build import Engine, build_engine
from .config import EngineConfig
from .inbox import OutputQueue
from .intake import Job, Wishes, WishOptions
from .outputs import RequestOutput
from .report import KVReport, make_report


class LLM:
    """A model and its engine.

    `model` is a local directory, a hub id, a GGUF file, or a transformers model in memory; the options are those of
    `EngineConfig`. Raises `UnknownOptionError`, `InvalidInputError`, `ModelLoadError`, `UnsupportedModelError`.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **options: Any) -> None:
        self._engine: Engine | None = build_engine(model, tokenizer, options)
        self._inbox = OutputQueue()

    @property
    def config(self) -> EngineConfig:
        """What the engine was built from, with what the model left to decide."""
        return self._open.config

    @property
    def scheduler(self) -> Scheduler:
        """The core's scheduler: to look at (`stats`, `audit`), not to drive."""
        return self._open.loop.scheduler

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work."""
        tokenizer = self._open.tokenizer
        return tokenizer is not None and tokenizer.has_chat_template

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        **wishes: Unpack[WishOptions],
    ) -> list[RequestOutput]:
        """Answer every prompt; the results stand in the order of the prompts.

        `prompts`: a text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a list of those; a dictionary may have a
        `cache_salt`, and shares cached blocks only with equal salts, and a `kv_cache_retention_config`
        (`blocktable.retention`), which says how long its blocks stay cached. `sampling_params`: one for all, or one for each
        prompt. `wishes` are the fields of `intake.Wishes`, for all of them: `tenant`, `priority`, `queue_deadline_s`,
        `deadline_s`. Raises `InvalidInputError` or `NeverFitsError` for any bad one, before any runs.
        """
        intake = self._open.intake
        return self._run(intake.jobs(intake.read(prompts), sampling_params, Wishes.of(wishes)), use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        add_generation_prompt: bool = True,
        cache_salt: str | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        **wishes: Unpack[WishOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages with `role` and `content`) or a list of them, as `generate` does.

        `cache_salt` and `kv_cache_retention_config` are those of every prompt of the call.
        """
        intake = self._open.intake
        prompts = intake.read_chats(
            messages,
            add_generation_prompt=add_generation_prompt,
            cache_salt=cache_salt,
            kv_cache_retention_config=kv_cache_retention_config,
        )
        return self._run(intake.jobs(prompts, sampling_params, Wishes.of(wishes)), use_tqdm)

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **wishes: Unpack[WishOptions],
    ) -> Stream:
        """As `generate`, but yields (place of the prompt, output) for every token as it comes.

        An output's `text` and `token_ids` are what is new; the one with `finished` set is the last of its prompt and
        brings reason and metrics. Everything is checked and queued before this returns. Closing the iterator ends its
        requests.
        """
        intake = self._open.intake
        return self._stream(intake.jobs(intake.read(prompts), sampling_params, Wishes.of(wishes)))

    def stream_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        cache_salt: str | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        **wishes: Unpack[WishOptions],
    ) -> Stream:
        """As `stream`, for one conversation or a list of them."""
        intake = self._open.intake
        prompts = intake.read_chats(
            messages,
            add_generation_prompt=add_generation_prompt,
            cache_salt=cache_salt,
            kv_cache_retention_config=kv_cache_retention_config,
        )
        return self._stream(intake.jobs(prompts, sampling_params, Wishes.of(wishes)))

    def add_request(self, prompt: Any, sampling_params: SamplingParams | None = None, **wishes: Unpack[WishOptions]) -> str:
        """Queue one prompt for `step`; returns its request id.

        Raises `InvalidInputError`, `NeverFitsError`, or `QueueFullError`; nothing is queued then.
        """
        job = self._open.intake.job(prompt, sampling_params, Wishes.of(wishes))
        return str(self._open.loop.add(job, self._inbox))

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests of `add_request` that have ended since the last call.

        After `shutdown` it runs none and returns those that this ended, once.
        """
        if self._engine is not None or not self._inbox:
            self._open.loop.step()
        ended = list(self._inbox)
        self._inbox.clear()
        return ended

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to run or to return."""
        engine = self._engine
        return bool(self._inbox) or (engine is not None and engine.loop.has_unfinished)

    def abort(self, request_id: str) -> bool:
        """End a request, from any thread: its output comes with the finish reason `abort`. False if it has ended already."""
        text("request_id", request_id)
        return request_id.isdecimal() and self._open.loop.abort(int(request_id))

    def abort_all(self) -> None:
        """End every request, of whoever; all KV blocks are free then."""
        self._open.loop.abandon()

    def explain(self, request_id: str) -> dict[str, Any]:
        """What happened to a request and what it waits for now, in words (`text`) and as data: see `Scheduler.explain`.

        Known of live requests and of the last 1,024 that ended; raises `UnknownRequestError` for others.
        """
        text("request_id", request_id)
        if not request_id.isdecimal():
            raise InvalidInputError("request_id", request_id, "must be an id that add_request gave")
        return self._open.loop.scheduler.explain(int(request_id))

    def kv_report(self) -> KVReport:
        """How the KV blocks were used since the engine started, and what planning cost."""
        engine = self._open
        stats, sizing = engine.loop.scheduler.stats(), engine.sizing
        return make_report(stats, engine.loop.times, block_size=sizing.block_size, bytes_per_block=sizing.bytes_per_block)

    def pin(self, prompt: Any, *, tenant: str | None = None) -> tuple[int, int]:
        """Hold the longest cached prefix of one prompt, in whole blocks, until `unpin`: nothing evicts it.

        Returns the pin's number and the tokens that it holds. `prompt` and `tenant` as in `generate`, `cache_salt`
        included. Raises `PinBudgetError` (needed, pinned, budget: blocks) if all pins would hold more than `pin_budget`
        blocks, `OutOfBlocksError`, or `InvalidInputError`, also if nothing of it is cached; nothing changes then.
        """
        intake = self._open.intake
        return self._open.loop.pin(intake.only(prompt, intake.read(prompt)), Wishes(tenant=tenant))

    def unpin(self, pin: int) -> None:
        """Give the blocks of a pin back. Raises `InvalidInputError` if there is no such pin any more."""
        self._open.loop.unpin(pin)

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes that no running request uses; returns how many blocks forgot theirs."""
        return self._open.loop.reset_prefix_cache()

    def shutdown(self) -> None:
        """Abort what runs and give the memory back. The second time it does nothing. `step` tells of requests of
        `add_request` that this ended.

        A call of another thread whose prompts were not all queued yet raises `ShutDownError`; any other brings what there is.
        """
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    @property
    def _open(self) -> Engine:
        if self._engine is None:
            raise InvalidInputError("LLM", "shut down", "the engine was shut down: make a new one")
        return self._engine

    def _run(self, jobs: Sequence[Job], use_tqdm: bool) -> list[RequestOutput]:
        results: dict[int, RequestOutput] = {}
        with _progress_bar(len(jobs)) if use_tqdm else nullcontext() as bar, Batch(self._open.loop, jobs) as batch:
            for place, output in batch.outputs():
                results[place] = output
                if bar is not None:
                    bar.update()
        return [results[place] for place in range(len(jobs))]

    def _stream(self, jobs: Sequence[Job]) -> Stream:
        return Stream(Batch(self._open.loop, jobs, is_streamed=True))


def _progress_bar(total: int) -> Any:
    """A bar with one tick for each prompt that has ended."""
    return import_module("tqdm").tqdm(total=total, desc="prompts", unit="prompt", dynamic_ncols=True)
