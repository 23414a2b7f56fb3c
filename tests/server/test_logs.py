"""Promise: a line is one JSON object with a stable event; logging never waits, never fails, and counts what it lost."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktable.server import logs
from blocktable.server.logs import Event, JsonFormatter, LineWriter, PlainFormatter, tell

FULL = Path("/dev/full")


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger that nobody else hears."""
    one = logging.getLogger("blocktable.test_logs")
    one.propagate = False
    one.setLevel("INFO")
    yield one
    one.handlers.clear()


def writing(logger: logging.Logger, descriptor: int, *, capacity: int = logs.MAX_LINES) -> LineWriter:
    writer = LineWriter(descriptor, capacity=capacity)
    writer.setFormatter(JsonFormatter())
    logger.addHandler(writer)
    return writer


def test_events_are_lines_of_json(logger: logging.Logger, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        writer = writing(logger, file.fileno())
        tell(logger, Event.REQUEST_ENDED, "request é\n", request_id="r\ud800", tenant=None, tokens=3)
        logger.warning("plain %d", 7)
        try:
            raise ValueError("why")
        except ValueError:
            logger.exception("failed")
        logger.debug("not shown")
        writer.end()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]
    assert [line["message"] for line in lines] == ["request é\n", "plain 7", "failed"]
    assert lines[0]["event"] == "request.ended"
    assert lines[0]["tokens"] == 3
    assert "tenant" not in lines[0], "what is None is left out"
    assert lines[2]["exception"].endswith("ValueError: why")
    assert all(line["time"].endswith("Z") and line["level"] in logs.LEVELS for line in lines)
    assert writer.lost == 0


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_stops_nobody_and_is_counted(logger: logging.Logger) -> None:
    descriptor = os.open(FULL, os.O_WRONLY)
    try:
        writer = writing(logger, descriptor)
        for place in range(100):
            logger.info("line %d", place)
        writer.end()
    finally:
        os.close(descriptor)
    assert writer.lost == 100


def test_a_line_that_a_full_disk_cut_spoils_no_other(
    logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for some bytes, then for none, then there is some again."""
    room, write = 150, os.write

    def writes(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            room = 1000
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(descriptor, data[:room])
        room -= count
        return count

    monkeypatch.setattr(logs.os, "write", writes)
    with (tmp_path / "log").open("wb") as file:
        writer = writing(logger, file.fileno())
        for place in range(5):
            logger.info("line %d", place)
        writer.end()
    lines = (tmp_path / "log").read_text().splitlines()
    assert writer.lost == 1
    assert [json.loads(line)["message"] for line in (lines[0], *lines[2:])] == ["line 0", "line 2", "line 3", "line 4"]
    assert len(lines[1]) < len(lines[0])


def test_a_reader_that_sleeps_holds_up_nobody(logger: logging.Logger) -> None:
    """A pipe that nobody empties: the writer's thread waits, whoever logs does not, and memory is bounded."""
    out, into = os.pipe()
    writer = writing(logger, into, capacity=50)
    for _ in range(2000):
        logger.info("x" * 1000)
    assert writer.lost >= 2000 - 50 - 70, "64 KiB lie in the pipe, 50 lines wait"
    os.close(out)
    writer.end()
    os.close(into)


def test_a_value_that_cannot_be_shown_stops_nobody(logger: logging.Logger) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    writer = writing(logger, 2)
    tell(logger, Event.REQUEST_ENDED, "odd", value=Odd())
    writer.end()
    assert writer.lost == 1


def test_people_get_plain_lines() -> None:
    record = logging.makeLogRecord({"msg": "hello", "fields": {"n": 3}})
    assert PlainFormatter().format(record) == "blocktable: hello n=3"


def test_names_of_events_are_stable() -> None:
    """They are searched for and alerted on: a change here is a change for operators."""
    assert sorted(event.value for event in Event) == [
        "engine.died",
        "engine.given_up",
        "engine.moves",
        "engine.ready",
        "engine.stalled",
        "engine.starting",
        "request.ended",
        "server.drain_begun",
        "server.drain_ended",
        "server.keys_read",
        "server.keys_refused",
        "server.started",
        "server.stopped",
    ]
