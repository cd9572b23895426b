"""Names and config tables: other projects' model configs, tensor names and vocabulary maps, and ours. No disk here.

Targets: `config.json` of Llama, Mistral, Qwen2 and Qwen3 (Transformers 4 and 5), and GGUF metadata. Drafts: the layout
of SafeAILab/EAGLE, SpecForge and SGLang, which is also what we write; with every switch off it is the form that all
engines load. What we do not compute exactly as its origin does is refused by name, never ignored.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from aquiline.config import (
    DraftConfig,
    RopeConfig,
    TargetConfig,
    UserError,
    check_capture_after,
    default_capture_after,
    require,
)
from aquiline.model.layers import rope_frequencies


class AquilineWarning(UserWarning):
    """Something is legal but may lower acceptance: said once, loudly."""


# ---------------------------------------------------------------- reading values

_MISSING: Any = object()


def _number(hf: Mapping[str, Any], key: str, kind: type, default: Any = _MISSING) -> Any:
    """`hf[key]` as a positive int or float; null counts as absent."""
    value = hf.get(key)
    if value is None:
        require(default is not _MISSING, f"the config has no {key!r}")
        return default
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    require(ok and kind(value) == value, f"{key} is {value!r} in the config; expected a positive {kind.__name__}")
    return kind(value)


def _flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = hf.get(key)
    if value is None:
        return default
    require(isinstance(value, bool), f"{key} is {value!r} in the config; expected true or false")
    return value


def _ids(value: Any, key: str) -> tuple[int, ...]:
    """A token id, a list of them or null."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    ok = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in values)
    require(ok, f"{key} is {value!r}; expected an id or a list of ids")
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
        return RopeConfig(rope_theta=_number(hf, "rope_theta", float, 10000.0))
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
    kinds = {block[name] for name in ("rope_type", "type") if block.get(name) is not None}
    require(len(kinds) <= 1, f"{key} names two types: {block.get('rope_type')!r} and {block.get('type')!r}")
    kind = kinds.pop() if kinds else "default"
    bases = {_number(d, "rope_theta", float) for d in (hf, block) if d.get("rope_theta") is not None}
    require(
        len(bases) <= 1,
        f"rope_theta is {hf.get('rope_theta')!r} in the config and {block.get('rope_theta')!r} in its {key}",
    )
    values: dict[str, Any] = {"rope_type": kind, "rope_theta": bases.pop() if bases else 10000.0}
    for name in _ROPE_FIELDS - {"rope_type", "rope_theta"}:
        values[name] = _number(block, name, int if name.startswith("original") else float, None)
    if kind in ("llama3", "yarn"):  # where Transformers looks for it, in this order
        outside = _number(hf, "original_max_position_embeddings", int, None)
        inside = values["original_max_position_embeddings"]
        values["original_max_position_embeddings"] = outside or inside or _number(hf, "max_position_embeddings", int)
    return RopeConfig(**values)


def rope_to_dict(rope: RopeConfig) -> dict[str, Any]:
    """Both layouts, saying the same: `rope_theta`, `rope_parameters` and, unless default, `rope_scaling`."""
    block = {k: v for k, v in dataclasses.asdict(rope).items() if v is not None}
    scaling = {k: v for k, v in block.items() if k != "rope_theta"}
    both = {"rope_theta": rope.rope_theta, "rope_parameters": block}
    return both | ({"rope_scaling": scaling} if rope.rope_type != "default" else {})


# ---------------------------------------------------------------- targets: config.json

