"""The text of one request: its output tokens in, the text that may be shown out.

Before: `hand_out.py` pushes the tokens of each commit. After: the caller's stream and `CompletionOutput.text`.
Always: the shown pieces together are `text`, which only grows and is, at the end, the decode of all output tokens in the
context of the prompt, cut at the first stop string. However tokens come in chunks, the same text is shown in the end and
the same token ends it.
"""

from __future__ import annotations

from ..sampling.params import ResolvedSampling
from .detokenizer import Detokenizer, TokenIds, start_detokenizer
from .stop_strings import StopStrings
from .tokenizer import Tokenizer


class OutputText:
    """Detokenizes one request's output and watches for its stop strings. One thread at a time.

    `num_tokens` counts the output tokens taken in: after a stop string that came inside a chunk, those up to the one that
    completed it; the caller drops the rest. `stop_string` is the one that ended the text, or None.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: TokenIds, resolved: ResolvedSampling) -> None:
        """Without a tokenizer, or with `detokenize` off, there is no text and nothing but tokens ends the request."""
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and resolved.detokenize:
            self._detokenizer = start_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=resolved.skip_special_tokens)
        self._stops = StopStrings(resolved.stop, include_in_output=resolved.include_stop_str_in_output)
        self._include_stop = resolved.include_stop_str_in_output
        self._min_tokens = resolved.min_tokens
        self._pieces: list[str] = []
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """All that has been shown so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stops.match is None else self._stops.match.stop

    def push(self, token_ids: TokenIds, *, ended_by_token: bool = False) -> str:
        """Take the next output tokens; returns the text to show now, perhaps none.

        `ended_by_token`: the last of them is an end token, whose own text is left out unless stop strings are to be shown.
        Stop strings count from the token on that comes after `min_tokens` others. Afterwards, if `stop_string` is set, the
        request has ended there (`Scheduler.finish`); nothing more is pushed then.
        """
        last = len(token_ids) - 1
        if last == 0:
            return self._show(self._take(token_ids[0], is_said=self._include_stop or not ended_by_token))
        shown = [
            self._take(token_id, is_said=self._include_stop or not (ended_by_token and place == last))
            for place, token_id in enumerate(token_ids)
        ]
        return self._show("".join(shown))

    def push_token(self, token_id: int) -> str:
        """The same for one token that ends nothing, of a request without stop strings."""
        self.num_tokens += 1
        piece = "" if self._detokenizer is None else self._detokenizer.push_token(token_id)
        if piece:
            self._pieces.append(piece)
        return piece

    def finish(self) -> str:
        """The request has ended: returns the text that was held back, if no stop string had ended it.

        What the end makes whole can itself complete a stop string (one with U+FFFD in it); the text is cut there too.
        """
        if self._detokenizer is None or self._stops.match is not None:
            return ""
        rest = self._stops.push(self._detokenizer.finish(), may_stop=self.num_tokens > self._min_tokens)
        return self._show(rest + self._stops.finish())

    def _take(self, token_id: int, *, is_said: bool) -> str:
        """One token, with its text or without: what of it can be shown."""
        if self._stops.match is not None:
            return ""
        self.num_tokens += 1
        if self._detokenizer is None or not is_said:
            return ""
        piece = self._detokenizer.push_token(int(token_id))
        return self._stops.push(piece, may_stop=self.num_tokens > self._min_tokens)

    def _show(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
