"""The promises of the kernels as functions that raise AssertionError where an implementation breaks them.

Before: a test, or a mutant, hands in an implementation. After: the promise held for it. Always: one body a promise; the
tests run it on every implementation, `test_mutants.py` on every mutant that must fail it.
"""

import mmap

import torch
from torch import Tensor

from tests.kernels.implementations import Implementation
from tests.kernels.paged_case import Case, Length, Shape, empty_pool, make_case

# Summing at most some hundred float32 products of numbers around 1: errors stay near 1e-6.
TOLERANCE = 1e-5

SHAPES = {
    "plain": {},
    "blocks at odd places": {"spare": 5},
    "one head": {"kv_heads": 1, "grouped": 1},
    "many heads a KV head": {"kv_heads": 1, "grouped": 5},
    "many heads two KV heads": {"grouped": 6},
    "no groups": {"kv_heads": 3, "grouped": 1},
    "wide keys": {"key_width": 12, "value_width": 8},
    "narrow keys": {"key_width": 6, "value_width": 16},
    "window 1": {"window": 1},
    "window 5": {"window": 5},
    "window 40": {"window": 40},
    "window longer than all": {"window": 1000},
    "soft cap": {"softcap": 0.7},
    "sinks": {"has_sinks": True},
    "slopes": {"has_slopes": True},
    "all at once": {
        "spare": 5,
        "kv_heads": 2,
        "grouped": 3,
        "key_width": 12,
        "window": 9,
        "softcap": 1.5,
        "has_sinks": True,
        "has_slopes": True,
    },
}


def mixture(block_size: int) -> list[Length]:
    """Chunks and single queries, contexts on both sides of block edges, an idle sequence, a shared prefix, a short reuse."""
    size = block_size
    return [
        Length(1, 1),
        Length(1, size),
        Length(1, size + 1),
        Length(0, 3),
        Length(5, 5),
        Length(3, 2 * size + 1),
        Length(1, 2 * size + 2, shares=2 * size),
        Length(9, 70),
        Length(8, 69),
        Length(1, 41, shares=41),
        Length(1, 63),
    ]


def check_equals_dense(kernels: Implementation, shape: Shape, lengths: list[Length], tolerance: float = TOLERANCE) -> None:
    """Paged attention is attention over positions."""
    case = make_case(shape, lengths, spread=2.0)
    _, k_cache, v_cache = case.pool(unseen=0.0)
    out = case.run(kernels, k_cache, v_cache)
    assert out.dtype == shape.dtype
    assert_close(out, case.expected(), tolerance)


def check_layers_of_different_windows(kernels: Implementation) -> None:
    """Layers with and without a window, in turn, read one batch."""
    cases = {window: make_case(Shape(window=window), mixture(16)) for window in (0, 5, 12)}
    first = cases[0]
    batch = kernels.build(first.tables, first.query_starts, first.seq_lens, 16)
    for window in (0, 5, 0, 12, 5):
        case = cases[window]
        case.tables = first.tables
        _, k_cache, v_cache = case.pool(unseen=0.0)
        out = kernels.paged_attention(case.q, k_cache, v_cache, batch, **case.options)
        assert_close(out, case.expected(), TOLERANCE)


def check_window_while_decoding(kernels: Implementation) -> None:
    """Fault 95: after prompts of 1 to 20 tokens, each of 30 decoding steps sees exactly the last 8 positions."""
    for block_size in (3, 4):
        shape = Shape(block_size=block_size, kv_heads=1, grouped=1, window=8)
        for step in range(1, 31):
            check_equals_dense(kernels, shape, [Length(1, prompt + step) for prompt in range(1, 21)])


def check_unseen_rows_never_matter(kernels: Implementation, shape: Shape) -> None:
    """Fault 131: what no query sees may be NaN, infinite or large; the answer is the same to the last bit."""
    size = shape.block_size
    lengths = [*mixture(size), *(Length(1, length) for length in range(1, 2 * size + 1))]
    case = make_case(shape, lengths)
    clean = case.run(kernels, *case.pool(unseen=0.0)[1:])
    for unseen in (float("nan"), float("inf"), float("-inf"), 1e4):
        out = case.run(kernels, *case.pool(unseen=unseen)[1:])
        assert torch.equal(_bits(out), _bits(clean)), f"{unseen} in rows that nobody sees changed the answer"


