"""Promise: a request has exactly one shape for its text, and a bad one is refused by field, value and bound."""

from typing import Any

import pytest

from blocktable.errors import InvalidInputError, UnknownOptionError
from blocktable.sampling.params import SamplingParams
from blocktable.sampling.structured import MAX_CHOICES, MAX_GRAMMAR_BYTES, StructuredOutputsParams

LONG = "a" * (MAX_GRAMMAR_BYTES + 1)

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "structured_outputs"),
    "two shapes": ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
    "no object": ({"json_object": False}, "structured_outputs"),
    "a schema that is a number": ({"json": 5}, "structured_outputs.json"),
    "a schema with what is no JSON": ({"json": {"const": {1}}}, "structured_outputs.json"),
    "a schema with NaN": ({"json": {"const": float("nan")}}, "structured_outputs.json"),
    "an empty expression": ({"regex": ""}, "structured_outputs.regex"),
    "a long expression": ({"regex": LONG}, "structured_outputs.regex"),
    "few characters of many bytes": ({"regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "structured_outputs.regex"),
    "a lone surrogate": ({"regex": "\ud800"}, "structured_outputs.regex"),
    "a long grammar": ({"grammar": LONG}, "structured_outputs.grammar"),
    "no choices": ({"choice": []}, "structured_outputs.choice"),
    "a text as choices": ({"choice": "ab"}, "structured_outputs.choice"),
    "many choices": ({"choice": ["a"] * (MAX_CHOICES + 1)}, "structured_outputs.choice"),
    "long choices": ({"choice": ["a" * 1000] * 100}, "structured_outputs.choice"),
    "an empty choice": ({"choice": ["a", ""]}, "structured_outputs.choice[1]"),
    "a number as choice": ({"choice": ["a", 1]}, "structured_outputs.choice[1]"),
    "a flag that is none": ({"json_object": 1}, "structured_outputs.json_object"),
    "whitespace in no JSON": ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
    "whitespace and none": (
        {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
        "structured_outputs.whitespace_pattern",
    ),
    "what is not served": ({"regex": "a", "structural_tag": "x"}, "structured_outputs.structural_tag"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_shape_is_refused_by_its_field(case: str) -> None:
    options, field = BAD[case]
    with pytest.raises(InvalidInputError) as refusal:
        StructuredOutputsParams(**options)
    assert refusal.value.field == field
    assert len(str(refusal.value)) < 600


def test_an_unknown_option_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="did you mean structured_outputs.regex"):
        StructuredOutputsParams(regexp="a")


def test_a_mapping_of_its_options_will_do() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b", "a"]})
    assert params.structured_outputs == StructuredOutputsParams(choice=("a", "b"))
    assert SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "null"})).structured_outputs == (
        StructuredOutputsParams(json='{"type": "null"}')
    )
    with pytest.raises(InvalidInputError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="regex")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [{"json": "{}"}, {"json_object": True}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": "a"}])
def test_it_says_which_shape_it_is(shape: dict[str, Any]) -> None:
    assert StructuredOutputsParams(**shape).shape == next(iter(shape))


def test_whatever_is_off_may_be_said() -> None:
    assert StructuredOutputsParams(
        regex="a", json=None, json_object=None, disable_fallback=False, structural_tag=None
    ) == StructuredOutputsParams(regex="a")


@pytest.mark.parametrize(
    "others", [{"allowed_token_ids": [1]}, {"bad_words": ["x"]}, {"min_tokens": 2, "stop_token_ids": [1]}], ids=str
)
def test_what_might_forbid_all_that_a_shape_needs_is_refused(others: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="goes without") as refusal:
        SamplingParams(structured_outputs={"regex": "a"}, **others)
    assert refusal.value.field == "structured_outputs"
