"""READ SECOND. Training-time test: the draft unrolled on its own features, as it will run when it decodes.

Documents are packed one behind the other; nothing crosses a document's end. Row t at step k:

    embeds     x_{t+1+k}
    feature    fc(aux_t) at k = 0, afterwards the row's own output of step k-1
    attends    the step-0 keys of rows 0..t (true features), and of steps 1..k only its OWN keys
    teacher    the target's distribution at position t+1+k, its prediction of x_{t+2+k}
    position   t + k

Supervised is a row whose x_{t+2+k} was written by this target in the same document. A row that no later step
supervises is not run at step k at all: nobody reads its later keys.

The large tensors lie on the draft's device. What is decided about rows is decided on the CPU, before the first step,
so that no step waits for the device.

Shapes: T tokens of the pack, R rows of a step, K steps, D target width, A width of aux, H draft width, h query heads,
G kv heads, E head width, W draft vocabulary, P teacher positions. The losses of the head are in head_loss.py.
Source: EAGLE-3 (arXiv 2503.01840), section 3.2.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aquiline.model.draft import Draft
from aquiline.model.target import PLAIN_HEAD, HeadForm
from aquiline.train.attention import heads, ungroup, way
from aquiline.train.head_loss import HeadLoss, teacher_probs


@dataclass
class Pack:
    """Documents behind each other with the target's features of every token.

    On the CPU: `ids`, `supervised`, `argmax`, `outside`; the others on the draft's device.
    """

    ids_T: Tensor
    supervised_T: Tensor  # bool: the token was written by this target
    starts: list[int]  # first token of each document, and T
    aux_TA: Tensor
    last_TD: Tensor  # final state of the target, after its norm
    argmax_T: Tensor  # the target's arg-max id at each position; -1 where nothing is supervised by it
    outside_T: Tensor  # bool: the draft cannot propose that id
    logsumexp_T: Tensor  # of the target's logits over its full vocabulary; 0 there
    embeds_TH: Tensor
    head_form: HeadForm = PLAIN_HEAD  # of the target's head rows of the draft vocabulary


@dataclass
class StepStats:
    """Of one unroll, per step. `right` and `counted` are `[K, T]`, by the row's position in the pack."""

    loss: list[float] = field(default_factory=list)
    # Of all supervised rows; a token outside the draft vocabulary is a miss.
    accuracy: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # that are supervised
    scored: list[int] = field(default_factory=list)  # of these, what `loss` is a mean over
    right_KT: Tensor | None = None  # the draft's arg-max is the stored token x_{t+2+k}
    counted_KT: Tensor | None = None  # the stored token is the target's own arg-max, so `right` can be judged


