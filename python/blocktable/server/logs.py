"""Log lines of a serving process: JSON or plain, one event a line, written by a thread of their own.

Before: `blocktable serve` and the engine's process call `write_logs` once; anybody logs with `logging`, and `tell` names an
event. After: standard error. Always: who logs never waits and never fails, whether the reader of the lines sleeps or the disk
is full; a line that could not be kept is counted. Names of events (`Event`) are stable; no prompt and no answer stands in a
line unless the operator asked for that.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from enum import Enum

MAX_LINES = 10_000
"""Lines that wait to be written, at most."""

LEVELS = ("debug", "info", "warning", "error")


class Event(Enum):
    """What a line tells of. Fields of each stand in `docs/operating.md`."""

    SERVER_STARTED = "server.started"
    SERVER_STOPPED = "server.stopped"
    KEYS_READ = "server.keys_read"
    KEYS_REFUSED = "server.keys_refused"
    DRAIN_BEGUN = "server.drain_begun"
    DRAIN_ENDED = "server.drain_ended"
    ENGINE_STARTING = "engine.starting"
    ENGINE_READY = "engine.ready"
    ENGINE_DIED = "engine.died"
    ENGINE_GIVEN_UP = "engine.given_up"
    ENGINE_STALLED = "engine.stalled"
    ENGINE_MOVES = "engine.moves"
    REQUEST_ENDED = "request.ended"


def tell(logger: logging.Logger, event: Event, message: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log an event with fields; those that are None are left out."""
    if logger.isEnabledFor(level):
        given = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, "%s", message, extra={"event": event.value, "fields": given})


class JsonFormatter(logging.Formatter):
    """One JSON object: `time` (UTC), `level`, `logger`, `event` where there is one, `message`, the event's fields,
    `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event = getattr(record, "event", None)
        if event is not None:
            line["event"] = event
        line["message"] = record.getMessage()
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=repr)


class PlainFormatter(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in getattr(record, "fields", {}).items())
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"blocktable: {record.getMessage()}{fields}{trace}"


class LineWriter(logging.Handler):
    """Writes lines to a file descriptor, from a thread of its own. `lost` counts those that could not be kept."""

    def __init__(self, descriptor: int, *, capacity: int = MAX_LINES) -> None:
        super().__init__()
        self.lost = 0
        self._descriptor = descriptor
        self._line: queue.Queue[str | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._run, name="blocktable-logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._line.put_nowait(self.format(record))
        except Exception:  # noqa: BLE001 - neither a full line nor a value that cannot be shown stops who logs
            self.lost += 1

    def end(self, patience_s: float = 1.0) -> None:
        """Write what waits, but no longer than that."""
        try:
            self._line.put(None, timeout=patience_s)
        except queue.Full:
            return
        self._thread.join(patience_s)

    def _run(self) -> None:
        is_cut = False
        while (line := self._line.get()) is not None:
            # What follows a line that got no further stands in one of its own.
            whole = rest = b"\n" * is_cut + (line + "\n").encode("utf-8", "backslashreplace")
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
                is_cut = False
            except OSError:  # a full disk, a reader that has gone
                self.lost += 1
                is_cut = is_cut or len(rest) < len(whole)


def write_logs(level: str, *, is_json: bool, descriptor: int = 2) -> LineWriter:
    """Have everything from `level` on written to standard error: what `blocktable` logs, and of others what is a warning."""
    writer = LineWriter(descriptor)
    writer.setFormatter(JsonFormatter() if is_json else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [writer]
    root.setLevel(logging.WARNING)
    logging.getLogger("blocktable").setLevel(level.upper())
    return writer
