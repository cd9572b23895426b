"""A training run's folder: what it may begin in, what it writes and when."""

import dataclasses
import hashlib
import json
import shutil

import pytest
import torch

from aquiline.config import TOP, AquilineWarning, TrainConfig, UserError
from aquiline.data.chat import Chat
from aquiline.data.dataset import token_counts
from aquiline.files import checkpoint
from aquiline.train.run import TrainingRun
from tests.elsewhere import AWAY, elsewhere
from tests.test_api import END, folders, make_draft, make_target  # noqa: F401 (a fixture)

CONFIG = TrainConfig(
    ttt_steps=1, batch_tokens=400, epochs=2.0, draft_vocab_size=64, held_out=1, eval_every=1, save_every=1,
    decode_every=0,
)  # fmt: skip
OUTPUTS = {"setup.json", "state", "head", "log.jsonl", "run.svg", "tensorboard"}
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
    assert {p.name for p in (tmp_path / "out").iterdir()} == OUTPUTS


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


def test_a_target_of_few_tokens_gets_a_head_that_proposes_all(prepare, monkeypatch):
    monkeypatch.setitem(prepare.__globals__, "CONFIG", TrainConfig(held_out=1))
    run = prepare()
    assert run.draft.vocab.target_ids_W.tolist() == list(range(END + 1))
    assert run.config.draft_vocab_size == END + 1
    monkeypatch.setitem(prepare.__globals__, "CONFIG", TrainConfig(held_out=1, draft_vocab_size=END + 2))
    with pytest.raises(UserError, match=f"draft vocabulary of {END + 2} must be .* at most {END + 1}"):
        prepare()


def test_another_vocabulary_does_not_resume(prepare, tmp_path):
    prepare().run(lambda _: None)
    setup = json.loads((tmp_path / "out" / "setup.json").read_text())
    (tmp_path / "out" / "setup.json").write_text(json.dumps(setup | {"draft_vocabulary": "x"}))
    with pytest.raises(UserError, match="draft_vocabulary was 'x'"):
        prepare()
    assert torch.load(tmp_path / "out" / "state" / "state.pt")["state"]["step"] > 0


