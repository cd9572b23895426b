"""Which rows the caches of target and draft hold: those that run and, until their place is needed, those that ended.

Of L tokens that a row shares with another, L-1 are taken over: draft row L-1 pairs the last shared feature with the
first token that differs. Running that one token again also brings back its aux, so nothing is stored for it.

    shared tokens     x_0    x_1    x_2   |
    draft rows           x_1    x_2    ?           row t pairs x_{t+1} with aux_t
"""

import torch
from torch import Tensor

from aquiline.decode.drafter import Drafter, Row
from aquiline.model.kv_cache import KVCache

_SHORT = 64  # tokens: an ended row that would lose no more is taken over where it stands, else copied


class Slots:
    """The rows of both caches, which hold the same tokens but for those that the draft has not read yet."""

    def __init__(self, cache: KVCache, drafter: Drafter | None, num_slots: int) -> None:
        self._cache, self._drafter, self._num_slots = cache, drafter, num_slots
        self._running: dict[int, Row] = {}  # by slot
        # By slot, the one that was of use longest ago first: what they know, and the aux that the draft has not read.
        self._ended: dict[int, tuple[list[int], list[Tensor]]] = {}

    def enter(self, row: Row, most: int, spare: int) -> int:
        """Give a row its slot, one of which does not run, and of its first `most` tokens those that are cached already;
        how many. `spare`: how many tokens ended rows may keep; who has not been of use for longest goes first.
        """
        source, shared = self._longest_shared(row, most)
        moves_in = source in self._ended and self._cache.lengths[source] - shared <= _SHORT
        pending = self._pending(source)
        if source in self._ended:
            self._ended[source] = self._ended.pop(source)
        if moves_in:
            del self._ended[source]
        while self._held() > spare or not (moves_in or self._free()):
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            if oldest == source:
                moves_in = True
            else:
                self._truncate(oldest, 0)
        row.slot = source if moves_in else self._free()[0]
        self._running[row.slot] = row
        if moves_in:
            self._truncate(source, shared)
        elif shared:
            self._cache.copy(source, row.slot, shared)
            if self._drafter is not None:
                self._drafter.copy(source, row.slot, shared)
        if self._drafter is not None and row.tree is not None:
            row.pending_aux = _first(pending, shared - self._drafter.length(row.slot))
        return shared

    def leave(self, row: Row, *, keep: bool) -> None:
        """Take the slot of a row that ends or waits. `keep`: what it knows may be of use to others."""
        if row.slot < 0:  # an exception has kept it from entering
            return
        del self._running[row.slot]
        self._truncate(row.slot, len(row.known) - 1 if keep else 0)  # without what stood behind a stop
        if have := self._cache.lengths[row.slot]:
            unread = have - self._drafter.length(row.slot) if self._drafter is not None else 0
            self._ended[row.slot] = row.known, _first(row.pending_aux, unread)
        row.slot, row.pending_aux = -1, []

    def shrink(self, spare: int) -> None:
        """Leave ended rows no more than so many tokens."""
        while self._held() > spare:
            slot = next(iter(self._ended))
            del self._ended[slot]
            self._truncate(slot, 0)

    def _held(self) -> int:
        return sum(self._cache.lengths[slot] for slot in self._ended)

    def _free(self) -> list[int]:
        return [s for s in range(self._num_slots) if s not in self._running and s not in self._ended]

    def _longest_shared(self, row: Row, most: int) -> tuple[int, int]:
        """(slot of the row that has most of use, how many tokens); (-1, 0) where none has any."""
        known = {slot: other.known for slot, other in self._running.items()}
        known |= {slot: of_ended for slot, (of_ended, _) in self._ended.items()}
        found = (-1, 0)
        for slot, tokens in known.items():
            have = self._cache.lengths[slot]
            if self._drafter is not None and row.tree is not None:
                have = min(have, self._drafter.length(slot) + sum(map(len, self._pending(slot))))
            shared = min(_shared(tokens, row.known) - 1, have, most)
            if shared > found[1]:
                found = slot, shared
        return found

    def _pending(self, slot: int) -> list[Tensor]:
        """The aux of a row, of either kind, that the draft has not read."""
        if slot in self._running:
            return self._running[slot].pending_aux
        return self._ended[slot][1] if slot in self._ended else []

    def _truncate(self, slot: int, length: int) -> None:
        self._cache.truncate(slot, min(length, self._cache.lengths[slot]))
        if self._drafter is not None:
            self._drafter.truncate(slot, length)


def _first(parts: list[Tensor], count: int) -> list[Tensor]:
    if count <= 0 or not parts:
        return []
    whole = torch.cat(parts)
    return [whole if len(whole) <= count else whole[:count].clone()]  # a view would keep all of it


def _shared(a: list[int], b: list[int]) -> int:
    """With how many equal tokens they begin."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
