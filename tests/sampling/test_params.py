"""What a request may ask: every bad value is refused with its field, value and bound, before anything else happens."""

import copy
import dataclasses
import itertools
import pickle
from typing import Any

import numpy as np
import pytest

from blocktable.errors import InvalidInputError, UnknownOptionError
from blocktable.sampling import checks
from blocktable.sampling import params as module
from blocktable.sampling.params import NOT_SERVED, RequestOutputKind, ResolvedSampling, SamplingParams, collect_end_ids

NAN, INF = float("nan"), float("inf")
FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize")


def resolve(params: SamplingParams, **changes: Any) -> ResolvedSampling:
    """For a model of 100 tokens, length 50, end tokens 2 and 3, and a prompt of 10."""
    return params.resolve(
        **{"vocab_size": 100, "eos_token_ids": [2, 3], "max_model_len": 50, "num_prompt_tokens": 10} | changes
    )


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": (),
        "allowed_token_ids": None,
        "bad_words": (),
        "logprobs": None,
        "prompt_logprobs": None,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "detokenize": True,
        "structured_outputs": None,
        "output_kind": RequestOutputKind.CUMULATIVE,
    }


BAD: list[tuple[str, Any]] = [
    *(("n", value) for value in (0, -1, 2**31, 1.0, True, "1", None)),
    *(("temperature", value) for value in (NAN, INF, -INF, -0.1, -1, 1e7, 10**400, True, "1", None, [1.0], 1j)),
    *(("top_p", value) for value in (0, 0.0, 2, 1.0001, -0.5, NAN, INF, True, "0.9", None)),
    *(("top_k", value) for value in (-2, 1.5, 5.0, 2**31, 2**63, True, "5", None)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN, INF, True, "0", None)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 1.0, True, "7", 10**5000)),
    *(("max_tokens", value) for value in (0, -1, 2**31, 2**63, 10**5000, 1e308, 5.0, True, "5")),
    *(("min_tokens", value) for value in (-1, 17, 2**63, 1.0, True, None)),
    *(("stop", value) for value in (5, b"x", {"a": 1}, iter(["a"]), ["a"] * 33, ["a"] * 10**6)),
    *(("stop[1]", ["a", value]) for value in ("", "x" * 257, "x" * 10**6, 5, None, ["b"], "\ud800")),
    ("stop[0]", ""),
    *(("stop_token_ids", value) for value in (5, "12", {1: 2}, list(range(257)), [1] * 10**6)),
    *(("stop_token_ids[1]", [1, value]) for value in (-1, 1.0, True, "1", None, 2**31, 2**63)),
    *(
        (name, value)
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.1, 2.1, NAN, INF, -INF, 1e308, 10**400, True, "1", None)
    ),
    *(("repetition_penalty", value) for value in (0, -1, 0.009, 100.1, NAN, INF, True, "1", None)),
    *(("logit_bias", value) for value in (5, "5", [], [(1, 2.0)], ((1,),), (1, 2), dict.fromkeys(range(1025), 1.0))),
    *(
        ("logit_bias", {key: 1.0})
        for key in (-1, "-1", "AI", "1.5", 1.5, True, None, "", "01", "1_0", " 1", "²", 2**31, "9" * 5000, (1, 2))
    ),
    ("logit_bias", {5: 1.0, "5": 2.0}),
    *(("logit_bias[5]", {"5": value}) for value in (NAN, INF, -INF, 1e9, -100.1, True, "1", None)),
    *(("allowed_token_ids", value) for value in (5, "12", {1: 2}, [], (), list(range(4097)), [1] * 10**6)),
    *(("allowed_token_ids[1]", [1, value]) for value in (-1, 1.0, True, "1", None, 2**31, 2**63)),
    *(("bad_words", value) for value in ("ab", 5, b"x", {"a": 1}, ["a"] * 33)),
    *(("bad_words[1]", ["a", value]) for value in ("", "x" * 257, 5, None, "\ud800")),
    *(("logprobs", value) for value in (-1, 1025, 2**31, 2**63, 1.0, True, "5")),
    *((name, value) for name in FLAGS for value in (1, 0, None, "no")),
]


