"""Heads from layout to layout: bits, reports, refusals, and what SGLang and vLLM make of what is written."""

import dataclasses
import json

import pytest
import safetensors.torch
import torch

from aquiline.config import TOP, AquilineWarning, RopeConfig, UserError
from aquiline.files import checkpoint, convert, disk, draft_formats, draft_gguf
from aquiline.files.checkpoint import DraftInfo, load_draft, load_target, save_draft
from aquiline.files.gguf_file import read_gguf
from tests.test_checkpoint import edit_config, edit_weights, hf_model, make_draft, write_gguf
from tests.test_formats import LLAMA3

AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "target"
    hf_model().to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_folder):
    return load_target(target_folder, torch.bfloat16)


@pytest.fixture
def save(tmp_path, target):
    """A head of ours on disk."""

    def run(**changes):
        save_draft(make_draft(**changes), tmp_path / "draft", DraftInfo.of(target, "tiny", "tok1", "tem1"), {"a": 1})
        return tmp_path / "draft"

    return run


@pytest.fixture
def foreign(save):
    """A head as others write it: no word of ours in its config."""

    def run(**changes):
        folder = save(**changes)
        ours = ("aquiline", "capture_after", "own_embedding", "trained_length")
        edit_config(folder, **dict.fromkeys(ours), norm_before_residual=None)
        return folder

    return run


def weights(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert (tensor.dtype, tensor.shape) == (b[name].dtype, b[name].shape)
        assert torch.equal(tensor, b[name]), name


HEADS = [
    {},
    {"ids": (31, 3, 9, 0)},  # in order of frequency
    {"ids": tuple(range(64))},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
    {"qk_norm": True},
    {"attention_bias": True},
    {"own_embedding": True},
    {"hidden_size": 32, "own_embedding": True},
    {"rope": RopeConfig(1e6, **LLAMA3)},
    {"capture_after": (0, 2, 5)},
    {"capture_after": (0, 2)},
]


@pytest.mark.parametrize("changes", HEADS)
@pytest.mark.parametrize("with_target", [False, True])
def test_there_and_back_is_bitwise(save, tmp_path, target, target_folder, changes, with_target):
    draft = save(**changes)
    spec = str(target_folder) if with_target else None
    convert.convert(draft, tmp_path / "vllm", "speculators", spec)
    convert.convert(tmp_path / "vllm", tmp_path / "back", "sglang", spec, force=True)
    assert_same_weights(weights(tmp_path / "back"), weights(draft))
    assert disk.read_json(tmp_path / "back" / "config.json") == disk.read_json(draft / "config.json")
    assert disk.read_json(tmp_path / "back" / "run.json") == {"a": 1}
    convert.convert(draft, tmp_path / "same", "sglang", spec, force=True)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "same" / name).read_bytes() == (draft / name).read_bytes()


def test_a_speculators_folder_decodes_here(save, tmp_path, target):
    draft = save(ids=(31, 3, 9, 0), norm_before_fc=True, norm_before_residual=True)
    convert.convert(draft, tmp_path / "vllm", "speculators")
    (a, b) = (load_draft(folder, target) for folder in (draft, tmp_path / "vllm"))
    assert (a.config, a.vocab.target_ids_W.tolist()) == (b.config, b.vocab.target_ids_W.tolist())
    assert_same_weights(a.state_dict(), b.state_dict())


def test_dtypes_stay_as_they_are(save, tmp_path):
    draft = save()
    edit_weights(
        draft, lambda t: t.update({"fc.weight": t["fc.weight"].half(), "norm.weight": t["norm.weight"].float()})
    )
    convert.convert(draft, tmp_path / "vllm", "speculators")
    convert.convert(tmp_path / "vllm", tmp_path / "back", "sglang")
    assert_same_weights(weights(tmp_path / "back"), weights(draft))


