"""Where a text ends is a property of the text, not of how it came; what was shown is never taken back."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blocktable.text.stop_strings import StopAutomaton, StopMatch, StopStrings

Make = Callable[..., StopStrings]

STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4).map(tuple)
PIECES = st.lists(st.tuples(st.text(alphabet="ab\n", max_size=4), st.booleans()), max_size=14)


def first_stop(pieces: Iterable[tuple[str, bool]], stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the text ends and what ends it: the first character that completes a stop in a piece that may stop; the longest."""
    text = ""
    for piece, may_stop in pieces:
        for character in piece:
            text += character
            done = [stop for stop in stops if text.endswith(stop)]
            if done and may_stop:
                return len(text), max(done, key=len)
    return None


def check(pieces: list[tuple[str, bool]], stops: tuple[str, ...], *, include: bool, make: Make = StopStrings) -> None:
    """The promise, for one text in pieces; `make` makes the watcher, or a faulty one."""
    watcher = make(stops, include_in_output=include)
    whole = "".join(piece for piece, _ in pieces)
    found = first_stop(pieces, stops)
    right = whole if found is None else whole[: found[0] if include else found[0] - len(found[1])]
    shown, seen = "", ""
    for piece, may_stop in pieces:
        shown += watcher.push(piece, may_stop=may_stop)
        seen += piece
        assert right.startswith(shown), "what was shown must stay"
        if watcher.match is None:
            held = seen[len(shown) :]
            assert seen.startswith(shown)
            assert not held or (not include and any(stop.startswith(held) for stop in stops)), "held back without need"
    assert watcher.match == (None if found is None else StopMatch(found[1]))
    assert shown + watcher.finish() == right


def in_pieces(text: str, rng: random.Random) -> Iterator[tuple[str, bool]]:
    place = 0
    while place < len(text):
        size = rng.randint(0, 6)
        yield text[place : place + size], True
        place += size


@given(pieces=PIECES, stops=STOPS, include=st.booleans())
@example(pieces=[("aba", True), ("b", True)], stops=("abab", "ba"), include=False)
@example(pieces=[("ab", False), ("ab", True)], stops=("ab",), include=False)
def test_any_text_in_any_pieces_is_cut_at_its_first_stop(
    pieces: list[tuple[str, bool]], stops: tuple[str, ...], include: bool
) -> None:
    check(pieces, stops, include=include)


def test_the_same_text_ends_at_the_same_place_however_it_is_cut(rng: random.Random) -> None:
    stops = ("###", "\n\nUser:", "END", "END OF TEXT", "日本", "ser: x")
    texts = ["a ## b ### c", "x\n\nUsher\n\nUser: x", "THE END OF TEXT", "東日日本", "no stop at all ##", "\n\nUser"]
    for text in texts:
        for _ in range(40):
            check(list(in_pieces(text, rng)), stops, include=False)
            check(list(in_pieces(text, rng)), stops, include=True)


def test_of_two_stops_the_one_completed_first_counts_whatever_their_order() -> None:
    for stops in (("abcd", "bc"), ("bc", "abcd")):
        watcher = StopStrings(stops)
        assert watcher.push("xabcd") == "xa"
        assert watcher.match == StopMatch("bc")


def test_of_two_stops_completed_by_one_character_the_longest_counts() -> None:
    watcher = StopStrings(("c", "abc"))
    assert watcher.push("xab") == "x"
    assert watcher.push("c") == ""
    assert watcher.match == StopMatch("abc")


def test_text_that_only_looked_like_a_stop_comes_out_as_soon_as_it_cannot_become_one() -> None:
    watcher = StopStrings(("<|end|>",))
    assert watcher.push("a <|en") == "a "
    assert watcher.push("dless") == "<|endless"
    assert watcher.push(" <") == " "
    assert watcher.finish() == "<"


def test_after_a_stop_nothing_is_shown_any_more() -> None:
    watcher = StopStrings(("stop",))
    assert watcher.push("now stop here") == "now "
    assert watcher.push("more") == ""
    assert watcher.finish() == ""


def test_without_stops_text_passes_as_it_is() -> None:
    watcher = StopStrings(())
    assert watcher.push("anything") == "anything"
    assert watcher.finish() == ""


def test_the_longest_allowed_stops_cost_one_step_a_character() -> None:
    stops = tuple("a" * 255 + chr(0x100 + i) for i in range(32))
    automaton = StopAutomaton(stops)
    assert len(automaton.steps) == 1 + 255 + 32  # equal beginnings are kept once
    check([("a" * 1000, True), (chr(0x105), True)], stops, include=False)


# Faults that have been seen elsewhere; each must fail the promise.


class NothingHeld(StopStrings):
    """Pieces of a stop leak."""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        before = self._held
        shown = super().push(piece, may_stop=may_stop)
        return (shown + self._held)[len(before) :] if self.match is None else shown[len(before) :]


class ShownAgain(StopStrings):
    """What was held is shown once more at the end, after a match too."""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        self.tail = self._held + piece
        return super().push(piece, may_stop=may_stop)

    def finish(self) -> str:
        return self.tail if self.match is not None else super().finish()


class InsidePieces(StopStrings):
    """Stops are looked for in each piece alone."""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        rest = self.finish()
        self._state = 0
        return rest + super().push(piece, may_stop=may_stop)


class InListOrder(StopStrings):
    """The first stop of the list that is in the text wins."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        super().__init__(stops, include_in_output=include_in_output)
        self.stops = stops

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        if self.match is None and may_stop:
            text = self._held + piece
            for stop in self.stops:
                if (place := text.find(stop)) >= 0:
                    self.match = StopMatch(stop)
                    return text[: place + len(stop) * self._include]
        return super().push(piece, may_stop=may_stop)


class FixedLengthHeld(StopStrings):
    """As many characters as the longest stop has are held, needed or not."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        super().__init__(stops, include_in_output=include_in_output)
        self.longest, self.late = max(map(len, stops), default=1) - 1, ""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        text = self.late + super().push(piece, may_stop=may_stop)
        if self.match is not None:
            return text
        shown = max(len(text) + len(self._held) - self.longest, 0)
        self.late = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        return self.late + super().finish()


class StopsTooEarly(StopStrings):
    """Stop strings count before `min_tokens`."""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        return super().push(piece, may_stop=True)


class ForgetsWhatBegan(StopStrings):
    """Text that came before `min_tokens` cannot begin a stop."""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        shown = super().push(piece, may_stop=may_stop)
        if may_stop:
            return shown
        self._state = 0
        return shown + self.finish()


@pytest.mark.parametrize(
    "fault", [NothingHeld, ShownAgain, InsidePieces, InListOrder, FixedLengthHeld, StopsTooEarly, ForgetsWhatBegan]
)
def test_a_faulty_watcher_is_caught(fault: Make, rng: random.Random) -> None:
    def text(longest: int, least: int = 0) -> str:
        return "".join(rng.choice("ab\n") for _ in range(rng.randint(least, longest)))

    def check_many() -> None:
        for _ in range(2000):
            pieces = [(text(4), rng.random() < 0.7) for _ in range(rng.randint(1, 8))]
            stops = tuple(dict.fromkeys(text(4, 1) for _ in range(rng.randint(1, 3))))
            check(pieces, stops, include=rng.random() < 0.3, make=fault)

    with pytest.raises(AssertionError):
        check_many()