@pytest.mark.parametrize(
    "field, value", BAD, ids=lambda value: repr(value)[:40] if not isinstance(value, int) else f"int{value.bit_length()}"
)
def test_a_bad_value_is_refused_by_field_and_bound(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        SamplingParams(**{field.partition("[")[0]: value})
    assert refusal.value.field == field
    assert refusal.value.bound
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "allowed_token_ids", "bad_words"])
def test_a_list_that_is_too_long_is_refused_before_its_items_are_read(field: str) -> None:
    """Refusing costs the same, however large the value is."""

    class Unread(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("an item was read")

        __getitem__ = __reversed__ = __contains__ = __iter__

    with pytest.raises(InvalidInputError) as refusal:
        SamplingParams(**{field: Unread([1] * 10**6)})
    assert refusal.value.field == field
    with pytest.raises(AssertionError, match="an item was read"):
        SamplingParams(**{field: Unread([1] * 3)})


AT_THE_BOUND: list[tuple[str, Any]] = [
    ("n", 1),
    *(("temperature", value) for value in (0, 1e6, np.float32(0.5))),
    *(("top_p", value) for value in (1, 1e-9)),
    *(("top_k", value) for value in (-1, 0, 2**31 - 1)),
    *(("min_p", value) for value in (0, 1)),
    *(("seed", value) for value in (0, 2**63 - 1, -(2**63))),
    *(("max_tokens", value) for value in (1, 2**31 - 1, None, np.int64(5))),
    ("min_tokens", 16),
    *(("stop", value) for value in ("x" * 256, ["a"] * 32, ("a",), None)),
    *(("stop_token_ids", value) for value in ([0, 2**31 - 1], np.array([3, 4]), None)),
    *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2, 2, np.float32(0.5))),
    *(("repetition_penalty", value) for value in (0.01, 100)),
    *(("logit_bias", value) for value in ({}, None, {0: -100, "2147483647": 100}, {np.int64(5): np.float32(1)}, ((1, 2.0),))),
    *(("allowed_token_ids", value) for value in ([0], list(range(4096)), np.array([1]), None)),
    *(("bad_words", value) for value in ([], ["x" * 256] * 32, ("a",), None)),
    *(("logprobs", value) for value in (0, 1024, None, np.int64(5))),
]


