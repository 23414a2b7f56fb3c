"""The rows of a step: a row's token is a function of its own logits, parameters, seed and position, and of nothing else."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable.errors import BlocktableError
from blocktable.sampling import sampler as module
from blocktable.sampling.params import ResolvedSampling, SamplingParams
from blocktable.sampling.sampler import NO_TOKEN, NonFiniteLogitsError, Sampled, Sampler

VOCAB = 97
ROWS = 12
END_IDS = (3, 50)
WORDS = {"a": [20], " a": [20, 21], "b": [22, 20], " b": [23]}


def resolved(**options: Any) -> ResolvedSampling:
    params = SamplingParams(max_tokens=None, **options)
    return params.resolve(
        vocab_size=VOCAB, eos_token_ids=END_IDS, max_model_len=10_000, num_prompt_tokens=1, encode=lambda text: WORDS[text]
    )


def some_params(rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": rng.choice([0.0, 0.0, 0.5, 1.0, 2.0]),
        "top_k": rng.choice([0, 0, 1, 5, 40]),
        "top_p": rng.choice([1.0, 1.0, 0.9, 0.3]),
        "min_p": rng.choice([0.0, 0.0, 0.1]),
        "min_tokens": rng.choice([0, 0, 2, 5]),
        "ignore_eos": rng.random() < 0.3,
        "stop_token_ids": rng.choice([None, [7], [8, 9, 10, 11]]),
    } | (some_rules(rng) if rng.random() < 0.5 else {})


def some_rules(rng: random.Random) -> dict[str, Any]:
    return {
        "presence_penalty": rng.choice([0.0, 2.0]),
        "frequency_penalty": rng.choice([0.0, 1.0]),
        "repetition_penalty": rng.choice([1.0, 3.0]),
        "logit_bias": rng.choice([None, {30: 4.0, 31: -4.0}]),
        "allowed_token_ids": rng.choice([None, None, list(range(20, 40))]),
        "bad_words": rng.choice([None, ["a", "b"]]),
        "logprobs": rng.choice([None, None, 2]),
    }


def logits_of(request: int, position: int) -> torch.Tensor:
    """[V] the logits that a model would give for this request at this position; the end ids are often best."""
    generator = torch.Generator().manual_seed(request * 1000 + position)
    logits = torch.randn(VOCAB, generator=generator) * 2
    logits[list(END_IDS)] += 3 * (position % 2)
    return logits


def prompt_of(request: int) -> np.ndarray:
    return np.arange(request, request + 60, dtype=np.int32)


def ids(sampler: Sampler, entries: list[tuple[int, int, int]]) -> list[int]:
    """One step. An entry is (request, row, position)."""
    logits = torch.stack([logits_of(request, position) for request, _, position in entries])
    rows, positions = (np.array([entry[i] for entry in entries], dtype=np.int32) for i in (1, 2))
    chosen = sampler.sample(logits, rows, positions).ids
    sampler.note(rows, chosen)
    return chosen.tolist()


def cold(request: int, params: dict[str, Any], length: int, make: type[Sampler] = Sampler) -> list[int]:
    """The request alone, in row 0 of a fresh sampler."""
    sampler = make(1, VOCAB)
    sampler.set_row(0, resolved(**params), request * 77 - 5, prompt_of(request))
    return [ids(sampler, [(request, 0, position)])[0] for position in range(length)]


def warm(
    requests: dict[int, dict[str, Any]], length: int, rng: random.Random, make: type[Sampler] = Sampler
) -> dict[int, list[int]]:
    """All of them in one sampler: random company and order, rows that change at preemption and that others had before."""
    sampler = make(ROWS, VOCAB)
    rows: dict[int, int] = {}
    outputs: dict[int, list[int]] = {request: [] for request in requests}
    while any(len(output) < length for output in outputs.values()):
        for request in [r for r in rows if rng.random() < 0.2]:
            sampler.clear_row(rows.pop(request))
        for request in rng.sample(sorted(requests), len(requests)):
            free = [row for row in range(ROWS) if row not in rows.values()]
            if request not in rows and free and rng.random() < 0.6:
                rows[request] = rng.choice(free)
                said = np.array(outputs[request], dtype=np.int32)
                sampler.set_row(rows[request], resolved(**requests[request]), request * 77 - 5, prompt_of(request), said)
        step = [r for r in rng.sample(sorted(rows), len(rows)) if len(outputs[r]) < length and rng.random() < 0.8]
        if step:
            for request, token in zip(step, ids(sampler, [(r, rows[r], len(outputs[r])) for r in step])):
                outputs[request].append(token)
    return outputs


def alike(seed: int, make: type[Sampler] = Sampler) -> bool:
    """Whether every request's tokens in company are those that it gets alone."""
    rng = random.Random(seed)
    requests = {number: some_params(rng) for number in range(rng.randint(1, 8))}
    together = warm(requests, 6, rng, make)
    return all(together[number] == cold(number, params, 6, make) for number, params in requests.items())


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_company_order_rows_and_preemption_change_no_token(seed: int) -> None:
    assert alike(seed)


