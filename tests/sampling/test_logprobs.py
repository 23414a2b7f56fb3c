"""Promise: a row that asks for log probabilities gets those of the model's own distribution, whatever else is done to its
logits, on the host and on a device; ranks and the best follow one order; no number is beyond `LOWEST_LOGPROB`. The twin sorts
everything in float64."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blocktable.sampling import logprobs as module
from blocktable.sampling import sampler as sampler_module
from blocktable.sampling.logprobs import LOWEST_LOGPROB
from blocktable.sampling.params import ResolvedSampling, SamplingParams
from blocktable.sampling.sampler import NO_TOKEN, Sampled, Sampler

ROWS = 6
END = 2


def resolved(vocab: int, **options: Any) -> ResolvedSampling:
    params = SamplingParams(max_tokens=None, **options)
    return params.resolve(
        vocab_size=vocab,
        eos_token_ids=[END],
        max_model_len=10_000,
        num_prompt_tokens=1,
        max_logprobs=1024,
        encode=lambda text: [5],
    )


def some_options(rng: random.Random, vocab: int) -> dict[str, Any]:
    return {
        "temperature": rng.choice([0.0, 0.0, 1.0, 3.0]),
        "logprobs": rng.choice([None, 0, 1, 5, min(20, vocab)]),
        "presence_penalty": rng.choice([0.0, 2.0]),
        "repetition_penalty": rng.choice([1.0, 5.0]),
        "logit_bias": rng.choice([None, {rng.randrange(vocab): 100}]),
        "allowed_token_ids": rng.choice([None, None, [1, 3, 4]]),
        "bad_words": rng.choice([None, ["x"]]),
        "min_tokens": rng.choice([0, 9]),
    }


class SomeGuide:
    """Allows these tokens and no other."""

    is_over = False

    def __init__(self, vocab: int, ids: list[int]) -> None:
        self.allowed = np.isin(np.arange(vocab), ids)


def some_guide(rng: random.Random, vocab: int, options: dict[str, Any]) -> Any:
    """Of a row whose tokens nothing else forbids."""
    if options["allowed_token_ids"] or options["bad_words"] or rng.random() < 0.5:
        return None
    return SomeGuide(vocab, [rng.choice([0, 1, 3, 4, 5]), *rng.sample(range(vocab), 9)])


def some_logits(rng: random.Random, vocab: int) -> np.ndarray:
    """Some with many equal ones, some with a few that are minus infinity, some far apart."""
    numbers = np.random.default_rng(rng.randrange(2**32)).normal(size=(ROWS, vocab)) * rng.choice([1, 10, 6000])
    logits = numbers.round(rng.choice([0, 1, 9])).astype(np.float32)
    for row in range(ROWS):
        if rng.random() < 0.3:
            logits[row, 6:][np.random.default_rng(row).random(vocab - 6) < 0.5] = -np.inf
    return logits


def twin(logits: np.ndarray, chosen: int, count: int) -> tuple[list[int], list[float], int]:
    """Ids and log probabilities of the chosen token and the best, and the chosen one's rank."""
    wide = logits.astype(np.float64)
    all_of = wide - (wide.max() + np.log(np.exp(wide - wide.max()).sum()))
    order = sorted(range(len(wide)), key=lambda token: (-wide[token], token))
    ids = [chosen, *order[:count]]
    return ids, [max(float(all_of[token]), LOWEST_LOGPROB) for token in ids], 1 + order.index(chosen)


def check(seed: int, make: type[Sampler] = Sampler) -> None:
    rng = random.Random(seed)
    vocab = rng.choice([40, 255, 256, 700])
    sampler, asked = make(ROWS, vocab), [some_options(rng, vocab) for _ in range(ROWS)]
    for row, options in enumerate(asked):
        history, guide = (np.array([1, 3]), np.array([4, 4])), some_guide(rng, vocab, options)
        sampler.set_row(row, resolved(vocab, **options), row, *history, guide)
    logits = some_logits(rng, vocab)
    rows = np.array(rng.sample(range(ROWS), rng.randint(1, ROWS)))
    got = sampler.sample(torch.from_numpy(logits[rows]), rows, np.full(len(rows), 2))
    wanted = [entry for entry, row in enumerate(rows.tolist()) if asked[row]["logprobs"] is not None]
    if not wanted:
        assert got.logprobs is None
        return
    told = got.logprobs
    assert told is not None
    assert told.entries.tolist() == wanted
    for place, entry in enumerate(wanted):
        row = rows[entry]
        width = 1 + asked[row]["logprobs"]
        ids, values, rank = twin(logits[row], int(got.ids[entry]), width - 1)
        assert told.ids[place, :width].tolist() == ids
        assert told.ranks[place] == rank
        np.testing.assert_allclose(told.values[place, :width], values, rtol=3e-6, atol=3e-6)
        assert np.isfinite(told.values).all()
        assert (told.values <= 0).all()


