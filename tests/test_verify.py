"""The walk: its law in exact fractions, and its text against plain decoding of a toy target."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise, product

import pytest
import torch

from aquiline.config import SamplingConfig
from aquiline.decode.sampling import Sampler, foresee
from aquiline.decode.tree import ROOT, Tree
from aquiline.decode.verify import Verdict, verify, walk

Path = tuple[int, ...]
Shape = tuple["Shape", ...]  # the shapes of the children
Law = dict[tuple[Path, int], Fraction]  # (path as tokens, bonus) -> probability

VOCAB = 4


def two_level_shapes() -> list[Shape]:
    """A root with up to 3 children, each with up to 3 leaves."""
    return [tuple(((),) * n for n in leaves) for count in range(4) for leaves in product(range(4), repeat=count)]


def three_level_shapes() -> list[Shape]:
    """One level more, the order of siblings aside."""
    below = [s for count in range(4) for s in combinations_with_replacement([((),) * n for n in range(4)], count)]
    return [s for count in range(4) for s in combinations_with_replacement(below, count)]


def tree_of(shape: Shape, rng: random.Random) -> Tree:
    """A tree of this shape whose siblings carry distinct tokens in random order, level by level."""
    tokens: list[int] = []
    parents: list[int] = []
    level = [(ROOT, shape)]
    while level:
        below = []
        for node, children in level:
            for token, child in zip(rng.sample(range(VOCAB), len(children)), children, strict=True):
                below.append((len(tokens), child))
                tokens.append(token)
                parents.append(node)
        level = below
    return Tree.from_tokens(tokens, parents)


class ExactTarget:
    """A distribution in fractions for every path, with zeros."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._probs: dict[Path, list[Fraction]] = {}

    def probs(self, path: Path) -> list[Fraction]:
        if path not in self._probs:
            weights = [self._rng.choice((0, 0, 1, 2, 3)) for _ in range(VOCAB)]
            weights[self._rng.randrange(VOCAB)] += 1
            self._probs[path] = [Fraction(w, sum(weights)) for w in weights]
        return self._probs[path]


class _Open(Exception):
    """The script has run out at this path."""


