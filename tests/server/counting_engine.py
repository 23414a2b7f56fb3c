"""Engines for the tests of the server's processes, built inside the engine's process: real but for the model.

Before: `EngineLaunch(builder="counting_engine:build")`, with this folder on the path. After: an engine whose passes take
`step_ms` and bring, for each sequence, its last token plus one: so every answer is known beforehand. Faults are options too.
No weights, no transformers and nothing of pytest is loaded here: a process is ready as soon as torch is.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from blocktable import Scheduler
from blocktable.engine.config import EngineConfig
from blocktable.engine.intake import Intake
from blocktable.engine.step_loop import StepLoop
from blocktable.sampling.random_numbers import SeedSource
from blocktable.sampling.sampler import Sampler
from blocktable.text.tokenizer import Tokenizer
from blocktable.text.tokenizer_parts import TokenizerParts

VOCAB_SIZE = 272
LETTERS = 200
"""Ids below this are what the model says: the next one of 0..199."""
END_ID = 257

FAULTS: dict[str, Any] = {"step_ms": 2.0, "token_us": 0.0, "hang_at": -1, "hang_s": 3600.0, "raise_at": -1, "die_after": 0}


def answer_to(prompt: list[int], count: int) -> list[int]:
    """What the model says."""
    return [(prompt[-1] + 1 + i) % LETTERS for i in range(count)]


class CountingModel:
    """Says the next number, after `step_ms`, and `token_us` for each token computed; hangs in pass `hang_at` for `hang_s`;
    raises in pass `raise_at`."""

    def __init__(self, faults: Mapping[str, Any]) -> None:
        self._faults = faults
        self._passes = 0

    def forward(self, plan: Any, token_ids: Any = None) -> torch.Tensor:
        faults = self._faults
        is_hanging = self._passes == faults["hang_at"]
        time.sleep(faults["hang_s"] if is_hanging else faults["step_ms"] / 1e3 + faults["token_us"] * plan.num_tokens / 1e6)
        self._passes += 1
        if self._passes - 1 == faults["raise_at"]:
            raise RuntimeError("planted: the model fails once")
        given = np.asarray(plan.token_ids if token_ids is None else token_ids)
        last = torch.from_numpy(given[plan.sample_rows].astype(np.int64))
        logits = torch.full((len(last), VOCAB_SIZE), -10.0)
        logits[torch.arange(len(last)), (last + 1) % LETTERS] = 10.0
        return logits


@dataclass(frozen=True)
class FakeEngine:
    """What the process needs of `engine.build.Engine`."""

    config: EngineConfig
    loaded: Any
    sizing: Any
    loop: StepLoop
    tokenizer: Tokenizer
    max_model_len: int

    @property
    def intake(self) -> Intake:
        engine: Any = self
        return Intake(engine)

    def close(self) -> None:
        self.loop.close()


def build(model: str, tokenizer: str | None, options: Mapping[str, Any]) -> FakeEngine:
    """The engine. Options that begin with `fake_` are the fake's; `model` is a folder with a `tokenizer.json`."""
    torch.set_num_threads(1)
    faults = FAULTS | {name.removeprefix("fake_"): value for name, value in options.items() if name.startswith("fake_")}
    real = {name: value for name, value in options.items() if not name.startswith("fake_")}
    config = replace(EngineConfig.from_options({**real, "model": model}), dtype="float32", device="cpu")
    max_model_len = config.max_model_len or 4096
    loop = StepLoop(
        scheduler=_scheduler(config, max_model_len),
        runner=CountingModel(faults),
        sampler=Sampler(config.max_num_seqs, VOCAB_SIZE),
        tokenizer=_tokenizer(model),
        seeds=SeedSource(config.seed),
        num_rows=config.max_num_seqs,
        max_step_retries=config.max_step_retries,
        overlap_depth=config.overlap_depth,
    )
    if faults["die_after"]:
        _plant_death(loop, faults["die_after"])
    return FakeEngine(
        config=config,
        loaded=SimpleNamespace(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({END_ID})),
        sizing=SimpleNamespace(block_size=config.block_size, num_blocks=config.num_blocks, bytes_per_block=4096),
        loop=loop,
        tokenizer=_tokenizer(model),
        max_model_len=max_model_len,
    )


def build_orphan(model: str, tokenizer: str | None, options: Mapping[str, Any]) -> FakeEngine:
    """The system is not asked to end this process with its server: only the end of the socket is left."""
    ctypes.CDLL(None).prctl(1, 0)
    return build(model, tokenizer, options)


def build_slowly(model: str, tokenizer: str | None, options: Mapping[str, Any]) -> FakeEngine:
    """Never done."""
    threading.Event().wait(3600)
    raise AssertionError("an hour is over")


def build_badly(model: str, tokenizer: str | None, options: Mapping[str, Any]) -> FakeEngine:
    """Ends while it builds, without a word."""
    os._exit(7)


def _scheduler(config: EngineConfig, max_model_len: int) -> Scheduler:
    return Scheduler(
        num_blocks=config.num_blocks or 1000,
        block_size=config.block_size,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        overlap_depth=config.overlap_depth,
        policy=config.policy,
        estimate_growth=config.estimate_growth,
        tenants=config.tenants,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_partial_hits=config.enable_partial_hits,
    )


def _tokenizer(model: str) -> Tokenizer:
    native = (Path(model) / "tokenizer.json").read_text(encoding="utf-8")
    return Tokenizer(
        TokenizerParts(
            name_or_path=model,
            native=native,
            encode_special_tokens=False,
            eos_token_id=END_ID,
            chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
            special_tokens={},
        )
    )


def _plant_death(loop: Any, after: int) -> None:
    """The loop itself fails, after so many plans."""
    plan, count = loop._plan, [0]

    def dying() -> Any:
        count[0] += 1
        if count[0] > after:
            raise RuntimeError("planted: the loop itself fails")
        return plan()

    loop._plan = dying
