"""Which tree pays: measured seconds of passes, calibrated chances of nodes, and the best expected tokens per second.

    V(n)        seconds of a target pass over n tokens of each row, verification and keeping included
    c(w)        seconds of one draft level of w nodes of each row, tree building included; likewise of the draft's
                first pass of a cycle, over w new real rows
    chance      of a node: that the target accepts it with all its ancestors
    rate        (B + sum of the chances of the nodes verified) / (draft passes + V(1 + nodes)), tokens per second

A tree goes one level deeper while that is expected to raise the rate, and of the nodes made as many are verified as
give the highest: all numbers of nodes are tried, for V is stepped. Where even the best rate is below that of the plain
step, a request rests: plain steps, then a try, after twice as many steps each time it fails.

Letters: B rows, M nodes made so far, K nodes of the level that could run next, C children given to each.
Sources: Sequoia (arXiv 2402.12374), OPT-Tree (2406.17276); the draft's probabilities are over-confident, hence the
calibration.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aquiline.decode.tree import ROOT, Tree
from aquiline.model.machine import ForeignLoad

KINDS = ("target", "first", "level")  # of passes
Floats = np.ndarray[Any, np.dtype[np.float64]]

PROBED = (1, 2, 4, 8, 16, 32, 64)  # tokens of each row at which a pass is measured
WIDTHS = (1, 2, 4, 8)  # nodes of each row that one draft level may run
_PROBE_SECONDS = 2.0  # of one kind of pass: what is not measured by then is extrapolated
_SHORTEST_CONTEXT = 256  # cached tokens; a bucket holds up to twice as many as the one before
_DEPTHS = 8
_EDGES = torch.tensor([0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95]).log()
_FIRST_REST, _LONGEST_REST = 4, 64  # plain steps


class PassCosts:
    """Seconds by tokens of a row: linear between the points measured, and moved by every further reading."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self._at = np.array(sorted(seconds), dtype=np.float64)
        self._seconds = np.array([seconds[n] for n in sorted(seconds)], dtype=np.float64)
        self._table: Floats | None = None

    def table(self) -> Floats:
        """`[1 + most tokens]`, entry n for n tokens; entry 0 is that of 1. Never falls with n."""
        if self._table is None:
            n = np.arange(int(self._at[-1]) + 1)
            self._table = np.maximum.accumulate(np.interp(n, self._at, self._seconds))
        return self._table

    def __call__(self, tokens: int) -> float:
        """Beyond the largest point in proportion to the tokens."""
        table = self.table()
        most = len(table) - 1
        return float(table[tokens] if tokens <= most else table[most] * tokens / most)

    def observe(self, tokens: int, seconds: float) -> None:
        """Move the points around `tokens` towards a reading; one far off counts as half off at most."""
        if tokens > self._at[-1]:
            return
        expected = float(np.interp(tokens, self._at, self._seconds))
        step = 0.05 * float(np.clip(seconds - expected, -expected / 2, expected / 2))
        right = int(np.searchsorted(self._at, tokens))
        left = right if self._at[right] == tokens else right - 1
        share = 1.0 if left == right else float((tokens - self._at[left]) / (self._at[right] - self._at[left]))
        self._seconds[left] += step * (1 - share if left != right else 1.0)
        if left != right:
            self._seconds[right] += step * share
        self._table = None

    def points(self) -> dict[int, float]:
        return {int(n): float(s) for n, s in zip(self._at, self._seconds, strict=True)}


def probe(run: Callable[[int], object], sizes: Sequence[int], seconds: float = _PROBE_SECONDS) -> dict[int, float]:
    """Time `run(n)` for each size, the faster of two readings behind one that is not counted. Once `seconds` are
    spent, larger sizes are taken to cost in proportion to the largest measured.
    """
    began = time.perf_counter()
    found: dict[int, float] = {}
    for n in sizes:
        if found and time.perf_counter() - began > seconds:
            largest = max(k for k in found if k < n)
            found[n] = found[largest] * n / largest
            continue
        readings = []
        for _ in range(3):
            start = time.perf_counter()
            run(n)
            readings.append(time.perf_counter() - start)
        found[n] = min(readings[1:])
    return found


