"""Targets of 8 and 4 bits: the arithmetic, the kernel against it, what a GGUF holds, and that drafts change nothing."""

import dataclasses

import gguf
import numpy as np
import pytest
import torch

from aquiline import api
from aquiline.config import QUANTIZE, AquilineWarning, SamplingConfig, UserError
from aquiline.decode.engine import Engine, Limits, Request
from aquiline.files import checkpoint
from aquiline.files.gguf_file import read_gguf, stored_integers
from aquiline.measure.evaluate import model_settings
from aquiline.model import backend
from aquiline.model.backend import Weights
from aquiline.model.quantised import BITS, GROUP, Quantised, QuantisedLinear, rounded
from tests.conftest import tiny_draft, tiny_target
from tests.test_api import make_draft, make_target
from tests.test_backend import DTYPES, SHAPES, needs_kernel, prompt, texts_in_all_ways

pytestmark = pytest.mark.filterwarnings("ignore:the draft's tokens are hardly ever accepted")
SIZES = [(16, 32), (50, 40), (33, 7), (7, 100), (64, 192), (40, 96)]  # outputs, inputs


def matrix(out: int, inp: int, bits: int, seed: int = 0) -> Quantised:
    generator = torch.Generator().manual_seed(seed)
    return Quantised.of(torch.randn(out, inp, generator=generator) * torch.rand(out, 1, generator=generator), bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_are_off_by_half_a_step_at_most(bits):
    weight = torch.randn(20, 70, generator=torch.Generator().manual_seed(0))
    weight[3, :32] = 0  # a group of zeros, and one of equal numbers
    weight[4, :32] = 0.75
    weight[5, 32:64] = 0.004  # no outlier beside it
    made = Quantised.of(weight, bits)
    step = made.scale_OG.float().repeat_interleave(GROUP, 1)[:, :70]
    off = (made.dequantised() - weight).abs()
    assert bool((off <= 0.51 * step + 1e-3 * weight.abs()).all())  # float16 scales
    assert torch.equal(made.dequantised()[3, :32], torch.zeros(32))
    assert float(off[4, :32].max()) < 4e-4
    low, high = (-127, 127) if bits == 8 else (0, 15)
    assert made.q_OI.min() == low
    assert made.q_OI.max() == high
    assert made.bits == bits


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("out", "inp"), SIZES)
def test_the_arithmetic_is_that_of_rounded_activations_and_weights(bits, out, inp):
    w = matrix(out, inp, bits)
    x = torch.randn(3, inp, generator=torch.Generator().manual_seed(1))
    x[1] *= 1000
    a, scale = rounded(x)
    assert a.abs().max() == 127
    exact = (a * scale.repeat_interleave(GROUP, 1))[:, :inp].double()
    assert bool(((exact - x).abs() <= 0.5001 * scale.repeat_interleave(GROUP, 1)[:, :inp]).all())
    bias = torch.randn(out, generator=torch.Generator().manual_seed(2))
    want = exact @ w.dequantised().double().T + bias
    assert torch.allclose(w.linear(x, bias).double(), want, rtol=1e-5, atol=1e-3)
    assert w.linear(x[None]).shape == (1, 3, out)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("out", "inp"), SIZES)
def test_a_projection_in_the_kernel(bits, out, inp, dtype):
    """As in PyTorch, and each row as if it were alone."""
    parts = [matrix(n, inp, bits, n) for n in (out, 5)]
    bias = torch.randn(out, generator=torch.Generator().manual_seed(2))
    weights = Weights.stacked(parts, [bias, None], dtype)
    all_x = torch.randn(70, inp, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([weights(x[None]) for x in all_x])
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 70):
        x = all_x[:rows]
        got = weights(x)
        want = torch.cat((parts[0].linear(x, bias), parts[1].linear(x)), 1)
        assert torch.allclose(got, want, atol=1e-4)
        assert torch.equal(got, alone[:rows])
        assert torch.equal(weights.argmax(x), got.argmax(-1))
    small = parts[0].q_OI.numel() + 5 * parts[0].q_OI.shape[1]
    assert weights.tensor.nbytes >= small * {8: 34, 4: 20}[bits] / 32
    if (out, inp) == (64, 192):  # nothing but 5 rows to be padded
        assert weights.tensor.nbytes == 96 * 192 * {8: 34, 4: 20}[bits] / 32


