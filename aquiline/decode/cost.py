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

import contextlib
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

from aquiline.config import UserError
from aquiline.decode.tree import ROOT, Tree
from aquiline.files.disk import write_json_atomic
from aquiline.model.machine import ForeignLoad

KINDS = ("target", "first", "level")  # of passes
_Key = tuple[str, int, int]  # kind, batch size, context
Floats = np.ndarray[Any, np.dtype[np.float64]]

PROBED = (1, 8, 2, 32, 4, 16, 64)  # tokens of each row at which a target pass is measured, in this order
WIDTHS = (1, 2, 4, 8)  # nodes of each row that one draft level may run
MOST_NODES = 63
_MOST_PROBED = 512  # tokens of all rows: memory for more is not asked for on trial
_PROBE_SECONDS = 2.5  # of both kinds of pass together; 1 and 8 tokens are measured however long they take
_SHORTEST_CONTEXT = 256  # cached tokens; a bucket holds up to twice as many as the one before
_DEPTHS = 8
_EDGES = torch.tensor([0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95]).log()
_FADE = 0.998  # of what was learnt about chances, per step
_FIRST_REST, _LONGEST_REST = 4, 64  # plain steps
LONGEST_CATCH_UP = _LONGEST_REST + 16  # rows: more are a prompt's, which come once
_SAVE_SECONDS = 60.0


class PassCosts:
    """Seconds by tokens of a row: linear between the points measured and, by the last slope, beyond them; moved by
    every further reading.
    """

    def __init__(self, seconds: dict[int, float]) -> None:
        self._points = dict(sorted(seconds.items()))
        self._table: Floats | None = None

    def table(self) -> Floats:
        """`[2 + MOST_NODES]`, entry n for n tokens; entry 0 is that of 1. Never falls with n."""
        if self._table is None:
            n = np.arange(2 + MOST_NODES)
            at, seconds = np.array(list(self._points)), np.array(list(self._points.values()))
            values = np.interp(n, at, seconds)
            if len(at) > 1:
                slope = max(0.0, (seconds[-1] - seconds[-2]) / (at[-1] - at[-2]))
                values = np.where(n > at[-1], seconds[-1] + slope * (n - at[-1]), values)
            self._table = np.maximum.accumulate(values)
        return self._table

    def __call__(self, tokens: int) -> float:
        """Of so many tokens, or of the most that the table has."""
        table = self.table()
        return float(table[min(tokens, len(table) - 1)])

    def observe(self, tokens: int, seconds: float) -> None:
        """Move the points around `tokens` towards a reading; one far off counts as half off at most. Beyond the last
        point it makes a new one.
        """
        above = [n for n in self._points if n >= tokens]
        below = [n for n in self._points if n <= tokens]
        if not above:
            self._points[tokens] = max(seconds, self._points[below[-1]])
        else:
            expected = self(tokens)
            step = 0.05 * float(np.clip(seconds - expected, -expected / 2, expected / 2))
            right, left = above[0], below[-1] if below else above[0]
            share = (tokens - left) / (right - left) if right > left else 0.0
            self._points[left] += step * (1 - share)
            if right > left:
                self._points[right] += step * share
        self._table = None

    def points(self) -> dict[int, float]:
        return dict(self._points)


def probe(run: Callable[[int], object], sizes: Sequence[int], batch: int, until: float) -> dict[int, float]:
    """Time `run(n)` for the sizes, in their order, but none after the second that, going by those before it, would
    end after `until` (of `time.perf_counter`), or has too many tokens. The first run is not counted; of quick passes
    the faster of two is taken.
    """
    found: dict[int, float] = {}
    run(sizes[0])
    for n in sizes:
        expected = max((s * max(1.0, n / k) for k, s in found.items()), default=0.0)
        late = time.perf_counter() + expected > until
        if len(found) >= 2 and (late or batch * n > _MOST_PROBED):
            continue
        readings: list[float] = []
        while not readings or (len(readings) < 2 and readings[0] < 0.1):
            start = time.perf_counter()
            run(n)
            readings.append(time.perf_counter() - start)
        found[n] = min(readings)
    return found


