"""The metrics that vLLM has too, under its names.

Before: `series.py` says what one is. After: `metrics.py` tells them. Always: the meaning is vLLM's where the name is.
"""

from __future__ import annotations

from collections.abc import Callable

from .engine_client import EngineInfo
from .histogram import Histogram
from .series import Series, Sources, one, ratio, stat, usable_blocks


def _histogram(name: str) -> Callable[[Sources], Histogram]:
    def read(sources: Sources) -> Histogram:
        found: Histogram = getattr(sources.requests, name)
        return found

    return read


def _cache_config(info: EngineInfo) -> tuple[str, ...]:
    return str(info.block_size), str(info.num_blocks), info.dtype


def _tokens(kind: str) -> Callable[[Sources], float]:
    return lambda sources: sum(count for (_, what), count in sources.requests.tenant_tokens.items() if what == kind)


VLLM_SERIES: tuple[Series, ...] = (
    Series("vllm:num_requests_running", "gauge", "Requests that hold a row and are computed.", stat("running")),
    Series("vllm:num_requests_waiting", "gauge", "Requests that wait to be admitted.", stat("waiting")),
    Series(
        "vllm:kv_cache_usage_perc", "gauge", "Share of the KV blocks that is held, 0 to 1.", ratio("used_blocks", usable_blocks)
    ),
    Series("vllm:prefix_cache_queries", "counter", "Prompt tokens of admitted requests, each once.", stat("prefix_queries")),
    Series("vllm:prefix_cache_hits", "counter", "Those of them that were found in the prefix cache.", stat("prefix_hits")),
    Series("vllm:num_preemptions", "counter", "Times that a request lost its blocks.", stat("preemptions")),
    Series("vllm:prompt_tokens", "counter", "Prompt tokens of requests that ended.", one(_tokens("prompt")), of_engine=False),
    Series("vllm:generation_tokens", "counter", "Tokens given to clients.", one(_tokens("output")), of_engine=False),
    Series(
        "vllm:request_success",
        "counter",
        "Answers, each of the n of a request, by how they ended: stop, length, abort, refused, error, left (the client went),"
        " or an error's name.",
        lambda sources: [((how,), count) for how, count in sources.requests.ends.items()],
        labels=("finished_reason",),
        of_engine=False,
    ),
    Series(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "From the request's arrival to its first token, as the server sees it.",
        _histogram("first_token_s"),
        of_engine=False,
    ),
    Series(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Between two tokens of a stream; tokens that came together share the time.",
        _histogram("between_tokens_s"),
        of_engine=False,
    ),
    Series(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "Mean time of a streamed request's tokens behind the first.",
        _histogram("per_output_token_s"),
        of_engine=False,
    ),
    Series(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "From a request's arrival to its end.",
        _histogram("whole_s"),
        of_engine=False,
    ),
    Series(
        "vllm:request_prompt_tokens",
        "histogram",
        "Prompt tokens of a request.",
        _histogram("prompt_tokens"),
        of_engine=False,
    ),
    Series(
        "vllm:request_generation_tokens",
        "histogram",
        "Output tokens of a request.",
        _histogram("output_tokens"),
        of_engine=False,
    ),
    Series(
        "vllm:request_params_max_tokens",
        "histogram",
        "What requests asked as max_tokens.",
        _histogram("max_tokens"),
        of_engine=False,
    ),
    Series(
        "vllm:request_params_n",
        "histogram",
        "How many answers requests asked for.",
        _histogram("num_answers"),
        of_engine=False,
    ),
    Series(
        "vllm:request_queue_time_seconds",
        "histogram",
        "From a request's arrival in the engine to its first admission.",
        _histogram("queued_s"),
        of_engine=False,
    ),
    Series(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "From its first admission to its first token.",
        _histogram("prefill_s"),
        of_engine=False,
    ),
    Series(
        "vllm:request_decode_time_seconds",
        "histogram",
        "From its first token to its last.",
        _histogram("decode_s"),
        of_engine=False,
    ),
    Series(
        "vllm:request_inference_time_seconds",
        "histogram",
        "From its first admission to its last token.",
        _histogram("inference_s"),
        of_engine=False,
    ),
    Series(
        "vllm:cache_config_info",
        "gauge",
        "Always 1: its labels tell how the KV cache is made.",
        lambda sources: [] if sources.info is None else [(_cache_config(sources.info), 1.0)],
        labels=("block_size", "num_gpu_blocks", "cache_dtype"),
    ),
)
