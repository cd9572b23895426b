"""The script that times the unroll: what it times it against has the same loss and gradients, and it runs."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from aquiline.config import UserError
from aquiline.data.features import compute
from aquiline.train.loop import make_pack
from aquiline.train.ttt import unroll
from tests.conftest import tiny_draft, tiny_target
from tests.test_api import make_target
from tests.test_quiet import taken
from tests.test_ttt import check_equal, documents

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "runs" / "unroll_versus_reference.py"))


@pytest.mark.parametrize("switches", [{}, {"norm_output": True, "qk_norm": True}], ids=lambda s: "+".join(s) or "plain")
def test_the_reference_has_the_same_loss_and_gradients(switches):
    target = tiny_target()
    draft = tiny_draft(target, **switches)
    docs = documents()
    pack = make_pack(docs, compute(target, docs), draft, target)
    loss, _ = unroll(draft, pack, target.head_weight[draft.vocab.target_ids_W], 3, 0.8)
    check_equal(draft, SCRIPT["reference_unroll"](draft, pack, target.head_weight, 3, 0.8), loss)


@pytest.mark.filterwarnings("ignore:the data has")
@pytest.mark.parametrize("answers", [False, True])
def test_both_ways_train_on_the_same_packs(tmp_path, answers):
    make_target(tmp_path / "target")
    file = tmp_path / "answers.jsonl"
    row = {"prompt_ids": [1, 2, 3], "response_ids": list(range(20, 33))}
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(40)))
    SCRIPT["prepare"](tmp_path, str(tmp_path / "target"), str(file) if answers else None, 64, 2)
    done = {way: SCRIPT["work"](tmp_path, way, 64, 3) for way in ("ours", "reference")}
    assert done["ours"]["losses"] == pytest.approx(done["reference"]["losses"], rel=0.02)
    assert done["ours"]["tokens"] == done["reference"]["tokens"] == 128
    assert SCRIPT["work"](tmp_path, "ours", 128, 3)["tokens"] == 256
    assert torch.load(tmp_path / "packs-64.pt")[0]["starts"][-1] == 64


def test_the_machine_is_quiet_while_it_is_measured_and_no_record_is_made_of_a_busy_one(tmp_path, monkeypatch):
    pause, held, turn = tmp_path / "pause", [], {"tokens_per_second": 2.0, "peak_mib": 3.0, "losses": [1.0]}

    def in_process(part, *_):
        held.append((part, pause.exists() and taken(pause)))
        return json.dumps(turn)

    monkeypatch.setitem(SCRIPT["main"].__globals__, "_in_process", in_process)
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path / "out.json"), "--rounds", "1"])
    monkeypatch.setenv("AQUILINE_PAUSE_FILE", str(pause))
    for load in (4.0, 0.0):
        seconds = iter([(0.0, 0.0), (load, 10.0)])
        monkeypatch.setattr("aquiline.measure.quiet.processor_seconds", lambda seconds=seconds: next(seconds))
        if load:
            with pytest.raises(UserError, match="others took 40%"):
                SCRIPT["main"]()
            assert not (tmp_path / "out.json").exists()
    SCRIPT["main"]()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["machine"]["pause_file"] is True
    assert found["machine"]["load"] == 0.0
    assert held == 2 * [("prepare", False), ("work", True), ("work", True), ("work", True)]
