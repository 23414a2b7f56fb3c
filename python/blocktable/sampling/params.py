"""What a request asks of sampling: `SamplingParams` as the caller wrote it, `ResolvedSampling` as the engine reads it.

Before: `LLM.generate`, the CLI. After: `sampler.py` and `text/output_text.py` read the resolved record only.
A record that exists holds only values inside their bounds; what depends on the model is settled once, in `resolve`. The
ids that end a text are resolved there too, into one set, and no other part keeps a set of its own.
Names and meanings are those of vLLM's `SamplingParams`; an option of it that is not served is refused by its name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from numbers import Real
from typing import Any

from ..errors import InvalidInputError, UnknownOptionError

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would leave one candidate anyway, or overflow."""

MAX_TEMPERATURE = 1e6
"""Far above any use (2 is much), and small enough that every 32-bit quotient stays finite."""

MAX_COUNT = 2**31 - 1
"""Largest `max_tokens`, `min_tokens`, `top_k` and token id."""

MAX_STOPS = 32
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKEN_IDS = 256

NOT_SERVED: dict[str, object] = {
    "allowed_token_ids": None,
    "bad_words": None,
    "best_of": None,
    "early_stopping": False,
    "extra_args": None,
    "flat_logprobs": False,
    "frequency_penalty": 0.0,
    "guided_decoding": None,
    "length_penalty": 1.0,
    "logit_bias": None,
    "logits_processors": None,
    "logprob_token_ids": None,
    "logprobs": None,
    "presence_penalty": 0.0,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "repetition_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "stream_interval": None,
    "structured_outputs": None,
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
    include_stop_str_in_output: bool
    """The text keeps the stop string, or the text of the stop token, that ended it."""
    skip_special_tokens: bool
    """The text leaves out special tokens."""
    detokenize: bool
    """False: no text, only token ids."""
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
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        detokenize: bool = True,
        output_kind: RequestOutputKind | int | None = RequestOutputKind.CUMULATIVE,
        **others: object,
    ) -> None:
        _refuse_others(others, {field.name for field in fields(self)})
        checked = {
            "n": _count("n", n, 1),
            "temperature": _number("temperature", temperature, high=MAX_TEMPERATURE),
            "top_p": _number("top_p", top_p, high=1.0, above_zero=True),
            "top_k": max(_count("top_k", top_k, -1), 0),
            "min_p": _number("min_p", min_p, high=1.0),
            "seed": _seed(seed),
            "max_tokens": None if max_tokens is None else _count("max_tokens", max_tokens, 1),
            "min_tokens": _count("min_tokens", min_tokens, 0),
            "stop": _stop_strings(stop),
            "stop_token_ids": _stop_token_ids(stop_token_ids),
            "ignore_eos": _flag("ignore_eos", ignore_eos),
            "include_stop_str_in_output": _flag("include_stop_str_in_output", include_stop_str_in_output),
            "skip_special_tokens": _flag("skip_special_tokens", skip_special_tokens),
            "detokenize": _flag("detokenize", detokenize),
            "output_kind": _output_kind(output_kind),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_together()

    def _check_together(self) -> None:
        """Bounds of one option that another one sets."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInputError("min_tokens", self.min_tokens, f"must be at most max_tokens, which is {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise InvalidInputError("stop", self.stop, "needs text: leave detokenize on, or use stop_token_ids")

    def resolve(
        self, *, vocab_size: int, eos_token_ids: Iterable[int], max_model_len: int, num_prompt_tokens: int
    ) -> ResolvedSampling:
        """Settle what depends on the model and the prompt. `eos_token_ids`: see `collect_end_ids`.

        `max_tokens` becomes what prompt and model leave of it (`max_model_len - num_prompt_tokens`, never below 1), and
        `min_tokens` at most that; a prompt that leaves no room is the core's to refuse (`Scheduler.submit`). Raises
        `InvalidInputError` for a stop token id outside the vocabulary.
        """
        for place, token_id in enumerate(self.stop_token_ids):
            if token_id >= vocab_size:
                bound = f"must be 0..{vocab_size - 1}, the model's vocabulary"
                raise InvalidInputError(f"stop_token_ids[{place}]", token_id, bound)
        room = max(max_model_len - num_prompt_tokens, 1)
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        # The model cannot produce an id outside its logits, so such an end token (a padded tokenizer's) never matters.
        eos = frozenset() if self.ignore_eos else frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        return ResolvedSampling(
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
        )


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


def _refuse_others(others: dict[str, object], served: set[str]) -> None:
    for name, value in others.items():
        if name not in NOT_SERVED:
            raise UnknownOptionError(name, value, served | NOT_SERVED.keys())
        off = NOT_SERVED[name]
        is_off = isinstance(value, Real) and isinstance(value, bool) is isinstance(off, bool) and value == off
        if value is not None and not is_off:
            raise InvalidInputError(name, value, f"is not served yet: leave it out, or at {off}")


def _whole(field: str, value: Any) -> int:
    """A whole number, numpy's too; a bool is none, although it is an int to Python."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidInputError(field, value, "must be a whole number") from None


def _count(field: str, value: Any, low: int) -> int:
    return _between(field, _whole(field, value), low, MAX_COUNT)


def _between(field: str, number: int, low: int, high: int) -> int:
    if low <= number <= high:
        return number
    # A number of thousands of digits cannot be shown (and Python refuses to).
    shown = number if number.bit_length() <= 128 else f"a number of {number.bit_length()} bits"
    raise InvalidInputError(field, shown, f"must be {low}..{high}")


def _number(field: str, value: Any, *, high: float, above_zero: bool = False) -> float:
    bound = f"must be a number {'above 0 and at most' if above_zero else 'from 0 to'} {high:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInputError(field, value, bound)
    try:
        number = float(value)
    except OverflowError:
        raise InvalidInputError(field, "a number beyond all floats", bound) from None
    if not math.isfinite(number) or number > high or number < 0.0 or (above_zero and number == 0.0):
        raise InvalidInputError(field, value if number == value else number, bound)
    return number


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInputError(field, value, "must be True or False")
    return value


def _output_kind(value: Any) -> RequestOutputKind:
    if value is None:
        return RequestOutputKind.CUMULATIVE
    return RequestOutputKind(_between("output_kind", _whole("output_kind", value), 0, len(RequestOutputKind) - 1))


def _seed(value: Any) -> int | None:
    if value is None:
        return None
    seed = _between("seed", _whole("seed", value), -(2**63), 2**63 - 1)
    return None if seed == -1 else seed


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = _some("stop", [value] if isinstance(value, str) else value, MAX_STOPS, "texts")
    for place, text in enumerate(texts):
        field = f"stop[{place}]"
        if not isinstance(text, str):
            raise InvalidInputError(field, text, "must be a text")
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise InvalidInputError(field, text[:64], f"has {len(text)} characters: must be 1..{MAX_STOP_LENGTH}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(field, text, f"must be valid Unicode: {error.reason} at {error.start}") from None
    return tuple(dict.fromkeys(texts))


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    token_ids = _some("stop_token_ids", value, MAX_STOP_TOKEN_IDS, "token ids")
    return tuple(dict.fromkeys(_count(f"stop_token_ids[{place}]", token_id, 0) for place, token_id in enumerate(token_ids)))


def _some(field: str, value: Any, limit: int, what: str) -> list[Any]:
    """The items of a list or the like; a longer one is refused before it is read."""
    if isinstance(value, str | bytes | bytearray | dict) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
        raise InvalidInputError(field, value, f"must be a list of {what}")
    if len(value) > limit:
        raise InvalidInputError(field, f"{len(value)} {what}", f"must be at most {limit}")
    return list(value)
