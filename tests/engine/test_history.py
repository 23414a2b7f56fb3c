"""Promise: penalties, biases, masks and log probabilities are those of a request that runs alone, whatever of it was cached,
cut into chunks, preempted, overlapped or failed, and whoever runs beside it; a request that runs alone gives what a plain loop
over the plain model gives, which computes everything anew for each token."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from blocktable import LLM, RequestOutput, SamplingParams
from blocktable.engine.roster import Roster
from blocktable.engine.running_rows import RunningRows
from blocktable.sampling.sampler import Sampler

from .conftest import MakeLLM
from .faults import faulty_model, raising
from .tiny_llama import make_model
from .ways import check_empty

PROMPTS: list[Any] = [
    {"prompt_token_ids": list(range(first, first + length))} for first, length in ((1, 5), (40, 20), (40, 30), (90, 9))
]
LENGTH = 18
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, "logprobs": 3}
DRAWN: dict[str, Any] = GREEDY | {"temperature": 1.0, "seed": 5}
BIAS = {"65": 3.0, "66": 3.0, "67": -100}

ASKED: dict[str, dict[str, Any]] = {
    "nothing": {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True},
    "repetition": GREEDY | {"repetition_penalty": 1.8},
    "frequency": GREEDY | {"frequency_penalty": 0.7, "presence_penalty": -0.5, "logit_bias": BIAS},
    "drawn": DRAWN | {"repetition_penalty": 1.3, "presence_penalty": 0.7},
    "masks": DRAWN | {"allowed_token_ids": list(range(60, 90)), "bad_words": ["A", "BC"], "logit_bias": BIAS, "min_tokens": 6},
    "logprobs": DRAWN,
}

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 8},
    "a small pool": {"num_blocks": 14, "max_num_batched_tokens": 16},
    "no cache": {"enable_prefix_caching": False},
}

Answer = tuple[list[int], list[list[int]] | None, list[float]]
"""Tokens; of each the ids that it has log probabilities of; these, one after the other, and the cumulative one."""

COLD: dict[str, Answer] = {}


def answer_of(output: RequestOutput, child: int = 0) -> Answer:
    one = output.outputs[child]
    assert one.finish_reason == "length"
    if one.logprobs is None:
        return list(one.token_ids), None, []
    assert len(one.logprobs) == len(one.token_ids) == LENGTH
    assert all(token_id == next(iter(told)) for token_id, told in zip(one.token_ids, one.logprobs))
    numbers = [logprob.logprob for told in one.logprobs for logprob in told.values()]
    assert one.cumulative_logprob is not None
    return list(one.token_ids), [list(told) for told in one.logprobs], [*numbers, one.cumulative_logprob]


def same(ours: Answer, theirs: Answer) -> None:
    """Numbers are compared as sums in another order are."""
    assert ours[:2] == theirs[:2]
    np.testing.assert_allclose(ours[2], theirs[2], atol=2e-4)


@pytest.fixture
def cold(make_llm: MakeLLM) -> Callable[[Any, dict[str, Any]], Answer]:
    """A request alone, with nothing cached, one step after the other; each is computed once."""
    made: list[LLM] = []

    def answer(prompt: Any, options: dict[str, Any]) -> Answer:
        key = str((prompt, options))
        if key not in COLD:
            made.append(made[0] if made else make_llm(enable_prefix_caching=False, max_num_batched_tokens=256))
            COLD[key] = answer_of(made[0].generate(prompt, SamplingParams(**options))[0])
        return COLD[key]

    return answer


def mixed() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Everybody with every option, side by side."""
    for options in ASKED.values():
        for prompt in PROMPTS:
            yield prompt, options


def run_all(llm: LLM, jobs: list[tuple[Any, dict[str, Any]]]) -> list[Answer]:
    outputs = llm.generate([prompt for prompt, _ in jobs], [SamplingParams(**options) for _, options in jobs])
    check_empty(llm)
    return [answer_of(output) for output in outputs]


def check_way(make_llm: MakeLLM, cold: Callable[..., Answer], way: str, depth: int) -> LLM:
    llm = make_llm(overlap_depth=depth, **WAYS[way])
    for jobs in (list(mixed()), list(mixed())[::-1]):  # the second time with what the first has left in the cache
        for (prompt, options), ours in zip(jobs, run_all(llm, jobs), strict=True):
            same(ours, cold(prompt, options))
    return llm


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_every_answer_is_the_cold_one(way: str, depth: int, make_llm: MakeLLM, cold: Callable[..., Answer]) -> None:
    llm = check_way(make_llm, cold, way, depth)
    stats = llm.scheduler.stats()
    assert (stats["preemptions"] > 0) is (way == "a small pool")
    assert (stats["prefix_hits"] > 0) is (way != "no cache")


