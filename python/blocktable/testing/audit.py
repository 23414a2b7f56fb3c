"""An outside recount of a scheduler: what can be told from its public views and plans without trusting its own audit.

Before: any public call. After: nothing, or `BrokenPromise` that names the invariant. What always holds: no check here
changes the scheduler, and none of them asks the core whether it is right; `audit` also runs the core's own audit first,
so two independent counts must agree.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import _core

if TYPE_CHECKING:
    from blocktable._core import Plan, Scheduler

NULL_BLOCK = 0


class BrokenPromise(AssertionError):
    """An invariant does not hold. `promise` is its name: A1 to A8 as in the audit, or a word of the contract; `calls` are those
    that led there, where they are known."""

    def __init__(self, promise: str, detail: str, calls: tuple[str, ...] = ()) -> None:
        super().__init__(f"{promise}: {detail}" + (f", after {'; '.join(calls)}" if calls else ""))
        self.promise = promise
        self.detail = detail
        self.calls = calls

    def __reduce__(self) -> tuple[Any, ...]:
        # `args` is the text; a pool of processes sends what a schedule raised.
        return type(self), (self.promise, self.detail, self.calls), self.__dict__


REFUSALS = frozenset({"refused"} | {f"reason_{name}" for _, name, kind, _ in _core.REASONS if kind == "refusal"})
"""Counters that a refused call moves; nothing else does."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a row of the tables, as its caller knows it."""

    request_id: int
    tokens: Sequence[int]  # prompt and confirmed outputs, in order


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the public views of a scheduler show at one moment: to recount, and to prove that a refused call changed nothing."""

    stats: dict[str, int]
    free_queue: NDArray[np.int32]
    block_refs: NDArray[np.int32]
    published_blocks: NDArray[np.int32]

    @classmethod
    def of(cls, scheduler: "Scheduler") -> "Snapshot":
        return cls(scheduler.stats(), scheduler.free_queue(), scheduler.block_refs(), scheduler.published_blocks())

    def check_unchanged(self, scheduler: "Scheduler", except_for: Collection[str] = ()) -> None:
        """Raises `BrokenPromise` naming the first view that differs; `except_for` names counters that may have moved."""
        now = Snapshot.of(scheduler)
        for name, before in self.stats.items():
            if now.stats[name] != before and name not in except_for:
                raise BrokenPromise("unchanged", f"stats[{name!r}] went from {before} to {now.stats[name]}")
        if not now.has_the_blocks_of(self):
            raise BrokenPromise("unchanged", f"the blocks went from {self} to {now}")

    def has_the_blocks_of(self, other: "Snapshot") -> bool:
        """Whether the free queue with its order, all holders and all published blocks are the same."""
        return (
            np.array_equal(self.free_queue, other.free_queue)
            and np.array_equal(self.block_refs, other.block_refs)
            and np.array_equal(self.published_blocks, other.published_blocks)
        )


def audit(scheduler: "Scheduler") -> None:
    """The core's audit, then the recount from outside. Raises `AuditError` or `BrokenPromise`."""
    scheduler.audit()
    recount(Snapshot.of(scheduler))


def recount(seen: Snapshot) -> None:
    """A1, A3 and the gauges, from the three lists of blocks."""
    refs, published = seen.block_refs, seen.published_blocks.tolist()
    places = np.bincount(seen.free_queue, minlength=len(refs))
    is_held = refs > 0
    is_held[NULL_BLOCK] = False
    if places[NULL_BLOCK]:
        raise BrokenPromise("A3", "the null block is in the free queue")
    if (places + is_held).max() > 1:
        raise BrokenPromise("A3", f"blocks {np.flatnonzero(places + is_held > 1)} are queued twice, or both held and free")
    used = int(np.count_nonzero(is_held))
    counted = {
        "num_blocks": len(refs),
        "free_blocks": len(seen.free_queue),
        "used_blocks": used,
        "parked_blocks": len(refs) - 1 - len(seen.free_queue) - used,
    }
    for name, value in counted.items():
        if seen.stats[name] != value:
            raise BrokenPromise("A1", f"{name} is reported as {seen.stats[name]} and counted as {value}")
    if published and (published[0] <= NULL_BLOCK or published[-1] >= len(refs) or published != sorted(set(published))):
        raise BrokenPromise("A4", f"published_blocks is not ascending inside 1..{len(refs) - 1}: {published}")


