"""What waits for one reader: at most one output, into which those that come later are merged.

Before: the step loop hands outputs to a mailbox, step by step; `Outbox` holds a step's until it has gone well. After: a reader
on an event loop, or on a thread, takes what there is, whenever it comes. Always: a reader, however slow, holds up nobody; what
waits for it is never more than its request's text and tokens; it is told of the end exactly once, by an output or by an error.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..sampling.params import RequestOutputKind
from .outputs import CompletionOutput, RequestOutput
from .token_logprobs import TokenLogprobs

if TYPE_CHECKING:
    from .live_request import LiveRequest


class _Unread:
    """Of one answer: the newest output, and what it is to be told together with: what came since its reader took the last of
    it, and, unless that is all that the reader wants, before."""

    __slots__ = ("has_new", "index", "latest", "logprobs", "pieces", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: TokenLogprobs | None = None
        self.latest: CompletionOutput | None = None
        self.has_new = False

    def put(self, answer: CompletionOutput) -> None:
        """What came next."""
        if self.latest is not None:
            self._keep(self.latest)
        self.latest = answer
        self.has_new = True

    def put_token(self, text: str, token_id: int) -> None:
        """The same, of an answer that has nothing but text and tokens so far."""
        if self.latest is not None:  # as the first token of a second answer comes
            self._keep(self.latest)
            self.latest = None
        self.pieces.append(text)
        self.token_ids.append(token_id)
        self.has_new = True

    def take_tokens(self) -> tuple[str, list[int]]:
        """All of it, which was put in token by token."""
        pieces, token_ids = self.pieces, self.token_ids
        self.pieces, self.token_ids, self.has_new = [], [], False
        return pieces[0] if len(pieces) == 1 else "".join(pieces), token_ids

    def take(self, *, is_delta: bool) -> CompletionOutput:
        """It, as one; there has to be something new."""
        answer = CompletionOutput(self.index, "", []) if self.latest is None else self.latest
        self.latest, self.has_new = None, False
        if self.pieces:
            self._keep(answer)
            answer.text, answer.token_ids, answer.token_logprobs = "".join(self.pieces), self.token_ids, self.logprobs
            self.pieces, self.token_ids, self.logprobs = [], [], None
        if not is_delta:
            # The reader's own lists: it may keep them, or change them.
            self.pieces, self.token_ids = [answer.text], list(answer.token_ids)
            self.logprobs = None if answer.token_logprobs is None else answer.token_logprobs.copy()
        return answer

    def _keep(self, answer: CompletionOutput) -> None:
        self.pieces.append(answer.text)
        self.token_ids.extend(answer.token_ids)
        if answer.token_logprobs is not None:
            if self.logprobs is None:
                self.logprobs = TokenLogprobs(answer.token_logprobs.num_best)
            self.logprobs.extend(answer.token_logprobs)


class Mailbox(ABC):
    """Of one request. The step thread puts, one reader takes."""

    def __init__(self, outbox: Outbox, request_id: str, kind: RequestOutputKind) -> None:
        self.request_id = request_id
        self._outbox = outbox
        self.kind = kind
        self._lock = threading.Lock()
        self._latest: RequestOutput | None = None  # not taken yet
        self._source: LiveRequest | None = None  # of tokens that were not taken yet
        self._unread: dict[int, _Unread] = {}  # by the answer's index
        self._error: Exception | None = None
        self._is_ended = False
        self._is_called = False  # the reader was woken and has not come yet

    def append(self, output: RequestOutput) -> None:
        """One more output of a step that is not over yet: see `Outbox.deliver`."""
        self._outbox.hold(self, output)

    def append_token(self, request: LiveRequest, text: str, token_id: int) -> None:
        """See `Inbox`: a token of a step that is not over yet."""
        self._outbox.hold_token(self, request, text, token_id)

    def put(self, output: RequestOutput) -> bool:
        """Merge one more output; returns whether the reader has to be woken. After the end it is dropped."""
        with self._lock:
            if self._is_ended:
                return False
            for answer in output.outputs:
                self._unread_of(answer.index).put(answer)
            self._latest = output
            self._is_ended = output.finished
            return self._call()

    def put_token(self, request: LiveRequest, text: str, token_id: int) -> bool:
        """The same of `request.output(text, [token_id])`, which nothing but text and tokens came before."""
        with self._lock:
            if self._is_ended:
                return False
            self._unread_of(request.index).put_token(text, token_id)
            self._source = request
            return self._call()

    def fail(self, error: Exception) -> bool:
        """End it with an error, which the reader meets next; returns whether the reader has to be woken. After the end it does
        nothing."""
        with self._lock:
            if self._is_ended:
                return False
            self._latest = self._source = None
            self._error = error
            self._is_ended = True
            return self._call()

    def take(self) -> RequestOutput | None:
        """What came since the last time as one output, or None. Raises the error that ended it."""
        with self._lock:
            self._is_called = False
            if self._error is not None:
                raise self._error
            output, source = self._latest, self._source
            self._latest = self._source = None
            if output is None:
                if source is None:
                    return None
                output = source.output("", [])
            is_delta = self.kind is RequestOutputKind.DELTA
            output.outputs = [unread.take(is_delta=is_delta) for unread in self._with_new()]
            return output

    def take_tokens(self) -> tuple[int | None, list[tuple[int, str, list[int]]]] | None:
        """The same for a reader of what is new alone, where that is tokens: how many of the prompt were cached, and for each
        answer its index, text and tokens. None, and nothing is taken, if anything else came, or nothing."""
        with self._lock:
            source = self._source
            if source is None or self._latest is not None:
                return None
            self._is_called = False
            self._source = None
            return source.num_cached, [(one.index, *one.take_tokens()) for one in self._with_new()]

    def _with_new(self) -> list[_Unread]:
        """The answers of which something came, in their order."""
        if len(self._unread) == 1:  # then it is that one's
            return list(self._unread.values())
        return [self._unread[index] for index in sorted(self._unread) if self._unread[index].has_new]

    def _unread_of(self, index: int) -> _Unread:
        unread = self._unread.get(index)
        if unread is None:
            unread = self._unread[index] = _Unread(index)
        return unread

    def _call(self) -> bool:
        is_first, self._is_called = not self._is_called, True
        return is_first

    @property
    @abstractmethod
    def line(self) -> Hashable:
        """What its reader listens to: all that have the same one are woken at once."""

    @abstractmethod
    def wake(self, mailboxes: Sequence[Mailbox]) -> None:
        """Wake the readers of these: it and others that have its line. Raises `RuntimeError` if they can never come."""


class AsyncMailbox(Mailbox):
    """Its reader waits on the event loop that it was made on."""

    def __init__(self, outbox: Outbox, request_id: str, kind: RequestOutputKind) -> None:
        super().__init__(outbox, request_id, kind)
        self._event_loop = asyncio.get_running_loop()
        self._bell = asyncio.Event()

    @property
    def line(self) -> asyncio.AbstractEventLoop:
        """The event loop."""
        return self._event_loop

    async def get(self) -> RequestOutput:
        """What comes next. Raises the error that ended it."""
        while True:
            # Nothing is awaited between this and the wait, and the bell rings on this event loop only: no call is lost.
            self._bell.clear()
            output = self.take()
            if output is not None:
                return output
            await self._bell.wait()

    def wake(self, mailboxes: Sequence[Any]) -> None:
        """From any thread."""
        self._event_loop.call_soon_threadsafe(_ring, mailboxes)

    def ring(self) -> None:
        """On its event loop only."""
        self._bell.set()


def _ring(mailboxes: Iterable[AsyncMailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.ring()


class BlockingMailbox(Mailbox):
    """Its reader is a thread that sleeps."""

    def __init__(self, outbox: Outbox, request_id: str, kind: RequestOutputKind) -> None:
        super().__init__(outbox, request_id, kind)
        self._bell = threading.Event()

    def get(self) -> RequestOutput:
        """What comes next. Raises the error that ended it."""
        while True:
            self._bell.clear()
            output = self.take()
            if output is not None:
                return output
            self._bell.wait()

    @property
    def line(self) -> BlockingMailbox:
        """Its own."""
        return self

    def wake(self, mailboxes: Sequence[Mailbox]) -> None:
        """From any thread."""
        self._bell.set()


class Outbox:
    """The outputs of the step under way. Used by the step thread alone, but for `ring`."""

    def __init__(self, on_lost: Callable[[Mailbox], None]) -> None:
        """`on_lost` gets those whose reader can never come: its event loop is closed."""
        self._held: list[tuple[Mailbox, RequestOutput]] = []
        self._tokens: list[tuple[Mailbox, LiveRequest, str, int]] = []  # of a request they come before what ends it
        self._on_lost = on_lost

    def hold(self, mailbox: Mailbox, output: RequestOutput) -> None:
        """Keep an output until its step has gone well."""
        self._held.append((mailbox, output))

    def hold_token(self, mailbox: Mailbox, request: LiveRequest, text: str, token_id: int) -> None:
        """The same for a token."""
        self._tokens.append((mailbox, request, text, token_id))

    def drop(self) -> None:
        """The step went wrong: nobody sees what it brought."""
        self._held.clear()
        self._tokens.clear()

    def deliver(self, on_end: Callable[[Mailbox], None]) -> None:
        """The step went well: give everybody theirs, and wake each event loop once. `on_end` gets those that have ended, before
        their readers can know."""
        held, self._held = self._held, []
        tokens, self._tokens = self._tokens, []
        called = [mailbox for mailbox, request, text, token_id in tokens if mailbox.put_token(request, text, token_id)]
        for mailbox, output in held:
            if output.finished:
                on_end(mailbox)
            if mailbox.put(output):
                called.append(mailbox)
        self.ring(called)

    def ring(self, mailboxes: Iterable[Mailbox]) -> None:
        """Wake the readers of these."""
        together: dict[Hashable, list[Mailbox]] = {}
        for mailbox in mailboxes:
            together.setdefault(mailbox.line, []).append(mailbox)
        for sleepers in together.values():
            try:
                sleepers[0].wake(sleepers)
            except RuntimeError:
                for mailbox in sleepers:
                    self._on_lost(mailbox)
