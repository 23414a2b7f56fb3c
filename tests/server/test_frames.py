"""Promise: records come out of a stream as they went in, in whatever pieces; anything else is a typed error, and the end."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktable import errors
from blocktable.errors import BlocktableError, FrameError
from blocktable.server import frames
from blocktable.server.engine_client import EngineInfo, EngineRequest, Piece, PieceLogprobs
from blocktable.server.frames import LENGTH, FrameReader, frame
from blocktable.server.wire import (
    Abort,
    Answer,
    Ask,
    Beat,
    Dead,
    ErrorRecord,
    Launch,
    Order,
    Pieces,
    Ready,
    Refused,
    Report,
    Stop,
    Submit,
)

INFO = EngineInfo(
    model="m",
    dtype="float32",
    max_model_len=64,
    vocab_size=9,
    eos_token_ids=[1],
    block_size=8,
    num_blocks=9,
    bytes_per_block=512,
    max_num_seqs=4,
    max_waiting=7,
    max_logprobs=20,
    policy="fcfs",
    device="cpu",
)
ORDERS: list[Any] = [
    Launch("m", None, {"num_blocks": 3, "tenants": {"a": {"weight": 2}}}, "b:c", 0.25, "info", log_is_json=True),
    Submit(1, EngineRequest(request_id="é", prompt_token_ids=[1, 2], sampling={"stop": ["x"]}, cache_salt="s", tenant="t")),
    Abort(1),
    Ask(2, "explain", "é"),
    Stop(),
]
REPORTS: list[Any] = [
    Ready(INFO),
    Pieces([1, 2], [Piece("a", [1]), Piece("", [2, 3], "stop", "\n", 16)]),
    Pieces([1], [Piece("a", [1], logprobs=PieceLogprobs(1, b"\x00" * 8, b"\xff" * 8))]),
    Refused(3, ErrorRecord.of(errors.NeverFitsError(9, 4))),
    Beat(1, 2, 3, 0.5),
    Answer(4, {"stats": {"steps": 1}}),
    Dead(ErrorRecord.of(errors.EngineDeadError("why"))),
]


@pytest.mark.parametrize(("kinds", "records"), [(Order, ORDERS), (Report, REPORTS)], ids=["orders", "reports"])
def test_records_come_out_as_they_went_in_whatever_the_pieces(kinds: Any, records: list[Any], rng: random.Random) -> None:
    data = b"".join(frame(record) for record in records)
    for _ in range(200):
        reader: FrameReader[Any] = FrameReader(kinds)
        found, start = [], 0
        while start < len(data):
            end = start + rng.choice([1, 2, 3, 5, 100, len(data)])
            found += reader.feed(data[start:end])
            start = end
        assert found == records


@given(st.binary(max_size=200))
def test_any_bytes_are_records_or_a_typed_error(data: bytes) -> None:
    reader: FrameReader[Any] = FrameReader(Order)
    try:
        assert all(isinstance(record, Order) for record in reader.feed(data))
    except FrameError:
        with pytest.raises(FrameError):
            reader.feed(b"")


@pytest.mark.parametrize("record", ORDERS + REPORTS, ids=lambda record: type(record).__name__)
def test_changed_records_are_records_or_a_typed_error(record: Any, rng: random.Random) -> None:
    kinds: Any = Order if record in ORDERS else Report
    whole = frame(record)
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(LENGTH.size, len(changed))] = rng.randrange(256)
        with suppress(FrameError):
            FrameReader[Any](kinds).feed(changed)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", frames.MAX_FRAME + 1),
        struct.pack("<I", 0),
        struct.pack("<I", 1) + b"\xc1",
        LENGTH.pack(3) + msgspec.msgpack.encode([99, 1]),
        LENGTH.pack(3) + msgspec.msgpack.encode([3, -1])[:2] + b"\xa0",
        LENGTH.pack(2000) + b"\x91" * 2000,
    ],
    ids=["too long", "empty", "no msgpack", "unknown kind", "wrong type", "deep"],
)
def test_what_is_no_record_is_told_once_and_for_all(data: bytes) -> None:
    reader: FrameReader[Any] = FrameReader(Order)
    with pytest.raises(FrameError):
        reader.feed(data)
    with pytest.raises(FrameError, match="earlier"):
        reader.feed(frame(Stop()))


def test_a_record_that_nobody_would_read_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    with pytest.raises(FrameError, match="at most 100"):
        frame(Ask(1, "x" * 100))


ERRORS: list[Exception] = [
    errors.InvalidInputError("max_tokens", 2**70, "must be small"),
    errors.InvalidInputError("stop", ["a"], "must be a text"),
    errors.InvalidInputError("prompt", "\ud800", "must be Unicode"),
    errors.UnknownOptionError("max_token", 1, ["max_tokens"]),
    errors.NeverFitsError(9, 4),
    errors.QueueFullError(10, "max_waiting_tokens", 12, 2_000_000),
    errors.QueueFullError(10),
    errors.NoSuchBlockError(9, 8),
    errors.UnknownRequestError(7),
    errors.ShutDownError(),
    errors.EngineDeadError("why"),
    errors.ModelLoadError("m", "gone"),
    errors.UnsupportedModelError("m", "odd"),
    errors.EndpointError("tcp://x", "taken"),
    errors.OutOfBlocksError(3, 2),
    ValueError("not ours"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_come_out_with_their_fields(error: Exception) -> None:
    [back] = FrameReader[Any](Report).feed(frame(Refused(1, ErrorRecord.of(error))))
    found = back.error.error()
    assert isinstance(found, BlocktableError)
    if isinstance(error, errors.InvalidInputError):
        assert isinstance(found, errors.InvalidInputError)
        assert (found.field, found.bound) == (error.field, error.bound)
    elif type(found) is not BlocktableError:
        assert type(found) is type(error)
        assert vars(found) == vars(error)
        assert str(found) == str(error)
    else:
        assert str(error) in str(found)


def test_every_refusal_of_submit_crosses_as_itself() -> None:
    """The check above can fail: an error that is not in the table would cross as its text alone."""
    for error in ERRORS[:14]:
        assert type(ErrorRecord.of(error).error()) is not BlocktableError, error
