"""The compiled kernel: equal to PyTorch within rounding, and to itself bit for bit, whatever else is in the pass."""

import ctypes
import dataclasses
import math
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from aquiline.config import QUANTIZE, AquilineWarning, SamplingConfig, TreeConfig
from aquiline.decode.drafter import EagleDrafter
from aquiline.decode.engine import Engine, Limits, Request
from aquiline.decode.sampling import arrivals, race, seed_key, warp
from aquiline.decode.tree import Tree, flatten
from aquiline.model import backend, machine
from aquiline.model.backend import Weights
from aquiline.model.quantised import Quantised
from tests.conftest import tiny_draft, tiny_target

needs_kernel = pytest.mark.skipif(backend.library() is None, reason="the kernel cannot be built here")
SHAPES = {
    "grouped": {},
    "odd": {"hidden_size": 40, "intermediate_size": 50, "num_heads": 5, "num_kv_heads": 5, "head_dim": 6},
    "wide": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "hidden_size": 96},
    "heads of 80": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 80, "hidden_size": 56},
    "one kv head": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 32},
    "biases and head norms": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True, "head_dim": 16},
}
DTYPES = [torch.float32, torch.bfloat16]
WAYS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]  # dtype, matrix tiles


@pytest.fixture
def tiles(request, monkeypatch):
    """Whether the matrix units are used, where there are any."""
    if request.param and not backend._tiles():
        pytest.skip("this CPU has no matrix tiles")
    monkeypatch.setattr(backend, "_tiles", lambda: request.param)
    return request.param


def prompt(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (1, n), generator=torch.Generator().manual_seed(seed))


@needs_kernel
@pytest.mark.parametrize(("dtype", "tiles"), WAYS, indirect=["tiles"])
@pytest.mark.parametrize(("out", "inp", "rows"), [(16, 32, 1), (50, 40, 3), (33, 7, 40), (7, 100, 70)])
def test_a_projection_is_the_matrix_product(dtype, tiles, out, inp, rows):
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(n, inp, generator=generator).to(dtype) for n in (out, 5)]
    bias = torch.randn(out, generator=generator).to(dtype)
    x = torch.randn(rows, inp, generator=generator).to(dtype)
    got = Weights.stacked(parts, [bias, None])(x)
    want = F.linear(x.double(), torch.cat(parts).double(), torch.cat((bias, bias.new_zeros(5))).double())
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), want, atol=1e-4)  # float32 sums, also of bf16 products
    weights = Weights.stacked(parts, [bias, None])
    assert torch.equal(weights.argmax(x[None]), got.argmax(-1)[None])
    for count in (1, 4, 7):
        log_probs, ids = weights.top(x[None], count)
        assert log_probs.shape == ids.shape == (1, rows, count)
        want = torch.log_softmax(got, -1).topk(count)
        assert torch.allclose(log_probs[0], want.values, atol=2e-5)
        assert torch.equal(got.gather(1, ids[0]), got.topk(count).values)
    twice = Weights.stacked([parts[0], parts[0]])  # of equals the first
    assert torch.equal(twice.argmax(x), twice(x)[:, :out].argmax(-1))


