"""Promise: the step thread hands over and stands in nobody's way: a launch comes back when the model's thread has taken it up,
and the readers of a step are woken once for each line that they listen to. Each check has a planted fault that it catches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from blocktable import RequestOutput, RequestOutputKind
from blocktable.engine.mailbox import Mailbox, Outbox
from blocktable.engine.model_runs import ThreadRun, ThreadRuns
from blocktable.engine.outputs import CompletionOutput
from blocktable.server.engine_sender import WireMailbox

SOON_S = 0.3
DELTA = RequestOutputKind.DELTA


def check_launch() -> None:
    """While the model's thread is busy, who launches the next pass sleeps; both passes bring what is theirs."""
    runs, may_end = ThreadRuns(), threading.Event()
    launched: list[ThreadRun] = []

    def busy() -> torch.Tensor:
        may_end.wait()
        return torch.zeros(1)

    first = runs.launch(busy)
    launching = threading.Thread(target=lambda: launched.append(runs.launch(lambda: torch.ones(2))))
    try:
        launching.start()
        launching.join(SOON_S)
        assert launching.is_alive(), "it came back before its pass had begun"
    finally:
        may_end.set()
        launching.join()
        results = [run.result().tolist() for run in (first, *launched)]
        runs.close()
    assert results == [[0.0], [1.0, 1.0]]


def check_second_end() -> None:
    """An end that failed is tried again: the second one has nobody to wait for."""
    runs = ThreadRuns()
    runs.close()
    ending = threading.Thread(target=lambda: (runs.settle(), runs.close()), daemon=True)
    ending.start()
    ending.join(SOON_S)
    assert not ending.is_alive(), "it waits for a thread that has ended"


class Line:
    """A sender that keeps what is posted."""

    def __init__(self) -> None:
        self.posts: list[Sequence[Mailbox]] = []

    def post(self, item: Sequence[Mailbox]) -> None:
        self.posts.append(item)


def check_wakes() -> None:
    """Two senders, three readers each: two posts."""
    outbox = Outbox(lambda mailbox: None)
    lines: list[Any] = [Line(), Line()]
    mailboxes = [WireMailbox(outbox, str(number), DELTA, number, lines[number % 2]) for number in range(6)]
    for mailbox in mailboxes:
        mailbox.append(RequestOutput(mailbox.request_id, None, [1], [CompletionOutput(0, "a", [5])], finished=False))
    outbox.deliver(lambda mailbox: None)
    assert [line.posts for line in lines] == [[mailboxes[0::2]], [mailboxes[1::2]]]
    assert [piece.text for mailbox in mailboxes for piece in mailbox.pieces()] == ["a"] * 6
    outbox.deliver(lambda mailbox: None)
    assert [len(line.posts) for line in lines] == [1, 1], "nothing came, and they were woken"


def test_a_launch_comes_back_when_the_models_thread_has_taken_it_up() -> None:
    check_launch()


def test_a_second_end_waits_for_nobody() -> None:
    check_second_end()


def test_the_readers_of_a_step_are_woken_once_a_line() -> None:
    check_wakes()


FAULTS = {
    "the launcher does not wait": (ThreadRun, "wait_for_begin", lambda run: None, check_launch),
    "a pass is launched for a thread that has ended": (
        ThreadRuns,
        "settle",
        lambda runs: runs.launch(lambda: torch.empty(0)).result(),
        check_second_end,
    ),
    "each reader is woken by itself": (WireMailbox, "line", property(lambda mailbox: mailbox), check_wakes),
    "a reader is woken again for nothing": (Outbox, "deliver", lambda box, on_end: _deliver_twice(box, on_end), check_wakes),
}

_deliver = Outbox.deliver


def _deliver_twice(outbox: Outbox, on_end: Any) -> None:
    called = [mailbox for mailbox, _ in outbox._held]
    _deliver(outbox, on_end)
    outbox.ring(called)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, planted, check = FAULTS[fault]
    monkeypatch.setattr(where, name, planted)
    with pytest.raises(AssertionError):
        check()  # type: ignore[operator]
