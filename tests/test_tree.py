"""The drafted tree against brute force: growth, re-ranking, masks, batches of unequal rows, scripted trees."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aquiline.config import TreeConfig
from aquiline.decode.tree import ROOT, Tree, TreeBuilder, flatten

Path = tuple[int, ...]
LogProbs = Callable[[Path], list[float]]  # path of target ids -> log-probabilities over the draft vocabulary


def toy_draft(seed: int, width: int, values: Sequence[float]) -> LogProbs:
    """A draft that depends on its whole path. Values are distinct within a row, for `topk` breaks ties anyhow."""

    def log_probs(path: Path) -> list[float]:
        return random.Random(repr((seed, path))).sample(list(values), width)

    return log_probs


def quarters(width: int) -> list[float]:
    """Sums of these are exact in float32, and tie in plenty."""
    return [-0.25 * i for i in range(2 * width)]


def grow(configs: Sequence[TreeConfig], drafts: Sequence[LogProbs], target_ids_W: torch.Tensor) -> list[Tree]:
    """Drive the builder as a step does. A node's path, read off its mask, must be that of its feature."""
    builder = TreeBuilder(configs, target_ids_W)
    features: list[list[Path]] = [[()] for _ in configs]
    run: list[list[Path]] = [[] for _ in configs]  # path of every drafted node run so far
    level = builder.extend(*torch.tensor([draft(()) for draft in drafts]).topk(builder.top_k))
    while level is not None:
        num_before = len(run[0])
        assert level.mask_BKM.shape == (*level.tokens_BK.shape, num_before + level.tokens_BK.shape[1])
        for b, draft_run in enumerate(run):
            rows, tokens = level.feature_rows_BK[b].tolist(), level.tokens_BK[b].tolist()
            paths = [(*features[b][row], token) for row, token in zip(rows, tokens, strict=True)]
            draft_run += paths
            for i, path in enumerate(paths):
                assert len(path) == level.depth
                seen = [j for j, sees in enumerate(level.mask_BKM[b, i].tolist()) if sees]
                assert seen[-1] == num_before + i  # itself
                assert [draft_run[j] for j in seen] == [
                    path[: d + 1] for d in range(len(path))
                ]  # its ancestors, no one
            features[b] = paths
        log_probs = [[draft(path) for path in rows] for draft, rows in zip(drafts, features, strict=True)]
        level = builder.extend(*torch.tensor(log_probs).topk(builder.top_k))
    return builder.rerank()


def reference(config: TreeConfig, draft: LogProbs, target_ids: Sequence[int]) -> list[tuple[Path, np.float32]]:
    """EAGLE-2 growth and re-ranking in plain Python: (path, score) of the nodes kept, in order."""
    k = min(config.top_k, len(target_ids))
    made: list[tuple[Path, np.float32]] = []
    parents: list[tuple[Path, np.float32]] = [((), np.float32(0))]
    for _ in range(config.depth):
        level = []
        for path, score in parents:
            log_probs = draft(path)
            for w in sorted(range(len(log_probs)), key=lambda w: -log_probs[w])[:k]:
                level.append(((*path, target_ids[w]), np.float32(score + np.float32(log_probs[w]))))
        made += level
        parents = sorted(level, key=lambda node: -node[1])[:k]  # sorted is stable: creation order
    order = sorted(range(len(made)), key=lambda i: (-made[i][1], len(made[i][0]), i))
    return [made[i] for i in order[: config.num_nodes]]


def paths_of(tree: Tree) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token))
    return paths


def assert_sound(tree: Tree) -> None:
    """Every parent is kept, before its child, one level up, and the order is (score, depth)."""
    parents, depths, scores = tree.parents, tree.depths, tree.scores
    for i, parent in enumerate(parents):
        assert parent < i
        assert depths[i] == (1 if parent == ROOT else depths[parent] + 1)
    keys = [(-score, depth) for score, depth in zip(scores, depths, strict=True)]
    assert keys == sorted(keys)
    assert len(set(paths_of(tree))) == len(tree)


CONFIGS = ["1:1:1", "4:1:4", "6:1:3", "1:5:9", "3:2:5", "4:3:100", "5:4:20", "6:8:60", "2:8:3"]


