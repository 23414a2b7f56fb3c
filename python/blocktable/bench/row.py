"""Owns what a benchmark prints: rows of named figures, as JSON lines or as a table for people.

Before: a benchmark yields rows. After: standard output. A row's keys come first and its figures after, always in the
order in which its benchmark names them; a figure that could not be had is null, never left out.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..errors import InvalidInputError

Value = str | int | float | bool | None
Row = dict[str, Value]


def print_json(rows: Iterable[Row]) -> None:
    """One object a line, each as soon as it is known."""
    for row in rows:
        print(json.dumps(row), flush=True)


def print_table(rows: Iterable[Row], columns: Sequence[str]) -> None:
    """Aligned columns, without those that are null in every row; each row is told on standard error as soon as it is known."""
    table = []
    for row in rows:
        table.append(row)
        print(f"  {_headline(row, columns)}", file=sys.stderr, flush=True)
    shown = [name for name in columns if any(row.get(name) is not None for row in table)]
    cells = [shown] + [[cell(row.get(name)) for name in shown] for row in table]
    widths = [max(len(line[i]) for line in cells) for i in range(len(shown))]
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths)))


def _headline(row: Row, columns: Sequence[str]) -> str:
    return " ".join(f"{name}={cell(row[name])}" for name in columns if row.get(name) is not None)


def cell(value: Value) -> str:
    """A figure with as many places as are worth reading."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


class WrongAnswerError(AssertionError):
    """What was to be timed gave a wrong answer, so no time is given."""


def check(*, holds: bool, what: str) -> None:
    """Refuse to time something whose answer is wrong."""
    if not holds:
        raise WrongAnswerError(f"not timed, the answer is wrong: {what}")


def read_peer_rows(path: str | None) -> list[Row]:
    """Rows that a peer's script printed as JSON lines; other lines are passed over. Without a file there are none."""
    if path is None:
        return []
    try:
        with open(path, encoding="utf-8") as lines:
            return [flatten(json.loads(line)) for line in lines if line.startswith("{")]
    except (OSError, ValueError) as error:
        raise InvalidInputError("peer_json", path, f"must be a file of JSON lines ({error})") from None


def flatten(value: Mapping[str, object]) -> Row:
    """`{"step_us": {"p50": 1}}` becomes `{"step_us_p50": 1}`, so that a peer's nested figures have our names."""
    return dict(_leaves("", value))


def _leaves(prefix: str, value: Mapping[str, object]) -> Iterator[tuple[str, Value]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _leaves(f"{prefix}{key}_", item)
        elif item is None or isinstance(item, (str, int, float, bool)):
            yield f"{prefix}{key}", item


def with_peers(row: Row, peers: Sequence[Row], same: Sequence[str], figures: Sequence[str]) -> Row:
    """`row` with the figures of the first peer row that is equal in the columns `same`, and ours over theirs as `ratio_…`."""
    for peer in peers:
        if not all(key in peer and peer[key] == row[key] for key in same):
            continue
        shared = [name for name in figures if _is_number(peer.get(name)) and _is_number(row.get(name))]
        if shared:
            return row | {"peer": peer.get("peer", "peer")} | _beside(row, peer, shared)
    return row


def _beside(row: Row, peer: Row, names: Sequence[str]) -> Row:
    beside: Row = {}
    for name in names:
        ours, theirs = row[name], peer[name]
        if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
            beside[f"peer_{name}"] = theirs
            beside[f"ratio_{name}"] = round(ours / theirs, 5) if theirs else None
    return beside


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
