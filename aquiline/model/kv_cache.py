"""Keys and values of the tokens a request has kept. A pass only reads them; `keep` writes the accepted ones.

Rejected nodes therefore never enter the cache, and there is nothing to undo or compact.

Shapes: L layers, R row slots, G kv heads, S slots of a row, N tokens of a pass, E head width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_FIRST = 1024  # tokens a row has room for at first; doubled when a row needs more


class KVCache:
    """Preallocated keys and values for `num_slots` rows of at most `capacity` tokens.

    A long context costs its memory only once a row grows into it.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, min(capacity, _FIRST), head_dim)
        # Zeros, not empty: a masked slot still multiplies its value by 0, and 0 * NaN is NaN.
        self.keys_LRGSE = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LRGSE = torch.zeros(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.lengths = [0] * num_slots

    def keep(self, slot: int, keys_LGNE: Tensor, values_LGNE: Tensor, index: Tensor | list[int] | None = None) -> None:
        """Append tokens of a pass to a row: those at `index`, in that order, or all of them."""
        if index is not None:
            index = torch.as_tensor(index, device=keys_LGNE.device)
            keys_LGNE, values_LGNE = keys_LGNE.index_select(2, index), values_LGNE.index_select(2, index)
        start, count = self.lengths[slot], keys_LGNE.shape[2]
        assert start + count <= self.capacity, f"row of {start} + {count} tokens in a cache of {self.capacity}"
        self._make_room(start + count)
        self.keys_LRGSE[:, slot, :, start : start + count] = keys_LGNE
        self.values_LRGSE[:, slot, :, start : start + count] = values_LGNE
        self.lengths[slot] = start + count

    def _make_room(self, length: int) -> None:
        room = self.keys_LRGSE.shape[3]
        if length <= room:
            return
        while room < length:
            room *= 2
        more = min(room, self.capacity) - self.keys_LRGSE.shape[3]
        self.keys_LRGSE = F.pad(self.keys_LRGSE, (0, 0, 0, more))
        self.values_LRGSE = F.pad(self.values_LRGSE, (0, 0, 0, more))

    def truncate(self, slot: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        assert 0 <= length <= self.lengths[slot]
        # Cleared, for a pass over longer rows reads them masked, and should one be NaN, 0 * NaN is NaN.
        self.keys_LRGSE[:, slot, :, length : self.lengths[slot]] = 0
        self.values_LRGSE[:, slot, :, length : self.lengths[slot]] = 0
        self.lengths[slot] = length

    def move(self, source: int, destination: int) -> None:
        """Copy a row to another slot and empty the source, so that the rows in use stay together."""
        n = self.lengths[source]
        self.keys_LRGSE[:, destination, :, :n] = self.keys_LRGSE[:, source, :, :n]
        self.values_LRGSE[:, destination, :, :n] = self.values_LRGSE[:, source, :, :n]
        self.lengths[destination] = n
        self.truncate(source, 0)

    def read(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values `[L, B, G, S, E]` of the rows, S the longest of them; a view when the slots are adjacent."""
        longest = max(self.lengths[s] for s in slots)
        first, last = slots[0], slots[-1]
        if slots == list(range(first, last + 1)):
            rows = slice(first, last + 1)
            return self.keys_LRGSE[:, rows, :, :longest], self.values_LRGSE[:, rows, :, :longest]
        return self.keys_LRGSE[:, slots, :, :longest], self.values_LRGSE[:, slots, :, :longest]
