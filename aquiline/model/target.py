"""One Llama-family forward for every supported target; the families differ only by the switches in `TargetConfig`.

A pass is a pure function of (ids, positions, mask, cache): it reads the cache and returns the keys and values of its
own tokens, the final state `last` that the head reads, and `aux`, the captured states the draft reads.

Shapes: B rows, N tokens of the pass, D width, A = captured layers * D, L layers, G kv heads, E head width,
V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aquiline.config import TargetConfig, check_capture_after
from aquiline.model.backend import Decoder, Weights, usable
from aquiline.model.kv_cache import KVCache
from aquiline.model.layers import Context, GatedMLP, Projections, RMSNorm, Rotary, free, pack


@dataclass
class PassOutput:
    """What one target pass returns; nothing of it is in the cache yet."""

    last_BND: Tensor  # after the final norm
    aux_BNA: Tensor
    keys_LBGNE: Tensor
    values_LBGNE: Tensor


class TargetLayer(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Projections(
            c.hidden_size, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim,
            qkv_bias=c.qkv_bias, o_bias=c.o_bias, qk_norm=c.qk_norm, eps=c.norm_eps,
        )  # fmt: skip
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.mlp_bias)


class TargetBody(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TargetLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Target(nn.Module):
    """The frozen model whose output must not change. Parameter names are the Hugging Face ones."""

    def __init__(self, config: TargetConfig, capture_after: tuple[int, ...]) -> None:
        """`capture_after`: 0-based ids of the captured layers, the state AFTER the block; UserError if bad."""
        super().__init__()
        check_capture_after(capture_after, config.num_layers)
        self.config = config
        self.capture_after = capture_after
        self.model = TargetBody(config)
        self.lm_head = None if config.tied_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_positions)
        self._head: Weights | None = None  # set by `pack`, as the next
        self._decoder: Decoder | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed_tokens(ids)

    @property
    def head_weight(self) -> Tensor:
        """The head's rows `[V, D]`; not available of an untied head once packed."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        c = self.config
        return KVCache(c.num_layers, num_slots, capacity, c.num_kv_heads, c.head_dim, self.dtype, self.device)

    def forward(
        self,
        ids_BN: Tensor,
        positions_BN: Tensor,
        mask_BNN: Tensor | None = None,
        cache: KVCache | None = None,
        slots: list[int] | None = None,
        documents: list[int] | None = None,
    ) -> PassOutput:
        """One pass. `mask_BNN` is True where token n may see token m of the same pass (None: causal); every kept token
        of a row's slot is visible. Rows shorter than N are padded by the caller; a padded token must see itself.
        `documents` (first token of each, and the end) packs several into one row of a causal pass without a cache.
        """
        if self._decoder is not None:
            assert documents is None, "packed documents are for training"
            cos, sin = self.rotary(positions_BN, torch.float32)
            embeds = self.embed(ids_BN)
            out = self._decoder(embeds, cos, sin, mask_BNN, cache, slots, capture_after=self.capture_after)
            return PassOutput(out.last_BND, out.aux_BNA, out.keys_LBGNE, out.values_LBGNE)
        context = Context.make(mask_BNN, ids_BN.shape[1], cache, slots, ids_BN.device, self.dtype)
        assert documents is None or context.causal
        context.documents = documents
        x = self.embed(ids_BN)
        cos, sin = self.rotary(positions_BN, x.dtype)
        captured, all_keys, all_values = [], [], []
        for i, layer in enumerate(self.model.layers):
            assert isinstance(layer, TargetLayer)
            q, k, v = layer.self_attn.queries_keys_values(layer.input_layernorm(x), cos, sin)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            x = x + layer.self_attn.output(context.attend(i, q, k, v))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if i in self.capture_after:
                captured.append(x)
            all_keys.append(k)
            all_values.append(v)
        aux = torch.cat(captured, dim=-1)
        return PassOutput(self.model.norm(x), aux, torch.stack(all_keys), torch.stack(all_values))

    def logits(self, last: Tensor) -> Tensor:
        """Float32 logits `[..., V]` of the rows given, computed in float32: bf16 logits near 16 stand 0.125 apart, and
        what ties there is decided by rounding alone.
        """
        if self._head is not None:
            return self._head(last)
        return nn.functional.linear(last.float(), self.head_weight.float())

    def pack(self) -> "Target":
        """Prepare for decoding where the kernel can run it: the weights are packed, the separate ones freed, and the
        state dict is gone. Elsewhere nothing changes.
        """
        if not usable(self.dtype, self.device):
            return self
        c = self.config
        self._head = Weights.stacked([self.head_weight])
        if self.lm_head is not None:  # a tied one is the embedding, which must stay readable row by row
            free(self.lm_head)
        layers = [layer for layer in self.model.layers if isinstance(layer, TargetLayer)]
        self._decoder = Decoder(
            [pack(x.self_attn, x.mlp, x.input_layernorm, x.post_attention_layernorm) for x in layers],
            self.model.norm.weight,
            heads=c.num_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim, inner=c.intermediate_size, eps=c.norm_eps,
        )  # fmt: skip
        return self
