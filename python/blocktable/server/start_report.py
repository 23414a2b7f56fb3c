"""What a server says when it is ready: the model, its memory, and how many may talk to it at once.

Before: the engine told what it is. After: standard error, and the log's `server.started`.
"""

from __future__ import annotations

from .engine_client import EngineInfo

LENGTHS = (512, 2048, 8192, 32_768)
"""Tokens of a whole request, prompt and answer, for which concurrency is told."""


def concurrency(info: EngineInfo) -> dict[int, int]:
    """Requests of each length, in tokens, that fit at once with nothing shared; windows and shared prefixes let more fit."""
    lengths = [length for length in LENGTHS if length < info.max_model_len] + [info.max_model_len]
    usable = info.num_blocks - 1
    return {length: min(usable // -(-length // info.block_size), info.max_num_seqs) for length in lengths}


def start_report(info: EngineInfo, addresses: dict[str, str]) -> str:
    """The lines. `addresses`: what listens where."""
    memory = info.num_blocks * info.bytes_per_block / 2**20
    fits = ", ".join(f"{count} of {length}" for length, count in concurrency(info).items())
    rows = [
        ("model", f"{info.model}, {info.dtype} on {info.device}, {info.max_model_len} tokens at most"),
        ("KV memory", f"{info.num_blocks} blocks of {info.block_size} tokens, {memory:.1f} MiB"),
        ("at once", f"{fits} tokens (at most {info.max_num_seqs} run, {info.max_waiting} wait, {info.policy})"),
        *addresses.items(),
    ]
    return "\n".join(f"{name:<11} {value}" for name, value in rows)
