"""Holds texts to a shape: `Grammars` compiles for one model, a `Guide` follows one sequence and says what may come next.

Before: `engine/intake.py` has a request with `structured_outputs`. After: `sampler.py` masks the rows of a step by
`Guide.allowed`, and `step_loop.py` tells each guide the token that its sequence got. Always: a guide moves on with confirmed
tokens only, so results that were dropped, and rows that were computed twice, leave it where it is; a grammar that costs too
much is refused where it is compiled, or ends its own request (`grammar_trial.py` has the limits).

The parser is llguidance's (Earley over a lexer of derivatives); with its masks the tokens of a text are free, and only its
characters are bound.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidGrammarError, InvalidInputError, MissingExtraError
from .grammar_trial import Trial, make_tokenizer, start
from .structured import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_GBNF_BYTES = 8_192
"""Of a grammar in GBNF: it is rewritten by a program in Python, which lets no other thread run."""

KEPT = 16
"""Compiled grammars that are kept for the next request that asks for the same."""

NO_END: dict[str, Any] = {
    "content": "<|no end|>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
"""An added token as tokenizers write one."""

LARK = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|start\s*:)")
"""What a grammar in Lark's syntax has. The same as llguidance's own question, which took 50 s for 64 KiB of empty lines, and
let no other thread run meanwhile."""

NO_FORCING = '%llguidance {"no_forcing": true}'

IN_JSON = "at 1(8): failed to compile JSON schema: "

OURS = re.compile(r"^\s*[0-9]+ \| (%llguidance \{\"no_forcing|start: %json)|^\s*\^\s*$")
"""Lines of an error message that show what is written here, and not by the client."""

ANY_OBJECT = '{"type": "object"}'


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
        with self._lock:
            kept = self._kept.get(params)
            if kept is not None and not kept.is_spent:
                self._kept.move_to_end(params)
                return kept
        tokenizer = self._shared()
        source = _source(params)
        too_much = None if self._trial is None else self._trial.check(source)
        if too_much is not None:
            raise _invalid(params, too_much)
        made = Grammar(tokenizer, params, source, self._vocab_size)
        with self._lock:
            for spent in [one for one, grammar in self._kept.items() if grammar.is_spent]:
                del self._kept[spent]  # its states are many
            self._kept[params] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made

    def close(self) -> None:
        """End the other process."""
        if self._trial is not None:
            self._trial.close()

    def _shared(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None and self._unreadable is None:
                try:
                    self._tokenizer = make_tokenizer(*_parts(self._words, self._vocab_size))
                except ImportError:
                    raise MissingExtraError("structured_outputs", "structured", "llguidance") from None
                except Exception as error:  # noqa: BLE001 - it raises plain ones for kinds that it does not read
                    self._unreadable = _told(str(error))
            if self._tokenizer is None:
                bound = f"is not served with this model's tokenizer: {self._unreadable}"
                raise InvalidInputError("structured_outputs", "a grammar", bound)
            return self._tokenizer


class Grammar:
    """One compiled shape, from which guides start. They share its lexer, whose states grow with all of their texts."""

    def __init__(self, tokenizer: LLTokenizer, params: StructuredOutputsParams, source: str, vocab_size: int) -> None:
        self._start, first = start(tokenizer, source)
        if self._start.is_error():
            raise _invalid(params, _told(self._start.get_error()))
        self._silent = np.array([one for one in tokenizer.eos_tokens if one < vocab_size], dtype=np.int64)
        self._first = _bits(first, vocab_size)
        self._first[self._silent] = False
        self.is_spent = False
        """One of its guides met a limit. That of the lexer's states would meet the next one, too: compile anew."""
        if not self._first.any():
            raise _invalid(params, "no text of at least one token has it")

    def guide(self, end_ids: Iterable[int]) -> Guide:
        """One sequence at its start. `end_ids`: tokens that end its text where the grammar is satisfied."""
        return Guide(self, self._start.deep_copy(), self._first, self._silent, np.array(sorted(end_ids), dtype=np.int64))


