"""The draft's head against its teacher: the teacher's distributions, and a loss that never holds all logits.

Shapes: R rows, P teacher positions, H draft width, D target width, W draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aquiline.model.target import PLAIN_HEAD, HeadForm

_ROWS = 256  # rows of logits at a time: 256 x 8,192 float32 stays in the last-level cache


@torch.no_grad()
def teacher_probs(
    last_PD: Tensor, head_rows_WD: Tensor, logsumexp_P: Tensor | None, form: HeadForm = PLAIN_HEAD
) -> Tensor:
    """The target's probabilities of the draft vocabulary `[P, W]`, from its final states.

    `form` is that of these rows. The probabilities sum to one over the draft vocabulary; with `logsumexp_P`, over the
    full one, whose logits these are the log-sum-exp of. Under bf16 autocast the product and what is kept are bf16, all
    between them float32.
    """
    dtype = _dtype(last_PD.device, torch.float32)
    head_rows = head_rows_WD.to(dtype)
    probs = torch.empty(len(last_PD), len(head_rows), dtype=dtype, device=last_PD.device)
    for a in range(0, len(last_PD), _ROWS):
        at = slice(a, a + _ROWS)
        logits = form(F.linear(last_PD[at].to(dtype), head_rows).float())
        if logsumexp_P is None:
            probs[at] = torch.softmax(logits, dim=-1)
        else:
            probs[at] = logits.sub_(logsumexp_P[at, None]).exp_()
    return probs


def _dtype(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else otherwise


class HeadLoss(torch.autograd.Function):
    """`lm_head` and a loss against the teacher in one go, a few rows at a time, for all steps at once.

    The loss is a weighted sum over rows, so its gradient is known in the forward already: logits are never kept, and
    the memory does not grow with the vocabulary times the rows. Probabilities are float32 whatever the products are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_WH: Tensor,
        probs_PW: Tensor,
        teacher_R: Tensor,
        share_R: Tensor,
        kind: str,
        train: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`teacher_R`: the row of `probs_PW` that teaches each row; `share_R`: what each row weighs; `kind`: ce or lk.

        Returns (weighted sum, loss of each row `[R]`, the draft's arg-max `[R]`); only the first has a gradient.
        """
        d_hidden = torch.zeros_like(hidden_RH) if train else None
        d_weight = torch.zeros_like(weight_WH) if train and ctx.needs_input_grad[1] else None  # None: frozen
        losses = torch.empty(len(hidden_RH), dtype=torch.float32, device=hidden_RH.device)
        best = torch.empty(len(hidden_RH), dtype=torch.long, device=hidden_RH.device)
        dtype = _dtype(hidden_RH.device, hidden_RH.dtype)
        weight = weight_WH.to(dtype)
        row_loss = {"ce": _soft_cross_entropy, "lk": _minus_log_accepted}[kind]
        for a in range(0, len(hidden_RH), _ROWS):
            rows = slice(a, a + _ROWS)
            hidden = hidden_RH[rows].to(dtype)
            logits = F.linear(hidden, weight).float()
            best[rows] = logits.argmax(-1)
            losses[rows], d_logits = row_loss(logits, best[rows, None], probs_PW[teacher_R[rows]].float(), train)
            if d_hidden is not None and d_logits is not None:
                d_logits = d_logits.mul_(share_R[rows, None]).to(dtype)
                d_hidden[rows] = (d_logits @ weight).to(d_hidden.dtype)
                if d_weight is not None and dtype == d_weight.dtype:
                    d_weight.addmm_(d_logits.t(), hidden)
                elif d_weight is not None:
                    d_weight += (d_logits.t() @ hidden).to(d_weight.dtype)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(losses, best)
        return (losses.double() * share_R).sum().float(), losses, best

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        grad = grad_outputs[0]
        return d_hidden * grad, None if d_weight is None else d_weight * grad, None, None, None, None, None


def _soft_cross_entropy(
    logits_RW: Tensor, best_R1: Tensor, probs_RW: Tensor, train: bool
) -> tuple[Tensor, Tensor | None]:
    """`-sum p log q` and its gradient by the logits, `q - p`; the logits' memory is not needed afterwards."""
    q = torch.softmax(logits_RW, dim=-1)
    # log-sum-exp from the arg-max's own probability: one pass over the vocabulary less.
    logsumexp_R1 = logits_RW.gather(1, best_R1) - q.gather(1, best_R1).log()
    loss = logsumexp_R1.squeeze(1) - (probs_RW * logits_RW).sum(-1)
    return loss, q.sub_(probs_RW) if train else None


def _minus_log_accepted(
    logits_RW: Tensor, best_R1: Tensor, probs_RW: Tensor, train: bool
) -> tuple[Tensor, Tensor | None]:
    """`-log a`, `a = sum min(p, q)` being the probability that the target accepts a token drawn from q; its gradient.

    Where q < p (call it below, of mass b under q) the sum follows q, elsewhere p, which is constant, so
    `dL/dz = q (b - [below]) / a`. At q = p there is a kink: taken as not below.

    `p` is normalised over the full vocabulary. A row whose teacher has little mass m in the draft vocabulary has
    `a <= m`: its loss cannot fall under `-log m`, an offset that teaches nothing. Its gradient is no smaller than
    another row's, so it pulls as hard for an acceptance that hardly matters; nor is it larger, as `b <= a` bounds the
    sum of its sizes by 2 however small m is. With `skip_outside` most such rows are left out. Where `a` is 0 in
    float32 the loss is that of the smallest float32 number, and the gradient nothing.

    Source: arXiv 2602.23881.
    """
    q = torch.softmax(logits_RW, dim=-1)
    below = q < probs_RW
    accepted_R1 = torch.minimum(q, probs_RW).sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    loss = -accepted_R1.squeeze(1).log()
    if not train:
        return loss, None
    mass_R1 = (q * below).sum(-1, keepdim=True)
    return loss, q.div_(accepted_R1).mul_(mass_R1 - below.float())
