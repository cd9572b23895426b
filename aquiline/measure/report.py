"""The picture of a record that `bench` or `eval` wrote: what it holds of speed, acceptance and costs."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aquiline.config import UserError, require
from aquiline.decode.cost import KINDS, PassCosts
from aquiline.measure.chart import COLOURS, Line, Panel, colour, svg

Curve = dict[int, float]  # milliseconds by tokens of a row
_Curves = Mapping[tuple[str, int], Curve]  # by kind of pass and batch size
_GREY = "#888"


def picture(record: Mapping[str, Any], name: str | Path) -> str:
    """As SVG. UserError where there is nothing to draw; `name` is the record's, for the message."""
    try:
        curves = _curves(record.get("costs_ms", {}))
        panels = [_speedups(record), _taus(record), _measured(record, curves), _passes(curves)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{name} is no record of bench or eval: {error!r}") from error
    drawn = [panel for panel in panels if any(line.points for line in panel.lines if line.label)]
    require(bool(drawn), f"{name} holds nothing to draw; expected a record that bench or eval wrote, with its times")
    return svg(drawn)


def _speedups(record: Mapping[str, Any]) -> Panel:
    """By batch size, a line for each tree; of one size alone a dot for each, by its nodes. The bars are the rounds'
    range.
    """
    batches = {int(batch): block["trees"] for batch, block in record.get("batches", {}).items()}
    lines, names = [], list(dict.fromkeys(tree for trees in batches.values() for tree in trees))
    for i, tree in enumerate(names):
        ways = {math.log2(b): trees[tree] for b, trees in batches.items() if trees[tree]["speedup"] is not None}
        if len(batches) == 1:
            ways = {way["mean_nodes"]: way for way in ways.values() if way["mean_nodes"] is not None}
        points = [(x, way["speedup"]) for x, way in ways.items()]
        ranges = [(x, way["speedup_min"], way["speedup_max"]) for x, way in ways.items()]
        lines.append(Line(tree, colour(i, len(names)), points, marks=True, ranges=ranges))
    if len(batches) == 1:
        most = max((x for line in lines for x, _ in line.points), default=1.0)
        lines.append(Line("", _GREY, [(0.0, 1.0), (most, 1.0)]))
        return Panel(f"speed-up over plain decoding, batch {min(batches)}", lines, "drafted nodes per cycle")
    marks = {math.log2(b): str(b) for b in batches}
    if marks:
        lines.append(Line("", _GREY, [(min(marks), 1.0), (max(marks), 1.0)]))
    return Panel("speed-up over plain decoding", lines, "batch size", marks)


def _taus(record: Mapping[str, Any]) -> Panel:
    """A dot for each tree, of the smallest batch; of an evaluation, for each task."""
    dots: dict[str, tuple[float, float]] = {}
    if record.get("batches"):
        smallest = record["batches"][min(record["batches"], key=int)]["trees"]
        dots = {tree: (way["mean_nodes"], way["tau"]) for tree, way in smallest.items() if way["tau"] is not None}
    for task, block in record.get("tasks", {}).items():
        tree = record["settings"]["tree"]
        nodes = block["trees"]["mean_nodes"] if tree == "auto" else int(tree.split(":")[2])
        if block["tau"] is not None and nodes is not None:
            dots[task] = nodes, block["tau"]
    lines = [Line(name, colour(i, len(dots)), [point]) for i, (name, point) in enumerate(dots.items())]
    return Panel("tokens per cycle, tau", lines, "drafted nodes per cycle")


def _measured(record: Mapping[str, Any], curves: _Curves) -> Panel:
    """A dot for each batch and tree: the target's part of a cycle, and the draft's where the tree says its passes."""
    target, draft = [], []
    for text, block in record.get("batches", {}).items():
        batch = int(text)
        for tree, way in {"plain": block["plain"], **block["trees"]}.items():
            # With `auto` steps with a tree and without take turns: of them a mean says nothing.
            if way["breakdown"] is None or tree == "auto" or any((kind, batch) not in curves for kind in KINDS):
                continue
            ms = way["breakdown"]["ms"]
            V, first, level = (PassCosts(curves[kind, batch]) for kind in ("target", "first", "level"))
            target.append((V(1 + round(way.get("mean_nodes") or 0)), ms["target"] + ms["accept"] + ms["keep"]))
            if tree != "plain":
                depth, width, _ = map(int, tree.split(":"))
                draft.append((first(round(way["tau"] or 1)) + (depth - 1) * level(width), ms["draft"]))
    pairs = (("target pass", COLOURS[0], target), ("draft passes", COLOURS[6], draft))
    lines = [
        Line(name, paint, [(math.log10(m), seen / m) for m, seen in points], joined=False)
        for name, paint, points in pairs
    ]
    places = [x for line in lines for x, _ in line.points]
    marks = range(math.floor(min(places, default=0.0)), math.ceil(max(places, default=1.0)) + 1)
    lines.append(Line("", _GREY, [(float(marks[0]), 1.0), (float(marks[-1]), 1.0)]))
    return Panel("measured over modelled time", lines, "modelled milliseconds", {x: f"{10.0**x:g}" for x in marks})


def _passes(curves: _Curves) -> Panel:
    """What a target pass over several tokens of a row costs, by batch size; sizes between powers of two, through which
    batches shrink, only where there are no others.
    """
    passes = [(batch, curve) for (kind, batch), curve in sorted(curves.items()) if kind == "target"]
    passes = [(batch, curve) for batch, curve in passes if batch & (batch - 1) == 0] or passes
    lines = [
        Line(f"batch to {b}", colour(i, len(passes)), [(n, ms / curve[1]) for n, ms in curve.items()], marks=True)
        for i, (b, curve) in enumerate(passes)
    ]
    return Panel("modelled target pass, in plain steps", lines, "tokens of a row")


def _curves(costs_ms: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, int], Curve]:
    """By kind of pass and batch size, of the shortest context of each."""
    found: dict[tuple[str, int], tuple[int, Curve]] = {}
    for name, points in costs_ms.items():
        match = re.fullmatch(r"(\w+), batch to (\d+), context to (\d+)", name)
        require(match is not None, f"{name!r} is no kind of pass")
        assert match is not None
        key, context = (match[1], int(match[2])), int(match[3])
        if key not in found or context < found[key][0]:
            found[key] = context, {int(n): ms for n, ms in points.items()}
    return {key: curve for key, (_, curve) in found.items()}
