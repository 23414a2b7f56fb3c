"""Reads prompts for the HTTP side: texts, conversations and ids become token ids, long ones beside the event loop.

Before: a route has a record. After: `generation.py` sends token ids to the engine. Always: the tokenizer is the engine's own,
sent as plain values; every list of ids that leaves here has at least one, all of them in the vocabulary, and room for one
more in the model's length; the event loop is never held up by a long text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ..engine.request import read_token_ids
from ..errors import EngineDeadError, InvalidInputError
from ..text.tokenizer import Tokenizer
from .engine_client import EngineClient, EngineInfo
from .errors import ApiError, disagree, refused
from .logprobs import Speller
from .protocol.chat import TAKEN_NAMES, Message, Tool

LONG_TEXT = 1000
"""Characters or ids from which on a prompt is read on a thread: shorter ones take well under a millisecond."""

SHORT_TURNS = 16
"""Messages of a conversation, fewer than which are short if their texts are."""

QUICK_S = 0.001
"""CPU seconds that a chat template may take for a short conversation to be written on the event loop: going to a thread and
back costs more than most take."""

MORE_THAN_TEXT = ("name", "reasoning_content", "tool_call_id", "tool_calls")
"""What a message may have beside its content, and a short one has not."""

NOT_READY_S = 0.1
"""How often `prepare` looks whether the engine is ready."""

T = TypeVar("T")


class Reader:
    """Of one engine. Used on one event loop; `close` gives the threads back."""

    def __init__(self, engine: EngineClient, num_threads: int) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(num_threads, "blocktable-readers")
        self._tokenizer: asyncio.Task[Tokenizer | None] | None = None
        self._longest_token = 1
        self._speller: Speller | None = None
        self._is_template_quick = False

    def close(self) -> None:
        """No prompt is read any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def prepare(self) -> None:
        """Wait for the engine, and have everything read that the first client would have to wait for."""
        with suppress(InvalidInputError):  # no tokenizer; a template may refuse anything
            tokenizer = await self._when_ready()
            if tokenizer.has_chat_template:
                await self._threaded(lambda: self._try_template(tokenizer))

    async def tokenizer(self) -> Tokenizer:
        """The engine's, fetched once. Raises `InvalidInputError` if it has none, `EngineDeadError` before it was ready."""
        fetched = self._tokenizer
        if fetched is None or (fetched.done() and (fetched.cancelled() or fetched.exception() is not None)):
            fetched = self._tokenizer = asyncio.ensure_future(self._fetch())
        # Who asked first may leave.
        found = fetched.result() if fetched.done() else await asyncio.shield(fetched)
        if found is None:
            raise InvalidInputError("prompt", "a text", "this engine has no tokenizer: give token ids")
        return found

    async def speller(self) -> Speller:
        """How the engine's tokens read; by their numbers if it has no tokenizer."""
        try:
            tokenizer = await self.tokenizer()
        except InvalidInputError:
            tokenizer = None
        if self._speller is None or self._speller.tokenizer is not tokenizer:
            self._speller = Speller(tokenizer)
        return self._speller

    async def prompts(self, prompt: str | list[str | int | list[int]], max_prompts: int) -> list[list[int]]:
        """Token ids of each prompt of a completion request. Raises `InvalidInputError` or `ApiError` naming the place."""
        if isinstance(prompt, str):
            return [await self.text("prompt", prompt)]
        kinds = {type(one) for one in prompt}
        if len(kinds) != 1:
            raise InvalidInputError("prompt", "a mixture", "must be a text, token ids, or a list of one of those")
        if kinds == {int}:
            return [await self.ids("prompt", prompt)]
        if len(prompt) > max_prompts:
            raise InvalidInputError("prompt", f"{len(prompt)} prompts", f"must be at most {max_prompts}")
        read: Callable[[str, Any], Awaitable[list[int]]] = self.text if kinds == {str} else self.ids
        return [await read(f"prompt[{place}]", one) for place, one in enumerate(prompt)]

    async def text(self, field: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text that fits the model."""
        tokenizer = await self.tokenizer()
        info = self._engine.info
        self._check_characters(field, text, info)
        ids = await self.beside(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return await self.ids(field, ids)

    async def ids(self, field: str, ids: Any) -> list[int]:
        """Token ids that fit the model."""
        info = self._engine.info
        if len(ids) >= info.max_model_len:
            raise _too_long(field, f"has {len(ids)} tokens", info)
        if not (0 < len(ids) < LONG_TEXT and min(ids) >= 0 and max(ids) < info.vocab_size):  # the usual ones need no array
            await self.beside(len(ids), lambda: read_token_ids(field, ids, info.vocab_size))
        return list(ids)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation as the model's chat template writes it."""
        tokenizer = await self.tokenizer()
        for name in options:
            if name in TAKEN_NAMES or name.endswith("_token"):
                raise InvalidInputError(f"chat_template_kwargs.{name}", options[name], "is not the client's to say")

        said = {"add_generation_prompt": add_generation_prompt, **options}

        def render() -> str:
            return _render(tokenizer, messages, tools, said)

        # A template is a program: what it takes is known of short conversations only, and of the branches that all of those go.
        is_short = self._is_template_quick and not tools and not options and _is_short(messages)
        text = render() if is_short else await self._threaded(render)
        return await self.text("messages", text, add_special_tokens=add_special_tokens)

    async def decode(self, ids: list[int]) -> str:
        """The text of these ids, special tokens included."""
        tokenizer = await self.tokenizer()
        await self.beside(len(ids), lambda: ids and read_token_ids("tokens", ids, self._engine.info.vocab_size))
        return await self.beside(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=False))

    async def spelled(self, ids: list[int]) -> list[str]:
        """How the vocabulary spells each."""
        tokenizer = await self.tokenizer()
        return await self.beside(len(ids), lambda: [tokenizer.spelling(one) for one in ids])

    async def _when_ready(self) -> Tokenizer:
        while True:
            try:
                return await self.tokenizer()
            except EngineDeadError:
                await asyncio.sleep(NOT_READY_S)

    async def _fetch(self) -> Tokenizer | None:
        parts = await self._engine.read_tokenizer()
        if parts is None:
            return None
        tokenizer = await self._threaded(lambda: Tokenizer(parts))
        self._longest_token = await self._threaded(lambda: tokenizer.longest_token)
        return tokenizer

    def _try_template(self, tokenizer: Tokenizer) -> None:
        """On a reader's thread: have the chat template compiled, and see how long the longest short conversation takes."""
        tokenizer.render_chat([{"role": "user", "content": "."}])
        turns = [{"role": role, "content": "." * (LONG_TEXT // SHORT_TURNS)} for role in ("user", "assistant")]
        begun_s = time.thread_time()
        tokenizer.render_chat((turns * SHORT_TURNS)[: SHORT_TURNS - 1])
        self._is_template_quick = time.thread_time() - begun_s < QUICK_S

    def _check_characters(self, field: str, text: str, info: EngineInfo) -> None:
        """What cannot fit, however it is cut into tokens, is not cut into tokens."""
        if len(text) >= info.max_model_len * self._longest_token:
            raise _too_long(field, f"has {len(text)} characters", info)

    async def beside(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which takes as long as reading so many characters."""
        return work() if size < LONG_TEXT else await self._threaded(work)

    async def _threaded(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _too_long(field: str, what: str, info: EngineInfo) -> ApiError:
    most = info.max_model_len - 1
    message = (
        f"{field} {what}: at most {most} tokens fit, as max_model_len is {info.max_model_len} and an answer has one or more"
    )
    return ApiError(400, message, param=field, code="context_length_exceeded")


def _is_short(messages: Sequence[Message]) -> bool:
    return len(messages) < SHORT_TURNS and sum(map(_num_characters, messages)) < LONG_TEXT


def _num_characters(message: Message) -> int:
    """Of its text. A message that is more than a text counts as long."""
    content = message.content
    if not isinstance(content, str) or any(getattr(message, name) is not None for name in MORE_THAN_TEXT):
        return LONG_TEXT
    return len(content)


def _render(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] | None, said: Mapping[str, Any]) -> str:
    turns = [_turn(place, message) for place, message in enumerate(messages)]
    try:
        if not tools:
            return tokenizer.render_chat(turns, **said)
        text = tokenizer.render_chat(turns, tools=[msgspec.to_builtins(tool) for tool in tools], **said)
        has_place = text != tokenizer.render_chat(turns, **said)
    except InvalidInputError as error:
        raise refused(error.field, error.bound, "template_refuses") from None
    if not has_place:
        raise refused("tools", "the model's chat template has no place for them", "template_refuses")
    return text


def _turn(place: int, message: Message) -> dict[str, Any]:
    """A message as templates read it: the arguments of a call are an object there, and a text in OpenAI's shape."""
    turn: dict[str, Any] = msgspec.to_builtins(message)
    if message.content is None and not message.tool_calls:
        raise disagree(f"messages[{place}].content", "may be left out beside tool_calls only")
    for number, call in enumerate(turn.get("tool_calls") or ()):
        field = f"messages[{place}].tool_calls[{number}].function.arguments"
        try:
            # Strictly: neither NaN nor half of a surrogate pair gets into a prompt.
            call["function"]["arguments"] = msgspec.json.decode(call["function"]["arguments"] or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise refused(field, "must be the JSON of an object", "invalid_arguments") from None
    return turn