class Costs:
    """V and c of one target and draft on this machine, by batch size and context; kept in a file, where one is given.

    A batch size (to the next power of two) is probed once; at another context it starts as what is known of the
    nearest, and real passes move it.
    """

    def __init__(self, file: Path | None, depends: dict[str, Any], load: ForeignLoad | None = None) -> None:
        self._file, self._depends, self._load = file, depends, load or ForeignLoad()
        self._costs: dict[tuple[str, int, int], PassCosts] = {}
        self._readings: list[tuple[PassCosts, int, float]] = []  # of the time since the load was looked at
        self._unsaved = 0
        if file is not None:
            self._costs = _read(file, depends)

    def known(self, batch: int) -> bool:
        return any(b == _bucket(batch, 1) for _, b, _ in self._costs)

    def probe(self, batch: int, context: int, target: Callable[[int], object], level: Callable[[int], object]) -> None:
        """Time both passes; a cycle's first draft pass is at first taken to cost what a level does. What was timed
        while others kept the machine busy is not saved, and later readings move it.
        """
        self._load.lately()
        passes, levels = probe(target, PROBED), probe(level, WIDTHS)
        for kind, found in zip(KINDS, (passes, levels, levels), strict=True):
            self._costs[kind, _bucket(batch, 1), _bucket(context, _SHORTEST_CONTEXT)] = PassCosts(found)
        if not self._load.lately():
            self.save()

    def of(self, kind: str, batch: int, context: int) -> PassCosts:
        """Of a kind of pass (`KINDS`) at this batch size, which is `known`, with so many tokens cached."""
        key = (kind, _bucket(batch, 1), _bucket(context, _SHORTEST_CONTEXT))
        if key not in self._costs:
            near = min((k for k in self._costs if k[:2] == key[:2]), key=lambda k: abs(math.log(k[2] / key[2])))
            self._costs[key] = PassCosts(self._costs[near].points())
        return self._costs[key]

    def observe(self, costs: PassCosts, tokens: int, seconds: float) -> None:
        """A real pass. It counts once the machine is seen to have been left to us meanwhile."""
        self._readings.append((costs, tokens, seconds))
        busy = self._load.lately()
        if busy is None:
            return
        if not busy:
            for at, n, s in self._readings:
                at.observe(n, s)
            self._unsaved += len(self._readings)
        self._readings.clear()
        if self._unsaved >= 2000:
            self.save()

    def record(self) -> dict[str, dict[int, float]]:
        """Milliseconds by tokens of a row, by kind of pass, batch size and context."""
        named = {f"{k}, batch to {b}, context to {n}": costs for (k, b, n), costs in sorted(self._costs.items())}
        return {k: {n: round(1e3 * s, 3) for n, s in costs.points().items()} for k, costs in named.items()}

    def save(self) -> None:
        """Write the file, as a whole. Where it cannot be written, the next start measures again."""
        self._unsaved = 0
        if self._file is None:
            return
        points = {" ".join(map(str, key)): costs.points() for key, costs in self._costs.items()}
        part = self._file.with_suffix(".part")
        try:
            part.write_text(json.dumps({"depends": self._depends, "seconds": points}, indent=1), encoding="utf-8")
            part.replace(self._file)
        except OSError:
            return


def costs_file(folder: Path | None, depends: dict[str, Any]) -> Path | None:
    """Where the costs of something stand: one file for everything they depend on alike."""
    if folder is None:
        return None
    text = json.dumps(depends, sort_keys=True)
    return folder / f"costs-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _read(file: Path, depends: dict[str, Any]) -> dict[tuple[str, int, int], PassCosts]:
    """What a file holds; nothing where it is missing, damaged, or of something else: then it is measured anew."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["depends"] != depends:
            return {}
        costs = {}
        for name, points in found["seconds"].items():
            kind, batch, context = name.split(" ")
            seconds = {int(n): float(s) for n, s in points.items()}
            if not seconds or not all(n >= 1 and 0 < s < 1e3 for n, s in seconds.items()):
                return {}
            costs[kind, int(batch), int(context)] = PassCosts(seconds)
        found_kinds = {(b, kind) for kind, b, _ in costs}
        return costs if all((b, kind) in found_kinds for b, _ in found_kinds for kind in KINDS) else {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def _bucket(value: int, smallest: int) -> int:
    """The next power of two times the smallest."""
    return int(smallest * 2 ** math.ceil(math.log2(max(value, smallest) / smallest)))


class Calibration:
    """Chance of a node, its parent being accepted, from the draft's own probability of it and its depth.

    That probability times a factor: accepted over expected of the nodes judged so far with about that probability
    (`_EDGES`) at that depth, beginning as if 2 had been expected and 1.8 accepted; old ones fade.
    """

    def __init__(self) -> None:
        self._expected = torch.zeros(_DEPTHS, len(_EDGES) + 1)
        self._accepted = torch.zeros_like(self._expected)

    def log_chances(self, log_probs: Tensor, depth: int) -> Tensor:
        """Of the children at a depth, all shapes; at most 0."""
        at = min(depth, _DEPTHS) - 1
        factors = ((1.8 + self._accepted[at]) / (2.0 + self._expected[at])).log().to(log_probs.device)
        return (log_probs + factors[torch.bucketize(log_probs, _EDGES.to(log_probs.device))]).clamp(max=0)

    def learn(self, depths_N: Tensor, log_probs_N: Tensor, accepted_N: Tensor) -> None:
        """Nodes whose parents were accepted, and whether they were."""
        at = (depths_N.clamp(max=_DEPTHS) - 1, torch.bucketize(log_probs_N, _EDGES))
        self._expected.mul_(0.998)
        self._accepted.mul_(0.998)
        self._expected.index_put_(at, log_probs_N.exp(), accumulate=True)
        self._accepted.index_put_(at, accepted_N.float(), accumulate=True)


@dataclass
class Mood:
    """What a request's last cycles say: how far its text can be trusted to be accepted, and whether it rests."""

    expected: float = 0.0  # accepted tokens of its last cycles, as the calibration has them
    accepted: float = 0.0
    resting: int = 0  # plain steps left
    rest: int = _FIRST_REST
    value: float | None = None  # smoothed log of the rate of its trees over that of the plain step
    trying: bool = False

    @property
    def trust(self) -> float:
        """Factor on every chance, per depth."""
        return min(1.2, (2.0 + self.accepted) / (2.0 + self.expected))

    def judged(self, expected: float, accepted: int) -> None:
        """A tree was verified."""
        self.expected = 0.85 * self.expected + expected
        self.accepted = 0.85 * self.accepted + accepted

    def rests(self) -> bool:
        """Whether the coming step is a plain one. Resting, it forgets what made it rest."""
        if self.resting == 0:
            return False
        self.resting -= 1
        self.expected *= 0.97
        self.accepted *= 0.97
        self.trying = self.resting == 0
        return True

    def drafted(self, gain: float, nodes: int) -> None:
        """A tree was made, whose rate is `gain` times that of the plain step, the draft's time included; without any
        node that pays it has failed.
        """
        now = math.log(max(gain, 1e-3)) if nodes else min(math.log(max(gain, 1e-3)), -0.01)
        fresh = self.value is None or self.trying
        self.value = now if fresh or self.value is None else 0.7 * self.value + 0.3 * now
        self.trying = False
        if self.value < 0:
            self.resting, self.rest = self.rest, min(2 * self.rest, _LONGEST_REST)
        elif now > 0:
            self.rest = _FIRST_REST


