"""`/v1/chat/completions`: a conversation, continued by the assistant."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from .generation import GENERATION_OFF, Count, GenerationRequest, NumLogprobs
from .logprobs import ChatLogprobs, PromptLogprobs
from .not_served import NotServed, Off
from .usage import Usage

MAX_TOOLS = 128

TAKEN_NAMES = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "conversations",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "self",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
)
"""What a template, or transformers around it, gets anyway: no client may say it another way. Nor may it the names of special
tokens, which end in `_token`."""

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

TemplateVariables = Annotated[
    dict[str, str | int | float | bool | None],
    Meta(extra_json_schema={"propertyNames": {"not": {"anyOf": [{"enum": list(TAKEN_NAMES)}, {"pattern": "_token$"}]}}}),
]
"""Variables of the model's chat template."""


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message; only text is served."""

    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the assistant called."""

    name: str
    arguments: str
    """JSON of an object; in an answer, as the model wrote it."""


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A call that the assistant makes, or made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One turn. An assistant's answer can be sent back as it came."""

    OFF: ClassVar[Off] = {"annotations": ([],), "audio": (), "function_call": (), "refusal": ("",)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Meta(min_length=1)] | None = None
    """Parts are joined by line ends. Null beside tool calls only."""
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    annotations: NotServed = None
    audio: NotServed = None
    function_call: NotServed = None
    refusal: NotServed = None


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema, shown to the model as it is; left out: there are none."""
    strict: bool | None = None
    """Where a call is forced its arguments always keep to the schema. Elsewhere they are as the model writes them."""


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that is offered."""

    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which one."""

    name: FunctionName


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """A conversation to continue. `max_tokens` left out is what the model's length leaves."""

    OFF: ClassVar[Off] = GENERATION_OFF | {
        "audio": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "reasoning_effort": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    """Written into the prompt where the model's chat template has a place for them, else refused."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """`none`: tools are not shown, and no call is looked for. `auto`, also where it is left out: the model calls or not.
    `required`, or one function: it has to."""
    parallel_tool_calls: bool | None = None
    """False: only the first call is told."""
    add_generation_prompt: bool | None = None
    """True unless said otherwise: the assistant's turn is begun."""
    chat_template_kwargs: TemplateVariables | None = None
    """Such as `enable_thinking`."""
    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Log probabilities of the tokens of the answer."""
    top_logprobs: NumLogprobs | None = None
    """And those of so many best tokens at each place; with `logprobs` only."""

    audio: NotServed = None
    chat_template: NotServed = None
    continue_final_message: NotServed = None
    documents: NotServed = None
    function_call: NotServed = None
    functions: NotServed = None
    modalities: NotServed = None
    prediction: NotServed = None
    reasoning_effort: NotServed = None
    service_tier: NotServed = None
    store: NotServed = None
    web_search_options: NotServed = None

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationRequest`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def forces_call(self) -> bool:
        """The answer has to be one."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def shape_field(self) -> str:
        """See `GenerationRequest`."""
        return "tool_choice" if self.forces_call else super().shape_field


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null where it calls and says nothing."""
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: Answer
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None
    """As of completions; `tool_calls`: it came to its own end, and so did its calls."""
    stop_reason: int | str | None = None


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    """If they were asked for and the prompt was computed."""
