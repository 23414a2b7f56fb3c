"""What a request asks of sampling: `SamplingParams` as the caller wrote it, `ResolvedSampling` as the engine reads it.

Before: `LLM.generate`, the CLI. After: `sampler.py` and `text/output_text.py` read the resolved record only.
A record that exists holds only values inside their bounds; what depends on the model is settled once, in `resolve`. The
ids that end a text are resolved there too, into one set, and no other part keeps a set of its own.
Names and meanings are those of vLLM's `SamplingParams`; an option of it that is not served is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from ..errors import InvalidInputError
from . import checks
from .structured import StructuredOutputsParams, read_structured

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would leave one candidate anyway, or overflow."""

MAX_TEMPERATURE = 1e6
"""Far above any use (2 is much), and small enough that every 32-bit quotient stays finite."""

MAX_COUNT = checks.MAX_COUNT
"""Largest `max_tokens`, `min_tokens`, `top_k` and token id."""

MAX_STOPS = 32
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKEN_IDS = 256

MAX_PENALTY = 2.0
"""Of `presence_penalty` and `frequency_penalty`, up and down."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Far beyond any use (1.2 is much), and near enough to 1 that no logit of a model becomes infinite."""

MAX_BIAS = 100.0
"""Of a `logit_bias`, up and down."""

MAX_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 32
MAX_BAD_WORD_LENGTH = 256  # characters

MAX_LOGPROBS = 20
"""`logprobs` of a request at most, unless the engine's option `max_logprobs` says otherwise."""

LOGPROBS_BOUND = 1024
"""The most that `max_logprobs` may be."""

LEAVE_A_CHOICE = "bad_words and the ends that min_tokens masks must leave a token to choose"
"""Why options are refused that are right alone."""

NOT_SERVED: dict[str, object] = {
    "best_of": None,
    "early_stopping": False,
    "extra_args": None,
    "flat_logprobs": False,
    "guided_decoding": None,
    "length_penalty": 1.0,
    "logits_processors": None,
    "logprob_token_ids": None,
    "repetition_detection": None,
    "spaces_between_special_tokens": True,
    "stream_interval": None,
    "thinking_token_budget": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
}
"""Options of vLLM that are not served, with the value that leaves each off: that one is accepted, any other refused."""


