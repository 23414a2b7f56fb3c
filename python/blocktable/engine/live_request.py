"""One sequence from the moment it is queued to its end: what was asked, where it runs, what it gives back.

Before: `roster.py` makes one when the core has accepted a prompt. After: the `RequestOutput` that its caller reads.
Always: it is ended exactly once, and its request gives back exactly one output that is finished. A request for several answers
has several of these, in a `Family`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import _core
from ..sampling.guide import Guide
from ..sampling.params import ResolvedSampling
from ..text.output_text import OutputText
from ..text.tokenizer import Tokenizer
from .family import Family
from .inbox import Inbox
from .output_rows import NO_OUTPUTS, SavedOutputs
from .outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from .prompt_scores import PromptScores
from .request import Prompt
from .token_logprobs import LogprobLog

NANOSECONDS = 1_000_000_000

ABORTS = {_core.END_ABORTED_DEADLINE: "deadline", _core.END_ABORTED_CAPACITY: "capacity"}
"""Why the core aborted what nobody asked to abort."""


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """`id` is the core's, of the sequence. Times are nanoseconds of `time.perf_counter_ns`."""

    id: int
    request_id: str
    """What its caller calls it."""
    prompt: Prompt
    sampling: ResolvedSampling
    seed: int
    inbox: Inbox
    is_streamed: bool
    arrived_ns: int
    text: OutputText | None
    """Runs along with a request that streams or has stop strings; the others' text is made at the end."""
    row: int | None = None
    """Row of the plan's tables, while it has one."""
    saved: SavedOutputs = NO_OUTPUTS
    """Outputs while it has no row."""
    num_cached: int | None = None
    num_preemptions: int = 0
    scheduled_ns: int | None = None
    """When it was admitted for the first time."""
    lost_ns: int | None = None
    """When it lost its row, while it has none again."""
    preempted: list[tuple[float, float]] = field(default_factory=list, repr=False)
    """See `RequestMetrics.preempted`."""
    error: Exception | None = field(default=None, repr=False)
    """Why it ended with an error."""
    is_ended: bool = False
    index: int = 0
    """Which answer of its request it is."""
    guide: Guide | None = field(default=None, repr=False)
    """Where it stands in the grammar that its text follows."""
    family: Family | None = field(default=None, repr=False)
    """All answers of its request, if there are several."""
    logprobs: LogprobLog | None = None
    """Of its output tokens, if it asked for them."""
    prompt_scores: PromptScores | None = None
    """Of its prompt's tokens, if it asked for them; all answers of a request have the same ones."""
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    is_plain: bool = field(init=False)
    """It streams text and tokens and nothing else, and nothing in its text ends it."""

    def __post_init__(self) -> None:
        has_more = self.guide is not None or self.logprobs is not None or self.prompt_scores is not None
        self.is_plain = self.is_streamed and not has_more and not self.sampling.stop

    def enters(self, now_ns: int) -> None:
        """It gets a row."""
        if self.scheduled_ns is None:
            self.scheduled_ns = now_ns
        if self.lost_ns is not None:
            self.preempted.append((self.lost_ns / NANOSECONDS, now_ns / NANOSECONDS))
            self.lost_ns = None

    def loses(self, now_ns: int) -> None:
        """It was preempted."""
        self.num_preemptions += 1
        self.lost_ns = now_ns

    def speak(self, token_id: int) -> None:
        """Hand out a token of a plain one, which does not end it."""
        text = "" if self.text is None else self.text.push_token(token_id)
        self.inbox.append_token(self, text, token_id)

    def take_token(self, token_id: int, *, ended_by_token: bool) -> str:
        """One more output token of a request whose text runs along: the piece of text that it made whole, perhaps none."""
        return "" if self.text is None else self.text.push((token_id,), ended_by_token=ended_by_token)

    @property
    def is_heard(self) -> bool:
        """Whether somebody looks at each of its tokens as it comes."""
        return self.text is not None or self.guide is not None

    def give(self, piece: str, token_id: int) -> None:
        """Hand out a streamed token and the text that it made whole."""
        self.inbox.append(self.output(piece, [token_id]))

    def end(self, code: int, outputs: SavedOutputs, *, piece: str = "", is_new: bool = False) -> None:
        """It has ended with the core's `code` and these outputs: hand out the last output, which holds everything.

        That of a streamed request holds what is new: `piece`, the last token if it `is_new`, and what had been held back.
        """
        self.is_ended = True
        token_ids: list[int] = outputs.token_ids.tolist()
        text = self.text
        if text is None:
            text = OutputText(self.tokenizer, self.prompt.token_ids, self.sampling)
            text.push(token_ids, ended_by_token=self.is_end_token(code, token_ids[-1:]))
        piece += text.finish()
        if self.is_streamed:
            output = self.output(piece, token_ids[-1:] if is_new else [], finished=True)
        else:
            output = self.output(text.text, token_ids, finished=True)
        self._tell_why(output.outputs[0], code, text, token_ids)
        output.metrics = self._metrics(outputs)
        told = output if self.family is None else self.family.end(output, is_streamed=self.is_streamed)
        if told is not None:
            self.inbox.append(told)

    def is_end_token(self, code: int, last: list[int]) -> bool:
        """Whether `code` says that `last`, the newest token in a list of one or none, ended the text."""
        return code == _core.END_FINISHED_STOP and any(token_id in self.sampling.end_token_ids for token_id in last)

    def _tell_why(self, answer: CompletionOutput, code: int, text: OutputText, token_ids: list[int]) -> None:
        answer.finish_reason = self._finish_reason(code, text)
        if answer.finish_reason == "abort":
            answer.stop_reason = ABORTS.get(code) if self.guide is None or self.guide.failure is None else "grammar"
        if answer.finish_reason != "stop":
            return
        if text.stop_string is not None:
            answer.stop_reason = text.stop_string
        elif token_ids and self.is_end_token(code, token_ids[-1:]):
            answer.stop_reason = self.sampling.stop_reason(token_ids[-1])

    def _finish_reason(self, code: int, text: OutputText) -> FinishReason:
        if self.error is not None:
            return "error"
        # A stop string that the last allowed token completed counts as a stop.
        if code == _core.END_FINISHED_STOP or (code == _core.END_FINISHED_LENGTH and text.stop_string is not None):
            return "stop"
        if code == _core.END_REFUSED_QUEUE_DEADLINE:
            return "refused"
        return "length" if code == _core.END_FINISHED_LENGTH else "abort"

    def output(self, text: str, token_ids: list[int], *, finished: bool = False) -> RequestOutput:
        """What its caller reads: these of its tokens and their text."""
        answer = CompletionOutput(index=self.index, text=text, token_ids=token_ids)
        if self.logprobs is not None:
            answer.token_logprobs, answer.cumulative_logprob = self.logprobs.take(), self.logprobs.cumulative
            answer.tokenizer = self.tokenizer
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[answer],
            finished=finished,
            num_cached_tokens=self.num_cached,
        )
        if self.prompt_scores is not None:
            output.prompt_token_logprobs, output.tokenizer = self.prompt_scores.packed, self.tokenizer
        return output

    def _metrics(self, outputs: SavedOutputs) -> RequestMetrics:
        count = len(outputs.token_ids)
        return RequestMetrics(
            arrival_time=self.arrived_ns / NANOSECONDS,
            scheduled_ts=None if self.scheduled_ns is None else self.scheduled_ns / NANOSECONDS,
            first_token_ts=outputs.first_ns / NANOSECONDS if count else None,
            last_token_ts=outputs.last_ns / NANOSECONDS if count else None,
            num_generation_tokens=count,
            num_preemptions=self.num_preemptions,
            preempted=tuple(self.preempted),
        )
