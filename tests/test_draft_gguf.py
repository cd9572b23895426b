"""A head as llama.cpp reads it: the file read back by another reader, and computed as llama.cpp computes it."""

import dataclasses

import gguf
import pytest
import torch

from aquiline.config import RopeConfig, UserError
from aquiline.files import disk, draft_gguf
from aquiline.files.gguf_file import read_gguf
from aquiline.model.draft import Draft
from aquiline.model.layers import Rotary
from aquiline.model.vocab import VocabMap
from tests.conftest import randomise
from tests.test_formats import LLAMA3, draft_config

IDS = torch.tensor([9, 3, 31, 30, 41, 40, 50, 63])  # in order of frequency
CONFIG = draft_config(draft_vocab_size=8)
TOKENS = [f"t{i}" for i in range(64)]
BLOCK = {
    "attn_norm": (48,), "attn_norm_2": (48,), "attn_q": (48, 96), "attn_k": (24, 96), "attn_v": (24, 96),
    "attn_output": (48, 48), "ffn_norm": (48,), "ffn_gate": (40, 48), "ffn_up": (40, 48), "ffn_down": (48, 40),
}  # fmt: skip
SHAPES = {f"blk.0.{k}.weight": v for k, v in BLOCK.items()} | {
    "fc.weight": (48, 144), "output_norm.weight": (48,), "output.weight": (8, 48), "d2t": (8,),
}  # fmt: skip


