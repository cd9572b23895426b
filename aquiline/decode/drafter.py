"""Where a cycle's trees come from: the EAGLE-3 head, or the request's own text (prompt lookup).

Letters: B rows, K nodes of a level, H draft width, A width of aux.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aquiline.config import TreeConfig
from aquiline.decode.cost import LONGEST_CATCH_UP, Chooser, Mood, cut
from aquiline.decode.sampling import Sampler, foresee
from aquiline.decode.tree import Level, Tree, TreeBuilder
from aquiline.model.draft import Draft

_CATCH_UP = 512  # rows of a long prompt fed to the draft at a time
_TELLING = 32  # new tokens of a row, by which to judge its draft
_MOST_TOLD = 128  # the latest of them
_TRIED_TREE = 4, 4, 8  # depth, top-k and nodes
_USUALLY_NEW = 2  # tokens of a row that a cycle's draft has to read


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
    mood: Mood = field(default_factory=Mood)  # of `auto`
    logprobs: int | None = None  # so many of the likeliest tokens are wanted beside the chosen one
    prompt: int = field(init=False)  # tokens known at first

    def __post_init__(self) -> None:
        self.prompt = len(self.known)

    def tree_that_fits(self) -> TreeConfig | None:
        """The tree cut to the room left: a cycle emits up to depth + 1 tokens. None where no tree can pay."""
        depth = min(self.tree.depth, self.room - 1) if self.tree else 0
        if self.tree is None or depth <= 0:
            return None
        return self.tree if depth == self.tree.depth else dataclasses.replace(self.tree, depth=depth)


class Drafter(Protocol):
    """Proposes a tree per row before each verification; the engine tells it of rows that begin or end."""

    reads_aux: bool

    def draft(self, rows: Sequence[Row], chooser: Chooser | None = None) -> list[Tree]: ...
    def copy(self, source: int, destination: int, length: int) -> None: ...
    def truncate(self, slot: int, length: int) -> None: ...
    def length(self, slot: int) -> int: ...
    def probe_level(self, slots: list[int], width: int) -> None: ...


class EagleDrafter:
    """Trees from the EAGLE-3 head. Its cache holds real rows only: drafted nodes live and die with their tree."""

    reads_aux = True

    def __init__(
        self,
        draft: Draft,
        target_embed: Callable[[Tensor], Tensor],
        num_slots: int,
        capacity: int,
        tokens: int | None = None,
    ) -> None:
        self.model = draft
        self.cache = draft.new_cache(num_slots, capacity, tokens)
        self._target_embed = target_embed

    def draft(self, rows: Sequence[Row], chooser: Chooser | None = None) -> list[Tree]:
        trees = [Tree.empty()] * len(rows)
        drafting = [(b, config) for b, row in enumerate(rows) if (config := row.tree_that_fits()) is not None]
        fixed = [(b, config) for b, config in drafting if not config.auto]
        auto = [(b, config) for b, config in drafting if config.auto]
        trying = False
        if auto and chooser is not None:
            resting = chooser.resting(rows[auto[0][0]].mood, len(rows))
            if resting.rests():
                for b, _ in auto:
                    rows[b].mood.forget()
                auto = []
            elif len(rows) > 1:
                trying = resting.trying
        if fixed:
            made, _ = self.grow([rows[b] for b, _ in fixed], [config for _, config in fixed])
            for (b, _), tree in zip(fixed, made, strict=True):
                trees[b] = tree
        if auto:
            assert chooser is not None
            taken = list(map(len, trees))
            drafting_rows, configs = [rows[b] for b, _ in auto], [config for _, config in auto]
            longest = max(len(row.known) for row in rows)
            if trying:
                b, tree = self._try_for_all(rows, dict(auto), chooser, longest, taken)
                trees[b] = tree
                return trees
            made = self._grow_what_pays(drafting_rows, configs, chooser, len(rows), longest, taken)
            for (b, _), tree in zip(auto, made, strict=True):
                trees[b] = tree
        return trees

    def _grow_what_pays(
        self, rows: list[Row], configs: list[TreeConfig], chooser: Chooser, batch: int, context: int,
        taken: list[int],
    ) -> list[Tree]:  # fmt: skip
        """Trees within the limits that the chooser sets, and of each as many nodes as pay.

        The target pass to come has `batch` rows with up to `context` known tokens, and holds so many nodes of each
        (`taken`) whatever is chosen.
        """
        began = time.perf_counter()
        moods, own, number = [row.mood for row in rows], max(len(row.known) for row in rows), len(rows)
        resting = chooser.resting(moods[0], batch)
        first, level = (chooser.costs.of(kind, number, own) for kind in ("first", "level"))
        limits = [chooser.limits(c, mood, batch, context) for c, mood in zip(configs, moods, strict=True)]
        width = max(limit.top_k for limit in limits)
        most = max(sum(limit.num_nodes for limit in limits), round(resting.nodes) + 2)
        V = chooser.pass_seconds(batch, context, taken, most)
        margin = chooser.margin(V, batch, resting)
        worth = [chooser.worth(mood, level(width) / number, margin, batch, batch / V[0]) for mood in moods]
        pending = [sum(map(len, row.pending_aux)) for row in rows]
        new = sum(pending) / len(rows) if self._reads_unpadded else max(pending)
        # Neither a prompt nor what came in a long rest: those are read once.
        usual = max(pending) <= LONGEST_CATCH_UP and all(self.cache.lengths[r.slot] >= r.prompt - 1 for r in rows)
        trees, seconds = self.grow(rows, limits, worth)
        spent = first.curve([new if usual else 1])[0] + (len(seconds) - 1) * level(width)
        nodes = chooser.nodes(trees, len(seconds), V, spent, batch, moods, resting)
        made = [tree.prefix(n) for tree, n in zip(trees, nodes, strict=True)]
        for of_level in seconds[1:]:
            chooser.costs.observe(level, width, of_level)
        if usual:  # with all that a cycle's trees cost beside their levels
            chooser.costs.observe(first, new, time.perf_counter() - began - sum(seconds[1:]))
        return made

    def _try_for_all(
        self, rows: Sequence[Row], resting: dict[int, TreeConfig], chooser: Chooser, context: int, taken: list[int]
    ) -> tuple[int, Tree]:
        """Of the rows that rest one, and its tree: others may never have to read what came meanwhile. What it would
        have guessed of that says whether all are to draft again. Where nodes of all rows compete its tree has several
        for the others, too: what such a pass takes is seldom seen while they rest.
        """
        new = {b: sum(map(len, rows[b].pending_aux)) for b in resting}
        tells = {b: min(new[b] - 1, len(rows[b].known) - rows[b].prompt) for b in resting}  # of prompts nothing is told
        enough = [b for b in resting if tells[b] >= _TELLING]
        # One row may be badly foreseen to its end: the others have their turns.
        chosen = (
            min(enough, key=lambda b: (rows[b].mood.tries, new[b])) if enough else max(resting, key=tells.__getitem__)
        )
        row, alike, batch = rows[chosen], len(resting), len(rows)
        row.mood.tries += 1
        told: list[bool] = []

        def compare(start: int, hidden_NH: Tensor) -> None:  # row t tells of token t + 2
            skipped = max(0, max(row.prompt, len(row.known) - _MOST_TOLD) - 2 - start)
            wanted = row.known[start + skipped + 2 : start + len(hidden_NH) + 2]
            if wanted:
                guesses = self._guesses(row, start + skipped, hidden_NH[skipped:])
                told.extend(guess == token for guess, token in zip(guesses, wanted, strict=True))

        left, _ = self._catch_up([row], 1, compare)
        row.pending_aux = [left[row.slot]]
        shape = _TRIED_TREE if chooser.ragged and alike > 1 else (1, 1, 1)
        (tree,), _ = self.grow([row], [cut(resting[chosen], *shape)])
        V = chooser.pass_seconds(batch, context, taken, alike)
        first = chooser.costs.of("first", alike, max(len(rows[b].known) for b in resting))
        whole = chooser.resting(row.mood, batch)
        chooser.tried(tree, sum(told), len(told), V, first(_USUALLY_NEW), batch, alike, row.mood, whole)
        return chosen, tree

    def _guesses(self, row: Row, start: int, hidden_NH: Tensor) -> list[int]:
        """What the draft holds likeliest to come, of its rows from `start` on."""
        tilt = None
        ids_W = self.model.vocab.target_ids_W
        if not row.sampler.config.greedy:
            sharpness_B, noise_BDW = foresee([row.sampler.foresight], [start + 2], len(hidden_NH), ids_W)
            tilt = sharpness_B[:, None], noise_BDW[0]
        best_N1 = self.model.top(hidden_NH, 1, tilt)[1]
        found: list[int] = ids_W[best_N1[:, 0]].tolist()
        return found

    def grow(
        self, rows: list[Row], configs: list[TreeConfig], worth: Sequence[Sequence[float]] = ()
    ) -> tuple[list[Tree], list[float]]:
        """EAGLE-2: expand the best nodes of each level as one batch, then re-rank all nodes made. `worth`: how likely
        each row's node must be to be run, and then those of depth 1, 2, ... together. Returns the trees, and the
        seconds of each level, with what was new of the rows in the first.
        """
        grow = self.model.grower(self.embedding)
        if grow is None:
            return self._grow_here(rows, configs, worth)
        began = time.perf_counter()
        pending, _ = self._catch_up(rows, _CATCH_UP)
        counts = [len(pending[row.slot]) for row in rows]
        starts = [self.cache.lengths[row.slot] for row in rows]
        ids = [i for row, at, n in zip(rows, starts, counts, strict=True) for i in row.known[at + 1 : at + 1 + n]]
        aux_MA = _joined([pending[row.slot] for row in rows])
        waited = time.perf_counter() - began
        limits = [(c.depth, c.top_k, c.num_nodes) for c in configs]
        slots, foresights = [row.slot for row in rows], [row.sampler.foresight for row in rows]
        grown = grow(aux_MA, ids, counts, limits, worth, foresights, self.cache, slots)
        self._caught_up(rows)
        first, *others = grown.seconds
        return [Tree(*parts) for parts in zip(*grown[:4], strict=True)], [waited + first, *others]

    def _grow_here(
        self, rows: list[Row], configs: list[TreeConfig], worth: Sequence[Sequence[float]]
    ) -> tuple[list[Tree], list[float]]:
        """Through PyTorch, level by level; rows stop together."""
        laps = [time.perf_counter()]
        _, last = self._catch_up(rows, 0)
        self._caught_up(rows)
        feature_BH, hidden_BH = (_joined([last[row.slot][i] for row in rows]) for i in range(2))
        levels = _Levels(self, rows, feature_BH, max(c.depth for c in configs))
        least = [of_row[0] for of_row in worth]
        builder = TreeBuilder(configs, self.model.vocab.target_ids_W, least)
        level = builder.extend(*levels.top(hidden_BH, builder.top_k, 1))
        while level is not None:
            if worth:
                likely = level.scores_BK.exp().sum(1).tolist()
                if all(a < of_row[level.depth] for a, of_row in zip(likely, worth, strict=True)):
                    break
            laps.append(time.perf_counter())
            level = builder.extend(*levels.run(level, builder.top_k))
        trees = builder.rerank()
        laps.append(time.perf_counter())
        return trees, [ended - began for began, ended in itertools.pairwise(laps)]

    def _catch_up(
        self, rows: list[Row], leave: int, look: Callable[[int, Tensor], None] | None = None
    ) -> tuple[dict[int, Tensor], dict[int, tuple[Tensor, Tensor]]]:
        """Read the rows whose aux is new until no more than `leave` are left of any. By slot, the aux left, and the
        feature and hidden state `[1, H]` of the last row read. `look` is told which row the first is, and the hidden
        states `[N, H]` of all that are read.
        """
        last: dict[int, tuple[Tensor, Tensor]] = {}
        pending = {row.slot: _joined(row.pending_aux) for row in rows}
        while active := [row for row in rows if len(pending[row.slot]) > leave]:
            counts = [min(len(pending[row.slot]) - min(leave, 1), _CATCH_UP) for row in active]
            ids_BN, positions_BN, aux_BNA = self._inputs(active, counts, pending)
            slots = [row.slot for row in active]
            out = self.model(self.embed(ids_BN), self.model.fuse(aux_BNA), positions_BN, None, self.cache, slots)
            for b, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                if look is not None:
                    look(self.cache.lengths[slot], out.hidden_BNH[b, :count])
                self.cache.keep(slot, out.keys_LBGNE[:, b, :, :count], out.values_LBGNE[:, b, :, :count])
                last[slot] = (out.feature_BNH[b, count - 1 : count], out.hidden_BNH[b, count - 1 : count])
                pending[slot] = pending[slot][count:]
        return pending, last

    def _caught_up(self, rows: list[Row]) -> None:
        for row in rows:
            row.pending_aux = []
            assert self.cache.lengths[row.slot] == len(row.known) - 1, "the draft's rows are the known tokens less one"

    def _inputs(self, rows: list[Row], counts: list[int], pending: dict[int, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, positions and aux of the next `counts` rows of each, padded."""
        width = max(counts)
        ids, positions, aux = [], [], []
        for row, count in zip(rows, counts, strict=True):
            start = self.cache.lengths[row.slot]
            ids.append(row.known[start + 1 : start + 1 + count] + [0] * (width - count))  # row t embeds x_{t+1}
            positions.append(list(range(start, start + width)))
            states = pending[row.slot][:count]
            aux.append(states if count == width else F.pad(states, (0, 0, 0, width - count)))
        ids_BN, positions_BN = torch.tensor([ids, positions], device=self._device)
        return ids_BN, positions_BN, aux[0][None] if len(aux) == 1 else torch.stack(aux)

    def probe_level(self, slots: list[int], width: int) -> None:
        """One level of `width` nodes as a pass of its own, for its time: nothing is kept. Where the kernel grows all
        levels in one call a level is cheaper, and real ones say so.
        """
        B, M = len(slots), max(1, self.cache.lengths[slots[0]])
        ids_BK = torch.zeros(B, width, dtype=torch.long, device=self._device)
        feature_BKH = torch.zeros(B, width, self.model.config.hidden_size, dtype=self.model.dtype, device=self._device)
        out = self.model(self.embed(ids_BK), feature_BKH, torch.full_like(ids_BK, M), None, self.cache, slots)
        self.model.top(out.hidden_BNH, min(8, self.model.config.draft_vocab_size))[0].tolist()

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed(ids, self._target_embed)

    @property
    def embedding(self) -> Tensor | None:
        """The table that `embed` reads, `[V, H]`, where it is one."""
        rows = self._target_embed if self.model.embed_tokens is None else self.model.embed_tokens
        return rows.weight if isinstance(rows, nn.Embedding) else None

    @property
    def _reads_unpadded(self) -> bool:
        """Whether what is new of rows is read without padding."""
        return self.model.grower(self.embedding) is not None

    @property
    def _device(self) -> torch.device:
        return self.model.vocab.target_ids_W.device

    def copy(self, source: int, destination: int, length: int) -> None:
        self.cache.copy(source, destination, min(length, self.cache.lengths[source]))

    def truncate(self, slot: int, length: int) -> None:
        self.cache.truncate(slot, min(length, self.cache.lengths[slot]))

    def length(self, slot: int) -> int:
        return self.cache.lengths[slot]


