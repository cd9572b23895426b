"""Targets of other projects in our words: `config.json` of Llama, Mistral, Qwen2 and Qwen3 (Transformers 4 and 5), and
GGUF metadata and tensor names. No disk here. What we do not compute exactly as its origin does is refused by name.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aquiline.config import RopeConfig, TargetConfig, UserError, require
from aquiline.model.layers import rope_frequencies

# ---------------------------------------------------------------- reading values

_MISSING: Any = object()


class NotOurs(UserError):
    """Our own forward does not compute it; Transformers' may."""


def _ours(condition: bool, message: str) -> None:
    if not condition:
        raise NotOurs(message)


def number(hf: Mapping[str, Any], key: str, kind: type, default: Any = _MISSING, least: int = 1) -> Any:
    """`hf[key]` as an int from `least` on or as a positive float; null counts as absent."""
    value = hf.get(key)
    if value is None:
        require(default is not _MISSING, f"the config has no {key!r}")
        return default
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    ok = ok and (least <= value < 2**63 if kind is int else 0 < value < 1e308)  # what PyTorch and a float can hold
    expected = f"an int of at least {least}" if kind is int else "a positive float"
    require(ok and kind(value) == value, f"{key} is {value!r:.80} in the config; expected {expected}")
    return kind(value)


def flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = hf.get(key)
    if value is None:
        return default
    require(isinstance(value, bool), f"{key} is {value!r:.80} in the config; expected true or false")
    return value


def text(hf: Mapping[str, Any], key: str, default: Any = None) -> Any:
    value = hf.get(key)
    if value is None:
        return default
    require(isinstance(value, str), f"{key} is {value!r:.80} in the config; expected a text")
    return value


def texts(hf: Mapping[str, Any], key: str) -> list[str]:
    """A list of texts, empty when it is null or absent."""
    value = hf.get(key)
    ok = value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    require(ok, f"{key} is {value!r:.80} in the config; expected a list of texts")
    return value or []


