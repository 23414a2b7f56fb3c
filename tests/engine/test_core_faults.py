"""Promise: a fault in the core shows at the engine's door: in the text, in the books, or as an error. Needs the build of the
core with planted faults; each check passes without its fault."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from blocktable import LLM, AuditError, SamplingParams, StalledError, _core
from tests.model.tiny import ARCHITECTURES

from .conftest import MakeLLM
from .faults import faulty_model, raising
from .reference import generate_reference
from .ways import check_empty

pytestmark = pytest.mark.mutant

IDS = [[1, 2, 3], list(range(40, 60)), list(range(40, 70)), [90] * 9, [5]]
PROMPTS = [{"prompt_token_ids": ids} for ids in IDS]
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)

Run = Callable[[MakeLLM], None]


@pytest.fixture(autouse=True)
def no_fault_left() -> Iterator[None]:
    yield
    _core.set_mutant(None)


def texts(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, TEN)]


def alone(make_llm: MakeLLM) -> list[list[int]]:
    """Each prompt in an engine of its own, without the cache."""
    return [texts(make_llm(enable_prefix_caching=False), [prompt])[0] for prompt in PROMPTS]


def preempted(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=9)
    assert texts(llm, PROMPTS) == alone(make_llm)
    assert llm.kv_report().preemptions > 0
    check_empty(llm)


def chunked(make_llm: MakeLLM) -> None:
    assert texts(make_llm(max_num_batched_tokens=7), PROMPTS) == alone(make_llm)


def warmed(make_llm: MakeLLM) -> None:
    llm = make_llm()
    texts(llm, PROMPTS)
    assert texts(llm, PROMPTS) == alone(make_llm)
    check_empty(llm)


def failed(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_batched_tokens=7)
    with faulty_model(llm, raising(RuntimeError("no memory")), {1, 3, 7}):
        found = texts(llm, PROMPTS)
    assert found == alone(make_llm)
    check_empty(llm)


def alike_from_the_second_block_on(make_llm: MakeLLM) -> None:
    """Equal tokens behind other tokens are another prefix."""
    tail = list(range(100, 120))
    heads, tails = ([5] * 8, [6] * 8, [6] * 8), (tail, [7] * 9, tail)
    prompts = [{"prompt_token_ids": head + rest} for head, rest in zip(heads, tails)]
    llm = make_llm()
    found = [texts(llm, [prompt])[0] for prompt in prompts]
    assert found == [texts(make_llm(enable_prefix_caching=False), [prompt])[0] for prompt in prompts]


def through_windows(_: MakeLLM) -> None:
    """Layers with a window of 8 and without, in memory that holds no more than they see."""
    model, prompt = ARCHITECTURES["gemma2"](), list(range(3, 103))
    reference = generate_reference(model, [prompt], 20)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    with LLM(model, num_blocks=36, block_size=4, max_num_batched_tokens=8, max_num_seqs=2, self_check=False) as llm:
        assert [list(output.outputs[0].token_ids) for output in llm.generate({"prompt_token_ids": prompt}, params)] == reference
        check_empty(llm)


FAULTS: dict[str, Run] = {
    "window_never_freed": through_windows,
    "slots_of_first_group": through_windows,
    "tail_lost_on_preempt": preempted,
    "leak_block_on_finish": warmed,
    "short_slot": chunked,
    "count_one_too_many": chunked,
    "key_without_parent": alike_from_the_second_block_on,
    "no_rollback_on_fail": failed,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_core_shows(name: str, make_llm: MakeLLM) -> None:
    run = FAULTS[name]
    run(make_llm)
    _core.set_mutant(name)
    with pytest.raises((AssertionError, AuditError, StalledError)):
        run(make_llm)