BESIDE_THOUSANDS = (3520128310, 261421176)
"""Seeds of logits so large that a log probability near 0 is lost in their last bit."""


def check_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        check(seed)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
@example(seed=BESIDE_THOUSANDS[0])
@example(seed=BESIDE_THOUSANDS[1])
def test_they_are_those_of_the_twin(seed: int) -> None:
    check(seed)


def test_they_are_those_of_the_twin_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of logits that numpy cannot read in place, taken here by those that it could."""
    monkeypatch.setattr(sampler_module, "_is_on_host", lambda logits: False)
    check_all([*range(60), *BESIDE_THOUSANDS])


@pytest.mark.gpu
def test_they_are_those_of_the_twin_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU(Sampler):
        def sample(self, logits: torch.Tensor, *rest: Any) -> Sampled:
            return super().sample(logits.cuda(), *rest)

    for seed in range(60):
        check(seed, OnGPU)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_distribution_that_is_none_fails_its_row_although_a_mask_hides_it(
    bad: float, temperature: float, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "_is_on_host", lambda logits: on_host)
    sampler = Sampler(3, 40)
    for row in range(3):
        options: dict[str, Any] = {"allowed_token_ids": [1, 3]} if row == 1 else {}
        sampler.set_row(row, resolved(40, temperature=temperature, logprobs=2, **options), seed=row)
    logits = torch.zeros(3, 40)
    logits[1, 9] = bad
    got = sampler.sample(logits, np.arange(3), np.zeros(3, dtype=np.int64))
    assert got.ids[1] == NO_TOKEN
    assert [entry for entry, _ in got.failed] == [1]
    assert got.logprobs is not None
    assert got.logprobs.entries.tolist() == [0, 2]
    assert np.isfinite(got.logprobs.values).all()
    sampler.set_row(1, resolved(40, temperature=temperature, allowed_token_ids=[1, 3]), seed=1)
    logits = torch.zeros(3, 40)
    logits[1, 9] = bad
    assert sampler.sample(logits, np.arange(3), np.zeros(3, dtype=np.int64)).failed == (), "who does not ask has a choice"


def test_a_step_without_them_makes_none() -> None:
    sampler = Sampler(2, 40)
    sampler.set_row(0, resolved(40, logprobs=3), seed=0)
    sampler.set_row(1, resolved(40), seed=0)
    assert sampler.sample(torch.zeros(1, 40), np.array([1]), np.array([0])).logprobs is None
    sampler.clear_row(0)
    assert sampler.sample(torch.zeros(1, 40), np.array([0]), np.array([0])).logprobs is None
    assert sampler._num_asking == 0


# Planted: each must fail the comparison with the twin.


def raw_is_changed(self: Sampler, told: Any, logits: torch.Tensor, rows: Any, positions: Any) -> Any:
    """What is kept of the logits is changed with them."""
    return module.RawRows([logits.numpy()[entry] for entry in told.entries], list(range(len(told.entries))))


def raw_of_guided_is_changed(self: Sampler, *given: Any) -> Any:
    """As above, but of rows with a grammar only."""
    has_guide, self._has_guide = self._has_guide, np.zeros_like(self._has_guide)
    try:
        return RAW(self, *given)
    finally:
        self._has_guide = has_guide


RAW = Sampler._raw


def first_spans(raw: np.ndarray, count: int) -> np.ndarray:
    """The best of each span only."""
    found = np.array([start + int(raw[start : start + 256].argmax()) for start in range(0, len(raw), 256)])
    return found[np.argsort(-raw[found], kind="stable")[:count]]


@pytest.mark.parametrize("fault", ["changed", "changed where guided", "spans", "ties"])
def test_a_faulty_reading_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "changed":
        monkeypatch.setattr(Sampler, "_raw", raw_is_changed)
    elif fault == "changed where guided":
        monkeypatch.setattr(Sampler, "_raw", raw_of_guided_is_changed)
    elif fault == "spans":
        monkeypatch.setattr(module, "_best", first_spans)
    else:
        monkeypatch.setattr(module, "_best", lambda raw, count: np.argsort(raw)[::-1][:count])
    with pytest.raises((AssertionError, ValueError)):
        check_all(range(40))


def test_equal_ones_in_any_order_are_caught_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "_is_on_host", lambda logits: False)
    monkeypatch.setattr(sampler_module.device, "_top", lambda raw, most: raw.flip(1).topk(most, dim=1).indices)
    with pytest.raises(AssertionError):
        check_all(range(40))


def test_a_failure_that_is_not_seen_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.HostLogprobs, "_log_sum", lambda self, raw: 0.0)
    with pytest.raises(AssertionError):
        test_a_distribution_that_is_none_fails_its_row_although_a_mask_hides_it(np.inf, 0.0, True, monkeypatch)
