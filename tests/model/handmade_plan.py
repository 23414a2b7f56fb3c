"""Plans made by hand: the arrays of `_core.Plan` without a scheduler, over blocks in no order.

`Pages` owns the block tables and what each sequence has run so far; `Pages.plan` gives the next step. A runner cannot tell them
from the core's.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktable.model.runner import ModelRunner


@dataclass(frozen=True)
class HandmadePlan:
    """The attributes of `_core.Plan` that a model runner reads."""

    step: int
    num_seqs: int
    num_tokens: int
    seq_slots: NDArray[np.int32]
    query_starts: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    token_sources: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    dirty: NDArray[np.int32]
    dirty_ids: NDArray[np.int32]
    copies: NDArray[np.int32]
    sample_rows: NDArray[np.int32]

    def prefix_groups(self, **_options: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Nobody shares anything."""
        return np.zeros(0, np.int32), np.zeros(1, np.int32), np.zeros(0, np.int32)


@dataclass
class Pages:
    """Sequences `texts` over blocks of `block_size`, in shuffled order; rows of the tables are shuffled too."""

    texts: list[list[int]]
    block_size: int = 4
    seed: int = 0
    done: list[int] = field(init=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        needed = [-(-len(text) // self.block_size) for text in self.texts]
        self.num_blocks = 1 + sum(needed)
        ids = list(range(1, self.num_blocks))
        draw.shuffle(ids)
        self.rows = list(range(len(self.texts) + 2))
        draw.shuffle(self.rows)
        # What a table holds behind its valid ids is anybody's: here an id that would show.
        self.tables = np.full((1, len(self.rows), max(needed) + 1), self.num_blocks - 1, dtype=np.int32)
        for index, count in enumerate(needed):
            self.tables[0, self.rows[index], :count] = [ids.pop() for _ in range(count)]
        self.done = [0] * len(self.texts)
        self.steps = 0

    def plan(self, counts: list[int], samples: list[int] | None = None, copies: list[list[int]] | None = None) -> HandmadePlan:
        """The next `counts[i]` tokens of each sequence i (0 = left out). `samples`: rows to score; None = all rows."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lens, rows, dirty = [0], [], [], []
        for index, count in enumerate(counts):
            if not count:
                continue
            begin, row = self.done[index], self.rows[index]
            for position in range(begin, begin + count):
                ids.append(self.texts[index][position])
                positions.append(position)
                block = int(self.tables[0, row, position // self.block_size])
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(ids))
            lens.append(begin + count)
            rows.append(row)
            first, end = (-(-length // self.block_size) for length in (begin, begin + count))
            dirty.append([0, row, first, end - first])
            self.done[index] += count
        self.steps += 1
        chosen = range(len(ids)) if samples is None else samples
        dirty_ids = [self.tables[0, row, first : first + count] for _, row, first, count in dirty]
        return HandmadePlan(
            step=self.steps,
            num_seqs=len(rows),
            num_tokens=len(ids),
            seq_slots=np.array(rows, np.int32),
            query_starts=np.array(starts, np.int32),
            seq_lens=np.array(lens, np.int32),
            token_ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            token_sources=np.full(len(ids), -1, np.int32),
            slot_mapping=np.array([slots], np.int64),
            block_tables=self.tables,
            dirty=np.array(dirty, np.int32).reshape(-1, 4),
            dirty_ids=np.concatenate([np.zeros(0, np.int32), *dirty_ids]),
            copies=np.array(copies or [], np.int32).reshape(-1, 4),
            sample_rows=np.array(list(chosen), np.int32),
        )


def run_schedule(runner: ModelRunner, pages: Pages, schedule: list[list[int]]) -> list[Tensor]:
    """Run the steps of `schedule` (tokens of each sequence a step); returns each sequence's logits [L, vocab]."""
    collected: list[list[Tensor]] = [[] for _ in pages.texts]
    for counts in schedule:
        logits = runner.forward(pages.plan(counts))
        for index, part in zip((i for i, count in enumerate(counts) if count), logits.split([c for c in counts if c])):
            collected[index].append(part.clone())
    return [torch.cat(parts) for parts in collected]
