"""Weights of 8 or 4 bits, with activations rounded to 8: what is stored, how it is made, and the arithmetic in PyTorch.

Each group of 32 inputs of an output has its own scale, and with 4 bits a shift: llama.cpp's Q8_0 and Q4_1, which a GGUF
of these is taken over from bit for bit. A product is the integer product of each group, which is exact, times both
scales, plus the shift times the sum of the group's activations; groups are added up in their order. The kernel does the
same (kernel_integers.h).

Shapes: M rows, O outputs, I inputs (padded to a multiple of 32), G = I / 32 groups.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aquiline.config import QUANTIZE

GROUP = 32
BITS = dict(zip(QUANTIZE, (8, 4), strict=True))  # of the projections of all layers
HEAD_BITS = 8  # in either
_LEAST = 1e-30  # activations below are zeros


@dataclass(frozen=True)
class Quantised:
    """A matrix `[O, inp]` as `scale * q`, or with 4 bits `scale * q + shift`."""

    q_OI: Tensor  # int8: -128 to 127, or 0 to 15
    scale_OG: Tensor  # float16
    shift_OG: Tensor | None  # float16: 4 bits
    inp: int

    @property
    def bits(self) -> int:
        return 8 if self.shift_OG is None else 4

    @staticmethod
    def of(weight_OI: Tensor, bits: int) -> "Quantised":
        """The nearest such matrix, as llama.cpp rounds: 8 bits from -127 to 127, 4 bits from the least to the most."""
        inp = weight_OI.shape[1]
        groups_OGI = F.pad(weight_OI.detach().float(), (0, -inp % GROUP)).unflatten(1, (-1, GROUP))
        if bits == 8:
            scale_OG, shift_OG, low, high = groups_OGI.abs().amax(-1) / 127, None, -127, 127
        else:
            least, most = groups_OGI.aminmax(dim=-1)
            scale_OG, shift_OG, low, high = (most - least) / 15, least.half(), 0, 15
            groups_OGI = groups_OGI - least.half().float()[..., None]
        scale_OG = scale_OG.half()
        q_OGI = torch.nan_to_num(groups_OGI / scale_OG.float()[..., None], nan=0.0).round().clamp(low, high)
        return Quantised(q_OGI.flatten(1).to(torch.int8), scale_OG, shift_OG, inp)

    def over(self, change: Callable[..., Tensor], *others: "Quantised") -> "Quantised":
        """The same change, of the outputs' order and number, for all that there is."""
        all_of = (self, *others)
        shift_OG = None
        if self.shift_OG is not None:
            shift_OG = change(*(m.shift_OG for m in all_of))
        scale_OG = change(*(m.scale_OG for m in all_of))
        return Quantised(change(*(m.q_OI for m in all_of)), scale_OG, shift_OG, self.inp)

    def dequantised(self) -> Tensor:
        """`[O, inp]`, float32."""
        groups_OGI = self.q_OI.unflatten(1, (-1, GROUP)).float() * self.scale_OG.float()[..., None]
        if self.shift_OG is not None:
            groups_OGI += self.shift_OG.float()[..., None]
        return groups_OGI.flatten(1)[:, : self.inp]

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`[..., inp]` to float32 `[..., O]`."""
        a_MI, scale_MG = rounded(x.detach().flatten(0, -2))
        out_MO = x.new_zeros(len(a_MI), len(self.q_OI), dtype=torch.float32)
        for g, (a_MI_, q_OI_) in enumerate(zip(a_MI.split(GROUP, 1), self.q_OI.float().split(GROUP, 1), strict=True)):
            # Below 2^24, so exact in float32.
            out_MO += (a_MI_ @ q_OI_.T) * (self.scale_OG[:, g].float() * scale_MG[:, g, None])
            if self.shift_OG is not None:
                out_MO += self.shift_OG[:, g].float() * (scale_MG[:, g] * a_MI_.sum(1))[:, None]
        return (out_MO if bias is None else out_MO + bias.float()).unflatten(0, x.shape[:-1])


def rounded(x_MI: Tensor) -> tuple[Tensor, Tensor]:
    """Activations as whole numbers from -127 to 127 (float32, padded), and the scale `[M, G]` of each group."""
    groups_MGI = F.pad(x_MI.float(), (0, -x_MI.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    most_MG = groups_MGI.abs().amax(-1)
    inverse_MG = torch.where(most_MG < _LEAST, 0.0, torch.tensor(127.0) / most_MG)  # 127 / x is 127 * (1 / x) there
    scale_MG = torch.where(most_MG < _LEAST, 0.0, most_MG / 127)
    scale_MG = torch.where(most_MG.isfinite(), scale_MG, torch.nan)
    a_MGI = torch.nan_to_num((groups_MGI * inverse_MG[..., None]).round(), nan=0.0)
    return a_MGI.flatten(1), scale_MG


class QuantisedLinear(nn.Module):
    """A projection of such weights. They are no parameters: no state dict has them."""

    def __init__(self, matrix: Quantised | None, bias: Tensor | None) -> None:
        super().__init__()
        self.matrix, self.bias = matrix, bias

    def forward(self, x: Tensor) -> Tensor:
        assert self.matrix is not None, "it was packed"
        return self.matrix.linear(x, self.bias).to(x.dtype)
