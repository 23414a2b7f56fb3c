"""Ids of calls: no two are the same, and a model's chat template takes them when they are sent back."""

from __future__ import annotations

import secrets
import string

ALPHANUMERIC = string.ascii_letters + string.digits


def call_id() -> str:
    """As OpenAI writes them."""
    return f"call_{secrets.token_hex(12)}"


def nine_letters() -> str:
    """The only ones that Mistral's chat templates take."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
