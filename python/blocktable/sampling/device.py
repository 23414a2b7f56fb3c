"""What sampling computes where the logits lie, if numpy cannot read them there: on a GPU.

Before: `sampler.py` knows the rows. After: one read brings everything that a step's greedy entries need. Always: nothing here
waits for the device but `best`, and what is sent there goes in one copy for each kind; the arithmetic is that of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .logprobs import LOWEST_LOGPROB, StepLogprobs
from .row_rules import RowRules

Ids = NDArray[np.int64] | NDArray[np.intp]


def sent(numbers: NDArray[np.generic], logits: torch.Tensor) -> torch.Tensor:
    """`numbers` where the logits are, without a wait for them."""
    tensor = torch.from_numpy(numbers)
    return (tensor.pin_memory() if logits.is_cuda else tensor).to(logits.device, non_blocking=True)


def mask(logits: torch.Tensor, entries: Ids, ids: Ids) -> None:
    """These tokens of these entries, which numpy would broadcast, cannot be chosen."""
    with torch.inference_mode():  # logits made in that mode may be written in no other
        logits[sent(entries, logits), sent(ids, logits)] = -torch.inf


def keep(logits: torch.Tensor, entries: Ids, allowed: NDArray[np.bool_]) -> None:
    """Only what is `allowed` [entries, vocab] of these entries can be chosen."""
    places, kept = sent(entries, logits), sent(allowed, logits)
    with torch.inference_mode():
        logits[places] = logits[places].masked_fill(~kept, -torch.inf)


def apply(logits: torch.Tensor, rules: Sequence[tuple[int, RowRules]]) -> None:
    """What `RowRules.apply` does, to each of these (entry, its rules)."""
    allowed = [(entry, one.allowed) for entry, one in rules if one.allowed is not None]
    if allowed:
        entries, ids = _flat(allowed, logits)
        rows = sent(np.array([entry for entry, _ in allowed], dtype=np.int64), logits)
        with torch.inference_mode():
            kept = logits[entries, ids]
            logits[rows] = -torch.inf
            logits[entries, ids] = kept
    banned = [(entry, np.array(words, dtype=np.int64)) for entry, one in rules if (words := one.banned())]
    if banned:
        entries, ids = _flat(banned, logits)
        with torch.inference_mode():
            logits[entries, ids] = -torch.inf
    changed = [(entry, one.changes()) for entry, one in rules]
    changed = [(entry, changes) for entry, changes in changed if changes.ids.size]
    if changed:
        entries, ids = _flat([(entry, changes.ids) for entry, changes in changed], logits)
        terms = np.concatenate([np.stack(changes[1:]) for _, changes in changed], axis=1)
        add, divide, subtract = sent(terms, logits)
        with torch.inference_mode():
            values = logits[entries, ids] + add
            logits[entries, ids] = torch.where(values > 0, values / divide, values * divide) - subtract


def _flat(of_entries: Sequence[tuple[int, NDArray[np.int64]]], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entry and token id of every token of these lists, where the logits are."""
    entries = np.repeat([entry for entry, _ in of_entries], [len(ids) for _, ids in of_entries])
    places = sent(np.stack([entries.astype(np.int64), np.concatenate([ids for _, ids in of_entries])]), logits)
    return places[0], places[1]


def best(
    logits: torch.Tensor, more: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda indices: ()
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int32]]:
    """[K] the lowest id of each entry's largest logit, and that logit; NaN counts as largest. Then what `more` makes of those
    ids, of int32, flat one after the other. Waits for the step."""
    values, indices = logits.max(dim=1)
    count = len(values)
    # Side by side, so that one read brings all: it waits for the whole step.
    whole = [values.view(torch.int32), indices.to(torch.int32), *(part.flatten() for part in more(indices))]
    numbers = torch.cat(whole).cpu().numpy()
    return numbers[count : 2 * count].astype(np.int64), numbers[:count].view(np.float32), numbers[2 * count :]


class Raw:
    """Logits of the entries that ask for log probabilities, as the model gave them: made before any is changed. Those of greedy
    entries are read where they are; those of entries that are drawn come to the host, as their drawing does."""

    def __init__(self, told: StepLogprobs, logits: torch.Tensor, is_drawn: NDArray[np.bool_]) -> None:
        """`told` has the entries, `is_drawn` [R] tells which of them are."""
        self._told = told
        self._greedy = np.flatnonzero(~is_drawn)
        self.places = np.flatnonzero(is_drawn).tolist()
        """Of the rows on the host among the entries that ask."""
        self.rows: list[NDArray[np.float32]] = []
        """They themselves, after `best`."""
        order = told.entries[np.concatenate([self._greedy, np.array(self.places, dtype=np.intp)])].astype(np.int64)
        self._index = sent(order, logits)
        raw = logits[self._index]
        self._raw, self._drawn = raw[: len(self._greedy)], raw[len(self._greedy) :]
        # Apart, since beside a logit of thousands the rest has few bits. Of a row that has no log-softmax one of them is NaN.
        self._largest = self._raw.amax(dim=1, keepdim=True)
        self._rest = torch.logsumexp(self._raw - self._largest, dim=1, keepdim=True)
        self._top = _top(self._raw, told.ids.shape[1] - 1)

    def best(self, logits: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """What `best` gives of the changed logits. Fills in what the greedy entries are told."""
        found, largest, numbers = best(logits, self._parts)
        told, greedy = self._told, self._greedy
        shape = len(greedy), told.ids.shape[1]
        size = shape[0] * shape[1]
        ids, values, ranks, drawn = np.split(numbers, np.cumsum([size, size, len(greedy)]))
        told.ids[greedy] = ids.reshape(shape)
        told.values[greedy] = values.view(np.float32).reshape(shape)
        told.ranks[greedy] = ranks
        self.rows = list(drawn.view(np.float32).reshape(len(self.places), -1)) if self.places else []
        return found, largest

    def _parts(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Of the greedy entries, whose choice is among `indices`: ids, values, ranks; then the rows of those that are drawn."""
        chosen = indices[self._index[: len(self._greedy)]].unsqueeze(1)
        logit = self._raw.gather(1, chosen)
        before = (self._raw == logit) & (torch.arange(self._raw.shape[1], device=chosen.device) < chosen)
        ranks = 1 + (self._raw > logit).sum(dim=1) + before.sum(dim=1)
        ids = torch.cat((chosen, self._top), dim=1)
        values = (self._raw.gather(1, ids) - self._largest - self._rest).clamp_min(LOWEST_LOGPROB)
        return [ids.to(torch.int32), values.view(torch.int32), ranks.to(torch.int32), self._drawn.view(torch.int32)]


def _top(raw: torch.Tensor, most: int) -> torch.Tensor:
    """[R, most] the best tokens in their order. `topk` leaves the order of equal ones open, so they are told apart: a key has
    the logit's bits, in an order that whole numbers have too, before the id's."""
    bits = (raw + 0.0).view(torch.int32)  # -0.0 is 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    last = raw.shape[1] - 1
    falling = last - torch.arange(raw.shape[1], device=raw.device)
    return last - ((order << 32) + falling).topk(most, dim=1).values.remainder(2**32)
