"""Promise: the comparison with transformers can fail: one wrong token, one too few, one tie too many."""

import copy
from typing import Any

import pytest

from .reference import Answer, Comparison, Ids, generate_reference, is_tie
from .ways import Way, run_way

PROMPTS = [[1, 2, 3], [40, 41, 42, 43], [5]]
COUNT = 6

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def reference(tiny_model: object) -> list[Ids]:
    return generate_reference(tiny_model, PROMPTS, COUNT)


def comparison(reference: list[Ids], is_a_tie: bool, max_ties: int = 2) -> Comparison:
    return Comparison(PROMPTS, reference, lambda prefix, ours, theirs: is_a_tie, max_ties)


def answers_with(reference: list[Ids], changes: dict[tuple[int, int], int]) -> Answer:
    """The reference, but for some tokens; asked again from a prefix, the reference's rest."""

    def answer(prompts: list[Ids], counts: list[int]) -> list[Ids]:
        if prompts == PROMPTS:
            changed = copy.deepcopy(reference)
            for (place, at), token in changes.items():
                changed[place][at] = token
            return changed
        whole = [prompt + output for prompt, output in zip(PROMPTS, reference)]
        return [next(text for text in whole if text[: len(prompt)] == prompt)[len(prompt) :] for prompt in prompts]

    return answer


def test_equal_text_passes(reference: list[Ids]) -> None:
    comparison(reference, is_a_tie=False).check(answers_with(reference, {}))


@pytest.mark.parametrize("at", range(COUNT))
def test_one_wrong_token_fails(at: int, reference: list[Ids]) -> None:
    with pytest.raises(AssertionError, match=f"prompt 1, token {at}"):
        comparison(reference, is_a_tie=False).check(answers_with(reference, {(1, at): 200}))


@pytest.mark.parametrize("at", [0, 3, COUNT - 1])
def test_a_tie_is_counted_and_the_rest_is_compared_from_there(at: int, reference: list[Ids]) -> None:
    run = comparison(reference, is_a_tie=True)
    run.check(answers_with(reference, {(1, at): 200}))
    assert run.ties == [(1, at)]


def test_too_many_ties_fail(reference: list[Ids]) -> None:
    with pytest.raises(AssertionError, match="2 ties"):
        comparison(reference, is_a_tie=True, max_ties=1).check(answers_with(reference, {(0, 1): 200, (2, 1): 200}))


def test_a_short_answer_fails(reference: list[Ids]) -> None:
    with pytest.raises(AssertionError, match="5 tokens"):
        comparison(reference, is_a_tie=True).check(lambda prompts, counts: [output[:5] for output in reference])


def test_tokens_that_are_clearly_apart_are_no_tie(tiny_model: object, reference: list[Ids]) -> None:
    best = reference[0][0]
    assert not is_tie(tiny_model, PROMPTS[0], (best + 1) % 272, best)


def test_a_cache_that_is_shared_wrongly_fails(
    tiny_model: object, reference: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run with a fault in the engine: keys and values go to the slots of the token before."""
    from blocktable.model.runner import ModelRunner

    real = ModelRunner._inputs

    def shifted(self: Any, plan: Any, token_ids: Any, shared: Any) -> Any:
        inputs = real(self, plan, token_ids, shared)
        for step in inputs.context._steps:
            step.slots.copy_(step.slots.roll(1))
        return inputs

    monkeypatch.setattr(ModelRunner, "_inputs", shifted)
    run = comparison(reference, is_a_tie=False)
    with pytest.raises(AssertionError, match="no tie"):
        run.check(run_way(Way(), tiny_model, {}, num_blocks=64, block_size=8, self_check=False))