@pytest.mark.parametrize("text", CONFIGS)
@pytest.mark.parametrize("width", [1, 3, 12])  # 1 and 3 are below most top-k
def test_grow_and_rerank_equal_brute_force(text: str, width: int) -> None:
    config = TreeConfig.parse(text)
    target_ids_W = torch.randperm(50, generator=torch.Generator().manual_seed(width))[:width]
    for seed in range(3):
        draft = toy_draft(seed, width, quarters(width))
        (tree,) = grow([config], [draft], target_ids_W)
        expected = reference(config, draft, target_ids_W.tolist())
        assert paths_of(tree) == [path for path, _ in expected]
        assert tree.scores == [float(score) for _, score in expected]
        assert_sound(tree)


def test_rows_with_unequal_limits_equal_rows_alone() -> None:
    configs = [TreeConfig.parse(text) for text in CONFIGS]
    drafts = [toy_draft(seed, 9, quarters(9)) for seed in range(len(configs))]
    target_ids_W = torch.arange(9) * 3
    for config, draft, tree in zip(configs, drafts, grow(configs, drafts, target_ids_W), strict=True):
        (alone,) = grow([config], [draft], target_ids_W)
        assert paths_of(tree) == paths_of(alone)
        assert tree.scores == alone.scores


def test_rerank_before_the_depth_is_reached_gives_a_shallower_tree() -> None:
    draft = toy_draft(0, 6, quarters(6))
    builder = TreeBuilder([TreeConfig(5, 3, 8)], torch.arange(6))
    level = builder.extend(*torch.tensor([draft(())]).topk(3))
    assert level is not None
    assert level.tokens_BK.shape == (1, 3)
    (tree,) = builder.rerank()
    assert paths_of(tree) == [path for path, _ in reference(TreeConfig(1, 3, 8), draft, range(6))]


def grow_random(config: TreeConfig, num_rows: int, log_probs: Callable[[int], torch.Tensor]) -> TreeBuilder:
    """A builder after all levels, `log_probs(nodes)` giving [B, nodes, W] for each."""
    probe = log_probs(1)
    builder = TreeBuilder([config] * num_rows, torch.arange(probe.shape[-1]))
    level = builder.extend(*probe.topk(builder.top_k))
    while level is not None:
        level = builder.extend(*log_probs(level.tokens_BK.shape[1]).topk(builder.top_k))
    return builder


def test_confident_trees_keep_every_parent() -> None:
    """A sure child (log-probability 0 or nearly) ties with its parent: a plain top-k of all nodes loses parents."""
    generator = torch.Generator().manual_seed(0)

    def confident(nodes: int) -> torch.Tensor:
        return (40 * torch.randn(2000, nodes, 16, generator=generator)).log_softmax(-1)

    config = TreeConfig(5, 4, 12)
    builder = grow_random(config, 2000, confident)
    for tree in builder.rerank():
        assert len(tree) == 12
        assert_sound(tree)
    scores_BM, parents_BM = torch.cat(builder._scores, 1), torch.cat(builder._parents, 1)
    lost = 0
    for nodes, parents in zip(scores_BM.topk(12).indices.tolist(), parents_BM.tolist(), strict=True):
        lost += any(parents[node] not in (ROOT, *nodes) for node in nodes)
    assert lost > 200, "the case is not hard enough to prove anything"


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 10**9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 30))
def test_float32_ties_keep_every_parent(seed: int, depth: int, top_k: int, num_nodes: int) -> None:
    rng = random.Random(seed)
    steps = [0.0, 1e-9, 2e-9, 3e-9, 4e-9, 2e-8, 6e-8, 1e-7, 0.5, 0.5 + 6e-8, 1.0, 2.0, 3e38, float("inf")]
    draft = toy_draft(seed, rng.randint(1, 8), [-step for step in steps] + [1e-7])  # 1e-7: rounded above 0
    (tree,) = grow([TreeConfig(depth, top_k, num_nodes)], [draft], torch.arange(len(draft(()))))
    assert_sound(tree)
    assert len(tree) <= num_nodes


