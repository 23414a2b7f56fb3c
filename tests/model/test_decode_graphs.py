"""CUDA's graphs as far as they can be seen without a GPU: what one refers to stays, and captures are made in their order."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra `engine`")

import torch

from blocktable.model import decode_graphs
from blocktable.model.decode_graphs import CudaGraphs


class Memory:
    """What a step reads and writes."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As much of torch.cuda as a capture calls, noted."""
    noted: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: noted.append("wait"))
    graph = SimpleNamespace(replay=lambda: noted.append("replay"), pool=lambda: (0, 1))

    def capture(_graph: Any, pool: Any) -> Any:
        noted.append(f"capture into {pool}")
        return nullcontext()

    for name, found in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _stream: nullcontext(),
        "CUDAGraph": lambda: graph,
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, found)
    return noted


def capture(graphs: CudaGraphs, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], torch.Tensor], Any]:
    """A captured step, and a look at the memory that only the step refers to."""
    memory = Memory()
    replay = graphs.capture(partial(lambda memory: run() + memory.tensor, memory))
    return replay, weakref.ref(memory)


def lives(kept: Any) -> bool:
    gc.collect()
    return kept() is not None


def test_a_step_runs_twice_before_it_is_captured_and_never_again(calls: list[str]) -> None:
    graphs, runs = CudaGraphs(), []

    def run() -> torch.Tensor:
        calls.append("run")
        runs.append(len(runs))
        return torch.tensor([float(len(runs))])

    replay, _ = capture(graphs, run)
    assert calls == ["wait", "run", "run", "wait", "capture into None", "run"]
    assert [replay().item(), replay().item()] == [3.0, 3.0]
    assert calls[6:] == ["replay", "replay"]
    capture(graphs, run)
    assert "capture into (0, 1)" in calls


def test_what_a_graph_reads_and_writes_lives_as_long_as_the_graph(calls: list[str]) -> None:
    replay, kept = capture(CudaGraphs(), lambda: torch.zeros(1))
    assert lives(kept)
    del replay
    assert not lives(kept), "the control: nothing else held it"


def test_a_graph_that_lets_go_of_its_memory_is_told(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: CudaGraphs, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        out = run()
        return lambda: out

    monkeypatch.setattr(decode_graphs.CudaGraphs, "capture", forgetful)
    replay, kept = capture(CudaGraphs(), lambda: torch.zeros(1))
    assert not lives(kept)
    del replay
