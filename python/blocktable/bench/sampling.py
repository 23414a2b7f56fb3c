"""Times the choice of a step's tokens: milliseconds for so many rows of logits, by what the rows ask for.

Before: `blocktable bench sampling`. After: one row per case. The logits are random and the same in every step; what is chosen
and told is compared with a plain computation first.
"""

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingExtraError
from ..sampling.params import SamplingParams
from .command import count
from .row import Row, check

SUMMARY = """Choose a token for each row of a step's logits. Needs the extra `engine`.

Cases: greedy and drawn ask for nothing else; penalties has all three, over a prompt of 512 tokens and 256 outputs; bias names
300 tokens; logprobs_5 and logprobs_20 ask for that many best tokens. One thread, by the wall clock: the median of the steps."""

TABLE = ("case", "rows", "vocab", "ms", "us_per_row")

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1},
    "nucleus": {"temperature": 1, "top_p": 0.95},
    "penalties": {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"temperature": 0, "logit_bias": {place * 10: -1.0 for place in range(300)}},
    "logprobs_0": {"temperature": 0, "logprobs": 0},
    "logprobs_5": {"temperature": 0, "logprobs": 5},
    "logprobs_20": {"temperature": 0, "logprobs": 20},
}
PROMPT = 512
OUTPUTS = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much."""
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES), help="what the rows ask for (all)")
    parser.add_argument("--rows", type=count, default=32, help="rows of the step (32)")
    parser.add_argument("--vocab", type=count, default=49_152, help="tokens of the vocabulary, at least 3k (49,152: SmolLM2's)")
    parser.add_argument("--steps", type=count, default=60, help="steps timed (60)")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row per case."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("blocktable bench sampling", "engine", "torch") from error
    num_rows, vocab, steps = (2, 4096, 3) if options.smoke else (options.rows, options.vocab, options.steps)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in options.case:
            step = _Step(case, num_rows, vocab)
            step.check()
            ms = median(step.run() for _ in range(steps))
            yield {
                "bench": "sampling",
                "case": case,
                "rows": num_rows,
                "vocab": vocab,
                "ms": ms,
                "us_per_row": ms * 1e3 / num_rows,
            }
    finally:
        torch.set_num_threads(threads)


class _Step:
    """One step that is run again and again."""

    def __init__(self, case: str, num_rows: int, vocab: int) -> None:
        import torch

        from ..sampling.sampler import Sampler

        self._options = CASES[case]
        params = SamplingParams(max_tokens=None, **self._options)
        resolved = params.resolve(vocab_size=vocab, eos_token_ids=[], max_model_len=8192, num_prompt_tokens=PROMPT)
        random = np.random.default_rng(0)
        self._raw = (random.normal(size=(num_rows, vocab)) * 3).astype(np.float32)
        self._prompt = random.integers(0, vocab, PROMPT)
        self._outputs = random.integers(0, vocab, (num_rows, OUTPUTS))
        self._outputs[:, 0] = self._raw.argmax(axis=1)  # so that penalties change who is best
        self._sampler = Sampler(num_rows, vocab)
        for row in range(num_rows):
            self._sampler.set_row(row, resolved, row, self._prompt, self._outputs[row])
        self._rows, self._positions = np.arange(num_rows), np.full(num_rows, OUTPUTS)
        self._logits = torch.from_numpy(self._raw.copy())

    def run(self) -> float:
        """Milliseconds. The sampler may change the logits, so they are put back first."""
        self._logits.numpy()[:] = self._raw
        begun = time.perf_counter()
        sampled = self._sampler.sample(self._logits, self._rows, self._positions)
        self._sampler.note(self._rows, sampled.ids)
        return (time.perf_counter() - begun) * 1e3

    def check(self) -> None:
        """What is chosen and told is what a plain computation gives."""
        sampled = self._sampler.sample(self._logits, self._rows, self._positions)
        self._logits.numpy()[:] = self._raw
        greedy = self._options["temperature"] == 0
        for row, chosen in enumerate(sampled.ids.tolist()):
            best = int(self._changed(row).argmax())
            check(holds=not greedy or chosen == best, what=f"row {row} takes token {best}, its best one")
        if sampled.logprobs is None:
            return
        told, wide = sampled.logprobs, self._raw.astype(np.float64)
        log_sums = np.log(np.exp(wide).sum(axis=1, keepdims=True))
        order = np.argsort(-wide, axis=1, kind="stable")[:, : self._options["logprobs"]]
        check(holds=bool((told.ids[:, 1:] == order).all()), what="the best tokens are told in their order")
        values = np.take_along_axis(wide - log_sums, told.ids.astype(np.int64), axis=1)
        check(holds=np.allclose(told.values, values, atol=1e-4), what="log probabilities are those of the logits")

    def _changed(self, row: int) -> NDArray[np.float64]:
        """The logits of a row with its bias and penalties."""
        wide: NDArray[np.float64] = self._raw[row].astype(np.float64)
        for token_id, bias in self._options.get("logit_bias", {}).items():
            wide[token_id] += bias
        if "repetition_penalty" not in self._options:
            return wide
        outputs = self._outputs[row]
        penalty = self._options["repetition_penalty"]
        said = np.union1d(self._prompt, outputs)
        wide[said] = np.where(wide[said] > 0, wide[said] / penalty, wide[said] * penalty)
        ids, counts = np.unique(outputs, return_counts=True)
        wide[ids] -= self._options["frequency_penalty"] * counts + self._options["presence_penalty"]
        return wide
