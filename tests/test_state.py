"""What a killed run leaves behind, and what its state may be gone on from."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aquiline.config import TrainConfig, UserError
from aquiline.train.loop import Evaluation
from aquiline.train.state import changed_settings
from tests.test_loop import CONFIG, trainer, weights

KILLED = """
import io, os, signal, sys
from pathlib import Path
import torch
from tests.test_loop import trainer
from aquiline.train import state

save, saves = torch.save, []

def half_a_save(value, file):
    saves.append(1)
    if len(saves) < 3:
        return save(value, file)
    whole = io.BytesIO()
    save(value, whole)
    file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
    file.flush()
    os.fsync(file.fileno())
    os.kill(os.getpid(), signal.SIGKILL)

state.torch.save = half_a_save
trainer(Path(sys.argv[1])).run()
"""


def test_killed_in_the_middle_of_a_save_it_goes_on_from_the_save_before(tmp_path):
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "cut")], cwd=root, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert (tmp_path / "cut" / "state.pt.tmp").stat().st_size > 1000
    assert torch.load(tmp_path / "cut" / "state.pt")["state"]["step"] == 2 * CONFIG.save_every
    cut, whole = trainer(tmp_path / "cut"), trainer(tmp_path / "whole")
    assert cut.run()
    assert whole.run()
    assert torch.equal(weights(cut), weights(whole))
    files = [torch.load(tmp_path / name / "state.pt") for name in ("cut", "whole")]
    for f in files:
        for row in [f["state"], *f["state"]["history"]]:
            row.pop("seconds", None), row.pop("minutes", None)
    assert files[0]["state"] == files[1]["state"]  # the best value, its update, the count since, every evaluation


def test_random_numbers_go_on_where_they_were(tmp_path):
    def drawn(folder, stops):
        torch.manual_seed(5)
        numbers = {}
        for stop in stops:
            t = trainer(folder)
            t.report = lambda p: numbers.update({p.step: float(torch.rand(()))})
            t.run(stop)
            torch.manual_seed(99)  # a new process has a generator of its own
        return numbers

    calls = iter(range(100))
    parts = drawn(tmp_path / "b", [lambda: next(calls) == 4, lambda: False])
    assert parts == drawn(tmp_path / "a", [lambda: False])


def test_a_state_from_before_a_setting_was_there_goes_on_if_the_setting_has_its_default(tmp_path):
    trainer(tmp_path).run(iter([False, False, True]).__next__)
    whole = trainer(tmp_path / "whole")
    whole.run()
    saved = torch.load(tmp_path / "state.pt")
    for name in ("accumulate", "patience"):
        del saved["config"][name]
    for name in ("best_step", "since_best", "ended_early"):
        del saved["state"][name]
    del saved["random"]
    torch.save(saved, tmp_path / "state.pt")
    with pytest.raises(UserError, match="accumulate: 1 -> 2"):
        trainer(tmp_path, dataclasses.replace(CONFIG, accumulate=2)).run()
    again = trainer(tmp_path)
    assert again.run()
    assert torch.equal(weights(again), weights(whole))


@pytest.mark.parametrize(
    ("part", "words"), [("config", "brand_new: 1, which is not known"), ("state", "later version")]
)
def test_a_state_of_a_later_version_is_refused(tmp_path, part, words):
    trainer(tmp_path).run(iter([False, True]).__next__)
    saved = torch.load(tmp_path / "state.pt")
    saved[part]["brand_new"] = 1
    torch.save(saved, tmp_path / "state.pt")
    with pytest.raises(UserError, match=words.replace("brand_new", '[^"]*brand_new')):
        trainer(tmp_path).run()


def test_settings_read_from_json_are_the_same_ones_and_switches_have_no_order():
    for switches in ((), ("qk_norm", "fc_norm")):
        config = TrainConfig(switches=switches)
        assert changed_settings(json.loads(json.dumps(dataclasses.asdict(config))), config) == []
        assert changed_settings(dataclasses.asdict(config), config) == []
    assert config == TrainConfig(switches=("fc_norm", "qk_norm"))
    assert changed_settings({"switches": ["qk_norm", "fc_norm"]}, config) == []
    assert changed_settings({"switches": ["qk_norm"]}, config) == ["switches: ('qk_norm',) -> ('fc_norm', 'qk_norm')"]


def test_what_changes_no_update_may_change_and_a_run_that_ended_early_goes_on_with_more_patience(tmp_path, monkeypatch):
    monkeypatch.setattr("aquiline.train.loop.evaluate", lambda *a: Evaluation([], [], 1.5, []))
    t = trainer(tmp_path, dataclasses.replace(CONFIG, eval_every=1, patience=1))
    assert t.run()
    assert torch.load(tmp_path / "state.pt")["state"]["step"] == 2 < t.total
    other = {"save_every": 1, "decode_every": 0, "checkpoint_activations": True, "patience": 3}
    again = trainer(tmp_path, dataclasses.replace(CONFIG, eval_every=1, **other))
    assert again.run()
    assert torch.load(tmp_path / "state.pt")["state"]["step"] == 4
    less = trainer(tmp_path, dataclasses.replace(CONFIG, eval_every=1, patience=2))
    less.report = lambda p: pytest.fail("trained on")
    assert less.run()
