"""The unroll against a dense, slow, independent reference: values AND gradients; and against stepwise decoding."""

import pytest
import torch
from torch.nn import functional as F

from aquiline.data.dataset import Document
from aquiline.data.features import compute
from aquiline.model.layers import rotate
from aquiline.train.loop import make_pack
from aquiline.train.ttt import Plan, unroll
from tests.conftest import tiny_draft, tiny_target

SWITCHES = [
    {},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"norm_output": True},
    {"norm_before_residual": True},
    {"qk_norm": True, "attention_bias": True},
    {"own_embedding": True, "hidden_size": 16, "head_dim": 4},
]


def document(length: int, supervised: list[tuple[int, int]], seed: int) -> Document:
    ids = torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).int()
    flags = torch.zeros(length, dtype=torch.bool)
    for a, b in supervised:
        flags[a:b] = True
    return Document(ids, flags, True, "test", f"doc-{seed}")


def documents() -> list[Document]:
    """One with a single reply, one with two, one whose reply is a single token, and one that ends supervised."""
    return [
        document(13, [(6, 13)], 0),
        document(17, [(4, 8), (11, 15)], 1),
        document(5, [(3, 4)], 2),
        document(9, [(2, 9)], 3),
    ]


def dense_reference(draft, target, doc, features, steps, decay):
    """One document, every row at every step, dense masks over all keys: O(K^2 T^2), plain autograd.

    Returns per step (list of per-row losses for scored rows, logits of all rows).
    """
    T = len(doc)
    ids = doc.ids.long()
    attention, layer = draft.midlayer.self_attn, draft.midlayer
    groups = attention.heads // attention.kv_heads
    embeds = draft.embed(ids, target.embed).detach()
    feature = draft.fuse(features.aux_TA)
    all_keys, all_values, result = [], [], []
    teacher = torch.softmax(F.linear(features.last_TD, target.head_weight)[:, draft.vocab.target_ids_W], dim=-1)
    for k in range(steps):
        shifted = torch.stack([embeds[min(t + 1 + k, T - 1)] for t in range(T)])
        x, residual = layer.inputs(shifted, feature)
        cos, sin = draft.rotary(torch.arange(T) + k, x.dtype)
        q = attention.q_proj(x).view(T, attention.heads, -1)
        key = attention.k_proj(x).view(T, attention.kv_heads, -1)
        if attention.q_norm is not None:
            q, key = attention.q_norm(q), attention.k_norm(key)
        q, key = rotate(q, cos, sin), rotate(key, cos, sin)
        value = attention.v_proj(x).view(T, attention.kv_heads, -1)
        all_keys.append(key.repeat_interleave(groups, 1))
        all_values.append(value.repeat_interleave(groups, 1))
        keys, values = torch.cat(all_keys), torch.cat(all_values)
        visible = torch.cat([torch.ones(T, T).tril()] + [torch.eye(T)] * k, dim=1).bool()
        scores = torch.einsum("qhe,khe->hqk", q, keys) / q.shape[-1] ** 0.5
        weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
        attended = torch.einsum("hqk,khe->qhe", weights, values).flatten(1)
        feature, hidden = draft.outputs(layer.finish(residual, attended))
        logits = draft.lm_head(hidden)
        losses = {}
        for t in range(T):
            j = t + 2 + k
            if j < T and bool(doc.supervised[j]):
                best = int(F.linear(features.last_TD[t + 1 + k], target.head_weight).argmax())
                if int(draft.vocab.draft_ids_V[best]) >= 0:
                    losses[t] = -(teacher[t + 1 + k] * torch.log_softmax(logits[t], -1)).sum()
        result.append((losses, logits))
    return result


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "+".join(s) or "plain")
def test_loss_and_gradients_equal_the_dense_reference(switches):
    target = tiny_target()
    draft = tiny_draft(target, **switches)
    docs, steps, decay = documents(), 3, 0.8
    reference = [dense_reference(draft, target, d, compute(target, [d]), steps, decay) for d in docs]
    expected = 0
    for k in range(steps):
        losses = [x for r in reference for x in r[k][0].values()]
        expected = expected + decay**k * sum(losses) / len(losses)
    names = [n for n, p in draft.named_parameters() if n != "embed_tokens.weight"]
    parameters = [dict(draft.named_parameters())[n] for n in names]
    expected_grads = torch.autograd.grad(expected, parameters)

    pack = make_pack(docs, compute(target, docs), draft, target)
    loss, _ = unroll(draft, pack, target.head_weight[draft.vocab.target_ids_W], steps, decay)
    grads = torch.autograd.grad(loss, parameters)
    assert torch.allclose(loss, expected, rtol=1e-5)
    for name, got, want in zip(names, grads, expected_grads, strict=True):
        assert float((got - want).norm()) <= 2e-5 * float(want.norm()) + 1e-7, name


def test_packed_documents_do_not_see_each_other():
    target = tiny_target()
    draft = tiny_draft(target)
    head = target.head_weight[draft.vocab.target_ids_W]
    docs = documents()
    together, _ = unroll(draft, make_pack(docs, compute(target, docs), draft, target), head, 1, 0.8, skip_outside=False)
    rows, total = 0, 0.0
    for d in docs:
        loss, stats = unroll(
            draft, make_pack([d], compute(target, [d]), draft, target), head, 1, 0.8, skip_outside=False
        )
        rows += stats.rows[0]
        total += float(loss.detach()) * stats.rows[0]
    assert float(together.detach()) == pytest.approx(total / rows, rel=1e-5)


