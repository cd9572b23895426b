"""Which tree pays: measured seconds of passes, calibrated chances of nodes, and the best expected tokens per second.

    V(n)        seconds of a target pass over n tokens of each row, or over n B in all where padding is not computed;
                verification and keeping included
    c(w)        seconds of one draft level of w nodes of each row, tree building included; likewise of the draft's
                first pass of a cycle, over w new real rows, with all else that its trees cost
    chance      of a node: that the target accepts it with all its ancestors
    rate        (B + sum of the chances of the nodes verified) / (draft passes + V(1 + nodes)), tokens per second

A tree goes one level deeper while the nodes that would run are likely enough, each for its children to compete with
those verified lately, and together for what such a level has brought lately to be worth its price. Of the nodes made as
many are verified as give the highest rate, the likeliest of all rows where padding is not computed: all numbers
of nodes are tried, for V is stepped. Where even the best rate is below that of the plain step, a request rests: plain
steps, then a try, after twice as many steps each time it fails. A batch rests as a whole, and one row tries for all:
its draft reads what was written meanwhile, and how much of that it would have guessed says what drafting would bring.

Letters: B rows, N nodes of a tree.
Sources: Sequoia (arXiv 2402.12374), OPT-Tree (2406.17276); the draft's probabilities are over-confident, hence the
calibration.
"""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aquiline.config import TreeConfig, UserError
from aquiline.decode.tree import Tree
from aquiline.files.disk import write_json_atomic
from aquiline.model.machine import ForeignLoad

KINDS = ("target", "first", "level")  # of passes
_Key = tuple[str, int, int]  # kind, batch size, context

# Tokens of each row at which a target pass is measured, in this order. Kernels have their steps behind multiples of 8
# or 12.
PROBED = (1, 8, 4, 16, 12, 32, 9, 13, 2, 17, 6, 25, 24, 33, 64)
WIDTHS = (4, 8)  # nodes of each row that one draft level may run; fewer where the batch bears no more
PROBED_WIDTHS = (4, 8, 1)
MOST_NODES = 63
_MOST_PROBED = 512  # tokens of all rows: memory for more is not asked for on trial
_PROBE_SECONDS = 2.5  # of both kinds of pass together; 1 and 8 tokens are measured however long they take
_SHORTEST_CONTEXT = 256  # cached tokens; a bucket holds up to twice as many as the one before
_DEPTHS = 8
_EDGES = [math.log(p) for p in (0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)]
_FADE = 0.998  # of what was learnt about chances, per step
_READING_PRICE = 0.03  # of a batch's drafts reading prompts, and what came while it rested, as a share of plain steps
_TRIED = 0.98  # of what earlier tries of a batch have seen, that counts behind each token more
_GAIN = 0.5  # tokens that a level brings per probability of the nodes it runs, before anything is known
_FIRST_REST, _LONGEST_REST = 4, 64  # plain steps
_LONGEST_REST_OF_ALL = 256  # of a batch, in which a try delays all rows
_LOOK_FAR = 32  # of so many trees of a request one may be as large as any
_LOOK_BACK = 32  # behind so many trees there is a plain step, without which nobody knew any more what it takes
LONGEST_CATCH_UP = _LONGEST_REST + 16  # rows: more are a prompt's or of a batch's long rest, which come once
_STEP, _DRIFT = 0.08, 0.02  # of what a reading is off, that its size moves, and all sizes
_SAVE_SECONDS = 60.0
_FIRST_RETRY = 10.0  # seconds until what was measured under load is measured again; then twice as long each time


