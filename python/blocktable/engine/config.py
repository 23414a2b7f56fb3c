"""The engine's options: one frozen record, checked once.

Before: `LLM(model, **options)` and the CLI name options. After: `llm.py` builds scheduler, model and memory from them.
A record that exists holds only values inside their bounds, so nothing behind it checks them again. What depends on the
model (its length, its vocabulary) is checked when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .. import checks
from .._core import Scheduler
from ..errors import UnknownOptionError
from ..events.config import KVEventsConfig
from ..sampling.params import LOGPROBS_BOUND, MAX_LOGPROBS

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Names of `dtype`; `auto` is what the device runs best: float32 on a CPU, else what the model was saved in."""

HASH_ALGORITHMS = ("sha256", "blake3", "sha256_cbor", "vllm_sha256")

LINEAR_BACKENDS = ("auto", "cpu", "torch")

ATTENTION_BACKENDS = ("auto", "cpu", "triton", "reference")
POLICIES = ("fcfs", "priority", "fair", "deadline", "prefix")

OTHER_NAMES = {
    "gpu_memory_utilization": "memory_share",
    "num_gpu_blocks_override": "num_blocks",
    "prefix_caching_hash_algo": "hash_algorithm",
    "scheduling_policy": "policy",
}
"""What vLLM calls options whose names say GPU, although they hold for any device, or whose values mean something else there."""

