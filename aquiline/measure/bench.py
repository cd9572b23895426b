"""Plain decoding and several trees in turn, batch by batch, and where a cycle's time goes -> one record.

All ways run on one loaded model and one engine. A round is four times as many prompts as are decoded at a time, decoded
in every way; which way goes first rotates from round to round. The last round is not timed as a whole: a clock runs
inside its cycles.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aquiline.api import Model
from aquiline.config import PHASES, BenchConfig, TreeConfig, require
from aquiline.decode import clock
from aquiline.decode.engine import Engine, Request
from aquiline.measure.evaluate import (
    Rendered,
    chosen,
    machine,
    model_settings,
    pooled_tau,
    versions,
    without,
)
from aquiline.measure.quiet import Quiet
from aquiline.measure.tasks import Prompt

DEFINITIONS = {
    "batch": "so many prompts are decoded at a time; as one reply ends the next prompt is submitted. Round n takes the "
    "n-th four times so many prompts, files in turn, from the first again when they run out. What prompts of one round "
    "begin with alike is run once, in every way",
    "tokens_per_second": "all generated tokens of a round / the time from its submission to its last token; the median "
    "over rounds, and their range",
    "speedup": "tokens per second / those of plain decoding, all rounds together; median, min and max are of single "
    "rounds",
    "first_token_ms": "from each request's submission to its first token, in the median and at most",
    "tau": "tokens per speculative cycle of a row; mean_nodes: drafted tokens per such cycle",
    "equal_share": "share of requests with the same token ids as plainly",
    "breakdown": "of cycles in which all rows of the batch ran, in a round of its own: their mean time. draft: its "
    "passes and the growing of the tree; target: its pass with its head; accept: the walk; keep: caches; other: the "
    "flattened tree, what `auto` learns, the engine",
    "startup": "seconds: load: imports, weights, packing; first_token and first_tokens: then, of a first request of "
    "the first tree, to its first token and to its last of 16",
    "best_fixed": "the fixed tree of the highest speedup; auto_of_best_fixed: that of auto / its speedup",
    "load": "share of the machine's processor time that other processes took during the measurement; loaded: more than "
    "a twentieth, and times then mean little",
}

TIMED = (
    "tokens_per_second", "tokens_per_second_min", "tokens_per_second_max", "first_token_ms", "first_token_ms_max",
    "speedup", "speedup_median", "speedup_min", "speedup_max", "breakdown",
)  # fmt: skip

_FIRST_TOKENS = 16
_WARM_UP = (32, 8)  # tokens of a prompt, and of its reply
_WAVES = 4  # prompts of a round for each that is decoded at a time


@dataclass(frozen=True)
class Run:
    """One round, decoded one way."""

    batch: int
    tree: TreeConfig | None  # None: plainly
    requests: list[Request]
    cycles: list[dict[str, float]] | None = None  # seconds by phase, where a clock ran

    @property
    def seconds(self) -> float:
        return max(r.finished_at or 0.0 for r in self.requests) - min(r.submitted_at for r in self.requests)

    @property
    def tokens(self) -> int:
        return sum(len(r.output_ids) for r in self.requests)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def in_turn(files: Sequence[Sequence[Rendered]]) -> list[Rendered]:
    """The first prompt of each file, then the second of each, so that any batch is a mixture."""
    return [prompt for row in itertools.zip_longest(*files) for prompt in row if prompt is not None]


def make_engine(model: Model, prompts: Sequence[Rendered], config: BenchConfig) -> Engine:
    """Room for the largest batch. UserError for a prompt that leaves no room for a reply."""
    require(model.draft is not None, "without a draft there is nothing to compare: give --draft a head or ngram")
    limit = model.target.config.max_positions
    for prompt in prompts:
        require(len(prompt.ids) < limit, f"prompt {prompt.id} has {len(prompt.ids)} tokens, the target takes {limit}")
    longest = max(len(prompt.ids) for prompt in prompts)
    return Engine(model.target, model.draft, max(config.batches), longest + config.max_new_tokens)


def start_up(model: Model, engine: Engine, prompt: Rendered, config: BenchConfig) -> dict[str, float]:
    """Seconds of the first answer of all."""
    (request,) = _requests(model, [prompt.ids], config.trees[0], min(_FIRST_TOKENS, config.max_new_tokens))
    engine.run([request])
    ends = {"first_token": request.first_token_at, "first_tokens": request.finished_at}
    return {name: end - request.submitted_at for name, end in ends.items() if end is not None}


def warm_up(model: Model, engine: Engine, prompts: Sequence[Rendered], config: BenchConfig) -> None:
    """What only a first use costs falls on no round; `auto` has met every size that a batch has at the end of one."""
    size, largest = 1, max(config.batches)
    while True:
        ids = [prompt.ids[: _WARM_UP[0]] for prompt in _round(prompts, 0, min(size, largest))]
        for tree in (None, *config.trees):
            engine.run(_requests(model, ids, tree, min(_WARM_UP[1], config.max_new_tokens)))
        if size >= largest:
            return
        size *= 2


def runs(model: Model, engine: Engine, prompts: Sequence[Rendered], config: BenchConfig) -> Iterator[Run]:
    """Every batch size, round by round; `number_of_runs` in all."""
    ways = (None, *config.trees)
    for batch in config.batches:
        for number in range(config.repeats + 1):
            ids = [prompt.ids for prompt in _round(prompts, number % config.repeats, _WAVES * batch)]
            turn = number % len(ways)
            for tree in (*ways[turn:], *ways[:turn]):
                requests = _requests(model, ids, tree, config.max_new_tokens)
                engine.forget()  # every way runs its prompts
                if number < config.repeats:
                    _decode(engine, requests, batch)
                    yield Run(batch, tree, requests)
                else:
                    yield Run(batch, tree, requests, _clocked(engine, requests, batch))


def number_of_runs(config: BenchConfig) -> int:
    return len(config.batches) * (config.repeats + 1) * (1 + len(config.trees))


def _round(prompts: Sequence[Rendered], number: int, size: int) -> list[Rendered]:
    """The `number`-th so many prompts, from the first again when they run out."""
    return [prompts[i % len(prompts)] for i in range(number * size, (number + 1) * size)]


def _requests(model: Model, prompts: Sequence[list[int]], tree: TreeConfig | None, tokens: int) -> list[Request]:
    return [model.request(ids, max_new_tokens=tokens, tree=tree, plain=tree is None) for ids in prompts]


def _decode(engine: Engine, requests: Sequence[Request], batch: int, step: Callable[[], object] | None = None) -> None:
    """Run requests to their ends, `batch` at a time, by steps of the engine."""
    step = step or engine.step
    coming = iter(requests)
    try:
        while any(r.finish_reason is None for r in requests):
            free = batch - engine.running - engine.waiting
            for request in itertools.islice(coming, free):
                engine.submit(request)
            step()
    finally:
        for request in requests:
            engine.cancel(request)


def _clocked(engine: Engine, requests: Sequence[Request], batch: int) -> list[dict[str, float]]:
    """The same; seconds by phase of every cycle in which the whole batch ran and no prompt was read."""
    cycles: list[dict[str, float]] = []

    def step() -> None:
        whole = engine.running == batch and not engine.reads_prompts
        watch.restart()
        engine.step()
        watch.lap("other")
        if whole:
            cycles.append(watch.seconds)

    with clock.running(engine.target.device) as watch:
        _decode(engine, requests, batch, step)
    return cycles


def summarise(done: Sequence[Run], config: BenchConfig) -> dict[str, Any]:
    """The record's block of each batch size of which there are runs."""
    blocks: dict[str, Any] = {}
    for batch in dict.fromkeys(run.batch for run in done):
        mine = [run for run in done if run.batch == batch]
        plain = [run for run in mine if run.tree is None]
        block: dict[str, Any] = {"plain": _way(plain), "trees": {}}
        for tree in config.trees:
            block["trees"][str(tree)] = _tree([run for run in mine if run.tree == tree], plain)
        blocks[str(batch)] = block
    return blocks