def test_a_draft_that_cannot_score_makes_no_node() -> None:
    nan = grow_random(TreeConfig(3, 2, 6), 2, lambda nodes: torch.full((2, nodes, 5), torch.nan))
    assert [len(tree) for tree in nan.rerank()] == [0, 0]
    builder = TreeBuilder([TreeConfig(2, 2, 6)], torch.arange(3))
    assert builder.extend(*torch.tensor([[-1.0, -2.0, -3.0]]).topk(2)) is not None
    builder.extend(*torch.tensor([[[torch.nan] * 3, [-1.0, -2.0, -3.0]]]).topk(2))  # only below the better parent
    assert [paths_of(tree) for tree in builder.rerank()] == [[(0,), (1,), (1, 0), (1, 1)]]


def random_tree(rng: random.Random, num_nodes: int) -> Tree:
    return Tree.from_tokens(range(100, 100 + num_nodes), [rng.randint(ROOT, i - 1) for i in range(num_nodes)])


def ancestors(tree: Tree) -> list[set[int]]:
    """Per entry (root = 0) the entries it may attend to, by following parents."""
    parents = tree.parents
    sees = []
    for node in range(-1, len(tree)):
        seen = {0}
        while node != ROOT:
            seen.add(node + 1)
            node = parents[node]
        sees.append(seen)
    return sees


def test_mask_and_positions_equal_brute_force() -> None:
    rng = random.Random(1)
    trees = [random_tree(rng, n) for n in range(40)] + [Tree.from_paths([range(n)]) for n in (1, 2, 3, 4, 5, 33)]
    for tree in trees:
        sees = ancestors(tree)
        flat = flatten([tree], [3], [7])
        mask = flat.mask_BNN[0]
        assert mask.dtype == torch.bool
        assert mask.tolist() == [[j in row for j in range(1 + len(tree))] for row in sees]
        assert flat.positions_BN.tolist() == [[7 + len(row) - 1 for row in sees]]


def test_flatten_pads_without_showing_it() -> None:
    rng = random.Random(2)
    trees = [random_tree(rng, n) for n in (5, 0, 9)]
    flat = flatten(trees, [11, 12, 13], [20, 30, 40])
    assert flat.ids_BN.shape == (3, 10)
    assert flat.mask_BNN.shape == (3, 10, 10)
    for b, tree in enumerate(trees):
        n = 1 + len(tree)
        assert flat.ids_BN[b, :n].tolist() == [11 + b, *tree.tokens]
        alone = flatten([tree], [11 + b], [20 + 10 * b])
        assert torch.equal(flat.positions_BN[b, :n], alone.positions_BN[0])
        assert torch.equal(flat.mask_BNN[b, :n, :n], alone.mask_BNN[0])
        assert not flat.mask_BNN[b, :n, n:].any()
        for pad in range(n, 10):
            assert flat.mask_BNN[b, pad].nonzero()[:, 0].tolist() == [0, pad]
            assert (int(flat.ids_BN[b, pad]), int(flat.positions_BN[b, pad])) == (11 + b, 20 + 10 * b)
    plain = flatten([Tree.empty()] * 2, [3, 4], [5, 6])
    assert (plain.ids_BN.tolist(), plain.positions_BN.tolist()) == ([[3], [4]], [[5], [6]])
    assert plain.mask_BNN.tolist() == [[[True]], [[True]]]


def test_scripted_trees() -> None:
    tree = Tree.from_paths([[1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 6]])
    assert paths_of(tree) == [(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,), (1, 2, 3, 6)]
    assert tree.depths == [1, 2, 3, 3, 1, 4]
    assert (tree.child(ROOT, 1), tree.child(1, 4), tree.child(ROOT, 2), tree.child(4, 1)) == (0, 3, None, None)
    assert paths_of(tree.prefix(3)) == [(1,), (1, 2), (1, 2, 3)]
    assert paths_of(Tree.from_paths([[1, 2], [3, 4]], max_nodes=3)) == [(1,), (1, 2), (3,)]
    assert [len(t) for t in (Tree.empty(), Tree.from_paths([]), Tree.from_paths([[], []]))] == [0, 0, 0]
    assert len(Tree.from_paths([[1, 2]], max_nodes=0)) == 0
    for tokens, parents in [([1, 1], [ROOT, ROOT]), ([1, 2], [1, ROOT]), ([1], [0]), ([1], [])]:
        with pytest.raises(AssertionError):
            Tree.from_tokens(tokens, parents)
