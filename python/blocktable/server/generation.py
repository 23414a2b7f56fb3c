"""A request for text on its way: what is asked of the engine, and what all its answers have in common.

Before: `completions.py` and `chat.py` have read prompts. After: `answers.py` has a stream for each answer. Always: the tenant
is the key's; n answers to a prompt are one request, or as few as the engine can run; each has a seed of its own.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..errors import InvalidGrammarError, InvalidInputError, MissingExtraError
from ..sampling.params import SamplingParams, child_seed
from ..sampling.structured import TOGETHER
from .answers import check_end, merged
from .engine_client import AtOnce, EngineRequest, Piece, PieceLogprobs, PromptLogprobs
from .errors import disagree, refused
from .logprobs import NO_LOGPROBS, ChatWriter, CompletionWriter, write_prompt
from .piece_stream import joined_logprobs
from .protocol.generation import GenerationRequest
from .protocol.usage import Usage
from .serving import Call, Serving

T = TypeVar("T")

DEFAULT_MAX_TOKENS = 16
"""Of completions, as `SamplingParams` has it."""

SHAPE, FORMAT = "structured_outputs", "response_format"
"""How vLLM and the engine call the shape of a text, and how OpenAI does."""

MOST_SCORED = 2**22
"""Log probabilities of prompts in one reply, which takes some 80 bytes for each; the engine sends a prompt's in one frame."""

BYTES_OF_A_CHARACTER = 16
"""Packed token ids of log probabilities that take as long to write as a character takes to be read."""


@dataclass(slots=True)
class Tally:
    """What one answer came to."""

    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    last: Piece | None = None
    is_over: bool = False
    logprobs: bytes = NO_LOGPROBS
    """Written, of an answer that is not streamed."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of the first answer to a prompt, of its prompt, if they were asked for."""
    mean_logprob: float = -math.inf
    """Of the tokens of an answer that is not streamed, if log probabilities were asked for."""

    def add(self, piece: Piece) -> None:
        """One more piece of it. Raises `ApiError` for an end that is no answer."""
        if piece.finish_reason is not None:
            check_end(piece)
            self.is_over = True
        self.texts.append(piece.text)
        self.num_tokens += len(piece.token_ids)
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = piece.num_cached_tokens or self.num_cached_tokens
        self.last = piece

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def finish_reason(self) -> Any:
        """Why it ended; `answers.py` lets through only those that are answers."""
        return None if self.last is None else self.last.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """What ended it, if more is to be said."""
        return None if self.last is None else self.last.stop_reason


