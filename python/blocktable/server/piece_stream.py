"""What waits for one reader on the server's event loop: pieces that it has not taken, as one. None, if it waits and passes them
on at once.

Before: `process_client.py` puts in what the engine sent. After: a route takes it, whenever its client lets it. Always: what
waits is never more than the request's own text and tokens; the end comes exactly once, as a finished piece or as an error.
"""

from __future__ import annotations

import asyncio
import logging

from .engine_client import AtOnce, Piece, PieceLogprobs, passed_on

logger = logging.getLogger("blocktable.server")


class PieceStream:
    """Of one request. Used on one event loop only."""

    __slots__ = ("_at_once", "_bell", "_error", "_num_left", "_unread", "is_over")

    def __init__(self, num_answers: int = 1, at_once: AtOnce | None = None) -> None:
        """`at_once` is offered what comes while `get` waits, but for ends: then all before it has been dealt with."""
        self.is_over = False
        """The end of all its answers has come; perhaps nobody took it yet."""
        self._num_left = num_answers
        self._at_once = at_once
        self._unread: dict[int, list[Piece]] = {}  # by the answer's index, none of them empty
        self._error: Exception | None = None
        self._bell: asyncio.Future[None] | None = None

    def put(self, piece: Piece) -> None:
        """One more piece. After the end it is dropped."""
        bell = self._bell
        if self.is_over or (bell is not None and not bell.done() and self._passes(piece)):
            return
        unread = self._unread.get(piece.index)
        if unread is None:
            self._unread[piece.index] = [piece]
        else:
            unread.append(piece)
        if piece.finish_reason is not None:
            self._num_left -= 1
            self.is_over = self._num_left == 0
        self._ring()

    def fail(self, error: Exception) -> None:
        """End it with an error, which goes before what was not taken. After the end it does nothing."""
        if self.is_over:
            return
        self.is_over = True
        self._error = error
        self._ring()

    async def get(self) -> Piece:
        """What came of an answer since the last time, as one piece; waits for it. Raises the error that ended it."""
        while True:
            if self._error is not None:
                raise self._error
            if self._unread:
                return _joined(self._unread.pop(next(iter(self._unread))))
            self._bell = asyncio.get_running_loop().create_future()
            try:
                await self._bell
            finally:
                self._bell = None

    def _passes(self, piece: Piece) -> bool:
        try:
            return passed_on(piece, self._at_once)
        except Exception as error:
            # No other reader is to meet it; its own takes the pieces itself from here on.
            self._at_once = None
            logger.error("pieces are not passed on at once any more: %r", error, exc_info=error)
            return False

    def _ring(self) -> None:
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)


def _joined(pieces: list[Piece]) -> Piece:
    last = pieces[-1]
    if len(pieces) > 1:
        last.text = "".join([piece.text for piece in pieces])
        last.token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        last.logprobs = joined_logprobs([piece.logprobs for piece in pieces if piece.logprobs is not None])
    return last


def joined_logprobs(parts: list[PieceLogprobs]) -> PieceLogprobs | None:
    """Of the tokens of all parts, which are of one answer; None of none."""
    if not parts:
        return None
    ids, values = b"".join([one.ids for one in parts]), b"".join([one.values for one in parts])
    return PieceLogprobs(parts[0].num_best, ids, values)
