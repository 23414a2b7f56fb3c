"""Promise: a sequence that takes only tokens that its guide allows ends as a text of its shape, and never gets stuck before;
what costs too much is refused, whatever else happens."""

import json
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
import tokenizers
from llguidance import gbnf_to_lark

from blocktable.errors import InvalidGrammarError, InvalidInputError
from blocktable.sampling import grammar, grammar_source, guide
from blocktable.sampling.grammar import Grammars
from blocktable.sampling.grammar_source import MAX_GBNF_BYTES, lark_of
from blocktable.sampling.grammar_trial import ENDED, LIMITS, Trial, _why, _write
from blocktable.sampling.guide import Guide
from blocktable.sampling.structured import StructuredOutputsParams
from blocktable.text.tokenizer import Tokenizer
from tests.engine.tiny_llama import END_ID, VOCAB_SIZE, make_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "boolean"}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def is_json(schema: Any) -> Callable[[str], bool]:
    return lambda text: jsonschema_rs.validate(schema, json.loads(text)) is None


def is_nested(text: str) -> bool:
    return text == "(" * (len(text) // 2) + "x" + ")" * (len(text) // 2)


SHAPES: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "a person": ({"json": PERSON}, is_json(PERSON)),
    "a person without whitespace": (
        {"json": PERSON, "disable_any_whitespace": True},
        lambda text: is_json(PERSON)(text) and json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) == text,
    ),
    "a tree": ({"json": TREE, "whitespace_pattern": "_"}, lambda text: is_json(TREE)(text.replace("_", ""))),
    "anything": ({"json": "true"}, lambda text: [json.loads(text)]),
    "a date": ({"regex": "[0-9]{4}-(0[1-9]|1[0-2])"}, re.compile("[0-9]{4}-(0[1-9]|1[0-2])").fullmatch),
    "an end that need not be": ({"regex": "ab*"}, re.compile("ab*").fullmatch),
    "characters of several bytes": ({"regex": "[é漢😀]{1,4}"}, re.compile("[é漢😀]{1,4}").fullmatch),
    "choices": ({"choice": ["yes", "yes!", 'n"o\n', "ÿ"]}, ["yes", "yes!", 'n"o\n', "ÿ"].__contains__),
    "what is spelled like special tokens": (
        {"json": {"enum": ["<|start|>", "a<|end|>"]}},
        ['"<|start|>"', '"a<|end|>"'].__contains__,
    ),
    "an expression that spells an end": ({"regex": r"<\|end\|>!*"}, re.compile(r"<\|end\|>!*").fullmatch),
    "GBNF": ({"grammar": 'root ::= "(" root ")" | "x"'}, is_nested),
    "Lark": ({"grammar": 'start: "(" start ")" | "x"'}, is_nested),
}


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer(make_tokenizer())


@pytest.fixture(scope="module")
def grammars(words: Tokenizer) -> Grammars:
    return Grammars(words, VOCAB_SIZE)


