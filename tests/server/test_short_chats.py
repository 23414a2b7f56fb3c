"""Promise: a short conversation is written where it is read, without a thread, if the model's chat template is known to be
quick; every other one beside the event loop. Each check has a planted fault that it catches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from blocktable.server import reader as module
from blocktable.server.engine_client import EngineClient
from blocktable.server.protocol.chat import Message, TextPart, Tool
from blocktable.server.reader import Reader

from .fake_engine import FakeEngine

SHORT = [Message(role="user", content="What is a block?")]
TOOL = Tool(type="function", function={"name": "look"})  # type: ignore[arg-type]

LONG: dict[str, tuple[list[Message], list[Tool] | None, dict[str, Any]]] = {
    "a long text": ([Message(role="user", content="x" * 1000)], None, {}),
    "many messages": ([Message(role="user", content="x")] * 16, None, {}),
    "parts": ([Message(role="user", content=[TextPart(type="text", text="x")])], None, {}),
    "a name": ([Message(role="user", content="x", name="y" * 1000)], None, {}),
    "reasoning": ([Message(role="assistant", content="x", reasoning_content="y" * 1000)], None, {}),
    "tools": (SHORT, [TOOL], {}),
    "variables": (SHORT, None, {"enable_thinking": True}),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine is so slow that writing nothing takes so long."""
    monkeypatch.setattr(module, "QUICK_S", 0.02)


class Writer:
    """A tokenizer that notes on which threads it writes conversations; `cost_s` of CPU each."""

    has_chat_template = True
    longest_token = 8

    def __init__(self, cost_s: float = 0.0) -> None:
        self.threads: list[threading.Thread] = []
        self._cost_s = cost_s

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **said: Any) -> str:
        self.threads.append(threading.current_thread())
        end_s = time.thread_time() + self._cost_s
        while time.thread_time() < end_s:
            pass
        return "tools" if said.get("tools") else "text"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1, 2]


def threads_of(writer: Writer, messages: list[Message], tools: list[Tool] | None, options: dict[str, Any]) -> set[bool]:
    """Whether it was written on the event loop's thread: once or more, each time the same or not."""

    async def main() -> set[bool]:
        engine: EngineClient = FakeEngine()
        reader = Reader(engine, 1)

        async def fetched() -> Any:
            return writer

        reader._tokenizer = asyncio.ensure_future(fetched())
        try:
            await reader.prepare()
            del writer.threads[:]
            ids = await reader.chat(messages, tools, add_generation_prompt=True, options=options)
            assert ids == [1, 2]
        finally:
            reader.close()
        return {thread is threading.current_thread() for thread in writer.threads}

    return asyncio.run(main())


def check_short() -> None:
    assert threads_of(Writer(), SHORT, None, {}) == {True}


def check_slow() -> None:
    """A template that takes its time is nothing for the event loop, whatever the conversation."""
    assert threads_of(Writer(0.06), SHORT, None, {}) == {False}


def check_long(name: str) -> None:
    assert threads_of(Writer(), *LONG[name]) == {False}


def test_a_short_conversation_is_written_where_it_is_read() -> None:
    check_short()


def test_a_template_that_takes_its_time_has_a_thread() -> None:
    check_slow()


@pytest.mark.parametrize("name", LONG)
def test_any_other_conversation_has_a_thread(name: str) -> None:
    check_long(name)


def test_a_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "QUICK_S", 1.0)
        with pytest.raises(AssertionError):
            check_slow()
    with monkeypatch.context() as patch:
        patch.setattr(module, "QUICK_S", 0.0)
        with pytest.raises(AssertionError):
            check_short()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_is_short", lambda messages: True)
        for name in ("a long text", "many messages", "parts", "a name", "reasoning"):
            with pytest.raises(AssertionError):
                check_long(name)
