"""What decoding and training ask of a target, and one Llama-family forward that answers; the families differ only by
the switches in `TargetConfig`. hf_target.py answers with any other model of Transformers.

A pass is a pure function of (ids, positions, mask, cache): it reads the cache and returns the keys and values of its
own tokens, the final state `last` that the head reads, and `aux`, the captured states the draft reads.

Shapes: B rows, N tokens of the pass, D width, A = captured layers * D, L layers, G kv heads, E head width,
V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.config import TOP, TargetConfig, UserError, check_capture_after, require
from aquiline.model.backend import Decoder, Weights, describe, fast_bf16, usable
from aquiline.model.exact import ROWS, Gathered, by_rows, padded
from aquiline.model.kv_cache import KVCache
from aquiline.model.layers import Context, GatedMLP, Projections, RMSNorm, Rotary, free, pack, quantise
from aquiline.model.quantised import BITS, HEAD_BITS, Quantised


@dataclass
class PassOutput:
    """What one target pass returns; nothing of it is in the cache yet."""

    last_BND: Tensor  # after the final norm
    aux_BNA: Tensor
    keys_LBGNE: Tensor
    values_LBGNE: Tensor


@dataclass(frozen=True)
class HeadForm:
    """What a target makes of its head's products before they are logits: bias, then scale, then soft cap."""

    bias_V: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None  # a logit is cap * tanh(logit / cap)

    def __call__(self, products: Tensor) -> Tensor:
        """Float32 `[..., V]` to logits."""
        z = products if self.bias_V is None else products + self.bias_V
        z = z if self.scale == 1.0 else z * self.scale
        return z if self.cap is None else self.cap * torch.tanh(z / self.cap)

    @property
    def plain(self) -> bool:
        return self.bias_V is None and self.scale == 1.0 and self.cap is None

    def of(self, ids: Tensor) -> "HeadForm":
        """For these rows of the head."""
        return self if self.bias_V is None else replace(self, bias_V=self.bias_V[ids])


PLAIN_HEAD = HeadForm()


