"""Panels: where things are drawn."""

from xml.etree import ElementTree

import pytest

from aquiline.measure.chart import Line, Panel, colour, svg, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (3.2, 11.9, [2, 4, 6, 8, 10, 12]),
        (0.0, 0.63, [0, 0.2, 0.4, 0.6, 0.8]),
        (3.0, 3.0, [3.0, 3.1]),
    ],
)
def test_ticks_are_round_and_include_the_values(low, high, expected):
    assert ticks(low, high) == expected


def test_points_bars_names_and_places():
    lines = [
        Line("a <b>", "#111111", [(1, 2.0), (3, 3.0)], marks=True, ranges=[(3, 2.5, 3.0)]),
        Line("", "#222222", [(2, 2.5)], joined=False),
    ]
    root = ElementTree.fromstring(svg([Panel("t", []), Panel("t & u", lines, "x name", {1: "one", 3: "three"})]))
    texts = {t.text: (float(t.get("x")), float(t.get("y"))) for t in root.iter(f"{SVG}text")}
    assert {"t", "t & u", "a <b>", "x name", "one", "three"} < set(texts)
    (line,) = (e.get("points") for e in root.iter(f"{SVG}polyline"))
    (left, low), (right, high) = (map(float, p.split(",")) for p in line.split())
    assert (left, right) == (texts["one"][0], texts["three"][0])
    assert (texts["2"][1], texts["3"][1], texts["t & u"][1]) == (low, high, high - 12)
    assert right - left == 760
    assert low - high == 190
    dots = [(float(c.get("cx")), float(c.get("cy")), c.get("fill")) for c in root.iter(f"{SVG}circle")]
    middle = ((left + right) / 2, (low + high) / 2)
    assert dots == [(left, low, "#111111"), (right, high, "#111111"), (*middle, "#222222")]
    (bar,) = (e.get("d") for e in root.iter(f"{SVG}path") if e.get("stroke-opacity"))
    assert bar == f"M{right} {middle[1]}V{high}"


def test_a_legend_of_many_names_fits_beside_its_panel():
    lines = [Line(str(i), "#000000", [(i, i)]) for i in range(20)]
    root = ElementTree.fromstring(svg([Panel("t", lines)]))
    marks = [e for e in root.iter(f"{SVG}path") if e.get("stroke-width") == "3"]
    heights = [float(e.get("d").split()[1].split("h")[0]) for e in marks]
    assert len(heights) == 20
    assert max(heights) - min(heights) < 190


def test_no_two_lines_have_the_same_colour():
    for of in (1, 8, 9, 20):
        assert len({colour(i, of) for i in range(of)}) == of
