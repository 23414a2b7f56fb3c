"""The oracle model itself: with no scheduler at all, each way in which a kernel could read wrongly changes its answer."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blocktable.testing import OracleError, OracleModel, cold

VOCAB_SIZE = 50_021
BLOCK = 4
PROMPT = [5, 900, 5, 17, 4_000, 5, 900, 5, 17, 33, 2]
TABLE = [7, 2, 9]


def plan_of(table: list[int], tokens: list[int], first: int, *, tell: bool = True) -> Any:
    """One sequence that computes `tokens` from position `first` on, as the arrays of a plan."""
    length = first + len(tokens)
    positions = np.arange(first, length, dtype=np.int32)
    ids = np.array(table, np.int32)
    tables = np.zeros((1, 1, 8), np.int32)
    tables[0, 0, : len(table)] = ids
    return SimpleNamespace(
        seq_slots=np.zeros(1, np.int32),
        query_starts=np.array([0, len(tokens)], np.int32),
        seq_lens=np.array([length], np.int32),
        token_ids=np.array(tokens, np.int32),
        positions=positions,
        token_sources=np.full(len(tokens), -1, np.int32),
        slot_mapping=(ids[positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK)[None],
        block_tables=tables,
        dirty=np.array([[0, 0, 0, len(table)]] if tell else np.zeros((0, 4)), np.int32),
        dirty_ids=ids if tell else ids[:0],
        copies=np.zeros((0, 4), np.int32),
        sample_rows=np.array([len(tokens) - 1], np.int32),
    )


def run(model: OracleModel, plan: Any) -> int:
    model.take_over(plan)
    ids, starts = model.step(plan)
    assert starts.tolist() == [0, 1]
    return int(ids[0])


def new_model(**changes: int) -> OracleModel:
    return OracleModel(**({"num_blocks": 12, "block_size": BLOCK, "vocab_size": VOCAB_SIZE} | changes))


def test_paged_in_any_chunks_the_answer_is_the_cold_one() -> None:
    """One chunk, two chunks at every place, then decode token by token: always the answer from the token list."""
    wanted = cold(PROMPT, 1, vocab_size=VOCAB_SIZE)[0]
    assert run(new_model(), plan_of(TABLE, PROMPT, 0)) == wanted
    for cut in range(1, len(PROMPT)):
        model = new_model()
        run(model, plan_of(TABLE, PROMPT[:cut], 0))
        assert run(model, plan_of(TABLE, PROMPT[cut:], cut)) == wanted
    model = new_model()
    for place, token in enumerate(PROMPT):
        answer = run(model, plan_of(TABLE, [token], place))
    assert answer == wanted


def _stale_row(model: OracleModel, plan: Any) -> None:
    run(model, plan_of(TABLE, [1], 5))


def _foreign_block(model: OracleModel, plan: Any) -> None:
    run(model, plan_of([3], [5, 900, 5, 18], 0))
    plan.block_tables[0, 0, 0] = plan.dirty_ids[0] = 3


def _blocks_in_another_order(model: OracleModel, plan: Any) -> None:
    plan.dirty_ids[:2] = plan.dirty_ids[1::-1].copy()


def _shifted_position(model: OracleModel, plan: Any) -> None:
    plan.positions += 1


def _missing_row(model: OracleModel, plan: Any) -> None:
    plan.slot_mapping[0, 0] = -1


def _row_in_the_wrong_slot(model: OracleModel, plan: Any) -> None:
    plan.slot_mapping[0, :2] = plan.slot_mapping[0, 1::-1].copy()


def _one_row_less_is_visible(model: OracleModel, plan: Any) -> None:
    plan.seq_lens -= 1


def _other_weights(model: OracleModel, plan: Any) -> None:
    model.identity = 1


def _poison(model: OracleModel, plan: Any) -> None:
    model.poison([TABLE[0]])


def _half_written(model: OracleModel, plan: Any) -> None:
    """A row that was computed while a row before it was not there, which is there by now."""
    fresh = new_model()
    model.__dict__.update(fresh.__dict__)
    run(model, plan_of(TABLE, [1] * 4, 0))
    run(model, plan_of(TABLE, PROMPT[4:8], 4))
    run(model, plan_of(TABLE, PROMPT[:4], 0))


def _table_change_not_told(model: OracleModel, plan: Any) -> None:
    plan.dirty_ids[1] = TABLE[0]


FAULTS: tuple[Callable[[OracleModel, Any], None], ...] = (
    _stale_row,
    _foreign_block,
    _blocks_in_another_order,
    _shifted_position,
    _missing_row,
    _row_in_the_wrong_slot,
    _one_row_less_is_visible,
    _other_weights,
    _poison,
    _half_written,
    _table_change_not_told,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__[1:])
def test_every_wrong_row_changes_the_answer(fault: Callable[[OracleModel, Any], None]) -> None:
    """Eight of eleven rows are there; the last three are computed with a fault: another answer, or a fault of the kernel."""
    model = new_model()
    run(model, plan_of(TABLE, PROMPT[:8], 0))
    plan = plan_of(TABLE, PROMPT[8:], 8)
    fault(model, plan)
    try:
        answer = run(model, plan)
    except OracleError:
        return
    assert answer != cold(PROMPT, 1, vocab_size=VOCAB_SIZE)[0]


def test_a_table_entry_outside_of_the_pool_and_a_slot_outside_of_the_memory_are_faults() -> None:
    for table in ([0, 2, 9], [7, 12, 9]):
        with pytest.raises(OracleError, match="block table"):
            run(new_model(), plan_of(table, PROMPT, 0))
    plan = plan_of(TABLE, PROMPT, 0)
    plan.slot_mapping[0, 3] = 12 * BLOCK
    with pytest.raises(OracleError, match="slot"):
        run(new_model(), plan)


def test_the_answer_depends_on_every_token_of_the_prompt() -> None:
    """10,000 changes of one token: no two answers agree more often than chance allows."""
    rng = np.random.default_rng(1)
    wanted = cold(PROMPT, 3, vocab_size=VOCAB_SIZE)
    same = 0
    for _ in range(10_000):
        changed = list(PROMPT)
        place = int(rng.integers(len(PROMPT)))
        changed[place] = (changed[place] + 1 + int(rng.integers(VOCAB_SIZE - 1))) % VOCAB_SIZE
        same += cold(changed, 3, vocab_size=VOCAB_SIZE) == wanted
    assert same == 0
