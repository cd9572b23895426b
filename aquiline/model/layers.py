"""Norm, rotary positions, attention with an explicit mask and a cache, gated MLP: used by target and draft alike.

Shapes: B rows, N tokens of the pass, M tokens the mask speaks of (N, or earlier tree tokens + N), S cached slots,
H heads, G kv heads, E head width, D width.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aquiline.config import RopeConfig
from aquiline.model.backend import LayerWeights, Weights
from aquiline.model.kv_cache import KVCache
from aquiline.model.quantised import Quantised, QuantisedLinear


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, in float32 inside, rounded to the weight's dtype before it (as Transformers does)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and self.weight.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(self.weight.dtype)


def rope_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies `[E/2]` (float32) and the factor on cos and sin, for every supported rope type."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.rope_theta**exponent)
    if rope.rope_type == "default":
        return inv_freq, 1.0
    assert rope.factor is not None
    if rope.rope_type == "linear":
        return inv_freq / rope.factor, 1.0
    original = rope.original_max_position_embeddings or max_positions
    if rope.rope_type == "llama3":
        assert rope.low_freq_factor is not None
        assert rope.high_freq_factor is not None
        wavelength = 2 * math.pi / inv_freq
        smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = smooth.clamp(0, 1)  # 0: long waves, divided by factor; 1: short waves, kept
        return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq, 1.0
    return _yarn(rope, head_dim, original, inv_freq)


def _yarn(rope: RopeConfig, head_dim: int, original: int, inv_freq: Tensor) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp between interpolated and kept frequencies, and a factor on the attention."""
    assert rope.factor is not None

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low = max(math.floor(dimension(rope.beta_fast or 32)), 0)
    high = min(math.ceil(dimension(rope.beta_slow or 1)), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp), scale


class Rotary(nn.Module):
    """cos and sin for given positions. Computed per pass, so no table ends where a context does not."""

    inv_freq: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        inv_freq, self.scale = rope_frequencies(rope, head_dim, max_positions)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Rotary":
        """Moves with the model, but stays float32: rounded to bf16, frequencies are radians off at a few thousand."""
        self.inv_freq = self.inv_freq.to(fn(self.inv_freq.clone()).device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions `[...]` to cos and sin `[..., 1, E]` (the 1 is for the heads)."""
        angle = positions.unsqueeze(-1).float() * self.inv_freq.float()
        angle = torch.cat((angle, angle), dim=-1).unsqueeze(-2)
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to `x [..., heads, E]` (halves convention of Transformers)."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


@dataclass(frozen=True)
class Scoring:
    """How scores become weights, where that is not the softmax of `q k / sqrt(E)` alone."""

    scale: float | None = None  # None: E ** -0.5
    cap: float | None = None  # a score is cap * tanh(score / cap), before the mask (Gemma 2)
    sinks_H: Tensor | None = None  # one score more for each head, that takes weight and brings no value (gpt-oss)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Of queries that are scaled already."""
        scores = q @ k.transpose(-1, -2)
        return scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)


PLAIN = Scoring()