@pytest.fixture
def other_data(tmp_path):
    """Rows of other tokens than those of `prepare`: their most frequent ones would make another vocabulary."""
    path = tmp_path / "other.jsonl"
    rows = [
        {"id": f"o{i}", "temperature": 0, "prompt_ids": [i, 2, 3], "response_ids": [100 + i, 120, 121, 140 + i, END]}
        for i in range(9)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_warm_start_keeps_weights_map_layers_and_switches(folders, other_data, tmp_path):  # noqa: F811
    head = tmp_path / "first" / "head"
    target = checkpoint.load_target(folders / "target", torch.float32, "cpu", (0, 2, 5))
    make_draft(head, target, norm_output=True, trained_length=300)
    (head / "run.json").write_text(json.dumps({"step": 625, "tokens": 1000}))
    chat = Chat.from_folder(folders / "target", [END])
    config = TrainConfig(ttt_steps=1, batch_tokens=400, held_out=1, eval_every=1, decode_every=0)

    def prepare(config=config, **more) -> TrainingRun:
        return TrainingRun.prepare([other_data], tmp_path / "out", folders / "target", chat, config, **more)

    run = prepare(warm_start=head)
    before = checkpoint.load_draft(head, target)
    assert torch.equal(run.draft.vocab.target_ids_W, before.vocab.target_ids_W)
    assert run.draft.config == before.config  # layers 0, 2, 5; norm_output; trained to 300
    assert run.config.draft_vocab_size == 200
    assert all(torch.equal(p, before.state_dict()[name]) for name, p in run.draft.state_dict().items())
    counted = token_counts(run.training, END + 1)
    known = sum(int(counted[i]) for i in before.vocab.target_ids_W.tolist())
    assert run.record["data"]["coverage"] == pytest.approx(known / int(counted.sum()))
    sha256 = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()
    assert run.record["warm_start"] == {"head": "first/head", "sha256": sha256, "step": 625, "tokens": 1000,
                                         "switches": ["norm_output"], "held_out": None}  # fmt: skip
    assert {row[3] for row in run.tensors()[1:]} == {"first/head"}

    assert run.run(lambda _: None)
    after = checkpoint.load_draft(tmp_path / "out" / "head", target)
    assert torch.equal(after.vocab.target_ids_W, before.vocab.target_ids_W)  # pitfall: learnt on other tokens, same d2t
    found = json.loads((tmp_path / "out" / "head" / "run.json").read_text())
    assert found["warm_start"] == run.record["warm_start"]
    assert found["history"][0]["step"] == 0
    assert torch.equal(after.fc.weight, before.fc.weight) == (found["best"]["step"] == 0)
    trained = torch.load(tmp_path / "out" / "state" / "state.pt")["draft"]
    assert not torch.equal(trained["fc.weight"], before.fc.weight)
    assert prepare(warm_start=head).run(lambda _: None)  # the same command: nothing left to do

    with pytest.raises(UserError, match=r"belongs to another run: .*draft_vocabulary"):
        prepare(dataclasses.replace(config, draft_vocab_size=200), capture_after=(0, 2, 5))  # without the warm start
    for more, words in (
        ({"config": dataclasses.replace(config, draft_vocab_size=64)}, "has a draft vocabulary of 200"),
        ({"capture_after": (1, 3, 4)}, r"has --capture-after \[0, 2, 5\], and \[1, 3, 4\] was asked for"),
        ({"capture_after": TOP}, r"\[0, 2, 5\], and top was asked for"),
        (
            {"config": dataclasses.replace(config, switches=("fc_norm", "norm_output"))},
            r"norm_output on, .*and fc_norm was asked for: leave --switch out",
        ),
        ({"config": dataclasses.replace(config, init="target-layer")}, "init target-layer was asked for: leave --init"),
    ):
        with pytest.raises(UserError, match=words):
            prepare(warm_start=head, **more)
    given = dataclasses.replace(config, draft_vocab_size=200, switches=("norm_output",))
    with pytest.raises(UserError, match="switches: "):  # other settings than the run began with, and nothing else
        prepare(given, warm_start=head, capture_after=(0, 2, 5)).run(lambda _: None)
    make_draft(head, target, norm_output=True, seed=7)
    with pytest.raises(UserError, match=r"goes on only with the head it began from .*unchanged"):
        prepare(warm_start=head)


def test_rows_held_out_once_stay_so_in_a_run_that_begins_with_the_head(folders, tmp_path, recwarn):  # noqa: F811
    chat = Chat.from_folder(folders / "target", [END])
    config = dataclasses.replace(CONFIG, held_out=3, epochs=1.0)
    rows = [
        {"id": f"r{i}", "temperature": 0, "prompt_ids": [i, 2, 3], "response_ids": [4, 5, 6 + i, END]}
        for i in range(40)
    ]

    def prepare(name, rows, head=None, config=config) -> TrainingRun:
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = [tmp_path / f"{name}.jsonl"]
        return TrainingRun.prepare(data, tmp_path / name, folders / "target", chat, config, warm_start=head)

    def held(run) -> set[int]:
        return {int(d.ids[0]) for d in run.held_out}

    first = prepare("first", rows[:12])
    first.run(lambda _: None)
    head = first.head
    assert len(json.loads((head / "run.json").read_text())["held_out"]) == 3
    assert held(prepare("cold", rows)) != held(first)  # more rows, another draw
    warm = prepare("warm", rows, head)
    assert held(warm) == held(first)
    assert len(warm.training) == 37
    assert warm.record["warm_start"]["held_out"] == 3
    assert warm.record["held_out"] == first.record["held_out"]
    assert not [w for w in recwarn if "held out" in str(w.message)]
    one = min(held(first))
    with pytest.warns(AquilineWarning, match=r"2 of the 3 rows .* of first/head .* and 1 others are held out"):
        fewer = prepare("fewer", [row for row in rows if row["id"] != f"r{one}"], head)
    assert held(fewer) > held(first) - {one}
    assert fewer.record["warm_start"]["held_out"] == 2

    record = json.loads((head / "run.json").read_text())
    (head / "run.json").write_text(json.dumps({k: v for k, v in record.items() if k != "held_out"}))
    recwarn.clear()
    assert held(prepare("untold", rows, head)) == held(prepare("cold", rows))
    assert not [w for w in recwarn if "held out" in str(w.message)]


def test_the_feature_loss_has_its_conditions(folders, other_data, tmp_path, monkeypatch):  # noqa: F811
    make_draft(tmp_path / "top", checkpoint.load_target(folders / "target", torch.float32, "cpu", TOP))
    config = TrainConfig(held_out=1, feature_loss=True)
    arguments = [other_data], tmp_path / "out", folders / "target", Chat.from_folder(folders / "target", [END]), config
    assert TrainingRun.prepare(*arguments, warm_start=tmp_path / "top").draft.config.top
    with pytest.raises(UserError, match="add --capture-after top"):
        TrainingRun.prepare(*arguments, warm_start=folders / "draft")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="for one process, and 2 were started"):
        TrainingRun.prepare(*arguments, warm_start=tmp_path / "top")


