"""Optimisers and schedule: Muon for matrices, AdamW for the rest."""

import math
from typing import Any

import torch
from torch import Tensor

from aquiline.config import TrainConfig
from aquiline.model.backend import fast_bf16
from aquiline.model.draft import Draft


class Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` with its Newton-Schulz iteration in float32.

    PyTorch's runs in bf16; on a CPU without bf16 arithmetic that costs more than the rest of the update.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                rate = group["lr"] * 0.2 * math.sqrt(max(p.shape))  # adjust_lr_fn="match_rms_adamw"
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(_orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"]), alpha=-rate)


def _orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iteration towards the orthogonal factor (as in `torch.optim.Muon`), in the matrix's own dtype."""
    a, b, c = coefficients
    x = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if matrix.shape[0] > matrix.shape[1] else x


def make_optimizers(draft: Draft, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for matrices and AdamW for the rest (`lm_head`, norms), or AdamW for everything, at its own rate."""
    trained = {n: p for n, p in draft.named_parameters() if p.requires_grad}
    decay, betas = config.weight_decay, (0.9, 0.95)
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(trained.values(), lr=config.adamw_learning_rate, betas=betas, weight_decay=decay)]
    matrices = [p for n, p in trained.items() if p.ndim == 2 and not n.startswith(("lm_head", "embed_tokens"))]
    chosen = {id(p) for p in matrices}
    rest = [p for p in trained.values() if id(p) not in chosen]
    kind = torch.optim.Muon if fast_bf16(draft.norm.weight.device.type) else Float32Muon
    return [
        kind(
            matrices,
            lr=config.learning_rate,
            momentum=0.95,
            nesterov=True,
            weight_decay=decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=config.adamw_learning_rate, betas=betas, weight_decay=decay),
    ]


def schedule(step: int, total: int, config: TrainConfig) -> float:
    """Share of the learning rate at an update: linear warm-up, then a cosine down to `final_share`."""
    warmup = max(1, round(config.warmup_share * total))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
