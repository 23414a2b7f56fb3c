"""Puts an engine together: model, KV memory, scheduler, sampler, step loop.

Before: `llm.py` has a model's name, or a model, and options. After: the `Engine` that it drives. Always: what cannot be built
leaves nothing behind; a model that was lent from memory is given back as it was when the last engine over it is closed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import events
from .._core import Scheduler
from ..errors import InvalidInputError, ModelLoadError
from ..model.checkpoint import read_tokenizer
from ..model.decode_graphs import graphs_of
from ..model.kv_memory import KVMemory
from ..model.kv_sizing import KVSizing, size_kv
from ..model.layer_groups import group_layers
from ..model.loader import LoadedModel, load_model, unwrap_model, wrap_model
from ..model.runner import ModelRunner
from ..model.source import resolve_source
from ..sampling.grammar import Grammars
from ..sampling.random_numbers import SeedSource
from ..sampling.sampler import Sampler
from ..text.tokenizer import Tokenizer
from .config import EngineConfig
from .cpu_budget import usable_cpus
from .crash_report import CrashReporter
from .intake import Intake
from .step_loop import StepLoop

if TYPE_CHECKING:
    from ..events import KVEventPublisher, KVEventsConfig

logger = logging.getLogger("blocktable.engine")

_ENGINES = "_blocktable_engines"
"""Name of a lent model's count of engines; it stands in the model itself, so that it dies with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The parts of one engine. `config` says also what the model and the machine left to decide."""

    config: EngineConfig
    loaded: LoadedModel
    tokenizer: Tokenizer | None
    grammars: Grammars | None
    """None without a tokenizer."""
    sizing: KVSizing
    loop: StepLoop
    lent: PreTrainedModel | None
    """The caller's model, to be given back."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence, prompt and output, at most."""
        return self.config.max_model_len or self.loaded.max_model_len

    @property
    def intake(self) -> Intake:
        """Reads prompts and parameters for this engine."""
        return Intake(self)

    def close(self) -> None:
        """End every request, and give a lent model back if no other engine uses it."""
        try:
            self.loop.close()
        finally:
            if self.grammars is not None:
                self.grammars.close()
            if self.lent is not None:
                _give_back(self.lent)


def build_engine(model: Any, tokenizer: Any, options: Mapping[str, Any]) -> Engine:
    """The engine of `model` (a text, a path, or a transformers model) and these options of `EngineConfig`.

    Raises `UnknownOptionError`, `InvalidInputError`, `ModelLoadError`, `UnsupportedModelError`.
    """
    named = dict(options)
    if isinstance(model, str | os.PathLike):
        named["model"] = os.fspath(model)
    if tokenizer is None or isinstance(tokenizer, str | os.PathLike):
        named["tokenizer"] = None if tokenizer is None else os.fspath(tokenizer)
    config = EngineConfig.from_options(named)
    words = tokenizer if config.tokenizer is None else None
    if words is not None and not isinstance(words, PreTrainedTokenizerBase):
        raise InvalidInputError("tokenizer", type(words).__name__, "must be a place or a tokenizer of transformers")
    _set_threads(config.num_threads)
    if "model" in named:
        return _assemble(config, _load(config), words, lent=None)
    return _borrow(model, config, words)


def _set_threads(wanted: int | None) -> None:
    """The model's threads: as wanted, else not more than this process may use CPUs, whatever the machine has."""
    if wanted is None and torch.get_num_threads() <= usable_cpus():
        return
    torch.set_num_threads(wanted or usable_cpus())


def _load(config: EngineConfig) -> LoadedModel:
    return load_model(
        config.model,
        tokenizer=config.tokenizer,
        dtype=config.dtype,
        device=config.device,
        linear_backend=config.linear_backend,
        self_check=config.self_check,
    )


def _borrow(model: Any, config: EngineConfig, words: PreTrainedTokenizerBase | None) -> Engine:
    """The engine of a model in memory."""
    was_attached = isinstance(model, PreTrainedModel) and _is_attached(model)
    if config.tokenizer is not None:
        words = read_tokenizer(resolve_source(config.tokenizer))
    loaded = wrap_model(model, words, linear_backend=config.linear_backend, self_check=config.self_check)
    count = model.__dict__.get(_ENGINES, 0)
    # One more than engines, if the caller had attached it before: then it stays attached.
    model.__dict__[_ENGINES] = count + 1 + int(was_attached and count == 0)
    try:
        _check_as_it_is(config, loaded)
        return _assemble(config, loaded, words, lent=model)
    except BaseException:
        _give_back(model)
        raise


def _give_back(model: PreTrainedModel) -> None:
    model.__dict__[_ENGINES] -= 1
    if model.__dict__[_ENGINES] == 0:
        del model.__dict__[_ENGINES]
        unwrap_model(model)


