"""The runner: a plan in, the logits of its sample rows out, whatever the plan mixes."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from blocktable.errors import InvalidInputError
from blocktable.model.geometry import KVGeometry, LayerShape
from blocktable.model.kv_memory import KVMemory
from blocktable.model.kv_sizing import size_kv
from blocktable.model.loader import wrap_model
from blocktable.model.runner import ModelRunner
from tests.model import tiny
from tests.model.handmade_plan import Pages, run_schedule
from tests.model.served import distance, own_logits, serve, texts_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TEXTS = texts_of(tiny.VOCAB_SIZE)
SCHEDULES = {
    "all at once": [[21, 13]],
    "one by one": [[21, 0], [0, 13]],
    "token by token": [[1, 1]] * 13 + [[1, 0]] * 8,
    "chunks of three": [[3, 3]] * 4 + [[3, 1], [3, 0], [3, 0]],
    "a prompt beside decodes": [[15, 0], [1, 6], [1, 6], [4, 1]],
}


@pytest.mark.parametrize("block_size", [1, 4, 7, 32])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_any_schedule_gives_the_models_own_logits(name: str, schedule: str, block_size: int) -> None:
    expected = own_logits(tiny.build(name), TEXTS)
    pages = Pages(TEXTS, block_size=block_size, seed=block_size)
    got = run_schedule(serve(tiny.build(name), pages).runner, pages, SCHEDULES[schedule])
    assert distance(got, expected) < 1e-4


def test_sample_rows_may_repeat_and_come_in_any_order() -> None:
    expected = own_logits(tiny.build("llama"), TEXTS)
    pages = Pages(TEXTS)
    rows = [20, 3, 33, 3, 20]
    logits = serve(tiny.build("llama"), pages).runner.forward(pages.plan([21, 13], rows))
    assert logits.shape == (5, tiny.VOCAB_SIZE)
    assert logits.dtype == torch.float32
    assert distance([logits], [torch.cat(expected)[rows]]) < 1e-4


@pytest.mark.parametrize("name", sorted(tiny.ARCHITECTURES))
def test_a_step_without_samples_gives_no_rows_and_stores_its_keys(name: str) -> None:
    expected = own_logits(tiny.build(name), TEXTS)
    pages = Pages(TEXTS)
    runner = serve(tiny.build(name), pages).runner
    assert runner.forward(pages.plan([8, 5], [])).shape == (0, tiny.VOCAB_SIZE)
    rest = runner.forward(pages.plan([13, 8]))
    assert distance([rest], [torch.cat([expected[0][8:], expected[1][5:]])]) < 1e-4


def _without_logits_to_keep(model: PreTrainedModel) -> PreTrainedModel:
    """A model of before that option: it scores every row."""
    score = type(model).forward

    class Older(type(model)):
        def forward(self, input_ids: Any = None, position_ids: Any = None, use_cache: Any = None) -> Any:
            return score(self, input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    model.__class__ = Older
    return model


@pytest.mark.parametrize("rows", [[], [4, 30]])
def test_a_model_that_scores_every_row_is_cut_afterwards(rows: list[int]) -> None:
    expected = torch.cat(own_logits(tiny.build("llama"), TEXTS))[rows]
    pages = Pages(TEXTS)
    logits = serve(_without_logits_to_keep(tiny.build("llama")), pages).runner.forward(pages.plan([21, 13], rows))
    assert logits.shape == expected.shape
    assert torch.allclose(logits, expected, atol=1e-4)


def test_copies_are_done_before_the_forward() -> None:
    expected = own_logits(tiny.build("llama"), TEXTS)[0]
    pages = Pages([TEXTS[0], [5]], block_size=4)
    served = serve(tiny.build("llama"), pages)
    served.runner.forward(pages.plan([8, 0], []))
    # The sequence's second block moves to another id, which only the copy can fill.
    row, spare = pages.rows[0], int(pages.tables[0, pages.rows[1], 0])
    source = int(pages.tables[0, row, 1])
    pages.tables[0, row, 1] = spare
    served.memory.buffer[spare] = 7.0
    logits = served.runner.forward(pages.plan([13, 0], copies=[[0, source, spare, 4]]))
    assert distance([logits], [expected[8:]]) < 1e-4


def test_two_sequences_may_share_blocks_that_are_written_in_the_same_step() -> None:
    """In a step all writes of a layer come before its reads: a sharer may read rows that another sequence is writing."""
    shared = TEXTS[0][:8]
    texts = [[*shared, 40, 41], [*shared, 50]]
    expected = own_logits(tiny.build("llama"), texts)
    pages = Pages(texts, block_size=4)
    pages.tables[0, pages.rows[1], :2] = pages.tables[0, pages.rows[0], :2]
    pages.done = [0, 8]
    logits = serve(tiny.build("llama"), pages).runner.forward(pages.plan([10, 1]))
    assert distance([logits], [torch.cat([expected[0], expected[1][8:]])]) < 1e-4


def test_a_token_without_a_slot_is_stored_nowhere() -> None:
    pages = Pages(TEXTS)
    served = serve(tiny.build("llama"), pages)
    plan = pages.plan([8, 5])
    plan.slot_mapping[:] = -1
    plan.seq_lens[:] = [8, 5]
    served.runner.forward(plan)
    assert (served.memory.buffer == 0).all()


def test_tokens_that_are_not_known_yet_are_refused() -> None:
    pages = Pages(TEXTS)
    served = serve(tiny.build("llama"), pages)
    plan = pages.plan([8, 5])
    plan.token_sources[3] = 1
    with pytest.raises(InvalidInputError, match="token_sources"):
        served.runner.forward(plan)


def test_the_plans_arrays_are_not_kept_and_not_changed() -> None:
    pages = Pages(TEXTS)
    served = serve(tiny.build("llama"), pages)
    plan = pages.plan([21, 13])
    arrays = [value for value in vars(plan).values() if isinstance(value, np.ndarray)]
    before = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False  # the core's views may be read-only
    logits = served.runner.forward(plan)
    kept = logits.clone()
    for array, old in zip(arrays, before):
        assert np.array_equal(array, old)
        array.flags.writeable = True
        array.fill(0)
    assert torch.equal(logits, kept)


def test_no_gradient_is_recorded_and_weights_are_untouched() -> None:
    pages = Pages(TEXTS)
    model = tiny.build("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    logits = serve(model, pages).runner.forward(pages.plan([21, 13]))
    assert not logits.requires_grad
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_memory_laid_out_for_another_model_is_refused() -> None:
    other = KVGeometry((LayerShape(1, 8, 8),), torch.float32)
    memory = KVMemory(other, size_kv(other, 4, torch.device("cpu"), num_blocks=3), torch.device("cpu"))
    with pytest.raises(InvalidInputError, match="must be laid out for this model"):
        ModelRunner(wrap_model(tiny.build("llama"), self_check=False), memory)