def test_logits_on_another_device_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of logits that numpy cannot read in place, taken here by those that it could."""
    requests = {number: some_params(random.Random(number)) for number in range(12)}
    on_host = [cold(number, params, 6) for number, params in requests.items()]
    monkeypatch.setattr(module, "_is_on_host", lambda logits: False)
    assert [cold(number, params, 6) for number, params in requests.items()] == on_host
    assert all(alike(seed) for seed in range(5))
    for kind in BAD_LOGITS:
        for temperature in (0.0, 1.0):
            test_a_row_without_a_choice_fails_alone(kind, temperature)


@pytest.mark.gpu
def test_logits_on_a_gpu_give_the_tokens_of_the_host(rng: random.Random) -> None:
    sampler = Sampler(ROWS, VOCAB)
    for row in range(ROWS):
        sampler.set_row(row, resolved(**some_params(rng)), seed=row)
    logits, rows, positions = torch.randn(ROWS, VOCAB).round(decimals=1), np.arange(ROWS), np.arange(ROWS) % 4
    on_host = sampler.sample(logits.clone(), rows, positions).ids.tolist()
    assert sampler.sample(logits.cuda(), rows, positions).ids.tolist() == on_host


def test_a_real_vocabulary_gives_the_same_tokens_alone_and_in_any_company(one_torch_thread: None) -> None:
    vocab, count = 49_152, 6
    params = SamplingParams(temperature=1.2).resolve(vocab_size=vocab, eos_token_ids=[], max_model_len=99, num_prompt_tokens=1)
    nucleus = SamplingParams(top_p=0.95).resolve(vocab_size=vocab, eos_token_ids=[], max_model_len=99, num_prompt_tokens=1)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(0)) * 3
    sampler = Sampler(count, vocab)
    for row in range(count):
        sampler.set_row(row, params if row % 2 else nucleus, seed=row)
    rows, positions = np.arange(count), np.arange(count) * 3
    together = sampler.sample(logits.clone(), rows, positions).ids
    for i in range(count):
        alone = sampler.sample(logits[i : i + 1].clone(), rows[i : i + 1], positions[i : i + 1]).ids
        assert alone.tolist() == [together[i]]


def test_seeds_decide_and_positions_do() -> None:
    params = {"temperature": 5.0}
    first = cold(1, params, 12)
    assert first == cold(1, params, 12)
    sampler = Sampler(2, VOCAB)
    for row in range(2):
        sampler.set_row(row, resolved(**params), seed=row)
    flat = torch.zeros(2, VOCAB)
    steps = [sampler.sample(flat.clone(), np.array([0, 1]), np.array([p, p])).ids.tolist() for p in range(20)]
    assert len({a for a, _ in steps}) > 10
    assert sum(a == b for a, b in steps) < 5


def test_greedy_takes_the_lowest_id_of_the_best() -> None:
    sampler = Sampler(2, 5)
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [-torch.inf, -5.0, -torch.inf, -5.0, -9.0]])
    for other in (logits, logits.to(torch.bfloat16), logits.to(torch.float64), logits.t().contiguous().t()):
        assert sampler.sample(other, np.array([0, 1]), np.array([0, 0])).ids.tolist() == [1, 1]


def test_a_tiny_temperature_is_greedy() -> None:
    assert cold(4, {"temperature": 9e-6}, 10) == cold(4, {"temperature": 0.0}, 10)


def test_top_k_of_one_is_greedy_where_nothing_ties() -> None:
    assert cold(4, {"top_k": 1}, 10) == cold(4, {"temperature": 0.0}, 10)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_no_end_token_comes_before_min_tokens_and_the_first_can_come_right_after(temperature: float) -> None:
    flat = torch.full((1, VOCAB), -20.0)
    flat[0, list(END_IDS)] = 10.0
    flat[0, 8] = 0.0
    sampler = Sampler(1, VOCAB)
    sampler.set_row(0, resolved(temperature=temperature, min_tokens=3, stop_token_ids=[7]), seed=1)
    got = [sampler.sample(flat.clone(), np.array([0]), np.array([position])).ids[0] for position in range(5)]
    assert got[:3] == [8, 8, 8]
    assert set(got[3:]) <= set(END_IDS)


def test_rows_with_more_ends_than_others_mask_only_their_own() -> None:
    sampler = Sampler(3, VOCAB)
    ends = [[7], [8, 9, 10, 11], [12, 13]]
    for row, stop_token_ids in enumerate(ends):
        sampler.set_row(row, resolved(temperature=0, ignore_eos=True, min_tokens=1, stop_token_ids=stop_token_ids), seed=0)
    for row, stop_token_ids in enumerate(ends):
        for token in range(7, 14):
            logits = torch.zeros(1, VOCAB)
            logits[0, token] = 5.0
            masked = token in stop_token_ids
            assert (sampler.sample(logits, np.array([row]), np.array([0])).ids[0] != token) == masked


BAD_LOGITS = {
    "one NaN": lambda: torch.zeros(VOCAB).index_fill(0, torch.tensor([90]), torch.nan),
    "all NaN": lambda: torch.full((VOCAB,), torch.nan),
    "one infinity": lambda: torch.zeros(VOCAB).index_fill(0, torch.tensor([5]), torch.inf),
    "all masked": lambda: torch.full((VOCAB,), -torch.inf),
    "all but the ends masked": lambda: torch.full((VOCAB,), -torch.inf).index_fill(0, torch.tensor(END_IDS), 1.0),
}


@pytest.mark.parametrize("kind", BAD_LOGITS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_choice_fails_alone(kind: str, temperature: float) -> None:
    sampler = Sampler(4, VOCAB)
    for row in range(4):
        sampler.set_row(row, resolved(temperature=temperature, min_tokens=3), seed=row)
    logits = torch.stack([logits_of(row, 1) for row in range(4)])
    right = sampler.sample(logits.clone(), np.arange(4), np.ones(4, dtype=np.int64)).ids
    logits[2] = BAD_LOGITS[kind]()
    got = sampler.sample(logits, np.arange(4), np.ones(4, dtype=np.int64))
    assert got.ids.tolist() == [right[0], right[1], NO_TOKEN, right[3]]
    ((entry, error),) = got.failed
    assert entry == 2
    assert isinstance(error, BlocktableError)
    assert (error.row, error.position) == (2, 1)
    token_ids, starts = got.accepted()
    assert token_ids.tolist() == [right[0], right[1], right[3]]
    assert starts.tolist() == [0, 1, 2, 2, 3]


def test_minus_infinity_beside_finite_logits_is_no_failure() -> None:
    sampler = Sampler(1, VOCAB)
    for temperature in (0.0, 1.0):
        sampler.set_row(0, resolved(temperature=temperature), seed=0)
        logits = torch.full((1, VOCAB), -torch.inf)
        logits[0, 60] = -1e30
        got = sampler.sample(logits, np.array([0]), np.array([0]))
        assert got.ids.tolist() == [60]
        assert got.failed == ()


def test_what_commit_reads_without_failures() -> None:
    token_ids, starts = Sampled(np.array([5, 6], dtype=np.int64)).accepted()
    assert token_ids.tolist() == [5, 6]
    assert starts.tolist() == [0, 1, 2]
    token_ids, starts = Sampled(np.array([], dtype=np.int64)).accepted()
    assert token_ids.tolist() == []
    assert starts.tolist() == [0]


def test_logits_of_inference_mode_can_be_masked_and_drawn() -> None:
    sampler = Sampler(1, VOCAB)
    sampler.set_row(0, resolved(min_tokens=3), seed=0)
    with torch.inference_mode():
        logits = torch.zeros(1, VOCAB) + 1
    assert sampler.sample(logits, np.array([0]), np.array([0])).failed == ()


def test_a_row_given_back_is_greedy_without_masks() -> None:
    sampler = Sampler(1, VOCAB)
    sampler.set_row(0, resolved(temperature=3.0, top_k=5, top_p=0.5, min_p=0.1, min_tokens=9, logprobs=3), seed=5)
    sampler.clear_row(0)
    fresh = Sampler(1, VOCAB)
    for name in ("_is_random", "_temperature", "_min_p", "_top_k", "_top_p", "_seed", "_min_tokens", "_num_logprobs"):
        assert getattr(sampler, name)[0] == getattr(fresh, name)[0]


def test_a_steady_step_leaves_no_object_behind() -> None:
    import gc

    sampler = Sampler(4, VOCAB)
    for row in range(4):
        sampler.set_row(row, resolved(temperature=0.0 if row < 2 else 1.0), seed=row)
    logits, rows, positions = torch.randn(4, VOCAB), np.arange(4), np.zeros(4, dtype=np.int64)
    for _ in range(10):
        sampler.sample(logits, rows, positions)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(200):
            sampler.sample(logits, rows, positions)
        assert len(gc.get_objects()) - before < 50
    finally:
        gc.enable()


# Faults that have been seen elsewhere. Each must fail a promise above.


class OneGenerator(Sampler):
    """Random numbers come from one generator of the step's, one after the other."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        super().__init__(num_rows, vocab_size)
        self.generator = random.Random(0)

    def sample(self, logits: torch.Tensor, rows: Any, positions: Any) -> Sampled:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "uniforms", lambda seeds, positions: np.array([self.generator.random() for _ in seeds]))
            return super().sample(logits, rows, positions)