class _Levels:
    """The draft's passes of one cycle behind the real rows, level by level."""

    def __init__(self, drafter: EagleDrafter, rows: Sequence[Row], feature_BH: Tensor, depth: int) -> None:
        self._drafter, self._feature_BKH = drafter, feature_BH[:, None]
        self._slots = [row.slot for row in rows]
        self._tree_keys_values: tuple[Tensor, Tensor] | None = None
        self._foreseen: tuple[Tensor, Tensor] | None = None
        if not all(row.sampler.config.greedy for row in rows):
            foresights, ids_W = [row.sampler.foresight for row in rows], drafter.model.vocab.target_ids_W
            self._foreseen = foresee(foresights, [len(row.known) for row in rows], depth, ids_W)
        last_rows = [[drafter.cache.lengths[slot] - 1] for slot in self._slots]
        self._last_row_B1 = torch.tensor(last_rows, device=feature_BH.device)

    def run(self, level: Level, count: int) -> tuple[Tensor, Tensor]:
        """The `count` most likely draft ids behind the nodes of a level: log-probabilities and ids `[B, K, C]`."""
        drafter = self._drafter
        parents = level.feature_rows_BK[..., None].expand(-1, -1, self._feature_BKH.shape[-1])
        out = drafter.model(
            drafter.embed(level.tokens_BK),
            self._feature_BKH.gather(1, parents),
            (self._last_row_B1 + level.depth).expand_as(level.tokens_BK),
            level.mask_BKM,
            drafter.cache,
            self._slots,
            self._tree_keys_values,
        )
        earlier, new = self._tree_keys_values, (out.keys_LBGNE, out.values_LBGNE)
        if earlier is not None:
            new = (torch.cat((earlier[0], new[0]), 3), torch.cat((earlier[1], new[1]), 3))
        self._tree_keys_values = new
        self._feature_BKH = out.feature_BNH
        return self.top(out.hidden_BNH, count, level.depth + 1)

    def top(self, hidden_BKH: Tensor, count: int, depth: int) -> tuple[Tensor, Tensor]:
        """The same behind hidden states `[B, K, H]` or `[B, H]`, for nodes of a depth; of sampled rows those that are
        likely to be drawn there.
        """
        if self._foreseen is None:
            return self._drafter.model.top(hidden_BKH, count)
        sharpness_B, noise_BDW = self._foreseen
        shape = (len(sharpness_B), *[1] * (hidden_BKH.dim() - 2), -1)
        tilt = sharpness_B.view(shape), noise_BDW[:, depth - 1].view(shape)
        return self._drafter.model.top(hidden_BKH, count, tilt)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class NgramDrafter:
    """Prompt lookup: what followed the last few tokens where they stood before, the longest and latest match first."""

    reads_aux = False

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._sizes = range(longest, shortest - 1, -1)

    def draft(self, rows: Sequence[Row], chooser: Chooser | None = None) -> list[Tree]:
        return [self._draft(row, row.tree_that_fits(), chooser, len(rows)) for row in rows]

    def _draft(self, row: Row, config: TreeConfig | None, chooser: Chooser | None, batch: int) -> Tree:
        """With `auto` the longest match alone, as far as it pays."""
        if config is None or not config.auto:
            return self._lookup(row.known, config)
        tree = Tree.empty()
        assert chooser is not None
        if row.mood.rests():
            row.mood.forget()
        else:
            tree = self._lookup(row.known, dataclasses.replace(config, top_k=1))
        if len(tree) == 0:
            return tree
        V = chooser.pass_seconds(batch, len(row.known), (), len(tree))
        return tree.prefix(chooser.nodes([tree], 1, V, 0.0, batch, [row.mood])[0])

    def _lookup(self, known: list[int], config: TreeConfig | None) -> Tree:
        if config is None:
            return Tree.empty()
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
                    return Tree.from_paths(paths, config.num_nodes)
        return Tree.from_paths(paths, config.num_nodes)

    def copy(self, source: int, destination: int, length: int) -> None:
        pass

    def truncate(self, slot: int, length: int) -> None:
        pass

    def probe_level(self, slots: list[int], width: int) -> None:
        pass

    def length(self, slot: int) -> int:
        return 2**62  # nothing is cached, so nothing is missing
