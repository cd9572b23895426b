"""The script that compares recipes: equal passes, one feature cache, a record that goes on where it was stopped."""

import argparse
import dataclasses
import json
import runpy
from pathlib import Path

import pytest
import torch

from aquiline.config import TOP
from aquiline.data.features import compute
from aquiline.files import checkpoint
from tests.test_api import make_target

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "runs" / "compare_recipes.py"))
RECIPES, Recipe, Part = (SCRIPT[name] for name in ("RECIPES", "Recipe", "Part"))
pytestmark = pytest.mark.filterwarnings("ignore:the data has")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A target and its answers; the script knows four recipes, small enough for it."""
    target = make_target(tmp_path / "target")
    with open(tmp_path / "answers.jsonl", "w") as file:
        for number in range(60):
            ids = torch.randint(0, 200, (24,), generator=torch.Generator().manual_seed(number)).tolist()
            row = {"id": str(number), "temperature": 0.0, "prompt_ids": ids[:8], "response_ids": ids[8:]}
            file.write(json.dumps(row) + "\n")
    script = SCRIPT["main"].__globals__
    wide = Recipe({"draft_vocab_size": 128}, cuts=(64, 32))
    recipes = {"base": Recipe(), "data-1/4": Recipe(share=1 / 4), "top": Recipe(top=True), "wide": wide}
    monkeypatch.setitem(script, "RECIPES", recipes)
    monkeypatch.setitem(script, "DEFAULT_DRAFT_VOCAB", 64)
    monkeypatch.setitem(script, "DEPTH", 2)
    monkeypatch.setattr("sys.argv", _arguments(tmp_path))
    assert target.config.num_layers == 8
    return tmp_path


def _arguments(folder):
    paths = map(str, (folder / "work", folder / "out.json", folder / "answers.jsonl"))
    return ["x", *paths, "--tokens", "960", "--batch-tokens", "48", "--held-out", "4", "--target", f"{folder}/target"]


def _bench(folder):
    args = argparse.Namespace(
        work=folder / "work", answers=[folder / "answers.jsonl"], tokens=960, batch_tokens=48, held_out=4,
        target=folder / "target",
    )  # fmt: skip
    bench = SCRIPT["Bench"].prepare(args)
    bench.fill([])
    return bench


def _run():
    with pytest.raises(SystemExit) as ended:
        SCRIPT["main"]()
    return ended.value.code


def test_every_recipe_has_the_same_passes_and_what_is_finished_is_not_run_again(folder, monkeypatch):
    bench = SCRIPT["Bench"]
    train = bench.train
    monkeypatch.setattr(bench, "train", lambda self, name, *rest: None if name == "top" else train(self, name, *rest))
    assert _run() == 0
    first = json.loads((folder / "out.json").read_text())
    assert first["not_run"] == ["top"]
    monkeypatch.setattr(bench, "train", lambda self, name, *rest: train(self, {"top": "top"}[name], *rest))
    assert _run() == 0
    record = json.loads((folder / "out.json").read_text())
    found = record["recipes"]
    assert record["not_run"] == []
    assert {name: found[name] for name in first["recipes"]} == first["recipes"]
    assert (record["rows"], record["tokens"], record["held_out"]["rows"]) == (40, 960, 4)
    assert {name: (r["rows"], r["token_passes"]) for name, r in found.items()} == {
        "base": (40, 960), "data-1/4": (10, 960), "top": (40, 960), "wide": (40, 960),
    }  # fmt: skip
    assert found["top"]["changes"] == {"capture_after": "top"}
    assert {size: cut["draft_vocab_size"] for size, cut in found["wide"]["cut_to"].items()} == {"64": 64, "32": 32}
    assert all(1 <= r["tau"] <= 3 and len(r["n_alpha"]) == 2 for r in found.values())


def test_a_stopped_recipe_goes_on_to_the_same_end(folder):
    bench, stop, updates = _bench(folder), [], []
    whole = bench.train("base", Recipe(), [])
    bench.base = dataclasses.replace(bench.base, save_every=1)

    class Late(list):
        def __bool__(self):
            updates.append(0)
            return len(updates) == 8

    assert bench.train("again", Recipe(), Late()) is None
    assert bench.train("again", Recipe(), stop) == whole


def test_a_seed_changes_the_head_and_neither_the_rows_nor_what_is_held_out(folder):
    bench = _bench(folder)
    base, other = (bench.train(f"seed-{n}", Recipe({"seed": n}), []) for n in (0, 1))
    assert base["token_passes"] == other["token_passes"]
    assert base["loss"] != other["loss"]


def test_top_reads_what_a_target_that_captures_its_final_state_gives(folder):
    bench = _bench(folder)
    top = checkpoint.load_target(folder / "target", bench.target.dtype, "cpu", TOP)
    expected = compute(top, [bench.store.documents[5]])
    for name, tensor in vars(Part(bench.store, [3, 5], top=True).get([1])).items():
        assert torch.equal(tensor, getattr(expected, name).to(tensor.dtype)), name  # as the store keeps it


def test_a_cut_head_gives_the_kept_tokens_the_logits_they_had(folder):
    bench = _bench(folder)
    config = dataclasses.replace(bench.base, draft_vocab_size=128)
    draft = bench.draft(config, Recipe())
    torch.nn.init.normal_(draft.lm_head.weight)
    cut = bench.cut(draft, 32)
    hidden = torch.randn(3, draft.config.hidden_size)
    kept = draft.vocab.draft_ids_V[cut.vocab.target_ids_W]
    assert torch.equal(cut.lm_head(hidden), draft.lm_head(hidden)[:, kept])
    counts = bench.counts_V.double()
    counts[list(bench.always)] = torch.inf
    outside = counts[draft.vocab.target_ids_W[~torch.isin(torch.arange(128), kept)]]
    assert counts[cut.vocab.target_ids_W].min() >= outside.max()
    assert torch.equal(cut.midlayer.mlp.up_proj.weight, draft.midlayer.mlp.up_proj.weight)
