"""Owns the small schedulers whose events the tests read, and what happens to them."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from blocktable import Scheduler, _core
from blocktable.events import Records, Stored, read_records

from .listener import Listener

SIZES = {
    "num_blocks": 24,
    "block_size": 4,
    "vocab_size": 50,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
}


class World:
    """A scheduler to which random things happen: shared prompts, failed steps, aborts, resets, more content than fits."""

    def __init__(self, seed: int = 0, **changes: Any) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(**(SIZES | {"event_buffer_size": 256} | changes))

    def happen(self) -> None:
        """One thing, then one step."""
        rng, scheduler = self.rng, self.scheduler
        kind = rng.random()
        if kind < 0.5 and scheduler.num_waiting < 4:
            head = [rng.randrange(3)] * rng.randrange(0, 20)
            scheduler.submit(head + [rng.randrange(50) for _ in range(rng.randrange(1, 9))], max_tokens=rng.randrange(1, 9))
        elif kind < 0.6:
            scheduler.abort(rng.randrange(1, 200))
        elif kind < 0.63:
            scheduler.reset_prefix_cache()
        plan = scheduler.plan(0)
        if plan.num_seqs and rng.random() < 0.1:
            scheduler.fail(plan.step)
        elif plan.num_seqs:
            wanted = len(plan.sample_rows)
            ids = np.array([rng.randrange(50) for _ in range(wanted)], np.int64)
            scheduler.commit(plan.step, ids, np.arange(wanted + 1), 0)

    def published(self) -> set[tuple[int, bytes]]:
        """(group, key) of all that is published, from a snapshot."""
        return {(event.group, event.key) for event in self.snapshot().events if isinstance(event, Stored)}

    def snapshot(self) -> Records:
        data = self.scheduler.event_snapshot()
        assert data is not None
        return read_records(data)


@pytest.fixture
def world(seed: int) -> World:
    """A scheduler whose ring never overflows."""
    return World(seed)


@pytest.fixture
def planted() -> Callable[[str], Any]:
    """Runs what is inside with a planted fault of the core."""

    @contextmanager
    def plant(fault: str) -> Iterator[None]:
        _core.set_mutant(fault)
        try:
            yield
        finally:
            _core.set_mutant(None)

    return plant


@pytest.fixture
def make_listener() -> Iterator[Callable[..., Listener]]:
    """Consumers, all closed at the end."""
    made: list[Listener] = []

    def make(*endpoints: str | None) -> Listener:
        made.append(Listener(*endpoints))
        return made[-1]

    yield make
    for listener in made:
        listener.close()
