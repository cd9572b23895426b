"""What a head starts as: the target's last layer gives the target's own logits; what cannot be copied is said."""

import itertools
import warnings

import pytest
import torch

from aquiline.config import AquilineWarning, TrainConfig, UserError
from aquiline.data.features import compute
from aquiline.train.init import init_draft
from aquiline.train.optim import make_optimizers
from tests.conftest import randomise, tiny_draft, tiny_target
from tests.test_features import document

QWEN2 = {"family": "qwen2", "qkv_bias": True}
QWEN3 = {"family": "qwen3", "qk_norm": True}


def initialised(draft, target, init="target-layer"):
    return init_draft(draft, target, compute(target, [document(20, 0)]), 0, init)


@pytest.mark.parametrize(
    ("family", "switches"), [({}, {}), (QWEN2, {"attention_bias": True}), (QWEN3, {"qk_norm": True})]
)
def test_from_the_state_that_enters_the_last_layer_the_draft_computes_the_targets_logits(family, switches):
    target = tiny_target(capture_after=(1, 3, 6), **family)  # of eight layers; the last one reads what leaves layer 6
    draft = tiny_draft(target, **switches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sources = initialised(draft, target)
    ids, positions = document(12, 4).ids.long()[None], torch.arange(12)[None]
    out = target(ids, positions)
    expected = target.logits(out.last_BND)[..., draft.vocab.target_ids_W]
    for embeds in (torch.zeros(1, 12, 32), torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0))):
        got = draft.logits(draft(embeds, draft.fuse(out.aux_BNA), positions).hidden_BNH)
        assert torch.allclose(got, expected, atol=1e-4)
    assert set(sources) == {n for n, _ in draft.named_parameters()}
    copied = {n for n, source in sources.items() if source.startswith("the target's")}
    assert set(sources) - copied == {"fc.weight", "midlayer.input_layernorm.weight"}


def test_the_half_that_reads_the_embedding_learns_from_the_first_update_on():
    target = tiny_target(capture_after=(6,))
    draft = tiny_draft(target)
    initialised(draft, target)
    embeds = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    out = draft(embeds, target(torch.arange(6)[None], torch.arange(6)[None]).aux_BNA, torch.arange(6)[None])
    draft.logits(out.hidden_BNH).square().sum().backward()
    attention = draft.midlayer.self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert not bool(projection.weight[:, :32].any())
        assert float(projection.weight.grad[:, :32].abs().sum()) > 0


@pytest.mark.parametrize(
    ("family", "switches", "words"),
    [
        (QWEN2, {}, "without the bias of q_proj .*attention_bias.*k_proj.*v_proj"),
        (QWEN3, {}, "without the norms of q and k .switch qk_norm"),
        ({}, {"qk_norm": True}, "the head norms them and the target does not"),
        ({"o_bias": True}, {}, "the bias of o_proj, which heads never have"),
        ({"mlp_bias": True}, {}, "gate_proj, .* up_proj, .* down_proj, "),
        ({}, {"norm_before_residual": True}, r"the residual stream, .*\(norm_before_residual\): the head"),
        ({}, {"fc_norm": True}, "a norm precedes it: fc starts random"),
        ({}, {"norm_before_fc": True}, "a norm precedes it: fc starts random"),
    ],
)
def test_what_is_not_copied_is_said(family, switches, words):
    target = tiny_target(**family)
    draft = tiny_draft(target, **switches)
    with pytest.warns(AquilineWarning, match=words):
        initialised(draft, target)


def test_another_shape_is_refused():
    target = tiny_target()
    draft = tiny_draft(target, num_kv_heads=4, intermediate_size=40)
    with pytest.raises(UserError, match=r"intermediate_size is 40, the target's is 48; num_kv_heads is 4, .*is 2: use"):
        initialised(draft, target)


def test_random_copies_the_rows_of_the_head_alone():
    target = tiny_target()
    draft = tiny_draft(target)
    sources = initialised(draft, target, "random")
    assert torch.equal(draft.lm_head.weight, target.head_weight[draft.vocab.target_ids_W])
    assert [n for n, source in sources.items() if source.startswith("the target's")] == ["lm_head.weight"]
    assert bool((draft.norm.weight == 1).all())
    other = tiny_draft(target)
    randomise(other, 9)
    initialised(other, target, "random")
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_what_is_frozen_is_in_no_optimizer(optimizer):
    draft = tiny_draft(tiny_target())
    draft.lm_head.weight.requires_grad_(False)
    optimizers = make_optimizers(draft, TrainConfig(optimizer=optimizer, weight_decay=0.1))
    held = {id(p) for p in itertools.chain(*(g["params"] for o in optimizers for g in o.param_groups))}
    assert held == {id(p) for n, p in draft.named_parameters() if n != "lm_head.weight"}
