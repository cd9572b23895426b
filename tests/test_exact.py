"""`--exact` on the PyTorch path: a token's numbers are the same bits in a prompt, alone, in a tree and in a batch."""

import pytest
import torch

from aquiline.config import SamplingConfig, TreeConfig, UserError
from aquiline.decode.engine import Engine, Limits, Request
from aquiline.decode.tree import Tree, flatten
from aquiline.model import backend, exact
from tests.conftest import tiny_draft, tiny_target

SHAPES = {
    "grouped": {},
    "odd": {"hidden_size": 40, "intermediate_size": 51, "num_heads": 5, "num_kv_heads": 5, "head_dim": 6},
    "biases and head norms": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True, "head_dim": 16},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHAIN = Tree.from_tokens(list(range(1, 40)), [-1, *range(38)])
TREE = Tree.from_tokens([5, 9, 7, 3, 8], [-1, -1, 0, 1, 3])


def model(dtype: torch.dtype, **changes):
    return tiny_target(capture_after=(0, 1, 2), num_layers=3, **changes).to(dtype)


def exact_target(dtype: torch.dtype, **changes):
    target = model(dtype, **changes)
    target.make_exact()
    return target


def prompt(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(target, tokens: list[int], sizes: list[int], cache=None, slot: int = 0):
    """A text in passes of these sizes, the last one repeated; logits, aux, keys and values of all its tokens."""
    cache = cache or target.new_cache(1, 512)
    parts, at = [], 0
    while at < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        ids = torch.tensor([tokens[at : at + size]])
        out = target(ids, torch.arange(at, at + ids.shape[1])[None], None, cache, [slot])
        cache.keep(slot, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
        parts.append(numbers(target, out))
        at += size
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def numbers(target, out, b: int = 0, at: slice = slice(None)):
    keys, values = (x[:, b, :, at].transpose(0, 2) for x in (out.keys_LBGNE, out.values_LBGNE))
    return [target.logits(out.last_BND[b, at]), out.aux_BNA[b, at], keys, values]


def all_equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_has_the_same_numbers_however_it_is_cut_into_passes(shape, dtype):
    target = exact_target(dtype, **SHAPES[shape])
    tokens = prompt(2 * exact.CHUNK + 5)
    want = run(target, tokens, [len(tokens)])
    for sizes in ([exact.CHUNK - 2, 1, 1, 1, 1, 2, 100, 1], [1, 1, exact.ROWS + 1, 5, 70]):
        assert all_equal(run(target, tokens, sizes), want)
    plain = model(dtype, **SHAPES[shape])
    once = run(plain, tokens, [len(tokens)])
    assert not all_equal(run(plain, tokens, [5]), once)  # or equality would mean nothing
    close = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.03}[dtype]
    assert torch.allclose(want[0], once[0], atol=close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nodes_of_a_batch_of_trees_have_the_numbers_of_their_paths(dtype):
    target = exact_target(dtype)
    trees = [CHAIN, TREE, Tree.empty()]
    prompts = [prompt(n, n) for n in (3, 2 * exact.CHUNK - 3, exact.CHUNK + 9)]
    cache = target.new_cache(3, 512)
    for slot in (1, 2, 0):  # rows do not lie in the order of their slots
        run(target, prompts[slot][:-1], [100], cache, slot)
    flat = flatten(trees, [ids[-1] for ids in prompts], [len(ids) - 1 for ids in prompts])
    for order in ([0, 1, 2], [2, 1, 0], [1]):
        tokens, positions, mask = (x[order] for x in (flat.ids_BN, flat.positions_BN, flat.mask_BNN))
        out = target(tokens, positions, mask, cache, order)
        for b, row in enumerate(order):
            for node in (-1, 0, *range(1, len(trees[row]), 3)):
                if node >= len(trees[row]):
                    continue
                path, at = [], node
                while at >= 0:
                    path.insert(0, trees[row].tokens[at])
                    at = trees[row].parents[at]
                text = prompts[row] + path
                want = [x[-1:] for x in run(target, text, [len(text) - 1, 1])]
                assert all_equal(numbers(target, out, b, slice(1 + node, 2 + node)), want)


def texts(target, draft, sampling: SamplingConfig) -> list[list[list[int]]]:
    """Of plain and of speculative decoding, alone and in batches."""
    found = []
    for tree, batch in (("", 1), ("", 3), ("3:4:9", 1), ("6:2:12", 2)):
        engine = Engine(target, draft if tree else None, max_batch=batch)
        shape = TreeConfig.parse(tree) if tree else None
        requests = [Request(prompt(n, n), sampling, Limits(48), shape) for n in (3, 30, 120)]
        found.append([request.output_ids for request in engine.run(requests)])
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculative_text_is_plain_text_where_ordinary_passes_part(temperature):
    target = model(torch.bfloat16)
    draft, sampling = tiny_draft(target).to(torch.bfloat16), SamplingConfig(temperature=temperature)
    ordinary = texts(target, draft, sampling)
    target.make_exact()
    exactly = texts(target, draft, sampling)
    assert all(found == exactly[0] for found in exactly)
    if all(found == ordinary[0] for found in ordinary):
        pytest.skip("equal, but on this machine ordinary passes give equal texts, too")


def test_where_it_cannot_be_kept_it_is_refused(monkeypatch):
    linear = torch.nn.functional.linear

    def by_place(x, *rest):
        y = linear(x, *rest)
        return y * torch.linspace(1, 1.01, y.shape[-2])[:, None].to(y.dtype)

    monkeypatch.setattr(torch.nn.functional, "linear", by_place)
    with pytest.raises(UserError, match=r"does not compute equal rows .* alike on cpu: leave --exact out"):
        model(torch.float32).make_exact()


@pytest.mark.skipif(backend.library() is None, reason="the kernel cannot be built here")
def test_the_kernel_is_exact_as_it_is():
    packed, other = model(torch.bfloat16).pack(), model(torch.bfloat16).pack()
    assert packed.exact
    packed.make_exact()
    assert packed.decoding == other.decoding
    ids, positions = torch.tensor([prompt(5)]), torch.arange(5)[None]
    assert torch.equal(packed(ids, positions).last_BND, other(ids, positions).last_BND)


def test_a_record_says_whether_passes_were_exact(monkeypatch):
    monkeypatch.setattr(backend, "library", lambda: None)
    target = model(torch.float32)
    assert (target.exact, target.decoding) == (False, "PyTorch")
    target.make_exact()
    assert (target.exact, target.decoding) == (True, "PyTorch, 16 tokens at a time")