def walk(guide: Guide, rng: random.Random, most: int) -> list[int] | None:
    """The tokens of a text, each drawn among those that are allowed; None if it was not complete after `most` of them."""
    taken: list[int] = []
    while not guide.is_over and len(taken) < most:
        allowed = guide.allowed.nonzero()[0].tolist()
        if END_ID in allowed and (len(taken) > most // 2 or rng.random() < 0.3):
            return taken
        token = rng.choice([one for one in allowed if one != END_ID])
        guide.take(token)
        taken.append(token)
    assert guide.failure is None
    return taken if guide.is_over else None


def check_shapes(grammars: Grammars, words: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    for name, (options, is_right) in SHAPES.items():
        made = grammars.compile(StructuredOutputsParams(**options))
        found = [walk(made.guide([END_ID]), rng, 300) for _ in range(12)]
        whole = [tokens for tokens in found if tokens is not None]
        assert whole, name
        for tokens in whole:
            text = words.decode(tokens)
            assert is_right(text), (name, text)


def test_what_is_allowed_leads_to_a_text_of_the_shape(grammars: Grammars, words: Tokenizer, seed: int) -> None:
    check_shapes(grammars, words, seed)


@pytest.mark.parametrize("planted", ["ends anywhere", "one mask for all", "a token is not told", "tokens are forced"])
def test_a_planted_fault_is_caught(planted: str, words: Tokenizer, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if planted == "ends anywhere":

        def ends(guide: Guide, allowed: Any) -> Any:
            allowed = allowed.copy()
            allowed[guide._end_ids] = True
            return allowed

        monkeypatch.setattr(Guide, "_with_ends", ends)
    elif planted == "one mask for all":
        bits = guide.bits
        first: list[Any] = []

        def same(mask: bytes, vocab_size: int) -> Any:
            first.append(bits(mask, vocab_size))
            return first[0].copy()

        monkeypatch.setattr(guide, "bits", same)
    elif planted == "tokens are forced":
        monkeypatch.setattr(grammar_source, "_free", lambda lark: lark)
    else:
        take = Guide.take
        monkeypatch.setattr(Guide, "take", lambda guide, token: None if token % 7 == 3 else take(guide, token))
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check_shapes(Grammars(words, VOCAB_SIZE), words, seed)


def test_a_guide_without_end_tokens_is_over_where_nothing_can_follow(grammars: Grammars) -> None:
    made = grammars.compile(StructuredOutputsParams(choice=["ab"]))
    guide = made.guide([])
    for token in (ord("a"), ord("b")):
        byte_token = next(one for one in guide.allowed.nonzero()[0].tolist())
        assert guide.allowed.sum() == 1
        guide.take(byte_token)
        assert guide.is_over is (token == ord("b"))
    assert guide.failure is None


@pytest.mark.parametrize("planted", [False, True])
def test_an_end_that_reads_as_text_comes_only_where_the_grammar_is_satisfied(
    planted: bool, grammars: Grammars, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    [end], [letter], [last] = (words.encode(one, add_special_tokens=False) for one in "bac")
    if planted:
        monkeypatch.setattr(Guide, "_with_ends", lambda guide, allowed: allowed)
    guide = grammars.compile(StructuredOutputsParams(regex="[ab]+c?")).guide([end])
    allowed = [guide.allowed.nonzero()[0].tolist()]
    guide.take(letter)
    allowed.append(guide.allowed.nonzero()[0].tolist())
    if planted:
        assert end in allowed[0]
    else:
        assert allowed == [[letter], sorted([letter, end, last])]


def test_a_text_that_no_token_completes_is_no_text_of_its_shape(grammars: Grammars, words: Tokenizer) -> None:
    [end], [letter] = (words.encode(one, add_special_tokens=False) for one in "ba")
    made = grammars.compile(StructuredOutputsParams(choice=["ab"]))
    for ends, failed in (([], False), ([end], True)):
        guide = made.guide(ends)
        guide.take(letter)
        assert (guide.is_over, guide.failure is not None) == (failed, failed)
    assert not made.is_spent


def byte_words(eos_token_id: int | None, decoder: Any) -> Any:
    """A tokenizer of three letters, of which 0 is `a`."""
    native = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "c": 2}, []))
    native.decoder = decoder
    return SimpleNamespace(vocab_size=3, eos_token_id=eos_token_id, native_text=native.to_str)


@pytest.mark.parametrize("eos", [None, 2])
def test_without_an_end_token_every_token_is_text(eos: int | None) -> None:
    made = Grammars(byte_words(eos, tokenizers.decoders.ByteLevel()), 3).compile(StructuredOutputsParams(regex="[abc]"))
    assert made.guide([]).allowed.tolist() == [True, True, eos is None]


def test_a_tokenizer_that_spells_no_bytes_is_refused_where_a_grammar_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an engine with it starts."""
    tried = []
    make = grammar.make_tokenizer
    monkeypatch.setattr(grammar, "make_tokenizer", lambda *parts: (tried.append(parts), make(*parts))[1])
    grammars = Grammars(byte_words(2, tokenizers.decoders.Metaspace()), 3)
    grammars.prepare()
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="is not served with this model's tokenizer"):
            grammars.compile(StructuredOutputsParams(regex="a"))
    assert len(tried) == 1
    grammars.close()


def test_guides_of_one_grammar_do_not_know_each_other(grammars: Grammars) -> None:
    made = grammars.compile(StructuredOutputsParams(regex="ab|ba"))
    first, second = made.guide([]), made.guide([])
    a, b = first.allowed.nonzero()[0].tolist()
    first.take(a)
    assert first.allowed.nonzero()[0].tolist() == [b]
    assert second.allowed.nonzero()[0].tolist() == [a, b]
    second.take(b)
    assert first.allowed.nonzero()[0].tolist() == [b]


def test_the_same_shape_is_compiled_once(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(words, VOCAB_SIZE)
    one = StructuredOutputsParams(regex="a")
    assert grammars.compile(one) is grammars.compile(StructuredOutputsParams(regex="a"))
    monkeypatch.setattr(grammar, "KEPT", 2)
    kept = grammars.compile(one)
    for text in "bc":
        grammars.compile(StructuredOutputsParams(regex=text))
    assert grammars.compile(one) is not kept


WRONG: dict[str, dict[str, Any]] = {
    "an expression that does not close": {"regex": "(ab"},
    "an expression that looks ahead": {"regex": "(?=a)b"},
    "an expression that only the empty text has": {"regex": "()"},
    "a schema that is no JSON": {"json": "{"},
    "a schema of no kind": {"json": {"type": "animal"}},
    "a schema that nothing satisfies": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "a schema that is elsewhere": {"json": {"$ref": "file:///etc/passwd"}},
    "a schema that goes in circles": {"json": {"$ref": "#"}},
    "a deep schema": {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    "a deep expression": {"regex": "(" * 3000 + "a" + ")" * 3000},
    "a grammar of nothing": {"grammar": "start: missing"},
    "a grammar in no language": {"grammar": "S -> a S b"},
    "a deep grammar": {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    "a long GBNF": {"grammar": "root ::= " + " | ".join(['"a"'] * MAX_GBNF_BYTES)},
    "whitespace that is no expression": {"json": {}, "whitespace_pattern": "("},
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed_is_refused(case: str, grammars: Grammars) -> None:
    params = StructuredOutputsParams(**WRONG[case])
    with pytest.raises(InvalidGrammarError) as refusal:
        grammars.compile(params)
    assert refusal.value.field == f"structured_outputs.{params.shape}"
    assert 0 < len(refusal.value.bound) <= 400
    assert "non-verbose" not in str(refusal.value)


COSTLY = StructuredOutputsParams(json={"type": "integer", "multipleOf": 99999989})
"""Takes hours."""


@pytest.fixture
def guarded(words: Tokenizer) -> Any:
    grammars = Grammars(words, VOCAB_SIZE)
    grammars.prepare()
    yield grammars
    grammars.close()


def test_a_grammar_that_takes_hours_is_refused_and_the_next_one_served(guarded: Grammars) -> None:
    before = time.process_time()
    with pytest.raises(InvalidGrammarError, match="takes more than 2 s to compile"):
        guarded.compile(COSTLY)
    assert time.process_time() - before < 1.0, "it was compiled here"
    made = guarded.compile(StructuredOutputsParams(choice=["a"]))
    assert made.guide([END_ID]).allowed.sum() == 1


def test_the_other_process_ends_with_its_owner(guarded: Grammars) -> None:
    guarded.compile(StructuredOutputsParams(choice=["a"]))
    trial = guarded._trial
    assert trial is not None
    process = trial._process
    assert process is not None
    assert process.poll() is None
    guarded.close()
    assert process.poll() is not None


def test_the_other_process_ends_with_its_owners_end_of_the_pipe_in_the_middle_of_a_grammar(guarded: Grammars) -> None:
    trial = guarded._trial
    assert trial is not None
    process = trial._running()
    _write(process.stdin, {"source": lark_of(COSTLY)})
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 0, "it ended by its limit, not by the end of the pipe"


def test_a_trial_has_its_limits_and_leaves_no_picture_of_its_memory(guarded: Grammars) -> None:
    guarded.compile(StructuredOutputsParams(choice=["a"]))
    trial = guarded._trial
    assert trial is not None
    assert trial._process is not None
    limits = {limit: resource.prlimit(trial._process.pid, limit)[0] for limit in (resource.RLIMIT_CORE, *BOUND)}
    assert limits.pop(resource.RLIMIT_CORE) == 0
    assert all(0 < most < 2**40 for most in limits.values())


BOUND = (resource.RLIMIT_CPU, resource.RLIMIT_AS)


@pytest.mark.parametrize("planted", [False, True])
def test_an_end_waits_for_no_trial_and_none_follows_it(
    planted: bool, guarded: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = guarded._trial
    assert trial is not None
    process = trial._running()
    if planted:
        # It waits for the limit instead.
        monkeypatch.setattr(process, "kill", lambda: None)
    with ThreadPoolExecutor(1) as thread:
        refused = thread.submit(trial.check, lark_of(COSTLY))
        while not trial._lock.locked():
            time.sleep(0.001)
        guarded.close()
        assert refused.result() == ENDED
    assert (process.returncode == -signal.SIGKILL) is not planted
    with pytest.raises(InvalidGrammarError, match="the engine has ended"):
        guarded.compile(StructuredOutputsParams(choice=["a"]))
    assert trial._process is None


def test_a_trial_that_is_killed_refuses_that_grammar_only(guarded: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    guarded.compile(StructuredOutputsParams(choice=["a"]))
    trial = guarded._trial
    assert trial is not None
    running = Trial._running

    def killed(self: Trial) -> Any:
        process = running(self)
        process.kill()
        process.wait()
        return process

    with monkeypatch.context() as planted:
        planted.setattr(Trial, "_running", killed)
        with pytest.raises(InvalidGrammarError, match="ended by signal 9"):
            guarded.compile(StructuredOutputsParams(choice=["b"]))
    guarded.compile(StructuredOutputsParams(choice=["b"]))


def walk_until_it_is_over(guide: Guide, seed: int) -> int:
    """How many tokens it took."""
    rng = random.Random(seed)
    for taken in range(3000):
        if guide.is_over:
            return taken
        guide.take(rng.choice([one for one in guide.allowed.nonzero()[0].tolist() if one != END_ID]))
    raise AssertionError("it is never over")


MANY_STATES = StructuredOutputsParams(regex="(.*a.{20}){1,20}")


@pytest.mark.parametrize("planted", [False, True])
def test_a_step_that_costs_too_much_ends_the_guide_and_the_next_one_goes_as_far(
    planted: bool, words: Tokenizer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expression whose states are so many that the limit is met on the way. Planted is that the grammar is kept."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 200)
    grammars = Grammars(words, VOCAB_SIZE)
    if planted:
        monkeypatch.setattr(grammar.Grammar, "is_spent", property(lambda _: False, lambda *_: None), raising=False)
    lengths = []
    for _ in range(3):
        made = grammars.compile(MANY_STATES).guide([END_ID])
        lengths.append(walk_until_it_is_over(made, seed))
        assert made.failure is not None
        assert "too many" in made.failure
    assert lengths[0] > 1
    assert (lengths == lengths[:1] * 3) is not planted
    grammars.compile(StructuredOutputsParams(choice=["another"]))
    assert (MANY_STATES in grammars._kept) is planted


def step(one: Guide, rng: random.Random) -> list[int]:
    """What it allowed before it took one of that."""
    allowed: list[int] = one.allowed.nonzero()[0].tolist()
    one.take(rng.choice([token for token in allowed if token != END_ID]))
    return allowed


@pytest.mark.parametrize("planted", [None, "ends with it", "begins anew", "takes too long", "is replayed too long"])
def test_a_text_that_uses_up_the_states_ends_no_other_of_its_grammar(
    planted: str | None, words: Tokenizer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the others allow is what they would allow alone."""
    alone = Grammars(words, VOCAB_SIZE).compile(MANY_STATES).guide([END_ID])
    monkeypatch.setattr(grammar, "SHARED_STATES", 200)
    if planted == "ends with it":
        monkeypatch.setattr(Guide, "_go_on_alone", lambda *_: False)
    elif planted == "begins anew":
        go_on = Guide._go_on_alone
        monkeypatch.setattr(Guide, "_go_on_alone", lambda one, taken: go_on(one, []))
    elif planted == "takes too long":
        monkeypatch.setattr(grammar.Grammar, "start_again", lambda _: None)
    elif planted == "is replayed too long":
        monkeypatch.setattr(guide, "REPLAY_S", -1.0)
    made = Grammars(words, VOCAB_SIZE).compile(MANY_STATES)
    first, other = made.guide([END_ID]), made.guide([END_ID])
    ours, theirs = random.Random(seed), random.Random(seed)
    told = [(step(other, ours), step(alone, theirs)) for _ in range(20)]
    hungry = random.Random(seed + 1)
    while not made.is_spent and not first.is_over:
        step(first, hungry)
    assert made.is_spent
    for _ in range(60):
        if other.is_over:
            break
        told.append((step(other, ours), step(alone, theirs)))
    is_right = other.failure is None and all(one == two for one, two in told)
    assert is_right is (planted is None)


def test_a_grammar_that_takes_long_to_compile_is_not_started_again(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its texts share all the states that there may be, and it counts for as much."""
    few = Grammars(words, VOCAB_SIZE).compile(MANY_STATES)
    monkeypatch.setattr(grammar, "AGAIN_S", 0.0)
    all_states = Grammars(words, VOCAB_SIZE).compile(MANY_STATES)
    assert few.start_again() is not None
    assert all_states.start_again() is None
    assert all_states.most_bytes == LIMITS["max_lexer_states"] * grammar.STATE_BYTES > few.most_bytes


def test_a_grammar_whose_beginning_needs_more_states_than_texts_share_has_all(
    words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "SHARED_STATES", 3)
    made = Grammars(words, VOCAB_SIZE).compile(StructuredOutputsParams(choice=["yes", "no"]))
    assert made.most_bytes == LIMITS["max_lexer_states"] * grammar.STATE_BYTES


@pytest.mark.parametrize("planted", [False, True])
def test_what_is_kept_is_bounded_in_memory(planted: bool, words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    each = grammar.SHARED_STATES * grammar.STATE_BYTES
    if not planted:
        monkeypatch.setattr(grammar, "KEPT_BYTES", 3 * each)
    grammars = Grammars(words, VOCAB_SIZE)
    for text in "abcde":
        grammars.compile(StructuredOutputsParams(choice=[text]))
    assert (len(grammars._kept) == 3) is not planted
    assert grammars.kept(StructuredOutputsParams(choice=["e"])) is not None
    assert (grammars.kept(StructuredOutputsParams(choice=["a"])) is None) is not planted


def test_each_end_of_a_trial_is_told_as_what_it_is() -> None:
    assert _why(-signal.SIGXCPU) == "takes more than 2 s to compile"
    assert _why(-signal.SIGABRT) == "takes more than 1024 MiB to compile"
    assert _why(-signal.SIGSEGV) == "was not compiled: the process that tried it ended by signal 11"
    assert _why(3) == "was not compiled: the process that tried it ended by exit code 3"


@pytest.mark.parametrize(
    ("lark", "taken"), [('start: "a" <|end|> "b"', "a"), ('start: "a"+ <|end|> "b"', "aa"), ("start: <|end|>", "")]
)
def test_an_end_token_inside_a_grammar_is_no_end_of_its_text(
    lark: str, taken: str, grammars: Grammars, words: Tokenizer
) -> None:
    params = StructuredOutputsParams(grammar=lark)
    if not taken:
        with pytest.raises(InvalidGrammarError, match="no text of at least one token"):
            grammars.compile(params)
        return
    one = grammars.compile(params).guide([END_ID])
    for token in words.encode(taken, add_special_tokens=False):
        assert not one.allowed[END_ID]
        one.take(token)
    assert (one.is_over, one.failure is not None) == (taken == "a", taken == "a")


@pytest.mark.parametrize("text", ["\n", " ", "\r\n", "start\n", "start ", "\n start"])
def test_long_grammars_are_told_apart_at_once(text: str, grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in llguidance's own way, which takes a minute."""
    monkeypatch.setattr(gbnf_to_lark, "is_lark_syntax", None)
    with pytest.raises(InvalidGrammarError, match="at most 8192 bytes in GBNF"):
        grammars.compile(StructuredOutputsParams(grammar="root ::=" + text * (60_000 // len(text))))


def test_they_are_told_apart_as_llguidance_does(seed: int) -> None:
    rng, found = random.Random(seed), set()
    for _ in range(3000):
        text = "".join(
            rng.choice(["start", ":", " ", "\n", "\r", "\t", "a", "%llguidance", "{"]) for _ in range(rng.randint(1, 7))
        )
        is_lark = grammar_source.LARK.search(text) is not None
        assert is_lark is gbnf_to_lark.is_lark_syntax(text), repr(text)
        found.add(is_lark)
    assert found == {True, False}


@pytest.mark.parametrize("shape", [{"json": {"type": "animal"}}, {"grammar": "start: missing"}, {"regex": "(a"}])
def test_what_is_told_is_of_what_was_written(shape: dict[str, Any], grammars: Grammars) -> None:
    with pytest.raises(InvalidGrammarError) as refusal:
        grammars.compile(StructuredOutputsParams(**shape))
    assert not re.search("%|animal.*animal", refusal.value.bound)


def test_what_is_told_has_nothing_of_the_inside() -> None:
    assert grammar_source.told("panic: out of\n range <backtrace> 0: at /usr/src/x.rs") == "panic: out of range"
