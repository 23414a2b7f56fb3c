"""What a step brought goes to whose it is: tokens, text, log probabilities, ends.

Before: `step_loop.py` has committed what was sampled. After: `live_request.py` has put it into inboxes. Always: a token counts
before anybody is told of it; an answer's last token and its end are told together.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .._core import Commit, Scheduler
from ..sampling.logprobs import StepLogprobs
from ..sampling.sampler import NO_TOKEN, Sampled
from .live_request import LiveRequest
from .output_rows import SavedOutputs
from .prompt_scores import NoDistributionError, PromptRows
from .roster import Roster
from .under_way import UnderWay

logger = logging.getLogger("blocktable.engine")


class HandOut:
    """Used by whoever has the turn of the loop."""

    def __init__(self, scheduler: Scheduler, roster: Roster) -> None:
        self._scheduler = scheduler
        self._roster = roster

    def take(self, step: UnderWay, sampled: Sampled, done: Commit, now_ns: int) -> None:
        """Record what a step brought: tokens, text, ends."""
        rows, children, ids, logprobs = step.rows, step.children, sampled.ids, sampled.logprobs
        if done.num_accepted < len(ids):
            # Some entries brought no token, or one that no longer counts: its request was aborted meanwhile, or was put back
            # because it shared a block that was withdrawn, and will be sampled again.
            kept = ids != NO_TOKEN
            kept[done.dropped] = False
            rows, ids = rows[kept], ids[kept]
            children = None if children is None else children[kept]
            logprobs = None if logprobs is None else logprobs.without(~kept)
        if logprobs is not None:
            self._note_logprobs(step, logprobs)
        ended: dict[int, int] = dict(done.ended.tolist()) if len(done.ended) else {}
        if children is not None:
            later, own = children > 0, children == 0
            self._part(rows[later], ids[later], children[later], now_ns, ended)
            rows, ids = rows[own], ids[own]
        self._roster.rows.take(rows, ids, now_ns)
        for request, token_id in self._roster.rows.speaking(rows, ids):
            code = ended.pop(request.id, None)
            if code is None and request.is_plain:
                request.speak(token_id)
            else:
                self._speak(request, token_id, code)
        for number, code in ended.items():
            self._roster.end(self._roster.of(number), code)

    def _note_logprobs(self, step: UnderWay, told: StepLogprobs) -> None:
        """Give each answer the log probabilities of its new token, before anybody is told of that."""
        rows = step.rows[told.entries].tolist()
        children = [0] * len(rows) if step.children is None else step.children[told.entries].tolist()
        for place, (row, child) in enumerate(zip(rows, children)):
            request = self._roster.rows.at(row)
            if child and request is not None:
                request = None if request.family is None else request.family.members[child]
            if request is not None and request.logprobs is not None:
                request.logprobs.add(told, place)

    def note_scores(self, scored: PromptRows) -> None:
        """Give each prompt its log probabilities; where one has none, its request ends."""
        for request, position in self._roster.rows.note_scores(scored):
            if not request.is_ended:
                self._roster.end_with_error(request, NoDistributionError(position))

    def _part(
        self,
        rows: NDArray[np.int32],
        ids: NDArray[np.int64],
        children: NDArray[np.int64],
        now_ns: int,
        ended: dict[int, int],
    ) -> None:
        """The prompt of requests for several answers is computed: the first tokens of all but the first answer, which have no
        row of their own yet. Takes what it tells out of `ended`."""
        for row, token_id, child in zip(rows.tolist(), ids.tolist(), children.tolist()):
            first = self._roster.rows.at(row)
            if first is None or first.family is None:
                continue
            first.family.has_parted = True
            request = first.family.members[child]
            request.num_cached, request.scheduled_ns = first.num_cached, first.scheduled_ns
            request.saved = SavedOutputs(np.array([token_id], dtype=np.int32), now_ns, now_ns)
            code = ended.pop(request.id, None)
            if request.is_heard:
                self._speak(request, token_id, code)
            elif code is not None:
                self._roster.end(request, code)

    def _speak(self, request: LiveRequest, token_id: int, code: int | None) -> None:
        """Bring text and grammar of a request on by a token; end it if the core did (`code`), or if one of them is complete."""
        by_token = code is not None and request.is_end_token(code, [token_id])
        piece = request.take_token(token_id, ended_by_token=by_token)
        if code is None:
            code = self._end_of_text(request, token_id)
        if code is not None:
            self._roster.end(request, code, piece=piece, is_new=True)
        elif request.is_streamed:
            request.give(piece, token_id)

    def _end_of_text(self, request: LiveRequest, token_id: int) -> int | None:
        """The code of the end that a stop string brings, or a grammar after which nothing can follow."""
        code, guide = None, request.guide
        if request.text is not None and request.text.stop_string is not None:
            code = _core.END_FINISHED_STOP
        elif guide is not None:
            guide.take(token_id)
            if guide.failure is not None:
                logger.warning("request %d ends: its grammar cannot go on: %s", request.id, guide.failure)
                code = _core.END_ABORTED
            elif guide.is_over:
                code = _core.END_FINISHED_STOP
        if code is not None:
            self._scheduler.finish(request.id)
        return code
