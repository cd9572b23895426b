"""The compiled kernel: equal to PyTorch within rounding, and to itself bit for bit, whatever else is in the pass."""

import subprocess

import pytest
import torch
from torch.nn import functional as F

from aquiline.config import AquilineWarning, SamplingConfig, TreeConfig
from aquiline.decode.engine import Engine, Limits, Request
from aquiline.decode.tree import Tree, flatten
from aquiline.model import backend
from aquiline.model.backend import Weights
from tests.conftest import tiny_draft, tiny_target

needs_kernel = pytest.mark.skipif(backend.library() is None, reason="the kernel cannot be built here")
SHAPES = {
    "grouped": {},
    "odd": {"hidden_size": 40, "intermediate_size": 50, "num_heads": 5, "num_kv_heads": 5, "head_dim": 6},
    "wide": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "hidden_size": 96},
    "one kv head": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 32},
    "biases and head norms": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True, "head_dim": 16},
}
DTYPES = [torch.float32, torch.bfloat16]
WAYS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]  # dtype, matrix tiles


@pytest.fixture
def tiles(request, monkeypatch):
    """Whether the matrix units are used, where there are any."""
    if request.param and not backend._amx():
        pytest.skip("this CPU has no matrix tiles")
    monkeypatch.setattr(backend, "_amx", lambda: request.param)
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
        together = target(flat.ids_BN, flat.positions_BN, flat.mask_BNN, cache, [0, 1, 2])
        all_logits = target.logits(together.last_BND)
        torch.set_num_threads(1)
        for b, tree in enumerate(trees):
            for node in range(-1, len(tree)):
                path, at = [], node
                while at >= 0:
                    path.insert(0, at)
                    at = int(tree.parents_N[at])
                alone = target.new_cache(1, 80)
                tokens = prompts[b][0].tolist() + [int(tree.tokens_N[i]) for i in path]
                for position, token in enumerate(tokens):
                    step = target(torch.tensor([[token]]), torch.tensor([[position]]), None, alone, [0])
                    alone.keep(0, step.keys_LBGNE[:, 0], step.values_LBGNE[:, 0])
                assert torch.equal(target.logits(step.last_BND)[0, 0], all_logits[b, 1 + node])
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


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_speculative_text_is_the_plain_text_in_bf16_too(dtype):
    target = tiny_target().to(dtype)
    draft = tiny_draft(target).to(dtype).pack()
    target.pack()
    prompts = [prompt(n, n)[0].tolist() for n in (3, 9, 30)]
    sampled = SamplingConfig(temperature=1.0, seed=4)
    for sampling in (SamplingConfig(), sampled):
        texts = []
        for tree, batch in ((None, 1), (TreeConfig(3, 4, 9), 1), (TreeConfig(6, 2, 12), 3)):
            requests = [Request(ids, sampling, Limits(40), tree) for ids in prompts]
            engine = Engine(target, None if tree is None else draft, max_batch=batch)
            texts.append([r.output_ids for r in engine.run(requests)])
        assert texts[0] == texts[1] == texts[2]


def test_without_a_compiler_pytorch_decodes_and_it_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "library", backend.library.__wrapped__)
    monkeypatch.setattr(backend, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.delenv("AQUILINE_KERNEL", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(backend.shutil, "which", lambda _: None)
    with pytest.warns(AquilineWarning, match=r"no C\+\+ compiler"):
        assert tiny_target().pack()._decoder is None
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\ntest "$1" = --version && echo 1 && exit 0\necho no such flag >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.warns(AquilineWarning) as said:
        assert backend.library() is None
    assert any("no such flag" in str(w.message) for w in said)
    assert not list(tmp_path.glob("aquiline/*"))  # nothing half-built stays
    monkeypatch.setenv("AQUILINE_KERNEL", "off")
    assert backend.library() is None


@needs_kernel
def test_the_kernel_is_compiled_once_and_again_when_its_source_changes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "kernel.cpp"
    source.write_text("int one;")
    monkeypatch.setattr(backend, "_SOURCE", source)
    runs = []
    run = subprocess.run
    monkeypatch.setattr(backend.subprocess, "run", lambda c, **k: runs.append(c) or run(c, **k))
    with pytest.warns(AquilineWarning, match="once"):
        first = backend._built("g++")
    compiled = len(runs)
    assert backend._built("g++") == first
    assert len(runs) == compiled + 1  # only the compiler's version was asked for
    source.write_text("int two;")
    with pytest.warns(AquilineWarning, match="once"):
        assert backend._built("g++") != first