@pytest.mark.parametrize("name, value", AT_THE_BOUND, ids=lambda value: repr(value)[:40])
def test_a_value_at_its_bound_is_taken(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


def test_values_come_out_in_one_form() -> None:
    params = SamplingParams(
        top_k=-1, stop="a", stop_token_ids=[5, 5, 4], temperature=np.float32(0.5), seed=-1, max_tokens=np.int64(5)
    )
    assert params.top_k == 0
    assert params.stop == ("a",)
    assert params.stop_token_ids == (5, 4)
    assert type(params.temperature) is float
    assert type(params.max_tokens) is int
    assert params.seed is None
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")
    assert SamplingParams(logit_bias={"7": 1, 5: -2.5}).logit_bias == ((5, -2.5), (7, 1.0))
    assert SamplingParams(allowed_token_ids=[3, 1, 3]).allowed_token_ids == (3, 1)


@pytest.mark.parametrize(
    "option, near",
    [("temprature", "temperature"), ("maxtokens", "max_tokens"), ("top_q", "top_p"), ("stop_token", "stop_token_ids")],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(option: str, near: str) -> None:
    with pytest.raises(UnknownOptionError, match=near) as refusal:
        SamplingParams(**{option: 1})
    assert refusal.value.field == option


@pytest.mark.parametrize("name", NOT_SERVED)
def test_an_option_of_vllm_that_is_not_served_is_refused_by_name_unless_it_is_off(name: str) -> None:
    SamplingParams(**{name: NOT_SERVED[name]})  # type: ignore[arg-type]
    SamplingParams(**{name: None})  # type: ignore[arg-type]
    for value in (0.5, 5, [5], {"5": 1.0}, "x", np.ones(3)):
        with pytest.raises(InvalidInputError, match="not served") as refusal:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert refusal.value.field == name


def test_output_kinds_are_those_of_vllm() -> None:
    assert [(kind.name, kind.value) for kind in RequestOutputKind] == [("CUMULATIVE", 0), ("DELTA", 1), ("FINAL_ONLY", 2)]
    assert SamplingParams().output_kind is SamplingParams(output_kind=None).output_kind is RequestOutputKind.CUMULATIVE
    assert SamplingParams(output_kind=1).output_kind is RequestOutputKind.DELTA
    for value in (3, -1, "DELTA", True, 1.0):
        with pytest.raises(InvalidInputError) as refusal:
            SamplingParams(output_kind=value)  # type: ignore[arg-type]
        assert refusal.value.field == "output_kind"


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidInputError) as refusal:
        SamplingParams(stop="x", detokenize=False)
    assert refusal.value.field == "stop"
    SamplingParams(stop_token_ids=[5], detokenize=False)


def test_a_record_is_frozen_and_compares_copies_and_travels() -> None:
    rules = {"logit_bias": {"5": 1}, "allowed_token_ids": [4], "bad_words": ["x"], "logprobs": 2, "presence_penalty": 1}
    params = SamplingParams(temperature=0.5, stop=["a"], seed=3, **rules)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    for other in (
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
        dataclasses.replace(params),
        SamplingParams(temperature=0.5, stop="a", seed=3, **rules),
    ):
        assert other == params
        assert hash(other) == hash(params)
    with pytest.raises(InvalidInputError):
        dataclasses.replace(params, top_p=2)


def test_resolving_bounds_lengths_by_what_is_left() -> None:
    assert resolve(SamplingParams()).max_tokens == 16
    assert resolve(SamplingParams(max_tokens=None)).max_tokens == 40
    assert resolve(SamplingParams(max_tokens=1000)).max_tokens == 40
    assert resolve(SamplingParams(max_tokens=None, min_tokens=30), num_prompt_tokens=40).min_tokens == 10
    assert resolve(SamplingParams(), num_prompt_tokens=49).max_tokens == 1
    # A prompt without room is the core's to refuse; the record stays sound.
    assert resolve(SamplingParams(), num_prompt_tokens=60).max_tokens == 1


def test_resolving_turns_off_what_cannot_narrow() -> None:
    assert resolve(SamplingParams(top_k=99)).top_k == 99
    assert resolve(SamplingParams(top_k=100)).top_k == 0
    assert resolve(SamplingParams(temperature=9e-6)).is_greedy
    assert not resolve(SamplingParams(temperature=1e-5)).is_greedy


def test_a_stop_token_outside_the_vocabulary_is_refused_by_its_place() -> None:
    resolve(SamplingParams(stop_token_ids=[0, 99]))
    with pytest.raises(InvalidInputError, match=r"stop_token_ids\[1\]=100: must be 0..99"):
        resolve(SamplingParams(stop_token_ids=[0, 100]))


@pytest.mark.parametrize(
    "options, field",
    [
        ({"logit_bias": {"99": 1, "100": 1}}, "logit_bias[100]"),
        ({"allowed_token_ids": [99, 100]}, "allowed_token_ids[1]"),
        ({"logprobs": 21}, "logprobs"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
)
def test_what_only_the_model_can_refuse_is_refused_by_its_place(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        resolve(SamplingParams(**options))
    assert refusal.value.field == field


def spell(text: str) -> list[int]:
    """A token a letter, from 50 on; a space is 40, and the letter z one that the model does not have."""
    return [40 if letter == " " else 1000 if letter == "z" else 50 + ord(letter) - ord("a") for letter in text]


def test_bad_words_are_spelled_as_they_stand_and_behind_a_space() -> None:
    got = resolve(SamplingParams(bad_words=["ab", "z", "c"]), encode=spell)
    assert got.bad_words_token_ids == ((50, 51), (40, 50, 51), (52,), (40, 52))
    assert resolve(SamplingParams(bad_words=["a"]), encode=lambda text: []).bad_words_token_ids == ()


CHOICES: list[tuple[dict[str, Any], str | None]] = [
    ({"allowed_token_ids": [50, 51], "bad_words": ["a"]}, None),
    ({"allowed_token_ids": [50], "bad_words": ["a"]}, "allowed_token_ids"),
    ({"allowed_token_ids": [50], "bad_words": ["ba"]}, "allowed_token_ids"),
    ({"allowed_token_ids": [2, 7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids"),
    ({"allowed_token_ids": [2, 7], "stop_token_ids": [7]}, None),
    ({"allowed_token_ids": [2, 7], "stop_token_ids": [7], "min_tokens": 1, "ignore_eos": True}, None),
    ({"stop_token_ids": list(range(4, 100)), "min_tokens": 1}, None),
    ({"stop_token_ids": [0, 1, *range(4, 100)], "min_tokens": 1}, "min_tokens"),
]


@pytest.mark.parametrize("options, field", CHOICES, ids=str)
def test_masks_that_may_leave_no_token_are_refused(options: dict[str, Any], field: str | None) -> None:
    if field is None:
        resolve(SamplingParams(**options), encode=spell)
        return
    with pytest.raises(InvalidInputError, match="leave a token to choose") as refusal:
        resolve(SamplingParams(**options), encode=spell)
    assert refusal.value.field == field


def test_masks_that_are_not_looked_at_together_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_check_choice", lambda resolved, vocab_size: None)
    with pytest.raises(pytest.fail.Exception):
        test_masks_that_may_leave_no_token_are_refused(*CHOICES[1])


def ends_are_right() -> bool:
    """The table of ends: each source alone and together, with and without ignore_eos."""
    for config, tokenizer, stop_ids, ignore in itertools.product((None, 7, [7, 8]), (None, 9), (None, [5], [7]), (False, True)):
        eos = module.collect_end_ids(config, tokenizer, None, [-1])
        named = {7, 8, 9} & ({config} if isinstance(config, int) else set(config or [])) | ({9} if tokenizer else set())
        got = resolve(SamplingParams(stop_token_ids=stop_ids, ignore_eos=ignore), eos_token_ids=eos)
        wanted = (set() if ignore else named) | set(stop_ids or [])
        if got.end_token_ids != tuple(sorted(wanted)):
            return False
        for end in wanted:
            is_own = end in named and not ignore
            if got.stop_reason(end) != (None if is_own else end):
                return False
    return True


def test_one_resolved_set_holds_every_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends_are_right()

    def first_only(*sources: Any) -> frozenset[int]:
        return frozenset(source for source in sources if isinstance(source, int))

    monkeypatch.setattr(module, "collect_end_ids", first_only)
    assert not ends_are_right(), "the mutant that reads single ids only must be seen"
    monkeypatch.undo()
    whole = SamplingParams.resolve

    def deaf(self: SamplingParams, **given: Any) -> ResolvedSampling:
        return whole(dataclasses.replace(self, ignore_eos=False), **given)

    monkeypatch.setattr(SamplingParams, "resolve", deaf)
    assert not ends_are_right(), "the mutant that does not hear ignore_eos must be seen"


def test_end_tokens_that_the_model_cannot_produce_are_left_out() -> None:
    assert resolve(SamplingParams(), eos_token_ids=[2, 100, 5000]).end_token_ids == (2,)
    assert collect_end_ids(-1, None, [3, -5]) == {3}


@pytest.mark.parametrize(
    "check", ["between", "whole", "number", "flag", "some", "texts", "token_ids", "biases", "_allowed", "refuse_others"]
)
def test_a_check_left_out_is_caught(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, some value that must be refused gets through (or falls over untyped)."""
    lets_through = {
        "between": lambda field, number, low, high: number,
        "whole": lambda field, value: value,
        "number": lambda field, value, **_: value,
        "flag": lambda field, value: value,
        "some": lambda field, value, limit, what: list(value),
        "texts": lambda field, value, most, longest: tuple(value or ()),
        "token_ids": lambda field, value, most: tuple(value or ()),
        "biases": lambda field, value, most, size: value,
        "_allowed": lambda value: value,
        "refuse_others": lambda others, served, not_served: None,
    }
    monkeypatch.setattr(module if check.startswith("_") else checks, check, lets_through[check])

    def refused(name: str, value: Any) -> bool:
        try:
            SamplingParams(**{name: value})
        except InvalidInputError:
            return True
        except Exception:
            return False
        return False

    values = [(field.partition("[")[0], value) for field, value in BAD]
    assert not all(refused(*pair) for pair in [*values, ("temprature", 1), ("length_penalty", 5)])
