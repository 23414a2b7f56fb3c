"""A step between its plan and its commit, and what it needs of others: a model, and somebody who takes KV events.

Before: `step_loop.py` has a plan. After: the same file commits it. Always: what of a plan is read after its commit is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .._core import Plan, Scheduler
from ..sampling.sampler import Sampled
from .model_runs import Run
from .prompt_scores import PromptRows


class Forward(Protocol):
    """The part of `ModelRunner` that a step needs."""

    def forward(
        self, plan: Plan, token_ids: NDArray[np.int64] | None = None, scored: PromptRows | None = None, /
    ) -> torch.Tensor:
        """[K, vocab] logits of the plan's `sample_rows`; `token_ids` [T] if it does not know all of them. `scored` is given
        the logits of its rows."""


class EventSink(Protocol):
    """The part of `KVEventPublisher` that a step needs."""

    def drain(self, source: Scheduler) -> None:
        """Take the KV events of the last step. Never waits, never raises."""

    def close(self) -> None:
        """Publish what waits, and end."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A step whose model runs. The plan's arrays end with its commit: what is read later stands here."""

    plan: Plan
    plan_ns: int
    cpu_ns: int
    """Of the plan, of the thread that made it."""
    rows: NDArray[np.int32]  # [K] of each entry of `sample_rows`
    run: Run
    children: NDArray[np.int64] | None = None
    """[K] which answer of its request each entry is, if some row stands for several: the step ends the prompt of a family."""
    scored: PromptRows | None = None
    """The rows that score prompts, if there are any."""


def children_of(plan: Plan, sequences: NDArray[np.intp]) -> NDArray[np.int64] | None:
    """See `UnderWay.children`. `sequences` [K], ascending: the sequence of each entry of the plan's `sample_rows`."""
    if not (sequences[1:] == sequences[:-1]).any():
        return None
    first = np.searchsorted(sequences, sequences)
    requests = plan.sample_requests
    children: NDArray[np.int64] = requests - requests[first]
    return children if children.any() else None


def filled(plan: Plan, before: Sampled) -> NDArray[np.int64] | None:
    """[T] the plan's tokens with those that were sampled since it was made; None if it knew all of them. An entry without a
    token ends its request, whose row may compute anything."""
    sources = plan.token_sources
    missing = np.flatnonzero(sources >= 0)
    if not missing.size:
        return None
    token_ids = plan.token_ids.astype(np.int64)
    token_ids[missing] = np.maximum(before.ids[sources[missing]], 0)
    return token_ids