def law_of_walk(tree: Tree, target: ExactTarget) -> Law:
    """All outcomes of `walk`, found by replaying it with every sequence of tokens the target can draw."""
    nodes: dict[int, Path] = {0: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        nodes[1 + node] = (*nodes[1 + parent], token)
    law: Law = {}
    scripts: list[tuple[Path, Fraction]] = [((), Fraction(1))]
    while scripts:
        script, probability = scripts.pop()

        def choose(row: int, path: list[int], script: Path = script) -> int:
            assert tuple(path) == script[: len(path)] == nodes[row]  # the row asked for is that of the path
            if len(path) == len(script):
                raise _Open
            return script[len(path)]

        try:
            verdict = walk(tree, choose)
        except _Open:
            for token, p in enumerate(target.probs(script)):
                if p:
                    scripts.append(((*script, token), probability * p))
        else:
            assert tuple(verdict.tokens) == script
            assert tuple(verdict.tokens[:-1]) == nodes[verdict.rows[-1]]
            key = (script[:-1], verdict.bonus)
            law[key] = law.get(key, Fraction(0)) + probability
    return law


def law_of_rejection(tree: Tree, target: ExactTarget) -> Law:
    """The reference: each child in turn accepted with the residual's probability, else struck out of it."""
    children: dict[int, list[tuple[int, int]]] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        children.setdefault(parent, []).append((node, token))
    law: Law = {}

    def visit(node: int, path: Path, probability: Fraction) -> None:
        residual = list(target.probs(path))
        for child, token in children.get(node, []):
            accept = residual[token]
            if accept:
                visit(child, (*path, token), probability * accept)
            if accept == 1:
                return
            probability *= 1 - accept
            residual[token] = Fraction(0)
            residual = [r / (1 - accept) for r in residual]
        for token, r in enumerate(residual):
            if r:
                law[path, token] = probability * r

    visit(ROOT, (), Fraction(1))
    return law


@pytest.mark.parametrize(
    ("shapes", "count"), [(two_level_shapes(), 85), (three_level_shapes(), 8436)], ids=["85", "8436"]
)
def test_emitted_tokens_follow_the_target_exactly(shapes: list[Shape], count: int) -> None:
    """Whatever is emitted has the target's own probability, and there is nothing else."""
    assert len(shapes) == count
    rng = random.Random(0)
    for seed, shape in enumerate(shapes):
        target = ExactTarget(seed)
        law = law_of_walk(tree_of(shape, rng), target)
        for (path, bonus), probability in law.items():
            tokens = (*path, bonus)
            expected = Fraction(1)
            for i, token in enumerate(tokens):
                expected *= target.probs(tokens[:i])[token]
            assert probability == expected
        assert sum(law.values()) == 1


def test_joint_law_equals_sequential_rejection() -> None:
    rng = random.Random(1)
    shapes = three_level_shapes()
    for seed in range(1000):
        tree, target = tree_of(rng.choice(shapes), rng), ExactTarget(seed)
        assert law_of_walk(tree, target) == law_of_rejection(tree, target)


def biased_first_token(target_probs: list[Fraction], draft_probs: list[Fraction]) -> list[Fraction]:
    """What must not be done: accept a sampled draft token by min(1, p/q), then take a one-token residual."""
    law = [Fraction(0)] * VOCAB
    for token, q in enumerate(draft_probs):
        accept = min(Fraction(1), target_probs[token] / q)
        law[token] += q * accept
        rest = 1 - target_probs[token]
        for other in range(VOCAB):
            if other != token:
                law[other] += q * (1 - accept) * target_probs[other] / rest
    return law


def test_first_token_over_many_seeds_follows_the_target_not_the_draft() -> None:
    p = [Fraction(n, 10) for n in (2, 3, 1, 4)]
    q = [Fraction(n, 10) for n in (5, 1, 3, 1)]
    biased = biased_first_token(p, q)
    assert sum(biased) == 1
    assert biased != p
    logits_NV = torch.tensor([[float(x) for x in p]] * 3).log()
    tree = Tree.from_paths([[0], [2]])  # the draft's two best
    counts: Counter[int] = Counter()
    accepted = 0
    for seed in range(20_000):
        verdict = verify(tree, Sampler(SamplingConfig(temperature=1.0, seed=seed), [], 4), 1, logits_NV=logits_NV)
        counts[verdict.tokens[0]] += 1
        accepted += len(verdict.path)
    assert sum((counts[t] - 20_000 * float(x)) ** 2 / (20_000 * float(x)) for t, x in enumerate(p)) < 16.27
    assert accepted == counts[0] + counts[2]
    power = sum((20_000 * float(x - b)) ** 2 / (20_000 * float(x)) for x, b in zip(p, biased, strict=True))
    assert power > 100  # and this many seeds would show it


def test_acceptance_falls_smoothly_as_the_temperature_rises() -> None:
    """What counts is the mass on ALL children, not the draft's top token being drawn."""
    logits_V = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, -1.0])
    tree = Tree.from_paths([[0], [1], [2]])
    shares = []
    for temperature in (0.2, 0.5, 0.8, 1.0, 1.25, 1.5):
        expected_V = (logits_V / temperature).softmax(0)
        counts: Counter[int] = Counter()
        accepted = 0
        for seed in range(1000):
            sampler = Sampler(SamplingConfig(temperature=temperature, seed=seed), [], 6)
            verdict = verify(tree, sampler, 3, logits_NV=logits_V.expand(4, 6))
            counts[verdict.tokens[0]] += 1
            accepted += len(verdict.path)
        likely = [t for t in range(6) if 1000 * expected_V[t] > 5]
        chi_square = sum((counts[t] - 1000 * float(expected_V[t])) ** 2 / (1000 * float(expected_V[t])) for t in likely)
        assert chi_square < 20.5  # 5 degrees of freedom, level 1e-3
        assert abs(accepted / 1000 - float(expected_V[:3].sum())) < 0.045
        shares.append(accepted / 1000)
    assert shares[0] > 0.98
    assert shares[-1] > 0.75
    assert all(b < a + 0.03 for a, b in pairwise(shares))


