"""Promise: what a request asks to have changed in its logits is changed by vLLM's formulas, and its history is the prompt and
the outputs so far, in whatever pieces it was told of them. The twin counts the whole history anew each time, token by token."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable.sampling import device, row_rules
from blocktable.sampling.params import ResolvedSampling, SamplingParams
from blocktable.sampling.row_rules import RowRules

VOCAB = 50
WORDS = {"a": [7], "ab": [7, 8], "abab": [7, 8, 7, 8], "c": [9], " a": [40], " ab": [40, 8], " abab": [40, 8, 7, 8], " c": [9]}


def resolved(**options: Any) -> ResolvedSampling:
    params = SamplingParams(max_tokens=None, **options)
    return params.resolve(
        vocab_size=VOCAB, eos_token_ids=[], max_model_len=10_000, num_prompt_tokens=1, encode=lambda text: WORDS[text]
    )


def some_options(rng: random.Random) -> dict[str, Any]:
    ids = rng.sample(range(VOCAB), 6)
    return {
        "presence_penalty": rng.choice([0.0, 0.0, 0.7, -2.0]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.3, 2.0]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3, 0.5]),
        "logit_bias": rng.choice([None, {}, {ids[0]: -100, ids[1]: 3}]),
        "allowed_token_ids": rng.choice([None, None, [*ids, 10]]),
        "bad_words": rng.choice([None, ["a"], ["ab", "c"], ["abab"]]),
    }


def twin(logits: np.ndarray, options: dict[str, Any], prompt: list[int], outputs: list[int]) -> np.ndarray:
    """Token by token, in the order of vLLM's sampler, from the whole history."""
    changed = logits.astype(np.float32).copy()
    words = [WORDS[space + word] for word in options["bad_words"] or [] for space in ("", " ")]
    for token in range(VOCAB):
        value = changed[token]
        allowed = options["allowed_token_ids"]
        if allowed is not None and token not in allowed:
            value = np.float32(-np.inf)
        for *before, last in words:
            if last == token and outputs[len(outputs) - len(before) :] == before and len(outputs) >= len(before):
                value = np.float32(-np.inf)
        value += np.float32((options["logit_bias"] or {}).get(token, 0.0))
        if token in prompt or token in outputs:
            penalty = np.float32(options["repetition_penalty"])
            value = value / penalty if value > 0 else value * penalty
        count = sum(1 for one in outputs if one == token)
        value -= np.float32(options["frequency_penalty"] * count + options["presence_penalty"] * (count > 0))
        changed[token] = value
    return changed


def on_host(logits: np.ndarray, rules: RowRules) -> np.ndarray:
    rules.apply(logits)
    return logits


def on_device(logits: np.ndarray, rules: RowRules) -> np.ndarray:
    """Between two others of the step, which stay as they are."""
    step = torch.from_numpy(np.stack([np.zeros(VOCAB, dtype=np.float32), logits, np.ones(VOCAB, dtype=np.float32)]))
    device.apply(step, [(1, rules)])
    assert (step[0] == 0).all()
    assert (step[2] == 1).all()
    return step[1].numpy()


def is_right(seed: int, change: Callable[[np.ndarray, RowRules], np.ndarray]) -> bool:
    """A request's life: its rows are made anew at preemptions, and its logits compared with the twin's at each output."""
    rng = random.Random(seed)
    options = some_options(rng)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(12))]
    asked, outputs = resolved(**options), []
    rules = RowRules(asked, np.array(prompt, dtype=np.int32))
    for _ in range(rng.choice([3, 30, 150])):
        logits = np.array([rng.choice([-30.0, -1.0, 0.0, 0.5, 2.0, 25.0]) for _ in range(VOCAB)], dtype=np.float32)
        if not np.array_equal(change(logits.copy(), rules), twin(logits, options, prompt, outputs)):
            return False
        outputs.append(rng.choice([7, 8, 9, 40, rng.randrange(VOCAB)]))
        if rng.random() < 0.1:
            rules = RowRules(asked, np.array(prompt, dtype=np.int32), np.array(outputs, dtype=np.int32))
        else:
            rules.note(outputs[-1])
    return True


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_logits_are_changed_as_the_twin_changes_them(seed: int) -> None:
    assert is_right(seed, on_host)
    assert is_right(seed, on_device)


