"""Other trainers' hidden states: files in exactly their layouts train what the target's own passes train."""

import dataclasses
import gzip
import io
import json
import shutil
import sys
import types

import pytest
import safetensors.torch
import torch

from aquiline.config import TOP, AquilineWarning, Limits, TrainConfig, UserError
from aquiline.data.chat import Chat
from aquiline.data.dataset import Document, packs, read_documents
from aquiline.data.features import compute
from aquiline.data.stored_states import StoredStates
from aquiline.decode.engine import Engine, Request
from aquiline.files import checkpoint
from aquiline.files.state_files import SPECFORGE, SPECULATORS, StateFolder
from aquiline.model.hf_target import HFTarget
from aquiline.train.run import TrainingRun
from tests.test_api import END, make_draft, make_target
from tests.test_hf_target import CASES, write_model
from tests.tiny_chat import byte_chat

LAYERS = (0, 2, 5)
pytestmark = pytest.mark.filterwarnings("ignore:the data has")
CONFIG = TrainConfig(
    ttt_steps=2, batch_tokens=60, epochs=3.0, draft_vocab_size=64, held_out=2, eval_every=2, save_every=100,
    decode_every=0,
)  # fmt: skip


def states(target, ids):
    """(captured [T, layers, D], after all layers, after the final norm), layer by layer, with nothing of `compute`."""
    hidden = []
    layers = target.hf.model.layers if isinstance(target, HFTarget) else target.model.layers

    def keep(_, given, output):
        hidden.append(output if isinstance(output, torch.Tensor) else output[0])

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    with torch.no_grad():
        out = target(ids[None].long(), torch.arange(len(ids))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack([hidden[i][0] for i in target.capture_after[:3]], dim=1), hidden[-1][0], out.last_BND[0]


def write_specforge(folder, target, documents, pack=False):
    """As SpecForge's prepare_hidden_states.py does: rows of 5,000 in a folder, a file each."""
    (folder / "rows_0-5000").mkdir(parents=True)
    for i, d in enumerate(documents):
        captured, _, normed = states(target, d.ids)
        point = {
            "input_ids": d.ids.long(),
            "loss_mask": d.supervised.long(),
            "hidden_state": normed[None].clone(),
            "aux_hidden_state": captured.flatten(1)[None].clone(),
        }
        path = folder / "rows_0-5000" / f"data_{i}.ckpt"
        if pack:
            buffer = io.BytesIO()
            torch.save(point, buffer)
            path.with_suffix(".ckpt.gz").write_bytes(gzip.compress(buffer.getvalue()))
        else:
            torch.save(point, path)


def write_speculators(folder, target, documents, monkeypatch):
    """The files that vLLM's connector writes, beside a data set of ids and masks."""
    (folder / "hidden_states").mkdir(parents=True)
    for i, d in enumerate(documents):
        captured, after_all, _ = states(target, d.ids)
        tensors = {"hidden_states": torch.cat((captured, after_all[:, None]), dim=1), "token_ids": d.ids.long()}
        safetensors.torch.save_file(tensors, folder / "hidden_states" / f"hs_{i}.safetensors")
    rows = [{"input_ids": d.ids.long(), "loss_mask": d.supervised.long(), "seq_len": len(d)} for d in documents]
    (folder / "state.json").write_text("{}")
    fake = types.SimpleNamespace(load_from_disk=lambda name: rows if name == str(folder) else None)
    monkeypatch.setitem(sys.modules, "datasets", fake)


def written(target):
    """What a target writes greedily to eight prompts."""
    documents = []
    for i in range(8):
        prompt = [(7 * i + k) % 200 for k in range(5)]
        request = Request(prompt, limits=Limits(14, frozenset({END})))
        Engine(target).run([request])
        ids = torch.tensor(prompt + request.output_ids, dtype=torch.int32)
        documents.append(Document(ids, torch.arange(len(ids)) >= 5, True, "", f"d{i}"))
    return documents


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny target on disk and what it writes greedily."""
    root = tmp_path_factory.mktemp("states")
    target = make_target(root / "target")
    target = checkpoint.load_target(root / "target", torch.float32, "cpu", LAYERS)
    return root, target, written(target)


@pytest.fixture(params=["ckpt", "gz", SPECULATORS])
def folder(request, world, tmp_path, monkeypatch):
    _, target, documents = world
    if request.param == SPECULATORS:
        write_speculators(tmp_path / "hs", target, documents, monkeypatch)
    else:
        write_specforge(tmp_path / "hs", target, documents, request.param == "gz")
    return tmp_path / "hs"


def chat(root):
    return Chat.from_folder(root / "target", [END])


def prepare(root, data, out, **more):
    given = {"capture_after": LAYERS} | more
    config = given.pop("config", CONFIG)
    return TrainingRun.prepare(data, out, root / "target", chat(root), config, **given)


def test_the_features_are_those_that_the_target_computes(world, folder):
    root, target, documents = world
    read = read_documents([folder], chat(root), END + 1, 100).documents
    assert [d.ids.tolist() for d in read] == [d.ids.tolist() for d in documents]
    assert [d.supervised.tolist() for d in read] == [d.supervised.tolist() for d in documents]
    assert len({d.name for d in read}) == len(read)
    bare = checkpoint.load_target(root / "target", torch.float32, "cpu", LAYERS)
    bare.drop_layers()
    got = StoredStates([folder]).features(bare, [read[4], read[1]])
    want = compute(target, [documents[4], documents[1]])
    for name in vars(want):
        assert torch.allclose(getattr(got, name).float(), getattr(want, name).float(), atol=1e-4), name
    assert torch.equal(got.argmax_T, want.argmax_T)


def test_a_run_trains_the_same_head_as_from_answers(world, folder, tmp_path):
    root, _, documents = world
    read = read_documents([folder], chat(root), END + 1, 100).documents
    rows = [
        {"id": r.name, "temperature": 0, "prompt_ids": d.ids[:5].tolist(), "response_ids": d.ids[5:].tolist()}
        for r, d in zip(read, documents, strict=True)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ours = prepare(root, [tmp_path / "data.jsonl"], tmp_path / "a")
    theirs = prepare(root, [folder], tmp_path / "b", features=tmp_path / "features")
    assert len(theirs.target.model.layers) == 0
    assert theirs.record["data"]["greedy_share"] > 0.97
    assert dataclasses.replace(theirs.info, target_dtype="float32") == ours.info  # the dtype it is stored in
    losses = [[], []]
    for run, seen in zip((ours, theirs), losses, strict=True):
        assert run.run(lambda p, seen=seen: seen.append((p.loss, p.accuracy)))
    # The features kept on disk are rounded to bf16.
    assert len(losses[0]) > 2
    for (a, _), (b, _) in zip(*losses, strict=True):
        assert a == pytest.approx(b, rel=2e-2)
    again = prepare(root, [folder], tmp_path / "c", config=CONFIG)
    exact = []
    again.run(lambda p: exact.append((p.loss, p.accuracy)))
    for (a, right), (b, also) in zip(losses[0], exact, strict=True):
        assert a == pytest.approx(b, rel=1e-4)
        assert right == also
    a, c = (checkpoint.load_draft(tmp_path / n / "head", world[1]) for n in "ac")
    assert all(torch.allclose(p, q, atol=2e-2) for p, q in zip(a.parameters(), c.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*tokens held out are the target's most likely ones")
@pytest.mark.parametrize("name", ["qwen3_moe", "granite"])  # merged experts; a scaled head
@pytest.mark.parametrize("layout", [SPECFORGE, SPECULATORS])
def test_a_target_of_transformers_trains_the_same_head_as_from_answers(tmp_path, monkeypatch, name, layout):
    byte_chat().save(tmp_path / "target")
    kind, changes = CASES[name]
    write_model(tmp_path / "target", kind, changes | {"vocab_size": END + 1})
    layers = (0, 1, 2)
    target = checkpoint.load_target(tmp_path / "target", torch.float32, "cpu", layers)
    assert isinstance(target, HFTarget)
    documents = written(target)
    write = write_specforge if layout == SPECFORGE else write_speculators
    write(tmp_path / "hs", target, documents, *(() if layout == SPECFORGE else (monkeypatch,)))
    read = read_documents([tmp_path / "hs"], chat(tmp_path), END + 1, 100).documents
    rows = [
        {"id": r.name, "temperature": 0, "prompt_ids": d.ids[:5].tolist(), "response_ids": d.ids[5:].tolist()}
        for r, d in zip(read, documents, strict=True)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    runs = [
        prepare(tmp_path, [tmp_path / data], tmp_path / out, capture_after=layers)
        for data, out in (("data.jsonl", "a"), ("hs", "b"))
    ]
    assert not any("layers" in key for key, _ in runs[1].target.named_parameters())
    assert dataclasses.replace(runs[1].info, target_dtype="float32") == runs[0].info
    losses = [[], []]
    for run, seen in zip(runs, losses, strict=True):
        assert run.run(lambda p, seen=seen: seen.append(p.loss))
    assert len(losses[0]) > 2
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # updates make much of small gradients, so of rounding


def test_what_was_captured_is_not_guessed(world, folder, tmp_path):
    root, target, _ = world
    with pytest.raises(UserError, match="which layers the hidden states are of: give --capture-after"):
        prepare(root, [folder], tmp_path / "a", capture_after=None)
    with pytest.raises(UserError, match=r"96 numbers a token .* layers \[0, 2\] of a target 32 wide have 64 and 32"):
        prepare(root, [folder], tmp_path / "a", capture_after=(0, 2))
    with pytest.raises(UserError, match=r"give --capture-after the layers that were captured"):
        prepare(root, [folder], tmp_path / "a", capture_after=TOP)
    make_draft(tmp_path / "head", target)  # a head to go on with says which it reads
    run = prepare(root, [folder], tmp_path / "a", capture_after=None, warm_start=tmp_path / "head", config=TrainConfig(
        held_out=2, batch_tokens=60, ttt_steps=1))  # fmt: skip
    assert run.draft.config.capture_after == LAYERS
    assert run.run(lambda _: None)


def test_states_of_another_target_are_refused(folder, tmp_path):
    other = tmp_path / "other"
    make_target(other / "target", seed=5)
    with pytest.raises(UserError, match="another target's states or other weights'"):
        prepare(other, [folder], tmp_path / "a")


def test_the_final_norm_is_applied_once(world, folder, monkeypatch):
    """The two layouts differ in nothing else that numbers could tell: a norm too many or too few is another teacher."""
    root, target, documents = world
    read = read_documents([folder], chat(root), END + 1, 100).documents
    stored = StoredStates([folder])
    assert stored.check(target, read) > 0.97
    right = StateFolder.states
    monkeypatch.setattr(StateFolder, "states", lambda *args: _flipped(right(*args)))
    wrong, want = stored.features(target, read[:3]), compute(target, documents[:3])
    assert not torch.allclose(wrong.logsumexp_T, want.logsumexp_T, atol=1e-2)


def _flipped(found):
    return type(found)(found.ids_T, found.aux_TA, found.last_TD, not found.normed)


def test_sampled_rows_train_and_say_so(world, tmp_path):
    root, target, documents = world
    mixed = []
    for d in documents:
        ids = d.ids.clone()
        ids[7::4] = (ids[7::4] + 1) % 200
        mixed.append(Document(ids, d.supervised, False, "", d.name))
    write_specforge(tmp_path / "hs", target, mixed)
    with pytest.warns(AquilineWarning, match="not all decoded greedily, and tau"):
        run = prepare(root, [tmp_path / "hs"], tmp_path / "a")
    assert 0.2 < run.record["data"]["greedy_share"] < 0.97
    assert run.run(lambda _: None)


def test_long_rows_are_cut_with_their_states(world, tmp_path):
    root, target, documents = world
    write_specforge(tmp_path / "hs", target, documents)
    run = prepare(root, [tmp_path / "hs"], tmp_path / "a", config=TrainConfig(held_out=2, max_length=9, ttt_steps=1))
    assert {len(d) for d in run.training} == {9}
    assert run.stored.features(run.target, run.training).aux_TA.shape == (9 * len(run.training), 96)


def test_kept_features_are_not_taken_for_computed_ones(world, tmp_path):
    root, target, documents = world
    write_specforge(tmp_path / "hs", target, documents)
    run = prepare(root, [tmp_path / "hs"], tmp_path / "a", features=tmp_path / "f")
    assert run.run(lambda _: None)
    manifest = json.loads((tmp_path / "f" / "train" / "manifest.json").read_text())
    assert manifest["dtype"].startswith(f"{SPECFORGE} files ")
    shutil.rmtree(tmp_path / "hs")
    (tmp_path / "hs").mkdir()
    with pytest.raises(UserError, match="holds no hidden states that can be trained on"):
        prepare(root, [tmp_path / "hs"], tmp_path / "b", features=tmp_path / "f")


def test_kept_features_are_not_those_of_files_that_were_written_again(world, folder, tmp_path):
    """Of the same tokens, sizes and names; in other files, or in the same ones at another time, they are."""
    root = world[0]
    run = prepare(root, [folder], tmp_path / "a", features=tmp_path / "f")
    assert run.run(lambda _: None)
    path = run.stored._path(run.training[-1])
    before = path.read_bytes()
    path.write_bytes(before)
    assert prepare(root, [folder], tmp_path / "b", features=tmp_path / "f").run(lambda _: None)
    if path.suffix == ".safetensors":
        tensors = safetensors.torch.load(before)
        tensors["hidden_states"] = tensors["hidden_states"] * 1.01
        path.write_bytes(safetensors.torch.save(tensors))
        assert len(path.read_bytes()) == len(before)
    else:
        raw = gzip.decompress(before) if path.suffix == ".gz" else before
        held = torch.load(io.BytesIO(raw))
        buffer = io.BytesIO()
        torch.save(held | {"aux_hidden_state": held["aux_hidden_state"] * 1.01}, buffer)
        path.write_bytes(gzip.compress(buffer.getvalue()) if path.suffix == ".gz" else buffer.getvalue())
    with pytest.raises(UserError, match="holds features of something else: dtype is"):
        prepare(root, [folder], tmp_path / "c", features=tmp_path / "f").run(lambda _: None)


def test_damaged_rows_are_named(world, folder):
    root, _, documents = world
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".ckpt", ".gz", ".safetensors"))
    files[0].write_bytes(b"no tensors")
    reading = read_documents([folder], chat(root), END + 1, 100)
    assert len(reading.documents) == len(documents) - 1
    assert sum(reading.dropped.values()) == 1
    with pytest.raises(UserError, match=files[0].name):
        read_documents([folder], chat(root), END + 1, 100, strict=True)


@pytest.mark.parametrize("what", ["shape", "nan", "tokens"])
def test_rows_with_bad_states_are_dropped_before_training(world, tmp_path, monkeypatch, what):
    root, target, documents = world
    specforge, speculators = tmp_path / "a", tmp_path / "b"
    write_specforge(specforge, target, documents)
    write_speculators(speculators, target, documents, monkeypatch)
    path = specforge / "rows_0-5000" / "data_1.ckpt"
    held = torch.load(path)
    other = speculators / "hidden_states" / "hs_1.safetensors"
    tensors = safetensors.torch.load_file(other)
    if what == "shape":
        held["hidden_state"], tensors["hidden_states"] = held["hidden_state"][:, 1:], tensors["hidden_states"][1:]
    elif what == "nan":
        held["aux_hidden_state"][:, 4:] = torch.nan  # and all that see token 4
        tensors["hidden_states"][4:] = torch.nan
    else:
        tensors["token_ids"] += 1
        held["loss_mask"] = held["loss_mask"][1:]
    torch.save({k: t.clone() for k, t in held.items()}, path)
    safetensors.torch.save_file({k: t.contiguous() for k, t in tensors.items()}, other)
    reason = {"shape": "states of another shape", "nan": "states not finite", "tokens": "states of other tokens"}[what]
    for folder in (specforge, speculators):
        reading = read_documents([folder], chat(root), END + 1, 100)
        assert len(reading.documents) == len(documents) - 1
        both = what == "tokens" and folder == specforge  # whose ids stand beside the states
        assert reading.dropped == {"broken 'loss_mask'" if both else reason: 1}


@pytest.mark.filterwarnings("ignore:.*tokens held out are the target's most likely ones")
def test_a_row_that_turns_out_bad_ends_a_run_that_goes_on_once_it_is_mended(world, tmp_path):
    """One damaged token, whom no later one has seen: it is not found until the row's turn comes."""
    root, target, documents = world
    write_specforge(tmp_path / "hs", target, documents)
    config = dataclasses.replace(CONFIG, save_every=1)
    steps = []
    run = prepare(root, [tmp_path / "hs"], tmp_path / "a", config=config)
    last = list(packs(run.training, config.batch_tokens, config.seed, 0))[-1][0]
    path = run.stored._path(run.training[last])
    good = path.read_bytes()
    held = torch.load(path)
    held["aux_hidden_state"][:, 3] = torch.inf
    torch.save(held, path)
    with pytest.raises(UserError, match=rf"{path.name} holds states .*, 1 of \d+ tokens': write it again"):
        run.run(lambda p: steps.append(p.step))
    path.write_bytes(good)
    assert steps
    assert prepare(root, [tmp_path / "hs"], tmp_path / "a", config=config).run(lambda p: steps.append(p.step))
    assert steps == list(range(1, len(steps) + 1))  # none was lost, none made twice


def test_files_that_do_not_fit_are_named(world, tmp_path):
    root, target, documents = world
    write_specforge(tmp_path / "hs", target, documents)
    stored = StoredStates([tmp_path / "hs"])
    read = read_documents([tmp_path / "hs"], chat(root), END + 1, 100).documents
    path = tmp_path / "hs" / "rows_0-5000" / "data_0.ckpt"
    good = torch.load(path)

    def broken(match, **changes):
        torch.save(good | changes, path)
        with pytest.raises(UserError, match=match):
            stored.features(target, [read[0]])

    broken("states of other tokens", input_ids=good["input_ids"] + 1)
    broken(r"NaN or infinite, \d+ of \d+ tokens': write it again", hidden_state=good["hidden_state"] / 0)
    broken(r"expected \[T\], \[T, A\] and \[T, D\]", aux_hidden_state=good["aux_hidden_state"][:, 1:])
    broken("hidden_state is no tensor", hidden_state=[1.0])
    torch.save(good | {"aux_hidden_state": good["aux_hidden_state"][..., :32].clone()}, path)
    top = checkpoint.load_target(root / "target", torch.float32, "cpu", TOP)
    with pytest.raises(UserError, match="layers top of a target"):  # one layer's states are not the final one's
        stored.features(top, [read[0]])
    torch.save({k: v for k, v in good.items() if k != "loss_mask"}, path)
    reading = read_documents([tmp_path / "hs"], chat(root), END + 1, 100)
    assert reading.dropped == {"states incomplete": 1}
    torch.save(good | {"loss_mask": good["loss_mask"] * 2}, path)
    assert read_documents([tmp_path / "hs"], chat(root), END + 1, 100).dropped == {"broken 'loss_mask'": 1}


def test_what_cannot_be_given_together(world, folder, tmp_path):
    root, _, _ = world
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"a\.jsonl is a file\): train on one kind"):
        prepare(root, [folder, tmp_path / "a.jsonl"], tmp_path / "a")
    shutil.copytree(folder, tmp_path / "x" / "hs")
    with pytest.raises(UserError, match="two of the folders have one name"):
        prepare(root, [folder, tmp_path / "x" / "hs"], tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty is a folder, and holds no hidden states"):
        prepare(root, [tmp_path / "empty"], tmp_path / "a")
    (tmp_path / "empty" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds a data set, and no hidden_states/hs_0\.safetensors"):
        prepare(root, [tmp_path / "empty"], tmp_path / "a")


def test_specforge_itself_reads_these_files_as_we_do(world, tmp_path):
    store = pytest.importorskip("specforge.runtime.data_plane.feature_store")
    from specforge.algorithms.eagle3.data import normalize_offline_sample
    from specforge.runtime.data_plane.offline_reader import list_feature_files

    root, target, documents = world
    for pack in (False, True):
        folder = tmp_path / ("gz" if pack else "plain")
        write_specforge(folder, target, documents, pack)
        read = read_documents([folder], chat(root), END + 1, 100).documents
        for path, document in zip(list_feature_files(str(folder)), read, strict=True):
            theirs = normalize_offline_sample(store.load_feature_file(path), 100)
            ours = StoredStates([folder]).features(target, [document])
            assert theirs["input_ids"][0].tolist() == document.ids.tolist()
            assert theirs["loss_mask"][0, :-1].tolist() == document.supervised[:-1].int().tolist()
            assert torch.equal(theirs["hidden_state"][0], ours.aux_TA)
            assert torch.equal(theirs["target"][0], ours.last_TD)  # its head reads that without a norm


def test_speculators_itself_reads_these_files_as_we_do(world, tmp_path, monkeypatch):
    data = pytest.importorskip("speculators.train.data")
    datasets = pytest.importorskip("datasets")
    root, target, documents = world
    with monkeypatch.context() as patch:
        write_speculators(tmp_path / "hs", target, documents, patch)
    (tmp_path / "hs" / "state.json").unlink()
    rows = {"input_ids": [d.ids.long() for d in documents], "loss_mask": [d.supervised.long() for d in documents]}
    table = datasets.Dataset.from_dict(rows | {"seq_len": [len(d) for d in documents]})
    table.with_format("torch").save_to_disk(str(tmp_path / "hs"))
    read = read_documents([tmp_path / "hs"], chat(root), END + 1, 100).documents
    theirs = data.ArrowDataset(100, tmp_path / "hs", on_missing="raise")
    assert len(read) == len(theirs) == len(documents)
    for row, document in ((theirs[i], d) for i, d in enumerate(read)):
        ours = StoredStates([tmp_path / "hs"]).features(target, [document])
        assert row["input_ids"].tolist() == document.ids.tolist()
        assert row["loss_mask"].tolist() == document.supervised.int().tolist()
        assert torch.equal(row["hidden_states"], ours.aux_TA)
        assert torch.equal(target.model.norm(row["verifier_last_hidden_states"]), ours.last_TD)
