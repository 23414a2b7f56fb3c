"""`blocktable replay`: makes the calls of a recording again, and says whether everything was the same.

Before: a file that `Scheduler.start_recording` or a crash wrote. After: exit code 0 if every plan was the same bit for bit, 1
if not.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from ..replay import describe, replay

DESCRIPTION = """\
Make every call of a recorded schedule again on a new scheduler, and compare each plan array by array. Ends with code 1 at the
first difference. Needs no model and no torch.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("file", help="what Scheduler.start_recording wrote, or a crash report")
    parser.add_argument("--list", action="store_true", help="list the calls instead of making them")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Replay, or list; returns the exit code."""
    try:
        if options.list:
            print("\n".join(describe(options.file)))
            return 0
        report = replay(options.file)
    except OSError as error:
        print(f"blocktable: error: {options.file}: {error.strerror}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        print(f"{report.calls} calls, {report.plans} plans, {report.tokens} tokens scheduled")
        if report.is_cut:
            print("the file ends within a record: everything before it was replayed")
        if report.ends_in_panic:
            print("the last call broke the scheduler, as it did when it was recorded")
        print(f"DIFFERENT: {report.difference}" if report.difference else "the same, bit for bit")
    return 0 if report.difference is None else 1