class Guide:
    """Where one sequence stands in its grammar. One thread at a time.

    `allowed` [vocab]: which tokens may come next, those that go on and, where the grammar is satisfied, the ends. `is_over`:
    the text is complete and nothing can follow. `failure`: why it cannot go on, a limit that was passed; then it is over too.
    """

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher,
        first: NDArray[np.bool_],
        silent: NDArray[np.int64],
        end_ids: NDArray[np.int64],
    ) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._silent = silent
        self._end_ids = end_ids
        self.allowed = self._with_ends(first)
        self.is_over = False
        self.failure: str | None = None

    def take(self, token_id: int) -> None:
        """The sequence got this token, one of those that were allowed and none that ends it."""
        if self.is_over:
            return
        self._matcher.consume_token(token_id)
        if not self._matcher.is_stopped():
            allowed = _bits(self._matcher.compute_bitmask(), len(self.allowed))
            may_end = self._matcher.is_accepting() or bool(allowed[self._silent].any())
            allowed[self._silent] = False
            self.allowed = self._with_ends(allowed)
            if not may_end and not self.allowed.any():
                self.failure = "none of the model's tokens goes on"
        # A mask that costs too much stops the matcher, too.
        if self._matcher.is_error():
            self.failure = _told(self._matcher.get_error())
            self._grammar.is_spent = True
        self.is_over = self._matcher.is_stopped() or not self.allowed.any()

    def _with_ends(self, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """An end may read as a text that goes on with the grammar; it ends all the same, so only where that is satisfied."""
        if not self._end_ids.size:
            return allowed
        allowed = allowed.copy()
        allowed[self._end_ids] = self._matcher.is_accepting()
        return allowed


def _parts(words: Words, vocab_size: int) -> tuple[str, int, int]:
    """Arguments of `make_tokenizer`, which needs an end token: a vocabulary without one gets one behind all others."""
    text, end = words.native_text(), words.eos_token_id
    if end is None:
        end, native = words.vocab_size, json.loads(text)
        native["added_tokens"].append(NO_END | {"id": end})
        text = json.dumps(native, ensure_ascii=False)
    return text, max(vocab_size, words.vocab_size, end + 1), end


def _source(params: StructuredOutputsParams) -> str:
    """The grammar as llguidance reads it."""
    from llguidance import LLMatcher, gbnf_to_lark

    if params.json is not None or params.json_object:
        schema = ANY_OBJECT if params.json is None else params.json
        whitespace: JsonCompileOptions = {}
        if params.disable_any_whitespace:
            whitespace["whitespace_flexible"] = False
        if params.whitespace_pattern is not None:
            whitespace["whitespace_pattern"] = params.whitespace_pattern
        try:
            # Not an empty one: a schema that is true or false takes none.
            made = LLMatcher.grammar_from_json_schema(schema, overrides=whitespace or None)
        except ValueError as error:
            raise _invalid(params, _told(str(error))) from None
        try:
            return _free(f"start: %json {json.dumps(json.loads(made)['grammars'][0]['json_schema'])}")
        except (ValueError, RecursionError):
            return made  # which is refused, with the reason
    if params.regex is not None:
        return _free(json.loads(LLMatcher.grammar_from_regex(params.regex))["grammars"][0]["lark_grammar"])
    if params.choice:
        return _free("start: " + " | ".join(map(json.dumps, params.choice)))
    text = params.grammar or ""
    if LARK.search(text) is None:
        if len(text.encode()) > MAX_GBNF_BYTES:
            raise _invalid(params, f"must be at most {MAX_GBNF_BYTES} bytes in GBNF; in Lark's syntax, more")
        try:
            text = gbnf_to_lark.gbnf_to_lark(text)
        except Exception as error:  # noqa: BLE001 - its reader raises bare ones, and whatever its regular expressions meet
            raise _invalid(params, f"is neither Lark's syntax nor GBNF: {_told(str(error))}") from None
    return _free(text)


def _free(lark: str) -> str:
    """The same grammar, whose texts may be cut into any tokens. Else a text that nothing else can follow is cut by the
    tokenizer, which takes what is spelled like a special token for one."""
    return f"{lark}\n{NO_FORCING}\n"


def _invalid(params: StructuredOutputsParams, why: str) -> InvalidInputError:
    shape = params.shape
    return InvalidGrammarError(f"structured_outputs.{shape}", getattr(params, shape), why)


def _told(text: str) -> str:
    """What a client is told: one line of at most 200 characters, of what the client wrote."""
    text = text.replace("<non-verbose/>", "").replace(IN_JSON, "").partition("<backtrace>")[0]
    lines = [line for line in text.splitlines() if OURS.search(line) is None]
    return " ".join(" ".join(lines).split())[:200]


def _bits(mask: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """[vocab] of a mask with a bit a token."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little", count=vocab_size)
    return bits.view(np.bool_)
