"""Compiles the shapes that texts are held to: `Grammars` for one model, a `Grammar` for one shape, which starts guides.

Before: `engine/intake.py` has a request with `structured_outputs`. After: a `Guide` (`guide.py`) follows each of its sequences.
Always: a grammar that costs too much is refused where it is compiled, or ends its own requests (`grammar_trial.py` has the
limits); what is kept for the next request takes no more than `KEPT_BYTES`.

The parser is llguidance's (Earley over a lexer of derivatives); with its masks the tokens of a text are free, and only its
characters are bound.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..errors import InvalidInputError, MissingExtraError
from .grammar_source import invalid, lark_of, told
from .grammar_trial import LIMITS, Trial, make_tokenizer, start
from .guide import OUT_OF_STATES, Guide, bits
from .structured import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 16
"""Compiled grammars that are kept for the next request that asks for the same."""

KEPT_BYTES = 384 * 2**20
"""Of memory that they may take together, as their states are counted."""

STATE_BYTES = 4_800
"""Of memory, for each state of a lexer: 20,000 of a costly expression took 92 MiB."""

SHARED_STATES = 4_000
"""Of the lexer that the texts of one grammar share. Schemas of some hundred fields were content with half of them; a text that
needs more goes on with states of its own, up to the limit."""

AGAIN_S = 0.05
"""Seconds of CPU that a grammar may have taken to compile for a text to start it again, between two steps. The texts of one
that took longer share all states that there may be."""

NO_END: dict[str, Any] = {
    "content": "<|no end|>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
"""An added token as tokenizers write one."""


class Words(Protocol):
    """The part of a tokenizer that is read here."""

    @property
    def vocab_size(self) -> int:
        """Ids that have a token."""

    @property
    def eos_token_id(self) -> int | None:
        """Its end token."""

    def native_text(self) -> str:
        """The native tokenizer in its JSON, without padding or truncation."""


class Grammars:
    """Compiles for one tokenizer and `vocab_size` logits. Safe to call from several threads."""

    def __init__(self, tokenizer: Words, vocab_size: int) -> None:
        self._words = tokenizer
        self._vocab_size = vocab_size
        self._trial: Trial | None = None
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._unreadable: str | None = None
        """Why there is none for this model: found out once, as it takes as long as making it."""
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()

    def prepare(self) -> None:
        """For grammars of strangers, before serving them: each new one is compiled in another process first, so that one that
        takes too long is refused. And what all grammars share is made, which takes a quarter of a second for 49,152 tokens
        and lets no other thread run meanwhile. Nothing to do where llguidance is not installed, or does not read the
        tokenizer."""
        try:
            self._shared()
        except (MissingExtraError, InvalidInputError):
            return
        self._trial = Trial(*_parts(self._words, self._vocab_size))

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of that shape, up to its first mask; the interpreter is free meanwhile, for most of it.

        Raises `InvalidGrammarError` for one that cannot be read, that no text can satisfy, or that costs too much;
        `MissingExtraError` without llguidance, `InvalidInputError` where that does not read this tokenizer.
        """
        kept = self.kept(params)
        if kept is not None:
            return kept
        tokenizer = self._shared()
        source = lark_of(params)
        too_much = None if self._trial is None else self._trial.check(source)
        if too_much is not None:
            raise invalid(params, too_much)
        made = Grammar(tokenizer, params, source, self._vocab_size)
        with self._lock:
            self._keep(params, made)
        return made

    def kept(self, params: StructuredOutputsParams) -> Grammar | None:
        """The grammar of that shape, if it was compiled before and is there still."""
        with self._lock:
            found = self._kept.get(params)
            if found is None or found.is_spent:
                return None
            self._kept.move_to_end(params)
            return found

    def close(self) -> None:
        """End the other process."""
        if self._trial is not None:
            self._trial.close()

    def _keep(self, params: StructuredOutputsParams, made: Grammar) -> None:
        """Keep it for the next one; whoever was not asked for the longest time goes."""
        for spent in [one for one, grammar in self._kept.items() if grammar.is_spent]:
            del self._kept[spent]  # its states are many
        self._kept[params] = made
        while len(self._kept) > KEPT or sum(grammar.most_bytes for grammar in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)

    def _shared(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None and self._unreadable is None:
                try:
                    self._tokenizer = make_tokenizer(*_parts(self._words, self._vocab_size))
                except ImportError:
                    raise MissingExtraError("structured_outputs", "structured", "llguidance") from None
                except Exception as error:  # noqa: BLE001 - it raises plain ones for kinds that it does not read
                    self._unreadable = told(str(error))
            if self._tokenizer is None:
                bound = f"is not served with this model's tokenizer: {self._unreadable}"
                raise InvalidInputError("structured_outputs", "a grammar", bound)
            return self._tokenizer


class Grammar:
    """One compiled shape, from which guides start. They share its lexer, whose states grow with all of their texts."""

    def __init__(self, tokenizer: LLTokenizer, params: StructuredOutputsParams, source: str, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._source = source
        num_states, begun_s = min(SHARED_STATES, LIMITS["max_lexer_states"]), time.thread_time()
        self._start, first = start(tokenizer, source, num_states)
        self._takes_long = time.thread_time() - begun_s > AGAIN_S
        if self._takes_long or (self._start.is_error() and OUT_OF_STATES in self._start.get_error()):
            num_states = LIMITS["max_lexer_states"]
            self._start, first = start(tokenizer, source, num_states)
        if self._start.is_error():
            raise invalid(params, told(self._start.get_error()))
        self._silent = np.array([one for one in tokenizer.eos_tokens if one < vocab_size], dtype=np.int64)
        self._first = bits(first, vocab_size)
        self._first[self._silent] = False
        self.most_bytes = num_states * STATE_BYTES
        """Of memory that its states may take."""
        self.is_spent = False
        """See `guide.Shared`."""
        if not self._first.any():
            raise invalid(params, "no text of at least one token has it")

    def guide(self, end_ids: Iterable[int]) -> Guide:
        """One sequence at its start. `end_ids`: tokens that end its text where the grammar is satisfied."""
        return Guide(self, self._start.deep_copy(), self._first, self._silent, np.array(sorted(end_ids), dtype=np.int64))

    def start_again(self) -> LLMatcher | None:
        """See `guide.Shared`."""
        return None if self._takes_long else start(self._tokenizer, self._source)[0]


def _parts(words: Words, vocab_size: int) -> tuple[str, int, int]:
    """Arguments of `make_tokenizer`, which needs an end token: a vocabulary without one gets one behind all others."""
    text, end = words.native_text(), words.eos_token_id
    if end is None:
        end, native = words.vocab_size, json.loads(text)
        native["added_tokens"].append(NO_END | {"id": end})
        text = json.dumps(native, ensure_ascii=False)
    return text, max(vocab_size, words.vocab_size, end + 1), end