def token_ids(value: Any, key: str) -> tuple[int, ...]:
    """A token id, a list of them or null."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    ok = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in values)
    require(ok, f"{key} is {value!r:.80}; expected an id or a list of ids")
    return tuple(values)


# ---------------------------------------------------------------- rope

_ROPE_FIELDS = {f.name for f in dataclasses.fields(RopeConfig)}
# Keys that change the frequencies in Transformers, with the values under which they do not.
_ROPE_NEUTRAL = {"partial_rotary_factor": (None, 1, 1.0), "mscale": (None,), "mscale_all_dim": (None,)}
_ROPE_NEUTRAL |= {"truncate": (None, True), "type": ()}


def rope_config(hf: Mapping[str, Any]) -> RopeConfig:
    """The rotary block from `rope_parameters` (Transformers 5) or `rope_theta` and `rope_scaling` (before).

    Both layouts may be there if they say the same. No base at all means 10000, as in Transformers and in the EAGLE
    reference; a draft never inherits the target's.
    """
    require(
        hf.get("partial_rotary_factor") in _ROPE_NEUTRAL["partial_rotary_factor"],
        f"partial_rotary_factor {hf.get('partial_rotary_factor')!r} is not supported; expected 1",
    )
    found = {key: _rope_block(hf, key) for key in ("rope_parameters", "rope_scaling") if hf.get(key)}
    if not found:
        return RopeConfig(rope_theta=number(hf, "rope_theta", float, 10000.0))
    first, *others = found.values()
    require(
        all(other == first for other in others),
        f"rope_parameters {hf.get('rope_parameters')} and rope_scaling {hf.get('rope_scaling')} in the config "
        "disagree; remove the wrong one",
    )
    return first


def _rope_block(hf: Mapping[str, Any], key: str) -> RopeConfig:
    block = hf[key]
    require(isinstance(block, Mapping), f"{key} is {block!r}; expected an object")
    nested = [name for name, value in block.items() if isinstance(value, Mapping)]
    require(not nested, f"{key} differs by layer ({', '.join(nested)}), which is not supported")
    for name, value in block.items():
        known = name in _ROPE_FIELDS or name == "type" or value in _ROPE_NEUTRAL.get(name, ())
        require(known, f"{key} has {name} = {value!r}, which is not supported")
    kinds = {text(block, name) for name in ("rope_type", "type") if block.get(name) is not None}
    require(len(kinds) <= 1, f"{key} names two types: {block.get('rope_type')!r} and {block.get('type')!r}")
    kind = kinds.pop() if kinds else "default"
    bases = {number(d, "rope_theta", float) for d in (hf, block) if d.get("rope_theta") is not None}
    require(
        len(bases) <= 1,
        f"rope_theta is {hf.get('rope_theta')!r} in the config and {block.get('rope_theta')!r} in its {key}",
    )
    values: dict[str, Any] = {"rope_type": kind, "rope_theta": bases.pop() if bases else 10000.0}
    for name in _ROPE_FIELDS - {"rope_type", "rope_theta"}:
        values[name] = number(block, name, int if name.startswith("original") else float, None)
    if kind in ("llama3", "yarn"):  # where Transformers looks for it, in this order
        outside = number(hf, "original_max_position_embeddings", int, None)
        inside = values["original_max_position_embeddings"]
        values["original_max_position_embeddings"] = outside or inside or number(hf, "max_position_embeddings", int)
    if kind == "linear":  # nothing else counts, and the block that is written has room for nothing else
        return RopeConfig(values["rope_theta"], kind, values["factor"])
    return RopeConfig(**values)


def rope_to_dict(rope: RopeConfig) -> dict[str, Any]:
    """Both layouts, saying the same: `rope_theta`, `rope_parameters` and, unless default, `rope_scaling`."""
    block = {k: v for k, v in dataclasses.asdict(rope).items() if v is not None}
    scaling = {k: v for k, v in block.items() if k != "rope_theta"}
    if rope.rope_type == "linear":  # the EAGLE reference accepts these two keys, by these names, and no third
        scaling = {"type": "linear", "factor": rope.factor}
    both = {"rope_theta": rope.rope_theta, "rope_parameters": block}
    return both | ({"rope_scaling": scaling} if rope.rope_type != "default" else {})


# ---------------------------------------------------------------- targets: config.json

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Class defaults of Transformers for keys that a config.json may leave out.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # llama: as many as heads


def target_config(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> tuple[TargetConfig, list[str]]:
    """A target's `config.json` (and `generation_config.json`) as a TargetConfig, with notes for the user.

    UserError names whatever this project does not compute as Transformers does.
    """
    require(
        "text_config" not in hf, "the config nests a text_config (a multimodal model); only text models are supported"
    )
    architectures, family = texts(hf, "architectures"), text(hf, "model_type")
    if family is None and len(architectures) == 1:
        family = next((f for f, name in ARCHITECTURES.items() if name == architectures[0]), None)
    supported = f"supported: {', '.join(ARCHITECTURES.values())}"
    unknown = f"model_type {family!r} (architectures {architectures}) is unknown; {supported}"
    require(family is not None, unknown)
    _ours(family in ARCHITECTURES, unknown)
    require(
        not architectures or architectures == [ARCHITECTURES[family]],
        f"architectures {architectures} of model_type {family!r} is not a plain language model here; {supported}",
    )
    quantisation = hf.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise NotOurs(f"quantization_config ({method}) is not supported; give the unquantised model or a GGUF file")
    require_silu(hf)
    for key in ("rope_parameters", "rope_scaling"):
        block = hf.get(key)
        kind = (block.get("rope_type") or block.get("type")) if isinstance(block, Mapping) else None
        _ours(kind not in ("dynamic", "longrope"), f"rope_type {kind!r} is not supported")
    heads = number(hf, "num_attention_heads", int)
    hidden, layers = number(hf, "hidden_size", int), number(hf, "num_hidden_layers", int)
    # Explicit first: in Qwen3 heads * head_dim is not the hidden size, and its class default is 128.
    head_dim = number(hf, "head_dim", int, None) or (128 if family == "qwen3" else split_heads(hidden, heads))
    bias = family in ("llama", "qwen3") and flag(hf, "attention_bias")
    notes: list[str] = []
    max_positions = _cut_to(_window(hf, family, layers), number(hf, "max_position_embeddings", int), notes)
    eos = token_ids(hf.get("eos_token_id"), "eos_token_id")
    eos += token_ids((generation or {}).get("eos_token_id"), "eos_token_id of generation_config")
    return TargetConfig(
        family=family,
        vocab_size=number(hf, "vocab_size", int),
        hidden_size=hidden,
        intermediate_size=number(hf, "intermediate_size", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=number(hf, "num_key_value_heads", int, _DEFAULT_KV_HEADS.get(family, heads)),
        head_dim=head_dim,
        norm_eps=number(hf, "rms_norm_eps", float, 1e-6),
        max_positions=max_positions,
        rope=rope_config(hf),
        tied_head=flag(hf, "tie_word_embeddings"),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=family == "llama" and flag(hf, "mlp_bias"),
        qk_norm=family == "qwen3",
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=(token_ids(hf.get("bos_token_id"), "bos_token_id") or (None,))[0],
    ), notes


def require_silu(hf: Mapping[str, Any]) -> None:
    act = hf.get("hidden_act") or hf.get("hidden_activation") or "silu"
    _ours(act in ("silu", "swish"), f"hidden_act {act!r} is not supported; expected 'silu'")


def split_heads(hidden: int, heads: int) -> int:
    require(
        hidden % heads == 0, f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; give head_dim"
    )
    return hidden // heads


def _window(hf: Mapping[str, Any], family: str, num_layers: int) -> int | None:
    """The sliding window if any layer attends through it."""
    window = number(hf, "sliding_window", int, None)
    if family == "mistral":
        # Its class default is a window of 4096: a config that leaves the key out means that one.
        return window if "sliding_window" in hf else 4096
    if family == "llama" or not flag(hf, "use_sliding_window"):
        return None
    kinds = texts(hf, "layer_types")
    if not kinds:
        first = number(hf, "max_window_layers", int, 28, least=0)
        return window if first < num_layers else None
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    require(not unknown, f"layer_types has {', '.join(sorted(unknown))}, which is not supported")
    return window if "sliding_attention" in kinds else None


def _cut_to(window: int | None, max_positions: int, notes: list[str]) -> int:
    """Up to the window's length, attention through it is full attention: exact, only shorter."""
    if window is None or window >= max_positions:
        return max_positions
    notes.append(f"the target attends through a window of {window}: the context is cut from {max_positions} to it")
    return window


