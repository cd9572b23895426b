"""Keys and values of the tokens a request has kept. A pass only reads them; `keep` writes the accepted ones.

Rejected nodes therefore never enter the cache, and there is nothing to undo or compact.

The rows lie in one storage, each a run of neighbouring tokens, so that memory goes by the tokens kept and not by the
longest row:

    |row 2 row 2 . . . . |row 0 . . . . |row 1 row 1 row 1 . . . |

A row grows into the space behind it. When there is none, all rows are laid out anew, and the space is shared out.

Shapes: L layers, B rows and N tokens of a pass, G kv heads, S tokens of the storage or the longest row, E head width.
"""

import torch
from torch import Tensor

_FIRST = 1024  # tokens there is room for at first; doubled when more are kept


class KVCache:
    """Keys and values for `num_slots` rows of at most `capacity` tokens, and of at most `tokens` in all.

    A long context costs its memory only once rows grow into it.
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
        tokens: int | None = None,
    ) -> None:
        """`tokens` None: as many as all rows may have."""
        self.tokens = num_slots * capacity if tokens is None else tokens
        shape = (num_layers, num_kv_heads, min(self.tokens, _FIRST), head_dim)
        self.keys_LGSE = torch.empty(shape, dtype=dtype, device=device)
        self.values_LGSE = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.lengths = [0] * num_slots
        self.starts = [0] * num_slots  # where in the storage a row begins; of an empty one nothing is meant
        self._rooms = [0] * num_slots  # tokens from there to the next row, or less: rows end without telling

    def keep(self, slot: int, keys_LGNE: Tensor, values_LGNE: Tensor) -> None:
        """Append tokens of a pass to a row."""
        count = keys_LGNE.shape[2]
        at = self.extend(slot, count)
        self.keys_LGSE[:, :, at : at + count] = keys_LGNE
        self.values_LGSE[:, :, at : at + count] = values_LGNE

    def extend(self, slot: int, count: int) -> int:
        """Give a row so many more tokens, which the caller is to write; where in the storage they begin."""
        length = self.lengths[slot]
        self._make_room(slot, length + count)
        self.lengths[slot] = length + count
        return self.starts[slot] + length

    def truncate(self, slot: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        assert 0 <= length <= self.lengths[slot]
        self.lengths[slot] = length
        if length == 0:
            self._rooms[slot] = 0

    def copy(self, source: int, destination: int, length: int) -> None:
        """Begin an empty row with the first tokens of another."""
        assert self.lengths[destination] == 0
        assert length <= self.lengths[source]
        new = self.extend(destination, length)
        old = self.starts[source]
        for stored in (self.keys_LGSE, self.values_LGSE):
            stored[:, :, new : new + length] = stored[:, :, old : old + length]

    def read(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values `[L, B, G, S, E]` of the rows, S the longest of them; a view where it is one row, else a copy
        that ends in zeros where a row is shorter.
        """
        longest = max(self.lengths[s] for s in slots)
        if len(slots) == 1:
            at = self.starts[slots[0]]
            return self.keys_LGSE[:, None, :, at : at + longest], self.values_LGSE[:, None, :, at : at + longest]
        device = self.keys_LGSE.device
        starts_B1, lengths_B1 = torch.tensor(
            [[self.starts[s] for s in slots], [self.lengths[s] for s in slots]], device=device
        )[..., None]
        at_S = torch.arange(longest, device=device)
        hidden_BS = at_S >= lengths_B1
        index_B1S = (starts_B1 + at_S).masked_fill_(hidden_BS, 0)[:, None]
        heads_G1 = torch.arange(self.keys_LGSE.shape[1], device=device)[:, None]
        # Zeros, for a masked token still multiplies its value by 0, and 0 * NaN is NaN.
        hidden = hidden_BS[:, None, :, None]
        keys, values = (x[:, heads_G1, index_B1S].masked_fill_(hidden, 0) for x in (self.keys_LGSE, self.values_LGSE))
        return keys, values

    def _make_room(self, slot: int, length: int) -> None:
        """That a row may have `length` tokens."""
        if length <= self._rooms[slot]:
            return
        assert length <= self.capacity, f"a row of {length} tokens in a cache of {self.capacity}"
        rows = self._in_order(self.lengths)
        begins = [*(self.starts[r] for r in rows), self.keys_LGSE.shape[2]]
        if self.lengths[slot]:
            room = begins[rows.index(slot) + 1] - self.starts[slot]
        else:  # it takes the second half of the largest gap, for the row before it may grow, too
            ends = [0, *(self.starts[r] + self.lengths[r] for r in rows)]
            room, at = max((begin - end, end) for end, begin in zip(ends, begins, strict=True))
            self.starts[slot] = at + max(0, room - length) // 2 if at else 0
        lengths = [length if s == slot else n for s, n in enumerate(self.lengths)]
        if room < length:
            self._lay_out(lengths)
        rows = self._in_order(lengths)
        begins = [*(self.starts[r] for r in rows), self.keys_LGSE.shape[2]]
        for r, behind in zip(rows, begins[1:], strict=True):
            self._rooms[r] = behind - self.starts[r]

    def _in_order(self, lengths: list[int]) -> list[int]:
        """The rows that are not empty, as they lie."""
        return sorted((r for r, n in enumerate(lengths) if n), key=lambda r: self.starts[r])

    def _lay_out(self, lengths: list[int]) -> None:
        """Move the rows, so that they may have these lengths and each has as much space behind it."""
        used, (L, G, size, E) = sum(lengths), self.keys_LGSE.shape
        assert used <= self.tokens, f"{used} tokens in a cache of {self.tokens}"
        stored, new = (self.keys_LGSE, self.values_LGSE), (self.keys_LGSE, self.values_LGSE)
        if size < min(used + used // 4, self.tokens):
            while size < min(used + used // 4, self.tokens):
                size = min(2 * size, self.tokens)
            new = (self.keys_LGSE.new_empty(L, G, size, E), self.keys_LGSE.new_empty(L, G, size, E))
        rows, starts, at = self._in_order(lengths), list(self.starts), 0
        for r in rows:
            starts[r] = at
            at += lengths[r] + (size - used) // len(rows)
        beside_GSE = self.keys_LGSE.new_empty(G, size, E)  # a layer at a time, for rows move into one another's places
        for old_LGSE, new_LGSE in zip(stored, new, strict=True):
            for layer in range(L):
                for r in rows:
                    row_GSE = old_LGSE[layer, :, self.starts[r] : self.starts[r] + self.lengths[r]]
                    beside_GSE[:, starts[r] : starts[r] + self.lengths[r]] = row_GSE
                new_LGSE[layer] = beside_GSE
        (self.keys_LGSE, self.values_LGSE), self.starts = new, starts