MAX_BLOCK_SIZE = 4096
MAX_NUM_BLOCKS = 2**31 - 1
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built from. Names are vLLM's where vLLM has the option (`num_blocks` is its
    `num_gpu_blocks_override`, `memory_share` its `gpu_memory_utilization`).

    Numpy's numbers become Python's. Raises `InvalidInputError` (field, value, bound) on a value outside its bound.
    """

    model: str = "in memory"
    """Local directory, hub id, or GGUF file."""
    tokenizer: str | None = None
    """Where the tokenizer is, if not with the model."""
    dtype: str = "auto"
    """Weights and KV rows: `auto`, `float32`, `bfloat16`, `float16`."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, ..."""
    linear_backend: str = "auto"
    """The products of float32 linear layers on a CPU: `cpu` (the core's), `torch`; `auto` = the core's where it has
    instructions for this processor."""
    attention_backend: str = "auto"
    """The kernels: `cpu` (SIMD, reads the blocks in place), `triton` (GPUs), `reference` (plain torch, any device); `auto` =
    the first of them that can run the model."""
    cuda_graphs: bool = True
    """On CUDA, capture steps of single queries as graphs, by padded number of sequences. Not yet run on a GPU."""
    self_check: bool = True
    """Compare paged attention with the model's own when the model is loaded."""
    max_model_len: int | None = None
    """Prompt and output tokens of one sequence at most; None = what the model was made for."""
    block_size: int = 16
    """Tokens a KV block."""
    num_blocks: int | None = None
    """KV blocks in all, the null block among them; goes before the two sizes below."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV memory; goes before `memory_share`."""
    memory_share: float | None = None
    """Share for the KV memory of what is free on the device once the weights are there; None = 0.9 on CUDA, 0.5 on a CPU."""
    max_num_seqs: int = 256
    """Sequences that run at once, at most."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step, prompt chunks and decodes together, at most."""
    max_waiting: int = 4096
    """Requests that wait, at most; one more is refused with `QueueFullError`."""
    max_logprobs: int = MAX_LOGPROBS
    """Best tokens whose log probabilities a request may ask for beside those of the chosen ones, at most (0 to 1,024)."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of equal prompt beginnings."""
    enable_partial_hits: bool = True
    """In the block in which a prompt departs from what is cached, copy the rows that it shares, from a quarter of a block on;
    hits are compared token by token. No effect without prefix caching, or on a model with windows or groups of layers."""
    pin_budget: int = 0
    """Blocks that the pins of `LLM.pin` may hold together, at most; below the number of usable blocks."""
    hash_algorithm: str = "sha256"
    """What names KV blocks: `sha256` or `blake3` over our own encoding; `sha256_cbor` or `vllm_sha256`, byte for byte vLLM's
    `sha256_cbor` and `sha256`, for routers that know those."""
    long_prefill_threshold: int = 0
    """Prompt tokens that one sequence may take of a step; 0 = the whole budget."""
    max_preemptions: int = 16
    """How often a request may be preempted. After that it comes back only with all the blocks that it may ever need, and
    keeps them."""
    overlap_depth: int = 1
    """2 = the next step is planned, and the last one's text is made, while the model runs on a thread of its own."""
    policy: str = "fcfs"
    """Whose turn it is among those that wait: `fcfs`; `priority`, the lowest first; `fair`, the tenant that was served least by
    its weight; `deadline`, the earliest first; `prefix`, the longest cached prefix first."""
    ageing_us: int = 1_000_000
    """Microseconds of waiting that count as one priority (policy `priority`)."""
    latest_deadline_us: int = 60_000_000
    """Microseconds after which a request without a deadline is ordered as if it had one (policy `deadline`)."""
    prefix_band: int = 1024
    """Arrivals in a row among which the longest cached prefix goes first (policy `prefix`)."""
    max_pass: int = 8
    """Smaller requests that may be admitted before one that does not fit yet."""
    watermark: int = 0
    """Blocks that an admission leaves free while others run."""
    estimate_growth: bool = True
    """An admission also leaves free what those that run are expected to take yet, by the outputs that were seen."""
    no_evict: bool = False
    """Promise each request all that it may ever need, so that nobody is preempted."""
    preempt_for_waiting: bool = False
    """A waiting request may displace running ones of strictly lower priority (policy `priority`)."""
    max_waiting_tokens: int = 0
    """Prompt tokens that wait, at most; 0 = no limit."""
    max_waiting_blocks: int = 0
    """KV blocks of the prompts that wait, at most; 0 = no limit."""
    tenants: Mapping[str, Mapping[str, int]] | None = None
    """Rules of tenants by name: `weight` (1 to 4096, policy `fair`), `hard_blocks`, `soft_blocks`, `max_waiting`,
    `max_waiting_tokens`, `max_waiting_blocks`; see `Scheduler`."""
    other_tenants: Mapping[str, int] | None = None
    """Rules of every other tenant."""
    seed: int = 0
    """Where the random numbers of requests without a seed of their own begin."""
    num_threads: int | None = None
    """CPU threads of the model (`torch.set_num_threads`, which holds for the process); None = leave as they are, but at most
    the CPUs that affinity and control group leave to this process."""
    max_step_retries: int = 2
    """Times that a step whose model failed runs again before its requests end with an error."""
    crash_report_bytes: int = 2**22
    """If a step fails, other than in the model, write the last so many bytes of what entered the scheduler, prompts and outputs
    among it, to a file for `blocktable replay`; 0 = none."""
    crash_report_folder: str | None = None
    """Where; None = the folder for temporary files."""
    kv_events_config: KVEventsConfig | None = None
    """Publish what the prefix cache gains and loses: a `KVEventsConfig`, or a mapping of its fields."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, one.name, value.item())
        checks.text("model", self.model)
        if self.tokenizer is not None:
            checks.text("tokenizer", self.tokenizer)
        checks.one_of("dtype", self.dtype, DTYPES)
        checks.text("device", self.device)
        checks.one_of("linear_backend", self.linear_backend, LINEAR_BACKENDS)
        checks.one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        checks.flag("cuda_graphs", self.cuda_graphs)
        checks.flag("self_check", self.self_check)
        if self.max_model_len is not None:
            checks.whole("max_model_len", self.max_model_len, 2, 2**27)
        checks.whole("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        if self.num_blocks is not None:
            checks.whole("num_blocks", self.num_blocks, 2, MAX_NUM_BLOCKS)
        if self.kv_cache_memory_bytes is not None:
            checks.whole("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, 2**63 - 1)
        if self.memory_share is not None:
            checks.share("memory_share", self.memory_share)
        checks.whole("max_num_seqs", self.max_num_seqs, 1, 65536)
        checks.whole("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**22)
        checks.whole("max_waiting", self.max_waiting, 1, 2**24)
        checks.whole("max_logprobs", self.max_logprobs, 0, LOGPROBS_BOUND)
        checks.flag("enable_prefix_caching", self.enable_prefix_caching)
        checks.flag("enable_partial_hits", self.enable_partial_hits)
        checks.whole("pin_budget", self.pin_budget, 0, MAX_NUM_BLOCKS)
        checks.one_of("hash_algorithm", self.hash_algorithm, HASH_ALGORITHMS)
        checks.whole("long_prefill_threshold", self.long_prefill_threshold, 0, 2**27)
        checks.whole("max_preemptions", self.max_preemptions, 0, 2**16)
        checks.whole("overlap_depth", self.overlap_depth, 1, 2)
        checks.one_of("policy", self.policy, POLICIES)
        checks.whole("ageing_us", self.ageing_us, 1, 2**50)
        checks.whole("latest_deadline_us", self.latest_deadline_us, 1, 2**50)
        checks.whole("prefix_band", self.prefix_band, 1, 2**24)
        checks.whole("max_pass", self.max_pass, 0, 2**24)
        checks.whole("watermark", self.watermark, 0, MAX_NUM_BLOCKS)
        checks.flag("estimate_growth", self.estimate_growth)
        checks.flag("no_evict", self.no_evict)
        checks.flag("preempt_for_waiting", self.preempt_for_waiting)
        checks.whole("max_waiting_tokens", self.max_waiting_tokens, 0, 2**32 - 1)
        checks.whole("max_waiting_blocks", self.max_waiting_blocks, 0, 2**32 - 1)
        if self.tenants is not None:
            checks.mapping("tenants", self.tenants)
        if self.other_tenants is not None:
            checks.mapping("other_tenants", self.other_tenants)
        checks.whole("seed", self.seed, 0, MAX_SEED)
        if self.num_threads is not None:
            checks.whole("num_threads", self.num_threads, 1, 1024)
        checks.whole("max_step_retries", self.max_step_retries, 0, 100)
        checks.whole("crash_report_bytes", self.crash_report_bytes, 0, 2**30)
        if self.crash_report_folder is not None:
            checks.text("crash_report_folder", self.crash_report_folder)
        if self.kv_events_config is not None:
            object.__setattr__(self, "kv_events_config", KVEventsConfig.from_options(self.kv_events_config))
        _need_rules(self)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """The record of these options. Raises `UnknownOptionError` naming the nearest, and `InvalidInputError`."""
        known = {field.name for field in fields(cls)}
        for name, value in options.items():
            if name not in known:
                error = UnknownOptionError(name, value, known)
                if name in OTHER_NAMES:
                    error.add_note(f"here it is called {OTHER_NAMES[name]}")
                raise error
        return cls(**options)


def _need_rules(config: EngineConfig) -> None:
    """The rules of the waiting line depend on no model, but only the core knows them: it is asked with the smallest pool."""
    Scheduler(
        num_blocks=2,
        block_size=1,
        vocab_size=1,
        max_model_len=2,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        policy=config.policy,
        no_evict=config.no_evict,
        preempt_for_waiting=config.preempt_for_waiting,
        tenants=config.tenants,
        other_tenants=config.other_tenants,
    )
