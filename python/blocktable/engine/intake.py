"""What a caller brings, read and checked against one engine: prompts and parameters become jobs.

Before: `llm.py` and `async_llm.py` have arguments of any kind. After: `roster.py` queues a `Job`. Always: all jobs of a call
are right, or none is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from ..errors import InvalidInputError, UnknownOptionError
from ..sampling.checks import between, number, whole
from ..sampling.grammar import Grammar
from ..sampling.params import ResolvedSampling, SamplingParams
from .request import Prompt, read_chats, read_prompts

if TYPE_CHECKING:
    from .build import Engine

MAX_TENANT_LENGTH = 256  # bytes of UTF-8

MAX_DEADLINE_S = 1e9
"""Some 30 years."""


class WishOptions(TypedDict, total=False):
    """How requests want to be treated beside others, as every door takes it: see `Wishes`."""

    tenant: str | None
    priority: int
    queue_deadline_s: float | None
    deadline_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How a request wants to be treated beside others. What stands here is checked."""

    tenant: str | None = None
    """Whose it is, from authenticated context. It uses that tenant's share (policy `fair`), and shares cached blocks with the
    same tenant only (it is the domain of its keys)."""
    priority: int = 0
    """-1000..1000, lower goes first; only with policy `priority`."""
    queue_deadline_s: float | None = None
    """Seconds after it came: if it has not been admitted by then, it is refused."""
    deadline_s: float | None = None
    """Seconds after it came: if it lives then, it is aborted, wherever it is. Policy `deadline` takes the earliest first."""

    def __post_init__(self) -> None:
        tenant = self.tenant
        if tenant is not None and not (isinstance(tenant, str) and 1 <= _num_bytes(tenant) <= MAX_TENANT_LENGTH):
            raise InvalidInputError("tenant", tenant, f"must be a text of 1..{MAX_TENANT_LENGTH} bytes")
        object.__setattr__(self, "priority", between("priority", whole("priority", self.priority), -1000, 1000))
        for name in ("queue_deadline_s", "deadline_s"):
            seconds = getattr(self, name)
            if seconds is not None:
                object.__setattr__(self, name, number(name, seconds, high=MAX_DEADLINE_S, above_zero=True))

    @staticmethod
    def due_us(seconds: float | None, came_ns: int, now_ns: int) -> int | None:
        """Microseconds of the core's clock, so many seconds after `came_ns`. What is over already is over at the next plan,
        which tells the end that belongs to it."""
        return None if seconds is None else max(came_ns + int(seconds * 1e9), now_ns + 1000) // 1000

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Wishes:
        """The record of these options. Raises `UnknownOptionError` naming the nearest, and `InvalidInputError`."""
        known = {field.name for field in fields(cls)}
        for name, value in options.items():
            if name not in known:
                raise UnknownOptionError(name, value, known)
        return cls(**options)


def _num_bytes(text: str) -> int:
    """Bytes of UTF-8; 0 if it has none."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


NO_WISHES = Wishes()
"""Of a request that says nothing."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, how its answer is sampled, and how it is treated."""

    prompt: Prompt
    sampling: ResolvedSampling
    wishes: Wishes = NO_WISHES
    grammar: Grammar | None = None
    """The shape of its text."""


class Intake:
    """Reads for one engine. Keeps nothing; safe to call from several threads."""

    def __init__(self, engine: Engine) -> None:
        self._tokenizer = engine.tokenizer
        self._grammars = engine.grammars
        self._vocab_size = engine.loaded.vocab_size
        self._eos_token_ids = engine.loaded.eos_token_ids
        self._max_model_len = engine.max_model_len
        self._max_logprobs = engine.config.max_logprobs

    def read(self, prompts: Any) -> list[Prompt]:
        """See `read_prompts`."""
        return read_prompts(prompts, encoder=self._tokenizer, vocab_size=self._vocab_size)

    def read_chats(self, messages: Any, **said: Any) -> list[Prompt]:
        """See `request.read_chats`, also for what may be said beside the messages."""
        return read_chats(messages, renderer=self._tokenizer, vocab_size=self._vocab_size, **said)

    def job(self, prompt: Any, params: Any, wishes: Wishes) -> Job:
        """The job of one prompt. Raises `InvalidInputError`."""
        return self.only_job(prompt, self.read(prompt), params, wishes)

    def only_job(self, given: Any, prompts: Sequence[Prompt], params: Any, wishes: Wishes = NO_WISHES) -> Job:
        """The job of the one prompt that was read from `given`; several are refused."""
        [job] = self.jobs([self.only(given, prompts)], params, wishes)
        return job

    def only(self, given: Any, prompts: Sequence[Prompt]) -> Prompt:
        """The one prompt that was read from `given`; several are refused."""
        if len(prompts) != 1:
            raise InvalidInputError("prompt", given, "must be one prompt")
        return prompts[0]

    def jobs(self, prompts: Sequence[Prompt], params: Any, wishes: Wishes = NO_WISHES) -> list[Job]:
        """Each prompt with its own resolved parameters: one for all, or one for each."""
        if params is None or isinstance(params, SamplingParams):
            every = [params or SamplingParams()] * len(prompts)
        elif isinstance(params, Sequence) and not isinstance(params, str | bytes):
            every = list(params)
        else:
            raise InvalidInputError("sampling_params", params, "must be SamplingParams, or one for each prompt")
        if len(every) != len(prompts):
            raise InvalidInputError(
                "sampling_params", f"{len(every)} for {len(prompts)} prompts", "must be one for each prompt"
            )
        return [
            Job(prompt, self._resolve(place, prompt, one), wishes, self._grammar(one))
            for place, (prompt, one) in enumerate(zip(prompts, every))
        ]

    def _resolve(self, place: int, prompt: Prompt, params: Any) -> ResolvedSampling:
        if not isinstance(params, SamplingParams):
            raise InvalidInputError(f"sampling_params[{place}]", params, "must be SamplingParams")
        if params.stop and self._tokenizer is None:
            raise InvalidInputError("stop", params.stop, "this engine has no tokenizer: use stop_token_ids")
        return params.resolve(
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self._max_model_len,
            num_prompt_tokens=len(prompt.token_ids),
            max_logprobs=self._max_logprobs,
            encode=None if self._tokenizer is None else partial(self._tokenizer.encode, add_special_tokens=False),
        )

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """Raises `InvalidGrammarError`, or `MissingExtraError`."""
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise InvalidInputError("structured_outputs", params.structured_outputs, "this engine has no tokenizer")
        return self._grammars.compile(params.structured_outputs)
