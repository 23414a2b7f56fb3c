"""The answers of one request that asked for several: who they are, and when it is over.

Before: `roster.py` adds a request with `n` above 1. After: its callers get outputs that name their answer by `index`.
Always: the request is finished once, with the last of its answers; what did not stream comes in one output, in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from .live_request import LiveRequest


class Family:
    """Of one request. The core numbers its sequences from that of the first one on."""

    __slots__ = ("_ended", "has_parted", "members")

    def __init__(self) -> None:
        self.members: list[LiveRequest] = []
        """All of them, in the order of their answers, ended ones too."""
        self.has_parted = False
        """The prompt is computed: from here on the core knows each sequence of its own."""
        self._ended: list[RequestOutput] = []

    @property
    def live(self) -> list[LiveRequest]:
        """Those that have not ended."""
        return [member for member in self.members if not member.is_ended]

    def end(self, output: RequestOutput, *, is_streamed: bool) -> RequestOutput | None:
        """One of its answers ended with `output`: what its caller gets of that now."""
        self._ended.append(output)
        output.finished = len(self._ended) == len(self.members)
        if is_streamed:
            if output.finished:
                output.metrics = self._metrics()
            return output
        if not output.finished:
            return None
        output.outputs = sorted((one.outputs[0] for one in self._ended), key=lambda answer: answer.index)
        output.metrics = self._metrics()
        return output

    def _metrics(self) -> RequestMetrics:
        """From the first token of any to the last of any; counts are of all together."""
        all_of = [one.metrics for one in self._ended if one.metrics is not None]
        first = [one.first_token_ts for one in all_of if one.first_token_ts is not None]
        last = [one.last_token_ts for one in all_of if one.last_token_ts is not None]
        return RequestMetrics(
            arrival_time=all_of[0].arrival_time,
            scheduled_ts=all_of[0].scheduled_ts,
            first_token_ts=min(first, default=None),
            last_token_ts=max(last, default=None),
            num_generation_tokens=sum(one.num_generation_tokens for one in all_of),
            num_preemptions=sum(one.num_preemptions for one in all_of),
            preempted=sorted(while_lost for one in all_of for while_lost in one.preempted),
        )