class RequestOutputKind(IntEnum):
    """What each output of `AsyncLLM.generate` holds, by vLLM's names and numbers."""

    CUMULATIVE = 0
    """All tokens and all text so far."""
    DELTA = 1
    """What is new since the output before."""
    FINAL_ONLY = 2
    """There is one output, at the end, with everything."""


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How the tokens of one request are chosen, and where they end. Frozen; `stop` and `stop_token_ids` become tuples.

    Raises `UnknownOptionError` for an option that does not exist, naming the nearest that do, and `InvalidInputError`
    (field, value, bound) for a value outside its bound or an option of vLLM that is not served yet.
    """

    n: int
    """Answers to one prompt, at most as many as run at once. Answer i draws its numbers with the seed after i others."""
    temperature: float
    """0..`MAX_TEMPERATURE`; logits are divided by it. 0, or anything below `GREEDY_BELOW`, takes the best token."""
    top_p: float
    """Above 0, at most 1: the smallest set of best tokens with at least this probability together."""
    top_k: int
    """Best so many tokens; 0 or -1 (kept as 0) = all."""
    min_p: float
    """0..1: tokens at least this share as probable as the best one."""
    seed: int | None
    """Any 64-bit signed number; None, or -1 as in vLLM = the engine draws one for this request."""
    max_tokens: int | None
    """Output tokens at most; None = as many as the model's length leaves."""
    min_tokens: int
    """Output tokens before a token or a stop string may end the text."""
    stop: tuple[str, ...]
    """Texts that end the output; at most `MAX_STOPS` of 1..`MAX_STOP_LENGTH` characters."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end the output, beside the model's own; at most `MAX_STOP_TOKEN_IDS`."""
    ignore_eos: bool
    """The model's own end tokens do not end the output."""
    presence_penalty: float
    """-2..2: taken off the logit of every token that the output holds."""
    frequency_penalty: float
    """-2..2: taken off the logit of a token once for each time that the output holds it."""
    repetition_penalty: float
    """`MIN_REPETITION_PENALTY`..`MAX_REPETITION_PENALTY`: the logit of every token that prompt or output holds is divided by
    it if it is above 0, else multiplied."""
    logit_bias: tuple[tuple[int, float], ...]
    """(token id, what is added to its logit, -100..100), at most `MAX_BIASES`. Given as a mapping, as in vLLM; ids may be
    texts, as in JSON."""
    allowed_token_ids: tuple[int, ...] | None
    """The only tokens that may be chosen, 1..`MAX_ALLOWED_TOKEN_IDS`; None = all."""
    bad_words: tuple[str, ...]
    """Texts whose tokens the output does not hold, neither as they stand here nor behind a space; at most `MAX_BAD_WORDS` of
    1..`MAX_BAD_WORD_LENGTH` characters. The same text in other tokens is not found."""
    logprobs: int | None
    """Log probabilities of each output token: its own, and those of so many best tokens (0 = its own alone); at most the
    engine's `max_logprobs`. They are the model's own, before temperature, penalties, biases and masks. None = none."""
    prompt_logprobs: int | None
    """The same of each token of the prompt but the first, as the model gives them for the tokens before it. Such a request
    computes its whole prompt, and shares no cached block with any other."""
    include_stop_str_in_output: bool
    """The text keeps the stop string, or the text of the stop token, that ended it."""
    skip_special_tokens: bool
    """The text leaves out special tokens."""
    detokenize: bool
    """False: no text, only token ids."""
    structured_outputs: StructuredOutputsParams | None
    """The shape that the text must have: a JSON schema, a regular expression, one of some texts, a grammar. A mapping of its
    options will do."""
    output_kind: RequestOutputKind
    """What the outputs of `AsyncLLM` hold. `LLM.generate` always gives the whole, `LLM.stream` always what is new."""

    def __init__(
        self,
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        bad_words: Sequence[str] | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        detokenize: bool = True,
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
        output_kind: RequestOutputKind | int | None = RequestOutputKind.CUMULATIVE,
        **others: object,
    ) -> None:
        if others:
            checks.refuse_others(others, (field.name for field in fields(self)), NOT_SERVED)
        checked = {
            "n": checks.count("n", n, 1),
            "temperature": checks.number("temperature", temperature, high=MAX_TEMPERATURE),
            "top_p": checks.number("top_p", top_p, high=1.0, above_zero=True),
            "top_k": max(checks.count("top_k", top_k, -1), 0),
            "min_p": checks.number("min_p", min_p, high=1.0),
            "seed": _seed(seed),
            "max_tokens": None if max_tokens is None else checks.count("max_tokens", max_tokens, 1),
            "min_tokens": checks.count("min_tokens", min_tokens, 0),
            "stop": checks.texts("stop", [stop] if isinstance(stop, str) else stop, MAX_STOPS, MAX_STOP_LENGTH),
            "stop_token_ids": checks.token_ids("stop_token_ids", stop_token_ids, MAX_STOP_TOKEN_IDS),
            "ignore_eos": checks.flag("ignore_eos", ignore_eos),
            "presence_penalty": checks.number("presence_penalty", presence_penalty, low=-MAX_PENALTY, high=MAX_PENALTY),
            "frequency_penalty": checks.number("frequency_penalty", frequency_penalty, low=-MAX_PENALTY, high=MAX_PENALTY),
            "repetition_penalty": checks.number(
                "repetition_penalty", repetition_penalty, low=MIN_REPETITION_PENALTY, high=MAX_REPETITION_PENALTY
            ),
            "logit_bias": checks.biases("logit_bias", logit_bias, MAX_BIASES, MAX_BIAS),
            "allowed_token_ids": _allowed(allowed_token_ids),
            "bad_words": checks.texts("bad_words", bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH),
            "logprobs": _num_logprobs("logprobs", logprobs),
            "prompt_logprobs": _num_logprobs("prompt_logprobs", prompt_logprobs),
            "include_stop_str_in_output": checks.flag("include_stop_str_in_output", include_stop_str_in_output),
            "skip_special_tokens": checks.flag("skip_special_tokens", skip_special_tokens),
            "detokenize": checks.flag("detokenize", detokenize),
            "structured_outputs": read_structured(structured_outputs),
            "output_kind": _output_kind(output_kind),
        }
        vars(self).update(checked)  # it is frozen, and an assignment for each takes as long as all checks
        self._check_together()

    def _check_together(self) -> None:
        """Bounds of one option that another one sets."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInputError("min_tokens", self.min_tokens, f"must be at most max_tokens, which is {self.max_tokens}")
        if self.structured_outputs is not None:
            self._check_shape()
        if self.stop and not self.detokenize:
            raise InvalidInputError("stop", self.stop, "needs text: leave detokenize on, or use stop_token_ids")

    def _check_shape(self) -> None:
        """Whatever else forbids tokens might leave none of those that the shape needs."""
        others = [name for name in ("allowed_token_ids", "bad_words") if getattr(self, name)]
        if self.min_tokens and self.stop_token_ids:
            others.append("min_tokens with stop_token_ids")
        if others:
            raise InvalidInputError("structured_outputs", self.structured_outputs, f"goes without {' and '.join(others)}")

    def resolve(
        self,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        max_model_len: int,
        num_prompt_tokens: int,
        max_logprobs: int = MAX_LOGPROBS,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> ResolvedSampling:
        """Settle what depends on the model and the prompt. `eos_token_ids`: see `collect_end_ids`; `encode` gives the token
        ids of a text, without any that begin or end one.

        `max_tokens` becomes what prompt and model leave of it (`max_model_len - num_prompt_tokens`, never below 1), and
        `min_tokens` at most that; a prompt that leaves no room is the core's to refuse (`Scheduler.submit`). Raises
        `InvalidInputError` for a token id outside the vocabulary, for more `logprobs` than the engine gives, and for masks
        that together might leave no token to choose.
        """
        for place, token_id in self._named_ids():
            if token_id >= vocab_size:
                raise InvalidInputError(place, token_id, f"must be 0..{vocab_size - 1}, the model's vocabulary")
        for field, asked in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if asked is not None and asked > max_logprobs:
                raise InvalidInputError(field, asked, f"must be 0..{max_logprobs}, this engine's max_logprobs")
        room = max(max_model_len - num_prompt_tokens, 1)
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        # The model cannot produce an id outside its logits, so such an end token (a padded tokenizer's) never matters.
        eos = frozenset() if self.ignore_eos else frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        resolved = ResolvedSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if self.top_k < vocab_size else 0,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            end_token_ids=tuple(sorted(eos.union(self.stop_token_ids))),
            eos_token_ids=eos,
            stop=self.stop,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            detokenize=self.detokenize,
            n=self.n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words_token_ids=self._bad_words_token_ids(encode, vocab_size),
            num_logprobs=None if self.logprobs is None else min(self.logprobs, vocab_size),
            num_prompt_logprobs=None if self.prompt_logprobs is None else min(self.prompt_logprobs, vocab_size),
        )
        _check_choice(resolved, vocab_size)
        return resolved

    def _named_ids(self) -> Iterator[tuple[str, int]]:
        """(place, token id) of every option that names tokens."""
        yield from ((f"stop_token_ids[{place}]", one) for place, one in enumerate(self.stop_token_ids))
        yield from ((f"logit_bias[{one}]", one) for one, _ in self.logit_bias)
        yield from ((f"allowed_token_ids[{place}]", one) for place, one in enumerate(self.allowed_token_ids or ()))

    def _bad_words_token_ids(
        self, encode: Callable[[str], Sequence[int]] | None, vocab_size: int
    ) -> tuple[tuple[int, ...], ...]:
        """Each bad word in tokens, as it stands at the beginning of a text and behind a space."""
        if not self.bad_words:
            return ()
        if encode is None:
            raise InvalidInputError("bad_words", self.bad_words, "needs a tokenizer: use logit_bias or allowed_token_ids")
        spelled = [tuple(encode(space + word)) for word in self.bad_words for space in ("", " ")]
        # What the model cannot produce has not to be kept from it.
        return tuple(dict.fromkeys(ids for ids in spelled if ids and max(ids) < vocab_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """`SamplingParams` for one prompt and one model: nothing is left open, nothing has to be checked again."""

    temperature: float
    top_p: float
    top_k: int
    """0 = off, else below the vocabulary's size."""
    min_p: float
    seed: int | None
    """None: the engine draws one, once for the request."""
    max_tokens: int
    """At least 1."""
    min_tokens: int
    """At most `max_tokens`."""
    end_token_ids: tuple[int, ...]
    """Every id that ends the text, ascending: what goes to `Scheduler.submit`, the sampler's mask and the text."""
    eos_token_ids: frozenset[int]
    """Those of them that are the model's own; empty with `ignore_eos`."""
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    detokenize: bool
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """None of them empty."""
    num_logprobs: int | None = None
    """At most the vocabulary's size."""
    num_prompt_logprobs: int | None = None
    """Likewise."""

    @property
    def has_penalties(self) -> bool:
        """Needs to know which tokens came before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def has_rules(self) -> bool:
        """Changes logits, other than by the ends that `min_tokens` masks: see `row_rules.py`."""
        return self.has_penalties or bool(self.logit_bias or self.allowed_token_ids or self.bad_words_token_ids)

    @property
    def is_greedy(self) -> bool:
        """Takes the best token; needs no random numbers."""
        return self.temperature < GREEDY_BELOW

    def stop_reason(self, token_id: int) -> int | None:
        """What vLLM reports for an end token: None for the model's own, else the id."""
        return None if token_id in self.eos_token_ids else token_id