def _way(done: Sequence[Run]) -> dict[str, Any]:
    rates = [run.rate for run in done if run.cycles is None]
    waits = [
        1e3 * (r.first_token_at - r.submitted_at)
        for run in done
        for r in run.requests
        if run.cycles is None and r.first_token_at is not None
    ]
    return {
        "rounds": len(rates),
        "generated_tokens": sum(run.tokens for run in done if run.cycles is None),
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_min": min(rates),
        "tokens_per_second_max": max(rates),
        "first_token_ms": statistics.median(waits),
        "first_token_ms_max": max(waits),
        "breakdown": _breakdown([cycle for run in done for cycle in run.cycles or ()]),
    }


def _breakdown(cycles: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """None where no cycle had the whole batch and no prompt beside it."""
    if not cycles:
        return None
    ms = {phase: 1e3 * statistics.fmean(cycle[phase] for cycle in cycles) for phase in PHASES}
    total = sum(ms.values())
    return {"cycles": len(cycles), "cycle_ms": total, "ms": ms, "share": {p: x / total for p, x in ms.items()}}


def _tree(done: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """A way with a draft, against the plain runs of the same prompts."""
    pairs = list(zip(done, plain, strict=True))
    timed = [(a, b) for a, b in pairs if a.cycles is None]
    ratios = [a.rate / b.rate for a, b in timed]
    requests = [r for run, _ in timed for r in run.requests]
    equal = [a.output_ids == b.output_ids for x, y in pairs for a, b in zip(x.requests, y.requests, strict=True)]
    cycles = sum(r.cycles for r in requests)
    block = {
        **_way(done),
        "speedup": _rate([a for a, _ in timed]) / _rate([b for _, b in timed]),
        "speedup_median": statistics.median(ratios),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
        "tau": pooled_tau(requests),
        "mean_nodes": sum(r.drafted_nodes for r in requests) / cycles if cycles else None,
        "equal_share": sum(equal) / len(equal),
    }
    tree = done[0].tree
    if tree is not None and tree.auto:
        block["trees"] = chosen(requests)
    return block


def _rate(done: Sequence[Run]) -> float:
    return sum(run.tokens for run in done) / sum(run.seconds for run in done)


def make_record(
    model: Model,
    engine: Engine,
    config: BenchConfig,
    prompts: Mapping[str, Sequence[Prompt]],
    blocks: Mapping[str, Any],
    startup: Mapping[str, float],
    quiet: Quiet,
    *,
    allow_load: bool = False,
) -> dict[str, Any]:
    """The whole record. Times that were taken on a loaded machine are left empty, unless `allow_load`."""
    keep = allow_load or not quiet.loaded
    if not keep:
        blocks = {
            batch: {
                "plain": without(TIMED, block["plain"]),
                "trees": {tree: without(TIMED, way) for tree, way in block["trees"].items()},
            }
            for batch, block in blocks.items()
        }
    settings = model_settings(model, prompts) | {
        "trees": [str(tree) for tree in config.trees],
        "batches": list(config.batches),
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
    }
    return {
        "batches": {batch: block | _best(block["trees"]) for batch, block in blocks.items()},
        "startup": dict(startup) if keep else None,
        "settings": settings,
        **({} if engine.chooser is None else {"costs_ms": engine.chooser.costs.record()}),
        "machine": machine(model.target.device) | quiet.record(),
        "versions": versions(),
        "definitions": DEFINITIONS,
    }


def _best(trees: Mapping[str, Any]) -> dict[str, Any]:
    """The fastest fixed tree, and how near `auto` comes."""
    speedups = {name: way["speedup"] for name, way in trees.items() if way["speedup"] is not None}
    auto = speedups.pop("auto", None)
    if not speedups:
        return {}
    best = max(speedups, key=lambda name: speedups[name])
    return {"best_fixed": best} | ({} if auto is None else {"auto_of_best_fixed": auto / speedups[best]})
