"""How a projection is executed: plain PyTorch, or weights packed once for the CPU's matrix kernels. One door.

Packing uses operators that PyTorch keeps private, so they are tried once per dtype against `F.linear` on this very
machine and used only when they exist and agree; otherwise everything runs through plain PyTorch, only slower.
"""

import functools
import os

import torch
from torch import Tensor
from torch.nn import functional as F

_PACK_HINT = 16  # rows the packed layout is chosen for; measured equal for 1 to 64


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's packed linear exists for `dtype` and agrees with `F.linear`."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(48, 32, generator=generator).to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_HINT)
        for rows in (1, 3, 40):
            x = torch.randn(rows, 32, generator=generator).to(dtype)
            got = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
            if not torch.allclose(
                got.float(), F.linear(x, weight).float(), rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-4
            ):
                return False
    except (AttributeError, RuntimeError, TypeError):  # another PyTorch, or a CPU without the kernels
        return False
    return True


@functools.cache
def fast_bf16(device_type: str) -> bool:
    """Whether bf16 arithmetic is native on the device, so that bf16 is no slower than float32."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu" or "ONEDNN_MAX_CPU_ISA" in os.environ:  # told to do without the newer units
        return False
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            words = {word for line in f if line.startswith(("flags", "Features")) for word in line.split()}
    except OSError:  # not Linux: not known
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})  # the last one on 64-bit Arm


class PackedLinear:
    """One or more weights `[out_i, in]` that read the same input, stacked, as one projection.

    Holds only the packed copy; the caller may free the originals.
    """

    def __init__(self, weights: list[Tensor], biases: list[Tensor | None]) -> None:
        weight = torch.cat([w.detach() for w in weights]) if len(weights) > 1 else weights[0].detach()
        self.out_features, self.in_features = weight.shape
        self.bias = None
        if any(b is not None for b in biases):
            parts = [
                torch.zeros(len(w), dtype=w.dtype, device=w.device) if b is None else b.detach()
                for w, b in zip(weights, biases, strict=True)
            ]
            self.bias = torch.cat(parts)
        self.packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_HINT) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        flat = x.reshape(-1, self.in_features)
        out = torch.ops.mkldnn._linear_pointwise(flat, self.weight, self.bias, "none", [], "")
        return out.view(*x.shape[:-1], self.out_features)
