"""The OpenVINO IR: what the exporter is given and what is written into the IR; with optimum-intel, the real one."""

import importlib.util
import json
import shutil
import sys
import types

import pytest
import safetensors.torch
import torch

from aquiline.config import UserError
from aquiline.files import checkpoint, convert
from tests.test_api import make_draft, make_target
from tests.tiny_chat import byte_chat

IR = ("openvino_model.xml", "openvino_model.bin")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = make_target(root / "target")
    make_draft(root / "draft", target)
    make_draft(root / "whole", target, draft_vocab_size=262)
    make_draft(root / "switches", target, fc_norm=True, norm_output=True, own_embedding=True)
    return root


def export(models, out, draft="draft", **settings):
    return convert.convert(models / draft, out, "openvino", str(models / "target"), tokenizer=byte_chat, **settings)


@pytest.fixture
def exporter(monkeypatch, tmp_path):
    """Stands in for optimum-intel and OpenVINO: keeps what it was given, writes empty files."""
    given = types.SimpleNamespace(rt_info={}, fails=None)

    def main_export(source, out, **settings):
        if given.fails:
            raise given.fails
        given.settings = settings
        shutil.copytree(source, tmp_path / "given")
        for name in IR:
            (checkpoint.Path(out) / name).write_text("as exported")

    class Model:
        def set_rt_info(self, value, path):
            given.rt_info[tuple(path)] = value

    def save_model(model, path, compress_to_fp16):
        assert compress_to_fp16 is False
        for kind in ("xml", "bin"):
            path.with_suffix(f".{kind}").write_text("with the list")

    core = types.SimpleNamespace(read_model=lambda path: Model())
    parts = {
        "openvino": types.SimpleNamespace(Core=lambda: core, save_model=save_model),
        "optimum": types.ModuleType("optimum"),
        "optimum.exporters": types.ModuleType("optimum.exporters"),
        "optimum.exporters.openvino": types.SimpleNamespace(main_export=main_export),
    }
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    return given


def test_what_the_exporter_is_given(models, exporter, tmp_path):
    report = export(models, tmp_path / "ir")
    given, target = tmp_path / "given", checkpoint.load_target(models / "target", torch.bfloat16)
    config = json.loads((given / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    ours = safetensors.torch.load_file(models / "draft" / "model.safetensors")
    theirs = safetensors.torch.load_file(given / "model.safetensors")
    assert torch.equal(theirs.pop("embed_tokens.weight"), target.model.embed_tokens.weight)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    assert (given / "tokenizer.json").is_file()
    assert exporter.settings["task"] == "text-generation-with-past"
    assert exporter.rt_info == {("hidden_layers_list",): [1, 3, 4]}
    assert {p.name: p.read_text() for p in (tmp_path / "ir").iterdir()} == dict.fromkeys(IR, "with the list")
    assert "it reads the states after layers [1, 3, 4], named so in the IR's hidden_layers_list" in report
    assert "embed_tokens.weight: the target's" in report


def test_a_full_vocabulary_gets_the_map_that_the_exporter_has_room_for(models, exporter, tmp_path):
    export(models, tmp_path / "ir", "whole")
    given = safetensors.torch.load_file(tmp_path / "given" / "model.safetensors")
    assert given["d2t"].tolist() == [0] * 262
    assert given["t2d"].tolist() == [True] * 262


def test_switches_are_refused_or_left_out(models, exporter, tmp_path):
    with pytest.raises(UserError, match=r"OpenVINO GenAI ignores fc_norm .*, norm_output .*, own_embedding"):
        export(models, tmp_path / "ir", "switches")
    assert list(tmp_path.iterdir()) == []
    report = export(models, tmp_path / "ir", "switches", force=True)
    (line,) = [line for line in report if line.startswith("LEFT OUT")]
    assert "fc_norm.0.weight" in line
    given = safetensors.torch.load_file(tmp_path / "given" / "model.safetensors")
    assert not [name for name in given if name.startswith("fc_norm")]
    assert given["embed_tokens.weight"].dtype == torch.bfloat16, "the target's, not the draft's"
    config = json.loads((tmp_path / "given" / "config.json").read_text())
    assert not {"fc_norm", "norm_output"} & config.keys()


def test_faults_are_one_line_and_nothing_is_written(models, exporter, tmp_path, monkeypatch):
    exporter.fails = RuntimeError("no such\nop")
    with pytest.raises(UserError, match="optimum-intel could not export the head: no such op"):
        export(models, tmp_path / "ir")
    exporter.fails = OSError(28, "disk full")
    with pytest.raises(UserError, match=r"cannot write .*ir: disk full"):
        export(models, tmp_path / "ir")
    with pytest.raises(UserError, match="give --target"):
        convert.convert(models / "draft", tmp_path / "ir", "openvino")
    monkeypatch.setitem(sys.modules, "optimum.exporters.openvino", None)
    with pytest.raises(UserError, match=r"cannot be imported .*: pip install 'optimum-intel\[openvino\]'"):
        export(models, tmp_path / "ir")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="optimum-intel is not installed")
@pytest.mark.parametrize("draft", ["draft", "whole"])
def test_the_real_ir_computes_what_the_head_does(models, tmp_path, draft):
    import openvino

    export(models, tmp_path / "ir", draft)
    model = openvino.Core().read_model(tmp_path / "ir" / IR[0])
    assert model.get_rt_info(["eagle3_mode"]).value == "True"
    assert str(model.get_rt_info(["hidden_layers_list"]).value).replace(",", "").split() == ["1", "3", "4"]
    target = checkpoint.load_target(models / "target", torch.float32)
    head = checkpoint.load_draft(models / draft, target, dtype=torch.float32)
    ids, aux = torch.arange(6)[None] * 7, torch.randn(1, 6, 96, generator=torch.Generator().manual_seed(0))
    inputs = {
        "input_ids": ids.numpy(),
        "hidden_states": aux.numpy(),
        "attention_mask": torch.ones(1, 6, dtype=torch.long).numpy(),
        "position_ids": torch.arange(6)[None].numpy(),
        "beam_idx": torch.zeros(1, dtype=torch.int32).numpy(),
    }
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    out = compiled.create_infer_request().infer(inputs)
    with torch.inference_mode():
        embeds = head.embed(ids, target.model.embed_tokens)
        ours = head.logits(head(embeds, head.fuse(aux), torch.arange(6)[None]).hidden_BNH)
    torch.testing.assert_close(torch.from_numpy(out["logits"].copy()), ours, atol=1e-4, rtol=1e-4)
    ids_W = torch.from_numpy(out["d2t"].copy()) + torch.arange(head.config.draft_vocab_size)
    assert torch.equal(ids_W, head.vocab.target_ids_W)