@needs_kernel
def test_the_most_likely_of_outputs_that_are_no_numbers():
    weights = Weights.stacked([torch.eye(40)])
    x = torch.zeros(5, 40)
    x[0, 3] = torch.nan
    x[1, 3] = torch.inf
    x[2, :] = -torch.inf
    x[2, 3] = 1.0
    x[3, 39] = 200.0
    log_probs, ids = Weights.stacked([torch.eye(40)]).top(x[3:], 2)  # of equals the first
    assert ids.tolist() == [[39, 0], [0, 1]]
    assert torch.allclose(log_probs, torch.log_softmax(x[3:], -1).topk(2).values)
    assert weights.top(x[:3], 2)[0].isnan().all()  # 0 times infinity is no number


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tiles"), WAYS, indirect=["tiles"])
def test_a_pass_is_that_of_pytorch(shape, dtype, tiles):
    plain, packed = (tiny_target(**SHAPES[shape]).to(dtype) for _ in range(2))
    exact = tiny_target(**SHAPES[shape]).to(dtype).float()  # the same weights, computed in float32
    assert packed.pack()._decoder is not None
    ids, tree = prompt(21), Tree.from_tokens([5, 9, 7, 3, 8], [-1, -1, 0, 1, 3])
    flat = flatten([tree], [11], [21])
    logits = {}
    for name, model in (("plain", plain), ("packed", packed), ("exact", exact)):
        cache = model.new_cache(1, 40)
        for a, b in ((0, 17), (17, 21)):
            out = model(ids[:, a:b], torch.arange(a, b)[None], None, cache, [0])
            cache.keep(0, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
        out = model(flat.ids_BN, flat.positions_BN, flat.mask_BNN, cache, [0])
        assert out.last_BND.dtype == out.aux_BNA.dtype == out.keys_LBGNE.dtype == model.dtype
        logits[name] = torch.cat((model.logits(out.last_BND), out.aux_BNA.float(), out.last_BND.float()), -1)
    error = {name: (logits[name] - logits["exact"]).abs().max() for name in ("plain", "packed")}
    if dtype == torch.float32:
        assert error["packed"] < 2e-4
    else:  # rounds less often than PyTorch does
        assert 0 < error["packed"] <= 1.5 * error["plain"]


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tiles"), WAYS, indirect=["tiles"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_tokens_numbers_do_not_depend_on_what_else_is_in_the_pass(shape, dtype, tiles, threads):
    """Three rows of other lengths, each with its own tree, against every path of every tree run alone step by step."""
    target = tiny_target(**SHAPES[shape]).to(dtype).pack()
    trees = [
        Tree.from_tokens(list(range(1, 40)), [-1, *range(38)]),
        Tree.from_tokens([5, 9, 7, 3, 8], [-1, -1, 0, 1, 3]),
        Tree.empty(),
    ]
    lengths = [3, 33, 18]
    prompts = [prompt(n, n) for n in lengths]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cache = target.new_cache(3, 80)
        for slot, ids in enumerate(prompts):
            out = target(ids[:, :-1], torch.arange(lengths[slot] - 1)[None], None, cache, [slot])
            cache.keep(slot, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
        flat = flatten(trees, [int(ids[0, -1]) for ids in prompts], [n - 1 for n in lengths])
        passes = [
            target(flat.ids_BN, flat.positions_BN, flat.mask_BNN, cache, [0, 1, 2], counts=counts)
            for counts in (None, flat.counts)  # with what is padding, and without
        ]
        all_logits = [target.logits(together.last_BND) for together in passes]
        torch.set_num_threads(1)
        for b, tree in enumerate(trees):
            for node in range(-1, len(tree)):
                path, at = [], node
                while at >= 0:
                    path.insert(0, at)
                    at = tree.parents[at]
                alone = target.new_cache(1, 80)
                tokens = prompts[b][0].tolist() + [tree.tokens[i] for i in path]
                for position, token in enumerate(tokens):
                    step = target(torch.tensor([[token]]), torch.tensor([[position]]), None, alone, [0])
                    alone.keep(0, step.keys_LBGNE[:, 0], step.values_LBGNE[:, 0])
                for together, logits_BNV in zip(passes, all_logits, strict=True):
                    assert torch.equal(target.logits(step.last_BND)[0, 0], logits_BNV[b, 1 + node])
                    assert torch.equal(step.aux_BNA[0, 0], together.aux_BNA[b, 1 + node])
                    assert torch.equal(step.keys_LBGNE[:, 0, :, 0], together.keys_LBGNE[:, b, :, 1 + node])
                    assert torch.equal(step.values_LBGNE[:, 0, :, 0], together.values_LBGNE[:, b, :, 1 + node])
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize(
    "switches", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True, "norm_before_residual": True}]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draft_pass_is_that_of_pytorch(switches, dtype):
    target = tiny_target().to(dtype)
    plain, packed = (tiny_draft(target, **switches).to(dtype) for _ in range(2))
    assert packed.pack()._decoder is not None
    generator = torch.Generator().manual_seed(0)
    states, ids = torch.randn(1, 6, 96, generator=generator).to(dtype), prompt(6)
    results = []
    for draft in (plain, packed):
        cache = draft.new_cache(1, 16)
        out = draft(draft.embed(ids, target.embed), draft.fuse(states), torch.arange(6)[None], None, cache, [0])
        cache.keep(0, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
        earlier, feature = None, out.feature_BNH[:, -1:].expand(1, 2, -1)
        for depth in (1, 2):  # two nodes a level: the second level's see their parent and themselves
            eye = torch.eye(2, dtype=torch.bool)[None]
            mask = eye if depth == 1 else torch.cat((eye, eye), -1)
            positions = torch.full((1, 2), 5 + depth)
            out = draft(draft.embed(ids[:, :2], target.embed), feature, positions, mask, cache, [0], earlier)
            earlier, feature = (out.keys_LBGNE, out.values_LBGNE), out.feature_BNH
        results.append(torch.cat((draft.logits(out.hidden_BNH), out.feature_BNH.float()), -1))
    # In bf16 the two round at other places.
    assert torch.allclose(*results, atol=1e-4 if dtype == torch.float32 else 0.15)
    assert not torch.allclose(results[0], torch.zeros(()), atol=0.5)


def texts_in_all_ways(target, draft, prompts, sampling):
    """Plain, with a tree, and with another in a batch."""
    texts = []
    for tree, batch in ((None, 1), (TreeConfig(3, 4, 9), 1), (TreeConfig(6, 2, 12), 3)):
        requests = [Request(ids, sampling, Limits(40), tree) for ids in prompts]
        engine = Engine(target, None if tree is None else draft, max_batch=batch)
        texts.append([r.output_ids for r in engine.run(requests)])
    return texts


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_speculative_text_is_the_plain_text_in_bf16_too(dtype):
    target = tiny_target().to(dtype)
    draft = tiny_draft(target).to(dtype).pack()
    target.pack()
    prompts = [prompt(n, n)[0].tolist() for n in (3, 9, 30)]
    sampled = SamplingConfig(temperature=1.0, seed=4)
    for sampling in (SamplingConfig(), sampled):
        texts = texts_in_all_ways(target, draft, prompts, sampling)
        assert texts[0] == texts[1] == texts[2]


@needs_kernel
def test_a_cache_that_grew_slots_out_of_order_and_a_shared_mask():
    target = tiny_target(max_positions=4096).to(torch.bfloat16).pack()
    prompts = [prompt(n, n) for n in (1030, 5, 700)]  # over the first capacity of a row, and over a prefill chunk
    cache = target.new_cache(3, 4096)
    for slot, ids in enumerate(prompts):
        for a in range(0, ids.shape[1], 512):
            chunk = ids[:, a : a + 512]
            out = target(chunk, torch.arange(a, a + chunk.shape[1])[None], None, cache, [slot])
            cache.keep(slot, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
    assert cache.keys_LGSE.shape[2] > 1024
    mask = torch.tensor([[[True, False, False], [True, True, False], [True, False, True]]])
    slots = [2, 0]
    ids, positions = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[700, 701, 701], [1030, 1031, 1031]])
    together = target(ids, positions, mask, cache, slots)
    for b, slot in enumerate(slots):
        for path in ([0], [0, 1], [0, 2]):
            alone = target.new_cache(1, 4096)
            known = prompts[slot][0].tolist() + [int(ids[b, i]) for i in path]
            for a in range(0, len(known), 300):  # other chunks
                chunk = torch.tensor([known[a : a + 300]])
                out = target(chunk, torch.arange(a, a + chunk.shape[1])[None], None, alone, [0])
                alone.keep(0, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
            assert torch.equal(out.last_BND[0, -1], together.last_BND[b, path[-1]])


@needs_kernel
def test_a_token_that_sees_nothing_is_no_crash_and_a_nan_stays_one():
    target = tiny_target().pack()
    mask = torch.tensor([[[True, False], [False, False]]])
    out = target(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), mask)
    assert bool(out.last_BND.isfinite().all())
    alone = target(torch.tensor([[1]]), torch.tensor([[0]]))
    assert torch.equal(out.last_BND[:, 0], alone.last_BND[:, 0])
    broken = tiny_target()
    broken.model.embed_tokens.weight[3, 5] = torch.nan
    last = broken.pack()(torch.tensor([[3, 4]]), torch.tensor([[0, 1]])).last_BND
    assert bool(last[0, 0].isnan().all())


@needs_kernel
def test_gates_and_scores_far_from_zero_are_those_of_pytorch():
    models = [tiny_target(), tiny_target()]
    for model in models:
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight *= 60  # the exponential saturates both ways
            layer.self_attn.q_proj.weight *= 60
    models[1].pack()
    want, got = (m(prompt(20), torch.arange(20)[None]).last_BND for m in models)
    assert torch.allclose(got, want, atol=2e-3)


@pytest.fixture(
    scope="module",
    params=[["-O1", "-march=native"], ["-O3", "-march=haswell"], ["-O2", "-march=x86-64-v4"]],
    ids=lambda flags: "".join(flags),
)
def other_build(request, tmp_path_factory):
    """The kernel compiled as for another CPU, or with less optimisation."""
    if "-march=x86-64-v4" in request.param and "avx512f" not in machine.cpu_flags():
        pytest.skip("this CPU has no AVX-512")
    kept = [flag for flag in backend._FLAGS if not flag.startswith(("-O", "-march="))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend, "_FLAGS", kept + request.param)
        return backend._opened(backend._compile(["g++"], backend._openmp(), tmp_path_factory.mktemp("build")))


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_builds_for_other_cpus_agree(other_build, dtype, monkeypatch):
    ids, positions = prompt(20), torch.arange(20)[None]
    want = tiny_target().to(dtype).pack()(ids, positions)
    tiles = bool(other_build.aq_request_tiles()) and backend.fast_bf16("cpu")
    monkeypatch.setattr(backend, "library", lambda: other_build)
    monkeypatch.setattr(backend, "_tiles", lambda: tiles)
    got = tiny_target().to(dtype).pack()(ids, positions)
    tolerance = 1e-4 if dtype == torch.float32 else 0.06  # other sums, rounded to bf16 at the same places
    for name in ("last_BND", "aux_BNA", "keys_LBGNE"):
        one, other = getattr(got, name).float(), getattr(want, name).float()
        assert float((one - other).norm() / other.norm()) < tolerance


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", [16, 33, 100])  # blocks of 16: one, three, seven
def test_a_row_is_the_same_however_many_are_multiplied_with_it_in_every_build(other_build, dtype, out, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weights = Weights.stacked([torch.randn(out, 70, generator=generator).to(dtype)])
    x = torch.randn(40, 70, generator=generator).to(dtype)
    for lib in (backend.library(), other_build):
        with monkeypatch.context() as patched:
            patched.setattr(backend, "library", lambda lib=lib: lib)
            patched.setattr(backend, "_tiles", lambda: False)
            whole = weights(x)
            for rows in range(1, 40):
                assert torch.equal(weights(x[:rows]), whole[:rows]), rows


@needs_kernel
@pytest.mark.parametrize("bits", [8, 4])
def test_products_of_whole_numbers_are_the_same_in_every_build(other_build, bits, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    matrix = Quantised.of(torch.randn(70, 200, generator=generator), bits)
    ends = torch.randint(0, 2, matrix.q_OI.shape, generator=generator) * (255 if bits == 8 else 15)
    extreme = dataclasses.replace(matrix, q_OI=(ends - (128 if bits == 8 else 0)).to(torch.int8))
    x = torch.randn(20, 200, generator=generator)
    x[3] = 1 - 2.0 * (x[3] > 0)  # activations at the ends of their range
    for weights in (Weights.integers(m, None, torch.float32) for m in (matrix, extreme)):
        want = weights(x)
        with monkeypatch.context() as patched:
            patched.setattr(backend, "library", lambda: other_build)
            assert torch.equal(weights(x), want)


@needs_kernel
def test_what_does_not_fit_is_refused_before_an_address_is_read():
    target = tiny_target().pack()
    ids, positions = torch.tensor([[1, 2]]), torch.tensor([[0, 1]])
    assert target.pack() is target  # once is enough
    with pytest.raises(AssertionError, match="packed"):
        target.to(torch.bfloat16)
    other = tiny_target(num_layers=7).new_cache(1, 8)
    half = tiny_target().to(torch.bfloat16).new_cache(1, 8)
    for cache in (other, half):
        with pytest.raises(ValueError, match="a cache of"):
            target(ids, positions, None, cache, [0])
    with pytest.raises(ValueError, match="2 slots for 1 rows"):
        target(ids, positions, None, target.new_cache(2, 8), [0, 1])
    for mask in (torch.ones(1, 2, 3, dtype=torch.bool), torch.ones(1, 2, 2), torch.ones(2, 2, 2, dtype=torch.bool)):
        with pytest.raises(ValueError, match="a mask"):
            target(ids, positions, mask)
    for counts in ([3], [0], [1, 1]):
        with pytest.raises(ValueError, match="of 1 rows of 2 tokens"):
            target(ids, positions, counts=counts)


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """`library` as in a new process, with an empty cache."""
    monkeypatch.setattr(backend, "library", backend.library.__wrapped__)
    monkeypatch.setattr(backend, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.delenv("AQUILINE_KERNEL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return monkeypatch


def script(path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


FAILS = 'test "$1" = --version && exit 0;'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no-such-compiler"),
        (f"{FAILS} echo no such flag >&2; exit 1", "no such flag"),
        (f"{FAILS} printf '\\377' >&2; exit 1", "cannot be used"),
        ("for a; do case $a in *.so) echo junk > $a;; esac; done", "cannot be used"),
    ],
)
def test_where_it_cannot_be_built_pytorch_decodes_and_it_is_said(unbuilt, tmp_path, text, said):
    unbuilt.setenv("CXX", "no-such-compiler --flag" if text is None else script(tmp_path / "cxx", text))
    with pytest.warns(AquilineWarning) as warned:
        assert tiny_target().pack()._decoder is None
    assert any(said in str(w.message) and "AQUILINE_KERNEL=off" in str(w.message) for w in warned)
    assert not list(tmp_path.glob("aquiline/*"))  # nothing half-built stays


def test_switched_off_or_on_another_cpu_there_is_no_kernel_and_no_word(unbuilt, recwarn):
    unbuilt.setenv("AQUILINE_KERNEL", "off")
    assert backend.library() is None
    unbuilt.delenv("AQUILINE_KERNEL")
    unbuilt.setattr(backend, "cpu_flags", frozenset)
    assert backend.library() is None
    assert backend.describe(torch.float32, torch.device("cpu")) == "PyTorch"
    assert not recwarn


grow_in_kernel = EagleDrafter.grow


def both_ways(drafter, rows, configs, worth):
    """Trees grown in the kernel and by the builder; what is kept of the real rows is compared, too."""
    pending, lengths = [row.pending_aux for row in rows], [drafter.cache.lengths[row.slot] for row in rows]
    ours = grow_in_kernel(drafter, rows, configs, worth)
    read = [torch.stack(drafter.cache.read([row.slot])) for row in rows]
    for row, aux, length in zip(rows, pending, lengths, strict=True):
        row.pending_aux = aux
        drafter.cache.truncate(row.slot, length)
    theirs = drafter._grow_here(rows, configs, worth)
    for row, kept in zip(rows, read, strict=True):
        assert torch.equal(torch.stack(drafter.cache.read([row.slot])), kept)
    return ours, theirs


@needs_kernel
@pytest.mark.parametrize(("dtype", "tiles"), WAYS, indirect=["tiles"])
@pytest.mark.parametrize("switches", [{}, {"norm_output": True, "own_embedding": True, "norm_before_residual": True}])
@pytest.mark.parametrize("how", [None, *QUANTIZE])
def test_trees_grown_in_the_kernel_are_those_of_the_builder(dtype, tiles, switches, how, monkeypatch):
    target = tiny_target().to(dtype)
    draft = tiny_draft(target, **switches).to(dtype)
    if how:
        draft.quantise(how)
    engine = Engine(target.pack(), draft.pack(), max_batch=4)
    compared = []

    def compare(drafter, rows, configs, worth=()):
        (ours, seconds), (theirs, others) = both_ways(drafter, rows, configs, worth)
        for one, other in zip(ours, theirs, strict=True):
            for name in ("tokens", "parents", "depths", "scores"):
                assert getattr(one, name) == getattr(other, name), name
            compared.append(len(one))
        assert len(seconds) == len(others) == max(config.depth for config in configs)
        return ours, seconds

    monkeypatch.setattr(EagleDrafter, "grow", compare)
    shapes = ["6:8:60", "1:3:2", "4:1:4", "3:50:9"]  # the last one wider than the draft's vocabulary
    requests = [
        Request(prompt(n, n)[0].tolist(), limits=Limits(12), tree=TreeConfig.parse(shape))
        for n, shape in zip((3, 33, 18, 7), shapes, strict=True)
    ]
    engine.run(requests)
    assert {60, 2, 4, 9} <= set(compared)


@needs_kernel
def test_trees_of_sampled_rows_are_those_of_the_builder(monkeypatch):
    """Within rounding: the kernel needs no more than float for the noise."""
    target = tiny_target()
    engine, compared = Engine(target.pack(), tiny_draft(target).pack(), max_batch=4), 0

    def compare(drafter, rows, configs, worth=()):
        nonlocal compared
        (ours, seconds), (theirs, _) = both_ways(drafter, rows, configs, worth)
        for one, other in zip(ours, theirs, strict=True):
            for name in ("tokens", "parents", "depths"):
                assert getattr(one, name) == getattr(other, name), name
            assert one.scores == pytest.approx(other.scores, abs=2e-4)
            compared += 1
        return ours, seconds

    monkeypatch.setattr(EagleDrafter, "grow", compare)
    requests = [
        Request(prompt(n, n)[0].tolist(), SamplingConfig(temperature=t, seed=n), Limits(20), TreeConfig(4, 5, 20))
        for n, t in ((3, 1.0), (33, 0.0), (18, 0.4), (7, 5.0))
    ]
    engine.run(requests)
    assert compared > 20


def winner_by_pytorch(logits_V, temperature, key, position):
    return race(
        warp(logits_V, SamplingConfig(temperature=temperature)), arrivals(key, position, torch.arange(len(logits_V)))
    )


@needs_kernel
def test_the_winner_of_a_race_is_that_of_pytorch():
    generator = torch.Generator().manual_seed(0)
    temperatures = [1.0, 0.3, 2.0, 1e-6, 100.0, 1e-39, 1e-310]
    for n in range(1400):
        size, temperature, key = [2, 24, 1000, 49_152][n % 4], temperatures[n % 7], seed_key(n)
        logits_V = 3 * torch.randn(size, generator=generator)
        logits_V[torch.rand(size, generator=generator) < 0.1] = -torch.inf
        if (logits_V > -torch.inf).any():
            want = winner_by_pytorch(logits_V, temperature, key, 7 * n)
            assert logits_V[want] > -torch.inf
            assert backend.winner(logits_V, temperature, key, 7 * n) == want
    strided_V = torch.randn(9, 2, generator=generator)[:, 0]
    assert backend.winner(strided_V, 1.0, 3, 4) == backend.winner(strided_V.clone(), 1.0, 3, 4)


@needs_kernel
def test_a_late_arrival_is_known_as_well_as_an_early_one():
    """Of the token 773491 at this key 1 - u is 1e-7, where float has hardly a digit left."""
    logits_V, key = torch.full((773_492,), -torch.inf), seed_key(1)
    early, late = arrivals(key, 0, torch.tensor([773_490, 773_491])).tolist()
    assert late > 16
    for at, winner in ((late - 0.05, 773_490), (late + 0.05, 773_491)):
        logits_V[773_490:] = torch.tensor([math.log(early / at), 0.0])  # that it would arrive at this time
        assert backend.winner(logits_V, 1.0, key, 0) == winner == winner_by_pytorch(logits_V, 1.0, key, 0)


@needs_kernel
def test_levels_that_are_not_worth_it_are_not_run(monkeypatch):
    target = tiny_target()
    engine, reached = Engine(target.pack(), tiny_draft(target).pack(), max_batch=2), Counter()

    def compare(drafter, rows, configs, worth=()):
        if len(configs) == 2:  # one row stops, the other goes on
            (both, seconds), (whole, _) = both_ways(drafter, rows, configs, [[0.0, 2.0, 2.0, 2.0], [0.0] * 4])
            assert max(both[0].depths) == 1
            assert both[1].scores == whole[1].scores
            assert len(seconds) == configs[0].depth
            return both, seconds
        ours, theirs = both_ways(drafter, rows, configs, [[0.0, 0.2, 0.05, 0.015]])
        assert ours[0][0].scores == theirs[0][0].scores
        assert len(ours[1]) == len(theirs[1])
        reached[len(ours[1])] += 1
        return ours

    monkeypatch.setattr(EagleDrafter, "grow", compare)
    tree = TreeConfig(4, 3, 39)
    engine.run([Request(prompt(5)[0].tolist(), limits=Limits(40), tree=tree)])
    assert {1, 2, 3} <= set(reached)
    engine.run([Request(prompt(5, n)[0].tolist(), limits=Limits(9), tree=tree) for n in (1, 2)])


@needs_kernel
def test_nodes_that_are_not_likely_enough_are_not_run(monkeypatch):
    target = tiny_target()
    engine, parents, widths = Engine(target.pack(), tiny_draft(target).pack()), [], []

    def compare(drafter, rows, configs, worth=()):
        (ours, _), (theirs, _) = both_ways(drafter, rows, configs, [[0.06, 0.0, 0.0]])
        for name in ("tokens", "parents", "scores"):
            assert getattr(ours[0], name) == getattr(theirs[0], name)
        of, depths = ours[0].parents, ours[0].depths
        parents.extend(ours[0].scores[p] for p in of if p >= 0)
        widths.append(len({p for p, depth in zip(of, depths, strict=True) if depth == 2}))
        return ours, [0.0]

    monkeypatch.setattr(EagleDrafter, "grow", compare)
    engine.run([Request(prompt(5)[0].tolist(), limits=Limits(20), tree=TreeConfig(3, 4, 60))])
    assert min(parents) >= math.log(0.06)
    assert min(widths) < 4 <= max(widths)


@needs_kernel
def test_a_draft_that_cannot_score_makes_no_node_in_the_kernel():
    target = tiny_target()
    draft = tiny_draft(target)
    with torch.no_grad():
        draft.lm_head.weight[7] = torch.nan
    engine = Engine(target.pack(), draft.pack())
    request = Request(prompt(5)[0].tolist(), limits=Limits(6), tree=TreeConfig(3, 2, 5))
    assert engine.run([request])[0].trees == {(0, 0): 5}


def test_the_kernel_is_compiled_once_and_again_when_its_source_changes_or_the_file_is_damaged(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "kernel.cpp"
    lines = [
        "#include <cstdint>",
        'extern "C" {',
        *(f"int aq_{door}() {{ return 0; }}" for door in ("forward", "linear", "grow", "race")),
        f"void aq_sizes(int64_t* n) {{ {' '.join(f'n[{i}] = {size};' for i, size in enumerate(_sizes()))} }} }}",
    ]
    source.write_text("\n".join(lines))
    monkeypatch.setattr(backend, "_SOURCE", source)
    runs = []
    run = backend._run
    monkeypatch.setattr(backend, "_run", lambda command: runs.append(command) or run(command))
    for change, compiles in (("", 1), ("", 0), ("// other", 1), (None, 1)):
        if change is None:
            for path in (tmp_path / "aquiline").glob("*.so"):
                path.unlink()  # a new file: this process still runs the old one, and would crash at its end
                path.write_bytes(b"damaged")
        else:
            source.write_text(source.read_text() + change)
        runs.clear()
        if compiles:
            with pytest.warns(AquilineWarning, match="once"):
                backend._load(["g++"])
        else:
            backend._load(["g++"])
        assert len(runs) == (3 if compiles else 1)  # the compiler's version is always asked for
    source.write_text(source.read_text().replace("n[2] = ", "n[2] = 1"))
    with pytest.warns(AquilineWarning), pytest.raises(OSError, match="structures"):
        backend._load(["g++"])


def _sizes():
    names = ("_Linear", "_Layer", "_Model", "_Pass", "_Growth")
    return [ctypes.sizeof(getattr(backend, name)) for name in names]


def test_of_several_openmp_runtimes_pytorchs_own_is_taken(monkeypatch, tmp_path):
    home = backend.Path(torch.__file__).parent
    maps = [
        "7f00-7f01 r-xp 00000000 00:01 1   /a b/libgomp-aa.so.1",
        f"7f02-7f03 r-xp 00000000 00:01 2   {home}/lib/libgomp-zz.so.1",
        "7f04-7f05 rw-p 00000000 00:00 0",
    ]
    read = backend.Path.read_text
    monkeypatch.setattr(
        backend.Path,
        "read_text",
        lambda self, *a, **k: "\n".join(maps) if str(self) == "/proc/self/maps" else read(self, *a, **k),
    )
    assert backend._openmp() == home / "lib" / "libgomp-zz.so.1"
    del maps[1]
    assert backend._openmp() == backend.Path("/a b/libgomp-aa.so.1")