class Target(nn.Module):
    """The frozen model whose output must not change."""

    def __init__(self, config: TargetConfig, capture_after: tuple[int, ...]) -> None:
        """`capture_after`: 0-based ids of the captured layers, the state AFTER the block; or TOP. UserError if bad."""
        super().__init__()
        check_capture_after(capture_after, config.num_layers)
        self.config = config
        self.capture_after = capture_after
        self._head: Weights | None = None  # set by `pack`
        self.quantised: str | None = None  # how, set by `quantise`
        self._quantised_head: Quantised | None = None

    @property
    def embedding(self) -> nn.Embedding:
        """The table `[V, D]` that the draft reads, too; what the model does to its rows afterwards is not in it."""
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        """The head's rows `[V, D]`; not available of an untied head once packed or quantised."""
        raise NotImplementedError

    def head_rows(self, ids: Tensor) -> Tensor:
        """A copy of these rows, float32, with the head's scale in them: a draft's `lm_head` has none."""
        return self.head_weight.detach()[ids].float() * self.head_form.scale

    @property
    def head_form(self) -> HeadForm:
        return PLAIN_HEAD

    @property
    def final_norm(self) -> nn.Module:
        """Between the last layer's states and the head."""
        raise NotImplementedError

    def drop_layers(self) -> None:
        """Leave embedding, final norm and head; a pass is an error from here on. Until they are moved, weights that
        were mapped from a file have taken no memory.
        """
        raise NotImplementedError

    @property
    def decoding(self) -> str:
        """How it is run, for a record."""
        raise NotImplementedError

    @property
    def ragged(self) -> bool:
        """Whether a pass computes no padding, if it is told what that is."""
        return False

    @property
    def exact(self) -> bool:
        """Whether a token's numbers are the same bits, whatever else is in its pass."""
        return False

    def make_exact(self) -> None:
        """Let passes be `exact` from here on, at their price; of a packed target. UserError where they cannot be."""
        raise UserError(
            f"a target of the family {self.config.family!r} is computed by Transformers, whose passes cannot be made "
            "exact: leave --exact out; in float32 passes differ least"
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the table, as the draft reads them."""
        return self.embedding(ids)

    def new_cache(self, num_slots: int, capacity: int, tokens: int | None = None) -> KVCache:
        c = self.config
        return KVCache(c.num_layers, num_slots, capacity, c.num_kv_heads, c.head_dim, self.dtype, self.device, tokens)

    def forward(
        self,
        ids_BN: Tensor,
        positions_BN: Tensor,
        mask_BNN: Tensor | None = None,
        cache: KVCache | None = None,
        slots: list[int] | None = None,
        documents: list[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> PassOutput:
        """One pass. `mask_BNN` is True where token n may see token m of the same pass (None: causal); every kept token
        of a row's slot is visible. Rows shorter than N are padded by the caller; a padded token must see itself.
        `counts` says how many tokens of each row are no padding: what comes out for the others is anything.
        `documents` (first token of each, and the end) packs several into one row of a causal pass without a cache.
        """
        raise NotImplementedError

    def logits(self, last: Tensor) -> Tensor:
        """Float32 logits `[..., V]` of the rows given, computed in float32: bf16 logits near 16 stand 0.125 apart, and
        what ties there is decided by rounding alone.
        """
        if self._head is not None:
            return self.head_form(self._head(last))
        if self._quantised_head is not None:
            return self.head_form(self._quantised_head.linear(last))
        return self.head_form(nn.functional.linear(last.float(), self.head_weight.float()))

    def best(self, last: Tensor) -> Tensor:
        """Arg-max id of each row's logits, of equals the lowest, int64 `[...]`; the logits are not kept."""
        if self._head is not None and self.head_form.plain:
            return self._head.argmax(last)
        return self.logits(last).argmax(-1)

    def best_and_logsumexp(self, last_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Arg-max id (int64) and log-sum-exp (float32) of each row's logits, without float32 logits where bf16 is fast.

        Weights and states are bf16 there, products are summed in float32, so a bf16 logit z is off by its own rounding
        alone: at most 2^-8 |z|. Whatever may be the maximum is computed again in float32, so the arg-max is the float32
        one. The log-sum-exp has bf16 logits elsewhere: as long as no |z| is above 300, it is off by less than
        2^-7 max|z| times the share of the probability that is not at the logits computed again; in practice by far
        less, as the roundings cancel.
        """
        plain = self._head is None and self._quantised_head is None and self.head_form.plain
        if plain and self.dtype == torch.bfloat16 and fast_bf16(self.device.type):
            logits = nn.functional.linear(last_RD, self.head_weight).float()
            highest = logits.amax(-1, keepdim=True)
            # Rounding keeps the order, so the best is among the highest; or a bf16 step (2^-7 at most) below them, if
            # the last bits of a float32 sum, which depend on its order, decided to which side it was rounded.
            rows, ids = (logits >= highest - highest.abs() * 2**-7).nonzero(as_tuple=True)
            if len(rows) <= 64 * len(last_RD):  # else nearly all logits are equal, and nothing is gained
                logits[rows, ids] = (last_RD[rows].float() * self.head_weight[ids].float()).sum(-1)
                return logits.argmax(-1), logits.logsumexp(-1)
        logits = self.logits(last_RD)
        return logits.argmax(-1), logits.logsumexp(-1)

    def quantise(self, how: str, stored: Mapping[str, Quantised] | None = None) -> "Target":
        """Round all layers' projections and the head to whole numbers, once, before `pack`; another target then, which
        has no state dict. Embedding, norms, attention and what is between the projections stay as they are. `how` is a
        name of BITS; `stored` are matrices, by the name of their weight, that are kept where they have as many bits.
        """
        raise UserError(f"a {self.config.family} target runs as Transformers has it, and is not quantised here")

    def pack(self) -> "Target":
        """Prepare for decoding where the kernel can run it: weights are packed, the separate ones freed, and the state
        dict is gone. Elsewhere nothing changes.
        """
        raise NotImplementedError


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

    def forward(
        self, x_BND: Tensor, cos: Tensor, sin: Tensor, context: Context | Gathered, number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The state after this layer, the pass's layer `number`, and the keys and values `[B, G, N, E]` of its tokens.

        All that reads this layer's weights in a pass is in here, so that a sharded layer can be gathered around it.
        """
        q, k, v = self.self_attn.queries_keys_values(self.input_layernorm(x_BND), cos, sin)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        x = x_BND + self.self_attn.o_proj(context.attend(number, q, k, v))
        return x + self.mlp(self.post_attention_layernorm(x), context.silu), k, v


class TargetBody(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TargetLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class LlamaTarget(Target):
    """A target of our own forward. Parameter names are the Hugging Face ones."""

    def __init__(self, config: TargetConfig, capture_after: tuple[int, ...]) -> None:
        super().__init__(config, capture_after)
        self.model = TargetBody(config)
        self.lm_head = None if config.tied_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_positions)
        self._decoder: Decoder | None = None  # set by `pack`
        self._exact = False  # set by `make_exact`

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "LlamaTarget":
        settled = self._decoder is not None or self.quantised is not None
        assert not settled, "a packed or quantised target stays where it is, and in its dtype"
        super()._apply(fn, recurse)
        return self

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.embed_tokens

    @property
    def head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def final_norm(self) -> nn.Module:
        return self.model.norm

    def drop_layers(self) -> None:
        self.model.layers = nn.ModuleList()

    @property
    def decoding(self) -> str:
        how = f"PyTorch, {ROWS} tokens at a time" if self._exact else describe(self.dtype, self.device)
        return how if self.quantised is None else f"{how}, {self.quantised}"

    @property
    def exact(self) -> bool:
        return self._exact or self._decoder is not None

    def make_exact(self) -> None:
        if not self.exact:
            self._exact = True
            _check_exact(self)

    def logits(self, last: Tensor) -> Tensor:
        if not self._exact:
            return super().logits(last)
        if self._quantised_head is not None:
            return self._quantised_head.linear(last)  # its products are exact
        weight = self.head_weight.float()
        return by_rows(lambda x: nn.functional.linear(x.float(), weight), last)

    @property
    def ragged(self) -> bool:
        return self._decoder is not None

    def forward(
        self,
        ids_BN: Tensor,
        positions_BN: Tensor,
        mask_BNN: Tensor | None = None,
        cache: KVCache | None = None,
        slots: list[int] | None = None,
        documents: list[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> PassOutput:
        if self._decoder is not None:
            assert documents is None, "packed documents are for training"
            out = self._decoder(self.embed(ids_BN), positions_BN, mask_BNN, cache, slots, counts=counts)
            aux = out.last_BND if self.capture_after == TOP else out.aux_BNA
            return PassOutput(out.last_BND, aux, out.keys_LBGNE, out.values_LBGNE)
        if self._exact:
            assert documents is None, "packed documents are for training"
            return self._forward_exact(ids_BN, positions_BN, mask_BNN, cache, slots)
        context = Context.make(mask_BNN, ids_BN.shape[1], cache, slots, ids_BN.device, self.dtype)
        assert documents is None or context.causal
        context.documents = documents
        last, aux, keys, values = self._run(ids_BN, positions_BN, context)
        return PassOutput(last, aux, torch.stack(keys), torch.stack(values))

    def _run(
        self, ids_BN: Tensor, positions_BN: Tensor, context: Context | Gathered
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """`last`, `aux`, and the keys and values of each layer."""
        x = self.embed(ids_BN)
        cos, sin = self.rotary(positions_BN, x.dtype)
        captured, all_keys, all_values = [], [], []
        for i, layer in enumerate(self.model.layers):
            x, k, v = layer(x, cos, sin, context, i)
            if i in self.capture_after:
                captured.append(x)
            all_keys.append(k)
            all_values.append(v)
        last = self.model.norm(x)
        return last, last if self.capture_after == TOP else torch.cat(captured, dim=-1), all_keys, all_values

    def _forward_exact(
        self,
        ids_BN: Tensor,
        positions_BN: Tensor,
        mask_BNN: Tensor | None,
        cache: KVCache | None,
        slots: list[int] | None,
    ) -> PassOutput:
        B, N = ids_BN.shape
        gathered = Gathered(B, N, mask_BNN, cache, slots, self.device)
        ids, positions = (padded(x.expand(B, N).reshape(-1)) for x in (ids_BN, positions_BN))
        outs = []
        for at in gathered.blocks():
            outs.append(self._run(ids[None, at], positions[None, at], gathered)[:2])
        last, aux = (torch.cat(parts, dim=1)[0, : B * N].unflatten(0, (B, N)) for parts in zip(*outs, strict=True))
        return PassOutput(last, aux, *gathered.keys_values())

    def quantise(self, how: str, stored: Mapping[str, Quantised] | None = None) -> "LlamaTarget":
        assert self.quantised is None
        assert self._decoder is None

        def matrix(name: str, weight: Tensor, bits: int) -> Quantised:
            kept = (stored or {}).get(f"{name}.weight")
            if kept is None or kept.bits != bits:
                return Quantised.of(weight, bits)
            return kept.over(lambda part: part.to(weight.device))

        head = "model.embed_tokens" if self.lm_head is None else "lm_head"
        self._quantised_head = matrix(head, self.head_weight, HEAD_BITS)
        quantise(self.model.layers, lambda name, weight: matrix(f"model.layers.{name}", weight, BITS[how]))
        if self.lm_head is not None:
            free(self.lm_head)
        self.quantised = how
        return self

    def pack(self) -> "LlamaTarget":
        if self._decoder is not None or not usable(self.dtype, self.device):
            return self
        c = self.config
        if self._quantised_head is not None:
            self._head, self._quantised_head = Weights.integers(self._quantised_head, None, self.dtype), None
        else:
            self._head = Weights.stacked([self.head_weight])
        if self.lm_head is not None:  # a tied one is the embedding, which must stay readable row by row
            free(self.lm_head)
        layers = [layer for layer in self.model.layers if isinstance(layer, TargetLayer)]
        self._decoder = Decoder(
            [pack(x.self_attn, x.mlp, x.input_layernorm, x.post_attention_layernorm) for x in layers],
            self.model.norm.weight,
            heads=c.num_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim, inner=c.intermediate_size, eps=c.norm_eps,
            frequencies=self.rotary.inv_freq, rotary_scale=self.rotary.scale,
            capture_after=() if self.capture_after == TOP else self.capture_after,
        )  # fmt: skip
        return self


@torch.inference_mode()
def _check_exact(target: LlamaTarget) -> None:
    """UserError unless a text's tokens are computed alike in one pass and, a place further on, in two.

    That meets every place of a block and the one beside it, with other tokens around.
    """
    generator = torch.Generator().manual_seed(0)
    count = min(2 * ROWS + 1, target.config.max_positions)
    ids = torch.randint(target.config.vocab_size, (1, count), generator=generator).to(target.device)
    positions = torch.arange(count, device=target.device)[None]
    whole = target(ids, positions)
    cache = target.new_cache(1, count)
    first = target(ids[:, :1], positions[:, :1], None, cache, [0])
    cache.keep(0, first.keys_LBGNE[:, 0], first.values_LBGNE[:, 0])
    rest = target(ids[:, 1:], positions[:, 1:], None, cache, [0])
    same = torch.equal(target.logits(whole.last_BND)[:, 1:], target.logits(rest.last_BND)) and all(
        torch.equal(getattr(whole, name)[..., 1:, :], getattr(rest, name))
        for name in ("last_BND", "aux_BNA", "keys_LBGNE", "values_LBGNE")
    )
    require(
        same,
        f"PyTorch {torch.__version__} does not compute equal rows of a {target.dtype} product alike on "
        f"{target.device}: leave --exact out, or choose another --dtype or --device",
    )
