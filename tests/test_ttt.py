"""The unroll against a dense, slow, independent reference: values AND gradients; and against stepwise decoding."""

import dataclasses
import math

import pytest
import torch

from aquiline.config import TOP
from aquiline.data.dataset import Document
from aquiline.data.features import compute
from aquiline.model.layers import rotate
from aquiline.train import head_loss
from aquiline.train.head_loss import HeadLoss
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


def dense_reference(draft, target, doc, features, steps, decay, kind="ce"):
    """One document, every row at every step, dense masks over all keys: O(K^2 T^2), plain autograd.

    Returns per step (per-row losses of scored rows, logits of all rows, fed-back features of all rows). The accepted
    mass of `lk` is summed over the full vocabulary, where the draft has no token with probability 0.
    """
    T = len(doc)
    ids = doc.ids.long()
    attention, layer = draft.midlayer.self_attn, draft.midlayer
    groups = attention.heads // attention.kv_heads
    embeds = draft.embed(ids, target.embed).detach()
    feature = draft.fuse(features.aux_TA)
    all_keys, all_values, result = [], [], []
    full = target.logits(features.last_TD)
    teacher = torch.softmax(full[:, draft.vocab.target_ids_W], dim=-1)
    for k in range(steps):
        shifted = torch.stack([embeds[min(t + 1 + k, T - 1)] for t in range(T)])
        normed = layer.hidden_norm(feature)
        x = torch.cat((layer.input_layernorm(shifted), normed), dim=-1)
        residual = normed if draft.config.norm_before_residual else feature
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
        h = layer.finish(residual, attended)
        hidden = draft.norm(h)
        feature = hidden if draft.config.norm_output else h
        logits = draft.lm_head(hidden)
        losses = {}
        for t in range(T):
            j = t + 2 + k
            if j < T and bool(doc.supervised[j]):
                best = int(full[t + 1 + k].argmax())
                if int(draft.vocab.draft_ids_V[best]) >= 0:
                    losses[t] = -(teacher[t + 1 + k] * torch.log_softmax(logits[t], -1)).sum()
                    if kind == "lk":
                        q = torch.zeros(len(full[0])).scatter(0, draft.vocab.target_ids_W, logits[t].softmax(-1))
                        losses[t] = -torch.minimum(full[t + 1 + k].softmax(-1), q).sum().log()
        result.append((losses, logits, feature))
    return result


def trained(draft) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in draft.named_parameters() if n != "embed_tokens.weight"}


def check_equal(draft, expected, loss, tolerance=2e-5):
    """Of two losses the values and the gradients by everything that is trained."""
    parameters = trained(draft)
    wanted, grads = (torch.autograd.grad(x, list(parameters.values())) for x in (expected, loss))
    assert torch.allclose(loss, expected, rtol=1e-5)
    for name, got, want in zip(parameters, grads, wanted, strict=True):
        assert float((got - want).norm()) <= tolerance * float(want.norm()) + 1e-7, name
        assert float(want.norm()) > 0, name


def weighted(reference, steps, decay):
    """The loss of a whole pack from those of its documents' rows."""
    rows = [[x for r in reference for x in r[k][0].values()] for k in range(steps)]
    return sum(decay**k * sum(losses) / len(losses) for k, losses in enumerate(rows))


@pytest.mark.parametrize("kind", ["ce", "lk"])
@pytest.mark.parametrize("switches", [*SWITCHES, {"top": True}], ids=lambda s: "+".join(s) or "plain")
def test_loss_and_gradients_equal_the_dense_reference(switches, kind):
    target = tiny_target(capture_after=TOP if "top" in switches else (1, 3, 4))
    draft = tiny_draft(target, **{k: v for k, v in switches.items() if k != "top"})
    docs, steps, decay = documents(), 3, 0.8
    reference = [dense_reference(draft, target, d, compute(target, [d]), steps, decay, kind) for d in docs]
    pack = make_pack(docs, compute(target, docs), draft, target)
    loss, _ = unroll(draft, pack, target.head_weight[draft.vocab.target_ids_W], steps, decay, loss=kind)
    check_equal(draft, weighted(reference, steps, decay), loss)


def test_a_teacher_that_is_decided_and_far_away_has_the_same_gradient():
    """Probabilities of 1e-30 and less on either side: nothing overflows, and no row is lost."""
    target = tiny_target()
    draft = tiny_draft(target)
    with torch.no_grad():
        target.lm_head.weight.mul_(40)
        draft.lm_head.weight.mul_(15)
    docs = documents()
    reference = [dense_reference(draft, target, d, compute(target, [d]), 2, 0.8, "lk") for d in docs]
    assert max(float(x.detach()) for r in reference for x in r[0][0].values()) > 20
    pack = make_pack(docs, compute(target, docs), draft, target)
    loss, _ = unroll(draft, pack, target.head_weight[draft.vocab.target_ids_W], 2, 0.8, loss="lk")
    check_equal(draft, weighted(reference, 2, 0.8), loss, tolerance=1e-4)


def test_a_row_of_no_mass_has_a_large_loss_and_a_gradient_of_two_at_most():
    hidden = torch.tensor([[30.0, 0.0], [1.0, 2.0], [0.5, 0.5]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-90.0, 0.0], [-100.0, 0.0]], requires_grad=True)
    probs = torch.tensor([[0.0, 0.4, 0.6], [1e-30, 2e-30, 0.0], [0.2, 0.2, 0.1]])
    share = torch.ones(3)
    loss, losses, _ = HeadLoss.apply(hidden, weight, probs, torch.arange(3), share, "lk", True)
    assert float(losses[0]) == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))  # q is 0 where p is not
    q = torch.softmax(hidden @ weight.t(), -1)[1]
    assert float(losses[1]) == pytest.approx(-math.log(float(torch.minimum(q, probs[1]).sum().detach())))
    (grad,) = torch.autograd.grad(loss, hidden)
    assert grad[0].tolist() == [0.0, 0.0]
    assert bool(torch.isfinite(grad).all())
    assert float(grad[1].abs().sum()) <= 2 * float(weight.abs().max())


