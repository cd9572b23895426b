"""The picture of a run, as SVG: loss, accuracy of every step, and accepted length, over the tokens it has seen."""

import math
from collections.abc import Sequence
from typing import Any

from aquiline.measure.chart import COLOURS, Line, Panel, Points, svg

_POINTS = 200  # a line of more is drawn as means


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Rows are those of log.jsonl; the one of step 0, if any, has an evaluation alone."""
    done = [row for row in rows if row.get("evaluation")]
    updates = [row for row in rows if row["step"] > 0]
    steps = len(updates[0]["accuracy"]) if updates else 0
    loss = [Line("loss", COLOURS[0], _means([(r["tokens"], r["loss"]) for r in updates if r["loss"] is not None]))]
    accuracy = [
        Line(f"step {k}", COLOURS[k % len(COLOURS)], _means([(r["tokens"], r["accuracy"][k]) for r in updates]))
        for k in range(steps)
    ]
    tau = {"walk": [(r["tokens"], r["evaluation"]["tau"]) for r in done if r["evaluation"]["tau"] is not None]}
    for row in done:
        for tree, value in (row["evaluation"]["decoded"] or {}).items():
            tau.setdefault(f"decoded {tree}", []).append((row["tokens"], value))
    lengths = [Line(name, COLOURS[2 * i % 8], points, marks=True) for i, (name, points) in enumerate(tau.items())]
    last = max((r["tokens"] for r in updates), default=1)
    return svg(
        [
            Panel("training loss", loss, last=last),
            Panel("training accuracy", accuracy, last=last),
            Panel("held-out accepted length, tau", lengths, "token passes", last=last),
        ]
    )


def _means(points: Points) -> Points:
    size = math.ceil(len(points) / _POINTS) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]