def _is_attached(model: PreTrainedModel) -> bool:
    return "_blocktable_attachment" in model.__dict__


def _check_as_it_is(config: EngineConfig, loaded: LoadedModel) -> None:
    """A model in memory is neither converted nor moved."""
    dtype = str(loaded.dtype).removeprefix("torch.")
    if config.dtype not in ("auto", dtype):
        raise InvalidInputError("dtype", config.dtype, f"the model in memory is {dtype}: convert it first, or leave dtype out")
    if config.device not in ("auto", str(loaded.device), loaded.device.type):
        raise InvalidInputError("device", config.device, f"the model in memory is on {loaded.device}: move it first")


def _assemble(
    config: EngineConfig, loaded: LoadedModel, words: PreTrainedTokenizerBase | None, *, lent: PreTrainedModel | None
) -> Engine:
    words = loaded.tokenizer if words is None else words
    if config.tokenizer is not None and words is None:
        raise ModelLoadError(config.tokenizer, "holds no tokenizer")
    tokenizer = None if words is None else Tokenizer(words)
    config = _settle_config(config, loaded)
    geometry = group_layers(loaded.geometry, config.max_model_len or loaded.max_model_len, loaded.name)
    sizing = size_kv(
        geometry,
        config.block_size,
        loaded.device,
        num_blocks=config.num_blocks,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        memory_share=config.memory_share,
    )
    logger.info("%s: %s", loaded.name, sizing)
    config = replace(config, num_blocks=sizing.num_blocks)
    scheduler = _make_scheduler(config, loaded, [group.window for group in geometry.groups])
    graphs = graphs_of(loaded.device) if config.cuda_graphs else None
    loop = StepLoop(
        scheduler=scheduler,
        runner=ModelRunner(loaded, KVMemory(geometry, sizing, loaded.device), config.attention_backend, graphs),
        sampler=Sampler(config.max_num_seqs, loaded.vocab_size),
        tokenizer=tokenizer,
        seeds=SeedSource(config.seed),
        num_rows=config.max_num_seqs,
        max_step_retries=config.max_step_retries,
        publisher=_make_publisher(config.kv_events_config, scheduler),
        crash_reporter=CrashReporter(scheduler, num_bytes=config.crash_report_bytes, folder=config.crash_report_folder),
        overlap_depth=config.overlap_depth,
    )
    return Engine(
        config=config,
        loaded=loaded,
        tokenizer=tokenizer,
        grammars=None if tokenizer is None else Grammars(tokenizer, loaded.vocab_size),
        sizing=sizing,
        loop=loop,
        lent=lent,
    )


def _settle_config(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """Fill in what the model decides. Raises `InvalidInputError` for a length that it cannot serve."""
    limit = loaded.length
    if config.max_model_len is not None and config.max_model_len > limit.tokens:
        bound = f"must be at most {limit.tokens} for this model ({limit.reason})"
        raise InvalidInputError("max_model_len", config.max_model_len, bound)
    return replace(
        config,
        model=loaded.name,
        max_model_len=config.max_model_len or limit.tokens,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
    )


def _make_scheduler(config: EngineConfig, loaded: LoadedModel, windows: list[int | None]) -> Scheduler:
    if config.num_blocks is None or config.max_model_len is None:
        raise InvalidInputError("num_blocks", config.num_blocks, "must be settled before the scheduler is made")
    return Scheduler(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        vocab_size=loaded.vocab_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        long_prefill_threshold=config.long_prefill_threshold,
        max_preemptions=config.max_preemptions,
        overlap_depth=config.overlap_depth,
        policy=config.policy,
        ageing_us=config.ageing_us,
        latest_deadline_us=config.latest_deadline_us,
        prefix_band=config.prefix_band,
        max_pass=config.max_pass,
        watermark=config.watermark,
        estimate_growth=config.estimate_growth,
        no_evict=config.no_evict,
        preempt_for_waiting=config.preempt_for_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        max_waiting_blocks=config.max_waiting_blocks,
        tenants=config.tenants,
        other_tenants=config.other_tenants,
        groups=windows,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_partial_hits=config.enable_partial_hits,
        pin_budget=config.pin_budget,
        hash_algorithm=config.hash_algorithm,
        event_buffer_size=0 if config.kv_events_config is None else config.kv_events_config.records,
    )


def _make_publisher(config: KVEventsConfig | None, scheduler: Scheduler) -> KVEventPublisher | None:
    """What publishes KV events. Raises `MissingExtraError` or `EndpointError`."""
    if config is None or not config.publishes:
        return None
    return events.KVEventPublisher(config, windows=scheduler.config["groups"])
