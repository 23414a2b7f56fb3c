"""Engines for the tests of the server's processes, built inside the engine's process: those of `bench/counting_engine.py`, with
faults.

Before: `EngineLaunch(builder="counting_engine:build")`, with this folder on the path. After: an engine whose every answer is
known beforehand. Faults are options, which begin with `fake_`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from blocktable import InvalidInputError
from blocktable.bench.counting_engine import LETTERS, VOCAB_SIZE, CountingEngine, CountingModel, answer_to, engine_of, split
from blocktable.errors import OutOfBlocksError, PinBudgetError

__all__ = ["LETTERS", "VOCAB_SIZE", "answer_to"]

FAULTS: dict[str, Any] = {
    "step_ms": 2.0,
    "token_us": 0.0,
    "hang_at": -1,
    "hang_s": 3600.0,
    "raise_at": -1,
    "die_after": 0,
    "passes_file": "",
    "grammars_file": "",
    "leaks": False,
    "hoards": False,
}


class FaultyModel(CountingModel):
    """Hangs in pass `hang_at` for `hang_s`; raises in pass `raise_at`. `passes_file` is a byte longer for each pass: for who
    hears nothing of the engine."""

    def __init__(self, faults: Mapping[str, Any]) -> None:
        super().__init__(step_ms=faults["step_ms"], token_us=faults["token_us"])
        self._faults = faults
        self._passes = 0

    def forward(self, plan: Any, *given: Any) -> torch.Tensor:
        number, faults = self._passes, self._faults
        self._passes += 1
        if number == faults["hang_at"]:
            time.sleep(faults["hang_s"])
        if number == faults["raise_at"]:
            raise RuntimeError("planted: the model fails once")
        logits = super().forward(plan, *given)
        if faults["passes_file"]:
            with Path(faults["passes_file"]).open("ab") as file:
                file.write(b".")
        return logits


def build(model: str, tokenizer: str | None, options: Mapping[str, Any]) -> CountingEngine:
    """The engine; `model` is a folder with a `tokenizer.json`."""
    own, real = split(options, "fake_")
    faults = FAULTS | own
    engine = engine_of(FaultyModel(faults), model, real)
    if faults["die_after"]:
        _plant_death(engine.loop, faults["die_after"])
    if faults["leaks"]:
        _plant_leak(engine.loop)
    if faults["hoards"]:
        _plant_hoard(engine.loop)
    if faults["grammars_file"]:
        _note_grammars(engine.grammars, Path(faults["grammars_file"]))
    return engine


def build_orphan(model: str, tokenizer: str | None, options: Mapping[str, Any]) -> CountingEngine:
    """The system is not asked to end this process with its server: only the end of the socket is left."""
    ctypes.CDLL(None).prctl(1, 0)
    return build(model, tokenizer, options)


def build_slowly(model: str, tokenizer: str | None, options: Mapping[str, Any]) -> CountingEngine:
    """Never done."""
    threading.Event().wait(3600)
    raise AssertionError("an hour is over")


def build_badly(model: str, tokenizer: str | None, options: Mapping[str, Any]) -> CountingEngine:
    """Ends while it builds, without a word."""
    os._exit(7)


def _plant_death(loop: Any, after: int) -> None:
    """The loop itself fails, after so many plans."""
    plan, count = loop._plan, [0]

    def dying() -> Any:
        count[0] += 1
        if count[0] > after:
            raise RuntimeError("planted: the loop itself fails")
        return plan()

    loop._plan = dying


def _plant_leak(loop: Any) -> None:
    """Who leaves has what is cached of its prompt held for ever, if it is of tenant `a`."""
    abort = loop.abort

    def leaking(number: int) -> Any:
        request = loop._roster._requests.get(number)
        if request is not None:
            with suppress(InvalidInputError, OutOfBlocksError, PinBudgetError):
                loop.scheduler.pin(request.prompt.array, domain="a")
        return abort(number)

    loop.abort = leaking


def _plant_hoard(loop: Any) -> None:
    """Of each request a megabyte stays, up to a thousand."""
    add, kept = loop.add, []

    def hoarding(*given: Any, **named: Any) -> Any:
        if len(kept) < 1000:
            kept.append(b"x" * 2**20)
        return add(*given, **named)

    loop.add = hoarding


def _note_grammars(grammars: Any, path: Path) -> None:
    """Each choice that is compiled, or tried, is a line of the file."""
    compile_one = grammars.compile

    def noting(params: Any) -> Any:
        with path.open("a") as file:
            file.write(f"{'|'.join(params.choice)}\n")
        return compile_one(params)

    grammars.compile = noting


def build_deaf(model: str, tokenizer: str | None, options: Mapping[str, Any]) -> CountingEngine:
    """Planted: whoever leaves while a grammar is compiled for him is not heard."""
    import __main__ as process

    hear = process.EngineProcess.carry_out

    def deaf(self: Any, order: Any) -> None:
        if type(order).__name__ != "Abort" or order.number not in self._compiling:
            hear(self, order)

    process.EngineProcess.carry_out = deaf
    return build(model, tokenizer, options)
