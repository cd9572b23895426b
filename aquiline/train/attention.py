"""Causal attention of a document's rows over its keys, made to be merged with more keys.

The unroll gives rows further keys than those of the block computed here (ttt.py). So the forward returns the
log-sum-exp of the scores too, and the backward is handed the output and the log-sum-exp over ALL keys: its formula
`dS = P * (dO.v - dO.O)` with `P = exp(S - lse)` then holds for the block as it stands.

Shapes: R rows, S keys of the document, h query heads, G kv heads, E head width. `last_R` is the last key a row sees.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROWS = 512  # rows whose scores are held at a time


class Way(NamedTuple):
    """One way to compute a block.

    forward(q_RhE, k_SGE, v_SGE, last_R): the output `[R, h, E]` and the log-sum-exp `[R, h]`, float32.
    backward(grad_RhE, q_RhE, k_SGE, v_SGE, last_R, out_RhE, lse_Rh): the gradients of q, k and v.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def way(device: torch.device) -> Way:
    """The one for tensors of this device."""
    return FUSED if device.type == "cpu" else PLAIN


def heads(x_RGE: Tensor, count: int) -> Tensor:
    """Keys or values once per query head, `[R, h, E]`; query heads of one kv head are neighbours."""
    return x_RGE.repeat_interleave(count // x_RGE.shape[1], dim=1)


def ungroup(x_RhE: Tensor, kv_heads: int) -> Tensor:
    """The gradient of what `heads` repeated, `[R, G, E]`."""
    return x_RhE.unflatten(1, (kv_heads, -1)).sum(2)


# ---------------------------------------------------------------- the operator of the CPU


def _fused_forward(q_RhE: Tensor, k_SGE: Tensor, v_SGE: Tensor, last_R: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_fused_inputs(q_RhE, k_SGE, v_SGE), 0.0, False, attn_mask=_bias(q_RhE, k_SGE, last_R), scale=_scale(q_RhE)
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _fused_backward(
    grad_RhE: Tensor, q_RhE: Tensor, k_SGE: Tensor, v_SGE: Tensor, last_R: Tensor, out_RhE: Tensor, lse_Rh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out = (x.transpose(0, 1)[None].contiguous() for x in (grad_RhE, out_RhE))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *_fused_inputs(q_RhE, k_SGE, v_SGE), out, lse_Rh.t()[None].contiguous(), 0.0, False,
        attn_mask=_bias(q_RhE, k_SGE, last_R), scale=_scale(q_RhE),
    )  # fmt: skip
    G = k_SGE.shape[1]
    return dq[0].transpose(0, 1), ungroup(dk[0].transpose(0, 1), G), ungroup(dv[0].transpose(0, 1), G)


def _fused_inputs(q_RhE: Tensor, k_SGE: Tensor, v_SGE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each `[1, h, rows, E]`."""
    k, v = (heads(x, q_RhE.shape[1]).transpose(0, 1)[None] for x in (k_SGE, v_SGE))
    return q_RhE.transpose(0, 1)[None], k, v


def _bias(q_RhE: Tensor, k_SGE: Tensor, last_R: Tensor) -> Tensor:
    hidden_RS = _hidden(len(k_SGE), last_R)
    return torch.zeros(hidden_RS.shape, dtype=q_RhE.dtype).masked_fill_(hidden_RS, -torch.inf)


# ---------------------------------------------------------------- plain operators, on any device


def _plain_forward(q_RhE: Tensor, k_SGE: Tensor, v_SGE: Tensor, last_R: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q_RhE)
    lse = torch.empty(q_RhE.shape[:2], dtype=torch.float32, device=q_RhE.device)
    with _in_float32(q_RhE.device):
        k_GSE, v_GSE = (x.transpose(0, 1).float() for x in (k_SGE, v_SGE))
        for rows in _chunks(q_RhE):
            scores_GNS = _scores(_grouped(q_RhE[rows], k_SGE), k_GSE, last_R[rows])
            lse_GN1 = scores_GNS.logsumexp(-1, keepdim=True)
            lse[rows] = _ungrouped(lse_GN1, len(lse[rows])).squeeze(-1)
            out[rows] = _ungrouped(scores_GNS.sub_(lse_GN1).exp_() @ v_GSE, len(out[rows]))
    return out, lse


def _plain_backward(
    grad_RhE: Tensor, q_RhE: Tensor, k_SGE: Tensor, v_SGE: Tensor, last_R: Tensor, out_RhE: Tensor, lse_Rh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.empty_like(q_RhE)
    with _in_float32(q_RhE.device):
        k_GSE, v_GSE = (x.transpose(0, 1).float() for x in (k_SGE, v_SGE))
        dk, dv = torch.zeros_like(k_GSE), torch.zeros_like(v_GSE)
        for rows in _chunks(q_RhE):
            q_GNE, grad_GNE, out_GNE, lse_GN1 = (
                _grouped(x[rows], k_SGE) for x in (q_RhE, grad_RhE, out_RhE, lse_Rh[..., None])
            )
            p_GNS = _scores(q_GNE, k_GSE, last_R[rows]).sub_(lse_GN1).exp_()
            dv += p_GNS.transpose(1, 2) @ grad_GNE
            common_GN1 = (grad_GNE * out_GNE).sum(-1, keepdim=True)
            ds_GNS = (grad_GNE @ v_GSE.transpose(1, 2)).sub_(common_GN1).mul_(p_GNS).mul_(_scale(q_RhE))
            dk += ds_GNS.transpose(1, 2) @ q_GNE
            dq[rows] = _ungrouped(ds_GNS @ k_GSE, len(dq[rows]))
    return dq, dk.transpose(0, 1).to(k_SGE.dtype), dv.transpose(0, 1).to(v_SGE.dtype)


def _in_float32(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast would make the products bf16 again."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext()


def _chunks(q_RhE: Tensor) -> list[slice]:
    return [slice(a, a + _ROWS) for a in range(0, len(q_RhE), _ROWS)]


def _grouped(x_RhE: Tensor, k_SGE: Tensor) -> Tensor:
    """The query heads of one kv head below each other, in float32: `[G, h/G * R, E]`, N being h/G * R."""
    return x_RhE.float().unflatten(1, (k_SGE.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _ungrouped(x_GNE: Tensor, rows: int) -> Tensor:
    """`[R, h, E]` again."""
    return x_GNE.unflatten(1, (-1, rows)).flatten(0, 1).transpose(0, 1)


def _scores(q_GNE: Tensor, k_GSE: Tensor, last_R: Tensor) -> Tensor:
    """`[G, N, S]`, -inf where a row does not see a key."""
    scores = (q_GNE @ k_GSE.transpose(1, 2)).mul_(_scale(q_GNE))
    hidden_RS = _hidden(k_GSE.shape[1], last_R)
    scores.view(-1, *hidden_RS.shape).masked_fill_(hidden_RS, -torch.inf)
    return scores


def _hidden(keys: int, last_R: Tensor) -> Tensor:
    """Bool `[R, S]`: the row does not see the key."""
    return torch.arange(keys, device=last_R.device) > last_R[:, None]


def _scale(q: Tensor) -> float:
    return q.shape[-1] ** -0.5


FUSED = Way(_fused_forward, _fused_backward)
PLAIN = Way(_plain_forward, _plain_backward)
