"""Where a cycle's trees come from: the EAGLE-3 head, or the request's own text (prompt lookup).

Letters: B rows, K nodes of a level, H draft width, A width of aux.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from aquiline.config import TreeConfig
from aquiline.decode.sampling import Sampler
from aquiline.decode.tree import Tree, TreeBuilder
from aquiline.model.draft import Draft, DraftOutput

_CATCH_UP = 512  # rows of a long prompt fed to the draft at a time


@dataclass
class Row:
    """One request's place in the batch.

    `known` is prompt and output; its last token is the root: in no cache yet. With n+1 known tokens the target's cache
    holds n, and once the draft has caught up, its cache holds n rows too (row t pairs x_{t+1} with aux_t).
    """

    slot: int
    known: list[int]
    sampler: Sampler
    tree: TreeConfig | None  # None: plain decoding
    room: int  # tokens it may still emit
    pending_aux: list[Tensor] = field(default_factory=list)  # [*, A] of cached tokens the draft has not read

    def tree_that_fits(self) -> TreeConfig | None:
        """The tree cut to the room left: a cycle emits up to depth + 1 tokens. None where no tree can pay."""
        depth = min(self.tree.depth, self.room - 1) if self.tree else 0
        return TreeConfig(depth, self.tree.top_k, self.tree.num_nodes) if self.tree and depth > 0 else None


class Drafter(Protocol):
    """Proposes a tree per row before each verification; the engine tells it of slots that move or end."""

    reads_aux: bool

    def draft(self, rows: Sequence[Row]) -> list[Tree]: ...
    def move(self, source: int, destination: int) -> None: ...
    def truncate(self, slot: int, length: int) -> None: ...
    def length(self, slot: int) -> int: ...


class EagleDrafter:
    """Trees from the EAGLE-3 head. Its cache holds real rows only: drafted nodes live and die with their tree."""

    reads_aux = True

    def __init__(self, draft: Draft, target_embed: Callable[[Tensor], Tensor], num_slots: int, capacity: int) -> None:
        self.model = draft
        self.cache = draft.new_cache(num_slots, capacity)
        self._target_embed = target_embed

    def draft(self, rows: Sequence[Row]) -> list[Tree]:
        fitting = [row.tree_that_fits() for row in rows]
        configs = [config for config in fitting if config is not None]
        drafting = [row for row, config in zip(rows, fitting, strict=True) if config is not None]
        made = iter(self._grow(drafting, configs) if drafting else ())
        return [Tree.empty(self._device) if config is None else next(made) for config in fitting]

    def _grow(self, rows: list[Row], configs: list[TreeConfig]) -> list[Tree]:
        """EAGLE-2: expand the best nodes of each level as one batch, then re-rank all nodes made."""
        feature_BKH, hidden_BH = self._catch_up(rows)
        slots = [row.slot for row in rows]
        last_row_B1 = torch.tensor([[self.cache.lengths[s] - 1] for s in slots], device=self._device)
        builder = TreeBuilder(configs, self.model.vocab.target_ids_W)
        level = builder.extend(self._log_probs(hidden_BH))
        tree_keys_values: tuple[Tensor, Tensor] | None = None
        while level is not None:
            parents = level.feature_rows_BK[..., None].expand(-1, -1, feature_BKH.shape[-1])
            out = self.model(
                self.model.embed(level.tokens_BK, self._target_embed),
                feature_BKH.gather(1, parents),
                (last_row_B1 + level.depth).expand_as(level.tokens_BK),
                level.mask_BKM,
                self.cache,
                slots,
                tree_keys_values,
            )
            new = (out.keys_LBGNE, out.values_LBGNE)
            if tree_keys_values is None:
                tree_keys_values = new
            else:
                tree_keys_values = (
                    torch.cat((tree_keys_values[0], new[0]), 3),
                    torch.cat((tree_keys_values[1], new[1]), 3),
                )
            feature_BKH = out.feature_BNH
            level = builder.extend(self._log_probs(out.hidden_BNH))
        return builder.rerank()

    def _catch_up(self, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """Feed the rows whose aux is new; the last row's feature `[B, 1, H]` and hidden state `[B, H]`."""
        last: dict[int, tuple[Tensor, Tensor]] = {}
        pending = {row.slot: torch.cat(row.pending_aux) for row in rows}
        while any(len(aux) for aux in pending.values()):
            active = [row for row in rows if len(pending[row.slot])]
            counts = [min(len(pending[row.slot]), _CATCH_UP) for row in active]
            out = self._feed(active, counts, pending)
            for b, (row, count) in enumerate(zip(active, counts, strict=True)):
                self.cache.keep(row.slot, out.keys_LBGNE[:, b, :, :count], out.values_LBGNE[:, b, :, :count])
                last[row.slot] = (out.feature_BNH[b, count - 1], out.hidden_BNH[b, count - 1])
                pending[row.slot] = pending[row.slot][count:]
        for row in rows:
            row.pending_aux = []
            assert self.cache.lengths[row.slot] == len(row.known) - 1, "the draft's rows are the known tokens less one"
        return torch.stack([last[r.slot][0] for r in rows])[:, None], torch.stack([last[r.slot][1] for r in rows])

    def _feed(self, rows: list[Row], counts: list[int], pending: dict[int, Tensor]) -> DraftOutput:
        width = max(counts)
        ids, starts, aux = [], [], []
        for row, count in zip(rows, counts, strict=True):
            start = self.cache.lengths[row.slot]
            tokens = row.known[start + 1 : start + 1 + count]  # row t embeds x_{t+1}
            ids.append(tokens + [0] * (width - count))
            starts.append(start)
            states = pending[row.slot][:count]
            aux.append(
                torch.cat((states, states.new_zeros(width - count, states.shape[1]))) if count < width else states
            )
        ids_BN = torch.tensor(ids, device=self._device)
        positions_BN = torch.tensor(starts, device=self._device)[:, None] + torch.arange(width, device=self._device)
        g_BNH = self.model.fuse(torch.stack(aux))
        embeds_BNH = self.model.embed(ids_BN, self._target_embed)
        return self.model(embeds_BNH, g_BNH, positions_BN, None, self.cache, [row.slot for row in rows])

    def _log_probs(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(self.model.logits(hidden), dim=-1)

    @property
    def _device(self) -> torch.device:
        return self.model.vocab.target_ids_W.device

    def move(self, source: int, destination: int) -> None:
        self.cache.move(source, destination)

    def truncate(self, slot: int, length: int) -> None:
        self.cache.truncate(slot, min(length, self.cache.lengths[slot]))

    def length(self, slot: int) -> int:
        return self.cache.lengths[slot]


class NgramDrafter:
    """Prompt lookup: what followed the last few tokens where they stood before, the longest and latest match first."""

    reads_aux = False

    def __init__(self, device: torch.device | str = "cpu", longest: int = 4, shortest: int = 2) -> None:
        self._device = device
        self._sizes = range(longest, shortest - 1, -1)

    def draft(self, rows: Sequence[Row]) -> list[Tree]:
        return [self._lookup(row.known, row.tree_that_fits()) for row in rows]

    def _lookup(self, known: list[int], config: TreeConfig | None) -> Tree:
        if config is None:
            return Tree.empty(self._device)
        paths: list[list[int]] = []
        text = torch.tensor(known)
        for size in self._sizes:
            if size >= len(known):
                continue
            windows = text.unfold(0, size, 1)[:-1]  # not the tail itself
            starts = (windows == text[-size:]).all(1).nonzero().squeeze(1)
            for start in reversed(starts[-4 * config.top_k :].tolist()):
                path = known[start + size : start + size + config.depth]
                if path and all(path[: len(p)] != p for p in paths):
                    paths.append(path)
                if len(paths) == config.top_k:
                    return Tree.from_paths(paths, config.num_nodes, self._device)
        return Tree.from_paths(paths, config.num_nodes, self._device)

    def move(self, source: int, destination: int) -> None:
        pass

    def truncate(self, slot: int, length: int) -> None:
        pass

    def length(self, slot: int) -> int:
        return 2**62  # nothing is cached, so nothing is missing
