"""The oracle model: its next token is a hash of every key-value row that a kernel would read.

Before: a plan of the scheduler. After: one token for each of its `sample_rows`, in the form that `commit` takes.
What always holds: it reads the plan's arrays and its own KV memory, nothing else, and reads every visible row again in
every step; no state of the request is kept. So a stale, foreign, missing, shifted or half-written row changes the answer,
and `cold` says what the answer is when there are no blocks at all.

The model has two layers, since one would not notice a row that was computed too early and is right when it is read later:

    a(row, j)  = mix(token, position, identity, j)           j: where in its sequence the row was found
    context(p) = mix(a(row 0, 0) + ... + a(row p, p))        kept in row p by layer 1, as a real KV row depends on its past
    answer(p)  = mix(sum of mix(context(row j), j)) mod V    layer 2

With several groups each has such rows of its own, in blocks of its own; in one with a window of W the sums are over the rows
p - W + 1 to p, and the answer mixes the sums of all groups. All arithmetic is on unsigned 64-bit integers and wraps.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from blocktable._core import Plan

_U64 = np.uint64
_MASK = (1 << 64) - 1
# Odd 64-bit constants, one per field, so that no exchange of two fields leaves the sum as it was.
_TOKEN = 0x9E3779B97F4A7C15
_POSITION = 0xC2B2AE3D27D4EB4F
_IDENTITY = 0x165667B19E3779F9
_PLACE = 0xD6E8FEB86659FD93
_CONTEXT = 0xA0761D6478BD642F
_PLACE_2 = 0xE7037ED1A0B428DB
_GROUP = 0x8EBC6AF09C88C6E3

_POISON_TOKEN = 0xDEAD
_POISON_POSITION = 1 << 40  # past every possible length, so that poison is told from every real row


@dataclass(frozen=True, slots=True)
class _Visible:
    """The V rows of one group that queries of the step see, sequence after sequence, and which each of the T queries sees."""

    slots: NDArray[np.int64]  # [V] where in the KV memory
    place: NDArray[np.uint64]  # [V] where in its sequence the row is found
    first: NDArray[np.int64]  # [T] number, among the V rows, of the first that the query sees
    last: NDArray[np.int64]  # [T] the same of its own row


class OracleError(AssertionError):
    """A kernel would have read or written where it must not."""


class OracleModel:
    """KV memory of `num_blocks * block_size` rows, and a model over it. Row r is (token, position, identity, context).

    `identity` stands for all that the key-value content depends on besides tokens: weights, adapter, kind of cache.
    Change it between steps to play a swap of weights. `windows` has an entry for each group, as `Scheduler`'s `groups`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        identity: int = 0,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.identity = identity
        self.windows = tuple(windows)
        rows = num_blocks * block_size
        self._token = np.full(rows, _POISON_TOKEN, _U64)
        self._position = np.full(rows, _POISON_POSITION, _U64)
        self._identity = np.zeros(rows, _U64)
        self._context = np.zeros(rows, _U64)
        self._is_poisoned = np.ones(num_blocks, np.bool_)
        self._was_free = np.ones(num_blocks, np.bool_)
        self._tables: NDArray[np.int32] | None = None  # what the device knows: built from `dirty` alone
        self._last_ids = np.zeros(0, np.int64)

    @property
    def tables(self) -> NDArray[np.int32]:
        """[G, max_num_seqs, max_blocks] the device's copy of the block tables, made from every plan's `dirty`."""
        if self._tables is None:
            raise OracleError("no plan was taken over yet")
        return self._tables

    def take_over(self, plan: "Plan") -> None:
        """Bring the device's copy of the tables up to date. To be called for every plan, those that run nothing too."""
        shape = plan.block_tables.shape
        if self._tables is None:
            self._tables = np.zeros(shape, np.int32)
        values, start = plan.dirty_ids, 0
        for group, row, column, count in plan.dirty.tolist():
            self._tables[group, row, column : column + count] = values[start : start + count]
            start += count
        if start != len(values):
            raise OracleError(f"dirty counts {start} ids, dirty_ids holds {len(values)}")

    def step(self, plan: "Plan", tables: NDArray[np.int32] | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Run one plan: `token_ids` [K] and `starts` [K + 1] as `Scheduler.commit` wants them. Call `take_over` first.

        tables: those that the plan was made with, if others were taken over since; as `tables`. The step is late then: of
        whoever left or lost rows since the plan it may read poison, which makes a wrong token where otherwise it raises.
        """
        self._copy(plan.copies)
        is_late = tables is not None
        tables = self.tables if tables is None else tables
        seen = [self._visible(plan, group, tables[group]) for group in range(len(self.windows))]
        for group in range(len(self.windows)):
            self._write(plan, group)
        sums = np.zeros(len(plan.token_ids), _U64)
        for group, rows in enumerate(seen):
            firsts = _mix(
                self._token[rows.slots] * _U64(_TOKEN)
                + self._position[rows.slots] * _U64(_POSITION)
                + self._identity[rows.slots] * _U64(_IDENTITY)
                + (rows.place + _U64(1)) * _U64(_PLACE)
            )
            context, written = _mix(_sums_seen(firsts, rows)), plan.slot_mapping[group]
            self._context[written[written >= 0]] = context[written >= 0]
            if not is_late:
                self._refuse_poison(rows)
            seconds = _mix(self._context[rows.slots] * _U64(_CONTEXT) + (rows.place + _U64(1)) * _U64(_PLACE_2))
            sums += _U64(2 * group + 1) * _sums_seen(seconds, rows)
        ids = (_mix(sums)[plan.sample_rows] % _U64(self.vocab_size)).astype(np.int64)
        self._last_ids = ids
        return ids, np.arange(len(ids) + 1, dtype=np.int64)

    def poison_unowned(self, free: NDArray[np.int32], published: NDArray[np.int32]) -> None:
        """Overwrite what nobody may read any more: free blocks without published content, and those taken for new content.

        free, published: `Scheduler.free_queue` and `published_blocks`, after every call that moves blocks. Published content
        is left alone, held or free.
        """
        is_free = np.zeros(self.num_blocks, np.bool_)
        is_free[free] = True
        ends = (is_free | self._was_free) & ~self._is_poisoned
        ends[published] = False
        self._was_free = is_free
        if ends.any():
            self.poison(np.flatnonzero(ends))

    def poison(self, blocks: ArrayLike) -> None:
        """Overwrite all rows of these blocks."""
        ids = np.asarray(blocks, np.int64)
        slots = (ids[:, None] * self.block_size + np.arange(self.block_size)).ravel()
        self._token[slots] = _POISON_TOKEN
        self._position[slots] = _POISON_POSITION
        self._context[slots] = 0
        self._is_poisoned[ids] = True

    def spoil(self, slots: NDArray[np.int64]) -> None:
        """Overwrite single rows: what a step that failed wrote, or did not get to write. Nobody knows its answers."""
        self._last_ids = np.zeros(0, np.int64)
        self._position[slots[slots >= 0]] = _POISON_POSITION

    def _copy(self, copies: NDArray[np.int32]) -> None:
        for _, source, target, rows in copies.tolist():
            start, end = source * self.block_size, target * self.block_size
            for column in (self._token, self._position, self._identity, self._context):
                column[end : end + rows] = column[start : start + rows]
            self._is_poisoned[target] = False

    def _write(self, plan: "Plan", group: int) -> None:
        """Put the new rows where `slot_mapping` says. A negative slot is skipped; one past the end is a fault."""
        slots: NDArray[np.int64] = plan.slot_mapping[group].astype(np.int64)
        if len(slots) and int(slots.max()) >= len(self._token):
            raise OracleError(f"slot {int(slots.max())} is outside of the KV memory of {len(self._token)} rows")
        tokens = plan.token_ids.astype(np.int64)
        from_before = plan.token_sources >= 0
        if from_before.any():
            sources = plan.token_sources[from_before]
            is_known = sources < len(self._last_ids)
            answers = np.full(len(sources), _POISON_TOKEN, np.int64)
            answers[is_known] = self._last_ids[sources[is_known]]
            tokens[from_before] = answers
        kept = slots >= 0
        self._token[slots[kept]] = tokens[kept].astype(_U64)
        self._position[slots[kept]] = plan.positions[kept].astype(_U64)
        self._identity[slots[kept]] = (self.identity + group * _GROUP) & _MASK
        self._is_poisoned[slots[kept] // self.block_size] = False

    def _visible(self, plan: "Plan", group: int, table: NDArray[np.int32]) -> "_Visible":
        """Every row of a group that some query of the step sees."""
        window = self.windows[group]
        places, sequences, firsts, lasts, base = [], [], [], [], 0
        for i, (start, end) in enumerate(pairwise(plan.query_starts.tolist())):
            length = int(plan.seq_lens[i])
            queries = np.arange(length - (end - start), length)
            first = np.zeros_like(queries) if window is None else np.maximum(0, queries - window + 1)
            lowest = int(first[0]) if len(first) else length
            places.append(np.arange(lowest, length))
            sequences.append(np.full(length - lowest, i))
            firsts.append(first - lowest + base)
            lasts.append(queries - lowest + base)
            base += length - lowest
        place, sequence, first, last = (_joined(parts) for parts in (places, sequences, firsts, lasts))
        blocks = table[plan.seq_slots[sequence], place // self.block_size].astype(np.int64)
        if len(blocks) and not 0 < int(blocks.min()) <= int(blocks.max()) < self.num_blocks:
            wrong = sorted({int(block) for block in blocks if not 0 < block < self.num_blocks})
            raise OracleError(f"visible entries of a block table name blocks {wrong}, must be 1..{self.num_blocks - 1}")
        return _Visible(blocks * self.block_size + place % self.block_size, place.astype(_U64), first, last)

    def _refuse_poison(self, rows: _Visible) -> None:
        poisoned = self._position[rows.slots] == _U64(_POISON_POSITION)
        if not poisoned.any():
            return
        first = int(np.flatnonzero(poisoned)[0])
        block, offset = divmod(int(rows.slots[first]), self.block_size)
        place = int(rows.place[first])
        raise OracleError(f"poison is read: row {offset} of block {block}, at position {place} of its sequence")


class ColdAnswer:
    """What the oracle says to one prompt when nothing is shared, cached, chunked or preempted: from the token list alone."""

    def __init__(
        self, prompt: Sequence[int], *, vocab_size: int, identity: int = 0, windows: Sequence[int | None] = (None,)
    ) -> None:
        self._vocab_size = vocab_size
        self._length = 0
        self._groups = [_ColdGroup(window, identity + group * _GROUP) for group, window in enumerate(windows)]
        self._tokens: list[int] = []
        for token in prompt:
            self._append(int(token))

    def __getitem__(self, index: int) -> int:
        """Output token number `index`, computed when first asked for."""
        while len(self._tokens) <= index:
            mixed = sum((2 * number + 1) * group.second for number, group in enumerate(self._groups))
            token = _mix_int(mixed) % self._vocab_size
            self._tokens.append(token)
            self._append(token)
        return self._tokens[index]

    def first(self, count: int) -> list[int]:
        """The first `count` output tokens."""
        return [self[index] for index in range(count)]

    def _append(self, token: int) -> None:
        for group in self._groups:
            group.append(token, self._length)
        self._length += 1


class _ColdGroup:
    """The sums of one group over what the newest query sees."""

    def __init__(self, window: int | None, identity: int) -> None:
        self._identity = identity
        self._seen: deque[tuple[int, int]] | None = None if window is None else deque(maxlen=window)
        self._first = 0
        self.second = 0

    def append(self, token: int, position: int) -> None:
        place = position + 1
        if self._seen is not None and len(self._seen) == self._seen.maxlen:
            self._first -= self._seen[0][0]
            self.second -= self._seen[0][1]
        first = _mix_int(token * _TOKEN + position * _POSITION + self._identity * _IDENTITY + place * _PLACE)
        self._first = (self._first + first) & _MASK
        second = _mix_int(_mix_int(self._first) * _CONTEXT + place * _PLACE_2)
        self.second = (self.second + second) & _MASK
        if self._seen is not None:
            self._seen.append((first, second))


def cold(
    prompt: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int,
    identity: int = 0,
    windows: Sequence[int | None] = (None,),
) -> list[int]:
    """The first `num_tokens` tokens of the oracle's answer to `prompt`, computed without any block."""
    return ColdAnswer(prompt, vocab_size=vocab_size, identity=identity, windows=windows).first(num_tokens)


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _sums_seen(values: NDArray[np.uint64], rows: _Visible) -> NDArray[np.uint64]:
    """[T] the sum of what each query sees, its own row included."""
    sums = np.concatenate((np.zeros(1, _U64), np.cumsum(values, dtype=_U64)))
    return sums[rows.last + 1] - sums[rows.first]


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit integers in which every input bit reaches every output bit (the finaliser of SplitMix64)."""
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def _mix_int(value: int) -> int:
    """`_mix` of one Python integer, taken modulo 2**64."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
