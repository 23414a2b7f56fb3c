"""Promise: a serving process looks through everything rarely, and finds garbage all the same. Both have a planted fault."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from blocktable.server import garbage
from blocktable.server.garbage import settle_memory

NUM_KEPT = 200_000
"""Twenty collections of the young; by Python's own numbers more than two hundred, and a full one is due."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Node:
    """Names itself."""

    def __init__(self) -> None:
        self.own = self


def check_full() -> None:
    """No full collection while many objects come to stay, and those of before are set aside."""
    garbage.settle_memory()
    before = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(NUM_KEPT)]
    assert gc.get_freeze_count() > 1000
    assert gc.get_stats()[2]["collections"] == before, f"{len(kept)} objects brought a full collection"


def check_found() -> None:
    """A cycle that dies young goes without anybody asking."""
    garbage.settle_memory()
    node = Node()
    is_there = weakref.ref(node)
    del node
    kept = []
    while is_there() is not None:
        kept.append([len(kept)])
        assert len(kept) < NUM_KEPT, "a cycle that died young is still there"


def test_objects_that_stay_bring_no_full_collection() -> None:
    check_full()


def test_a_cycle_that_dies_young_is_found() -> None:
    check_found()


def _frozen_only() -> None:
    gc.collect()
    gc.freeze()


def _never() -> None:
    settle_memory()
    gc.disable()


@pytest.mark.parametrize(("fault", "check"), [(_frozen_only, check_full), (_never, check_found)])
def test_a_planted_fault_is_caught(
    fault: Callable[[], None], check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "settle_memory", fault)
    with pytest.raises(AssertionError):
        check()