@pytest.fixture
def target_file(tmp_path):
    """All that is read of the target's file is its tokenizer."""
    writer = gguf.GGUFWriter(tmp_path / "target.gguf", "llama")
    writer.add_block_count(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 63 + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "target.gguf"


def head(config=CONFIG, ids=IDS):
    draft = Draft(config, VocabMap.of(ids, config.vocab_size))
    randomise(draft, 3)
    return draft


@pytest.fixture
def write(tmp_path, target_file):
    def run(config=CONFIG, dtype=torch.bfloat16, ids=IDS):
        tensors = {name: t.to(dtype) for name, t in head(config, ids).state_dict().items()}
        draft_gguf.write_gguf(tmp_path / "head.gguf", config, tensors, ids, target_file)
        return tensors, read_gguf(tmp_path / "head.gguf")

    return run


def test_names_shapes_and_metadata(write):
    _, file = write()
    assert {name: shape for name, (_, shape, _) in file.tensors.items()} == SHAPES
    f = file.fields
    assert f["general.architecture"] == "eagle3"
    assert f["eagle3.target_layers"] == f["eagle3.extract_layers"] == [2, 4, 5]  # after 1, 3, 4
    assert (f["eagle3.target_hidden_size"], f["eagle3.embedding_length"], f["eagle3.vocab_size"]) == (48, 48, 64)
    assert (f["eagle3.norm_before_residual"], f["eagle3.norm_before_fc"]) == (False, False)
    assert (f["eagle3.block_count"], f["eagle3.feed_forward_length"], f["eagle3.context_length"]) == (1, 40, 512)
    heads = [f[f"eagle3.attention.{k}"] for k in ("head_count", "head_count_kv", "key_length", "value_length")]
    assert heads == [4, 2, 12, 12]
    assert f["eagle3.rope.dimension_count"] == 12
    assert f["eagle3.rope.freq_base"] == 5e5
    assert f["eagle3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert not [key for key in f if "rope.scaling" in key]


def test_the_targets_tokenizer_is_copied_with_its_types(write, target_file, tmp_path):
    write()
    ours, theirs = (gguf.GGUFReader(path).fields for path in (tmp_path / "head.gguf", target_file))
    names = {name for name in theirs if name.startswith("tokenizer.")}
    assert len(names) >= 5
    for name in names:
        assert ours[name].types == theirs[name].types, name
        assert ours[name].contents() == theirs[name].contents(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_comes_back(write, dtype):
    tensors, file = write(dtype=dtype)
    for name, tensor in tensors.items():
        kind, _, stored = file.tensors[draft_gguf.gguf_name(name)]
        assert kind == draft_gguf._KINDS[dtype if tensor.ndim > 1 else torch.float32], name
        again = torch.from_numpy(gguf.dequantize(stored, kind).copy()).reshape(tensor.shape)
        for rows, heads in (("q_proj", 4), ("k_proj", 2)):
            if rows in name:
                again = again.view(heads, 6, 2, -1).transpose(1, 2).reshape(tensor.shape)
        assert torch.equal(again, tensor.float()), name
    assert file.tensors["d2t"][0] == gguf.GGMLQuantizationType.I64
    assert torch.from_numpy(file.tensors["d2t"][2].copy()).view(torch.int64).flatten().tolist() == IDS.tolist()


def test_rows_of_q_are_such_that_turning_neighbours_gives_the_same_attention(write):
    """llama.cpp turns rows (0, 1), (2, 3) ... of a head where we turn (0, 6), (1, 7) ...: the same angles, so the
    products of queries and keys are equal.
    """
    _, file = write(dtype=torch.float32)
    draft, x = head(), torch.randn(1, 5, 96, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)[None]
    cos, sin = draft.rotary(positions, torch.float32)
    with torch.inference_mode():
        q, k, _ = draft.midlayer.self_attn.queries_keys_values(x, cos, sin)
    q, k = (t.transpose(1, 2) if t.shape[1] == 5 else t for t in (q, k))  # heads first
    turned = []
    frequencies = Rotary(CONFIG.rope, 12, 512).inv_freq
    for name, heads in (("attn_q", 4), ("attn_k", 2)):
        stored = file.tensors[f"blk.0.{name}.weight"][2]
        weight = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.F32).copy()).view(-1, 96)
        rows = (x @ weight.T).view(1, 5, heads, 6, 2)
        angle = positions[0, :, None, None] * frequencies
        a, b = rows[..., 0], rows[..., 1]
        pairs = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
        turned.append(torch.stack(pairs, -1).flatten(-2).transpose(1, 2))
    ours = q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    theirs = turned[0] @ turned[1].repeat_interleave(2, 1).transpose(-1, -2)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_ropes(write):
    fields = write(dataclasses.replace(CONFIG, rope=RopeConfig(5e5, "linear", 4.0)))[1].fields
    assert (fields["eagle3.rope.scaling.type"], fields["eagle3.rope.scaling.factor"]) == ("linear", 4.0)
    fields = write(dataclasses.replace(CONFIG, rope=RopeConfig(5e5, "yarn", 4.0, 64)))[1].fields
    assert (fields["eagle3.rope.scaling.type"], fields["eagle3.rope.scaling.factor"]) == ("yarn", 4.0)
    assert fields["eagle3.rope.scaling.original_context_length"] == 64
    rope = RopeConfig(5e5, **LLAMA3)
    _, file = write(dataclasses.replace(CONFIG, rope=rope))
    factors = torch.from_numpy(file.tensors["rope_freqs.weight"][2].copy()).view(torch.float32).flatten()
    assert not [key for key in file.fields if "rope.scaling" in key]
    plain = Rotary(RopeConfig(5e5), 12, 512).inv_freq
    torch.testing.assert_close(plain / factors, Rotary(rope, 12, 512).inv_freq)
    assert factors.min() == 1.0
    assert factors.max() == 8.0


def test_switches_and_sizes_that_it_has_room_for(write):
    fields = write(dataclasses.replace(CONFIG, norm_before_residual=True))[1].fields
    assert fields["eagle3.norm_before_residual"] is True
    _, file = write(dataclasses.replace(CONFIG, norm_before_fc=True))
    assert file.fields["eagle3.norm_before_fc"] is True
    assert file.tensors["enc.output_norm.weight"][1] == (144,)
    _, file = write(dataclasses.replace(CONFIG, hidden_size=32, own_embedding=True, capture_after=(0, 2, 5)))
    assert file.tensors["token_embd.weight"][1] == (64, 32)
    assert file.tensors["fc.weight"][1] == (32, 144)
    assert (file.fields["eagle3.embedding_length"], file.fields["eagle3.target_hidden_size"]) == (32, 48)
    assert file.fields["eagle3.target_layers"] == [1, 3, 6]
    _, file = write(dataclasses.replace(CONFIG, draft_vocab_size=64), ids=torch.arange(64))
    assert "d2t" not in file.tensors


def test_bad_input_is_named_and_nothing_is_written(tmp_path, target_file):
    def convert(config=CONFIG, tokenizer=target_file, dtype=torch.bfloat16):
        tensors = {name: t.to(dtype) for name, t in head(config).state_dict().items()}
        with disk.atomic_file(tmp_path / "head.gguf") as scratch:
            draft_gguf.write_gguf(scratch, config, tensors, IDS, tokenizer)

    with pytest.raises(UserError, match="64 tokens, and the draft is for 65"):
        convert(dataclasses.replace(CONFIG, vocab_size=65))
    with pytest.raises(UserError, match=r"norm\.weight, lm_head\.weight: a GGUF holds"):
        convert(dtype=torch.float64)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(50))
    with pytest.raises(UserError, match=r"broken\.gguf cannot be read"):
        convert(tokenizer=tmp_path / "broken.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken.gguf", "target.gguf"]
