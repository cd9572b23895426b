"""The picture of a run, as SVG: loss, accuracy of every step, and accepted length, over the tokens it has seen."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

Line = tuple[str, str, list[tuple[float, float]]]  # label, colour, points

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _GAP = 760, 190, 60, 150, 34, 44  # of a panel and around it
_COLOURS = ("#1f4e8c", "#2f7dbd", "#3fa7a0", "#64b35c", "#b3a72f", "#d98a2b", "#c9503c", "#8c3a6b")
_POINTS = 200  # a line of more is drawn as means


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Rows are those of log.jsonl; the one of step 0, if any, has an evaluation alone."""
    done = [row for row in rows if row.get("evaluation")]
    updates = [row for row in rows if row["step"] > 0]
    steps = len(updates[0]["accuracy"]) if updates else 0
    loss: list[Line] = [
        ("loss", _COLOURS[0], _means([(r["tokens"], r["loss"]) for r in updates if r["loss"] is not None]))
    ]
    accuracy: list[Line] = [
        (f"step {k}", _COLOURS[k % len(_COLOURS)], _means([(r["tokens"], r["accuracy"][k]) for r in updates]))
        for k in range(steps)
    ]
    tau = {"walk": [(r["tokens"], r["evaluation"]["tau"]) for r in done if r["evaluation"]["tau"] is not None]}
    for row in done:
        for tree, value in (row["evaluation"]["decoded"] or {}).items():
            tau.setdefault(f"decoded {tree}", []).append((row["tokens"], value))
    lengths: list[Line] = [(name, _COLOURS[2 * i % 8], points) for i, (name, points) in enumerate(tau.items())]
    last = max((r["tokens"] for r in updates), default=1)
    panels = (("training loss", loss), ("training accuracy", accuracy), ("held-out accepted length, tau", lengths))
    drawn = [_panel(i, title, lines, last, marks=i == 2) for i, (title, lines) in enumerate(panels)]
    height = len(panels) * (_HEIGHT + _TOP + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _means(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    size = math.ceil(len(points) / _POINTS) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def _panel(number: int, title: str, lines: list[Line], last: float, *, marks: bool) -> str:
    values = [y for _, _, points in lines for _, y in points]
    ticks = _ticks(min(values, default=0.0), max(values, default=1.0))
    low, high = ticks[0], ticks[-1]
    bottom = number * (_HEIGHT + _TOP + _GAP) + _TOP + _HEIGHT

    def at(x: float, y: float) -> str:
        return f"{_LEFT + _WIDTH * x / last:.1f},{bottom - _HEIGHT * (y - low) / (high - low):.1f}"

    out = [f'<text x="{_LEFT}" y="{bottom - _HEIGHT - 12}" font-weight="bold">{escape(title)}</text>']
    for y in ticks:
        level = at(0, y).split(",")[1]
        out.append(f'<path d="M{_LEFT} {level}H{_LEFT + _WIDTH}" stroke="#ddd"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{level}" dy="4" text-anchor="end">{y:g}</text>')
    for x in _ticks(0.0, last):
        if x <= last:
            place = at(x, low).split(",")[0]
            out.append(f'<text x="{place}" y="{bottom + 18}" text-anchor="middle">{_short(x)}</text>')
    if number == 2:
        out.append(f'<text x="{_LEFT + _WIDTH}" y="{bottom + 36}" text-anchor="end">token passes</text>')
    for i, (label, colour, points) in enumerate(lines):
        shown = [at(x, y) for x, y in points]
        out.append(f'<polyline points="{" ".join(shown)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if marks or len(shown) == 1:
            out += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="2.5" fill="{colour}"/>' for p in shown]
        y = bottom - _HEIGHT + 10 + 18 * i
        out.append(f'<path d="M{_LEFT + _WIDTH + 14} {y - 4}h18" stroke="{colour}" stroke-width="3"/>')
        out.append(f'<text x="{_LEFT + _WIDTH + 38}" y="{y}">{escape(label)}</text>')
    return "\n".join(out)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    span = max(high - low, abs(high) * 1e-3, 1e-9)
    rough = 10.0 ** math.floor(math.log10(span / 4))
    step = next(rough * m for m in (1, 2, 5, 10) if span / (rough * m) <= 5)
    first, count = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(count, first + 1) + 1)]


def _short(x: float) -> str:
    return f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k" if x >= 1e3 else f"{x:g}"
