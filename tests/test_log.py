"""The log of a run: read back line by line, TensorBoard's files record by record, W&B by a stand-in."""

import itertools
import json
import struct
import sys
import types
from xml.etree import ElementTree

import pytest
from tensorboardX.proto.event_pb2 import Event

from aquiline.config import AquilineWarning
from aquiline.train.log import RunLog
from aquiline.train.loop import Evaluation, Progress
from aquiline.train.plot import _means, plot


@pytest.fixture(autouse=True)
def no_wandb(monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def progress(step: int, tau: float | None = None, loss: float | None = None) -> Progress:
    evaluation = None
    if tau is not None:
        evaluation = Evaluation([2.0, 3.0], [0.5, 0.25], tau, [0.5, None], {"6:8:60": tau + 1})
    return Progress(step, 9, 100 * step, 1.0 * step, 10.0 - step if loss is None else loss, [0.1, 0.2], 0, evaluation)


def events(folder) -> list[Event]:
    """TFRecords: length, its checksum, the event, its checksum."""
    found = []
    for path in sorted(folder.glob("events*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_every_update_is_logged_and_evaluations_with_it(tmp_path):
    with RunLog(tmp_path, {}) as log:
        for step in range(1, 5):
            log.add(progress(step, tau=1.5 if step == 4 else None))
        lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]  # before it is closed
    assert [(row["step"], row["tokens"], row["loss"]) for row in lines] == [(s, 100 * s, 10.0 - s) for s in range(1, 5)]
    assert lines[3]["evaluation"]["decoded"] == {"6:8:60": 2.5}
    assert "evaluation" not in lines[2]
    board = {
        (value.tag, e.step): value.simple_value for e in events(tmp_path / "tensorboard") for value in e.summary.value
    }
    assert board["train/loss", 3] == 7.0
    assert board["train/accuracy_1", 2] == pytest.approx(0.2)
    assert (board["held_out/tau", 4], board["decoded/6-8-60", 4], board["held_out/n_alpha_0", 4]) == (1.5, 2.5, 0.5)
    assert ("held_out/n_alpha_1", 4) not in board


def test_a_resumed_run_drops_what_it_repeats_and_what_a_kill_tore(tmp_path):
    with RunLog(tmp_path, {}) as log:
        for step in range(1, 6):
            log.add(progress(step))
    with open(tmp_path / "log.jsonl", "a") as f:
        f.write('{"step": 6, "tok')
    with RunLog(tmp_path, {}) as log:  # the state was saved after update 3
        log.add(progress(4, loss=0.5))
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 0.5)]
    started_at = [e.step for e in events(tmp_path / "tensorboard") if e.session_log.status == 1]
    assert started_at == [1, 4]  # TensorBoard hides earlier events from there on


def test_a_loss_that_is_no_number_is_null(tmp_path):
    with RunLog(tmp_path, {}) as log:
        log.add(progress(1, loss=float("nan")))
        log.add(progress(2, tau=1.0))
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] is None
    assert "nan" not in (tmp_path / "run.svg").read_text()


def test_the_evaluation_before_the_first_update_has_no_loss(tmp_path):
    start = progress(0, tau=1.25, loss=float("nan"))
    start.accuracy = []
    with RunLog(tmp_path, {}) as log:
        log.add(start)
        assert points((tmp_path / "run.svg").read_text())[-2:] == [[(60.0, 752.1)], [(60.0, 593.8)]]
        log.add(progress(1, tau=1.5))
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"], row["evaluation"]["tau"]) for row in rows] == [(0, None, 1.25), (1, 9.0, 1.5)]
    loss, first, second, walk, _ = points((tmp_path / "run.svg").read_text())
    assert [len(line) for line in (loss, first, second, walk)] == [1, 1, 1, 2]
    assert not [e for e in events(tmp_path / "tensorboard") if e.step == 0 and "train/loss" in str(e.summary)]


class Wandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.started, self.logged, self.finished = [], [], 0

    def init(self, **settings):
        self.started.append(settings)
        return types.SimpleNamespace(log=lambda v, step: self.logged.append((step, v)), finish=self.finish)

    def finish(self):
        self.finished += 1


def test_weights_and_biases_takes_part_only_where_it_is_set_up(tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = {"documents": "abc", "training": {"seed": 0, "patience": 1}}
    with RunLog(tmp_path, settings) as log:
        log.add(progress(1))
    assert wandb.started == []
    monkeypatch.setenv("WANDB_PROJECT", "heads")
    for changed in ({}, {"training": {"seed": 0, "patience": 2}}, {"documents": "other"}):  # patience may change
        with RunLog(tmp_path, settings | changed) as log:
            log.add(progress(2, tau=1.5))
    ids = [s["id"] for s in wandb.started]
    assert ids[0] == ids[1] != ids[2]  # a run that goes on is the same one there
    assert all(s["resume"] == "allow" for s in wandb.started)
    assert wandb.started[0]["config"] == settings
    assert wandb.logged[0][0] == 2
    assert wandb.logged[0][1]["held_out/tau"] == 1.5
    assert wandb.finished == 3
    wandb.init = lambda **_: 1 / 0
    with pytest.warns(AquilineWarning, match="left out: division"), RunLog(tmp_path, settings) as log:
        log.add(progress(3))
    monkeypatch.setitem(sys.modules, "wandb", None)  # set up, and not installed
    with RunLog(tmp_path, settings) as log:
        log.add(progress(4))
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4


def points(svg: str) -> list[list[tuple[float, float]]]:
    lines = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}polyline")
    return [[tuple(map(float, p.split(","))) for p in line.get("points").split()] for line in lines]


def test_the_picture_shows_the_numbers():
    rows = [vars(progress(s)) | {"evaluation": None} for s in range(1, 7)]
    for row, tau in ((rows[2], 1.0), (rows[5], 2.0)):
        row["evaluation"] = {"tau": tau, "decoded": {"6:8:60": 3.0}}
    loss, first, second, walk, decoded = points(plot(rows))
    assert len(loss) == len(first) == len(second) == 6
    assert [round(x) for x, _ in loss] == [60 + round(760 * s / 6) for s in range(1, 7)]
    assert all(a[1] < b[1] for a, b in itertools.pairwise(loss))  # it falls
    assert len({y for _, y in first}) == 1
    assert first[0][1] > second[0][1]  # .1 stands below .2
    (x, low), (_, high) = walk
    assert round(x) == 60 + 380
    assert (low - high, decoded[0][1]) == (95, decoded[1][1])  # from 1 to 2 on an axis from 1 to 3, 190 high
    assert points(plot([])) == [[], []]


def test_long_lines_are_means():
    assert _means([(x, x % 2) for x in range(400)]) == [(x, 0.5) for x in range(1, 400, 2)]