def check_plan(plan: "Plan", scheduler: "Scheduler", holders: Mapping[int, Holder], tables: NDArray[np.int32]) -> None:
    """Everything that the plan's arrays promise to a kernel and to a caller.

    holders: row of the tables -> who holds it now; tables [G, max_num_seqs, max_blocks]: the device's copy, made from `dirty`.
    """
    config = scheduler.config
    _check_shapes(plan, config)
    if plan.num_seqs == 0:
        return
    _check_tokens(plan, holders)
    _check_tables(plan, scheduler, tables)
    _check_writes(plan, scheduler)
    _check_samples(plan, holders)
    threshold = config["long_prefill_threshold"]
    longest = int(np.diff(plan.query_starts).max())
    if 0 < threshold < longest:
        raise BrokenPromise("chunk", f"{longest} tokens of one sequence, long_prefill_threshold is {threshold}")


def check_drained(scheduler: "Scheduler") -> None:
    """DRAIN: nobody is left, so nothing may be held. Raises `BrokenPromise`."""
    audit(scheduler)
    stats, refs = scheduler.stats(), scheduler.block_refs()
    if refs[1:].any():
        raise BrokenPromise("drain", f"nobody lives, but blocks {np.flatnonzero(refs)} are held")
    wanted = {"running": 0, "waiting": 0, "used_blocks": 0, "parked_blocks": 0, "free_blocks": stats["num_blocks"] - 1}
    for name, value in wanted.items():
        if stats[name] != value:
            raise BrokenPromise("drain", f"{name} is {stats[name]} at idle, must be {value}")
    ended = stats["finished"] + stats["aborted"] + stats["queue_expired"]
    taken_in = stats["submitted"] + stats["forks"]
    if taken_in != ended:
        raise BrokenPromise("drain", f"{taken_in} requests were taken in, {ended} ended")


def _check_shapes(plan: "Plan", config: Mapping[str, Any]) -> None:
    sequences, tokens = plan.num_seqs, plan.num_tokens
    found = {
        "seq_slots": (plan.seq_slots.shape, (sequences,)),
        "query_starts": (plan.query_starts.shape, (sequences + 1,)),
        "seq_lens": (plan.seq_lens.shape, (sequences,)),
        "token_ids": (plan.token_ids.shape, (tokens,)),
        "positions": (plan.positions.shape, (tokens,)),
        "token_sources": (plan.token_sources.shape, (tokens,)),
        "slot_mapping": (plan.slot_mapping.shape, (len(config["groups"]), tokens)),
        "sample_requests": (plan.sample_requests.shape, plan.sample_rows.shape),
    }
    for name, (shape, wanted) in found.items():
        if shape != wanted:
            raise BrokenPromise("shapes", f"{name} has shape {shape}, must have {wanted}")
    starts = plan.query_starts
    if starts[0] != 0 or starts[-1] != tokens or (np.diff(starts) < 1).any():
        raise BrokenPromise("shapes", f"query_starts must rise from 0 to {tokens}: {starts.tolist()}")
    if tokens > config["max_num_batched_tokens"] or sequences > config["max_num_seqs"]:
        raise BrokenPromise("budget", f"{tokens} tokens of {sequences} sequences are planned, limits are {config}")
    if len(set(plan.seq_slots.tolist())) != sequences:
        raise BrokenPromise("rows", f"a row stands twice in one step: {plan.seq_slots.tolist()}")
    if sequences and int(plan.seq_lens.max()) > config["max_model_len"]:
        raise BrokenPromise(
            "length", f"{int(plan.seq_lens.max())} rows of one sequence, max_model_len is {config['max_model_len']}"
        )


def _check_tokens(plan: "Plan", holders: Mapping[int, Holder]) -> None:
    """Each sequence computes the next of its holder's tokens, at their positions, in order."""
    if (plan.token_sources != -1).any():
        raise BrokenPromise("sources", "a token comes from the plan before, at depth 1")
    starts = plan.query_starts.tolist()
    ids, positions = plan.token_ids.tolist(), plan.positions.tolist()
    for i, (row, length) in enumerate(zip(plan.seq_slots.tolist(), plan.seq_lens.tolist(), strict=True)):
        if row not in holders:
            raise BrokenPromise("rows", f"row {row} runs, but no live request was admitted to it")
        start, end = starts[i], starts[i + 1]
        first = length - (end - start)
        if positions[start:end] != list(range(first, length)):
            raise BrokenPromise("positions", f"{positions[start:end]} for the rows {first}..{length - 1}")
        if ids[start:end] != list(holders[row].tokens[first:length]):
            raise BrokenPromise("tokens", f"request {holders[row].request_id}: {ids[start:end]} at {first}..{length - 1}")


