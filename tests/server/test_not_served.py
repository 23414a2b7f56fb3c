"""Promise: what is refused here as not served yet is what the engine does not serve: when a feature lands there, a test here
fails until the HTTP side serves it too."""

import inspect
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from blocktable.errors import InvalidGrammarError, InvalidInputError, MissingExtraError
from blocktable.sampling.params import NOT_SERVED, SamplingParams
from blocktable.server import generation
from blocktable.server.engine_client import EngineRequest, Piece
from blocktable.server.openapi import document
from blocktable.server.protocol.chat import TAKEN_NAMES, ChatRequest, Message
from blocktable.server.protocol.completions import CompletionRequest
from blocktable.server.protocol.generation import SAMPLING, StreamOptions
from blocktable.server.protocol.structured import StructuredOutputs
from blocktable.server.protocol.tokens import DetokenizeRequest, TokenizeRequest

from .conftest import MakeServer
from .fake_engine import FakeEngine

KINDS: list[Any] = [
    CompletionRequest, ChatRequest, Message, StreamOptions, StructuredOutputs, TokenizeRequest, DetokenizeRequest
]  # fmt: skip

OURS_ALONE = {
    "annotations", "audio", "chat_template", "continue_final_message", "continuous_usage_stats",
    "disable_additional_properties", "disable_fallback", "documents", "echo", "structural_tag",
    "function_call", "functions", "metadata", "modalities", "prediction", "reasoning_effort", "refusal",
    "service_tier", "store", "suffix", "web_search_options",
}  # fmt: skip
"""Refused for reasons of the HTTP side: the engine knows nothing of them."""


def refused_fields() -> set[str]:
    return {name for kind in KINDS for name in kind.OFF}


def served_by_the_engine(not_served: dict[str, object]) -> set[str]:
    """Fields that are refused here although the engine has them."""
    return {name for name in refused_fields() - OURS_ALONE if name not in not_served}


def test_nothing_is_refused_that_the_engine_serves() -> None:
    assert served_by_the_engine(NOT_SERVED) == set(), (
        "take it out of OFF, hand it to SamplingParams, and answer with what it brings"
    )


def test_a_feature_that_lands_is_noticed() -> None:
    """The check above can fail."""
    landed = {name: off for name, off in NOT_SERVED.items() if name not in ("use_beam_search", "length_penalty")}
    assert served_by_the_engine(landed) == {"use_beam_search", "length_penalty"}


def test_the_engine_refuses_them_itself() -> None:
    for name in (refused_fields() - OURS_ALONE) & NOT_SERVED.keys():
        with pytest.raises(InvalidInputError, match="not served yet"):
            SamplingParams(**{name: "something"})


def test_every_option_of_the_engine_can_be_said_or_is_refused_by_name() -> None:
    """One of vLLM's options is no unknown field here, but for what clients have no business with."""
    inside = {"detokenize", "output_kind", "n"}
    said_in_two_ways = {"logprobs", "structured_outputs"}
    known = {field.name for field in msgspec.structs.fields(CompletionRequest)}
    options = {name for name, one in inspect.signature(SamplingParams).parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert options - inside - said_in_two_ways == set(SAMPLING)
    not_of_clients = {"extra_args", "flat_logprobs", "guided_decoding", "logits_processors", "stream_interval"}
    rare = {"early_stopping", "logprob_token_ids", "repetition_detection", "thinking_token_budget"}
    assert NOT_SERVED.keys() - known == not_of_clients | rare


@pytest.mark.parametrize("kind", KINDS)
def test_every_refused_field_exists_and_shows_its_off_values(kind: Any) -> None:
    from blocktable.server.app import OPERATIONS
    from blocktable.server.serving import Serving

    from .fake_engine import FakeEngine

    schema = document(OPERATIONS, Serving.of(FakeEngine()))["components"]["schemas"][kind.__name__]
    fields = {field.name for field in msgspec.structs.fields(kind)}
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == fields
    for name, values in kind.OFF.items():
        assert schema["properties"][name]["enum"] == [None, *values]


def test_no_client_can_say_what_a_template_gets_anyway() -> None:
    """Every argument of the functions that options of a template pass through has a taken name."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    from blocktable.text.tokenizer import Tokenizer
    from blocktable.text.tokenizer_parts import TokenizerParts

    functions = [render_jinja_template, PreTrainedTokenizerBase.apply_chat_template, Tokenizer.render_chat]
    functions.append(TokenizerParts.apply_chat_template)
    for function in functions:
        for name, one in inspect.signature(function).parameters.items():
            assert one.kind is one.VAR_KEYWORD or name in TAKEN_NAMES, f"{function.__qualname__}: {name}"


def test_the_http_side_loads_no_torch() -> None:
    """Neither by its routes nor by `blocktable serve`: the engine's process has it alone."""
    program = "import sys, blocktable.server.app, blocktable.server.serve_app, blocktable.server.server_process\n"
    program += "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
@pytest.mark.parametrize(
    "refusal",
    [
        InvalidInputError("structured_outputs", "a grammar", "is not served with this model's tokenizer: no bytes"),
        MissingExtraError("structured_outputs", "structured", "llguidance"),
        InvalidGrammarError("structured_outputs.json_object", True, "costs too much"),
    ],
    ids=lambda refusal: type(refusal).__name__,
)
def test_a_shape_is_refused_by_the_name_that_its_client_gave_it(
    refusal: Exception, field: str, planted: bool, serve: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted:
        monkeypatch.setattr(generation, "_as_said", lambda error, shape_field: error)

    async def say(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        raise refusal
        yield  # a generator

    shape = {"type": "json_object"} if field == "response_format" else {"json_object": True}
    answer = serve(FakeEngine(say)).client().post("/v1/completions", json={"prompt": [1], field: shape})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == ("invalid_grammar" if isinstance(refusal, InvalidGrammarError) else "not_served")
    assert (error["param"].partition(".")[0] == field) is not (planted and field == "response_format")
