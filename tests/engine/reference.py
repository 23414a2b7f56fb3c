"""Owns the reference text, transformers' own `generate`, and the comparison with it, token for token.

Before: a model and prompts as ids. After: a test fails at the first token that differs, unless two logits tie there.
A tie: our token and the reference's are the two best, and their logits lie within `TIE` of each other in one plain forward
pass. It is printed, counted against a bound, and the request goes on from the reference's token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

TIE = 1e-4
"""Float32 sums in another order differ by about 1e-5 at logits of this size."""

Ids = list[int]
Answer = Callable[[list[Ids], list[int]], list[Ids]]
"""Prompts and how many tokens each, to output tokens: one way of running the engine."""


def generate_reference(model: Any, prompts: Sequence[Ids], num_tokens: int, *, in_one_batch: bool = False) -> list[Ids]:
    """Greedy outputs of `model.generate`, every one `num_tokens` long: each prompt on its own, or all of them as one batch,
    padded on the left, which is several times faster for a model of some size."""
    ends = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None
    try:
        batches = [list(prompts)] if in_one_batch else [[prompt] for prompt in prompts]
        outputs = [output for batch in batches for output in _generate_batch(model, batch, num_tokens)]
    finally:
        model.generation_config.eos_token_id = ends
    assert all(len(output) == num_tokens for output in outputs)
    return outputs


def _generate_batch(model: Any, prompts: list[Ids], num_tokens: int) -> list[Ids]:
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    # Given, not guessed from the padding token, which may stand in a prompt too.
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = model.generate(padded, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    outputs: list[Ids] = made[:, longest:].tolist()
    return outputs


@torch.inference_mode()
def is_tie(model: Any, prefix: Ids, ours: int, theirs: int) -> bool:
    """Whether `ours` and `theirs` are the two best tokens after `prefix`, as good as equal. `model` as it was loaded."""
    logits = model(torch.tensor([prefix])).logits[0, -1].float()
    values, tokens = logits.topk(2)
    return set(tokens.tolist()) == {ours, theirs} and float(values[0] - values[1]) <= TIE


@dataclass
class Comparison:
    """Compares one way of running with the reference. `ties` holds (prompt, place) of those that were met."""

    prompts: list[Ids]
    reference: list[Ids]
    judge: Callable[[Ids, int, int], bool]  # (prefix, ours, theirs) -> is it a tie?
    max_ties: int
    ties: list[tuple[int, int]] = field(default_factory=list)

    def check(self, answer: Answer) -> None:
        """Run all prompts; after a tie run that one again, from the reference's token on."""
        wanted = [len(output) for output in self.reference]
        self._compare(list(range(len(self.prompts))), [0] * len(self.prompts), answer(self.prompts, wanted), answer)

    def _compare(self, places: list[int], starts: list[int], answers: list[Ids], answer: Answer) -> None:
        again: list[tuple[int, int]] = []
        for place, start, ours in zip(places, starts, answers, strict=True):
            theirs = self.reference[place][start:]
            assert len(ours) == len(theirs), f"prompt {place}: {len(ours)} tokens from {start} on, not {len(theirs)}"
            differing = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
            if differing is not None:
                at = start + differing
                self._judge(place, at, ours[differing])
                again.append((place, at + 1))
        again = [(place, start) for place, start in again if start < len(self.reference[place])]
        if again:
            prompts = [self.prompts[place] + self.reference[place][:start] for place, start in again]
            counts = [len(self.reference[place]) - start for place, start in again]
            self._compare([place for place, _ in again], [start for _, start in again], answer(prompts, counts), answer)

    def _judge(self, place: int, at: int, ours: int) -> None:
        theirs = self.reference[place][at]
        prefix = self.prompts[place] + self.reference[place][:at]
        assert self.judge(prefix, ours, theirs), (
            f"prompt {place}, token {at}: {ours}, the reference has {theirs}, and it is no tie"
        )
        self.ties.append((place, at))
        print(f"tie: prompt {place}, token {at}: {ours} for {theirs}")
        assert len(self.ties) <= self.max_ties, f"{len(self.ties)} ties: {self.ties}"
