"""What a new head starts as, and where each of its tensors comes from."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.config import AquilineWarning, TrainConfig, UserError, require
from aquiline.data.features import Features
from aquiline.model.draft import Draft
from aquiline.model.target import LlamaTarget, Target, TargetLayer


@torch.no_grad()
def init_draft(
    draft: Draft, target: Target, features: Features, seed: int, init: str = TrainConfig.init
) -> dict[str, str]:
    """`lm_head` starts as the target's rows; the rest is random (std 0.02), with `fc` scaled to the captured states.

    Their sizes differ tenfold between layers: each layer's part of `fc` is divided by the median root mean square of
    what it reads in `features` (of the states behind their norms, where the head has such norms), so that every layer
    adds to a feature of about unit size. (The mean would be ruled by the few tokens with massive activations.) With
    `init` target-layer, the layer and `norm` are then copied from the target, and `fc` passes the high captured state
    through. Returns the origin of every tensor, by name, in words.
    """
    generator = torch.Generator().manual_seed(seed)
    sources: dict[str, str] = {}
    for name, p in draft.named_parameters():
        if p.ndim == 2:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.02)
            sources[name] = "random"
        else:
            bias = name.endswith("bias")
            p.fill_(0.0 if bias else 1.0)
            sources[name] = "zeros" if bias else "ones"
    if draft.fc is not None:
        states = _entering_fc(draft, features.aux_TA.to(draft.fc.weight))
        for part, x in zip(draft.fc.weight.chunk(len(states), dim=1), states, strict=True):
            rms = float(x.pow(2).mean(-1).sqrt().median())
            part.div_(0.02 * draft.fc.in_features**0.5 * max(rms, 1e-6))
        sources["fc.weight"] = "random, scaled to the captured states"
    if draft.config.hidden_size == target.config.hidden_size:
        draft.lm_head.weight.copy_(target.head_rows(draft.vocab.target_ids_W))
        sources["lm_head.weight"] = "the target's head, rows of the draft vocabulary"
    if init == "target-layer":
        if not isinstance(target, LlamaTarget):
            family = target.config.family
            raise UserError(f"init target-layer copies a Llama-like layer, and {family} has others: use init random")
        sources |= _copy_last_layer(draft, target)
    return sources


def _entering_fc(draft: Draft, aux_TA: Tensor) -> Sequence[Tensor]:
    """Per captured layer, what `fc` reads of it."""
    if draft.input_norm is not None:
        aux_TA = draft.input_norm(aux_TA)
    states = aux_TA.chunk(len(draft.config.capture_after), dim=-1)
    if draft.fc_norm is None:
        return states
    return [norm(x) for norm, x in zip(draft.fc_norm, states, strict=True)]


def _copy_last_layer(draft: Draft, target: LlamaTarget) -> dict[str, str]:
    """The draft's layer and `norm` from the target's last layer and final norm, and `fc` the identity of the high
    captured state: where that is the state that enters the last layer, the draft computes the target's own logits. A
    state captured some layers earlier is at least of the same basis, which a random `fc` would not leave.

    Of q, k and v the half that reads the feature is copied, with the norm before it, and the half that reads the
    embedding starts as zeros, not random, so that the copied attention is undisturbed; it learns from the first update
    on, for a linear's gradient does not depend on its values.
    """
    _check_shapes(draft, target)
    theirs, ours = target.model.layers[-1], draft.midlayer
    assert isinstance(theirs, TargetLayer)
    attention, layer = ours.self_attn, "the target's last layer"
    copies: list[tuple[str, Any, Any]] = [
        ("midlayer.hidden_norm", ours.hidden_norm, theirs.input_layernorm),
        ("midlayer.post_attention_layernorm", ours.post_attention_layernorm, theirs.post_attention_layernorm),
        ("midlayer.self_attn.o_proj", attention.o_proj, theirs.self_attn.o_proj),
        ("midlayer.self_attn.q_norm", attention.q_norm, theirs.self_attn.q_norm),
        ("midlayer.self_attn.k_norm", attention.k_norm, theirs.self_attn.k_norm),
        ("norm", draft.norm, target.model.norm),
    ]
    for part in ("gate_proj", "up_proj", "down_proj"):
        copies.append((f"midlayer.mlp.{part}", getattr(ours.mlp, part), getattr(theirs.mlp, part)))
    sources, dropped = {}, []
    for name, mine, its in copies:
        if mine is not None and its is not None:
            mine.weight.copy_(its.weight)
            sources[f"{name}.weight"] = "the target's final norm" if name == "norm" else layer
        if isinstance(its, nn.Linear) and its.bias is not None:
            dropped.append(f"the bias of {name.rpartition('.')[2]}, which heads never have")
    for part in ("q_proj", "k_proj", "v_proj"):
        name, mine, its = f"midlayer.self_attn.{part}", getattr(attention, part), getattr(theirs.self_attn, part)
        mine.weight.zero_()
        mine.weight[:, draft.config.hidden_size :] = its.weight  # the embedding's half comes first
        sources[f"{name}.weight"] = f"{layer}; zeros where it reads the embedding"
        if mine.bias is not None and its.bias is not None:
            mine.bias.copy_(its.bias)
            sources[f"{name}.bias"] = layer
        elif its.bias is not None:
            dropped.append(f"the bias of {part} (switch attention_bias on to have it)")
    if theirs.self_attn.q_norm is not None and attention.q_norm is None:
        dropped.append("the norms of q and k (switch qk_norm on to have them)")
    if theirs.self_attn.q_norm is None and attention.q_norm is not None:
        dropped.append("the sizes of q and k, as the head norms them and the target does not")
    if ours.norm_before_residual:
        dropped.append("the residual stream, which the head norms and the target does not (norm_before_residual)")
    if draft.input_norm is not None or draft.fc_norm is not None:
        dropped.append("an fc that passes the high captured state through, for a norm precedes it: fc starts random")
    elif draft.fc is not None:
        draft.fc.weight.zero_()
        draft.fc.weight[:, -target.config.hidden_size :].fill_diagonal_(1.0)
        sources["fc.weight"] = "passes the high captured state through"
    if dropped:
        warnings.warn(
            f"init target-layer copies the target's last layer without {'; '.join(dropped)}: the head starts as "
            "another layer than the target's",
            AquilineWarning,
            stacklevel=3,
        )
    return sources


def _check_shapes(draft: Draft, target: Target) -> None:
    names = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    ours, theirs = (dataclasses.asdict(c) for c in (draft.config, target.config))
    other = [f"{n} is {ours[n]}, the target's is {theirs[n]}" for n in names if ours[n] != theirs[n]]
    require(
        not other, f"init target-layer needs a head of the target's own shape, but {'; '.join(other)}: use init random"
    )