class ToyTarget:
    """Logits that depend on all tokens so far, a little peaked; token 0 is the favourite everywhere."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size, self._seed = vocab_size, seed

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self._seed, tuple(ids))) % 2**40)
        logits_V = 2 * torch.randn(self.vocab_size, generator=generator)
        logits_V[0] += 2
        return logits_V


SETTINGS = {
    "greedy": SamplingConfig(),
    "no favourite": SamplingConfig(logit_bias=((0, -100.0),)),
    "repetition": SamplingConfig(repetition_penalty=1.3),
    "presence, frequency": SamplingConfig(presence_penalty=0.7, frequency_penalty=0.4),
    "sampled": SamplingConfig(temperature=1.0, seed=11),
    "all": SamplingConfig(1.2, 6, 0.95, 0.02, 1.2, 0.3, 0.2, ((0, -100.0), (3, 1.5)), seed=12),
}
PROMPT, LENGTH = [5, 6, 5], 40


def plain(target: ToyTarget, config: SamplingConfig) -> list[int]:
    sampler, ids = Sampler(config, PROMPT, target.vocab_size), list(PROMPT)
    while len(ids) < len(PROMPT) + LENGTH:
        ids.append(sampler.choose(target.logits(ids), len(ids)))
        sampler.commit(ids[-1:])
    return ids[len(PROMPT) :]


def cycles(target: ToyTarget, config: SamplingConfig, draft: Callable[[list[int]], Tree]) -> Iterator[Verdict]:
    """Speculative decoding without a model: `draft` gives the tree for the tokens so far."""
    sampler, ids = Sampler(config, PROMPT, target.vocab_size), list(PROMPT)
    while len(ids) < len(PROMPT) + LENGTH:
        tree = draft(ids)
        rows: list[list[int]] = [[]]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            rows.append([*rows[1 + parent], token])
        logits_NV = torch.stack([target.logits(ids + path) for path in rows])
        verdict = verify(tree, sampler, len(ids), logits_NV=logits_NV)
        if sampler.plain_greedy:
            assert verify(tree, sampler, len(ids), argmax_N=logits_NV.argmax(-1).tolist()) == verdict
        assert verdict.tokens[:-1] == rows[verdict.rows[-1]]
        assert len(verdict.rows) == len(verdict.tokens)
        sampler.commit(verdict.tokens)
        ids += verdict.tokens
        yield verdict


@pytest.mark.parametrize("name", SETTINGS)
def test_text_equals_plain_decoding(name: str) -> None:
    """With planted continuations of every length among junk, so that bonus, sibling and leaf endings all occur."""
    target, config, rng = ToyTarget(12, seed=3), SETTINGS[name], random.Random(4)
    expected = plain(target, config)

    def planted(ids: list[int]) -> Tree:
        done = len(ids) - len(PROMPT)
        good = expected[done : done + rng.randint(0, 6)]
        paths = [[rng.randrange(12) for _ in range(rng.randint(0, 4))] for _ in range(4)]
        paths.insert(rng.randint(0, 4), good)
        return Tree.from_paths([good[: rng.randint(0, len(good))] + path for path in paths] + [good])

    for draft, floor in ((planted, 2.5), (lambda ids: Tree.empty(), 1.0)):
        verdicts = list(cycles(target, config, draft))
        text = [token for verdict in verdicts for token in verdict.tokens]
        assert text[:LENGTH] == expected
        assert len(text) / len(verdicts) >= floor  # equality alone would also pass with a walk that accepts nothing
    if config.logit_bias:
        assert 0 not in expected
    elif name == "greedy":
        assert expected.count(0) > 5


def test_a_tree_grown_by_what_is_known_of_the_races_does_not_change_the_law() -> None:
    """Two tokens in a row, of 4,000 seeds, where each tree holds what its own draft expects to win; chi-square."""
    generator = torch.Generator().manual_seed(2)
    target = {path: torch.randn(4, generator=generator) for path in [(), (0,), (1,), (2,), (3,)]}
    draft = {path: logits + torch.randn(4, generator=generator) for path, logits in target.items()}
    ids, counts, accepted = torch.arange(4), Counter[tuple[int, ...]](), 0
    for seed in range(4000):
        sampler = Sampler(SamplingConfig(temperature=1.0, seed=seed), [], 4)

        def best(path: tuple[int, ...], count: int, of: Sampler = sampler) -> list[int]:
            noise_V = foresee([of.foresight], [5 + len(path)], 1, ids)[1][0, 0]
            return (draft[path] + noise_V).topk(count).indices.tolist()  # type: ignore[no-any-return]

        tree = Tree.from_paths([[a, b] for a in best((), 2) for b in best((a,), 1)])
        rows = [(), *((t,) if d == 1 else None for t, d in zip(tree.tokens, tree.depths, strict=True))]
        logits_NV = torch.stack([torch.zeros(4) if row is None else target[row] for row in rows])
        tokens = verify(tree, sampler, 5, logits_NV=logits_NV).tokens
        accepted += len(tokens) - 1
        if len(tokens) == 1:  # the next cycle
            tokens.append(sampler.choose(target[tokens[0],], 6))
        counts[tuple(tokens[:2])] += 1
    statistic = 0.0
    for a, b in product(range(4), repeat=2):
        expected = 4000 * float(target[()].softmax(0)[a] * target[a,].softmax(0)[b])
        statistic += (counts[a, b] - expected) ** 2 / expected
    assert statistic < 37.7  # 15 degrees of freedom, level 1e-3
    assert accepted > 4000
