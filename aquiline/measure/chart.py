"""Panels of lines and dots, one below the other, as SVG."""

import colorsys
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#1f4e8c", "#2f7dbd", "#3fa7a0", "#64b35c", "#b3a72f", "#d98a2b", "#c9503c", "#8c3a6b")
Points = list[tuple[float, float]]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _GAP = 760, 190, 60, 150, 34, 44  # of a panel and around it
_LEGEND = 10  # entries that fit beside a panel at full distance


def colour(number: int, of: int) -> str:
    """Of one of so many lines."""
    if of <= len(COLOURS):
        return COLOURS[3 * number % 8]
    shade = colorsys.hls_to_rgb(number / of, 0.42, 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in shade)


@dataclass(frozen=True)
class Line:
    label: str  # empty: not in the legend
    colour: str
    points: Points
    marks: bool = False  # a dot at every point; a line of one point has it anyway
    joined: bool = True
    ranges: list[tuple[float, float, float]] = field(default_factory=list)  # bars: x, from, to


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]
    x_name: str = ""  # below the axis
    x_marks: Mapping[float, str] | None = None  # ticks by place; None: round numbers from 0
    last: float | None = None  # right end of the axis; None: the last tick


def svg(panels: Sequence[Panel]) -> str:
    """The whole picture."""
    drawn = [_panel(i, panel) for i, panel in enumerate(panels)]
    height = len(panels) * (_HEIGHT + _TOP + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _panel(number: int, panel: Panel) -> str:
    values = [y for line in panel.lines for _, y in line.points]
    values += [y for line in panel.lines for _, *ends in line.ranges for y in ends]
    levels = ticks(min(values, default=0.0), max(values, default=1.0))
    low, high = levels[0], levels[-1]
    bottom = number * (_HEIGHT + _TOP + _GAP) + _TOP + _HEIGHT
    x_marks = panel.x_marks
    if x_marks is None:
        most = panel.last or max((x for line in panel.lines for x, _ in line.points), default=1.0)
        x_marks = {x: _short(x) for x in ticks(0.0, most) if panel.last is None or x <= panel.last}
    first, last = min(x_marks), panel.last or max(x_marks)

    def at(x: float, y: float) -> tuple[float, float]:
        right = _LEFT + _WIDTH * ((x - first) / (last - first) if last > first else 0.5)
        return round(right, 1), round(bottom - _HEIGHT * (y - low) / (high - low), 1)

    out = [f'<text x="{_LEFT}" y="{bottom - _HEIGHT - 12}" font-weight="bold">{escape(panel.title)}</text>']
    for y in levels:
        level = at(first, y)[1]
        out.append(f'<path d="M{_LEFT} {level}H{_LEFT + _WIDTH}" stroke="#ddd"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{level}" dy="4" text-anchor="end">{y:g}</text>')
    for x, text in x_marks.items():
        out.append(f'<text x="{at(x, low)[0]}" y="{bottom + 18}" text-anchor="middle">{escape(text)}</text>')
    if panel.x_name:
        out.append(f'<text x="{_LEFT + _WIDTH}" y="{bottom + 36}" text-anchor="end">{escape(panel.x_name)}</text>')
    named = [line for line in panel.lines if line.label]
    step = 18 if len(named) <= _LEGEND else _HEIGHT / len(named)
    for line in panel.lines:
        out += _drawn(line, [at(*p) for p in line.points], [(at(x, a), at(x, b)) for x, a, b in line.ranges])
    for i, line in enumerate(named):
        y = bottom - _HEIGHT + 10 + step * i
        out.append(f'<path d="M{_LEFT + _WIDTH + 14} {y - 4:.1f}h18" stroke="{line.colour}" stroke-width="3"/>')
        out.append(f'<text x="{_LEFT + _WIDTH + 38}" y="{y:.1f}">{escape(line.label)}</text>')
    return "\n".join(out)


def _drawn(line: Line, points: Points, bars: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> list[str]:
    out = [f'<path d="M{x} {a}V{b}" stroke="{line.colour}" stroke-opacity="0.4"/>' for (x, a), (_, b) in bars]
    if line.joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1.6"/>')
    if line.marks or not line.joined or len(points) == 1:
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{line.colour}"/>' for x, y in points]
    return out


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    span = max(high - low or abs(high) * 0.1, abs(high) * 1e-3, 1e-9)
    rough = 10.0 ** math.floor(math.log10(span / 4))
    step = next(rough * m for m in (1, 2, 5, 10) if span / (rough * m) <= 5)
    first, count = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(count, first + 1) + 1)]


def _short(x: float) -> str:
    return f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k" if x >= 1e3 else f"{x:g}"
