"""Laps: what they add up to, where a cycle has them, and that nobody is timed who did not ask."""

import itertools

import pytest
import torch

from aquiline.config import Limits, SamplingConfig, TreeConfig
from aquiline.decode import clock
from aquiline.decode.engine import Engine, Request

CPU = torch.device("cpu")


def test_a_lap_is_what_passed_since_the_one_before(monkeypatch):
    readings = iter([10.0, 11.0, 13.0, 13.5, 20.0, 24.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(readings))
    with clock.running(CPU) as watch:
        clock.lap("draft")
        clock.lap("target")
        clock.lap("draft")
        first = watch.seconds
        assert first == {"draft": 1.5, "target": 2.0, "accept": 0.0, "keep": 0.0, "other": 0.0}
        watch.restart()
        clock.lap("keep")
        assert watch.seconds == {"draft": 0.0, "target": 0.0, "accept": 0.0, "keep": 4.0, "other": 0.0}
    assert first["draft"] == 1.5  # what was taken stays as it was


def test_without_a_clock_no_time_is_read(monkeypatch):
    monkeypatch.setattr(clock.time, "perf_counter", lambda: pytest.fail("a time was read"))
    clock.lap("draft")
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError), clock.running(CPU):
        raise ZeroDivisionError
    assert clock._running is None


@pytest.mark.parametrize("sampled", [False, True])
def test_a_cycle_ends_each_phase_once_and_the_head_belongs_to_the_target(target, draft, monkeypatch, sampled):
    engine, laps = Engine(target, draft, 2), []
    limits, tree = Limits(30), TreeConfig(2, 2, 3)
    requests = [Request([1, 2, 3], limits=limits, tree=tree)]
    if sampled:
        requests.append(Request([1, 2, 3], SamplingConfig(temperature=1.0), limits, tree))
    for request in requests:
        engine.submit(request)
    engine.step()
    for name, phase in (("best", "head"), ("logits", "head"), ("__call__", "pass")):
        inner = getattr(type(target), name)
        monkeypatch.setattr(type(target), name, lambda *a, f=inner, p=phase, **k: (laps.append(p), f(*a, **k))[1])
    monkeypatch.setattr(clock, "_running", type("Recorder", (), {"lap": lambda _, phase: laps.append(phase)})())
    engine.step()
    judged = ["head", "target", "accept"] * len(requests)
    assert [lap for lap, _ in itertools.groupby(laps)] == ["other", "draft", "other", "pass", *judged, "keep"]
