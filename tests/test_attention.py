"""The plain way against the fused operator and against autograd: output, log-sum-exp, and the gradients of a merge."""

import pytest
import torch

from aquiline.data.features import compute
from aquiline.train import attention, ttt
from aquiline.train.attention import FUSED, PLAIN
from aquiline.train.loop import make_pack
from aquiline.train.ttt import unroll
from tests.conftest import tiny_draft, tiny_target
from tests.test_ttt import check_equal, dense_reference, documents, trained, weighted

LAST = torch.tensor([0, 1, 4, 5, 6, 10])  # what the rows see of 11 keys


def block(dtype=torch.float32, kv_heads=2):
    """q, k, v, one more key and value per row, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(len(LAST), 4), (11, kv_heads), (11, kv_heads), (len(LAST), 4), (len(LAST), 4), (len(LAST), 4)]
    return [torch.randn(*size, 8, generator=generator).to(dtype) for size in sizes]


def merged(q, k, v, own_key, own_value):
    """By plain autograd in float64: a row's output over its keys of the block and its own, and the log-sum-exps."""
    q, k, v, own_key, own_value = (x.double() for x in (q, k, v, own_key, own_value))
    k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("rhe,she->rhs", q, k) / 8**0.5
    scores = scores.masked_fill((torch.arange(11) > LAST[:, None])[:, None], -torch.inf)
    own = (q * own_key).sum(-1, keepdim=True) / 8**0.5
    weights = torch.softmax(torch.cat((scores, own), -1), -1)
    out = torch.einsum("rhs,she->rhe", weights[..., :-1], v) + weights[..., -1:] * own_value
    return out, torch.cat((scores, own), -1).logsumexp(-1), scores.logsumexp(-1)


@pytest.mark.parametrize("rows", [512, 4], ids=["at once", "four at a time"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("way", [FUSED, PLAIN], ids=["fused", "plain"])
def test_a_block_and_its_share_of_a_merges_gradients(way, kv_heads, rows, monkeypatch):
    monkeypatch.setattr(attention, "_ROWS", rows)
    q, k, v, own_key, own_value, grad = block(kv_heads=kv_heads)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, block_lse = merged(*inputs, own_key, own_value)
    got_out, got_lse = way.forward(q, k, v, LAST)
    assert torch.allclose(got_lse.double(), block_lse, atol=1e-5)
    alone = merged(q, k, v, torch.full_like(own_key, -1e9) * q.sign(), own_value)[0]  # the own key weighs nothing
    assert torch.allclose(got_out.double(), alone, atol=1e-5)
    # Of dq the block's share alone: the own key's comes from its diagonal.
    weight = ((q * own_key).sum(-1).double() / 8**0.5 - lse).exp()
    ds = weight * ((grad * own_value).sum(-1) - (grad * out).sum(-1)) / 8**0.5
    dq, dk, dv = torch.autograd.grad(out, inputs, grad.double())
    wanted = (dq - ds[..., None] * own_key, dk, dv)
    found = way.backward(grad, q, k, v, LAST, out.detach().float(), lse.detach().float())
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == torch.float32
        assert torch.allclose(got, want.float(), atol=1e-5)
        assert float(want.detach().abs().max()) > 0.1


def test_the_plain_way_sums_bf16_in_float32_even_under_autocast():
    inputs = block(torch.bfloat16)[:3]
    exact = PLAIN.forward(*(x.float() for x in inputs), LAST)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = PLAIN.forward(*inputs, LAST)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact[0].bfloat16())
    assert torch.equal(lse, exact[1])


def test_scores_of_many_rows_are_never_held_at_once(monkeypatch):
    held, scores = [], attention._scores
    monkeypatch.setattr(attention, "_scores", lambda *given: held.append(scores(*given)) or held[-1])
    q, k = torch.randn(1100, 4, 8), torch.randn(1200, 2, 8)
    out, lse = PLAIN.forward(q, k, k, torch.arange(1100))
    PLAIN.backward(q, q, k, k, torch.arange(1100), out, lse)
    assert [len(s.flatten()) for s in held] == 2 * [4 * n * 1200 for n in (512, 512, 76)]


@pytest.fixture
def plainly(monkeypatch):
    """Run the unroll with the plain way; checked, for a test of the fused one would pass too."""
    used = []
    monkeypatch.setattr(ttt, "way", lambda device: used.append(device) or PLAIN)
    yield
    assert used


@pytest.mark.parametrize("kind", ["ce", "lk"])
@pytest.mark.parametrize("switches", [{}, {"norm_output": True, "qk_norm": True}], ids=lambda s: "+".join(s) or "plain")
def test_the_unroll_equals_the_dense_reference(switches, kind, plainly):
    target = tiny_target()
    draft = tiny_draft(target, **switches)
    docs, steps, decay = documents(), 3, 0.8
    reference = [dense_reference(draft, target, d, compute(target, [d]), steps, decay, kind) for d in docs]
    pack = make_pack(docs, compute(target, docs), draft, target)
    loss, _ = unroll(draft, pack, target.head_weight[draft.vocab.target_ids_W], steps, decay, loss=kind)
    check_equal(draft, weighted(reference, steps, decay), loss)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_unroll_equals_that_of_the_fused_operator(precision, monkeypatch):
    target = tiny_target()
    draft = tiny_draft(target)
    docs = documents()
    pack = make_pack(docs, compute(target, docs), draft, target)
    found = {}
    for way in (FUSED, PLAIN):
        monkeypatch.setattr(ttt, "way", lambda _, way=way: way)
        with torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
            loss, stats = unroll(draft, pack, target.head_weight[draft.vocab.target_ids_W], 3, 0.8)
        found[way] = stats, torch.autograd.grad(loss, list(trained(draft).values()))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02}[precision]
    assert found[PLAIN][0].loss == pytest.approx(found[FUSED][0].loss, rel=tolerance)
    for got, want in zip(found[PLAIN][1], found[FUSED][1], strict=True):
        assert float((got - want).norm()) <= tolerance * float(want.norm())


def test_the_cpu_has_the_fused_operator_and_other_devices_the_plain_one():
    assert attention.way(torch.device("cpu")) is FUSED
    assert attention.way(torch.device("cuda:1")) is PLAIN