def test_a_full_vocabulary_has_no_map_and_is_in_the_targets_order(save, tmp_path):
    """Engines have no place for a map of it, so a head of others that has one loses it, and its rows are put right."""
    draft, order = save(ids=tuple(range(64))), torch.randperm(64, generator=torch.Generator().manual_seed(0))
    before = weights(draft)

    def shuffle(tensors):
        tensors |= {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": order - torch.arange(64)}

    edit_weights(draft, shuffle)
    for to in ("sglang", "speculators"):
        report = convert.convert(draft, tmp_path / to, to)
        assert any("put into the target's order" in line for line in report)
        assert not {"d2t", "t2d"} & weights(tmp_path / to).keys()
        assert torch.equal(weights(tmp_path / to)["lm_head.weight"], before["lm_head.weight"])


# ---------------------------------------------------------------- what the engines make of it


def vllm_reads(folder):
    """The speculators door: the layer's config with keys of the head's; parameters and captured states."""
    hf = disk.read_json(folder / "config.json")
    layer = hf["transformer_layer_config"]
    assert layer["model_type"] in ("llama", "qwen3")
    assert hf["speculators_model_type"] == "eagle3"
    assert hf["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert hf["speculators_config"]["verifier"]["name_or_path"]
    names = {n if "lm_head" in n else f"model.{n}" for n in weights(folder) if "t2d" not in n}
    count = layer.get("num_aux_hidden_states") or 3
    switches = {k: hf.get(k, k == "norm_before_residual")
                for k in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}  # fmt: skip
    return {
        "names": {n for n in names if not n.startswith(("model.layers.0.", "model.embed_tokens"))},
        "layer": {n.removeprefix("model.layers.0.") for n in names if n.startswith("model.layers.0.")},
        "captured": hf[AUX_IDS] or [2, 4, 5],
        "fc": (hf["target_hidden_size"] or layer["hidden_size"]) * count,
        "ids": ids_of(folder, hf["draft_vocab_size"], layer["vocab_size"]),
        "theta": layer["rope_theta"],
        "layer_type": layer["model_type"],
        **switches,
    }


def ids_of(folder, draft_vocab, vocab):
    d2t = weights(folder).get("d2t")
    assert (d2t is None) == (draft_vocab == vocab)
    return list(range(vocab)) if d2t is None else (d2t + torch.arange(draft_vocab)).tolist()


def sglang_reads(folder):
    """One architecture; no word of norm_before_residual; captured states only by eagle_config, after the layer."""
    hf = disk.read_json(folder / "config.json")
    assert hf["architectures"] == ["LlamaForCausalLMEagle3"]
    assert hf["tie_word_embeddings"] is False
    names = {n.replace("midlayer", "layers.0") for n in weights(folder) if n not in ("d2t", "t2d")}
    after = (hf.get("eagle_config") or {}).get(AUX_IDS)
    return {
        "names": names,
        "captured": [2, 4, 5] if after is None else [i + 1 for i in after],
        "ids": ids_of(folder, hf["draft_vocab_size"], hf["vocab_size"]),
        "theta": hf["rope_theta"],
        "switches": {k for k in ("norm_before_fc", "fc_norm", "norm_output") if hf.get(k)},
    }


@pytest.mark.parametrize("changes", HEADS)
def test_vllm_serve_loads_it_right(save, tmp_path, changes):
    draft = make_draft(**changes)
    convert.convert(save(**changes), tmp_path / "vllm", "speculators")
    got, c = vllm_reads(tmp_path / "vllm"), draft.config
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert got[name] is getattr(c, name), name
    own = {n.removeprefix("midlayer.") for n in draft.state_dict() if n.startswith("midlayer.")}
    assert got["layer"] == own | ({"self_attn.o_proj.bias"} if c.attention_bias else set())
    assert got["captured"] == [i + 1 for i in c.capture_after]
    assert got["fc"] == c.aux_width
    assert got["ids"] == draft.vocab.target_ids_W.tolist()
    assert got["theta"] == 1e6
    assert got["layer_type"] == ("qwen3" if c.qk_norm else "llama")


@pytest.mark.parametrize("changes", [c for c in HEADS if c not in (HEADS[4], HEADS[5], HEADS[6], HEADS[7])])
def test_sglang_loads_it_right(save, tmp_path, changes):
    draft = make_draft(**changes)
    convert.convert(save(**changes), tmp_path / "vllm", "speculators")
    convert.convert(tmp_path / "vllm", tmp_path / "sglang", "sglang")
    got, c = sglang_reads(tmp_path / "sglang"), draft.config
    assert got["names"] == {n.replace("midlayer", "layers.0") for n in draft.state_dict()}
    assert got["captured"] == [i + 1 for i in c.capture_after]
    assert got["ids"] == draft.vocab.target_ids_W.tolist()
    assert got["switches"] == {k for k in ("norm_before_fc", "fc_norm", "norm_output") if getattr(c, k)}


def test_vllm_finds_the_target(save, foreign, tmp_path, target_folder):
    def verifier(folder):
        return disk.read_json(folder / "config.json")["speculators_config"]["verifier"]

    report = convert.convert(save(), tmp_path / "a", "speculators")
    assert verifier(tmp_path / "a") == {"name_or_path": "tiny", "architectures": []}
    assert any("'tiny', which `vllm serve` will look for" in line for line in report)
    convert.convert(save(), tmp_path / "b", "speculators", str(target_folder))
    assert verifier(tmp_path / "b") == {"name_or_path": str(target_folder), "architectures": ["LlamaForCausalLM"]}
    convert.convert(tmp_path / "b", tmp_path / "c", "speculators")
    assert verifier(tmp_path / "c")["name_or_path"] == str(target_folder)
    folder = foreign()
    edit_config(folder, **{AUX_IDS: [2, 4, 5]})
    with pytest.raises(UserError, match="names none: give --target"):
        convert.convert(folder, tmp_path / "d", "speculators")


def test_the_embedding_is_the_targets_bytes_or_absent(save, tmp_path, target, target_folder):
    convert.convert(save(), tmp_path / "a", "speculators")
    assert "embed_tokens.weight" not in weights(tmp_path / "a")
    convert.convert(save(), tmp_path / "b", "speculators", str(target_folder))
    assert torch.equal(weights(tmp_path / "b")["embed_tokens.weight"], target.model.embed_tokens.weight)
    assert disk.read_json(tmp_path / "b" / "config.json")["embed_requires_grad"] is False
    report = convert.convert(tmp_path / "b", tmp_path / "c", "sglang")
    assert "left out embed_tokens.weight" in report
    assert any("uncompared" in line for line in report)
    edit_weights(tmp_path / "b", lambda t: t["embed_tokens.weight"].add_(1))
    with pytest.raises(UserError, match="SGLang ignores own_embedding"):
        convert.convert(tmp_path / "b", tmp_path / "d", "sglang", str(target_folder))


# ---------------------------------------------------------------- heads of others


def rename(tensors, change):
    for name in list(tensors):
        tensors[change(name)] = tensors.pop(name)


def automodel(folder):
    edit_config(folder, architectures=["LlamaEagle3DraftModel"])
    edit_weights(folder, lambda t: rename(t, lambda n: n if n in ("d2t", "t2d", "lm_head.weight")
                                          else "model." + n.replace("midlayer.", "layers.0.")))  # fmt: skip


def modelopt(folder):
    """Counted in the order of frequency, no t2d; layers named by what they come after."""
    edit_config(folder, eagle_config={AUX_IDS: [1, 3, 4], "use_aux_hidden_state": True})
    edit_weights(folder, lambda t: [t.pop("t2d"), rename(t, lambda n: n.replace("midlayer.", "layers.0."))])


def angelslim(folder):
    edit_config(folder, architectures=["Eagle3LlamaForCausalLM"], tie_word_embeddings=True)


def absolute(folder):
    edit_weights(folder, lambda t: t.update(d2t=t["d2t"] + torch.arange(len(t["d2t"]))))


def pickled(folder):
    torch.save(weights(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def copied_config(folder):
    edit_config(folder, architectures=["LlamaForCausalLM"], num_hidden_layers=40, use_cache=True, pad_token_id=0)


@pytest.mark.parametrize("write", [automodel, modelopt, angelslim, absolute, pickled, copied_config])
@pytest.mark.parametrize("to", ["sglang", "speculators"])
def test_heads_of_every_writer(foreign, tmp_path, target, target_folder, write, to):
    ids = (63, 3, 9, 30, 31, 0)
    write(foreign(ids=ids))
    convert.convert(tmp_path / "draft", tmp_path / "out", to, str(target_folder))
    got = load_draft_quietly(tmp_path / "out", target)
    assert got.vocab.target_ids_W.tolist() == list(ids)
    assert (got.config.capture_after, got.config.norm_before_residual) == ((1, 3, 4), False)
    assert_same_weights(got.state_dict(), make_draft(ids=ids).state_dict())
    assert weights(tmp_path / "out")["t2d"].nonzero().flatten().tolist() == sorted(ids)


@pytest.mark.filterwarnings("ignore::aquiline.config.AquilineWarning")
def load_draft_quietly(folder, target):
    with pytest.warns(AquilineWarning, match="cannot be checked"):
        return load_draft(folder, target)


def test_the_three_norms_of_older_heads(foreign, tmp_path, target_folder):
    names = ("low", "mid", "high")
    folder = foreign(fc_norm=True)
    edit_weights(folder, lambda t: [t.update({f"aux_norm_{n}.weight": t.pop(f"fc_norm.{i}.weight")})
                                    for i, n in enumerate(names)])  # fmt: skip
    report = convert.convert(folder, tmp_path / "out", "sglang", str(target_folder))
    assert {f"fc_norm.{i}.weight" for i in range(3)} <= weights(tmp_path / "out").keys()
    assert any(line.startswith("renamed aux_norm_low.* to fc_norm.0.*") for line in report)


def test_what_only_the_target_can_tell(foreign, tmp_path, target, target_folder):
    folder = foreign()
    with pytest.raises(UserError, match=r"^.*draft: .*does not say which target layers it reads.*give --target"):
        convert.convert(folder, tmp_path / "out", "sglang")
    edit_config(folder, **{AUX_IDS: [2, 4, 5]})
    convert.convert(folder, tmp_path / "plain", "sglang")
    assert disk.read_json(tmp_path / "plain" / "config.json")["capture_after"] == [1, 3, 4]
    embedding = target.model.embed_tokens.weight.detach().clone()
    edit_weights(folder, lambda t: t.update({"embed_tokens.weight": embedding}))
    with pytest.raises(UserError, match=r"draft: .*embed_tokens\.weight.* give --target"):
        convert.convert(folder, tmp_path / "out", "sglang")
    report = convert.convert(folder, tmp_path / "out", "sglang", str(target_folder))
    assert "left out embed_tokens.weight" in report
    assert "embed_tokens.weight" not in weights(tmp_path / "out")
    edit_config(folder, target_hidden_size=48)  # by which the reference knows an embedding of the draft's own
    convert.convert(folder, tmp_path / "own", "speculators", str(target_folder))


def test_a_head_without_lm_head_takes_the_targets(foreign, tmp_path, target, target_folder):
    folder = foreign(ids=tuple(range(64)))
    edit_config(folder, **{AUX_IDS: [2, 4, 5]})
    edit_weights(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"no lm_head\.weight, so its head is the target's: give --target"):
        convert.convert(folder, tmp_path / "out", "sglang")
    convert.convert(folder, tmp_path / "out", "sglang", str(target_folder))
    assert torch.equal(weights(tmp_path / "out")["lm_head.weight"], target.head_weight)


# ---------------------------------------------------------------- switches


@pytest.fixture
def target_gguf(tmp_path):
    write_gguf(tmp_path / "target.gguf", hf_model(), "llama", tokens=64)
    return str(tmp_path / "target.gguf")


@pytest.mark.parametrize(
    ("to", "engine", "switch"),
    [
        ("sglang", "SGLang", "norm_before_residual"),
        ("sglang", "SGLang", "qk_norm"),
        ("sglang", "SGLang", "attention_bias"),
        ("sglang", "SGLang", "own_embedding"),
        ("gguf", r"llama\.cpp", "fc_norm"),
        ("gguf", r"llama\.cpp", "norm_output"),
        ("gguf", r"llama\.cpp", "qk_norm"),
        ("gguf", r"llama\.cpp", "attention_bias"),
    ],
)
def test_switches_that_an_engine_ignores(save, tmp_path, target_gguf, to, engine, switch):
    draft, out = save(**{switch: True}), tmp_path / ("out.gguf" if to == "gguf" else "out")
    before = sorted(p.name for p in tmp_path.iterdir())
    spec = target_gguf if to == "gguf" else None
    with pytest.raises(UserError, match=rf"^{engine} ignores {switch} .*--force"):
        convert.convert(draft, out, to, spec)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    report = convert.convert(draft, out, to, spec, force=True)
    if to == "gguf":
        (line,) = [line for line in report if line.startswith("LEFT OUT")]
        assert switch in line
        plain = make_draft().state_dict()
        assert read_gguf(out).tensors.keys() == {draft_gguf.gguf_name(name) for name in plain} | {"d2t"}
    else:
        assert any("the architecture's name is one that it refuses" in line for line in report)
        assert disk.read_json(out / "config.json")["architectures"] != ["LlamaForCausalLMEagle3"]
        assert_same_weights(weights(out), weights(draft))


@pytest.mark.parametrize(
    ("changes", "to", "named"),
    [
        ({"capture_after": (0, 2)}, "gguf", r"llama\.cpp cannot take this head: it has 2 captured layers"),
        ({"rope": RopeConfig(1e6, "yarn", 2.0, 64, attention_factor=1.5)}, "gguf", "yarn rope with attention_factor"),
        ({"capture_after": TOP}, "sglang", "SGLang cannot take this head: .* final state"),
        ({"capture_after": TOP}, "speculators", "vLLM cannot take this head: .* final state"),
    ],
)
def test_what_has_no_room_is_refused_even_by_force(save, tmp_path, target_gguf, changes, to, named):
    draft, out = save(**changes), tmp_path / ("out.gguf" if to == "gguf" else "out")
    for force in (False, True):
        with pytest.raises(UserError, match=named):
            convert.convert(draft, out, to, target_gguf if to == "gguf" else None, force=force)
    assert not out.exists()


def test_a_gguf_by_way_of_speculators(save, tmp_path, target_gguf):
    draft = save(ids=(31, 3, 9, 0), norm_before_residual=True)
    convert.convert(draft, tmp_path / "vllm", "speculators")
    report = convert.convert(tmp_path / "vllm", tmp_path / "heads" / "head.gguf", "gguf", target_gguf)
    file = read_gguf(tmp_path / "heads" / "head.gguf")
    assert torch.from_numpy(file.tensors["d2t"][2].copy()).view(torch.int64).flatten().tolist() == [31, 3, 9, 0]
    assert file.fields["eagle3.norm_before_residual"] is True
    assert any("target ids in place of offsets" in line for line in report)
    assert [p.name for p in (tmp_path / "heads").iterdir()] == ["head.gguf"]
    for spec in (None, str(tmp_path / "vllm")):
        with pytest.raises(UserError, match=r"give --target TARGET\.gguf"):
            convert.convert(draft, tmp_path / "other.gguf", "gguf", spec)


# ---------------------------------------------------------------- reports and bad input


def test_the_report_names_what_changed(foreign, tmp_path, target_folder):
    folder = foreign()
    edit_config(
        folder, use_cache=True, pad_token_id=0, tie_word_embeddings=True, mystery={"a": 1}, attention_dropout=0.5
    )
    edit_weights(folder, lambda t: [t.pop("t2d"), t.update({"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(6)})])
    report = convert.convert(folder, tmp_path / "out", "speculators", str(target_folder))
    text = "\n".join(report)
    assert "tensors in the SafeAILab/EAGLE layout" in report[0]
    assert "renamed midlayer.* to layers.0.* (10 tensors)" in report
    assert "t2d was made from d2t" in report
    assert "left out midlayer.self_attn.rotary_emb.inv_freq, which is computed" in report
    assert "not carried over from the config: attention_dropout, mystery, pad_token_id, use_cache" in report
    assert "says tie_word_embeddings; its own lm_head is used" in text
    assert "it reads the states after layers [1, 3, 4]" in report
    assert "the usual [1, 3, 4] are taken" in text
    assert "embed_tokens.weight: the target's" in report
    report = convert.convert(tmp_path / "out", tmp_path / "back", "sglang")
    assert "in the speculators layout" in report[0]
    assert "renamed layers.0.* to midlayer.* (10 tensors)" in report
    assert not [line for line in report if line.startswith("not carried")]


def test_other_readers_of_the_layout_are_thought_of(save, tmp_path):
    report = convert.convert(save(fc_norm=True, rope=RopeConfig(1e6, **LLAMA3)), tmp_path / "out", "sglang")
    assert any("SafeAILab/EAGLE's own code" in r and "fc_norm, a rope of type llama3" in r for r in report)


def test_another_targets_head_is_refused_or_noted(save, tmp_path, target_folder):
    draft = save()
    edit_config(draft, aquiline=disk.read_json(draft / "config.json")["aquiline"] | {"target_fingerprint": "0" * 32})
    report = convert.convert(draft, tmp_path / "out", "speculators", str(target_folder))
    assert any("other weights of the same structure" in line for line in report)
    edit_config(draft, aquiline=disk.read_json(draft / "config.json")["aquiline"] | {"target_layers": 9})
    with pytest.raises(UserError, match="a target with 9 layers"):
        convert.convert(draft, tmp_path / "other", "speculators", str(target_folder))


def test_every_wrong_tensor_is_named_and_nothing_is_written(save, tmp_path):
    draft = save()

    def change(tensors):
        tensors["midlayer.hidden_nrm.weight"] = tensors.pop("midlayer.hidden_norm.weight")
        tensors["fc.weight"] = torch.zeros(48, 96)

    edit_weights(draft, change)
    before = sorted(p.name for p in tmp_path.iterdir())
    for to in ("sglang", "speculators"):
        with pytest.raises(UserError) as error:
            convert.convert(draft, tmp_path / "a" / "out", to)
        for named in (
            str(draft),
            "hidden_norm.weight is missing",
            "hidden_nrm.weight is left over",
            "fc.weight is [48, 96]",
        ):
            assert named in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("d2t"), "draft: .*no d2t"),
        (lambda t: t["lm_head.weight"].fill_(torch.nan), r"NaN or infinite, in lm_head\.weight"),
        (lambda t: t.update(d2t=t["d2t"] * 0 - 1), "draft: d2t and t2d disagree|draft: d2t is no map"),
        (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(1)}), "draft: .*layer 1"),
        (lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.zeros(48)}), "q_proj.bias is left over"),
    ],
)
def test_bad_weights(save, tmp_path, change, named):
    draft = save()
    edit_weights(draft, change)
    with pytest.raises(UserError, match=named):
        convert.convert(draft, tmp_path / "out", "speculators")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft"]


def test_bad_arguments(save, tmp_path, target_folder):
    draft = save()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    for out, to, named in (
        ("full", "sglang", "exists and is not empty"),
        ("full/a", "sglang", "exists and is not empty"),
        ("out", "gguf", r"a name that ends in \.gguf"),
        ("out", "exl2", "--to exl2 is not known; expected one of sglang, speculators, openvino, gguf"),
    ):
        with pytest.raises(UserError, match=named):
            convert.convert(draft, tmp_path / out, to)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(UserError, match="exists"):
        convert.convert(draft, tmp_path / "a.gguf", "gguf")
    with pytest.raises(UserError, match="nowhere does not exist"):
        convert.convert(tmp_path / "nowhere", tmp_path / "out", "sglang")
    with pytest.raises(UserError, match=r"target: no fc\.weight: this is no EAGLE-3 head"):
        convert.convert(target_folder, tmp_path / "out", "sglang")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_and_a_fault_of_ours_leave_nothing(save, tmp_path, monkeypatch):
    draft = save()
    whole = draft_formats.file_tensors
    monkeypatch.setattr(
        draft_formats, "file_tensors", lambda *a: whole(*a) | {"norm.weight": torch.zeros(48).bfloat16()}
    )
    with pytest.raises(AssertionError, match=r"norm\.weight"):
        convert.convert(draft, tmp_path / "out", "speculators")
    monkeypatch.setattr(safetensors.torch, "save_file", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(UserError, match=r"cannot write .*out: disk full"):
        convert.convert(draft, tmp_path / "out", "sglang")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft"]


def test_hub_ids_and_the_default(save, tmp_path, monkeypatch):
    import huggingface_hub

    draft = save()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, allow_patterns: str(draft))
    convert.convert("someone/head", tmp_path / "a", "sglang")
    monkeypatch.undo()
    convert.convert("default", tmp_path / "b", "speculators")
    folder = checkpoint.draft_path("default")
    convert.convert(tmp_path / "b", tmp_path / "c", "sglang")
    assert_same_weights(weights(tmp_path / "c"), weights(folder))
    assert json.loads((tmp_path / "c/config.json").read_text()) == json.loads((folder / "config.json").read_text())


def test_the_plain_config_of_a_draft_is_unharmed_by_what_was_read(save, tmp_path, target):
    """The length that a draft reaches is raised to the target's, here as when it is loaded."""
    draft = save(max_positions=128, trained_length=None)
    file = checkpoint.read_draft(draft, None)
    assert (file.config.max_positions, file.config.trained_length) == (128, None)
    file = checkpoint.read_draft(draft, target)
    assert (file.config.max_positions, file.config.trained_length) == (512, 128)
    assert (
        dataclasses.replace(file.config, max_positions=128, trained_length=None)
        == checkpoint.read_draft(draft, None).config
    )
