"""What waits for one reader on the server's event loop: pieces that it has not taken, as one.

Before: `process_client.py` puts in what the engine sent. After: a route takes it, whenever its client lets it. Always: what
waits is never more than the request's own text and tokens; the end comes exactly once, as a finished piece or as an error.
"""

from __future__ import annotations

import asyncio

from .engine_client import Piece


class PieceStream:
    """Of one request. Used on one event loop only."""

    __slots__ = ("_bell", "_error", "_latest", "_texts", "_token_ids", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        """Its end has come; perhaps nobody took it yet."""
        self._latest: Piece | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._error: Exception | None = None
        self._bell: asyncio.Future[None] | None = None

    def put(self, piece: Piece) -> None:
        """One more piece. After the end it is dropped."""
        if self.is_over:
            return
        if self._latest is not None:
            self._texts.append(self._latest.text)
            self._token_ids += self._latest.token_ids
        self._latest = piece
        self.is_over = piece.finish_reason is not None
        self._ring()

    def fail(self, error: Exception) -> None:
        """End it with an error, which goes before what was not taken. After the end it does nothing."""
        if self.is_over:
            return
        self.is_over = True
        self._error = error
        self._ring()

    async def get(self) -> Piece:
        """What came since the last time, as one piece; waits for it. Raises the error that ended it."""
        while True:
            if self._error is not None:
                raise self._error
            piece = self._latest
            if piece is not None:
                return self._taken(piece)
            self._bell = asyncio.get_running_loop().create_future()
            try:
                await self._bell
            finally:
                self._bell = None

    def _taken(self, piece: Piece) -> Piece:
        self._latest = None
        if self._texts:
            piece.text = "".join([*self._texts, piece.text])
            piece.token_ids = self._token_ids + piece.token_ids
            self._texts, self._token_ids = [], []
        return piece

    def _ring(self) -> None:
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)