class ByEntry(Sampler):
    """Parameters are read by the entry's place in the step, not by its row."""

    def sample(self, logits: torch.Tensor, rows: Any, positions: Any) -> Sampled:
        return super().sample(logits, np.arange(len(rows)), positions)


class NotReset(Sampler):
    """A row keeps what the request before it asked for, where the next one does not say otherwise."""

    def clear_row(self, row: int) -> None:
        pass

    def set_row(self, row: int, resolved: ResolvedSampling, seed: int, *history: Any) -> None:
        before = self._min_tokens[row], self._end_ids[row].copy()
        super().set_row(row, resolved, seed, *history)
        if not resolved.min_tokens and before[0]:
            self._min_tokens[row] = before[0]


class SharedTopK(Sampler):
    """The step's largest top_k serves all."""

    def _draw_rows(self, logits: Any, largest: Any, drawn: Any, rows: Any, positions: Any, seeds: Any) -> list[int]:
        kept = self._top_k.copy()
        self._top_k[rows] = self._top_k[rows].max()
        try:
            return super()._draw_rows(logits, largest, drawn, rows, positions, seeds)
        finally:
            self._top_k[:] = kept


class SeedOnly(Sampler):
    """The position does not count, but how often the row was sampled since it was set does."""

    def set_row(self, row: int, resolved: ResolvedSampling, seed: int, *history: Any) -> None:
        super().set_row(row, resolved, seed, *history)
        self.__dict__.setdefault("calls", {})[row] = 0

    def _draw_rows(self, logits: Any, largest: Any, drawn: Any, rows: Any, positions: Any, seeds: Any) -> list[int]:
        counted = []
        for row in rows.tolist():
            counted.append(self.__dict__["calls"][row])
            self.__dict__["calls"][row] += 1
        return super()._draw_rows(logits, largest, drawn, rows, np.array(counted), seeds)


