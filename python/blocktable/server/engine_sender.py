"""The writing end of the engine's process: one thread that sends what steps brought, and signs of life.

Before: the step thread puts pieces into mailboxes and wakes them; `engine_process.py` posts answers. After: the socket to the
server. Always: posting never waits; while the server does not read, what comes is merged in the mailboxes, so that no more
waits than the open requests' own text; everything that lies there when the thread comes by goes in one frame; a beat is due
whether or not a step moves.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..engine.mailbox import Mailbox, Outbox
from ..errors import FrameError, InvalidInputError
from ..sampling.params import RequestOutputKind
from .engine_client import Piece, pieces_of
from .frames import frame
from .wire import Beat, Dead, ErrorRecord, Pieces, Refused, Report

MAX_PIECES_BYTES = 2**24
"""Of pieces in one frame, about; one piece that is larger goes alone. All answers of a request may come at once, and with log
probabilities they may be larger together than a frame may be."""


class WireMailbox(Mailbox):
    """Of one request whose reader is on the other side of the socket."""

    def __init__(self, outbox: Outbox, request_id: str, kind: RequestOutputKind, number: int, sender: Sender) -> None:
        super().__init__(outbox, request_id, kind)
        self.number = number
        self.is_over = False
        """Its end was taken."""
        self._sender = sender

    @property
    def line(self) -> Sender:
        """Who sends for it."""
        return self._sender

    def wake(self, mailboxes: Sequence[Any]) -> None:
        """Have them read by the sender, which then has all of a step before it begins. Each at most once between two reads."""
        self._sender.post(mailboxes)

    def pieces(self) -> list[Piece]:
        """What came since the last time, of each answer. Raises the error that ended them."""
        tokens = self.take_tokens()
        if tokens is not None:
            cached, answers = tokens
            return [Piece(text, token_ids, None, None, cached, index) for index, text, token_ids in answers]
        output = self.take()
        if output is None:
            return []
        self.is_over = output.finished
        return pieces_of(output)


class Sender:
    """Sends until `close`. `beat` tells how the engine moves, `on_end` is told the number of each request whose end was
    sent, `on_lost` that of one which ends because what came for it fits no frame."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        beat_s: float,
        beat: Callable[[], Beat],
        on_end: Callable[[int], object],
        on_lost: Callable[[int], object],
    ) -> None:
        self._connection = connection
        self._beat_s = beat_s
        self._beat = beat
        self._on_end = on_end
        self._on_lost = on_lost
        self._due = 0.0
        self._line: queue.SimpleQueue[Sequence[WireMailbox] | Report | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="blocktable-sender", daemon=True)
        self._thread.start()

    def post(self, item: Sequence[WireMailbox] | Report) -> None:
        """A report, or mailboxes in which something lies. From any thread; never waits."""
        self._line.put(item)

    def close(self, last: Dead | None = None, *, patience_s: float = 1.0) -> None:
        """Send what was posted, then `last`, and end; what the other side does not take in time is lost."""
        if last is not None:
            self._line.put(last)
        self._line.put(None)
        self._thread.join(patience_s)

    def _run(self) -> None:
        try:
            while self._send_some():
                pass
        except OSError:  # nobody is there: who reads the orders sees it too
            return

    def _send_some(self) -> bool:
        """Send all that was posted, or, if nothing comes, a beat. False at the end."""
        numbers: list[int] = []
        pieces: list[Piece] = []
        others: list[Report] = []
        is_open = True
        for item in self._posted():
            if item is None:
                is_open = False
            elif isinstance(item, Report):
                others.append(item)
            else:
                for mailbox in item:
                    self._read(mailbox, numbers, pieces, others)
        for records in _split(numbers, pieces):
            try:
                ready = frame(records)
            except FrameError as error:  # one piece alone, with more log probabilities than the other end would read
                told = InvalidInputError("logprobs", "an answer", f"must fit a message to the server, and has {error}")
                for number in records.numbers:
                    self._on_lost(number)
                    others.append(Refused(number, ErrorRecord.of(told)))
                continue
            self._connection.sendall(ready)
        for report in others:
            self._connection.sendall(frame(report))
        if is_open and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._beat_s
            self._connection.sendall(frame(self._beat()))
        return is_open

    def _posted(self) -> list[Sequence[WireMailbox] | Report | None]:
        try:
            first = self._line.get(timeout=max(self._due - time.monotonic(), 0.0))
        except queue.Empty:
            return []
        return [first, *(self._line.get_nowait() for _ in range(self._line.qsize()))]

    def _read(self, mailbox: WireMailbox, numbers: list[int], pieces: list[Piece], others: list[Report]) -> None:
        try:
            new = mailbox.pieces()
        except Exception as error:  # noqa: BLE001 - whatever ended the request is for its reader
            self._on_end(mailbox.number)
            others.append(Refused(mailbox.number, ErrorRecord.of(error)))
            return
        for piece in new:
            numbers.append(mailbox.number)
            pieces.append(piece)
        if mailbox.is_over:
            self._on_end(mailbox.number)


def _split(numbers: list[int], pieces: list[Piece]) -> Iterator[Pieces]:
    """Records of these pieces, in their order: one, unless there are log probabilities among them."""
    if not any(piece.logprobs is not None or piece.prompt_logprobs is not None for piece in pieces):
        if pieces:
            yield Pieces(numbers, pieces)
        return
    start = size = 0
    for place, piece in enumerate(pieces):
        own = _num_bytes(piece)
        if size + own > MAX_PIECES_BYTES and place > start:
            yield Pieces(numbers[start:place], pieces[start:place])
            start, size = place, 0
        size += own
    if start < len(pieces):
        yield Pieces(numbers[start:], pieces[start:])


def _num_bytes(piece: Piece) -> int:
    """At most, but for a few."""
    size = 4 * len(piece.text) + 5 * len(piece.token_ids)
    for told in (piece.logprobs, piece.prompt_logprobs):
        size += 0 if told is None else len(told.ids) + len(told.values)
    return size
