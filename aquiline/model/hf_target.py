"""Any decoder-only causal language model of Transformers as a target: its own code runs, our attention and cache in it.

Transformers lets a model's attention be exchanged by name (its attention interface), and the mask with it. Under our
name the mask is no tensor: the model hands over the rule it makes masks by ("not later", "at most W back"), and that is
asked with POSITIONS, so that a sliding window is right for a tree's nodes, whose places in the pass mean nothing. What
of a pass the attention must know lies in a context variable while the model's code runs.

A model is taken only if each of its layers calls our attention once, with the mask that was made for it here; all else
is refused. hf_check.py then compares its passes with those of the model's own attention.

Shapes: as in target.py; S cached slots, H heads.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aquiline.config import TOP, TargetConfig, UserError, require
from aquiline.model.backend import Weights, usable
from aquiline.model.kv_cache import KVCache
from aquiline.model.layers import Context, Scoring, bias, free
from aquiline.model.target import HeadForm, PassOutput, Target

ATTENTION = "aquiline"  # our name in Transformers' registries

Rule = Callable[[Tensor, int, Tensor, Tensor], Tensor]  # (row, head, position, position of what it might see)


@dataclass
class _Pass:
    """What our attention must know of the pass that runs, and what it leaves behind."""

    positions_BN: Tensor
    plain: Context  # what is visible where a layer has no rule of its own
    mask_BNN: Tensor | None
    lengths: list[int]
    documents: list[int] | None
    dtype: torch.dtype
    capture_after: tuple[int, ...]
    contexts: list[tuple[Tensor, Context]] = field(default_factory=list)  # by the mask that stands for them
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    captured: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, rule: Rule) -> Tensor:
        """A mask that stands for this rule: known again by being the very same tensor, it holds nothing."""
        B, N = self.positions_BN.shape
        placeholder = torch.ones((), dtype=torch.bool, device=self.positions_BN.device)
        placeholder = placeholder.expand(B, 1, N, max(self.lengths) + N)
        if self.documents is None:
            context = _narrowed(self.plain, rule, self.positions_BN, self.mask_BNN, self.lengths, self.dtype)
        else:
            parts = [self.positions_BN[:, a:b] for a, b in itertools.pairwise(self.documents)]
            causal = Context(causal=True)
            narrowed = [_narrowed(causal, rule, part, None, [0], self.dtype) for part in parts]
            context = Context(documents=self.documents, parts=narrowed)
        self.contexts.append((placeholder, context))
        return placeholder

    def attend(self, q_BHNE: Tensor, k_BGNE: Tensor, v_BGNE: Tensor, mask: Tensor | None, how: Scoring) -> Tensor:
        """`[B, N, H, E]`, E that of the values."""
        context = next((context for given, context in self.contexts if given is mask), None)
        if context is None:
            raise UserError(f"layer {len(self.keys)} attends without the mask that Transformers' interface makes")
        E, width = q_BHNE.shape[-1], v_BGNE.shape[-1]
        past = context.past_keys_LBGSE
        padded = max(E, width) if past is None else past.shape[-1]
        how = dataclasses.replace(how, scale=E**-0.5 if how.scale is None else how.scale)
        q, k, v = (F.pad(x, (0, padded - x.shape[-1])) for x in (q_BHNE, k_BGNE, v_BGNE))
        out = context.attend(len(self.keys), q.transpose(1, 2), k, v, how)
        self.keys.append(k)
        self.values.append(v)
        return out.unflatten(-1, (q.shape[1], padded))[..., :width]

    def keys_values(self) -> tuple[Tensor, Tensor]:
        """`[L, B, G, N, E]` of all layers; narrower heads are padded with zeros, which add nothing to a product."""
        heads = sorted({k.shape[1] for k in self.keys})
        require(len(heads) == 1, f"its layers have {' or '.join(map(str, heads))} key heads; one number is expected")
        width = max(k.shape[-1] for k in self.keys)
        keys, values = (
            torch.stack([F.pad(x, (0, width - x.shape[-1])) for x in of_layers])
            for of_layers in (self.keys, self.values)
        )
        return keys, values


_running: ContextVar[_Pass | None] = ContextVar("pass", default=None)


def _narrowed(
    plain: Context, rule: Rule, positions_BN: Tensor, mask_BNN: Tensor | None, lengths: list[int], dtype: torch.dtype
) -> Context:
    """`plain`, less what a layer's rule hides. A cached token's position is its place in the row."""
    B, N = positions_BN.shape
    device = positions_BN.device
    row = torch.arange(B, device=device)[:, None, None]
    query = positions_BN[:, :, None]
    own = torch.ones(1, N, N, dtype=torch.bool, device=device).tril() if mask_BNN is None else mask_BNN
    place_S = torch.arange(max(lengths), device=device)
    past = place_S < torch.tensor(lengths, device=device)[:, None, None]
    own_seen, past_seen = (
        seen & rule(row, 0, query, key).expand(B, N, -1)
        for seen, key in ((own, positions_BN[:, None, :]), (past, place_S[None, None]))
    )
    if torch.equal(own_seen, own.expand_as(own_seen)) and torch.equal(past_seen, past.expand_as(past_seen)):
        return plain
    return dataclasses.replace(
        plain, causal=False, own_bias_BNM=bias(own_seen, dtype), past_bias_BNS=bias(past_seen, dtype)
    )


def _mask(*, mask_function: Rule, use_vmap: bool = False, **_: Any) -> Tensor:
    """Takes the place of Transformers' making of masks."""
    running = _running.get()
    assert running is not None
    require(not use_vmap, "its mask goes by more than positions")
    return running.mask(mask_function)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Takes the place of a model's own attention. A window that is named here is in the mask's rule already."""
    running = _running.get()
    assert running is not None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    require(causal and position_bias is None, "its attention sees later tokens, or adds a bias to scores")
    return running.attend(query, key, value, attention_mask, Scoring(scaling, softcap, s_aux)), None


class HFTarget(Target):
    """A target that Transformers computes. `hf`: its `...ForCausalLM`."""

    def __init__(self, hf: Any, config: TargetConfig, capture_after: tuple[int, ...]) -> None:
        """UserError where the model's attention cannot be exchanged, or its parts are not where they are expected."""
        super().__init__(config, capture_after)
        self.hf = hf
        _register()
        self.use_attention(ATTENTION)
        given = self.hf.config._attn_implementation
        require(given == ATTENTION, "its attention does not go through Transformers' attention interface")
        self._form = _head_form(hf)
        self._tied = self.head_weight.data_ptr() == self.embedding.weight.data_ptr()
        for number, layer in enumerate(_layers(_decoder(hf), config.num_layers)):
            layer.register_forward_hook(_capturing(number))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "HFTarget":
        self.__dict__.pop("embedding", None)  # it is made anew of what is moved
        super()._apply(fn, recurse)
        return self

    def use_attention(self, name: str) -> None:
        """Ours, or `eager`, the model's own."""
        self.hf.set_attn_implementation(name)

    @cached_property
    def embedding(self) -> nn.Embedding:
        """Its rows as they are stored: Gemma multiplies them by sqrt(D), Granite by another number, when it reads them,
        and a draft, which norms them, reads them as they are in SpecForge, SGLang and vLLM.
        """
        return nn.Embedding.from_pretrained(self.hf.get_input_embeddings().weight)

    @property
    def head_weight(self) -> Tensor:
        return self.hf.get_output_embeddings().weight

    @property
    def head_form(self) -> HeadForm:
        bias = self.hf.get_output_embeddings().bias  # asked for each time: it moves with the model
        return self._form if bias is None else dataclasses.replace(self._form, bias_V=bias.detach().float())

    @property
    def final_norm(self) -> nn.Module:
        found = getattr(_decoder(self.hf), "norm", None)
        if not isinstance(found, nn.Module):
            raise UserError("its final norm is not where it is expected: give states that are behind it")
        return found

    def drop_layers(self) -> None:
        del _layers(_decoder(self.hf), self.config.num_layers)[:]

    @property
    def decoding(self) -> str:
        return "PyTorch (Transformers)"

    @torch.no_grad()
    def new_cache(self, num_slots: int, capacity: int, tokens: int | None = None) -> KVCache:
        """Of the key heads, and of their width, that a pass leaves; the config names others here and there."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        keys = self(token, token).keys_LBGNE
        heads, width = keys.shape[2], keys.shape[4]
        return KVCache(self.config.num_layers, num_slots, capacity, heads, width, self.dtype, self.device, tokens)

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
        if documents is not None and len(documents) > 2 and ids_BN.shape[1] > self.config.max_positions:
            return self._one_by_one(ids_BN, positions_BN, documents)
        plain = Context.make(mask_BNN, ids_BN.shape[1], cache, slots, ids_BN.device, self.dtype)
        assert documents is None or plain.causal
        lengths = [cache.lengths[s] for s in slots] if cache is not None and slots is not None else [0]
        running = _Pass(
            positions_BN.expand_as(ids_BN), plain, mask_BNN, lengths, documents, self.dtype, self.capture_after
        )
        before = _running.set(running)
        try:
            # With a mask of its own, of ones, Transformers does not take positions that repeat for packed documents.
            last = _decoder(self.hf)(
                input_ids=ids_BN,
                position_ids=running.positions_BN,
                attention_mask=torch.ones_like(ids_BN),
                use_cache=False,
                return_dict=True,
            ).last_hidden_state
        finally:
            _running.reset(before)
        require(
            len(running.keys) == self.config.num_layers,
            f"{len(running.keys)} of its {self.config.num_layers} layers attend through Transformers' interface",
        )
        if self.capture_after == TOP:
            aux = last
        else:
            aux = torch.cat([running.captured[i].to(self.dtype) for i in self.capture_after], dim=-1)
        return PassOutput(last, aux, *running.keys_values())

    def _one_by_one(self, ids_BN: Tensor, positions_BN: Tensor, documents: list[int]) -> PassOutput:
        """Packed documents in passes of their own: some code counts places in the pass, as Llama 4's does, so that none
        may be longer than a text.
        """
        spans = [slice(a, b) for a, b in itertools.pairwise(documents)]
        outs = [self(ids_BN[:, at], positions_BN[:, at], documents=[0, at.stop - at.start]) for at in spans]
        return PassOutput(
            torch.cat([out.last_BND for out in outs], dim=1),
            torch.cat([out.aux_BNA for out in outs], dim=1),
            torch.cat([out.keys_LBGNE for out in outs], dim=3),
            torch.cat([out.values_LBGNE for out in outs], dim=3),
        )

    def pack(self) -> "HFTarget":
        """The head alone: it is the larger part of what a small pass reads."""
        if self._head is None and usable(self.dtype, self.device):
            self._head = Weights.stacked([self.head_weight])
            if not self._tied:
                free(self.hf.get_output_embeddings())
        return self


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface  # seconds to import

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _mask)


def _decoder(hf: Any) -> nn.Module:
    """The part without the head."""
    found = hf.get_decoder()
    return hf.model if found is hf else found  # llama4_text names itself


def _head_form(hf: Any) -> HeadForm:
    """What the model's code does between head and logits, but for the head's bias. Which key of its config says it is
    known by name; that it is all, hf_check.py finds out.
    """
    head, c = hf.get_output_embeddings(), hf.config
    require(isinstance(head, nn.Linear), "it has no linear output head")
    require(
        type(head.weight) is nn.Parameter and head.weight.is_floating_point(),
        "its output head is quantised: leave that one out of the quantisation",
    )
    scale = 1.0
    for key, inverse in (("logits_scaling", True), ("logit_scale", False), ("lm_head_multiplier", False)):
        value = getattr(c, key, None)
        if value:
            scale *= 1 / value if inverse else value
    return HeadForm(scale=scale, cap=getattr(c, "final_logit_softcapping", None))


def _layers(body: nn.Module, count: int) -> nn.ModuleList:
    found = [
        module
        for name, module in body.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and not any(p.isdecimal() for p in name.split("."))
    ]
    require(len(found) == 1, f"{len(found)} lists of {count} layers are in it; one is expected")
    return found[0]


def _capturing(number: int) -> Callable[..., None]:
    def hook(_: nn.Module, given: Any, output: Any) -> None:
        running = _running.get()
        if running is None:  # the model's own attention runs
            return
        attended = len(running.keys)
        require(attended == number + 1, f"at the end of layer {number}, {attended} layers have attended")
        if number in running.capture_after:
            state = output if isinstance(output, Tensor) else output[0]
            running.captured[number] = state

    return hook
