"""One row's choice: the candidates that vLLM's order leaves, each with its share."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from blocktable.sampling import draw as module
from blocktable.sampling.draw import RowDraw

OFF: dict[str, Any] = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
Draw = Callable[..., int]


def shares(logits: NDArray[np.float32], temperature: float, min_p: float, top_k: int, top_p: float) -> NDArray[np.float64]:
    """[V] probability of each token, written from the definitions, in float64 and with a full sort."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    weights[weights < min_p] = 0.0
    if top_k:
        weights[weights < np.sort(weights)[::-1][top_k - 1]] = 0.0
    if top_p < 1.0:
        falling = np.sort(weights)[::-1]
        before = np.cumsum(falling) - falling
        weights[weights < falling[before < top_p * weights.sum()].min()] = 0.0
    return weights / weights.sum()


def expect(logits: NDArray[np.float32], uniform: float, options: dict[str, Any]) -> int:
    """The token in whose share of [0, 1), in ascending order of ids, the number lies."""
    return int(np.searchsorted(np.cumsum(shares(logits, **options)), uniform, side="right"))


def on_a_border(logits: NDArray[np.float32], uniform: float, options: dict[str, Any]) -> bool:
    """Whether rounding may decide: the number between two shares, or a token at the edge of an option."""
    if np.abs(np.cumsum(shares(logits, **options)) - uniform).min() < 1e-5:
        return True
    near = options | {"min_p": min(options["min_p"] * (1 + 1e-5), 1.0), "top_p": options["top_p"] * (1 - 1e-5)}
    far = options | {"min_p": options["min_p"] * (1 - 1e-5), "top_p": min(options["top_p"] * (1 + 1e-5), 1.0)}
    return bool(((shares(logits, **near) > 0) != (shares(logits, **far) > 0)).any())


def run(draw: Draw, logits: NDArray[np.float32], uniform: float, options: dict[str, Any]) -> int:
    return draw(logits, float(logits.max()), uniform, **(OFF | options))


def some_case(rng: np.random.Generator, size: int) -> tuple[NDArray[np.float32], float, dict[str, Any]]:
    """Logits that are peaked, flat, coarse (many ties) or partly masked, and any mix of options."""
    logits = (rng.standard_normal(size) * rng.choice([0.01, 1.0, 4.0])).astype(np.float32)
    if rng.random() < 0.4:
        logits = np.round(logits * 2) / 2
    if rng.random() < 0.3:
        logits[rng.random(size) < 0.5] = -np.inf
        logits[rng.integers(size)] = 1.0
    options = {
        "temperature": float(rng.choice([1e-5, 0.1, 0.7, 1.0, 1.5, 50.0])),
        "min_p": float(rng.choice([0.0, 0.0, 0.05, 0.5, 1.0])),
        "top_k": int(rng.choice([0, 0, 1, 2, 5, 50])) % size,
        "top_p": float(rng.choice([1.0, 1.0, 0.95, 0.5, 0.01])),
    }
    return logits, float(rng.random()), options


def right_on_all(draw_of: Callable[[int], Draw], cases: int, seed: int) -> bool:
    """Whether a draw gives the expected token on random cases."""
    rng = np.random.default_rng(seed)
    for number in range(cases):
        size = int(rng.choice([2, 7, 60, 255, 256, 257, 3000]))
        logits, uniform, options = some_case(rng, size)
        if on_a_border(logits, uniform, options):
            continue
        if run(draw_of(size), logits, uniform, options) != expect(logits, uniform, options):
            print(f"case {number}: {size} logits, {uniform=}, {options=}")
            return False
    return True


def test_the_token_is_the_one_that_the_definitions_give(seed: int) -> None:
    assert right_on_all(lambda size: RowDraw(size).draw, cases=1500, seed=seed)


@given(seed=st.integers(0, 2**32), size=st.integers(1, 600))
def test_any_row_gives_a_token_that_its_options_leave(seed: int, size: int) -> None:
    logits, uniform, options = some_case(np.random.default_rng(seed), size)
    for number in (uniform, 0.0, 1.0 - 2.0**-53):
        token = run(RowDraw(size).draw, logits, number, options)
        assert np.isfinite(logits[token])
        assert shares(logits, **options)[token] > 0 or on_a_border(logits, number, options)


