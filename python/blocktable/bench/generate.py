"""Times whole batches of text: tokens a second of the engine, with transformers' `generate` beside it if asked.

Before: `blocktable bench generate`. After: one row. Random prompts, greedy, every request to its full length; loading and
warm-up are not timed, and every round has prompts of its own, so that no round finds the last one's in the prefix cache.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from ..errors import InvalidInputError, MissingExtraError
from ..openmp import load_torch
from .command import count
from .row import Row, check, read_peer_rows, with_peers

SUMMARY = """Generate text for a batch of random prompts: tokens a second. Needs the extra `engine`.

With --peer transformers its `generate` runs on the same prompts, as one padded batch, in this process, with as many
threads, in turn with ours; medians of the rounds are compared. kv_waste is the share of taken KV rows that hold no token;
linear_share is the share of the time that linear layers take, with what is computed in one call with them (norms, rotary
positions, residuals), measured in a round of its own (CPU only)."""

TABLE = (
    "model", "dtype", "requests", "prompt", "output", "threads", "output_tokens_per_s", "total_tokens_per_s", "kv_waste",
    "ttft_ms", "tpot_ms", "linear_share", "peer", "peer_output_tokens_per_s", "ratio_output_tokens_per_s",
)  # fmt: skip

CHECKED_REQUESTS = 4
CHECKED_TOKENS = 8
"""Only first tokens are compared: later a batch and a single request may part where two logits lie within rounding."""
LEAST_ID = 100
"""Ids below are special in many vocabularies."""

Prompts = list[list[int]]


class Generator(Protocol):
    """Something that answers a batch."""

    def answer(self, prompts: Prompts, output: int) -> list[list[int]]:
        """`output` greedy ids for each prompt."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which model, how much, beside whom."""
    parser.add_argument("--model", default="smollm2", help="directory, hub id, GGUF file, or smollm2 (the default)")
    parser.add_argument("--dtype", default="float32", help="float32 (the default), bfloat16, float16")
    parser.add_argument("--requests", type=count, default=32, help="requests at once (32)")
    parser.add_argument("--prompt", type=count, default=128, help="prompt tokens each (128)")
    parser.add_argument("--output", type=count, default=64, help="output tokens each (64)")
    parser.add_argument("--rounds", type=count, default=3, help="timed rounds, of which the median counts (3)")
    parser.add_argument("--threads", type=count, help="CPU threads of both (as torch chooses)")
    parser.add_argument("--peer", choices=["transformers"], help="run this peer in turn with ours")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row."""
    if options.smoke:
        options.requests, options.prompt, options.output, options.rounds = 2, 16, 4, 1
    torch = _torch()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = _model_place(options.model)
    ours = Ours(model, options)
    peer = Transformers(model, options.dtype) if options.peer else None
    rng = np.random.default_rng(0)
    _check_first_tokens(ours, peer, _prompts(options, ours.vocab_size, rng), options.output)
    ours_s, peer_s = _time_rounds(ours, peer, options, rng)
    shape = {name: getattr(options, name) for name in ("model", "dtype", "requests", "prompt", "output")}
    row: Row = {"bench": "generate", **shape, "threads": torch.get_num_threads(), "rounds": options.rounds}
    row |= _rates(options, median(ours_s)) | ours.latencies()
    row["linear_share"] = _linear_share(torch, ours, _prompts(options, ours.vocab_size, rng), options.output)
    if peer is not None:
        beside: list[Row] = [{"peer": options.peer, **shape} | _rates(options, median(peer_s))]
    else:
        beside = read_peer_rows(options.peer_json)
    yield with_peers(row, beside, ["dtype", "requests", "prompt", "output"], ["output_tokens_per_s", "total_tokens_per_s"])


class Ours:
    """The engine under test."""

    def __init__(self, model: str, options: argparse.Namespace) -> None:
        from .. import LLM, SamplingParams

        self._params = SamplingParams
        rows_each = options.prompt + options.output
        self._llm = LLM(
            model,
            dtype=options.dtype,
            max_model_len=rows_each + 1,
            max_num_seqs=options.requests,
            num_blocks=1 + options.requests * (-(-rows_each // 16) + 1),
        )
        self._outputs: list[Any] = []

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return int(self._llm.scheduler.config["vocab_size"])

    def answer(self, prompts: Prompts, output: int) -> list[list[int]]:
        """`output` greedy ids for each prompt."""
        params = self._params(temperature=0.0, max_tokens=output, ignore_eos=True)
        self._outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [list(result.outputs[0].token_ids) for result in self._outputs]

    def latencies(self) -> Row:
        """Of the last batch: median time to the first token and between tokens; and the waste of KV rows since the start."""
        metrics = [result.metrics for result in self._outputs]
        first = [each.first_token_ts - each.arrival_time for each in metrics]
        later = [(each.last_token_ts - each.first_token_ts) / max(1, each.num_generation_tokens - 1) for each in metrics]
        return {
            "kv_waste": round(self._llm.kv_report().wasted_rows_percent / 100, 4),
            "ttft_ms": round(1000 * median(first), 1),
            "tpot_ms": round(1000 * median(later), 2),
        }


class Transformers:
    """The library's own `generate`, on one batch of prompts of equal length."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        where: dict[str, Any] = {"dtype": getattr(torch, dtype)}
        if model.endswith(".gguf"):
            model, where["gguf_file"] = os.path.split(os.path.abspath(model))
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, **where).eval()

    def answer(self, prompts: Prompts, output: int) -> list[list[int]]:
        """`output` greedy ids for each prompt."""
        batch = self._torch.tensor(prompts, device=self._model.device)
        with self._torch.inference_mode():
            text = self._model.generate(
                batch,
                attention_mask=self._torch.ones_like(batch),
                max_new_tokens=output,
                min_new_tokens=output,
                do_sample=False,
                pad_token_id=0,
            )
        answers: list[list[int]] = text[:, batch.shape[1] :].tolist()
        return answers