@needs_kernel
@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_products_and_what_is_no_number(bits):
    """At the ends of their range 16 bits would overflow; q may be -128, as others may write it; NaN and infinity."""
    w = matrix(32, 64, bits)
    ends = torch.tensor([-128, 127] if bits == 8 else [15, 15], dtype=torch.int8)
    w = dataclasses.replace(w, q_OI=ends.repeat(32, 32))
    x = torch.tensor([[-1.0, 1.0], [1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]).repeat(1, 32)
    weights = Weights.integers(w, None, torch.float32)
    assert torch.allclose(weights(x), w.linear(x), rtol=1e-5)
    x = torch.ones(4, 64)
    x[0, 3], x[1, 40], x[2] = torch.nan, torch.inf, 1e-35
    for got in (weights(x), w.linear(x)):
        assert bool(got[:2].isnan().all())
        assert torch.equal(got[2], torch.zeros(32))
        assert bool(got[3].isfinite().all())


@needs_kernel
@pytest.mark.parametrize("how", QUANTIZE)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pass_is_that_of_pytorch(shape, how):
    """Within what comes of a sum that is rounded to the other side; a plain pass is further off."""
    plain, slow, packed = (tiny_target(**SHAPES[shape]) for _ in range(3))
    slow.quantise(how)
    packed.quantise(how).pack()
    assert packed._decoder is not None
    assert all(m.matrix is None for m in packed.modules() if isinstance(m, QuantisedLinear))
    ids, positions = prompt(21), torch.arange(21)[None]
    states = {}
    for name, model in (("plain", plain), ("slow", slow), ("packed", packed)):
        out = model(ids, positions)
        states[name] = torch.cat((out.last_BND, out.aux_BNA, model.logits(out.last_BND)), -1)
    ours, theirs = ((states[name] - states["slow"]).norm() for name in ("packed", "plain"))
    assert ours < 0.3 * theirs
    assert theirs < (0.1 if how == "int8" else 0.7) * states["slow"].norm()


@needs_kernel
@pytest.mark.parametrize("how", QUANTIZE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_numbers_do_not_depend_on_what_else_is_in_the_pass(how, dtype):
    target = tiny_target(hidden_size=96, intermediate_size=80).to(dtype).quantise(how).pack()
    ids = prompt(40)
    together = target(ids, torch.arange(40)[None])
    cache = target.new_cache(1, 40)
    for i in range(40):
        out = target(ids[:, i : i + 1], torch.tensor([[i]]), None, cache, [0])
        cache.keep(0, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
        assert torch.equal(out.last_BND[0, 0], together.last_BND[0, i])
        assert torch.equal(target.logits(out.last_BND)[0, 0], target.logits(together.last_BND)[0, i])


@needs_kernel
@pytest.mark.parametrize("how", QUANTIZE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_speculative_text_is_the_plain_text_alone_and_in_a_batch(how, dtype):
    target = tiny_target().to(dtype)
    draft = tiny_draft(target).to(dtype).pack()
    plain = Engine(tiny_target().to(dtype).pack(), None)
    target.quantise(how).pack()
    prompts = [prompt(n, n)[0].tolist() for n in (3, 9, 30)]
    for sampling in (SamplingConfig(), SamplingConfig(temperature=1.0, seed=4)):
        texts = texts_in_all_ways(target, draft, prompts, sampling)
        assert texts[0] == texts[1] == texts[2]
    unrounded = [r.output_ids for r in plain.run([Request(ids, sampling, Limits(40), None) for ids in prompts])]
    assert unrounded != texts[0]  # another target


@needs_kernel
@pytest.mark.parametrize("how", QUANTIZE)
@pytest.mark.parametrize("width", [32, 40, 72])
def test_a_quantised_drafts_pass_is_that_of_pytorch(how, width):
    """As above; fc and head, which are apart from the layer, too. A width that ends within a group of 32: the feature
    that stood behind it has no part in what the MLP reads.
    """
    target = tiny_target(hidden_size=width)
    models = {name: tiny_draft(target, attention_bias=True, qk_norm=True) for name in ("plain", "slow", "packed")}
    models["slow"].quantise(how)
    models["packed"].quantise(how).pack()
    ids, positions = prompt(21), torch.arange(21)[None]
    aux = target(ids, positions).aux_BNA
    states = {}
    for name, draft in models.items():
        out = draft(draft.embed(ids, target.embed), draft.fuse(aux), positions)
        states[name] = torch.cat((out.feature_BNH, out.hidden_BNH, draft.logits(out.hidden_BNH)), -1)
    ours, theirs = ((states[name] - states["slow"]).norm() for name in ("packed", "plain"))
    assert ours < 0.3 * theirs
    assert 0 < theirs < (0.1 if how == "int8" else 0.7) * states["slow"].norm()
    with pytest.raises(AssertionError, match="quantised"):
        models["slow"].to(torch.bfloat16)


KINDS = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1])
def test_a_gguf_of_these_is_kept_bit_for_bit(kind, tmp_path):
    values = np.random.default_rng(0).standard_normal((6, 96)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    stored = gguf.quantize(values, kind)
    writer.add_tensor("w", stored, raw_dtype=kind)
    writer.add_tensor("f", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    kept = stored_integers(*tensors["w"])
    assert kept.bits == (8 if kind == KINDS.Q8_0 else 4)
    assert torch.allclose(kept.dequantised(), torch.from_numpy(gguf.dequantize(stored, kind)), rtol=1e-6, atol=1e-7)
    assert stored_integers(*tensors["f"]) is None


def test_what_is_stored_is_kept_where_it_has_as_many_bits():
    target = tiny_target(hidden_size=64)
    other = {name: matrix(*target.get_parameter(name).shape, bits, 7) for name, bits in (
        ("model.layers.0.self_attn.q_proj.weight", 4), ("model.layers.1.mlp.up_proj.weight", 8), ("lm_head.weight", 8),
    )}  # fmt: skip
    target.quantise("int4", other)
    q, up = target.model.layers[0].self_attn.q_proj, target.model.layers[1].mlp.up_proj
    assert torch.equal(q.matrix.q_OI, other["model.layers.0.self_attn.q_proj.weight"].q_OI)
    assert up.matrix.bits == BITS["int4"] == 4
    assert torch.equal(target._quantised_head.q_OI, other["lm_head.weight"].q_OI)
    with pytest.raises(AssertionError, match="quantised"):
        target.to(torch.bfloat16)
    with pytest.raises(AssertionError, match="state dict"):
        checkpoint.target_fingerprint(target)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make_draft(root / "draft", make_target(root / "target"))
    return root


@needs_kernel
@pytest.mark.parametrize("how", QUANTIZE)
def test_loaded_from_a_folder_with_a_draft_for_the_unquantised(folders, how, recwarn):
    model = api.load(folders / "target", folders / "draft", dtype="float32", device="cpu", quantize=how)
    assert not [w for w in recwarn if "weights" in str(w.message)]  # the draft is still one for these weights
    assert model.target.quantised == how
    assert model.target.decoding.endswith(f", {how}")
    unquantised = api.load(folders / "target", folders / "draft", dtype="float32", device="cpu")
    assert model.fingerprint == unquantised.fingerprint
    assert unquantised.target.quantised is None
    result = model.generate("Tell me.", max_new_tokens=30, tree="3:4:9")
    assert result.cycles > 0
    assert result.token_ids == model.generate("Tell me.", max_new_tokens=30, plain=True).token_ids
    sizes = [
        sum(w.tensor.nbytes for x in m.target._decoder._kept[0] for w in (x.qkv, x.o, x.gate_up, x.down))
        for m in (model, unquantised)
    ]
    assert sizes[0] < {"int8": 0.5, "int4": 0.3}[how] * sizes[1]  # inputs of 32 and 48 are padded to 64


@needs_kernel
@pytest.mark.parametrize(
    ("dtype", "asked", "expected"),
    [
        ("bfloat16", {}, "int8" if backend.eight_bits_pay(torch.bfloat16, torch.device("cpu")) else None),
        ("float32", {}, None),
        ("bfloat16", {"quantize_draft": "none"}, None),
        ("bfloat16", {"quantize": "int4", "quantize_draft": "int8"}, "int8"),
        ("float32", {"quantize_draft": "int4"}, "int4"),
    ],
)
def test_the_heads_weights_are_of_8_bits_where_that_is_faster_and_the_text_stays(folders, dtype, asked, expected):
    model = api.load(folders / "target", folders / "draft", dtype=dtype, device="cpu", **asked)
    assert model.quantised_draft == expected
    assert model_settings(model, {})["quantize_draft"] == expected
    assert model.draft._head.struct.bits == {"int8": 8, "int4": 8, None: 0}[expected]
    assert model.draft._fc.struct.bits == {"int8": 8, "int4": 4, None: 0}[expected]
    result = model.generate("Tell me.", max_new_tokens=30, tree="3:4:9")
    assert result.cycles > 0
    assert result.token_ids == model.generate("Tell me.", max_new_tokens=30, plain=True).token_ids


def test_eight_bits_pay_where_there_are_dot_products_of_them_and_no_tiles(monkeypatch):
    def pay(flags, dtype=torch.bfloat16, tiles=False, usable=True):
        monkeypatch.setattr(backend, "cpu_flags", lambda: frozenset(flags))
        monkeypatch.setattr(backend, "_tiles", lambda: tiles)
        monkeypatch.setattr(backend, "usable", lambda dtype, device: usable)
        return backend.eight_bits_pay(dtype, torch.device("cpu"))

    vnni = {"avx2", "avx512_vnni"}
    assert pay(vnni)
    assert not pay({"avx2"})
    assert not pay(vnni, torch.float32)
    assert not pay(vnni, tiles=True)
    assert not pay(vnni, usable=False)


def test_what_passes_cost_is_another_thing_with_a_quantised_head():
    target = tiny_target()
    plain, rounded_ = (Engine(target, draft) for draft in (tiny_draft(target), tiny_draft(target).quantise("int8")))
    assert plain._what_costs_depend_on(plain.drafter) != rounded_._what_costs_depend_on(rounded_.drafter)


def test_without_the_kernel_the_head_stays_as_it_is_unless_asked(folders, monkeypatch):
    monkeypatch.setattr(backend, "library", lambda: None)
    model = api.load(folders / "target", folders / "draft", dtype="bfloat16", device="cpu")
    assert model.quantised_draft is None
    with pytest.warns(AquilineWarning, match="--quantize-draft int8 is fast in the CPU kernel"):
        model = api.load(folders / "target", folders / "draft", dtype="float32", device="cpu", quantize_draft="int8")
    result = model.generate("Tell me.", max_new_tokens=12, tree="2:2:4")
    assert result.token_ids == model.generate("Tell me.", max_new_tokens=12, plain=True).token_ids


def test_another_weights_draft_still_says_so(folders, tmp_path):
    make_target(tmp_path / "other", seed=5)
    with pytest.warns(AquilineWarning, match="other weights"):
        api.load(tmp_path / "other", folders / "draft", dtype="float32", device="cpu", quantize="int8")


def test_without_the_kernel_pytorch_computes_it_and_it_is_said(folders, monkeypatch):
    monkeypatch.setattr(backend, "library", lambda: None)
    with pytest.warns(AquilineWarning, match="slower than without"):
        model = api.load(folders / "target", folders / "draft", dtype="float32", device="cpu", quantize="int4")
    assert model.target.decoding == "PyTorch, int4"
    result = model.generate("Tell me.", max_new_tokens=12, tree="2:2:4")
    assert result.token_ids == model.generate("Tell me.", max_new_tokens=12, plain=True).token_ids


@pytest.mark.filterwarnings("ignore:--quantize int8 is fast in the CPU kernel")
def test_exact_passes_of_pytorch_take_the_quantised_head_too(folders, monkeypatch):
    monkeypatch.setattr(backend, "library", lambda: None)
    loaded = {"dtype": "float32", "device": "cpu", "quantize": "int8"}
    model, other = (api.load(folders / "target", "none", **loaded, exact=exact) for exact in (True, False))
    assert model.target.decoding.startswith("PyTorch, ")
    assert model.target.decoding.endswith(" at a time, int8")
    last = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.target.logits(last), other.target.logits(last))


def test_what_cannot_be_quantised_is_refused(folders, monkeypatch):
    with pytest.raises(UserError, match=r"'q8' is not supported; expected int8 .* or int4"):
        api.load(folders / "target", "none", quantize="q8")
    with pytest.raises(UserError, match=r"quantize_draft 'bf16' is not supported; expected auto, none, int8"):
        api.load(folders / "target", folders / "draft", quantize_draft="bf16")
    for draft in ("none", "ngram"):
        with pytest.raises(
            UserError, match=f"--quantize-draft int8 is of a head's weights, and draft {draft} has none"
        ):
            api.load(folders / "target", draft, quantize_draft="int8")
    config = dataclasses.replace(tiny_target().config, structure="x", family="gemma3_text")
    monkeypatch.setattr(checkpoint, "read_target_config", lambda spec: config)
    with pytest.raises(UserError, match=r"--quantize int8 .* a gemma3_text target .*: leave it out; a folder"):
        api.load(folders / "target", "none", quantize="int8")
    with pytest.raises(UserError, match=r"--exact .* a gemma3_text target .*: leave it out; in float32"):
        api.load(folders / "target", "none", exact=True)