_ARCHITECTURES = {
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
    architectures = hf.get("architectures") or []
    family = hf.get("model_type")
    if family is None and len(architectures) == 1:
        family = next((f for f, name in _ARCHITECTURES.items() if name == architectures[0]), None)
    supported = f"supported: {', '.join(_ARCHITECTURES.values())}"
    require(family in _ARCHITECTURES, f"model_type {family!r} (architectures {architectures}) is unknown; {supported}")
    assert isinstance(family, str)
    require(
        not architectures or list(architectures) == [_ARCHITECTURES[family]],
        f"architectures {architectures} of model_type {family!r} is not a plain language model here; {supported}",
    )
    quantisation = hf.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise UserError(f"quantization_config ({method}) is not supported; give the unquantised model or a GGUF file")
    _require_silu(hf)
    heads = _number(hf, "num_attention_heads", int)
    hidden, layers = _number(hf, "hidden_size", int), _number(hf, "num_hidden_layers", int)
    # Explicit first: in Qwen3 heads * head_dim is not the hidden size, and its class default is 128.
    head_dim = _number(hf, "head_dim", int, None) or (128 if family == "qwen3" else _split(hidden, heads))
    bias = family in ("llama", "qwen3") and _flag(hf, "attention_bias")
    notes: list[str] = []
    max_positions = _cut_to(_window(hf, family, layers), _number(hf, "max_position_embeddings", int), notes)
    eos = _ids(hf.get("eos_token_id"), "eos_token_id")
    eos += _ids((generation or {}).get("eos_token_id"), "eos_token_id of generation_config")
    return TargetConfig(
        family=family,
        vocab_size=_number(hf, "vocab_size", int),
        hidden_size=hidden,
        intermediate_size=_number(hf, "intermediate_size", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_number(hf, "num_key_value_heads", int, _DEFAULT_KV_HEADS.get(family, heads)),
        head_dim=head_dim,
        norm_eps=_number(hf, "rms_norm_eps", float, 1e-6),
        max_positions=max_positions,
        rope=rope_config(hf),
        tied_head=_flag(hf, "tie_word_embeddings"),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=family == "llama" and _flag(hf, "mlp_bias"),
        qk_norm=family == "qwen3",
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=(_ids(hf.get("bos_token_id"), "bos_token_id") or (None,))[0],
    ), notes


def _require_silu(hf: Mapping[str, Any]) -> None:
    act = hf.get("hidden_act") or hf.get("hidden_activation") or "silu"
    require(act in ("silu", "swish"), f"hidden_act {act!r} is not supported; expected 'silu'")


def _split(hidden: int, heads: int) -> int:
    require(
        hidden % heads == 0, f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; give head_dim"
    )
    return hidden // heads


def _window(hf: Mapping[str, Any], family: str, num_layers: int) -> int | None:
    """The sliding window if any layer attends through it."""
    window = _number(hf, "sliding_window", int, None)
    if family == "mistral":
        # Its class default is a window of 4096: a config that leaves the key out means that one.
        return window if "sliding_window" in hf else 4096
    if family == "llama" or not _flag(hf, "use_sliding_window"):
        return None
    kinds = hf.get("layer_types")
    if kinds is None:
        first = hf.get("max_window_layers", 28)
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
        f"this {c.family} target has biases or norms that {_ARCHITECTURES[c.family]} of Transformers does not",
    )
    eos: Any = list(c.eos_token_ids) if len(c.eos_token_ids) > 1 else next(iter(c.eos_token_ids), None)
    out: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[c.family]],
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
_GGUF_TENSORS = {
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
    ours = _GGUF_TENSORS.get(match[2]) if match else None
    if match is None or ours is None or (match[1] is None) == (match[2].startswith(("attn_", "ffn_"))):
        return name
    return (f"model.layers.{match[1]}." if match[1] is not None else "") + f"{ours}.{match[3]}"


def unpermute_rope_rows(weight: Tensor, heads: int) -> Tensor:
    """Rows of a GGUF `llama` q or k projection back to the order of Hugging Face.

    llama.cpp rotates neighbouring pairs (0,1), (2,3) ... of a head and stores its rows so; Transformers rotates the
    halves (0, E/2), (1, E/2+1) ... Only the architecture `llama` is stored that way, Qwen's is not.
    """
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def gguf_target_config(
    fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: list[float] | None = None
) -> tuple[TargetConfig, list[str]]:
    """GGUF metadata as a TargetConfig, with notes. `shapes`: of the tensors, by GGUF name, rows first."""
    arch = fields.get("general.architecture")
    require(
        arch in _GGUF_FAMILIES,
        f"GGUF architecture {arch!r} is not supported; supported: {', '.join(_GGUF_FAMILIES)}",
    )
    assert isinstance(arch, str)
    own = {k.removeprefix(f"{arch}."): _short(v) for k, v in fields.items() if k.startswith(f"{arch}.")}
    require(
        not own.get("expert_count"), f"the GGUF has {own.get('expert_count')} experts; only dense models are supported"
    )
    heads, hidden = _number(own, "attention.head_count", int), _number(own, "embedding_length", int)
    head_dim = _number(own, "attention.key_length", int, None) or _split(hidden, heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        require(
            own.get(key, head_dim) == head_dim, f"{key} {own.get(key)} of the GGUF is not the head's width {head_dim}"
        )
    notes: list[str] = []
    window = _number(own, "attention.sliding_window", int, None)
    max_positions = _cut_to(window, _number(own, "context_length", int), notes)
    require("token_embd.weight" in shapes, "the GGUF has no token_embd.weight")
    eos = [fields[k] for k in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if k in fields]
    bos = fields.get("tokenizer.ggml.bos_token_id")
    return TargetConfig(
        family=_GGUF_FAMILIES[arch],
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=_number(own, "feed_forward_length", int),
        num_layers=_number(own, "block_count", int),
        num_heads=heads,
        num_kv_heads=_number(own, "attention.head_count_kv", int, heads),
        head_dim=head_dim,
        norm_eps=_number(own, "attention.layer_norm_rms_epsilon", float),
        max_positions=max_positions,
        rope=_gguf_rope(own, head_dim, rope_factors),
        tied_head="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm=arch == "qwen3",
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos,
    ), notes


def _short(value: Any) -> Any:
    """A GGUF float is a float32: 9.999999747378752e-06 is what became of 1e-05, and equal to it in float32."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _gguf_rope(own: Mapping[str, Any], head_dim: int, factors: list[float] | None) -> RopeConfig:
    theta = _number(own, "rope.freq_base", float, 10000.0)
    scaling = {k.removeprefix("rope.scaling."): v for k, v in own.items() if k.startswith("rope.scaling.")}
    kind = scaling.pop("type", "none")
    factor, original = scaling.pop("factor", None), scaling.pop("original_context_length", None)
    scaling.pop("finetuned", None)
    require(not scaling, f"the GGUF has rope.scaling.{next(iter(scaling), '')}, which is not supported")
    if factors is None:
        kind = "default" if kind == "none" else kind
        if kind == "default":
            factor = original = None
        return RopeConfig(theta, kind, factor=factor, original_max_position_embeddings=original)
    # The file holds llama3's factors, not its settings; those of Llama 3.1 to 3.3 are tried and must reproduce them.
    guess = RopeConfig(theta, "llama3", max(factors), 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    plain, scaled = (rope_frequencies(r, head_dim, 8192)[0] for r in (RopeConfig(theta), guess))
    same = len(factors) == len(plain) and torch.allclose(torch.tensor(factors), plain / scaled, rtol=1e-4)
    require(same and kind == "none", f"the GGUF's {GGUF_ROPE_FACTORS} is not that of a Llama 3 rope, all we know")
    return guess


# ---------------------------------------------------------------- drafts: config.json

DRAFT_ARCHITECTURE = "LlamaForCausalLMEagle3"
_DRAFT_ALIASES = {DRAFT_ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "LlamaEagle3DraftModel"}
_QK_NORM_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
_SWITCHES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "attention_bias")
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"
# Switches of other writers that we do not compute: the value that changes nothing. `next_layer_regular` and the
# number of parallel heads' layers speak only of what a single layer without parallel drafting does not have.
_UNSUPPORTED = {
    "bias": False,  # a bias of fc
    "mlp_bias": False,
    "sliding_window": None,
    "eh_proj_before_attn": False,
    "return_hidden_post_norm": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "parallel_drafting": False,
}
_EAGLE_CONFIG_KNOWN = {*_UNSUPPORTED, *_SWITCHES, _AUX_IDS, "next_layer_regular", "parallel_draft_heads_num_layers"}


def draft_config_to_dict(
    config: DraftConfig, num_target_layers: int, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The `config.json` of a draft. `extra` is added as it is (our own `aquiline` block, the dtype)."""
    c = config
    out: dict[str, Any] = {
        "architectures": [_draft_architecture(c)],
        "model_type": "qwen3" if c.qk_norm else "llama",
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_positions,
        "trained_length": c.trained_length,
        # A tied head would be the V-wide embedding: the draft's is never tied, whatever the target's is.
        "tie_word_embeddings": False,
        "own_embedding": c.own_embedding,
        "norm_before_residual": c.norm_before_residual,  # engines disagree on what a missing key means
        "capture_after": list(c.capture_after),
    }
    out |= rope_to_dict(c.rope)
    out |= {name: True for name in _SWITCHES if getattr(c, name)}
    if c.own_embedding or c.target_hidden_size != c.hidden_size:
        # Its presence is also how the reference learns to use the draft's own embedding.
        out["target_hidden_size"] = c.target_hidden_size
    if num_target_layers < 7 or c.capture_after != default_capture_after(num_target_layers):
        # The same states twice: vLLM reads the first and counts layers passed, SGLang the second and names the layer.
        out[_AUX_IDS] = [i + 1 for i in c.capture_after]
        out["eagle_config"] = {_AUX_IDS: list(c.capture_after), "use_aux_hidden_state": True}
    assert not set(out) & set(extra or {})
    return out | dict(extra or {})


def _draft_architecture(c: DraftConfig) -> str:
    """The usual name, unless an engine that knows it would silently compute something else (SGLang drops unknown
    tensors and switches); then the name under which only vLLM and its kin load it, and SGLang refuses.
    """
    if c.qk_norm:
        return _QK_NORM_ARCHITECTURE
    replaced_embedding = c.own_embedding and c.hidden_size == c.target_hidden_size
    dropped = c.norm_before_residual or c.attention_bias or replaced_embedding
    return "Eagle3LlamaForCausalLM" if dropped else DRAFT_ARCHITECTURE


def draft_config_from_dict(hf: Mapping[str, Any], target: TargetConfig) -> tuple[DraftConfig, list[str]]:
    """A draft's `config.json`, ours or another project's, checked against its target, with notes for the user.

    `own_embedding` is only what the config says: the weights decide (`files/checkpoint.py`).
    """
    notes: list[str] = []
    if any(k in hf for k in ("speculators_config", "speculators_model_type", "transformer_layer_config")):
        raise UserError(
            "this draft has the layout of vLLM's speculators, which is not read yet; convert it to SGLang's"
        )
    eagle = hf.get("eagle_config") or {}
    require(isinstance(eagle, Mapping), f"eagle_config is {eagle!r}; expected an object")
    qk_norm = _check_draft_architecture(hf)
    _check_draft_switches(hf, eagle)
    heads, hidden = _number(hf, "num_attention_heads", int), _number(hf, "hidden_size", int)
    target_hidden = _number(hf, "target_hidden_size", int, hidden)
    vocab = _number(hf, "vocab_size", int)
    for what, ours, theirs in (
        ("hidden size", target_hidden, target.hidden_size),
        ("vocabulary", vocab, target.vocab_size),
    ):
        require(ours == theirs, f"the draft was made for a target with {what} {ours}, this target has {theirs}")
    if _flag(hf, "tie_word_embeddings"):
        notes.append("the draft's config says tie_word_embeddings; its own lm_head is used all the same")
    positions = _number(hf, "max_position_embeddings", int)
    trained = _number(hf, "trained_length", int, None)
    if positions < target.max_positions:
        # Positions come from the target, so the draft must reach as far; what it was trained on is another matter.
        trained = trained or positions
        notes.append(
            f"the draft's max_position_embeddings {positions} is raised to the target's {target.max_positions}; "
            f"acceptance beyond {trained} tokens is untested"
        )
    if _flag(hf, "norm_output") and "capture_after" not in hf:
        notes.append("norm_output is read as engines read it: the normed state is fed back")
    capture_after = _capture_after(hf, eagle, target.num_layers, notes)
    switches = {k: _flag(hf, k, _flag(eagle, k)) for k in _SWITCHES}
    return DraftConfig(
        vocab_size=vocab,
        draft_vocab_size=_number(hf, "draft_vocab_size", int, vocab),
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        intermediate_size=_number(hf, "intermediate_size", int),
        num_heads=heads,
        num_kv_heads=_number(hf, "num_key_value_heads", int, heads),
        head_dim=_number(hf, "head_dim", int, None) or _split(hidden, heads),
        norm_eps=_number(hf, "rms_norm_eps", float, 1e-6),
        max_positions=max(positions, target.max_positions),
        rope=rope_config(hf),
        capture_after=capture_after,
        trained_length=trained,
        qk_norm=qk_norm,
        own_embedding=_flag(hf, "own_embedding") or hidden != target_hidden,
        **switches,
    ), notes


def _check_draft_architecture(hf: Mapping[str, Any]) -> bool:
    """UserError unless this is an EAGLE-3 head we know; True if it has norms on q and k."""
    architectures = list(hf.get("architectures") or [DRAFT_ARCHITECTURE])
    known = _DRAFT_ALIASES | {_QK_NORM_ARCHITECTURE}
    require(
        len(architectures) == 1 and architectures[0] in known,
        f"draft architecture {architectures} is not supported; supported: {', '.join(sorted(known))}",
    )
    qk_norm = architectures[0] == _QK_NORM_ARCHITECTURE
    kind = hf.get("model_type", "llama")
    require(kind in ("llama", "qwen3"), f"draft model_type {kind!r} is not supported; expected 'llama' or 'qwen3'")
    return qk_norm


def _check_draft_switches(hf: Mapping[str, Any], eagle: Mapping[str, Any]) -> None:
    _require_silu(hf)
    require(not hf.get("quantization_config"), "the draft has a quantization_config, which is not supported")
    unknown = set(eagle) - _EAGLE_CONFIG_KNOWN
    require(not unknown, f"eagle_config has {', '.join(sorted(unknown))}, which is not known here")
    for name, neutral in _UNSUPPORTED.items():
        for value in (hf.get(name), eagle.get(name)):
            require(
                value is None or value == neutral, f"the draft's config has {name} = {value!r}, which is not supported"
            )
    use_aux_norm = _flag(hf, "use_aux_norm")  # SGLang's other name of fc_norm
    require(not use_aux_norm or _flag(hf, "fc_norm"), "the draft has use_aux_norm; write it as fc_norm: true")
    for name in _SWITCHES:
        if name in hf and name in eagle:
            require(
                hf[name] == eagle[name], f"{name} is {hf[name]!r} in the config and {eagle[name]!r} in eagle_config"
            )


def _capture_after(
    hf: Mapping[str, Any], eagle: Mapping[str, Any], num_layers: int, notes: list[str]
) -> tuple[int, ...]:
    """Which states the draft reads, from whichever convention its config uses; all given ones must agree."""
    given: dict[str, tuple[int, ...]] = {}
    if hf.get("capture_after") is not None:
        given["capture_after"] = _ids(hf["capture_after"], "capture_after")
    if eagle.get(_AUX_IDS) is not None:  # names the layer the state comes after, as ours
        given[f"eagle_config.{_AUX_IDS}"] = _ids(eagle[_AUX_IDS], f"eagle_config.{_AUX_IDS}")
    if hf.get(_AUX_IDS) is not None:  # counts the layers passed
        given[_AUX_IDS] = tuple(i - 1 for i in _ids(hf[_AUX_IDS], _AUX_IDS))
        require(min(given[_AUX_IDS], default=0) >= 0, f"{_AUX_IDS} captures the embedding, which is not supported")
    if len(set(given.values())) > 1:
        said = "; ".join(f"{key} means after {list(ids)}" for key, ids in given.items())
        raise UserError(f"the draft's capture layers disagree: {said}. Keep capture_after and remove the others")
    count = _number(hf, "num_aux_hidden_states", int, None)
    if given:
        capture_after = next(iter(given.values()))
        if list(given) == [_AUX_IDS]:
            notes.append(
                f"{_AUX_IDS} {hf[_AUX_IDS]} is read as vLLM does: the states after layers {list(capture_after)}"
            )
    else:
        capture_after = default_capture_after(num_layers)
        notes.append(
            f"the draft's config does not say which target layers it reads: the usual {list(capture_after)} are taken. "
            "If it was trained on others its drafts are worthless; say so with capture_after in its config.json"
        )
    require(
        count in (None, len(capture_after)), f"num_aux_hidden_states is {count} but {len(capture_after)} are captured"
    )
    check_capture_after(capture_after, num_layers)
    return capture_after


# ---------------------------------------------------------------- drafts: tensors

_AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def draft_tensor_names(names: Iterable[str]) -> dict[str, str]:
    """File name -> our name of each draft tensor; buffers that are computed anyway are left out.

    UserError when the file holds more than one layer, or two tensors of the same meaning.
    """
    out: dict[str, str] = {}
    for name in names:
        ours = name.removeprefix("model.")
        if ours.endswith("rotary_emb.inv_freq"):
            continue
        ours = re.sub(r"^(layers|midlayer)\.0\.", "midlayer.", ours)
        for theirs, replacement in _AUX_NORMS.items():
            ours = ours.replace(f"{theirs}.", f"{replacement}.")
        deeper = re.match(r"(?:layers|midlayer)\.(\d+)\.", ours)
        require(deeper is None, f"the draft has a layer {deeper[1] if deeper else ''} ({name}); only one is supported")
        require(ours not in out.values(), f"the draft's file holds {ours} twice, under different names")
        out[name] = ours
    return out


def draft_target_ids(
    d2t: Tensor | None, t2d: Tensor | None, draft_vocab_size: int, vocab_size: int
) -> tuple[Tensor, list[str]]:
    """The target id of each draft id, from the tensors in a draft's file, with notes.

    `d2t` holds offsets (target id = i + d2t[i]), in any order; files with absolute ids exist and are recognised.
    `t2d` may be absent. UserError when the map is missing, out of range, not unique, or at odds with `t2d`.
    """
    W, V = draft_vocab_size, vocab_size
    if d2t is None:
        require(
            W == V,
            f"the draft has {W} of the target's {V} tokens but no d2t, so nobody knows which; "
            "export it again together with its vocabulary map",
        )
        require(t2d is None or bool(t2d.all()), "the draft has a t2d that leaves tokens out, but no d2t")
        return torch.arange(V), []
    require(
        tuple(d2t.shape) == (W,) and not d2t.dtype.is_floating_point and d2t.dtype != torch.bool,
        f"d2t is {d2t.dtype} {list(d2t.shape)}; expected {W} integers, as draft_vocab_size says",
    )
    require(
        t2d is None or tuple(t2d.shape) == (V,),
        f"t2d is {list(t2d.shape) if t2d is not None else ''}; expected [{V}], the target's vocabulary",
    )
    d2t = d2t.long().cpu()
    offsets, absolute = d2t + torch.arange(W), d2t
    fits_offsets, fits_absolute = _is_map(offsets, V), _is_map(absolute, V)
    if t2d is not None and (fits_offsets or fits_absolute):
        marked = torch.nonzero(t2d.cpu()).flatten()
        fits_offsets = fits_offsets and torch.equal(offsets.sort().values, marked)
        fits_absolute = fits_absolute and torch.equal(absolute.sort().values, marked)
        require(fits_offsets or fits_absolute, f"d2t and t2d disagree: t2d marks {len(marked)} tokens, d2t others")
    require(
        fits_offsets or fits_absolute,
        f"d2t is no map: neither as offsets nor as ids does it name {W} different tokens of 0..{V - 1}",
    )
    # Read as offsets, 0, 1, 2 ... would mean 0, 2, 4 ...: nobody writes that, it is the identity in absolute ids.
    counting = W > 1 and torch.equal(d2t, torch.arange(W))
    if fits_absolute and (not fits_offsets or (counting and t2d is None)):
        return absolute, ["d2t holds absolute target ids instead of offsets and is read so"]
    notes = []
    if fits_absolute and t2d is None and W > 1:
        notes.append(
            "d2t would make sense as offsets and as absolute ids, and there is no t2d to tell: read as offsets"
        )
    if W < V and torch.equal(offsets, torch.arange(W)):
        notes.append(f"the draft vocabulary is simply the first {W} tokens: was a real map ever built?")
    return offsets, notes


def _is_map(ids: Tensor, vocab_size: int) -> bool:
    inside = len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    return inside and len(ids.unique()) == len(ids)


def vocab_tensors(target_ids_W: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` and `t2d` as files hold them; nothing when the draft has the target's vocabulary in its own order."""
    ids = target_ids_W.long().cpu()
    identity = torch.arange(len(ids))
    if len(ids) == vocab_size and torch.equal(ids, identity):
        return {}  # vLLM has no place for a map of the full vocabulary
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - identity, "t2d": t2d}
