"""Owns the options of `blocktable bench NAME` and the choice of what to run.

Before: the command line. After: one module of this folder per benchmark, loaded when it is asked for, so that
those of the core need no torch. Each has `SUMMARY`, `TABLE`, `add_options(parser)` and `rows(options)`.
"""

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Protocol, cast

from .row import Row, WrongAnswerError, print_json, print_table

NAMES = ("pool", "hash", "prefix", "scheduler", "replay", "attention", "sampling", "generate", "serve", "dashboard")
"""Every benchmark, in the order of a request's walk."""


class Benchmark(Protocol):
    """What a module of this folder offers."""

    SUMMARY: str
    TABLE: tuple[str, ...]
    """Columns of the table for people, where the rows have them."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that are its own."""

    def rows(self, options: argparse.Namespace) -> Iterator[Row]:
        """Check, time, and yield one row per case."""


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    """Give `parser` one subcommand per benchmark; the choice arrives in `run` as `options.bench`."""
    chosen = parser.add_subparsers(dest="bench", metavar="NAME", required=True, title="benchmarks")
    for name in NAMES:
        benchmark = _load(name)
        summary = benchmark.SUMMARY
        child = chosen.add_parser(
            name, help=summary.splitlines()[0], description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        child.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
        child.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs: no figure to quote")
        child.add_argument("--peer-json", metavar="FILE", help="JSON lines of a peer's script, shown beside like rows")
        benchmark.add_options(child)


def run(options: argparse.Namespace) -> int:
    """Run what `add_subcommands` parsed. Returns the exit code: 0, or 1 for a wrong answer; refusals go to the caller."""
    benchmark = _load(options.bench)
    try:
        if options.json:
            print_json(benchmark.rows(options))
        else:
            print_table(benchmark.rows(options), benchmark.TABLE)
    except WrongAnswerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _load(name: str) -> Benchmark:
    return cast(Benchmark, import_module(f"{__package__}.{name}"))


def count(text: str) -> int:
    """A whole number of at least 1, with `k` and `M` for thousands and millions: `100k`."""
    scale = {"k": 1_000, "M": 1_000_000}.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1 (100, 100k, 1M)")
    return int(digits) * scale


def count_or_zero(text: str) -> int:
    """As `count`, and 0."""
    return 0 if text == "0" else count(text)
