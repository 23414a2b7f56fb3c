"""Promise: a streamed token that is handed over as it is comes to its reader as the output that says the same, merged with what
came before, and never behind the end of its answer. Each planted fault is caught."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from blocktable import RequestOutput, RequestOutputKind
from blocktable.engine.inbox import OutputQueue
from blocktable.engine.mailbox import Mailbox, Outbox, _Unread
from blocktable.engine.outputs import CompletionOutput
from blocktable.server.engine_sender import WireMailbox

NUM_SCRIPTS = 200


class Answer:
    """One sequence of a request, as `LiveRequest` shows itself to an inbox."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_cached = 16

    def output(self, text: str, token_ids: list[int], **ends: Any) -> RequestOutput:
        answer = CompletionOutput(self.index, text, token_ids, finish_reason="length" if ends else None)
        return RequestOutput(
            "r", "prompt", [1, 2], [answer], num_cached_tokens=self.num_cached, finished=ends.get("finished", False)
        )


class Line:
    """Nobody is woken."""

    def post(self, item: Any) -> None:
        pass


def whole(mailbox: WireMailbox) -> Callable[[], Any]:
    """How a reader of this kind takes."""
    if mailbox.kind is RequestOutputKind.DELTA:
        return mailbox.pieces
    return mailbox.take


def plain(taken: Any) -> Any:
    """To compare by value."""
    if isinstance(taken, list):
        return [(one.index, one.text, list(one.token_ids), one.finish_reason, one.num_cached_tokens) for one in taken]
    return taken


def check_many(kind: RequestOutputKind, rng: random.Random) -> None:
    """Random scripts."""
    for _ in range(NUM_SCRIPTS):
        check(kind, rng)


def check(kind: RequestOutputKind, rng: random.Random) -> None:
    """One script: tokens of one to three answers, steps, and takes, once by token and once by output."""
    outbox, line = Outbox(lambda mailbox: None), Line()
    by_token, by_output = (WireMailbox(outbox, "r", kind, 1, line) for _ in range(2))  # type: ignore[arg-type]
    answers: list[Any] = [Answer(index) for index in range(rng.randint(1, 3))]
    live = list(answers)
    while live:
        for answer in rng.sample(live, rng.randint(1, len(live))):
            text, token_id = rng.choice(["", "a", "bc"]), rng.randrange(100)
            if rng.random() < 0.2:
                by_token.append(answer.output(text, [token_id]))
            else:
                by_token.append_token(answer, text, token_id)
            by_output.append(answer.output(text, [token_id]))
            if rng.random() < 0.2:
                live.remove(answer)
                text = rng.choice(["", "rest"])
                for mailbox in (by_token, by_output):
                    mailbox.append(answer.output(text, [], finished=not live))
        outbox.deliver(lambda mailbox: None)
        if rng.random() < 0.5:
            assert plain(whole(by_token)()) == plain(whole(by_output)())
    assert plain(whole(by_token)()) == plain(whole(by_output)())
    assert whole(by_token)() in (None, []), "all was taken"


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_token_comes_as_the_output_that_says_the_same(kind: RequestOutputKind, rng: random.Random) -> None:
    check_many(kind, rng)


def test_who_failed_is_told_nothing_but_the_error() -> None:
    outbox = Outbox(lambda mailbox: None)
    mailbox = WireMailbox(outbox, "r", RequestOutputKind.DELTA, 1, Line())  # type: ignore[arg-type]
    answer: Any = Answer(0)
    mailbox.append_token(answer, "a", 1)
    outbox.deliver(lambda mailbox: None)
    mailbox.fail(ValueError("broken"))
    mailbox.append_token(answer, "b", 2)
    outbox.deliver(lambda mailbox: None)
    with pytest.raises(ValueError, match="broken"):
        mailbox.pieces()


def test_a_step_that_went_wrong_shows_no_token() -> None:
    outbox = Outbox(lambda mailbox: None)
    mailbox = WireMailbox(outbox, "r", RequestOutputKind.DELTA, 1, Line())  # type: ignore[arg-type]
    answer: Any = Answer(0)
    mailbox.append_token(answer, "a", 1)
    outbox.drop()
    outbox.deliver(lambda mailbox: None)
    assert mailbox.pieces() == []


def test_a_queue_has_outputs_as_they_came() -> None:
    queue, answer = OutputQueue(), Answer(0)
    queue.append_token(answer, "a", 1)  # type: ignore[arg-type]
    queue.append(answer.output("b", [2], finished=True))
    assert [(one.outputs[0].text, one.finished) for one in queue] == [("a", False), ("b", True)]


def _first_answer_only(mailbox: Mailbox) -> Any:
    told = _take_tokens(mailbox)
    return None if told is None else (told[0], told[1][:1])


def _with_what_was_told(unread: _Unread) -> tuple[str, list[int]]:
    unread.has_new = False
    return "".join(unread.pieces), list(unread.token_ids)


def _newest_alone(unread: _Unread, text: str, token_id: int) -> None:
    unread.pieces, unread.token_ids, unread.has_new = [text], [token_id], True


def _behind_what_came_next(unread: _Unread, text: str, token_id: int) -> None:
    unread.pieces.append(text)
    unread.token_ids.append(token_id)
    unread.has_new = True


def _ends_first(outbox: Outbox, on_end: Any) -> None:
    tokens, outbox._tokens = outbox._tokens, []
    _deliver(outbox, on_end)
    outbox._tokens = tokens
    _deliver(outbox, on_end)


def _without_count(mailbox: Mailbox) -> Any:
    told = _take_tokens(mailbox)
    return None if told is None else (None, told[1])


_take_tokens, _deliver = Mailbox.take_tokens, Outbox.deliver

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
FAULTS: dict[str, tuple[RequestOutputKind, Any, str, Any]] = {
    "one answer's tokens are taken, the others' are lost": (DELTA, Mailbox, "take_tokens", _first_answer_only),
    "what was told is told again": (DELTA, _Unread, "take_tokens", _with_what_was_told),
    "the newest token alone is kept": (CUMULATIVE, _Unread, "put_token", _newest_alone),
    "what came whole is told behind the tokens that came next": (DELTA, _Unread, "put_token", _behind_what_came_next),
    "an end goes before the last token": (DELTA, Outbox, "deliver", _ends_first),
    "a piece forgets the cached tokens": (DELTA, Mailbox, "take_tokens", _without_count),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, where, name, planted = FAULTS[fault]
    monkeypatch.setattr(where, name, planted)
    with pytest.raises(AssertionError):
        check_many(kind, rng)