@dataclass
class Context:
    """What the tokens of a pass may attend to besides themselves, prepared once per pass for all layers.

    The biases are additive, 0 or -inf: of the pass's own tokens by its mask, of cached slots where a row is shorter
    than the longest. None means everything is visible.
    """

    past_keys_LBGSE: Tensor | None = None
    past_values_LBGSE: Tensor | None = None
    own_bias_BNM: Tensor | None = None
    past_bias_BNS: Tensor | None = None  # N may be 1: the same for all
    causal: bool = False  # no cache and no explicit mask: the fused causal kernel
    documents: list[int] | None = None  # first token of each packed document, and the end: each sees only itself
    parts: "list[Context] | None" = None  # what each document's tokens may see; None: what stands before them
    silu = staticmethod(F.silu)  # what the MLPs of the pass use

    @staticmethod
    def make(
        mask_BNM: Tensor | None,
        num_tokens: int,
        cache: KVCache | None,
        slots: list[int] | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "Context":
        """`mask_BNM` is True where token n may see own token m; None is causal. A row's kept tokens are visible."""
        lengths = [cache.lengths[s] for s in slots] if cache is not None and slots is not None else [0]
        longest = max(lengths)
        if longest == 0 and mask_BNM is None:
            return Context(causal=True)
        if mask_BNM is None:
            mask_BNM = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
        context = Context()
        if mask_BNM.shape[1:] != (1, 1):
            context.own_bias_BNM = bias(mask_BNM, dtype)
        if longest > 0:
            assert cache is not None
            assert slots is not None
            context.past_keys_LBGSE, context.past_values_LBGSE = cache.read(slots)
            if min(lengths) < longest:
                there_BS = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
                context.past_bias_BNS = bias(there_BS[:, None], dtype)
        return context

    def attend(self, layer: int, q_BNHE: Tensor, k_BGME: Tensor, v_BGME: Tensor, how: Scoring = PLAIN) -> Tensor:
        """Attention output `[B, N, H*E]` of one layer (E that of the values, where they are of another width).

        Cached and own keys are multiplied apart and only the scores are joined, so neither is the cache copied nor
        are the kv heads expanded.
        """
        B, N, H, E = q_BNHE.shape
        G = k_BGME.shape[1]
        if self.documents is not None:
            return self._attend_documents(self.documents, q_BNHE, k_BGME, v_BGME, how)
        if self.causal and how.cap is None and how.sinks_H is None:
            out = F.scaled_dot_product_attention(
                q_BNHE.transpose(1, 2), k_BGME, v_BGME, is_causal=True, enable_gqa=H != G, scale=how.scale
            )
            return out.transpose(1, 2).reshape(B, N, -1)
        own_bias_BNM = self.own_bias_BNM
        if self.causal and N > 1:
            own_bias_BNM = bias(torch.ones(1, N, N, dtype=torch.bool, device=q_BNHE.device).tril(), q_BNHE.dtype)
        # Query heads of one kv head are neighbours: [B, N, G, H/G, E] -> [B, G, H/G * N, E].
        q = (q_BNHE * (E**-0.5 if how.scale is None else how.scale)).view(B, N, G, H // G, E)
        q = q.permute(0, 2, 3, 1, 4).reshape(B, G, -1, E)
        scores = how.scores(q, k_BGME)
        if own_bias_BNM is not None:
            scores = (scores.view(B, G, H // G, N, -1) + own_bias_BNM[:, None, None]).view_as(scores)
        past = 0
        if self.past_keys_LBGSE is not None:
            past_keys = self.past_keys_LBGSE[layer]
            past = past_keys.shape[2]
            past_scores = how.scores(q, past_keys)
            if self.past_bias_BNS is not None:
                hidden = self.past_bias_BNS[:, None, None]
                past_scores = (past_scores.view(B, G, H // G, N, past) + hidden).view_as(past_scores)
            scores = torch.cat((past_scores, scores), dim=-1)
        if how.sinks_H is not None:
            sinks = how.sinks_H.to(scores.dtype).view(1, G, H // G, 1).expand(B, -1, -1, N)
            scores = torch.cat((scores, sinks.reshape(B, G, -1, 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v_BGME.dtype)
        out = weights[..., past : past + k_BGME.shape[2]] @ v_BGME
        if self.past_values_LBGSE is not None:
            out = out + weights[..., :past] @ self.past_values_LBGSE[layer]
        return out.view(B, G, H // G, N, -1).permute(0, 3, 1, 2, 4).reshape(B, N, -1)

    def _attend_documents(
        self, starts: list[int], q_BNHE: Tensor, k_BGNE: Tensor, v_BGNE: Tensor, how: Scoring
    ) -> Tensor:
        """Attention within each document of one packed row; `is_causal` over the whole row would leak."""
        outs = []
        for i, (a, b) in enumerate(itertools.pairwise(starts)):
            part = Context(causal=True) if self.parts is None else self.parts[i]
            outs.append(part.attend(0, q_BNHE[:, a:b], k_BGNE[:, :, a:b], v_BGNE[:, :, a:b], how))
        return torch.cat(outs, dim=1)


def bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a token is visible, -inf where it is not; to be added to scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


class Projections(nn.Module):
    """q, k, v and o of one attention block, with optional biases and per-head q/k norms."""

    def __init__(
        self,
        in_width: int,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
        eps: float,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(in_width, heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(in_width, kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(in_width, kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=o_bias)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[..., D]` to rotated queries `[..., H, E]`."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        return rotate(q if self.q_norm is None else self.q_norm(q), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """`[..., D]` to rotated keys and values `[..., G, E]`."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(k if self.k_norm is None else self.k_norm(k), cos, sin), v

    def queries_keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All three at once."""
        return (self.queries(x, cos, sin), *self.keys_values(x, cos, sin))


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, width: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor, silu: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


def pack(
    attention: Projections, mlp: GatedMLP, input_norm: RMSNorm, post_norm: RMSNorm, feature_norm: RMSNorm | None = None
) -> LayerWeights:
    """One block's weights packed for the kernel; their own copies are freed."""
    a = attention
    qkv = (a.q_proj, a.k_proj, a.v_proj)

    def stacked(*parts: Any) -> Weights:
        return Weights.stacked([weight_of(m) for m in parts], [m.bias for m in parts], input_norm.weight.dtype)

    packed = LayerWeights(
        input_norm.weight,
        post_norm.weight,
        stacked(*qkv),
        stacked(a.o_proj),
        Weights.alternating(
            weight_of(mlp.gate_proj),
            weight_of(mlp.up_proj),
            [mlp.gate_proj.bias, mlp.up_proj.bias],
            input_norm.weight.dtype,
        ),
        stacked(mlp.down_proj),
        None if a.q_norm is None else a.q_norm.weight,
        None if a.k_norm is None else a.k_norm.weight,
        None if feature_norm is None else feature_norm.weight,
    )
    for m in (*qkv, a.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        free(m)
    return packed


def weight_of(linear: nn.Module) -> Any:
    """A Tensor or a Quantised."""
    return linear.matrix if isinstance(linear, QuantisedLinear) else linear.weight


def free(linear: nn.Module) -> None:
    """Give back a weight of which a packed copy is kept."""
    if isinstance(linear, QuantisedLinear):
        linear.matrix = None
    else:
        assert isinstance(linear, nn.Linear)
        linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)


def quantise(module: nn.Module, matrix: Callable[[str, Tensor], Quantised]) -> None:
    """Its projections, and those of its parts, become quantised ones. `matrix`: of a projection's name and weight."""
    for name, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear):
            parent, _, last = name.rpartition(".")
            bias = None if linear.bias is None else linear.bias.detach()
            setattr(module.get_submodule(parent), last, QuantisedLinear(matrix(name, linear.weight.detach()), bias))
