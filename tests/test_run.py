"""A training run's folder: what it may begin in, what it writes and when."""

import json
import shutil

import pytest
import torch

from aquiline.config import TrainConfig, UserError
from aquiline.data.chat import Chat
from aquiline.train.run import TrainingRun
from tests.test_api import END, folders  # noqa: F401 (a fixture)

CONFIG = TrainConfig(
    ttt_steps=1, batch_tokens=400, epochs=2.0, draft_vocab_size=64, held_out=1, eval_every=1, save_every=1
)
pytestmark = pytest.mark.filterwarnings("ignore:the data has")


@pytest.fixture
def prepare(folders, tmp_path):  # noqa: F811
    data = tmp_path / "data.jsonl"
    rows = [
        {"id": f"r{i}", "temperature": 0, "prompt_ids": [i, 2, 3], "response_ids": [4, 5, 6 + i, END]} for i in range(9)
    ]
    rows.append({"temperature": 0, "prompt_ids": [1] * 30, "response_ids": [2] * 9})
    data.write_text("\n".join(map(json.dumps, rows)))

    def make(**more) -> TrainingRun:
        chat = Chat.from_folder(folders / "target", [END, 10**6])  # the second is no token of this target
        return TrainingRun.prepare([data], tmp_path / "out", folders / "target", chat, CONFIG, **more)

    return make


def test_nothing_is_written_until_the_features_are_open(prepare, tmp_path):
    (tmp_path / "features" / "held_out").mkdir(parents=True)
    (tmp_path / "features" / "held_out" / "manifest.json").write_text("{}")
    run = prepare(features=tmp_path / "features")
    with pytest.raises(UserError, match="something else"):
        run.run(lambda _: None)
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "features")
    assert run.run(lambda _: None)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"setup.json", "state", "head"}


def test_rows_cut_and_dropped_are_recorded(prepare, monkeypatch):
    monkeypatch.setitem(prepare.__globals__, "CONFIG", TrainConfig(max_length=6, held_out=1, draft_vocab_size=64))
    data = prepare().record["data"]
    assert (data["documents"] + data["held_out"], data["cut"]) == (9, 9)
    assert data["dropped"] == {"nothing supervised within max_length": 1}


def test_a_head_of_another_run_is_not_replaced(prepare, tmp_path, folders):  # noqa: F811
    head = tmp_path / "out" / "head"
    shutil.copytree(folders / "draft", head)
    with pytest.raises(UserError, match="head exists and was not written by this run"):
        prepare()
    shutil.rmtree(head)
    prepare().run(lambda _: None)
    (head / "README.md").write_text("a model card")
    weights = (head / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "out" / "state")  # begun again: the head is of this very run, and its card stays
    (head / "model.safetensors").write_bytes(b"")
    assert prepare().run(lambda _: None)
    assert (head / "model.safetensors").read_bytes() == weights
    assert (head / "README.md").read_text() == "a model card"


def test_complete_means_that_there_is_a_head(prepare, tmp_path):
    assert prepare().run(lambda _: None)
    assert prepare().run(lambda _: None)  # nothing left to do
    shutil.rmtree(tmp_path / "out" / "head")
    with pytest.raises(UserError, match=r"its head, .* is gone"):
        prepare().run(lambda _: None)


def test_another_vocabulary_does_not_resume(prepare, tmp_path):
    prepare().run(lambda _: None)
    setup = json.loads((tmp_path / "out" / "setup.json").read_text())
    (tmp_path / "out" / "setup.json").write_text(json.dumps(setup | {"draft_vocabulary": "x"}))
    with pytest.raises(UserError, match="draft_vocabulary was 'x'"):
        prepare()
    assert torch.load(tmp_path / "out" / "state" / "state.pt")["state"]["step"] > 0
