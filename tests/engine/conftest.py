"""Owns the small model and the engines that the tests of the engine run on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from blocktable import LLM, AsyncLLM

from .tiny_llama import make_model, make_tokenizer

MakeLLM = Callable[..., LLM]
MakeAsync = Callable[..., AsyncLLM]

SMALL = {"num_blocks": 64, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    """A random Llama of two layers; every engine borrows it and gives it back."""
    return make_model()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """Bytes, and a chat template."""
    return make_tokenizer()


@pytest.fixture
def make_llm(tiny_model: Any, tiny_tokenizer: Any, one_torch_thread: None) -> Iterator[MakeLLM]:
    """Engines on the small model, all shut down at the end; keywords change their options."""
    made: list[LLM] = []

    def make(**changes: Any) -> LLM:
        options = {"tokenizer": tiny_tokenizer, "self_check": False} | SMALL | changes
        made.append(LLM(options.pop("model", tiny_model), **options))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@contextmanager
def judge(model: Any, tokenizer: Any) -> Iterator[LLM]:
    """An engine whose answers a module compares with, computed once, before a test plants anything; with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with LLM(model, tokenizer=tokenizer, self_check=False, **SMALL) as llm:
            yield llm
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    """One engine on the small model."""
    return make_llm()


@pytest.fixture
def make_async(tiny_model: Any, tiny_tokenizer: Any, one_torch_thread: None) -> Iterator[MakeAsync]:
    """As `make_llm`, with a step thread each."""
    made: list[AsyncLLM] = []

    def make(**changes: Any) -> AsyncLLM:
        options = {"tokenizer": tiny_tokenizer, "self_check": False} | SMALL | changes
        made.append(AsyncLLM(options.pop("model", tiny_model), **options))
        return made[-1]

    yield make
    for engine in made:
        assert engine.shutdown(timeout_s=60)


@pytest.fixture
def engine(make_async: MakeAsync) -> AsyncLLM:
    """One engine with a step thread."""
    return make_async()