def _check_tables(plan: "Plan", scheduler: "Scheduler", tables: NDArray[np.int32]) -> None:
    """What a sequence sees is held, not free, not null, named once, and told to the device; nothing else is null in between."""
    config, refs = scheduler.config, scheduler.block_refs()
    block_size = config["block_size"]
    free = set(scheduler.free_queue().tolist())
    entries = np.zeros(len(refs), np.int64)
    counts = np.diff(plan.query_starts).tolist()
    written = set((plan.slot_mapping.ravel() // block_size).tolist())
    for row, length, count in zip(plan.seq_slots.tolist(), plan.seq_lens.tolist(), counts, strict=True):
        valid = -(-length // block_size)
        named: list[int] = []
        kept = _rows_kept(plan.block_tables[:, row, :valid].tolist(), config, length - count, written)
        for group, window in enumerate(config["groups"]):
            shown = plan.block_tables[group, row, :valid].tolist()
            if shown != (told := tables[group, row, :valid].tolist()):
                raise BrokenPromise("dirty", f"row {row} names {shown}, the device was told {told}")
            first = _first_seen(window, length - count, block_size)
            num_null = next((at for at, block in enumerate(shown) if block), valid)
            if num_null > first or not all(0 < block < len(refs) for block in shown[num_null:]):
                raise BrokenPromise("tables", f"row {row} sees {valid} blocks of group {group} from {first} on, names {shown}")
            if num_null < _first_seen(window, kept, block_size):
                raise BrokenPromise(
                    "memory", f"row {row} has {kept} rows for sure, sees group {group} from {first} on, keeps {shown}"
                )
            named += shown[num_null:]
        if len(set(named)) != len(named):
            raise BrokenPromise("tables", f"row {row} names a block twice: {named}")
        if not free.isdisjoint(named):
            raise BrokenPromise("A3", f"row {row} names {named}, of which {sorted(free.intersection(named))} are free")
        entries[named] += 1
    if (entries > refs).any():
        short = np.flatnonzero(entries > refs)
        raise BrokenPromise("A2", f"blocks {short} have {refs[short]} holders and {entries[short]} entries in tables")


def _rows_kept(tables: list[list[int]], config: Mapping[str, Any], start: int, written: Collection[int]) -> int:
    """Rows of a sequence whose step begins at `start` that stay if what it shares does not come: all, or those before the first
    block that the step writes for another one; none if a window needs more for that than the sequence names."""
    block_size, full = config["block_size"], start // config["block_size"]
    shared = [at for shown in tables for at, block in enumerate(shown[:full]) if block in written]
    if not shared:
        return start
    kept = min(shared)
    firsts = (_first_seen(window, kept * block_size, block_size) for window in config["groups"])
    is_in_sight = all(0 not in shown[first:kept] for shown, first in zip(tables, firsts, strict=True))
    return kept * block_size if is_in_sight else 0


def _first_seen(window: int | None, position: int, block_size: int) -> int:
    """Number of the first block that the query at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window) // block_size


def _check_writes(plan: "Plan", scheduler: "Scheduler") -> None:
    """A5: each new row has a slot of its own in each group, at its place, in a block whose content is not published."""
    block_size = scheduler.config["block_size"]
    rows = np.repeat(plan.seq_slots, np.diff(plan.query_starts))
    places, offsets = np.divmod(plan.positions, block_size)
    for slots, tables in zip(plan.slot_mapping, plan.block_tables, strict=True):
        wanted = tables[rows, places].astype(np.int64) * block_size + offsets
        if (slots != wanted).any():
            at = int(np.flatnonzero(slots != wanted)[0])
            where = f"token {at} at position {plan.positions[at]}"
            raise BrokenPromise("slots", f"{where} goes to slot {slots[at]}, not {wanted[at]}")
    every = plan.slot_mapping.ravel()
    if len(set(every.tolist())) != len(every):
        raise BrokenPromise("A5", "two tokens of one step go to the same slot")
    shared = set((every // block_size).tolist()) & set(scheduler.published_blocks().tolist())
    if shared:
        raise BrokenPromise("A5", f"the step writes into blocks {sorted(shared)}, which are published")


def _check_samples(plan: "Plan", holders: Mapping[int, Holder]) -> None:
    """Exactly the sequences that reach the last token they know get the next one."""
    wanted = [
        (int(plan.query_starts[i + 1]) - 1, holders[row].request_id)
        for i, (row, length) in enumerate(zip(plan.seq_slots.tolist(), plan.seq_lens.tolist(), strict=True))
        if length == len(holders[row].tokens)
    ]
    found = list(zip(plan.sample_rows.tolist(), plan.sample_requests.tolist(), strict=True))
    if sorted(found) != sorted(wanted):
        raise BrokenPromise("samples", f"(row, request) {found} are sampled, must be {wanted}")
