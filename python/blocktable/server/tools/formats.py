"""How models write calls: the formats that are read, by vLLM's names, and which one a chat template asks for.

Before: `--tool-call-parser`, or the template alone. After: `tool_use.py` makes readers of it.
"""

from __future__ import annotations

from .call_reader import CallReader
from .hermes import OPENING, HermesReader
from .llama3_json import Llama3JsonReader
from .mistral import CALLS, MistralReader

FORMATS: dict[str, type[CallReader]] = {
    "hermes": HermesReader,
    "llama3_json": Llama3JsonReader,
    "mistral": MistralReader,
}

OTHERS = ("<function=", "<arg_key>")
"""In templates that have Hermes' tags around something else than JSON."""


def format_of(template: str) -> str | None:
    """The format that a chat template plainly shows to its model; None where it shows none that is read here."""
    plain = template.replace("\\", "")  # quotation marks inside of the template's own strings
    if OPENING in plain and '"arguments":' in plain and not any(one in plain for one in OTHERS):
        return "hermes"
    if "<|start_header_id|>" in plain and '"parameters":' in plain:
        return "llama3_json"
    return "mistral" if CALLS in plain else None
