"""The EAGLE-3 head: one decoder layer over (token embedding, feature). The same layer trains and decodes.

Row t pairs the embedding of x_{t+1} with the feature g_t and predicts x_{t+2}; its rotary position is t:

    tokens     x_0   x_1   x_2   x_3          g_t = fc(aux_t) where the target has been,
    features   g_0   g_1   g_2                      the draft's own output h at drafted nodes
                                                    (or g_t = the target's final state, no fc: config.TOP)
    row t      (x_1, g_0)  (x_2, g_1)  (x_3, g_2)
    predicts        x_2         x_3         x_4

Shapes: B rows, N tokens, H width of the draft, A width of aux, W draft vocabulary, G kv heads, E head width.
Source: EAGLE-3 (arXiv 2503.01840), section 3.1; the switches are those of the engines that load such heads.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.config import DraftConfig
from aquiline.model.backend import Decoder, Grown, Weights, usable
from aquiline.model.kv_cache import KVCache
from aquiline.model.layers import Context, GatedMLP, Projections, RMSNorm, Rotary, free, pack, quantise, weight_of
from aquiline.model.quantised import BITS, HEAD_BITS, Quantised
from aquiline.model.vocab import VocabMap


@dataclass
class DraftOutput:
    """What one draft pass returns; nothing of it is in the cache yet."""

    feature_BNH: Tensor  # fed back at the next step
    hidden_BNH: Tensor  # what lm_head reads
    keys_LBGNE: Tensor  # L = 1
    values_LBGNE: Tensor


class DraftLayer(nn.Module):
    """The only layer: attention reads embedding and feature side by side, the residual stream is the feature."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        c = config
        self.norm_before_residual = c.norm_before_residual
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Projections(
            2 * c.hidden_size, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim,
            qkv_bias=c.attention_bias, o_bias=False, qk_norm=c.qk_norm, eps=c.norm_eps,
        )  # fmt: skip
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)

    def inputs(self, embeds: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads `[..., 2H]`, embedding half first, and the residual stream `[..., H]`."""
        normed = self.hidden_norm(g)
        return torch.cat((self.input_layernorm(embeds), normed), dim=-1), normed if self.norm_before_residual else g

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """From the attention's output to the layer's output h."""
        h = residual + self.self_attn.o_proj(attended)
        return h + self.mlp(self.post_attention_layernorm(h))


class Draft(nn.Module):
    """Proposes tokens from the target's captured states. `vocab` says which target id each draft id stands for."""

    def __init__(self, config: DraftConfig, vocab: VocabMap) -> None:
        super().__init__()
        assert vocab.draft_vocab_size == config.draft_vocab_size
        assert vocab.vocab_size == config.vocab_size
        c = config
        self.config = config
        self.vocab = vocab
        self.input_norm = RMSNorm(c.aux_width, c.norm_eps) if c.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(c.target_hidden_size, c.norm_eps) for _ in c.capture_after) if c.fc_norm else None
        )
        self.fc = None if c.top else nn.Linear(c.aux_width, c.hidden_size, bias=False)
        self.midlayer = DraftLayer(c)
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size) if c.own_embedding else None
        self.rotary = Rotary(c.rope, c.head_dim, c.max_positions)
        self._fc: Weights | None = None  # set by `pack`, as the next two
        self._head: Weights | None = None
        self._decoder: Decoder | None = None
        self.quantised: str | None = None  # how, set by `quantise`

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Draft":
        settled = self._decoder is not None or self.quantised is not None
        assert not settled, "a packed or quantised draft stays where it is, and in its dtype"
        super()._apply(fn, recurse)
        self.vocab = self.vocab.to(self.norm.weight.device)  # no buffer: files hold it as offsets
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def new_cache(self, num_slots: int, capacity: int, tokens: int | None = None) -> KVCache:
        c, device = self.config, self.norm.weight.device
        return KVCache(1, num_slots, capacity, c.num_kv_heads, c.head_dim, self.dtype, device, tokens)

    def embed(self, ids: Tensor, target_embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Token embeddings `[..., H]`: the draft's own where it has them, else the target's."""
        rows = target_embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)
        return rows.to(self.dtype)

    def fuse(self, aux: Tensor) -> Tensor:
        """Captured states `[..., A]`, low layer first, to the feature g `[..., H]` of real positions."""
        if not torch.is_autocast_enabled(aux.device.type):  # else fc reads bf16, and a copy in float32 is for nothing
            aux = aux.to(self.dtype)
        if self.fc is None:
            return aux
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux) if self._fc is None else self._fc(aux).to(self.dtype)

    def outputs(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output h to (the feature fed back, what `lm_head` reads)."""
        normed = self.norm(h)
        return (normed if self.config.norm_output else h), normed

    def forward(
        self,
        embeds_BNH: Tensor,
        g_BNH: Tensor,
        positions_BN: Tensor,
        mask_BNM: Tensor | None = None,
        cache: KVCache | None = None,
        slots: list[int] | None = None,
        tree_keys_values: tuple[Tensor, Tensor] | None = None,
    ) -> DraftOutput:
        """One pass. `tree_keys_values` `[1, B, G, M-N, E]` are the keys and values of nodes drafted earlier in this
        cycle; they are never in the cache, and `mask_BNM` speaks of them first, then of the pass's own tokens.
        """
        if self._decoder is not None:
            out = self._decoder(
                g_BNH, positions_BN, mask_BNM, cache, slots, embeds_BND=embeds_BNH, earlier_LBGOE=tree_keys_values
            )
            feature = out.last_BND if self.config.norm_output else out.feature_BND
            return DraftOutput(feature, out.last_BND, out.keys_LBGNE, out.values_LBGNE)
        context = Context.make(mask_BNM, embeds_BNH.shape[1], cache, slots, embeds_BNH.device, self.dtype)
        x, residual = self.midlayer.inputs(embeds_BNH, g_BNH)
        cos, sin = self.rotary(positions_BN, x.dtype)
        q, k, v = self.midlayer.self_attn.queries_keys_values(x, cos, sin)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        seen_k, seen_v = k, v
        if tree_keys_values is not None:
            seen_k = torch.cat((tree_keys_values[0][0], k), dim=2)
            seen_v = torch.cat((tree_keys_values[1][0], v), dim=2)
        h = self.midlayer.finish(residual, context.attend(0, q, seen_k, seen_v))
        feature, hidden = self.outputs(h)
        return DraftOutput(feature, hidden, k[None], v[None])

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits `[..., W]` over the draft vocabulary."""
        return (self.lm_head(hidden) if self._head is None else self._head(hidden)).float()

    def top(self, hidden: Tensor, count: int, tilt: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The most likely draft ids: float32 log-probabilities, descending, and the ids, both `[..., count]`; of
        logits * tilt[0] + tilt[1] where a `tilt` is given, both of which broadcast to the logits `[..., W]`.
        """
        if tilt is not None:
            return torch.log_softmax(self.logits(hidden) * tilt[0] + tilt[1], dim=-1).topk(count)
        if self._head is not None:
            return self._head.top(hidden, count)
        return torch.log_softmax(self.logits(hidden), dim=-1).topk(count)

    def grower(self, embedding_VH: Tensor | None) -> Callable[..., Grown] | None:
        """`Decoder.grow` with all that belongs to this head; None unless the kernel has the whole head, and the
        embedding is one that it reads.
        """
        if self._decoder is None or self._fc is None or self._head is None or embedding_VH is None:
            return None
        if self.input_norm is not None or self.fc_norm is not None or embedding_VH.dtype != self.dtype:
            return None
        return functools.partial(
            self._decoder.grow, self._fc, self._head, embedding_VH, self.vocab.target_ids_W, self.config.norm_output
        )

    def quantise(self, how: str) -> "Draft":
        """Round the weights to 8 or 4 bits (`how`, a name of BITS; `lm_head` to 8), and what they read to 8.

        The target has the last word on the text; how much is accepted may change a little.
        """
        assert self._decoder is None
        assert self.quantised is None
        quantise(self, lambda name, weight: Quantised.of(weight, HEAD_BITS if name == "lm_head" else BITS[how]))
        self.quantised = how
        return self

    def pack(self) -> "Draft":
        """Prepare for decoding where the kernel can run it: the weights are packed, the separate ones freed, and the
        state dict is gone. Elsewhere nothing changes.
        """
        if self._decoder is not None or not usable(self.dtype, self.norm.weight.device):
            return self
        c, x = self.config, self.midlayer
        self._head = Weights.stacked([weight_of(self.lm_head)], dtype=self.dtype)
        free(self.lm_head)
        if self.fc is not None:
            self._fc = Weights.stacked([weight_of(self.fc)], dtype=self.dtype)
            free(self.fc)
        self._decoder = Decoder(
            [pack(x.self_attn, x.mlp, x.input_layernorm, x.post_attention_layernorm, x.hidden_norm)],
            self.norm.weight,
            heads=c.num_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim, inner=c.intermediate_size, eps=c.norm_eps,
            frequencies=self.rotary.inv_freq, rotary_scale=self.rotary.scale,
            normed_residual=c.norm_before_residual,
        )  # fmt: skip
        return self