class Generation:
    """One request for text. `tallies` has what came so far, an entry an answer; the first prompt's answers come first."""

    def __init__(
        self,
        serving: Serving,
        call: Call,
        ask: GenerationRequest,
        *,
        prefix: str,
        prompts: Sequence[list[int]],
        sampling: dict[str, Any],
    ) -> None:
        """`sampling`: arguments of `SamplingParams`. Raises `ApiError` for too many answers."""
        self.n = ask.num_answers
        if len(prompts) * self.n > serving.limits.max_answers:
            field = "n" if self.n == (ask.n or 1) else "best_of"
            raise disagree(field, f"{self.n} answers to {len(prompts)} prompts are more than {serving.limits.max_answers}")
        self.id = f"{prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = serving.model_name(ask.model)
        self._engine = serving.engine
        self._reader = serving.reader
        self.writer: ChatWriter | CompletionWriter | None = None
        """Of log probabilities, if they were asked for."""
        self._shape_field = ask.shape_field
        self._num_prompt_tokens = sum(map(len, prompts))
        if ask.prompt_logprobs is not None:
            _check_scored(self._num_prompt_tokens * self.n, ask.prompt_logprobs)
        deadlines = [one for one in (ask.deadline_s, serving.limits.max_request_s) if one is not None]
        at_once = min(self.n, serving.engine.info.max_num_seqs)
        self._requests = {
            place * self.n + first: EngineRequest(
                request_id=f"{self.id}-{place * self.n + first}",
                prompt_token_ids=prompt,
                sampling=_part(sampling, first, min(at_once, self.n - first)),
                cache_salt=ask.cache_salt,
                tenant=call.tenant,
                priority=ask.priority or 0,
                queue_deadline_s=ask.queue_deadline_s,
                deadline_s=min(deadlines, default=None),
                is_streamed=bool(ask.stream),
                trace_headers=call.trace_headers,
            )
            for place, prompt in enumerate(prompts)
            for first in range(0, self.n, at_once)
        }  # by their first answer's place
        self.tallies = [Tally() for _ in range(len(prompts) * self.n)]

    async def pieces(self, at_once: AtOnce | None = None) -> AsyncGenerator[tuple[int, Piece], None]:
        """(which answer, what is new in it). Leaving it ends all answers. `at_once` may be offered pieces of a single prompt's
        answers: see `EngineClient.generate`."""
        try:
            if len(self._requests) == 1:  # the usual case has a layer less for each piece
                async with aclosing(self._engine.generate(self._requests[0], at_once)) as only:
                    async for piece in only:
                        self.tallies[piece.index].add(piece)
                        yield piece.index, piece
                return
            streams = {first: self._engine.generate(request) for first, request in self._requests.items()}
            async with aclosing(merged(streams)) as stream:
                async for first, piece in stream:
                    place = first + piece.index
                    self.tallies[place].add(piece)
                    yield place, piece
        except (InvalidInputError, MissingExtraError) as error:
            raise _as_said(error, self._shape_field) from None

    async def to_the_end(self) -> None:
        """Wait for all answers."""
        async with aclosing(self.pieces()) as pieces:
            told: dict[int, list[PieceLogprobs]] = {}
            async for place, piece in pieces:
                if piece.logprobs is not None:
                    told.setdefault(place, []).append(piece.logprobs)
        for place, parts in told.items():
            joined = joined_logprobs(parts)
            self.tallies[place].mean_logprob = _mean_logprob(joined)
            self.tallies[place].logprobs = await self.written(place, joined)

    async def written(self, place: int, told: PieceLogprobs | None) -> bytes:
        """The log probabilities of an answer's next tokens as JSON; many are written beside the event loop."""
        writer = self.writer
        if told is None or writer is None:
            return NO_LOGPROBS
        return await self.beside(len(told.ids) // BYTES_OF_A_CHARACTER, partial(writer.write, place, told))

    async def written_prompts(self) -> list[bytes]:
        """The log probabilities of each prompt's tokens as JSON; many are written beside the event loop."""
        told = [tally.prompt_logprobs for tally in self.tallies[:: self.n]]
        if not any(told):
            return [NO_LOGPROBS] * len(told)
        speller = await self._reader.speller()

        def write() -> list[bytes]:
            return [NO_LOGPROBS if one is None else write_prompt(speller, one) for one in told]

        return await self.beside(sum(len(one.ids) for one in told if one) // BYTES_OF_A_CHARACTER, write)

    async def beside(self, size: int, work: Callable[[], T]) -> T:
        """See `Reader.beside`."""
        return await self._reader.beside(size, work)

    @property
    def is_over(self) -> bool:
        """Every answer has had its end."""
        return self.tallies[-1].is_over and all(tally.is_over for tally in self.tallies)

    @property
    def usage(self) -> Usage:
        """Of what came so far. A prompt's cached tokens are those that its first answer found."""
        cached = sum(tally.num_cached_tokens for tally in self.tallies[:: self.n])
        return Usage.of(self._num_prompt_tokens, sum(tally.num_tokens for tally in self.tallies), cached)


def _mean_logprob(told: PieceLogprobs | None) -> float:
    """Of the tokens themselves; minus infinity of none."""
    if told is None or not told.values:
        return -math.inf
    return float(np.frombuffer(told.values, dtype=np.float32)[:: 1 + told.num_best].mean())


def _check_scored(num_tokens: int, num_best: int) -> None:
    """`num_tokens`: of the prompts of all answers."""
    count = num_tokens * (1 + num_best)
    if count > MOST_SCORED:
        bound = (
            f"{1 + num_best} for each of {num_tokens} prompt tokens, all answers together, are {count}: at most {MOST_SCORED}"
        )
        raise disagree("prompt_logprobs", bound)


def check_together(serving: Serving, ask: GenerationRequest, sampling: dict[str, Any]) -> None:
    """Refuse values that are wrong only together, before a prompt is read. Raises `ApiError`, or `InvalidInputError`."""
    most = serving.engine.info.max_logprobs
    if ask.prompt_logprobs is not None and ask.prompt_logprobs > most:
        raise refused("prompt_logprobs", f"must be 0..{most}, and is {ask.prompt_logprobs}")
    if ask.prompt_logprobs is not None and ask.stream:
        raise disagree("prompt_logprobs", "is not streamed")
    if ask.num_logprobs is not None and ask.num_logprobs > most:
        field = "top_logprobs" if "top_logprobs" in ask.__struct_fields__ else "logprobs"
        raise refused(field, f"must be 0..{most}, and is {ask.num_logprobs}")
    if ask.structured_outputs is not None and ask.response_format is not None:
        raise disagree("structured_outputs", "goes without response_format")
    if ask.stream_options is not None and not ask.stream:
        raise disagree("stream_options", "goes with stream=true only")
    max_tokens = sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    if max_tokens is not None and sampling.get("min_tokens", 0) > max_tokens:
        raise disagree("min_tokens", f"must be at most max_tokens, which is {max_tokens}")
    try:
        SamplingParams(**sampling)
    except InvalidInputError as error:
        said = _as_said(error, ask.shape_field)
        if error.field in TOGETHER and isinstance(said, InvalidInputError):
            raise disagree(said.field, said.bound) from None
        raise said from None


def _as_said(error: InvalidInputError | MissingExtraError, shape_field: str) -> Exception:
    """The error by the name that the client gave the shape of its text: the engine knows one name only."""
    if shape_field == SHAPE:
        return error
    if isinstance(error, MissingExtraError):
        return MissingExtraError(shape_field, error.extra, error.missing) if error.what == SHAPE else error
    if error.field.partition(".")[0] != SHAPE:
        return error
    kind = InvalidGrammarError if isinstance(error, InvalidGrammarError) else InvalidInputError
    # The grammar of a call is none of the client's words.
    return kind(shape_field, error.value if shape_field == FORMAT else "a call", error.bound)


def _part(sampling: dict[str, Any], first: int, count: int) -> dict[str, Any]:
    """Of the request for `count` answers from `first` on: the numbers that they draw are the same in whatever parts."""
    own: dict[str, Any] = {"n": count} if count > 1 else {}
    if "prompt_logprobs" in sampling and first:
        own["prompt_logprobs"] = None  # the first part has them
    if "seed" in sampling and first:
        own["seed"] = child_seed(sampling["seed"], first)
    return sampling | own