def hf_config(config: TargetConfig) -> dict[str, Any]:
    """The `config.json` of an exported target in bf16; Transformers 4 and 5 read it alike."""
    c = config
    bias_fits = {
        "llama": c.qkv_bias == c.o_bias,
        "mistral": not (c.qkv_bias or c.o_bias),
        "qwen2": c.qkv_bias and not c.o_bias,
        "qwen3": c.qkv_bias == c.o_bias,
    }[c.family]
    require(
        bias_fits and c.qk_norm == (c.family == "qwen3") and (c.family == "llama" or not c.mlp_bias),
        f"this {c.family} target has biases or norms that {ARCHITECTURES[c.family]} of Transformers does not",
    )
    eos: Any = list(c.eos_token_ids) if len(c.eos_token_ids) > 1 else next(iter(c.eos_token_ids), None)
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURES[c.family]],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": c.tied_head,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": eos,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if c.family in ("llama", "qwen3"):
        out["attention_bias"] = c.qkv_bias
    if c.family == "llama":
        out["mlp_bias"] = c.mlp_bias
    if c.family != "llama":
        out["sliding_window"] = None
    if c.family in ("qwen2", "qwen3"):
        out["use_sliding_window"] = False
    return out | rope_to_dict(c.rope)


# ---------------------------------------------------------------- targets: GGUF

_GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
GGUF_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_ROPE_FACTORS = "rope_freqs.weight"  # not a weight: what llama3 scaling divides each frequency by


def gguf_tensor_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name comes back as it is, to be reported as left over."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    ours = GGUF_TENSORS.get(match[2]) if match else None
    if match is None or ours is None or (match[1] is None) == (match[2].startswith(("attn_", "ffn_"))):
        return name
    return (f"model.layers.{match[1]}." if match[1] is not None else "") + f"{ours}.{match[3]}"