class PassCosts:
    """Seconds by tokens of a row: linear between the points measured and, by the last slope, beyond them; moved by
    every further reading.
    """

    def __init__(self, seconds: dict[int, float], *, plain: bool = False) -> None:
        """`plain`: the least tokens are a plain step's, of which readings of others say nothing."""
        self._plain = plain
        self._points = dict(sorted(seconds.items()))
        self._unread = dict.fromkeys(seconds, 0)  # readings since one of so many tokens
        self._table: list[float] | None = None

    def table(self) -> list[float]:
        """`[2 + MOST_NODES]`, entry n for n tokens; entry 0 is that of 1. Never falls with n."""
        if self._table is None:
            self._table = self.curve(range(2 + MOST_NODES))
        return self._table

    def curve(self, tokens: Iterable[float]) -> list[float]:
        """Of so many tokens, which rise; they need not be whole: rows of a batch may have more or fewer."""
        # Not by NumPy: behind a pass, which has emptied the caches, its operators took four times as long.
        points = list(self._points.items())
        (left, low), *others = points
        right, high = others.pop(0) if others else points[0]
        slope = (high - low) / (right - left) if right > left else 0.0
        values, most = [], 0.0
        for n in tokens:
            while n > right and others:
                left, low, (right, high) = right, high, others.pop(0)
                slope = (high - low) / (right - left)
            if n > right:
                value = high + max(0.0, slope) * (n - right)
            else:
                value = low + slope * max(0.0, n - left)
            most = max(most, value)
            values.append(most)
        return values

    def __call__(self, tokens: int) -> float:
        """Of so many tokens, or of the most that the table has."""
        table = self.table()
        return table[min(tokens, len(table) - 1)]

    def observe(self, tokens: float, seconds: float) -> None:
        """Move the points around `tokens` towards a reading; one far off counts as half off at most. Beyond the last
        point it makes a new one. Of points seldom read a reading counts for more.
        """
        least = min(self._points) if self._plain else 0
        above = [n for n in self._points if n >= tokens]
        below = [n for n in self._points if n <= tokens]
        if not above:
            self._points[math.ceil(tokens)] = max(seconds, self._points[below[-1]])
            self._unread[math.ceil(tokens)] = 0
        else:
            right, left = above[0], below[-1] if below else above[0]
            share = (tokens - left) / (right - left) if right > left else 0.0
            # Of these points alone: what the table says may be that of a lower one, which they are not to make up for.
            expected = (1 - share) * self._points[left] + share * self._points[right]
            off = min(max(seconds / expected - 1, -0.5), 0.5)
            # A little is taken to be true of all: sizes that are not met any more go with those that are. A plain step
            # goes with none: what trees cost beside their tokens is not its.
            moved = [n for n in self._points if n > least or tokens <= least]
            self._points |= {n: self._points[n] * (1 + _DRIFT * off) for n in moved}
            share = 1.0 if left == least and tokens > least else share
            for n, part in {left: 1 - share, right: share or 1.0}.items():
                seldom = min(0.4, _STEP / 4 * self._unread[n])
                moved_to = self._points[n] + part * (max(_STEP, seldom) - _DRIFT) * off * expected
                self._points[n] = max(self._points[n] / 2, moved_to)  # never to nothing
                self._unread[n] = self._unread[n] if part < 0.5 else -1
            self._unread = {n: count + 1 for n, count in self._unread.items()}
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

    Between two powers of two one batch size is probed, once; others, and other contexts, start as what is known of the
    nearest, and real passes move them. What was timed while others kept the machine busy is used, but not saved, and
    before long measured again: passes so dear that no tree pays are never seen again otherwise.
    """

    def __init__(self, file: Path | None, depends: dict[str, Any], load: ForeignLoad | None = None) -> None:
        self._file, self._depends, self._load = file, depends, load or ForeignLoad()
        self._costs: dict[_Key, PassCosts] = {} if file is None else _read(file, depends)
        self._trusted = set(self._costs)  # measured on a machine that was left to us: these are saved
        self._readings: list[tuple[PassCosts, float, float]] = []  # since the load was looked at
        self._saved_at, self._changed = time.monotonic(), False
        self._retries: dict[int, tuple[float, float]] = {}  # by batch size: when, and how long it was until then

    def known(self, batch: int) -> bool:
        """Whether a batch size, or one between the same powers of two, need not be probed now."""
        bucket = _bucket(batch, 1)
        keys = [key for key in self._costs if key[0] == "target" and _bucket(key[1], 1) == bucket]
        return bool(keys) and (not self._trusted.isdisjoint(keys) or time.monotonic() < self._retries[bucket][0])

    def probe(self, batch: int, context: int, target: Callable[[int], object], level: Callable[[int], object]) -> None:
        """Time both passes; a cycle's first draft pass is at first taken to cost what a level does."""
        self._settle()
        until = time.perf_counter() + _PROBE_SECONDS
        levels = probe(level, PROBED_WIDTHS, batch, until)
        passes = probe(target, PROBED, batch, until)
        busy, bucket = self._settle(), _bucket(batch, 1)
        wait = 2 * self._retries[bucket][1] if bucket in self._retries else _FIRST_RETRY
        self._retries[bucket] = (time.monotonic() + wait, wait)
        # Without copies of what was known before.
        self._costs = {key: costs for key, costs in self._costs.items() if _bucket(key[1], 1) != bucket}
        self._trusted &= self._costs.keys()
        for kind, found in zip(KINDS, (passes, levels, levels), strict=True):
            key = (kind, _size(batch), _bucket(context, _SHORTEST_CONTEXT))
            self._costs[key] = PassCosts(found, plain=kind == "target")
            if not busy:
                self._trusted.add(key)
        self.save()

    def of(self, kind: str, batch: int, context: int) -> PassCosts:
        """Of a kind of pass (`KINDS`), of which some batch size is `known`, with so many tokens cached."""
        key = (kind, _size(batch), _bucket(context, _SHORTEST_CONTEXT))
        if key not in self._costs:
            bucket = _bucket(batch, 1)
            apart, _, _, near = min(
                (_bucket(k[1], 1) != bucket, abs(math.log(k[1] / key[1])), abs(math.log(k[2] / key[2])), k)
                for k in self._costs
                if k[0] == kind
            )
            self._costs[key] = PassCosts(self._costs[near].points(), plain=kind == "target")
            if near in self._trusted and not apart:  # else what is between these powers of two is still to be probed
                self._trusted.add(key)
        return self._costs[key]

    def observe(self, costs: PassCosts, tokens: float, seconds: float) -> None:
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
            costs[kind, int(batch), int(context)] = PassCosts(seconds, plain=kind == "target")
        return costs if {kind for kind, _, _ in costs} == set(KINDS) else {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def _size(batch: int) -> int:
    """Up to 8 itself, then to the next quarter of the way to the next power of two."""
    step = _bucket(batch, 8) // 8
    return -(-batch // step) * step


def _bucket(value: int, smallest: int) -> int:
    """The next power of two times the smallest."""
    return int(smallest * 2 ** math.ceil(math.log2(max(value, smallest) / smallest)))


class Calibration:
    """Chance of a node from the draft's probability of its path, and its depth.

    That probability (for sampled rows: of being drawn, by what is known of the draw; they share the factors) times a
    factor: accepted over expected of the nodes verified so far with about that probability (`_EDGES`) at that depth,
    beginning as if 2 had been expected and 1.8 accepted. What was learnt fades.
    """

    def __init__(self) -> None:
        # Lists: a cycle asks for a dozen nodes, for which arrays cost more.
        self._expected, self._accepted = ([[0.0] * (len(_EDGES) + 1) for _ in range(_DEPTHS)] for _ in range(2))

    def chances(self, depths_N: Sequence[int], log_probs_N: Sequence[float]) -> list[float]:
        """`[N]`, at most 1."""
        found = []
        for depth, log_prob in zip(depths_N, log_probs_N, strict=True):
            at, bucket = _cell(depth, log_prob)
            factor = (1.8 + self._accepted[at][bucket]) / (2.0 + self._expected[at][bucket])
            found.append(min(1.0, math.exp(log_prob) * factor))
        return found

    def learn(self, depths_N: Sequence[int], log_probs_N: Sequence[float], accepted: Container[int]) -> None:
        """Nodes that were verified, and which of them were accepted."""
        for node, (depth, log_prob) in enumerate(zip(depths_N, log_probs_N, strict=True)):
            at, bucket = _cell(depth, log_prob)
            self._expected[at][bucket] += math.exp(log_prob)
            self._accepted[at][bucket] += node in accepted

    def fade(self) -> None:
        """Forget a little."""
        for of_depths in (self._expected, self._accepted):
            of_depths[:] = [[_FADE * seen for seen in of_buckets] for of_buckets in of_depths]


def _cell(depth: int, log_prob: float) -> tuple[int, int]:
    """Where the calibration has nodes of that depth and about that probability."""
    return min(depth, _DEPTHS) - 1, bisect.bisect_left(_EDGES, log_prob)


@dataclass
class Mood:
    """What a request's last cycles say: how far its text can be trusted to be accepted, and whether it rests."""

    expected: float = 0.0  # accepted nodes of its last cycles, as the calibration has them
    accepted: float = 0.0
    resting: int = 0  # plain steps left
    rest: int = _FIRST_REST
    longest_rest: int = _LONGEST_REST
    value: float | None = None  # smoothed log of the rate of its trees over that of the plain step
    trying: bool = False  # the next tree is the first behind a rest
    looking: bool = False  # the rest is one step, to see what a plain one takes
    price: float = 1.0  # of the last tree, its draft passes included, in plain steps
    pace: float = 1.0  # smoothed rate of its batch with trees, in plain ones
    nodes: float = 8.0  # smoothed, of its trees; of a batch where all nodes compete, of all of these together
    guessed: float = 0.0  # of `seen` tokens that a batch wrote while it rested, how many would have been guessed
    seen: float = 0.0
    failed: int = 0  # tries since a batch drafted
    tries: int = 0  # of the request for its batch
    trees: int = 0
    drafts: int = 0  # of all whose rests these are

    @property
    def trust(self) -> float:
        """Factor on the chance of every node."""
        return min(1.2, (2.0 + self.accepted) / (2.0 + self.expected))

    def judged(self, expected: float, accepted: int) -> None:
        """A tree was verified: so many of its nodes were expected to be accepted, and were."""
        self.expected = 0.85 * self.expected + expected
        self.accepted = 0.85 * self.accepted + accepted
        if 1 + accepted > self.price:  # it has paid, whatever was expected
            self.resting, self.rest = int(self.looking), _FIRST_REST

    def rests(self) -> bool:
        """Whether the coming step is a plain one."""
        if self.resting == 0:
            return False
        self.resting -= 1
        self.trying = self.resting == 0 and not self.looking
        self.looking = self.looking and self.resting > 0
        return True

    def forget(self) -> None:
        """At a step of its batch's rest: what made it rest."""
        self.expected *= 0.97
        self.accepted *= 0.97

    def drafted(self, tokens: float, price: float, nodes: int, *, whole: bool = False) -> None:
        """A tree was made of which so many `tokens` are expected, at a `price` in plain steps; without any node that
        pays it has failed. What those of a `whole` batch bring varies less around what they are worth, and has to pay
        for what their drafts read in the steps between.
        """
        weight = 0.1 if whole else 0.3
        now = math.log(max(tokens / price, 1e-3)) if nodes else min(-math.log(price), -0.01)
        now -= _READING_PRICE if whole else 0.0
        fresh = self.value is None or self.trying
        self.value = now if fresh or self.value is None else (1 - weight) * self.value + weight * now
        self.trying, self.price = False, price
        self.drafts += 1
        if self.drafts % _LOOK_BACK == 0 and self.resting == 0:
            self.resting, self.looking = 1, True
        self.failed = 0
        if self.value < 0:
            self._rest()
        elif now > 0:  # of a batch one such step says little
            self.rest = max(_FIRST_REST, self.rest * 9 // 10 if whole else 0)

    def tried(self, chance: float, guessed: int, seen: int, share: float, price: float) -> None:
        """One row has tried for a batch that rests: so many of the tokens `seen` it would have `guessed`, and its node
        has that `chance`. Were all to draft a node, which are `share` of the rows, a step would take `price` plain
        ones. They have to gain what it takes the others to catch up.
        """
        kept = _TRIED**seen
        self.guessed, self.seen = kept * self.guessed + guessed, kept * self.seen + seen
        likely = (2 * chance + self.guessed) / (2 + self.seen)
        self.trying = False
        self.value = math.log((1 + share * likely) / price) - _READING_PRICE
        if self.value < 0:
            self.failed += 1
            self._rest()

    def _rest(self) -> None:
        self.resting, self.rest, self.looking = self.rest, min(2 * self.rest, self.longest_rest), False


def best_nodes(
    chances_BN: Sequence[Sequence[float]], pass_seconds: Sequence[float], spent: float, batch: int, ragged: bool
) -> tuple[list[int], float]:
    """(nodes of each row to verify, expected tokens per second of the whole batch).

    `chances_BN` of the rows that draft, in the order of their trees. `pass_seconds` by the nodes verified: of all rows
    together if `ragged`, where these compete, else of each row. `spent` seconds go into drafting.
    """
    if ragged:
        # A node behind a less likely one is taken with it, so that what is taken of a row comes first in its tree.
        falling = [itertools.accumulate(chances_N, min) for chances_N in chances_BN]
        found = [(-least, b, n) for b, row in enumerate(falling) for n, least in enumerate(row)]
        steps = [[(b, chances_BN[b][n])] for _, b, n in sorted(found)]
    else:
        longest = max(map(len, chances_BN))
        steps = [[(b, row[n]) for b, row in enumerate(chances_BN) if n < len(row)] for n in range(longest)]
    tokens, taken, best = float(batch), 0, batch / (spent + pass_seconds[0])
    for n, step in enumerate(steps[: len(pass_seconds) - 1], 1):
        tokens += sum(chance for _, chance in step)
        rate = tokens / (spent + pass_seconds[n])
        if rate > best:
            taken, best = n, rate
    counts = Counter(b for step in steps[:taken] for b, _ in step)
    return [counts[b] for b in range(len(chances_BN))], best


@functools.cache  # every row asks for the same again and again
def cut(config: TreeConfig, depth: int, top_k: int, nodes: int) -> TreeConfig:
    """A tree of no more than that."""
    depth, top_k, nodes = min(config.depth, depth), min(config.top_k, top_k), min(config.num_nodes, nodes)
    return dataclasses.replace(config, depth=depth, top_k=top_k, num_nodes=nodes)


@dataclass
class Chooser:
    """Costs, calibration, and what deeper levels bring: everything a choice rests on."""

    costs: Costs
    ragged: bool = False  # whether the target computes no padding
    calibration: Calibration = field(default_factory=Calibration)
    gains: dict[int, list[float]] = field(default_factory=dict)  # by batch size: of running nodes of depth 1, 2, ...
    batches: dict[int, Mood] = field(default_factory=dict)  # by batch size: of their rests alone

    def resting(self, row: Mood, batch: int) -> Mood:
        """Whose rests count: those of a request that is alone, else those of all batches of that size, for its rows
        share one pass: one that tries makes the step dearer for all.
        """
        if batch == 1:
            return row
        return self.batches.setdefault(_bucket(batch, 1), Mood(trying=True, longest_rest=_LONGEST_REST_OF_ALL))

    def pass_seconds(self, batch: int, context: int, taken: Sequence[int], most: int) -> list[float]:
        """Of a target pass of `batch` rows, by the nodes chosen: of all rows if `ragged`, else of each; up to `most` of
        them. `taken`: the nodes of rows about which nothing is chosen.
        """
        costs = self.costs.of("target", batch, context)
        if batch > 1 and self.ragged:
            return costs.curve((batch + sum(taken) + n) / batch for n in range(1 + most))
        table, least = costs.table(), 1 + max(taken, default=0)
        return [table[min(max(1 + n, least), len(table) - 1)] for n in range(1 + min(most, MOST_NODES))]

    def limits(self, config: TreeConfig, mood: Mood, batch: int, context: int) -> TreeConfig:
        """How far the coming tree may go: about twice the nodes that paid lately, in levels half as wide as these; now
        and then further, for what pays may lie beyond sizes that do not. Never much further than to a pass that takes
        twice the plain one's time.
        """
        mood.trees += 1
        V = self.costs.of("target", batch, context).table()
        bearable = max(1, bisect.bisect_right(V, 2 * V[1]) - 2)  # nodes of each row
        width, most = WIDTHS[-1], MOST_NODES
        if mood.trees % _LOOK_FAR:
            width = next((w for w in WIDTHS if 2 * w > mood.nodes), width)
            most = 2 * math.ceil(max(mood.nodes, 4))
        depth, nodes = min(_DEPTHS, 2 * bearable), min(most, 2 * bearable)
        return cut(config, depth, min(width, bearable), nodes)

    def margin(self, V: Sequence[float], batch: int, resting: Mood) -> float:
        """Seconds of a pass for one node more than were verified lately; `V`: `pass_seconds`, of two more at least."""
        few = min(round(resting.nodes), len(V) - 3)
        return (V[few + 2] - V[few]) / (2 if batch > 1 and self.ragged else 2 * batch)

    def worth(
        self, mood: Mood, level_seconds: float, node_seconds: float, batch: int, plain_rate: float
    ) -> list[float]:
        """How likely a node must be to be run: as likely as its children must be to be verified. And how likely the
        nodes of depth 1, 2, ... must be, together: a level's price in tokens over what it brings. `level_seconds`: of
        a level, over the rows that share it; `node_seconds`: `margin`.
        """
        rate = plain_rate * mood.pace
        gains = self._gains(batch)
        levels = [rate * level_seconds / max(gain * mood.trust, 1e-3) for gain in gains]
        return [min(0.9, rate * node_seconds / mood.trust) if mood.trees % _LOOK_FAR else 0.0, *levels]

    def _gains(self, batch: int) -> list[float]:
        return self.gains.setdefault(_bucket(batch, 1), [_GAIN] * _DEPTHS)

    def nodes(
        self, trees: Sequence[Tree], ran: int, V: Sequence[float], spent: float, batch: int, moods: Sequence[Mood],
        resting: Mood | None = None,
    ) -> list[int]:  # fmt: skip
        """How many nodes of each tree made are verified, which the moods of their rows are told. Where padding is
        computed they share one number: nodes beside another row's are free. Behind a request's rest there is a node at
        least, or nothing would be learnt. `V`: `pass_seconds`. `ran`: levels that were run, the first one included.
        `resting`: whose rests count, by default those of the first row.
        """
        chances_BN = [
            [min(1.0, mood.trust * chance) for chance in self.calibration.chances(tree.depths, tree.scores)]
            for tree, mood in zip(trees, moods, strict=True)
        ]
        ragged = batch > 1 and self.ragged
        counts, rate = best_nodes(chances_BN, V, spent, batch, ragged)
        taken = sum(counts) if ragged else max(counts)
        resting = resting or moods[0]
        trying = resting.trying
        gained = sum(sum(chances_N[:nodes]) for chances_N, nodes in zip(chances_BN, counts, strict=True))
        for chances_N, tree, mood, nodes in zip(chances_BN, trees, moods, counts, strict=True):
            if len(trees) == 1 or max(tree.depths, default=0) == ran:  # else it may have stopped before the others
                self._learn_gain(self._gains(batch), tree, chances_N, ran, nodes, mood)
            mood.pace = 0.8 * mood.pace + 0.2 * rate * V[0] / batch
            mood.nodes = 0.7 * mood.nodes + 0.3 * nodes
        whole = resting is not moods[0]
        if whole:
            resting.nodes = 0.7 * resting.nodes + 0.3 * taken
        resting.drafted(1 + gained / batch, (spent + V[taken]) / V[0], taken, whole=whole)
        return [1] if trying and taken == 0 else counts

    def tried(
        self, tree: Tree, guessed: int, seen: int, V: Sequence[float], spent: float, batch: int, alike: int, mood: Mood,
        resting: Mood,
    ) -> None:  # fmt: skip
        """One row has tried for `alike`, which rest, with this tree; as `Mood.tried`. What drafting costs is not read
        while they rest: it is doubted more with each try that fails, down to a half, or what was too dear once would
        be for ever.
        """
        spent *= max(0.5, 0.95**resting.failed)
        chance = mood.trust * sum(self.calibration.chances(tree.depths[:1], tree.scores[:1]))
        price = (spent + V[alike if batch > 1 and self.ragged else 1]) / V[0]
        resting.tried(min(1.0, chance), guessed, seen, alike / batch, price)

    def _learn_gain(
        self, gains: list[float], tree: Tree, chances_N: Sequence[float], ran: int, nodes: int, mood: Mood
    ) -> None:
        """Of the deepest level: what the nodes verified are worth more than as many without it would be."""
        if ran < 2 or len(tree) == 0:
            return
        depths = tree.depths
        shallow = [chance for chance, depth in zip(chances_N, depths, strict=True) if depth < ran]
        gained = sum(chances_N[:nodes]) - sum(shallow[:nodes])
        likely = sum(math.exp(s) for s, depth in zip(tree.scores, depths, strict=True) if depth == ran - 1)
        at = min(ran - 1, _DEPTHS) - 1
        gains[at] += 0.05 * (gained / max(mood.trust * likely, 1e-3) - gains[at])

    def fade(self) -> None:
        """At every step, plain ones too: what made trees too dear is forgotten, or nothing would be judged again."""
        self.calibration.fade()
        for gains in self.gains.values():
            gains[:] = [gain + (1 - _FADE) * (_GAIN - gain) for gain in gains]

    def learn(self, tree: Tree, path: Sequence[int], mood: Mood) -> None:
        """What became of a tree that this chose."""
        if len(tree) == 0:
            return
        depths = tree.depths
        mood.judged(sum(self.calibration.chances(depths, tree.scores)), len(path))
        self.calibration.learn(depths, tree.scores, path)