def test_several_requests_of_a_step_are_changed_apart(rng: random.Random) -> None:
    """On a device all go together: with different options, histories and lengths, and one entry twice of one row."""
    options = [some_options(rng) for _ in range(6)]
    outputs = [[rng.randrange(VOCAB) for _ in range(rng.randrange(20))] for _ in options]
    rules = [
        RowRules(resolved(**one), np.array([1, 2, 3]), np.array(said, dtype=np.int32)) for one, said in zip(options, outputs)
    ]
    logits = np.random.default_rng(rng.randrange(2**32)).normal(size=(8, VOCAB)).astype(np.float32)
    entries = [(0, 4), (2, 0), (3, 1), (4, 2), (5, 3), (6, 5), (7, 0)]
    step = torch.from_numpy(logits.copy())
    device.apply(step, [(entry, rules[which]) for entry, which in entries])
    for entry, which in entries:
        assert np.array_equal(step[entry].numpy(), twin(logits[entry], options[which], [1, 2, 3], outputs[which]))
    assert np.array_equal(step[1].numpy(), logits[1])


def test_a_bad_word_is_banned_where_it_would_be_complete_and_nowhere_else() -> None:
    rules = RowRules(resolved(bad_words=["abab"]))
    seen = []
    for token in (7, 8, 7, 8, 7, 9, 7, 8, 7):
        rules.note(token)
        seen.append(rules.banned())
    assert seen == [[], [], [8], [], [8], [], [], [], [8]]


def test_the_cost_of_a_row_follows_its_own_tokens() -> None:
    """Not the vocabulary: a long prompt of few tokens has few changes."""
    asked = resolved(repetition_penalty=1.2)
    assert len(RowRules(asked, np.full(5000, 3), np.full(5000, 4)).changes().ids) == 2


# Planted: histories that other engines had wrong.


class NoPrompt(RowRules):
    """The prompt is no part of the history (as where it was cached)."""

    def __init__(self, resolved: Any, prompt: Any = None, outputs: Any = None) -> None:
        super().__init__(resolved, None, outputs)


class ForgetsAtPreemption(RowRules):
    """A row that is made anew knows no outputs."""

    def __init__(self, resolved: Any, prompt: Any = None, outputs: Any = None) -> None:
        super().__init__(resolved, prompt)


class PromptCounts(RowRules):
    """The prompt's tokens count as outputs."""

    def __init__(self, resolved: Any, prompt: Any = None, outputs: Any = None) -> None:
        super().__init__(resolved, prompt, prompt if outputs is None else np.concatenate([prompt, outputs]))


class PresenceEachTime(RowRules):
    """Presence is taken off for each time."""

    def note(self, token_id: int) -> None:
        super().note(token_id)
        if self._has_penalties:
            place = self._places[token_id]
            self._subtract[place] = (self._frequency + self._presence) * int(self._counts[place])


class AlwaysDivides(RowRules):
    """A penalty above 1 makes negative logits better."""

    def apply(self, logits: Any) -> None:
        ids, _, divide, subtract = self.changes()
        self._divide[: self._num_ids], kept = 1, divide.copy()
        super().apply(logits)
        self._divide[: self._num_ids] = kept
        logits[ids] = (logits[ids] + subtract) / kept - subtract


class ShortTail(RowRules):
    """Only the last token is looked at for bad words."""

    def note(self, token_id: int) -> None:
        super().note(token_id)
        self._tail = self._tail[-1:]


@pytest.mark.parametrize("fault", [NoPrompt, ForgetsAtPreemption, PromptCounts, PresenceEachTime, AlwaysDivides, ShortTail])
def test_faulty_rules_are_caught(fault: type[RowRules], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RowRules", fault)
    assert not all(is_right(seed, on_host) for seed in range(60))


def test_room_that_does_not_grow_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_rules.RowRules, "_grow", lambda self: None)
    monkeypatch.setattr(row_rules, "FIRST_ROOM", 4)
    with pytest.raises(IndexError):
        [is_right(seed, on_host) for seed in range(20)]
