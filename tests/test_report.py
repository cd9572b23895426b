"""Pictures of records: what is drawn of which, and from which figures."""

import copy
from xml.etree import ElementTree

import pytest

from aquiline.config import UserError
from aquiline.measure import report
from aquiline.measure.report import picture

PARTS = {"draft": 3.0, "target": 20.0, "accept": 1.0, "keep": 1.0, "other": 5.0}


def way(speedup=None, nodes=None, tau=None, target=20.0):
    block = {"breakdown": {"ms": PARTS | {"target": target}}}
    if speedup is not None:
        block |= {"speedup": speedup, "speedup_min": speedup - 0.1, "speedup_max": speedup + 0.1}
        block |= {"mean_nodes": nodes, "tau": tau}
    return block


BENCH = {
    "batches": {
        "1": {"plain": way(target=9.0), "trees": {"2:4:7": way(1.5, 7.0, 2.0), "auto": way(1.6, 5.5, 1.9)}},
        "8": {"plain": way(target=10.0), "trees": {"2:4:7": way(1.1, 6.8, 2.1), "auto": way(1.2, None, None)}},
    },
    "costs_ms": {
        "target, batch to 1, context to 512": {"1": 99.0},
        "target, batch to 1, context to 256": {"1": 10.0, "8": 20.0},
        "first, batch to 1, context to 256": {"1": 1.0, "2": 1.5, "4": 3.0},
        "target, batch to 3, context to 256": {"1": 10.0, "8": 20.0},
        "level, batch to 1, context to 256": {"1": 1.0, "4": 0.5},
    },
}
EVAL = {
    "tasks": {"gsm8k": {"tau": 2.5}, "sum": {"tau": 1.5}, "empty": {"tau": None}},
    "settings": {"tree": "6:8:60"},
}


def lines(panel):
    return {line.label: line.points for line in panel.lines}


def titles(record):
    root = ElementTree.fromstring(picture(record, "r.json"))
    return [e.text for e in root.iter("{http://www.w3.org/2000/svg}text") if e.get("font-weight")]


def test_a_bench_is_drawn_from_its_figures():
    assert len(titles(BENCH)) == 4
    speed = report._speedups(BENCH)
    assert lines(speed) == {"2:4:7": [(0, 1.5), (3, 1.1)], "auto": [(0, 1.6), (3, 1.2)], "": [(0, 1.0), (3, 1.0)]}
    assert speed.lines[0].ranges == [(0, 1.4, 1.6), (3, 1.1 - 0.1, 1.1 + 0.1)]
    assert speed.x_marks == {0: "1", 3: "8"}
    assert lines(report._taus(BENCH)) == {"2:4:7": [(7.0, 2.0)], "auto": [(5.5, 1.9)]}
    curves = report._curves(BENCH["costs_ms"])
    assert curves["target", 1] == {1: 10.0, 8: 20.0}  # the shortest context's
    measured = lines(report._measured(BENCH, curves))
    assert measured["target pass"] == [(1.0, 11 / 10), (pytest.approx(1.30103), 22 / 20)]  # auto is in neither
    assert [10**x for x, _ in measured["draft passes"]] == [
        pytest.approx(1.5 + 0.5 + 0.5)
    ]  # a level never gets cheaper
    assert lines(report._passes(curves)) == {"batch to 1": [(1, 1.0), (8, 2.0)]}
    assert list(lines(report._passes({("target", 3): {1: 1.0}}))) == ["batch to 3"]


def test_a_record_is_drawn_as_far_as_it_goes():
    loaded = copy.deepcopy(BENCH)
    for block in loaded["batches"].values():
        for ways in (block["plain"], *block["trees"].values()):
            ways["breakdown"] = None
            if "speedup" in ways:
                ways["speedup"] = None
    assert titles(loaded) == ["tokens per cycle, tau", "modelled target pass, in plain steps"]
    assert titles(EVAL) == ["tokens per cycle, tau"]
    assert lines(report._taus(EVAL)) == {"gsm8k": [(60, 2.5)], "sum": [(60, 1.5)]}
    auto = {"tasks": {"sum": {"tau": 1.5, "trees": {"mean_nodes": 4.5}}}, "settings": {"tree": "auto"}}
    assert lines(report._taus(auto)) == {"sum": [(4.5, 1.5)]}


def test_trees_of_one_batch_size_stand_by_their_nodes():
    one = BENCH | {"batches": {"1": BENCH["batches"]["1"]}}
    assert titles(one)[0] == "speed-up over plain decoding, batch 1"


def test_what_is_no_record_is_refused():
    with pytest.raises(UserError, match=r"r\.json holds nothing to draw"):
        picture({"trees": {}}, "r.json")
    for damaged in ({"batches": {"1": {}}}, {"batches": []}, {"costs_ms": {"x": {}}}, {"tasks": {"t": {"tau": 1}}}):
        with pytest.raises(UserError):
            picture(damaged, "r.json")
