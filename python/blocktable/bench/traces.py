"""Owns the formats of recorded workloads: when each request came, what it asked, and how much it was answered.

Before: `replay.py` names a file. After: `Arrival`s in the order of their time. Files ending in `.zst` are read through the
program `zstd`, those ending in `.gz` by the standard library. Four formats are known by their fields:

- `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure's public dataset): lengths only, so no prompt shares anything;
- `timestamp` in ms, `input_length`, `output_length`, `hash_ids` (Mooncake): prompts with equal leading ids share those blocks;
- `timestamp` in us, `input`, `output` as text (LMCache's agent trace): a token is a UTF-8 byte.
"""

import csv
import gzip
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInputError

Tokens = NDArray[np.int64]

MOONCAKE_BLOCK = 512
"""Tokens that one entry of `hash_ids` stands for."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    at_us: int  # after the first one of the file
    prompt: Tokens  # [tokens]
    output: int  # tokens


def read_trace(path: str | Path, vocab_size: int, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests of the file at `path`, or all, by time of arrival; every token is below `vocab_size`.

    Tokens that the file doesn't tell are drawn with a seed, so that a file gives the same prompts every time. Raises
    `InvalidInputError` for a file that is missing, cannot be unpacked, or has none of the formats.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidInputError("trace", str(path), "must be a file")
    lines = _lines(path)
    first = next(lines, "")
    try:
        if first.startswith("TIMESTAMP,"):
            arrivals = _azure(lines, vocab_size)
        else:
            records = _records(first, lines)
            arrivals = _mooncake(records, vocab_size) if "hash_ids" in first else _text(records, vocab_size)
        taken = list(islice(arrivals, limit))
    except (KeyError, ValueError, TypeError) as error:
        raise InvalidInputError("trace", str(path), f"must have one of the known formats ({error!r})") from None
    if not taken:
        raise InvalidInputError("trace", str(path), "must have at least one request")
    taken.sort(key=lambda arrival: arrival.at_us)
    start = taken[0].at_us
    return [Arrival(arrival.at_us - start, arrival.prompt, arrival.output) for arrival in taken]


def _lines(path: Path) -> Iterator[str]:
    if path.suffix == ".zst":
        if shutil.which("zstd") is None:
            raise InvalidInputError("trace", str(path), "needs the program zstd to be read")
        text = subprocess.run(["zstd", "-dcq", "--long=27", path], check=True, stdout=subprocess.PIPE).stdout.decode()
        yield from text.splitlines()
        return
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
        yield from (line.rstrip("\r\n") for line in lines)


def _records(first: str, lines: Iterator[str]) -> Iterator[dict[str, object]]:
    yield json.loads(first)
    yield from (json.loads(line) for line in lines if line)


def _azure(lines: Iterator[str], vocab_size: int) -> Iterator[Arrival]:
    rng = np.random.default_rng(0)
    for time, prompt, output in csv.reader(line for line in lines if line):
        at = datetime.fromisoformat(time[:26])
        at_us = int(at.timestamp() * 1e6)
        yield Arrival(at_us, rng.integers(0, vocab_size, max(1, int(prompt))), max(1, int(output)))


def _mooncake(records: Iterator[dict[str, object]], vocab_size: int) -> Iterator[Arrival]:
    for record in records:
        length = max(1, _whole(record["input_length"]))
        ids = record["hash_ids"]
        if not isinstance(ids, list):
            raise TypeError("hash_ids must be a list")
        blocks = [np.random.default_rng(_whole(key)).integers(0, vocab_size, MOONCAKE_BLOCK) for key in ids]
        prompt = np.concatenate(blocks)[:length] if blocks else np.zeros(1, np.int64)
        yield Arrival(_whole(record["timestamp"]) * 1000, prompt, max(1, _whole(record["output_length"])))


def _text(records: Iterator[dict[str, object]], vocab_size: int) -> Iterator[Arrival]:
    for record in records:
        prompt = np.frombuffer(str(record["input"]).encode(), np.uint8).astype(np.int64) % vocab_size
        yield Arrival(
            _whole(record["timestamp"]),
            prompt if len(prompt) else np.zeros(1, np.int64),
            max(1, len(str(record["output"]).encode())),
        )


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return int(value)
