"""The drafted tree of one cycle: grow it level by level, re-rank it, flatten it for the target pass.

Source: EAGLE-2 (arXiv 2406.16858) for growing and re-ranking. Nothing here knows a model or a cache.
In every `Tree` a parent stands before its children, so the first n nodes are a tree again.

Letters: B rows, N nodes of a tree, K nodes the draft runs at one level, C children given to each, M drafted nodes so
far, W draft vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from aquiline.config import TreeConfig

ROOT = -1  # the parent of a first-level node: the last known token, which is no node


@dataclass(frozen=True, eq=False)
class Tree:
    """One row's drafted tokens, on the host; the root (the last known token) is not among them. Siblings carry
    different tokens.
    """

    tokens: list[int]  # target ids
    parents: list[int]  # index of a node further left, or ROOT
    depths: list[int]  # from 1
    scores: list[float]  # sum from the root of log-probabilities that the draft gives; 0 where no draft gave any

    @staticmethod
    def empty() -> "Tree":
        """No node at all: verifying it is the plain step."""
        return Tree([], [], [], [])

    @staticmethod
    def from_tokens(tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float] | None = None) -> "Tree":
        """A tree written out node by node: target ids, and parents: ROOT or the index of an earlier node."""
        assert len(tokens) == len(parents), "one parent per token"
        assert all(ROOT <= parent < i for i, parent in enumerate(parents)), "a parent must stand before its child"
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "two siblings carry the same token"
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return Tree(list(tokens), list(parents), depths, [0.0] * len(tokens) if scores is None else list(scores))

    @staticmethod
    def from_paths(paths: Sequence[Sequence[int]], max_nodes: int | None = None) -> "Tree":
        """Continuations of the root merged into one trie, earlier paths first; one path is a chain."""
        nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node, in the order of the nodes
        for path in paths:
            parent = ROOT
            for token in path:
                if (parent, token) not in nodes:
                    if len(nodes) == max_nodes:
                        break
                    nodes[parent, token] = len(nodes)
                parent = nodes[parent, token]
        return Tree.from_tokens([token for _, token in nodes], [parent for parent, _ in nodes])

    def __len__(self) -> int:
        return len(self.tokens)

    def prefix(self, num_nodes: int) -> "Tree":
        """The first `num_nodes` nodes."""
        n = num_nodes
        return Tree(self.tokens[:n], self.parents[:n], self.depths[:n], self.scores[:n])

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (or of ROOT) that carries `token`, if there is one."""
        return self._children.get((node, token))

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {key: node for node, key in enumerate(zip(self.parents, self.tokens, strict=True))}


class Flat(NamedTuple):
    """The tokens of one target pass, N = 1 + most nodes: each row its root, its nodes, then padding."""

    ids_BN: Tensor  # int64, target ids
    positions_BN: Tensor  # int64, absolute
    mask_BNN: Tensor  # bool, True = may attend
    counts: list[int]  # of each row: tokens before the padding


def flatten(
    trees: Sequence[Tree], last_tokens: Sequence[int], positions: Sequence[int], device: torch.device | str = "cpu"
) -> Flat:
    """Trees of B rows side by side; `last_tokens` are their roots and `positions` where those stand.

    Padding repeats the root's token and position and sees the root and itself; no other entry sees it.
    """
    size = 1 + max(map(len, trees))
    all_ids, all_positions, seen = [], [], bytearray()
    # Lists and bytes: behind a pass, which has emptied the caches, every kind of operator costs more than all of this.
    for tree, root, at in zip(trees, last_tokens, positions, strict=True):
        padding = size - 1 - len(tree)
        all_ids.append([root, *tree.tokens, *[root] * padding])
        all_positions.append([at, *[at + depth for depth in tree.depths], *[at] * padding])
        sees = [bytearray(size)]
        sees[0][0] = 1
        for i, parent in enumerate([*tree.parents, *[ROOT] * padding], 1):
            sees.append(bytearray(sees[1 + parent]))
            sees[i][i] = 1
        seen += b"".join(sees)
    ids_BN, positions_BN = torch.tensor([all_ids, all_positions]).to(device)
    mask_BNN = torch.frombuffer(seen, dtype=torch.bool).view(-1, size, size).to(device)
    return Flat(ids_BN, positions_BN, mask_BNN, [1 + len(tree) for tree in trees])


