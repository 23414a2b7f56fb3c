"""An engine that is real but for its model, which counts: for each sequence it brings the last token plus one, after a time.

Before: `EngineLaunch(builder="blocktable.bench.counting_engine:build")`, or a test that adds faults. After: an engine's process
whose every answer is known beforehand. No weights and no transformers are loaded: it is ready as soon as torch is.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from ..engine.config import EngineConfig
    from ..engine.intake import Intake
    from ..engine.step_loop import StepLoop
    from ..sampling.grammar import Grammars
    from ..text.tokenizer import Tokenizer

VOCAB_SIZE = 272
LETTERS = 200
"""Ids below this are what the model says: the next one of 0..199."""
END_ID = 257
MAX_MODEL_LEN = 4096

OWN = "counting_"
"""Begins the names of options that are the model's: `counting_step_ms`, `counting_token_us`, `counting_times_file`."""


def answer_to(prompt: list[int], count: int) -> list[int]:
    """What the model says."""
    return [(prompt[-1] + 1 + i) % LETTERS for i in range(count)]


class CountingModel:
    """Takes `step_ms`, and `token_us` for each token computed. At the end it writes when each pass began, in nanoseconds, into
    `times_file`, if it is named one."""

    def __init__(self, *, step_ms: float = 2.0, token_us: float = 0.0, times_file: str = "") -> None:
        self._step_s = step_ms / 1e3
        self._token_s = token_us / 1e6
        self._times_file = times_file
        self._began_ns = array("q")

    def forward(self, plan: Any, token_ids: Any = None, scored: Any = None) -> torch.Tensor:
        """Logits [samples, vocabulary] of one pass."""
        import torch

        self._began_ns.append(time.perf_counter_ns())
        self.take_time(plan.num_tokens)
        given = np.asarray(plan.token_ids if token_ids is None else token_ids)

        def logits_of(rows: Any) -> torch.Tensor:
            last = torch.from_numpy(given[rows].astype(np.int64))
            logits = torch.full((len(last), VOCAB_SIZE), -10.0)
            logits[torch.arange(len(last)), (last + 1) % LETTERS] = 10.0
            return logits

        if scored is not None:
            scored.take(0, logits_of(scored.rows))
        return logits_of(plan.sample_rows)

    def take_time(self, num_tokens: int) -> None:
        """As long as a pass over so many tokens lasts. Other threads run meanwhile."""
        time.sleep(self._step_s + self._token_s * num_tokens)

    def close(self) -> None:
        """Write the file."""
        if self._times_file:
            Path(self._times_file).write_bytes(self._began_ns.tobytes())


@dataclass(frozen=True)
class CountingEngine:
    """What a process needs of `engine.build.Engine`."""

    config: EngineConfig
    loaded: Any
    sizing: Any
    loop: StepLoop
    tokenizer: Tokenizer
    grammars: Grammars
    max_model_len: int
    model: CountingModel

    @property
    def intake(self) -> Intake:
        """Reads prompts for it."""
        from ..engine.intake import Intake

        engine: Any = self
        return Intake(engine)

    def close(self) -> None:
        """End it."""
        self.loop.close()
        self.grammars.close()
        self.model.close()


def build(model: str, tokenizer: str | None, options: Mapping[str, Any]) -> CountingEngine:
    """The engine of a model that may be told how long it takes; `model` is a folder with a `tokenizer.json`."""
    own, real = split(options, OWN)
    return engine_of(CountingModel(**own), model, real)


def split(options: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those whose name begins so, without that, and the others."""
    own = {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}
    return own, {name: value for name, value in options.items() if not name.startswith(prefix)}


def engine_of(counting: CountingModel, model: str, options: Mapping[str, Any]) -> CountingEngine:
    """An engine with this model; `options` are of `EngineConfig`."""
    import torch

    from ..engine.config import EngineConfig
    from ..engine.step_loop import StepLoop
    from ..sampling.grammar import Grammars
    from ..sampling.random_numbers import SeedSource
    from ..sampling.sampler import Sampler

    torch.set_num_threads(1)
    config = replace(EngineConfig.from_options({**options, "model": model}), dtype="float32", device="cpu")
    max_model_len = config.max_model_len or MAX_MODEL_LEN
    words = _tokenizer(model)
    loop = StepLoop(
        scheduler=_scheduler(config, max_model_len),
        runner=counting,
        sampler=Sampler(config.max_num_seqs, VOCAB_SIZE),
        tokenizer=words,
        seeds=SeedSource(config.seed),
        num_rows=config.max_num_seqs,
        max_step_retries=config.max_step_retries,
        overlap_depth=config.overlap_depth,
    )
    return CountingEngine(
        config=config,
        loaded=SimpleNamespace(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({END_ID})),
        sizing=SimpleNamespace(block_size=config.block_size, num_blocks=config.num_blocks, bytes_per_block=4096),
        loop=loop,
        tokenizer=words,
        grammars=Grammars(words, VOCAB_SIZE),
        max_model_len=max_model_len,
        model=counting,
    )


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, as the engine reads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    native = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    native.add_special_tokens(["<|start|>", "<|end|>"])
    native.save(str(folder / "tokenizer.json"))


def _scheduler(config: EngineConfig, max_model_len: int) -> Any:
    from .._core import Scheduler

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
        pin_budget=config.pin_budget,
    )


def _tokenizer(model: str) -> Tokenizer:
    from ..text.tokenizer import Tokenizer
    from ..text.tokenizer_parts import TokenizerParts

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