def unpermute_rope_rows(weight: Tensor, heads: int) -> Tensor:
    """Rows of a GGUF `llama` q or k projection back to the order of Hugging Face.

    llama.cpp rotates neighbouring pairs (0,1), (2,3) ... of a head and stores its rows so; Transformers rotates the
    halves (0, E/2), (1, E/2+1) ... Only the architecture `llama` is stored that way, Qwen's is not.
    """
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def permute_rope_rows(weight: Tensor, heads: int) -> Tensor:
    """The way back: rows of q or k as a GGUF `llama`, or a draft for it, stores them."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def gguf_target_config(
    fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: list[float] | None = None
) -> tuple[TargetConfig, list[str]]:
    """GGUF metadata as a TargetConfig, with notes. `shapes`: of the tensors, by GGUF name, rows first."""
    arch = text(fields, "general.architecture")
    require(
        arch in _GGUF_FAMILIES,
        f"GGUF architecture {arch!r} is not supported; supported: {', '.join(_GGUF_FAMILIES)}",
    )
    own = {k.removeprefix(f"{arch}."): _short(v) for k, v in fields.items() if k.startswith(f"{arch}.")}
    require(
        not own.get("expert_count"), f"the GGUF has {own.get('expert_count')} experts; only dense models are supported"
    )
    heads, hidden = number(own, "attention.head_count", int), number(own, "embedding_length", int)
    head_dim = number(own, "attention.key_length", int, None) or split_heads(hidden, heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        require(
            own.get(key, head_dim) == head_dim, f"{key} {own.get(key)} of the GGUF is not the head's width {head_dim}"
        )
    notes: list[str] = []
    window = number(own, "attention.sliding_window", int, None)
    max_positions = _cut_to(window, number(own, "context_length", int), notes)
    require("token_embd.weight" in shapes, "the GGUF has no token_embd.weight")
    eos, eot, bos = (
        token_ids(fields.get(key), key) for key in (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "bos"))
    )
    return TargetConfig(
        family=_GGUF_FAMILIES[arch],
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=number(own, "feed_forward_length", int),
        num_layers=number(own, "block_count", int),
        num_heads=heads,
        num_kv_heads=number(own, "attention.head_count_kv", int, heads),
        head_dim=head_dim,
        norm_eps=number(own, "attention.layer_norm_rms_epsilon", float),
        max_positions=max_positions,
        rope=_gguf_rope(own, head_dim, rope_factors),
        tied_head="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm=arch == "qwen3",
        eos_token_ids=tuple(dict.fromkeys(eos + eot)),
        bos_token_id=(bos or (None,))[0],
    ), notes


def _short(value: Any) -> Any:
    """A GGUF float is a float32: 9.999999747378752e-06 is what became of 1e-05, and equal to it in float32."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _gguf_rope(own: Mapping[str, Any], head_dim: int, factors: list[float] | None) -> RopeConfig:
    theta = number(own, "rope.freq_base", float, 10000.0)
    scaling = {key.removeprefix("rope.scaling.") for key in own if key.startswith("rope.scaling.")}
    unknown = sorted(scaling - {"type", "factor", "original_context_length", "finetuned"})
    require(not unknown, f"the GGUF has rope.scaling.{', '.join(unknown)}, which is not supported")
    kind = text(own, "rope.scaling.type", "none")
    if factors is None:
        if kind == "none":
            return RopeConfig(theta)
        original = None if kind == "linear" else number(own, "rope.scaling.original_context_length", int, None)
        return RopeConfig(theta, kind, number(own, "rope.scaling.factor", float, None), original)
    # The file holds llama3's factors, not its settings; those of Llama 3.1 to 3.3 are tried and must reproduce them.
    guess = RopeConfig(theta, "llama3", max(factors), 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    plain, scaled = (rope_frequencies(r, head_dim, 8192)[0] for r in (RopeConfig(theta), guess))
    same = len(factors) == len(plain) and torch.allclose(torch.tensor(factors), plain / scaled, rtol=1e-4)
    require(same and kind == "none", f"the GGUF's {GGUF_ROPE_FACTORS} is not that of a Llama 3 rope, all we know")
    return guess