@pytest.mark.parametrize("kind", ["ce", "lk"])
def test_rows_at_a_time_change_nothing(monkeypatch, kind):
    target = tiny_target()
    draft = tiny_draft(target)
    docs = documents()
    pack = make_pack(docs, compute(target, docs), draft, target)
    head = target.head_weight[draft.vocab.target_ids_W]
    whole, _ = unroll(draft, pack, head, 3, 0.8, loss=kind)
    monkeypatch.setattr(head_loss, "_ROWS", 3)
    few, _ = unroll(draft, pack, head, 3, 0.8, loss=kind)
    check_equal(draft, whole, few)


def test_a_frozen_head_gets_no_gradient_and_changes_no_other():
    target = tiny_target()
    draft = tiny_draft(target)
    docs = documents()
    pack = make_pack(docs, compute(target, docs), draft, target)
    head = target.head_weight[draft.vocab.target_ids_W]
    grads = []
    for frozen in (False, True):
        draft.lm_head.weight.requires_grad_(not frozen)
        draft.zero_grad()
        loss, _ = unroll(draft, pack, head, 3, 0.8)
        assert (loss.grad_fn.saved_tensors[1] is None) == frozen  # nor is it computed
        loss.backward()
        grads.append({n: p.grad for n, p in draft.named_parameters()})
    assert grads[0].pop("lm_head.weight") is not None
    assert grads[1].pop("lm_head.weight") is None
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


@pytest.mark.parametrize("switches", [{}, {"norm_output": True}], ids=lambda s: "+".join(s) or "plain")
def test_the_feature_loss_equals_the_dense_reference(switches):
    target = tiny_target(capture_after=TOP)
    draft = tiny_draft(target, **switches)
    docs, steps, decay = documents(), 3, 0.8
    features = [compute(target, [d]) for d in docs]
    reference = [dense_reference(draft, target, d, f, steps, decay) for d, f in zip(docs, features, strict=True)]
    expected = 0.1 * weighted(reference, steps, decay)
    for k in range(steps):
        distances = []
        for doc, f, r in zip(docs, features, reference, strict=True):
            for t in range(len(doc) - 2 - k):
                if bool(doc.supervised[t + 2 + k]):  # whatever the draft vocabulary
                    error = (r[k][2][t] - f.last_TD[t + 1 + k]).abs()
                    distances.append(torch.where(error < 1, error**2 / 2, error - 0.5).mean())
        expected = expected + decay**k * sum(distances) / len(distances)
    pack = make_pack(docs, compute(target, docs), draft, target)
    loss, _ = unroll(draft, pack, target.head_weight[draft.vocab.target_ids_W], steps, decay, feature_loss=True)
    check_equal(draft, expected, loss)


@pytest.mark.parametrize("kind", ["ce", "lk"])
@pytest.mark.parametrize("switches", [{}, {"norm_output": True}, {"qk_norm": True}], ids=lambda s: "+".join(s))
def test_checkpointed_activations_change_no_bit_of_the_gradients(switches, kind):
    target = tiny_target()
    draft = tiny_draft(target, **switches)
    docs = documents()
    pack = make_pack(docs, compute(target, docs), draft, target)
    head = target.head_weight[draft.vocab.target_ids_W]
    saved, grads = [], []
    for again in (False, True):
        bytes_kept = {}

        def keep(x, kept=bytes_kept):
            kept[x.data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss, _ = unroll(draft, pack, head, 4, 0.8, loss=kind, checkpoint_activations=again)
        saved.append(sum(bytes_kept.values()))
        grads.append(torch.autograd.grad(loss, list(trained(draft).values())))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert saved[1] < 0.8 * saved[0]


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


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("kind", ["ce", "lk"])
@pytest.mark.parametrize("switches", [*SWITCHES, {"top": True}], ids=lambda s: "+".join(s) or "plain")
def test_bf16_autocast_gives_nearly_the_same_loss_and_gradients(switches, kind, again):
    target = tiny_target(capture_after=TOP if "top" in switches else (1, 3, 4))
    draft = tiny_draft(target, **{k: v for k, v in switches.items() if k != "top"})
    docs = documents()
    features = compute(target, docs)
    pack = make_pack(docs, features, draft, target)
    head = target.head_weight[draft.vocab.target_ids_W]
    parameters = trained(draft)
    settings = {"loss": kind, "feature_loss": "top" in switches}
    exact, _ = unroll(draft, pack, head, 3, 0.8, **settings)
    exact_grads = torch.autograd.grad(exact, list(parameters.values()))
    # As they come from the disk.
    pack = dataclasses.replace(pack, aux_TA=features.aux_TA.bfloat16(), last_TD=features.last_TD.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = unroll(draft, pack, head, 3, 0.8, **settings, checkpoint_activations=again)
    grads = torch.autograd.grad(loss, list(parameters.values()))
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.02)
    # At lk's kink, a token whose p and q nearly tie is rounded to either side.
    tolerance = {"ce": 0.1, "lk": 0.15}[kind]
    for name, got, want in zip(parameters, grads, exact_grads, strict=True):
        assert float((got - want).norm()) <= tolerance * float(want.norm()), name


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