class ForgetsAtPreemption(Sampler):
    """Who gets a row again has said nothing."""

    def set_row(self, row: int, resolved: ResolvedSampling, seed: int, *history: Any) -> None:
        super().set_row(row, resolved, seed, *history[:1])


class OnlyThisPart(Sampler):
    """The prompt is what was computed last of it, as if the rest had been cached."""

    def set_row(self, row: int, resolved: ResolvedSampling, seed: int, *history: Any) -> None:
        had = self.__dict__.setdefault("had", set())
        prompt = history[0][-1:] if seed in had else history[0]
        had.add(seed)
        super().set_row(row, resolved, seed, prompt, *history[1:])


class KeepsRules(Sampler):
    """A row keeps the rules of the one before it, where the next has none."""

    def clear_row(self, row: int) -> None:
        rules = self._rules.get(row)
        super().clear_row(row)
        if rules is not None:
            self._rules[row], self._has_rules[row] = rules, True


class FirstAskDecides(Sampler):
    """Whether the step has penalties at all is what its first entry says."""

    def _apply_rules(self, logits: torch.Tensor, rows: Any) -> None:
        if self._has_rules[rows[0]]:
            super()._apply_rules(logits, rows)


RULE_FAULTS = [ForgetsAtPreemption, OnlyThisPart, KeepsRules, FirstAskDecides]


@pytest.mark.parametrize("fault", [OneGenerator, ByEntry, NotReset, SharedTopK, SeedOnly, *RULE_FAULTS])
def test_a_faulty_sampler_is_caught(fault: type[Sampler]) -> None:
    assert not all(alike(seed, fault) for seed in range(12))


def test_a_sampler_that_is_blind_to_bad_numbers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.np, "isfinite", lambda values: np.ones(np.shape(values), dtype=bool))
    with pytest.raises((AssertionError, ValueError, IndexError)):
        test_a_row_without_a_choice_fails_alone("all masked", 0.0)


def test_a_mask_that_ends_one_output_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = Sampler._mask_ends
    monkeypatch.setattr(Sampler, "_mask_ends", lambda self, logits, rows, positions: mask(self, logits, rows, positions + 1))
    with pytest.raises(AssertionError):
        test_no_end_token_comes_before_min_tokens_and_the_first_can_come_right_after(0.0)


def test_the_error_says_what_happened() -> None:
    assert "masked" in str(NonFiniteLogitsError(1, 2, -np.inf))
    assert "nan" in str(NonFiniteLogitsError(1, 2, np.nan))
