"""Promise: memory behind a window is given back. A pool that is too small for all rows of a text, but not for its windows,
serves it, and the text equals transformers'.

The models are those of `tests/model/tiny.py`: windows of 8 tokens, in all layers (mistral) or in every second one.
"""

import random
from typing import Any

import pytest

from blocktable import LLM, SamplingParams
from blocktable.errors import NeverFitsError
from tests.model.tiny import ARCHITECTURES, VOCAB_SIZE, WINDOW

from .reference import generate_reference

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPT, OUTPUT, BLOCK, CHUNK = 150, 50, 4, 8
ROWS = PROMPT + OUTPUT - 1
FULL = -(-ROWS // BLOCK)
"""Blocks of all rows in one group."""
BEHIND = -(-(WINDOW - 1 + CHUNK - 1) // BLOCK) + 1
"""Blocks that a window and the chunk of a step touch at most."""
NEEDS = {"mistral": BEHIND, "phi3": BEHIND, "gemma2": FULL + BEHIND, "gemma3_text": FULL + BEHIND, "gpt_oss": FULL + BEHIND}
PAST = {"mistral": 1, "phi3": 1, "gemma2": 2, "gemma3_text": 2, "gpt_oss": 2}
"""Groups of each."""


def prompt_of(number: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(PROMPT)]


def engine(model: Any, usable: int) -> LLM:
    return LLM(
        model,
        num_blocks=usable + 1,
        block_size=BLOCK,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=4,
        self_check=False,
        max_model_len=256,
    )


@pytest.mark.parametrize("name", NEEDS)
def test_a_pool_too_small_for_all_rows_serves_a_text_through_its_windows(name: str) -> None:
    model, prompt = ARCHITECTURES[name](), prompt_of(1)
    reference = generate_reference(model, [prompt], OUTPUT)[0]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, min_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    usable = NEEDS[name]
    assert usable < PAST[name] * FULL
    with engine(model, usable) as llm:
        output = llm.generate({"prompt_token_ids": prompt}, params)[0]
        report = llm.kv_report()
        llm.scheduler.audit()
    assert list(output.outputs[0].token_ids) == list(reference)
    assert report.peak_blocks <= usable
    assert report.preemptions == 0
    with engine(model, usable - 1) as llm, pytest.raises(NeverFitsError, match=f"{usable} KV blocks"):
        llm.generate({"prompt_token_ids": prompt}, params)


def test_what_leaves_the_window_of_one_text_serves_another() -> None:
    """Two texts of 199 rows at once in memory for 60."""
    model, prompts = ARCHITECTURES["mistral"](), [prompt_of(1), prompt_of(2)]
    reference = generate_reference(model, prompts, OUTPUT)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    with engine(model, 15) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        report = llm.kv_report()
    assert [list(output.outputs[0].token_ids) for output in outputs] == [list(ids) for ids in reference]
    assert report.preemptions == 0
