"""A tokenizer as plain values, which travel to a process that has no model and loads no torch.

Before: `Tokenizer.parts` takes them from one that transformers loaded, wherever its files were. After: `Tokenizer(parts)`, in
any process, has the same ids, the same text and the same chats. Always: what is here is text and numbers; no file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """As much of a transformers tokenizer as `Tokenizer` reads."""

    name_or_path: str
    native: str
    """The native tokenizer in its own JSON."""
    encode_special_tokens: bool
    """Whether special tokens in a text are read as plain text; not part of that JSON."""
    eos_token_id: int | None
    chat_template: str | dict[str, str] | None
    """One, or several by name: `default`, and `tool_use` where tools are given."""
    special_tokens: dict[str, str]
    """By the names that chat templates call them, such as `bos_token`."""

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        """The native tokenizer, a new one each time."""
        native = tokenizers.Tokenizer.from_str(self.native)
        native.encode_special_tokens = self.encode_special_tokens
        return native

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """What transformers calls them."""
        return self.special_tokens

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        """The conversation as one text, as transformers' tokenizers render it, with the same options; `tokenize` has to be
        False."""
        if options.pop("tokenize", True):
            raise ValueError("only text is rendered here")
        # The first import takes about a second, but brings no torch.
        from transformers.utils.chat_template_utils import render_jinja_template

        said = [{name: value for name, value in message.items() if value is not None} for message in conversation]
        [text], _ = render_jinja_template(
            conversations=[said],
            chat_template=self._template(has_tools=options.get("tools") is not None),
            **(self.special_tokens | options),
        )
        return str(text)

    def _template(self, *, has_tools: bool) -> str:
        template = self.chat_template
        if not isinstance(template, Mapping):
            return template or ""
        if has_tools and "tool_use" in template:
            return template["tool_use"]
        if "default" not in template:
            raise ValueError(f"none of the chat templates is the default: {', '.join(sorted(template))}")
        return template["default"]