def test_candidates_are_those_of_transformers_in_vllms_order() -> None:
    import torch
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    rng = np.random.default_rng(4)
    for _ in range(40):
        logits = (rng.standard_normal(500) * 3).astype(np.float32)
        temperature, min_p, top_k, top_p = 0.8, 0.01, int(rng.integers(1, 40)), float(rng.uniform(0.3, 0.99))
        scores = torch.from_numpy(logits)[None]
        for warper in (
            TemperatureLogitsWarper(temperature),
            MinPLogitsWarper(min_p),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
        ):
            scores = warper(None, scores)  # type: ignore[arg-type]
        theirs = torch.isfinite(scores[0]).nonzero()[:, 0].tolist()
        options = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
        chances = torch.softmax(scores[0].double(), dim=0).numpy()
        assert np.abs(chances - shares(logits, **options)).max() < 1e-6
        # The middle of each one's share must give it; nothing is left for any other.
        middles = np.cumsum(chances[theirs]) - chances[theirs] / 2
        assert [run(RowDraw(500).draw, logits, float(middle), options) for middle in middles] == theirs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_each_candidate_comes_as_often_as_its_share(options: dict[str, Any]) -> None:
    logits = np.array([0.0, 2.0, -1.0, 1.5, 1.9, -3.0, 0.5, 2.1], dtype=np.float32)
    chances = shares(logits, **(OFF | options))
    numbers = np.random.default_rng(0).random(8_000)
    draw = RowDraw(8).draw
    counts = np.bincount([run(draw, logits, float(number), options) for number in numbers], minlength=8)
    possible = chances > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - 8_000 * chances)[possible] ** 2 / (8_000 * chances[possible])).sum()
    assert chi_square < 40  # at most 7 degrees of freedom: above this once in a million


def test_ties_at_the_edge_all_stay() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], dtype=np.float32)
    for options in ({"top_k": 2}, {"top_p": 0.6}):
        got = {run(RowDraw(6).draw, logits, number, options) for number in np.linspace(0, 1, 500, endpoint=False)}
        assert got == {1, 2, 3, 4}


def test_a_wide_nucleus_is_found_at_every_size_of_the_guess() -> None:
    rng = np.random.default_rng(1)
    size = 20_000
    for scale in (6.0, 3.0, 2.0, 0.1):  # nuclei of a few, of some thousands, and of nearly all
        logits = (rng.standard_normal(size) * scale).astype(np.float32)
        for number in rng.random(15):
            options = OFF | {"top_p": 0.9}
            if not on_a_border(logits, float(number), options):
                assert run(RowDraw(size).draw, logits, float(number), options) == expect(logits, float(number), options)


def test_extreme_logits_and_temperatures_give_the_only_or_any_candidate() -> None:
    huge = np.array([-3e38, 3e38, 0.0, -np.inf], dtype=np.float32)
    for temperature in (1e-5, 1.0, 1e6):
        assert run(RowDraw(4).draw, huge, 0.999999, {"temperature": temperature}) == 1
    small = np.array([0.0, 1.0, -np.inf, 0.5], dtype=np.float32)
    drawn = {run(RowDraw(4).draw, small, number, {"temperature": 1e6}) for number in np.linspace(0, 1, 100, endpoint=False)}
    assert drawn == {0, 1, 3}


def test_logits_are_only_read() -> None:
    logits = np.arange(300, dtype=np.float32)
    before = logits.copy()
    for options in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}):
        run(RowDraw(300).draw, logits, 0.5, options)
    assert (logits == before).all()


# Faults. Each must fail the comparison with the definitions.


def test_a_faulty_draw_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def caught(name: str, value: object, owner: object = module) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            return not right_on_all(lambda size: RowDraw(size).draw, cases=600, seed=seed)

    right = module._invert
    assert caught("_invert", lambda weights, uniform: right(weights[::-1], uniform)), "drawn from the wrong end"
    assert caught("_invert", lambda weights, uniform: int(np.argmax(weights))), "always the best"
    floor = module._floor_of
    assert caught("_floor_of", lambda weights, share: floor(weights, share * 0.9)), "a nucleus too small"
    assert caught("_floor_of", lambda weights, share: floor(weights, 0.0)), "a nucleus of one"
    assert caught("_at_least", lambda floor, ids, weights: (ids, weights)), "min_p behind top_k forgotten"
    spans = module._invert_in_spans
    assert caught("_invert_in_spans", lambda padded, uniform: spans(padded[::-1].copy(), uniform)), "spans from the wrong end"
    best = RowDraw._best
    assert caught("_best", lambda self, top_k: best(self, top_k + 1), RowDraw), "one candidate too many"

    def another_order(self: RowDraw, logits: Any, best: float, uniform: float, **options: Any) -> int:
        """top_p before top_k: of the nucleus of all tokens the best k."""
        nucleus = shares(logits, **(options | {"top_k": 0, "min_p": 0.0})) > 0
        return expect(np.where(nucleus, logits, -np.inf).astype(np.float32), uniform, options | {"top_p": 1.0})

    assert caught("draw", another_order, RowDraw), "options in another order"