def best_nodes(chances_BM: Floats, pass_seconds: Floats, spent: float, batch: int) -> tuple[int, float]:
    """(nodes of each row to verify, expected tokens per second of the whole batch).

    `chances_BM` of the rows that draft, descending along M. `pass_seconds` are V's table; `spent` seconds go into
    drafting.
    """
    most = min(chances_BM.shape[1], len(pass_seconds) - 2)
    tokens = np.concatenate(([0.0], chances_BM[:, :most].sum(0).cumsum())) + batch
    rates = tokens / (spent + pass_seconds[1 : 2 + most])
    best = int(rates.argmax())
    return best, float(rates[best])


@dataclass
class Chooser:
    """Costs, calibration, and what children are worth on average: everything a choice rests on."""

    costs: Costs
    calibration: Calibration = field(default_factory=Calibration)
    profile_DC: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # by depth and rank, parent accepted

    def chances_of_children(self, log_probs_BKC: Tensor, depth: int, moods: Sequence[Mood]) -> Tensor:
        """Calibrated log chances, parents accepted."""
        trust = torch.tensor([math.log(mood.trust) for mood in moods], device=log_probs_BKC.device)
        return (self.calibration.log_chances(log_probs_BKC, depth) + trust[:, None, None]).clamp(max=0)

    def saw(self, chances_BKC: Floats, parents_BK: Floats, depth: int) -> None:
        """Learn what children of this depth are worth: their mean, weighted by the chances of their parents."""
        C = chances_BKC.shape[-1]
        if self.profile_DC.shape != (_DEPTHS, C):
            self.profile_DC = np.tile(0.5 * 0.4 ** np.arange(C), (_DEPTHS, 1))
        mean = (chances_BKC * parents_BK[..., None]).sum((0, 1)) / max(parents_BK.sum(), 1e-9)
        at = min(depth, _DEPTHS) - 1
        self.profile_DC[at] += 0.05 * (mean - self.profile_DC[at])

    def next_width(
        self, chances_BM: Floats, level_BK: Floats, depth: int, spent: float, batch: int, context: int
    ) -> int:
        """How many nodes the draft should run at the next level; 0: the tree is deep enough.

        `chances_BM` of all nodes made, `level_BK` of those that could run, both descending; `depth` of the latter.
        """
        V, c = self.costs.of("target", batch, context).table(), self.costs.of("level", batch, context)
        best, width = best_nodes(chances_BM, V, spent, batch)[1], 0
        children_C = self.profile_DC[min(depth + 1, _DEPTHS) - 1]
        for w in WIDTHS:
            if w > level_BK.shape[1]:
                break
            further_BM = (level_BK[:, :w, None] * children_C).reshape(len(level_BK), -1)
            all_BM = -np.sort(-np.concatenate((chances_BM, further_BM), axis=1), axis=1)
            rate = best_nodes(all_BM, V, spent + c(w), batch)[1]
            if rate > best:
                best, width = rate, w
        return width

    def learn(self, tree: Tree, path: Sequence[int], mood: Mood) -> None:
        """A verified tree of a row: every node whose parent was accepted has been judged."""
        if len(tree) == 0 or tree.steps_N is None:
            return
        visited = torch.tensor([ROOT, *path])
        parents, depths, steps = tree.parents_N.cpu(), tree.depths_N.cpu(), tree.steps_N.cpu()
        judged = torch.isin(parents, visited)
        accepted = torch.zeros(len(tree), dtype=torch.bool)
        accepted[list(path)] = True
        chances = tree.scores_N.cpu() - math.log(mood.trust) * depths
        mood.judged(float(chances.clamp(max=0).exp().sum()), len(path))
        self.calibration.learn(depths[judged], steps[judged], accepted[judged])
