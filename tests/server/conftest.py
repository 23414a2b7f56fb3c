"""Owns the engines and servers of these tests: the engine tests' small model, behind HTTP, and
those of `processes.py`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from blocktable import AsyncLLM
from blocktable.server.in_process import InProcessEngine
from tests.engine.conftest import make_async, tiny_model, tiny_tokenizer

from .live import Live, live
from .processes import fake_dir, launch, served

__all__ = ["fake_dir", "launch", "make_async", "served", "tiny_model", "tiny_tokenizer"]

MakeServer = Callable[..., Live]


@pytest.fixture(scope="session")
def tiny_dir(tiny_model: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model as a directory, for processes of their own."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def engine(make_async: Callable[..., AsyncLLM]) -> AsyncLLM:
    """One engine on the small model."""
    return make_async()


@pytest.fixture
def serve() -> Iterator[MakeServer]:
    """Servers over engines, all ended at the end; arguments as of `live`."""
    with ExitStack() as stack:

        def make(engine: Any, *arguments: Any, **options: Any) -> Live:
            client = InProcessEngine(engine) if isinstance(engine, AsyncLLM) else engine
            return stack.enter_context(live(client, *arguments, **options))

        yield make


@pytest.fixture
def server(serve: MakeServer, engine: AsyncLLM) -> Live:
    """One server over `engine`, without keys."""
    return serve(engine)
