"""What every request for text may say: how its tokens are chosen, where they end, how it is treated beside others.

Before: `completions.py` and `chat.py` add what to answer. After: `generation.py` of the server makes engine requests of it.
Always: a value that could be read is inside the bounds given here, which are `SamplingParams`' own; only what depends on the
model is left to the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from ...engine.intake import MAX_DEADLINE_S
from ...sampling.params import (
    LOGPROBS_BOUND,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_COUNT,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from .not_served import NotServed, Off
from .structured import ResponseFormat, StructuredOutputs

MAX_N = 128
"""Answers to one prompt."""

MAX_SALT_LENGTH = 256  # characters

MAX_PRIORITY = 1000

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
WrittenId = Annotated[str, Meta(pattern=r"^(?:0|[1-9][0-9]{0,9})$")]
"""A token id as the name of a field."""
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
NumLogprobs = Annotated[int, Meta(ge=0, le=LOGPROBS_BOUND)]
"""The engine's own bound, `max_logprobs`, is in the document."""
Seconds = Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)]

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)
"""Fields that go to `SamplingParams` as they are."""

GENERATION_OFF: Off = {
    "length_penalty": (1.0,),
    "metadata": ({},),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stream tells beside the text."""

    OFF: ClassVar[Off] = {"continuous_usage_stats": (False,)}

    include_usage: bool | None = None
    """A last event with the usage and no choices."""
    continuous_usage_stats: NotServed = None


class GenerationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Null is the same as leaving a field out."""

    model: str | None = None
    """A name of `/v1/models`; left out = the one that is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    logit_bias: Annotated[dict[WrittenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    """What is added to the logits of tokens, by their ids."""
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    """The only ones that may be chosen."""
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Texts whose tokens do not come, neither as they stand here nor behind a space."""
    prompt_logprobs: NumLogprobs | None = None
    """Log probabilities of the tokens of the prompt but the first, and of so many best ones at each place. Not streamed; no
    cached block is shared."""
    response_format: ResponseFormat | None = None
    """The shape of the text, as OpenAI says it."""
    structured_outputs: StructuredOutputs | None = None
    """The same as vLLM says it, which knows more shapes."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_LENGTH)] | None = None
    """Only prompts with the same salt, of the same tenant, share cached blocks."""
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Lower goes first; with the engine's policy `priority` only."""
    queue_deadline_s: Seconds | None = None
    """Refused if it was not admitted so many seconds after it came."""
    deadline_s: Seconds | None = None
    """Ended wherever it is, so many seconds after it came; what there is by then is the answer."""
    user: Annotated[str, Meta(max_length=512)] | None = None
    """The client's own label. It changes nothing: whose a request is follows from its key alone."""

    length_penalty: NotServed = None
    metadata: NotServed = None
    spaces_between_special_tokens: NotServed = None
    truncate_prompt_tokens: NotServed = None
    use_beam_search: NotServed = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_answers(self) -> int:
        """To each prompt, whether they are told or not."""
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """`logprobs` of `SamplingParams`: the two kinds of requests say it in their own ways."""
        return None

    @property
    def shape_field(self) -> str:
        """What the client calls the shape of the text."""
        return "structured_outputs" if self.response_format is None else "response_format"

    def sampling(self) -> dict[str, Any]:
        """Arguments of `SamplingParams`: what was said and nothing else."""
        said = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        said |= {} if self.num_logprobs is None else {"logprobs": self.num_logprobs}
        shape = self._shape()
        return said if shape is None else said | {"structured_outputs": shape}

    def _shape(self) -> dict[str, Any] | None:
        if self.structured_outputs is not None:
            return self.structured_outputs.options()
        return None if self.response_format is None else self.response_format.options()