class Level(NamedTuple):
    """The nodes the draft runs next, K per row, best first. A row with a smaller top-k has idle nodes at the end.

    Per node of depth d (the last real row r is the one that made level 1):

        token embedded   the node's own
        feature          the output of its parent, `feature_rows_BK` of the pass before (that pass's only row for d = 1)
        RoPE position    r + d
        attends to       all real rows, its drafted ancestors and itself
    """

    tokens_BK: Tensor  # int64, TARGET ids, ready to embed
    feature_rows_BK: Tensor  # int64, row of the pass before
    mask_BKM: Tensor  # bool over the M drafted nodes run so far, these K last: True = may attend
    nodes_BK: Tensor  # int64, which nodes they are, counted in order of creation
    scores_BK: Tensor  # float32, theirs; -inf of idle ones
    depth: int


class TreeBuilder:
    """Grows and re-ranks the trees of B rows, each within its own limits; the caller runs the draft in between.

    builder = TreeBuilder(configs, target_ids_W)
    level = builder.extend(*top(builder.top_k))      # of the last real row
    while level is not None:
        level = builder.extend(*top(builder.top_k))  # of the nodes in `level`
    trees = builder.rerank()                      # may come earlier: then the trees are less deep
    """

    def __init__(self, configs: Sequence[TreeConfig], target_ids_W: Tensor, least: Sequence[float] = ()) -> None:
        """`least`: how likely a row's node must be to be run."""
        device, num_rows = target_ids_W.device, len(configs)
        self._configs = configs
        self._target_ids_W = target_ids_W
        self.top_k = k = min(max(c.top_k for c in configs), len(target_ids_W))
        self._max_depth = max(c.depth for c in configs)
        self._mixed = len({(c.depth, c.top_k) for c in configs}) > 1
        self._top_k_B1, self._depth_B1 = torch.tensor(
            [[c.top_k for c in configs], [c.depth for c in configs]], device=device
        )[..., None]
        self._least_B1 = torch.tensor(least, device=device)[:, None].log() if least else None
        self._rank_K = torch.arange(k, device=device)
        self._rows_B1 = torch.arange(num_rows, device=device)[:, None]
        self._depth = 0
        self._num_made = 0
        # of the nodes the draft has just run: at first the last real row, standing for the root
        self._ran_nodes_BK = torch.full((num_rows, 1), ROOT, device=device)
        self._ran_scores_BK = torch.zeros(num_rows, 1, device=device)
        self._ran_mask_BKM = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=device)
        # of all nodes made, one [B, K*C] per level, joined once at the end
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._scores: list[Tensor] = []

    def extend(self, log_probs_BKC: Tensor, ids_BKC: Tensor) -> Level | None:
        """Give each node just run its children; returns what to run next, None once the depth is reached.

        `log_probs_BKC`, `ids_BKC`: the `top_k` draft ids that are most likely to be chosen behind each node of the last
        `Level`, descending; [B, C] for the first level.
        """
        num_rows, k = len(self._configs), self.top_k
        self._depth += 1
        steps_BKC = log_probs_BKC.view(num_rows, -1, k)
        # A step above 0 (rounding) would rank a child before its parent; a NaN would rank before everything.
        scores_BKC = self._ran_scores_BK[..., None] + steps_BKC.clamp(max=0)
        scores_BKC = scores_BKC.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        if self._mixed:
            made_BC = (self._rank_K < self._top_k_B1) & (self._depth <= self._depth_B1)
            scores_BKC = scores_BKC.masked_fill(~made_BC[:, None], -torch.inf)
        scores_BM = scores_BKC.flatten(1)
        tokens_BM = self._target_ids_W[ids_BKC].view(num_rows, -1)
        self._scores.append(scores_BM)
        self._tokens.append(tokens_BM)
        self._parents.append(self._ran_nodes_BK.repeat_interleave(k, dim=1))
        self._num_made += scores_BM.shape[1]
        return None if self._depth == self._max_depth else self._next_level()

    def _next_level(self) -> Level:
        """The best of the nodes made last, to be run."""
        scores_BM, tokens_BM = self._scores[-1], self._tokens[-1]
        num_rows, made = scores_BM.shape
        best_scores_BM, best_BM = scores_BM.sort(dim=1, descending=True, stable=True)
        best_BK = best_BM[:, : self.top_k]
        feature_rows_BK = best_BK // self.top_k
        seen_BKM = self._ran_mask_BKM[self._rows_B1, feature_rows_BK]
        self._ran_scores_BK = best_scores_BM[:, : self.top_k]
        if self._mixed:  # only the row's own top-k best go on
            rank_K = torch.arange(best_BK.shape[1], device=best_BK.device)
            self._ran_scores_BK = self._ran_scores_BK.masked_fill(rank_K >= self._top_k_B1, -torch.inf)
        if self._least_B1 is not None:
            self._ran_scores_BK = self._ran_scores_BK.masked_fill(self._ran_scores_BK < self._least_B1, -torch.inf)
        self._ran_nodes_BK = self._num_made - made + best_BK
        itself_KK = torch.eye(best_BK.shape[1], dtype=torch.bool, device=best_BK.device)
        self._ran_mask_BKM = torch.cat([seen_BKM, itself_KK.expand(num_rows, -1, -1)], dim=2)
        tokens_BK = tokens_BM.gather(1, best_BK)
        return Level(
            tokens_BK, feature_rows_BK, self._ran_mask_BKM, self._ran_nodes_BK, self._ran_scores_BK, self._depth
        )

    def rerank(self) -> list[Tree]:
        """Of all nodes made the `num_nodes` best of each row, by (score descending, depth, creation order).

        A child never scores above its parent, but in float32 a confident child ties with it. The nodes lie in order
        of creation, so of depth, and the sort is stable: of the two the parent is kept, and stands first. A plain
        top-k may keep such a child without its parent.
        """
        scores_BM, order_BM = torch.cat(self._scores, dim=1).sort(dim=1, descending=True, stable=True)
        most = max(c.num_nodes for c in self._configs)
        scores_BN, order_BN = scores_BM[:, :most], order_BM[:, :most]
        num_rows, width = order_BN.shape
        # creation order -> place in the tree, shifted by one so that ROOT finds itself at 0
        place_BM = torch.full((num_rows, 1 + self._num_made), ROOT, device=order_BN.device)
        place_BM.scatter_(1, order_BN + 1, torch.arange(width, device=order_BN.device).expand_as(order_BN))
        parents_BN = place_BM.gather(1, torch.cat(self._parents, dim=1).gather(1, order_BN) + 1)
        tokens_BN = torch.cat(self._tokens, dim=1).gather(1, order_BN)
        depths_M = torch.cat([torch.full_like(made[0], 1 + d) for d, made in enumerate(self._tokens)])
        depths_BN = depths_M[order_BN]
        # One transfer for all; float64 holds ids exactly.
        made = torch.stack([x.double() for x in (tokens_BN, parents_BN, depths_BN, scores_BN)], dim=1).tolist()
        trees = []
        for config, (tokens, parents, depths, scores) in zip(self._configs, made, strict=True):
            # -inf marks what a row's limits forbid, and what the draft holds impossible or could not score
            n = min(sum(score > -math.inf for score in scores), config.num_nodes)
            ids, above, deep = ([int(x) for x in part[:n]] for part in (tokens, parents, depths))
            trees.append(Tree(ids, above, deep, scores[:n]))
        return trees