def check_a_broken_row_stays_its_owners(kernels: Implementation, shape: Shape) -> None:
    """A row of NaN or infinities spoils the queries that see it and no other: not the ones before it, not the neighbours."""
    lengths = [Length(9, 20), Length(1, 20), Length(1, 13, shares=13), Length(9, 21), Length(7, 30)]
    broken = {0: 15, 1: 16}  # sequence to position: in the middle of a chunk, and behind what the third sequence shares
    case = make_case(shape, lengths)
    expected = case.expected()
    for poison in (float("nan"), float("inf")):
        _, k_cache, v_cache = case.pool(unseen=0.0)
        hit = torch.zeros(case.q.shape[0], dtype=torch.bool)
        for sequence, position in broken.items():
            block, offset = case.slot(sequence, position)
            k_cache[block, :, offset] = poison
            v_cache[block, :, offset] = poison
            hit |= _sees(case, sequence, position)
        out = case.run(kernels, k_cache, v_cache)
        assert 0 < int(hit.sum()) < hit.numel(), "the control: some queries see a broken row and some do not"
        assert not out[hit].isfinite().all(dim=-1).any(), "a query that sees a broken row shows it"
        assert_close(out[~hit], expected[~hit], TOLERANCE)


def check_only_written_slots_change(kernels: Implementation, shape: Shape) -> None:
    """Fault 130: of the whole pool, full of NaN, the bytes of the slots that were written change, and no other."""
    size, num_blocks = shape.block_size, 9
    last = num_blocks * size - 1
    in_order = (torch.randperm(num_blocks - 2)[:5] + 1).repeat_interleave(size) * size + torch.arange(size).repeat(5)
    some = in_order[torch.randperm(5 * size)[: 2 * size + 1]]
    padded = torch.cat([some[:2], torch.tensor([-1, -1]), some[2:], torch.tensor([-1])])
    below = torch.tensor([-size * 3, 2 * size, -(2**40)])
    empty = torch.empty(0, dtype=torch.int64)
    for slots in (in_order, some, padded, torch.full((4,), -1), below, torch.tensor([last]), empty):
        # Values arrive as a model makes them, heads first.
        k = torch.randn(shape.kv_heads, len(slots), shape.key_width).to(shape.dtype).transpose(0, 1)
        v = torch.randn(shape.kv_heads, len(slots), shape.value_width).to(shape.dtype).transpose(0, 1)
        pool, k_cache, v_cache = empty_pool(shape, num_blocks, float("nan"))
        wanted, k_wanted, v_wanted = empty_pool(shape, num_blocks, float("nan"))
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                k_wanted[slot // size, :, slot % size] = k[row]
                v_wanted[slot // size, :, slot % size] = v[row]
        kernels.store_kv(k, v, k_cache, v_cache, slots)
        wrong = (_bits(pool) != _bits(wanted)).any(dim=1).nonzero().flatten().tolist()
        assert not wrong, (
            f"blocks {wrong} hold other bytes than they should, after {len(slots)} slots from {slots[:3].tolist()}"
        )


def check_what_was_stored_is_attended(kernels: Implementation, shape: Shape) -> None:
    """Fault 100: rows stored through the slots of a shuffled table, over block edges, chunk by chunk, are the rows attended."""
    case = make_case(shape, [Length(30, 30), Length(17, 17), Length(25, 25)])
    _, k_cache, v_cache = empty_pool(shape, case.num_blocks, float("nan"))
    expected, at = case.expected(), [0, 0, 0]
    for chunk in (5, 1, 6, 1, 1, 30):
        counts = [min(chunk, length.seq_len - done) for length, done in zip(case.lengths, at, strict=True)]
        rows = [(i, at[i] + step) for i, count in enumerate(counts) for step in range(count)]
        slots = torch.tensor([block * shape.block_size + offset for block, offset in (case.slot(*row) for row in rows)])
        k = torch.stack([case.keys[i][position] for i, position in rows])
        v = torch.stack([case.values[i][position] for i, position in rows])
        kernels.store_kv(k, v, k_cache, v_cache, slots)
        at = [done + count for done, count in zip(at, counts, strict=True)]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        batch = kernels.build(case.tables, starts, torch.tensor(at, dtype=torch.int32), shape.block_size)
        of_q = torch.tensor([int(case.query_starts[i]) + position for i, position in rows])
        assert_close(kernels.paged_attention(case.q[of_q], k_cache, v_cache, batch, **case.options), expected[of_q], TOLERANCE)


def check_ids_above_65535(kernels: Implementation) -> None:
    """Fault 128: block ids of more than 16 bits name the blocks that they name."""
    shape = Shape(block_size=1, kv_heads=1, grouped=1, key_width=2, value_width=2)
    case = make_case(shape, [Length(2, 4), Length(1, 4)])
    case.num_blocks = 70_000
    case.tables[:, :4] = torch.tensor([[65534, 65537, 65535, 65536], [65537, 1, 2, 69999]])
    case.keys[1][0], case.values[1][0] = case.keys[0][1], case.values[0][1]
    _, k_cache, v_cache = case.pool(unseen=0.0)
    assert_close(case.run(kernels, k_cache, v_cache), case.expected(), TOLERANCE)


def check_offsets_above_32_bits(kernels: Implementation) -> None:
    """Fault 127: a pool of more than 2^32 elements, of which only the pages that are touched exist."""
    _check_far_blocks(kernels, 2**31 + 2, [2, 1])  # no multiple of 3: rows of the view are numbered as finely as elements


def check_products_above_32_bits(kernels: Implementation) -> None:
    """The same where block id and stride have 32 bits each, and their product more: cut, it is that of another block."""
    _check_far_blocks(kernels, 2**22, [2**10 + 1, 1])


FAR = 2**30 + 64
"""Twice as much is no more a number of 32 bits."""
FAR_STEPS = ((FAR, 16), (8, FAR))
"""From a head to the next, and from a slot of a block to the next."""


def _check_far_blocks(kernels: Implementation, stride: int, blocks: list[int]) -> None:
    """Rows stored into two blocks, the higher one first, and attended there."""
    shape = Shape(block_size=2, kv_heads=1, grouped=2, key_width=3, value_width=3, dtype=torch.float16)
    num_blocks = blocks[0] + 1
    pool = _unbacked(stride * (num_blocks - 1) + 1024)
    k_cache = pool.as_strided((num_blocks, 1, 2, 3), (stride, 6, 3, 1), 0)
    v_cache = pool.as_strided((num_blocks, 1, 2, 3), (stride, 6, 3, 1), 6)
    case = make_case(shape, [Length(4, 4)])
    case.tables[0, :2] = torch.tensor(blocks)
    slots = torch.tensor([2 * block + offset for block in blocks for offset in (0, 1)])
    kernels.store_kv(case.keys[0], case.values[0], k_cache, v_cache, slots)
    highest = blocks[0] * stride
    assert torch.equal(pool[highest : highest + 6].view(2, 3), case.keys[0][:2, 0]), "the highest block was written"
    assert_close(case.run(kernels, k_cache, v_cache), case.expected(), 1e-3)


def stored_far_apart(kernels: Implementation, heads: int, slots: int) -> tuple[Case, Tensor, Tensor]:
    """Rows of three heads and three slots a block, so far apart, are stored; queries and new rows lie likewise."""
    shape = Shape(block_size=3, kv_heads=3, grouped=1, key_width=3, value_width=3, dtype=torch.float16)
    case = make_case(shape, [Length(4, 4)])
    # What is cut may be below 0.
    middle = _unbacked(2**32 + 4096)[2**31 :]
    k_cache, v_cache = (
        middle.as_strided((case.num_blocks, 3, 3, 3), (256, heads, slots, 1), middle.storage_offset() + at) for at in (0, 4)
    )
    q, k, v = (
        middle.as_strided((4, 3, 3), (64, heads, 1), middle.storage_offset() + at).copy_(rows)
        for at, rows in ((2048, case.q), (2304, case.keys[0]), (2560, case.values[0]))
    )
    at = [case.slot(0, position) for position in range(4)]
    kernels.store_kv(k, v, k_cache, v_cache, torch.tensor([3 * block + offset for block, offset in at]))
    for position, (block, offset) in enumerate(at):
        assert torch.equal(k_cache[block, :, offset], k[position]), f"the row of position {position} was written"
    case.q = q
    return case, k_cache, v_cache


def check_rows_far_apart(kernels: Implementation) -> None:
    """They are stored and attended."""
    for steps in FAR_STEPS:
        case, k_cache, v_cache = stored_far_apart(kernels, *steps)
        assert_close(case.run(kernels, k_cache, v_cache), case.expected(), 1e-3)


def _unbacked(elements: int) -> Tensor:
    """Zeros of float16, of which only the pages that are touched exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.float16)


def _sees(case: Case, sequence: int, position: int) -> Tensor:
    """[T] the queries that see the slot in which `position` of `sequence` lies, by whatever table."""
    seen = torch.zeros(case.q.shape[0], dtype=torch.bool)
    slot = case.slot(sequence, position)
    for index, length in enumerate(case.lengths):
        for query in range(length.query_len):
            at = length.seq_len - length.query_len + query
            first = max(0, at - case.shape.window + 1) if case.shape.window else 0
            if slot in [case.slot(index, other) for other in range(first, at + 1)]:
                seen[int(case.query_starts[index]) + query] = True
    return seen


def _bits(tensor: Tensor) -> Tensor:
    """The bytes, so that NaN equals NaN and 0 differs from -0."""
    return tensor.contiguous().view(torch.uint8)


def assert_close(out: Tensor, expected: Tensor, tolerance: float) -> None:
    assert out.shape == expected.shape
    assert out.isfinite().all(), "the answer is finite"
    worst = distance(out, expected)
    assert worst <= tolerance, f"worst difference {worst:.2e}"


def distance(out: Tensor, expected: Tensor) -> float:
    """The largest difference; from 1 on, numbers of two bytes are as far apart as their size says."""
    if not out.numel():
        return 0.0
    differences = (out.double() - expected).abs()
    if out.itemsize == 2:
        differences /= expected.abs().clamp_min(1)
    return float(differences.max())
