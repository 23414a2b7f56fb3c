"""Who has asked: every request of one engine, from the moment that the core accepts it until its row is free.

Before: `step_loop.py` has a job, or a plan that says who got a row and who lost one. After: `live_request.py` for each answer,
`running_rows.py` for those that run. Always: whoever is added ends exactly once; what the core has forgotten is forgotten here.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from .. import _core
from .._core import Plan, Scheduler
from ..sampling.params import child_seed
from ..sampling.random_numbers import SeedSource
from ..sampling.sampler import Sampler
from ..text.output_text import OutputText
from ..text.tokenizer import Tokenizer
from .family import Family
from .inbox import Inbox
from .intake import Job
from .live_request import LiveRequest
from .prompt_scores import PromptScores
from .running_rows import RunningRows
from .token_logprobs import LogprobLog

logger = logging.getLogger("blocktable.engine")


class Roster:
    """Used by whoever has the turn of the loop."""

    def __init__(
        self, *, scheduler: Scheduler, sampler: Sampler, tokenizer: Tokenizer | None, seeds: SeedSource, num_rows: int
    ) -> None:
        self.rows = RunningRows(num_rows, sampler)
        self.num_live = 0
        """Answers that have not ended."""
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._seeds = seeds
        self._requests: dict[int, LiveRequest] = {}
        self._families: dict[int, Family] = {}  # by the number of the request: those that are not over

    @property
    def is_empty(self) -> bool:
        """Whether all have ended and their rows are free."""
        return not self._requests

    def all(self) -> list[LiveRequest]:
        """Those too that have ended and whose rows are not free."""
        return list(self._requests.values())

    def of(self, number: int) -> LiveRequest:
        """The answer that the core calls so."""
        return self._requests[number]

    def add(self, job: Job, inbox: Inbox, *, is_streamed: bool, came_ns: int, now_ns: int, request_id: str | None) -> int:
        """Queue a request: see `StepLoop.add`, also for what it raises."""
        prompt, sampling, wishes = job.prompt, job.sampling, job.wishes
        number = self._scheduler.submit(
            prompt.array,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.end_token_ids,
            domain=wishes.tenant,
            # Rows that are to be scored have to be computed: what nobody has a key of is found by nobody.
            cache_salt=prompt.cache_salt if sampling.num_prompt_logprobs is None else secrets.token_hex(16),
            retention=prompt.retention,
            priority=wishes.priority,
            queue_deadline_us=wishes.due_us(wishes.queue_deadline_s, came_ns, now_ns),
            deadline_us=wishes.due_us(wishes.deadline_s, came_ns, now_ns),
            n=sampling.n,
            now_us=now_ns // 1000,
        )
        needs_text = is_streamed or bool(sampling.stop)
        seed = self._seeds.draw() if sampling.seed is None else sampling.seed
        family = Family() if sampling.n > 1 else None
        num_best = sampling.num_prompt_logprobs
        scores = None if num_best is None else PromptScores(prompt.array, num_best)
        for index in range(sampling.n):
            member = self._requests[number + index] = LiveRequest(
                id=number + index,
                request_id=str(number) if request_id is None else request_id,
                prompt=prompt,
                sampling=sampling,
                seed=child_seed(seed, index),
                inbox=inbox,
                is_streamed=is_streamed,
                arrived_ns=came_ns,
                text=OutputText(self._tokenizer, prompt.token_ids, sampling) if needs_text else None,
                index=index,
                family=family,
                logprobs=None if sampling.num_logprobs is None else LogprobLog(sampling.num_logprobs),
                prompt_scores=scores,
                tokenizer=self._tokenizer,
                guide=None if job.grammar is None else job.grammar.guide(sampling.eos_token_ids),
            )
            if family is not None:
                family.members.append(member)
        if family is not None:
            self._families[number] = family
        self.num_live += sampling.n
        return number

    def apply(self, plan: Plan) -> None:
        """Keep the rows as the plan says: who left first, who came after."""
        for number, code in plan.ended.tolist():
            self.forget(number, code)
        for number, child in plan.preempted.tolist():
            self._leave_row(number + child)
        for number, child, row in plan.admitted.tolist():
            self._enter_row(number + child, row)

    def forget(self, number: int, code: int) -> None:
        """The core knows an answer no more, which ended with `code`; or, before they have parted, all of its request."""
        request = self._requests.get(number)
        if request is None:
            return
        family = request.family
        # Before its answers have parted, the core knows the first one only.
        members = [request] if family is None or family.has_parted else family.members
        for member in members:
            if not member.is_ended:
                self.end(member, code)
            self.rows.leave(member)
            del self._requests[member.id]

    def _leave_row(self, number: int) -> None:
        request = self._requests.get(number)
        if request is not None:
            request.loses(time.perf_counter_ns())
            self.rows.leave(request)

    def _enter_row(self, number: int, row: int) -> None:
        request = self._requests.get(number)
        if request is None:
            # An interrupt fell between its submit and our note of it: nobody waits for it.
            self._scheduler.abort(number)
            return
        request.enters(time.perf_counter_ns())
        self.rows.enter(request, row)
        if request.num_cached is None:
            request.num_cached = self._scheduler.num_cached_tokens(number)

    def end(self, request: LiveRequest, code: int, **new: Any) -> None:
        """Hand out the last output. Its row stays until a plan says that it is free."""
        self.num_live -= 1
        if request.num_cached is None:
            request.num_cached = 0
        request.end(code, self.rows.outputs_of(request), **new)
        if request.family is not None and not request.family.live:
            del self._families[request.family.members[0].id]

    def live(self, number: int) -> list[LiveRequest]:
        """Those of a request that have not ended."""
        family = self._families.get(number)
        if family is not None:
            return family.live
        request = self._requests.get(number)
        return [] if request is None or request.is_ended else [request]

    def end_with_error(self, request: LiveRequest, error: Exception) -> None:
        """It ends, and with it all answers of its request."""
        number = request.id - request.index
        logger.error("request %d ends with an error: %r", number, error)
        self._scheduler.abort(number)
        for member in self.live(number):
            member.error = error
            self.end(member, _core.END_ABORTED)