@dataclass
class Plan:
    """Which rows run at which step, and which are judged. What indexes tensors of the draft lies on its device."""

    valid_KT: Tensor  # bool: supervised at step k; on the CPU, as the next
    scored: list[Tensor]  # rows that the loss of step k is a mean over
    scored_at: list[Tensor]  # where they stand in `active`
    active: list[Tensor]  # rows that run at step k, ascending; each a subset of the one before
    spans: list[list[tuple[int, int, int, int]]]  # of step k, per document that has rows: ends in `active`, and of keys
    position_T: Tensor

    @staticmethod
    def make(
        supervised_T: Tensor,
        starts: list[int],
        steps: int,
        left_out_T: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> "Plan":
        """`left_out_T` is True at positions that teach nobody, though they are supervised."""
        T = len(supervised_T)
        lengths = torch.tensor(starts).diff()
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        position = torch.arange(T) - torch.tensor(starts)[document]
        valid = torch.zeros(steps, T, dtype=torch.bool)
        teaches = torch.ones(T, dtype=torch.bool) if left_out_T is None else ~left_out_T
        scored = []
        for k in range(steps):
            shift = 2 + k
            if shift < T:
                valid[k, : T - shift] = supervised_T[shift:] & (document[shift:] == document[: T - shift])
            rows = valid[k].nonzero().squeeze(1)
            scored.append(rows[teaches[rows + 1 + k]])
        needed = valid.flip(0).cumsum(0).flip(0) > 0
        active = [needed[k].nonzero().squeeze(1) for k in range(steps)]
        return Plan(
            valid,
            scored,
            [torch.searchsorted(*pair).to(device) for pair in zip(active, scored, strict=True)],
            [rows.to(device) for rows in active],
            [_spans(rows, document[rows], starts) for rows in active],
            position.to(device),
        )


def _spans(rows: Tensor, document_R: Tensor, starts: list[int]) -> list[tuple[int, int, int, int]]:
    counts = torch.bincount(document_R, minlength=len(starts) - 1).tolist()
    spans, a = [], 0
    for d, n in enumerate(counts):
        if n:
            spans.append((a, a + n, starts[d], int(rows[a + n - 1]) + 1))
        a += n
    return spans


class UnrollAttention(torch.autograd.Function):
    """One causal block over the true features plus one diagonal per later step, merged exactly.

    Each document's block is computed apart (attention.py), which also returns its log-sum-exp; the diagonals are folded
    in by hand. That log-sum-exp carries no gradient, so autograd through a merge of it would be silently wrong: instead
    the block's backward gets the MERGED output and the MERGED log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any, q_RhE: Tensor, k_TGE: Tensor, v_TGE: Tensor, plan: Plan, step: int, *diagonals: Tensor
    ) -> Tensor:
        """`diagonals` are the keys of steps 1..step, then the values, each `[rows of that step, G, E]`."""
        scale = q_RhE.shape[-1] ** -0.5
        out = torch.empty_like(q_RhE)
        lse = torch.empty(q_RhE.shape[:2], dtype=torch.float32, device=q_RhE.device)
        block, rows = way(q_RhE.device).forward, plan.active[step]
        for a, b, first, end in plan.spans[step]:
            out[a:b], lse[a:b] = block(q_RhE[a:b], k_TGE[first:end], v_TGE[first:end], rows[a:b] - first)
        keys, values = diagonals[:step], diagonals[step:]
        if step:
            scores = torch.stack([_own(q_RhE, key[_inside(plan, j + 1, step)], scale) for j, key in enumerate(keys)])
            merged = torch.logsumexp(torch.cat((lse[None], scores)), dim=0)
            out *= (lse - merged).exp().to(out.dtype)[..., None]
            for j, value in enumerate(values):
                weight = (scores[j] - merged).exp().to(out.dtype)[..., None]
                out += weight * heads(value[_inside(plan, j + 1, step)], q_RhE.shape[1])
            lse = merged
        ctx.plan, ctx.step = plan, step
        ctx.save_for_backward(q_RhE, k_TGE, v_TGE, out, lse, *diagonals)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q_RhE, k_TGE, v_TGE, out, lse, *diagonals = ctx.saved_tensors
        plan, step = ctx.plan, ctx.step
        grad = grad_outputs[0].contiguous()
        scale, G = q_RhE.shape[-1] ** -0.5, k_TGE.shape[1]
        dq, dk, dv = torch.zeros_like(q_RhE), torch.zeros_like(k_TGE), torch.zeros_like(v_TGE)
        block, rows = way(q_RhE.device).backward, plan.active[step]
        for a, b, first, end in plan.spans[step]:
            keys, values = k_TGE[first:end], v_TGE[first:end]
            dq[a:b], dk[first:end], dv[first:end] = block(
                grad[a:b], q_RhE[a:b], keys, values, rows[a:b] - first, out[a:b], lse[a:b]
            )
        diagonal_grads: list[Tensor] = [torch.zeros_like(x) for x in diagonals]
        common = (grad * out).sum(-1)
        for j in range(step):
            inside = _inside(plan, j + 1, step)
            key, value = (heads(diagonals[i][inside], q_RhE.shape[1]) for i in (j, step + j))
            weight = ((q_RhE * key).sum(-1).float() * scale - lse).exp().to(grad.dtype)
            ds = (weight * ((grad * value).sum(-1) - common) * scale)[..., None]
            dq += ds * key
            diagonal_grads[j][inside] = ungroup(ds * q_RhE, G)
            diagonal_grads[step + j][inside] = ungroup(weight[..., None] * grad, G)
        return dq, dk, dv, None, None, *diagonal_grads


def _inside(plan: Plan, earlier: int, step: int) -> Tensor:
    """Where the rows of `step` stand among the rows of an `earlier` step."""
    return torch.searchsorted(plan.active[earlier], plan.active[step])


def _own(q_RhE: Tensor, k_RGE: Tensor, scale: float) -> Tensor:
    return (q_RhE * heads(k_RGE, q_RhE.shape[1])).sum(-1).float() * scale


def unroll(
    draft: Draft,
    pack: Pack,
    head_rows_WD: Tensor,
    steps: int,
    decay: float,
    *,
    skip_outside: bool = True,
    loss: str = "ce",
    feature_loss: bool = False,
    checkpoint_activations: bool = False,
    update_rows: Sequence[int] | None = None,
) -> tuple[Tensor, StepStats]:
    """Unroll the draft `steps` times over a pack.

    `head_rows_WD` are the target's head rows of the draft vocabulary. Returns the loss, the sum over k of `decay**k`
    times the mean loss of step k, and what was measured on the way. The loss of a row is `ce`, the soft cross-entropy
    against the teacher renormalised over the draft vocabulary, or `lk`, minus the log of the probability that the
    target accepts (head_loss.py). With `skip_outside`, rows whose teacher arg-max the draft cannot propose are left
    out of it (the reference's convention); they always count as misses. Where an update has several packs,
    `update_rows` are the `rows_in_loss` of all of them: the losses of its packs then add up to the update's loss.

    `feature_loss` is EAGLE's loss before EAGLE-3: 0.1 of the above, and the smooth L1 distance of the feature that is
    fed back to the next true one; only for a draft that reads the target's final state. `checkpoint_activations` keeps
    a step's inputs and outputs alone and computes the rest again in the backward; in float32 that changes no bit.
    """
    assert draft.config.top or not feature_loss
    plan = _plan(pack, steps, skip_outside)
    device = pack.embeds_TH.device
    hiddens: list[Tensor] = []
    distance = torch.zeros((), device=device)  # of features
    for k, (feature, hidden) in enumerate(roll(draft, pack, plan, checkpoint_activations=checkpoint_activations)):
        hiddens.append(hidden[plan.scored_at[k]])
        if feature_loss and bool(plan.valid_KT[k].any()):
            supervised = plan.valid_KT[k].nonzero().squeeze(1).to(device)
            true = pack.last_TD[supervised + 1 + k].float()
            found = feature[torch.searchsorted(plan.active[k], supervised)].float()
            distance = distance + decay**k * F.smooth_l1_loss(found, true)

    counts = [len(rows) for rows in plan.scored]
    of = counts if update_rows is None else update_rows
    shares = torch.cat([torch.full((n,), decay**k / max(of[k], 1)) for k, n in enumerate(counts)])
    probs_PW, teacher_T = _teacher(pack, plan, head_rows_WD, over_all=loss == "lk")
    teachers = torch.cat([teacher_T[rows + 1 + k] for k, rows in enumerate(plan.scored)])
    total, losses, best = HeadLoss.apply(
        torch.cat(hiddens), draft.lm_head.weight, probs_PW, teachers.to(device), shares.to(device), loss,
        torch.is_grad_enabled(),
    )  # fmt: skip
    if feature_loss:
        total = distance + 0.1 * total
    return total, _measure(draft, pack, plan, losses, best)


def roll(
    draft: Draft, pack: Pack, plan: Plan, *, checkpoint_activations: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of every step in turn, for its active rows: the feature that is fed back, and what `lm_head` reads, `[R, H]`."""
    g_TH = draft.fuse(pack.aux_TA)
    # The last row of a document has no next token; its key is never attended by a supervised row.
    x_T, _ = draft.midlayer.inputs(torch.cat((pack.embeds_TH[1:], pack.embeds_TH[-1:])), g_TH)
    k_TGE, v_TGE = draft.midlayer.self_attn.keys_values(x_T, *draft.rotary(plan.position_T, x_T.dtype))
    k_TGE = k_TGE.to(v_TGE.dtype)  # under autocast the rotation and the head norms leave float32
    feature = g_TH[plan.active[0]]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for k in range(len(plan.active)):
        step = functools.partial(_step, draft, pack.embeds_TH, plan, k)
        if checkpoint_activations and torch.is_grad_enabled():
            step = functools.partial(checkpoint, step, use_reentrant=False, preserve_rng_state=False)
        feature, hidden, *own = step(feature, k_TGE, v_TGE, *keys, *values)
        if k > 0:
            keys.append(own[0])
            values.append(own[1])
        yield feature, hidden
        if k + 1 < len(plan.active):
            feature = feature[_inside(plan, k, k + 1)]


def rows_in_loss(pack: Pack, steps: int, *, skip_outside: bool = True) -> list[int]:
    """Per step, how many rows of this pack the loss is a mean over."""
    return [len(rows) for rows in _plan(pack, steps, skip_outside).scored]


def _plan(pack: Pack, steps: int, skip_outside: bool) -> Plan:
    left_out_T = pack.outside_T if skip_outside else None
    return Plan.make(pack.supervised_T, pack.starts, steps, left_out_T, pack.embeds_TH.device)


def _step(
    draft: Draft,
    embeds_TH: Tensor,
    plan: Plan,
    step: int,
    feature_RH: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    *diagonals: Tensor,
) -> tuple[Tensor, ...]:
    """One step of its active rows: (feature, hidden), and from step 1 on the rows' own key and value.

    `diagonals`: keys, then values, of the steps from 1 to the one before.
    """
    attention = draft.midlayer.self_attn
    rows = plan.active[step]
    x, residual = draft.midlayer.inputs(embeds_TH[rows + 1 + step], feature_RH)
    cos, sin = draft.rotary(plan.position_T[rows] + step, x.dtype)
    own: tuple[Tensor, ...] = ()
    if step == 0:
        q = attention.queries(x, cos, sin)
    else:
        q, key, value = attention.queries_keys_values(x, cos, sin)
        own = (key.to(value.dtype), value)
        diagonals = (*diagonals[: step - 1], own[0], *diagonals[step - 1 :], value)
    attended = UnrollAttention.apply(q.to(v_TGE.dtype), k_TGE, v_TGE, plan, step, *diagonals)
    return *draft.outputs(draft.midlayer.finish(residual, attended.flatten(1))), *own


def _teacher(pack: Pack, plan: Plan, head_rows_WD: Tensor, *, over_all: bool) -> tuple[Tensor, Tensor]:
    """The target's distributions over the draft vocabulary `[P, W]`, one per position that is used; and, on the CPU,
    where each is.

    Step k's teacher is step 0's shifted by k, so nothing here is computed twice. `over_all`: normalised over the full
    vocabulary.
    """
    T = len(pack.ids_T)
    used = torch.zeros(T + 1, dtype=torch.bool)
    for k in range(len(plan.active)):
        used[plan.valid_KT[k].nonzero().squeeze(1) + 1 + k] = True
    positions = used[:T].nonzero().squeeze(1)
    where = torch.full((T,), -1, dtype=torch.long)
    where[positions] = torch.arange(len(positions))
    positions = positions.to(pack.last_TD.device)
    logsumexp = pack.logsumexp_T[positions] if over_all else None
    return teacher_probs(pack.last_TD[positions], head_rows_WD, logsumexp, pack.head_form), where


def _measure(draft: Draft, pack: Pack, plan: Plan, losses_R: Tensor, best_R: Tensor) -> StepStats:
    """What the draft proposed, judged; rows that are not scored are misses."""
    counts = [len(rows) for rows in plan.scored]
    right, counted = torch.zeros_like(plan.valid_KT), torch.zeros_like(plan.valid_KT)
    stats = StepStats(right_KT=right, counted_KT=counted)
    losses, proposals = losses_R.cpu().split(counts), draft.vocab.target_ids_W[best_R].cpu().split(counts)
    for k, (row_losses, proposed) in enumerate(zip(losses, proposals, strict=True)):
        rows, valid = plan.scored[k], plan.valid_KT[k].nonzero().squeeze(1)
        stats.loss.append(float(row_losses.mean()) if counts[k] else 0.0)
        stats.rows.append(len(valid))
        stats.scored.append(counts[k])
        stats.accuracy.append(float((proposed == pack.argmax_T[rows + 1 + k]).sum()) / max(len(valid), 1))
        right[k, rows] = proposed == pack.ids_T[rows + 2 + k]
        counted[k, valid] = pack.argmax_T[valid + 1 + k] == pack.ids_T[valid + 2 + k]
    return stats