class Costs:
    """V and c of one target and draft on this machine, by batch size and context; kept in a file, where one is given.

    A batch size (to the next power of two) is probed once; at another context it starts as what is known of the
    nearest, and real passes move it.
    """

    def __init__(self, file: Path | None, depends: dict[str, Any], load: ForeignLoad | None = None) -> None:
        self._file, self._depends, self._load = file, depends, load or ForeignLoad()
        self._costs: dict[_Key, PassCosts] = {} if file is None else _read(file, depends)
        self._trusted = set(self._costs)  # measured on a machine that was left to us: these are saved
        self._readings: list[tuple[PassCosts, int, float]] = []  # since the load was looked at
        self._saved_at, self._changed = time.monotonic(), False

    def known(self, batch: int) -> bool:
        return any(b == _bucket(batch, 1) for _, b, _ in self._costs)

    def probe(self, batch: int, context: int, target: Callable[[int], object], level: Callable[[int], object]) -> None:
        """Time both passes; a cycle's first draft pass is at first taken to cost what a level does. What was timed
        while others kept the machine busy is used, but not saved.
        """
        self._settle()
        until = time.perf_counter() + _PROBE_SECONDS
        levels = probe(level, WIDTHS, batch, until)
        passes = probe(target, PROBED, batch, until)
        busy = self._settle()
        for kind, found in zip(KINDS, (passes, levels, levels), strict=True):
            key = (kind, _bucket(batch, 1), _bucket(context, _SHORTEST_CONTEXT))
            self._costs[key] = PassCosts(found)
            if not busy:
                self._trusted.add(key)
        self.save()

    def of(self, kind: str, batch: int, context: int) -> PassCosts:
        """Of a kind of pass (`KINDS`), of which some batch size is `known`, with so many tokens cached."""
        key = (kind, _bucket(batch, 1), _bucket(context, _SHORTEST_CONTEXT))
        if key not in self._costs:
            near = min(
                (k for k in self._costs if k[0] == kind),
                key=lambda k: (abs(math.log(k[1] / key[1])), abs(math.log(k[2] / key[2]))),
            )
            self._costs[key] = PassCosts(self._costs[near].points())
            if near in self._trusted:
                self._trusted.add(key)
        return self._costs[key]

    def observe(self, costs: PassCosts, tokens: int, seconds: float) -> None:
        """A real pass. It counts once the machine is seen to have been left to us meanwhile."""
        self._readings.append((costs, tokens, seconds))
        self._settle()

    def _settle(self) -> bool | None:
        """Learn the readings, or drop them, if it is time to look at the load; whether others kept the machine busy."""
        busy = self._load.lately()
        if busy is None:
            return None
        for at, n, seconds in self._readings:
            if not busy:
                at.observe(n, seconds)
                self._changed = True
        self._readings.clear()
        return busy

    def record(self) -> dict[str, dict[int, float]]:
        """Milliseconds by tokens of a row, by kind of pass, batch size and context."""
        named = {f"{k}, batch to {b}, context to {n}": costs for (k, b, n), costs in sorted(self._costs.items())}
        return {k: {n: round(1e3 * s, 3) for n, s in costs.points().items()} for k, costs in named.items()}

    def save_now_and_then(self) -> None:
        """For the end of a request."""
        if self._changed and time.monotonic() - self._saved_at > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the file, as a whole, with what another process put there of other sizes. Where it cannot be written,
        the next start measures again.
        """
        self._saved_at, self._changed = time.monotonic(), False
        if self._file is None or not self._trusted:
            return
        costs = _read(self._file, self._depends) | {key: self._costs[key] for key in self._trusted}
        points = {" ".join(map(str, key)): of.points() for key, of in sorted(costs.items())}
        with contextlib.suppress(UserError):
            write_json_atomic(self._file, {"depends": self._depends, "seconds": points})


def costs_file(folder: Path | None, depends: dict[str, Any]) -> Path | None:
    """Where the costs of something stand: one file for everything they depend on alike."""
    if folder is None:
        return None
    text = json.dumps(depends, sort_keys=True)
    return folder / f"costs-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _read(file: Path, depends: dict[str, Any]) -> dict[_Key, PassCosts]:
    """What a file holds; nothing where it is missing, damaged, or of something else: then it is measured anew."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["depends"] != depends:
            return {}
        costs: dict[_Key, PassCosts] = {}
        for name, points in found["seconds"].items():
            kind, batch, context = name.split(" ")
            seconds = {int(n): float(s) for n, s in points.items()}
            fine = kind in KINDS and int(batch) >= 1 and int(context) >= 1 and bool(seconds)
            if not fine or not all(n >= 1 and 0 < s < 1e3 for n, s in seconds.items()):
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
    (`_EDGES`) at that depth, beginning as if 2 had been expected and 1.8 accepted. What was learnt fades.
    """

    def __init__(self) -> None:
        self._expected = torch.zeros(_DEPTHS, len(_EDGES) + 1)
        self._accepted = torch.zeros_like(self._expected)

    def log_chances(self, log_probs: Tensor, depth: int | Tensor) -> Tensor:
        """Of children at a depth, all shapes; at most 0. `depth`: one for all, or of each."""
        at = torch.as_tensor(depth).clamp(max=_DEPTHS) - 1
        factors = ((1.8 + self._accepted) / (2.0 + self._expected)).log().to(log_probs.device)
        return (log_probs + factors[at, torch.bucketize(log_probs, _EDGES.to(log_probs.device))]).clamp(max=0)

    def learn(self, depths_N: Tensor, log_probs_N: Tensor, accepted_N: Tensor) -> None:
        """Nodes whose parents were accepted, and whether they were."""
        at = (depths_N.clamp(max=_DEPTHS) - 1, torch.bucketize(log_probs_N, _EDGES))
        self._expected.index_put_(at, log_probs_N.exp(), accumulate=True)
        self._accepted.index_put_(at, accepted_N.float(), accumulate=True)

    def fade(self) -> None:
        """At every step, plain ones too: what made trees too dear is forgotten, or nothing would be judged again."""
        self._expected.mul_(_FADE)
        self._accepted.mul_(_FADE)


@dataclass
class Mood:
    """What a request's last cycles say: how far its text can be trusted to be accepted, and whether it rests."""

    expected: float = 0.0  # accepted nodes of its last cycles, as the calibration has them
    accepted: float = 0.0
    resting: int = 0  # plain steps left
    rest: int = _FIRST_REST
    value: float | None = None  # smoothed log of the rate of its trees over that of the plain step
    trying: bool = False  # the next tree is the first behind a rest
    price: float = 1.0  # of the last tree, its draft passes included, in plain steps

    @property
    def trust(self) -> float:
        """Factor on the chance of every node, its parent being accepted."""
        return min(1.2, (2.0 + self.accepted) / (2.0 + self.expected))

    def judged(self, expected: float, accepted: int) -> None:
        """A tree was verified: of the nodes whose parents were accepted so many were expected to be, and were."""
        self.expected = 0.85 * self.expected + expected
        self.accepted = 0.85 * self.accepted + accepted
        if 1 + accepted > self.price:  # it has paid, whatever was expected
            self.resting, self.rest = 0, _FIRST_REST

    def rests(self) -> bool:
        """Whether the coming step is a plain one. Resting, it forgets what made it rest."""
        if self.resting == 0:
            return False
        self.resting -= 1
        self.expected *= 0.97
        self.accepted *= 0.97
        self.trying = self.resting == 0
        return True

    def drafted(self, tokens: float, price: float, nodes: int) -> None:
        """A tree was made of which so many `tokens` are expected, at a `price` in plain steps; without any node that
        pays it has failed.
        """
        now = math.log(max(tokens / price, 1e-3)) if nodes else min(-math.log(price), -0.01)
        fresh = self.value is None or self.trying
        self.value = now if fresh or self.value is None else 0.7 * self.value + 0.3 * now
        self.trying, self.price = False, price
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