def test_a_warm_start_warns_of_other_weights_and_refuses_another_structure(folders, other_data, tmp_path):  # noqa: F811
    chat = Chat.from_folder(folders / "target", [END])
    make_target(tmp_path / "tuned", seed=5)
    make_target(tmp_path / "deeper", num_layers=9)
    arguments = (chat, TrainConfig(held_out=1))
    with pytest.warns(AquilineWarning, match="other weights of the same structure"):
        TrainingRun.prepare([other_data], tmp_path / "a", tmp_path / "tuned", *arguments, warm_start=folders / "draft")
    with pytest.raises(UserError, match="with 8 layers"):
        TrainingRun.prepare([other_data], tmp_path / "b", tmp_path / "deeper", *arguments, warm_start=folders / "draft")


def test_a_draft_with_its_own_embedding_keeps_it_frozen(folders, other_data, tmp_path):  # noqa: F811
    make_draft(tmp_path / "own", checkpoint.load_target(folders / "target", torch.float32), own_embedding=True)
    chat = Chat.from_folder(folders / "target", [END])
    config = TrainConfig(ttt_steps=1, held_out=1, decode_every=0)
    run = TrainingRun.prepare(
        [other_data], tmp_path / "out", folders / "target", chat, config, warm_start=tmp_path / "own"
    )
    before = run.draft.embed_tokens.weight.clone()
    size = before.numel()
    assert run.parameters()[1] == size
    assert run.parameters()[0] == sum(p.numel() for p in run.draft.parameters()) - size
    assert run.run(lambda _: None)
    assert torch.equal(run.draft.embed_tokens.weight, before)


@pytest.mark.parametrize("warm", [False, True], ids=["new", "warm start"])
def test_a_run_on_another_device_begins_as_on_the_cpu_and_leaves_a_head(prepare, folders, tmp_path, monkeypatch, warm):  # noqa: F811
    more = {"warm_start": folders / "draft"} if warm else {}
    other = {"draft_vocab_size": None} if warm else {"switches": ("fc_norm",)}
    monkeypatch.setitem(prepare.__globals__, "CONFIG", dataclasses.replace(CONFIG, **other))
    here = prepare(**more)
    with elsewhere():
        away = prepare(device=AWAY, features=tmp_path / "features", **more)
        starts = zip(here.draft.parameters(), away.draft.parameters(), strict=True)
        assert all(b.device == AWAY and torch.allclose(a, b.cpu(), atol=1e-5) for a, b in starts)
        assert (away.setup, away.coverage, away.sources) == (here.setup, here.coverage, here.sources)
        assert away.estimate().updates == 2
        assert away.run(lambda _: None)
        trained = [p.detach().cpu() for p in away.draft.parameters()]
    head = checkpoint.load_draft(away.head, here.target, dtype=torch.float32)
    if not warm:  # which may have written the head it began with
        assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(head.parameters(), trained, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(head.parameters(), here.draft.parameters(), strict=True))
    assert torch.equal(head.vocab.target_ids_W, here.draft.vocab.target_ids_W)


def test_an_estimate_is_of_the_whole_run_and_leaves_no_trace(prepare, tmp_path):
    run = prepare(features=tmp_path / "features")
    weights = {name: t.clone() for name, t in run.draft.state_dict().items()}
    e = run.estimate()
    assert {p.name for p in tmp_path.iterdir()} == {"data.jsonl"}
    assert all(torch.equal(t, weights[name]) for name, t in run.draft.state_dict().items())
    assert e.tokens == 2 * run.record["data"]["tokens"]
    steps = []
    assert run.run(lambda p: steps.append(p.step))
    assert e.updates == steps[-1]
    assert 0 < e.features_share < 1
    assert e.memory > 2**26
    assert e.updates * e.update_seconds * (1 - e.features_share) < e.seconds - e.updates * e.evaluation_seconds
