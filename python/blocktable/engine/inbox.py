"""Where the outputs of a request go: what a caller gives along with it, and the plainest one.

Before: `step_loop.py` is given one with each request. After: `live_request.py` puts in what steps bring, oldest first. Always:
putting never waits.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from .outputs import RequestOutput

if TYPE_CHECKING:
    from .live_request import LiveRequest


class Inbox(Protocol):
    """Where a caller takes the outputs of its own requests from: a queue, or a mailbox."""

    def append(self, output: RequestOutput, /) -> None:
        """Take one more."""

    def append_token(self, request: LiveRequest, text: str, token_id: int, /) -> None:
        """Take `request.output(text, [token_id])`, as most outputs of a stream are: it need not be made before it is read."""


class OutputQueue(deque[RequestOutput]):
    """Outputs as they came."""

    def append_token(self, request: LiveRequest, text: str, token_id: int, /) -> None:
        """See `Inbox`."""
        self.append(request.output(text, [token_id]))
