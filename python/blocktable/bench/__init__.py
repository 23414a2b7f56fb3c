"""The benchmarks behind `blocktable bench NAME`. Names and keys are fixed, so that rows can be compared over time.

Before: the command line, which calls `add_subcommands` on its parser and `run` with what it parsed. After: rows on
standard output, one JSON object a line with `--json`, else a table; remarks go to standard error. Each benchmark checks
the answer of what it is about to time, and times nothing whose answer is wrong.
"""

from .command import NAMES, add_subcommands, run

__all__ = ["NAMES", "add_subcommands", "run"]
