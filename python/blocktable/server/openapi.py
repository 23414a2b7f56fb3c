"""The OpenAPI document, made from the same table and records that the routes run on.

Before: `app.py` has the table. After: `GET /openapi.json`, and the tests that try every operation against it. Always: it says
what this server takes: a field that is not served yet shows only the values that leave it off, token ids end with this
model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from .._core import __version__
from .engine_client import EngineInfo
from .operation import Operation
from .protocol.chat import Message
from .protocol.error import ErrorReply
from .protocol.generation import StreamOptions
from .protocol.structured import StructuredOutputs
from .serving import Serving

REFERENCE = "#/components/schemas/{name}"

ERRORS = {
    "400": "A field is wrong: `param` names it.",
    "401": "No API key, or an unknown one.",
    "404": "No such model.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests wait; `retry-after` says when there will be room, where that is known.",
    "500": "A fault of the server.",
    "503": "The engine is starting, draining or dead.",
}
OF_ALL = ("401", "500", "503")
OF_BODIES = ("400", "404", "408", "413", "415")


def document(operations: Iterable[Operation], serving: Serving) -> dict[str, Any]:
    """The document of these operations. Raises `EngineDeadError` before the engine was ready."""
    table = list(operations)
    paths: dict[str, Any] = {}
    for one in table:
        paths.setdefault(one.path.replace(":path}", "}"), {})[one.method.lower()] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "blocktable", "version": __version__, "description": "OpenAI's API, served from a paged KV cache."},
        "paths": paths,
        "components": {
            "schemas": _schemas(table, serving.engine.info),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(one: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _reference(one.reply)}}
    if one.makes_text:
        content["text/event-stream"] = {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}
    names = [
        *OF_ALL,
        *(OF_BODIES if one.body else ()),
        *(["404"] if "{" in one.path else ()),
        *(["429"] if one.makes_text else ()),
    ]
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    for name in sorted(set(names)):
        error = {"application/json": {"schema": _reference(ErrorReply)}}
        responses[name] = {"description": ERRORS[name], "content": error}
    said: dict[str, Any] = {"summary": one.summary, "operationId": one.handler.__name__, "responses": responses}
    if one.body is not None:
        said["requestBody"] = {"required": True, "content": {"application/json": {"schema": _reference(one.body)}}}
    if "{" in one.path:
        said["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    return said


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=kind.__name__)}


def _schemas(operations: list[Operation], info: EngineInfo) -> dict[str, Any]:
    bodies = [one.body for one in operations if one.body is not None]
    kinds = [*bodies, *(one.reply for one in operations), ErrorReply]
    _, schemas = msgspec.json.schema_components(list(dict.fromkeys(kinds)), ref_template=REFERENCE)
    with_off: list[Any] = [*bodies, Message, StreamOptions, StructuredOutputs]
    for kind in with_off:
        for name, values in kind.OFF.items():
            schemas[kind.__name__]["properties"][name] = {"enum": [None, *values], "description": "Not served yet."}
    for body, field in (("CompletionRequest", "prompt"), ("EmbeddingRequest", "input")):
        schemas[body]["properties"][field] = _one_kind(schemas[body]["properties"][field])
    for ids in _token_ids(schemas):
        ids["maximum"] = info.vocab_size - 1
    own = {"CompletionRequest": "logprobs", "ChatRequest": "top_logprobs"}
    for body, field in (*own.items(), *((body, "prompt_logprobs") for body in own)):
        for number in _whole_numbers(schemas[body]["properties"][field]):
            number["maximum"] = info.max_logprobs
    for body in ("CompletionRequest", "ChatRequest"):
        biases = schemas[body]["properties"]["logit_bias"]["anyOf"][0]
        biases["propertyNames"]["pattern"] = f"^(?:{numbers_up_to(info.vocab_size - 1)})$"
    return schemas


def numbers_up_to(last: int) -> str:
    """A regular expression of the whole numbers from 0 to `last`, as JSON writes them."""
    digits = str(last)
    ways = ["[1-9]" + "[0-9]" * (length - 1) for length in range(1, len(digits))]
    for place, digit in enumerate(digits):
        low = 1 if place == 0 else 0
        # The same beginning, a smaller digit here, and anything behind it.
        if int(digit) > low:
            ways.append(f"{digits[:place]}[{low}-{int(digit) - 1}]" + "[0-9]" * (len(digits) - place - 1))
    return "|".join(dict.fromkeys(["0", *ways, digits]))


def _one_kind(prompt: dict[str, Any]) -> dict[str, Any]:
    """A list holds one kind of prompts; the type that reads it is looser, as types have it."""
    text, several = prompt["anyOf"]
    kinds = several.pop("items")["anyOf"]
    return {"anyOf": [text, *({**several, "items": kind} for kind in kinds)]}


def _token_ids(schema: Any) -> Iterator[dict[str, Any]]:
    """Wherever a token id is described: a whole number that may be 0 and has the bound of all counts."""
    if isinstance(schema, dict):
        for name in ("prompt", "input", "tokens", "stop_token_ids", "allowed_token_ids"):
            if name in schema.get("properties", {}):
                yield from _whole_numbers(schema["properties"][name])
        for value in schema.values():
            yield from _token_ids(value)


def _whole_numbers(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "integer" and "maximum" in schema:
            yield schema
        for value in schema.values():
            yield from _whole_numbers(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _whole_numbers(value)