@pytest.mark.parametrize("depth", [1, 2])
def test_failed_steps_count_nothing_twice(depth: int, make_llm: MakeLLM, cold: Callable[..., Answer]) -> None:
    llm = make_llm(overlap_depth=depth, **WAYS["a small pool"])
    with faulty_model(llm, raising(RuntimeError("planted"), is_late=True), set(range(0, 200, 3))):
        for (prompt, options), ours in zip(mixed(), run_all(llm, list(mixed()))):
            same(ours, cold(prompt, options))
    assert llm.scheduler.stats()["failed_steps"] > 10


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_several_answers_have_histories_of_their_own(
    way: str, depth: int, make_llm: MakeLLM, cold: Callable[..., Answer]
) -> None:
    llm = make_llm(overlap_depth=depth, **WAYS[way])
    for name in ("drawn", "masks"):
        outputs = llm.generate(PROMPTS, SamplingParams(**ASKED[name] | {"n": 3}))
        check_empty(llm)
        for prompt, output in zip(PROMPTS, outputs):
            for child in range(3):
                same(answer_of(output, child), cold(prompt, ASKED[name] | {"seed": 5 + child}))


def plainly(model: Any, prompt: list[int], options: dict[str, Any]) -> Answer:
    """The best token, again and again: one pass over everything, the formulas over the whole history."""
    outputs: list[int] = []
    told: list[list[int]] = []
    numbers: list[float] = []
    cumulative = 0.0
    while len(outputs) < LENGTH:
        with torch.inference_mode():
            raw = model(torch.tensor([prompt + outputs])).logits[0, -1].double()
        changed = raw.clone()
        for token_id, bias in options.get("logit_bias", {}).items():
            changed[int(token_id)] += bias
        for token_id in {*prompt, *outputs}:
            penalty = options.get("repetition_penalty", 1.0)
            changed[token_id] = changed[token_id] / penalty if changed[token_id] > 0 else changed[token_id] * penalty
        for token_id in outputs:
            changed[token_id] -= options.get("frequency_penalty", 0.0)
        for token_id in set(outputs):
            changed[token_id] -= options.get("presence_penalty", 0.0)
        best = int(changed.argmax())
        values = raw.log_softmax(0)
        ids = list(dict.fromkeys([best, *values.topk(options["logprobs"]).indices.tolist()]))
        outputs.append(best)
        told.append(ids)
        numbers += values[ids].tolist()
        cumulative += float(values[best])
    return outputs, told, [*numbers, cumulative]


@pytest.mark.parametrize("name", ["repetition", "frequency"])
def test_the_cold_answer_is_that_of_a_plain_loop(name: str, cold: Callable[..., Answer]) -> None:
    model = make_model()
    for prompt in PROMPTS:
        same(cold(prompt, ASKED[name]), plainly(model, prompt["prompt_token_ids"], ASKED[name]))


def test_options_do_what_they_say(cold: Callable[..., Answer]) -> None:
    """The comparisons above are of answers that differ."""
    for prompt in PROMPTS:
        answers = {name: tuple(cold(prompt, options)[0]) for name, options in ASKED.items()}
        assert len(set(answers.values())) == len(ASKED)
        assert set(answers["masks"]) <= set(range(60, 90))
        assert len(set(answers["repetition"])) > len(set(answers["nothing"])) or len(set(answers["nothing"])) == LENGTH


# Planted: what other engines had wrong.


def forgets_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    set_row = Sampler.set_row
    monkeypatch.setattr(
        Sampler,
        "set_row",
        lambda self, row, asked, seed, prompt, outputs, *more: set_row(self, row, asked, seed, prompt, None, *more),
    )


def is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "note", lambda self, rows, ids: None)


def tells_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    take = RunningRows.take

    def twice(self: RunningRows, rows: Any, ids: Any, now_ns: int) -> None:
        take(self, rows, ids, now_ns)
        self._sampler.note(rows, ids)

    monkeypatch.setattr(RunningRows, "take", twice)


def only_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found in the cache is no part of the history."""
    enter = RunningRows.enter

    def entered(self: RunningRows, request: Any, row: int) -> None:
        enter(self, request, row)
        cached = request.num_cached or 0
        self._sampler.set_row(row, request.sampling, request.seed, request.prompt.array[cached:], request.saved.token_ids)

    monkeypatch.setattr(RunningRows, "enter", entered)
    monkeypatch.setattr(Roster, "_enter_row", enters_with_its_hits)


def enters_with_its_hits(self: Any, number: int, row: int) -> None:
    request = self._requests[number]
    request.enters(0)
    request.num_cached = self._scheduler.num_cached_tokens(number)
    self.rows.enter(request, row)


def mixes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Sampler.note
    monkeypatch.setattr(Sampler, "note", lambda self, rows, ids: note(self, rows, ids[::-1]))


@pytest.mark.parametrize(
    "plant, way",
    [
        (forgets_outputs, "a small pool"),
        (is_not_told, "plain"),
        (tells_twice, "plain"),
        (only_what_was_computed, "plain"),
        (mixes_rows, "plain"),
    ],
)
def test_a_faulty_history_is_caught(
    plant: Any, way: str, make_llm: MakeLLM, cold: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for prompt, options in mixed():
        cold(prompt, options)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_way(make_llm, cold, way, 1)