def descending(x_BM: Floats) -> Floats:
    """Each row sorted, the largest first."""
    return -np.sort(-x_BM, axis=1)


@dataclass
class Chooser:
    """Costs, calibration, and what children are worth on average: everything a choice rests on."""

    costs: Costs
    calibration: Calibration = field(default_factory=Calibration)
    profile_DC: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # by depth and rank, parent accepted

    def chances_of_children(self, log_probs_BKC: Tensor, depth: int, moods: Sequence[Mood]) -> Tensor:
        """Calibrated log chances, parents accepted; those of siblings add up to 1 at most."""
        trust_B = torch.tensor([math.log(mood.trust) for mood in moods], device=log_probs_BKC.device)
        chances_BKC = self.calibration.log_chances(log_probs_BKC, depth) + trust_B[:, None, None]
        return chances_BKC - chances_BKC.logsumexp(-1, keepdim=True).clamp(min=0)

    def saw(self, chances_BKC: Floats, parents_BK: Floats, depth: int, moods: Sequence[Mood]) -> None:
        """Learn what children of this depth are worth where text is trusted: their mean, weighted by their parents."""
        C, trust_B = chances_BKC.shape[-1], np.array([mood.trust for mood in moods])
        if self.profile_DC.shape != (_DEPTHS, C):
            self.profile_DC = np.tile(_usual(C), (_DEPTHS, 1))
        worth_BKC = (chances_BKC / trust_B[:, None, None]).clip(max=1.0)
        mean = (worth_BKC * parents_BK[..., None]).sum((0, 1)) / max(parents_BK.sum(), 1e-9)
        at = min(depth, _DEPTHS) - 1
        self.profile_DC[at] += 0.05 * (mean - self.profile_DC[at])

    def next_width(
        self, chances_BM: Floats, level_BK: Floats, depth: int, spent: float, V: Floats, level: PassCosts,
        batch: int, moods: Sequence[Mood],
    ) -> int:  # fmt: skip
        """How many nodes the draft should run at the next level; 0: the tree is deep enough.

        `chances_BM` of all nodes made, `level_BK` of those that could run, both descending; `depth` of the latter.
        """
        best, width = best_nodes(chances_BM, V, spent, batch)[1], 0
        trust_B = np.array([mood.trust for mood in moods])
        children_BC = self.profile_DC[min(depth + 1, _DEPTHS) - 1] * trust_B[:, None]
        for w in WIDTHS:
            if w > level_BK.shape[1]:
                break
            further_BM = (level_BK[:, :w, None] * children_BC[:, None]).reshape(len(level_BK), -1)
            all_BM = descending(np.concatenate((chances_BM, further_BM), axis=1))
            rate = best_nodes(all_BM, V, spent + level(w), batch)[1]
            if rate > best:
                best, width = rate, w
        return width

    def nodes(self, chances_BM: Floats, V: Floats, spent: float, batch: int, moods: Sequence[Mood]) -> int:
        """How many nodes of each tree made are verified, which the moods of their rows are told. They share one: nodes
        beside another row's are free. Behind a rest it is one at least, or nothing would be learnt.
        """
        nodes = best_nodes(chances_BM, V, spent, batch)[0]
        trying = any(mood.trying for mood in moods)
        tokens, price = 1 + float(chances_BM[:, :nodes].sum()) / batch, float((spent + V[1 + nodes]) / V[1])
        for mood in moods:
            mood.drafted(tokens, price, nodes)
        return max(nodes, int(trying))

    def learn(self, tree: Tree, path: Sequence[int], mood: Mood) -> None:
        """A row's step: of its tree every node whose parent was accepted has been judged."""
        self.calibration.fade()
        self.profile_DC += (1 - _FADE) * (_usual(self.profile_DC.shape[1]) - self.profile_DC)
        if len(tree) == 0 or tree.steps_N is None:
            return
        parents, depths, steps = tree.parents_N.cpu(), tree.depths_N.cpu(), tree.steps_N.cpu()
        judged = torch.isin(parents, torch.tensor([ROOT, *path]))
        accepted = torch.zeros(len(tree), dtype=torch.bool)
        accepted[list(path)] = True
        mood.judged(float(self.calibration.log_chances(steps[judged], depths[judged]).exp().sum()), len(path))
        self.calibration.learn(depths[judged], steps[judged], accepted[judged])


def _usual(children: int) -> Floats:
    """Chances by rank, before anything is known."""
    return np.array([0.5 * 0.4**rank for rank in range(children)])