def _check_first_tokens(ours: Ours, peer: Generator | None, prompts: Prompts, output: int) -> None:
    """Also the warm-up: a batch answers as its requests do alone, and as the peer does."""
    wanted = min(CHECKED_TOKENS, output)
    batch = [ids[:wanted] for ids in ours.answer(prompts, output)]
    check(holds=all(len(ids) == wanted for ids in batch), what="every request runs to its full length")
    alone = [ours.answer([prompt], wanted)[0] for prompt in prompts[:CHECKED_REQUESTS]]
    check(holds=batch[: len(alone)] == alone, what=f"a batch begins {batch[: len(alone)]}, its requests alone {alone}")
    if peer is not None:
        theirs = peer.answer(prompts[:CHECKED_REQUESTS], wanted)
        check(holds=batch[: len(theirs)] == theirs, what=f"ours begins {batch[: len(theirs)]}, the peer's {theirs}")


def _time_rounds(
    ours: Ours, peer: Generator | None, options: argparse.Namespace, rng: np.random.Generator
) -> tuple[list[float], list[float]]:
    """Seconds of each round, ours and the peer's in turn on the same prompts."""
    ours_s, peer_s = [], []
    for _ in range(options.rounds):
        prompts = _prompts(options, ours.vocab_size, rng)
        if peer is not None:
            peer_s.append(_seconds(peer, prompts, options.output))
        ours_s.append(_seconds(ours, prompts, options.output))
    return ours_s, peer_s


def _seconds(generator: Generator, prompts: Prompts, output: int) -> float:
    start = perf_counter()
    answers = generator.answer(prompts, output)
    took = perf_counter() - start
    check(holds=[len(ids) for ids in answers] == [output] * len(prompts), what="every request runs to its full length")
    return took


def _linear_share(torch: Any, ours: Ours, prompts: Prompts, output: int) -> float | None:
    """Share of a batch's time that is spent in linear layers; null on a device that runs behind the clock."""
    if torch.cuda.is_available():
        return None
    with _timed_linears(torch) as spent:
        total = _seconds(ours, prompts, output)
    return round(sum(spent) / total, 3)


@contextmanager
def _timed_linears(torch: Any) -> Iterator[list[float]]:
    """Collects the seconds of every call of a linear layer, whatever its class, of joined layers' halves and of whole layers
    without their attention, while the block runs.
    """
    from .. import _core

    hooks = torch.nn.modules.module
    spent: list[float] = []
    begun: list[float] = []

    def is_linear(module: Any) -> bool:
        return isinstance(module, torch.nn.Linear) or "Linear" in type(module).__name__ or type(module).__name__ == "Conv1D"

    def before(module: Any, _inputs: Any) -> None:
        if is_linear(module):
            begun.append(perf_counter())

    def after(module: Any, _inputs: Any, _output: Any) -> None:
        if is_linear(module):
            spent.append(perf_counter() - begun.pop())

    def timed(call: Any) -> Any:
        def run(*tensors: Any, **options: Any) -> None:
            start = perf_counter()
            own: float | None = call(*tensors, **options)
            spent.append(perf_counter() - start if own is None else own)

        return run

    # Whole layers say themselves what was not attention.
    halves = {name: getattr(_core, name) for name in ("cpu_before_attention", "cpu_after_attention", "cpu_layers")}
    for name, call in halves.items():
        setattr(_core, name, timed(call))
    handles = [hooks.register_module_forward_pre_hook(before), hooks.register_module_forward_hook(after)]
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()
        for name, call in halves.items():
            setattr(_core, name, call)


def _rates(options: argparse.Namespace, seconds: float) -> Row:
    return {
        "output_tokens_per_s": round(options.requests * options.output / seconds, 1),
        "total_tokens_per_s": round(options.requests * (options.prompt + options.output) / seconds, 1),
    }


def _prompts(options: argparse.Namespace, vocab_size: int, rng: np.random.Generator) -> Prompts:
    if vocab_size <= LEAST_ID:
        raise InvalidInputError("model", options.model, f"its vocabulary of {vocab_size} must be over {LEAST_ID}")
    prompts: Prompts = rng.integers(LEAST_ID, vocab_size, (options.requests, options.prompt)).tolist()
    return prompts


def _model_place(model: str) -> str:
    from ..model.small_model import resolve_shorthand

    return resolve_shorthand(model)


def _torch() -> Any:
    try:
        load_torch()
        import torch
    except ImportError as error:
        raise MissingExtraError("blocktable bench generate", "engine", error.name or "torch") from None
    return torch