def test_supervised_rows_of_a_reply_are_exactly_those_before_its_tokens():
    # Tokens 0..5, the reply is 4, 5. Row t predicts x_{t+2}: rows 2 and 3 at step 0, 1 and 2 at step 1.
    flags = torch.tensor([False, False, False, False, True, True])
    plan = Plan.make(flags, [0, 6], 2)
    assert plan.valid_KT[0].nonzero().squeeze(1).tolist() == [2, 3]
    assert plan.valid_KT[1].nonzero().squeeze(1).tolist() == [1, 2]
    assert plan.active[0].tolist() == [1, 2, 3]
    assert plan.active[1].tolist() == [1, 2]


def test_gradient_reaches_the_last_prompt_row_and_nothing_past_the_reply():
    target = tiny_target()
    draft = tiny_draft(target)
    doc = document(8, [(4, 6)], 5)  # two prompt-like tokens follow the reply
    features = compute(target, [doc])
    features.aux_TA.requires_grad_(True)
    pack = make_pack([doc], features, draft, target)
    loss, _ = unroll(draft, pack, target.head_weight[draft.vocab.target_ids_W], 1, 0.8, skip_outside=False)
    grad = torch.autograd.grad(loss, features.aux_TA)[0].abs().sum(1)
    assert float(grad[3]) > 0  # row 3 predicts x_5
    assert grad[4:].tolist() == [0.0] * 4


def test_padding_tokens_change_nothing():
    target = tiny_target()
    draft = tiny_draft(target)
    head = target.head_weight[draft.vocab.target_ids_W]
    doc = document(12, [(5, 12)], 7)
    long = Document(
        torch.cat((doc.ids, doc.ids)), torch.cat((doc.supervised, torch.zeros(12, dtype=torch.bool))), True, "", ""
    )
    losses = []
    for d in (doc, long):
        loss, _ = unroll(draft, make_pack([d], compute(target, [d]), draft, target), head, 3, 0.8)
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_right_and_counted_are_judged_by_the_stored_token():
    target = tiny_target()
    draft = tiny_draft(target)
    doc = document(20, [(6, 20)], 3)  # random tokens: most are not the target's arg-max, some are made so
    features = compute(target, [doc])
    ids = doc.ids.clone()
    for t in (8, 9, 13, 14, 15):
        ids[t] = int(target.logits(target(ids[None, :t].long(), torch.arange(t)[None]).last_BND[0, -1]).argmax())
    doc = Document(ids, doc.supervised, True, "", "")
    features = compute(target, [doc])
    _, stats = unroll(
        draft, make_pack([doc], features, draft, target), target.head_weight[draft.vocab.target_ids_W], 3, 0.8
    )
    reference = dense_reference(draft, target, doc, features, 3, 0.8)
    for k in range(3):
        right, counted = torch.zeros(20, dtype=torch.bool), torch.zeros(20, dtype=torch.bool)
        for t in range(18 - k):
            if not bool(doc.supervised[t + 2 + k]):
                continue
            best = int(target.logits(features.last_TD[t + 1 + k]).argmax())
            counted[t] = best == int(ids[t + 2 + k])
            if int(draft.vocab.draft_ids_V[best]) >= 0:
                right[t] = int(draft.vocab.target_ids_W[reference[k][1][t].argmax()]) == int(ids[t + 2 + k])
        assert torch.equal(stats.right_KT[k], right)
        assert torch.equal(stats.counted_KT[k], counted)
    assert stats.counted_KT.any()
    assert not stats.counted_KT[0].all()


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "+".join(s) or "plain")
def test_bf16_autocast_gives_nearly_the_same_loss_and_gradients(switches):
    target = tiny_target()
    draft = tiny_draft(target, **switches)
    docs = documents()
    pack = make_pack(docs, compute(target, docs), draft, target)
    head = target.head_weight[draft.vocab.target_ids_W]
    names = [n for n, _ in draft.named_parameters() if n != "embed_tokens.weight"]
    parameters = [dict(draft.named_parameters())[n] for n in names]
    exact, _ = unroll(draft, pack, head, 3, 0.8)
    exact_grads = torch.autograd.grad(exact, parameters)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = unroll(draft, pack, head, 3, 0.8)
    grads = torch.autograd.grad(loss, parameters)
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.02)
    for name, got, want in zip(names, grads, exact_grads, strict=True):
        assert float((got - want).norm()) <= 0.1 * float(want.norm()), name


def test_the_dense_reference_equals_stepwise_decoding_with_the_cache():
    """Row t at step k is what the decoder computes for a chain of k+1 nodes after rows 0..t.

    The unroll equals the dense reference (above), so all three agree.
    """
    target = tiny_target()
    draft = tiny_draft(target, draft_vocab_size=64)
    doc = document(14, [(5, 14)], 9)
    features = compute(target, [doc])
    reference = dense_reference(draft, target, doc, features, 4, 0.8)
    ids = doc.ids.long()
    g = draft.fuse(features.aux_TA)
    for t in range(4, 9):
        cache = draft.new_cache(1, 32)
        real = draft(target.embed(ids[1 : t + 2])[None], g[None, : t + 1], torch.arange(t + 1)[None], None, cache, [0])
        cache.keep(0, real.keys_LBGNE[:, 0], real.values_LBGNE[:, 0])
        out, tree = real, None
        for k in range(4):
            if k > 0:
                embeds = target.embed(ids[t + 1 + k])[None, None]
                mask = torch.ones(1, 1, k, dtype=torch.bool)
                out = draft(embeds, out.feature_BNH[:, -1:], torch.tensor([[t + k]]), mask, cache, [0], tree)
                new = (out.keys_LBGNE, out.values_LBGNE)
                tree = new if tree is None else tuple(torch.cat(pair, dim=3) for pair in zip(tree, new, strict=True))
            got = draft.logits(out.hidden_BNH[0, -1])
            assert torch.allclose(got, reference[k][1][t], atol=1e-4), (t, k)