def child_seed(seed: int, child: int) -> int:
    """The seed of answer `child` of a request: the next ones after its own, in the 64 bits that a seed has."""
    return (seed + child + 2**63) % 2**64 - 2**63


def collect_end_ids(*sources: int | Iterable[int] | None) -> frozenset[int]:
    """The end ids that generation config, model config and tokenizer name: each one id, several, or none.

    A negative id, as some configs hold, means none.
    """
    found: set[int] = set()
    for source in sources:
        if source is None:
            continue
        found.update([source] if isinstance(source, int) else source)
    return frozenset(token_id for token_id in found if token_id >= 0)


def _check_choice(resolved: ResolvedSampling, vocab_size: int) -> None:
    """Whatever comes, a token is left: one that is allowed, completes no bad word, and ends nothing too early."""
    blocked = {ids[-1] for ids in resolved.bad_words_token_ids}
    if resolved.min_tokens:
        blocked.update(resolved.end_token_ids)
    allowed = resolved.allowed_token_ids
    if len(blocked) >= vocab_size or (allowed and blocked.issuperset(allowed)):
        field = "allowed_token_ids" if allowed else "min_tokens" if resolved.min_tokens else "bad_words"
        raise InvalidInputError(field, allowed[:8] if allowed else f"{len(blocked)} tokens", LEAVE_A_CHOICE)


def _output_kind(value: Any) -> RequestOutputKind:
    if value is None:
        return RequestOutputKind.CUMULATIVE
    return RequestOutputKind(checks.between("output_kind", checks.whole("output_kind", value), 0, len(RequestOutputKind) - 1))


def _seed(value: Any) -> int | None:
    if value is None:
        return None
    seed = checks.between("seed", checks.whole("seed", value), -(2**63), 2**63 - 1)
    return None if seed == -1 else seed


def _num_logprobs(field: str, value: Any) -> int | None:
    return None if value is None else checks.between(field, checks.whole(field, value), 0, LOGPROBS_BOUND)


def _allowed(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    allowed = checks.token_ids("allowed_token_ids", value, MAX_ALLOWED_TOKEN_IDS)
    if not allowed:
        raise InvalidInputError("allowed_token_ids", value, "must name at least one token: leave it out to allow all")
    return allowed
