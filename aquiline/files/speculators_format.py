"""The config of a head in the layout of vLLM's speculators, to and from that of the plain layout. No disk here.

There the draft's one layer has a config of its own, of a Llama or a Qwen3, nested in that of the head. The names of
tensors are those of the plain layout but for `layers.0.` instead of `midlayer.`; `draft_formats` reads both.
"""

from collections.abc import Mapping
from typing import Any

from aquiline.config import DraftConfig, require
from aquiline.files.target_formats import flag, text, texts

_CLASSES = ("Eagle3DraftModel", "Eagle3Speculator")  # of what is trained now, and before; the former is written
_VERSION = "0.9.0"  # whose reader this was written against
_ARCHITECTURES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}  # vLLM's, by model_type
# What a Qwen3 config that leaves them out means; a Llama's are what the plain layout's are.
_QWEN3_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 32}
# Keys of the head itself, the same here and there.
_SHARED = (
    "draft_vocab_size",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "trained_length",
    "capture_after",
    "aquiline",
)
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"  # layers passed, as vLLM counts them; null is the usual three
_LAYER_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "num_aux_hidden_states",
)  # fmt: skip
_SPECULATIVE_TOKENS = 3  # what `vllm serve HEAD` drafts unless told otherwise


def is_speculators(hf: Mapping[str, Any]) -> bool:
    return any(key in hf for key in ("speculators_config", "speculators_model_type", "transformer_layer_config"))


def plain_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a speculators head in the words of the plain layout; UserError names what is missing or unknown."""
    kind = text(hf, "speculators_model_type")
    require(kind == "eagle3", f"speculators_model_type is {kind!r}; expected 'eagle3'")
    classes = texts(hf, "architectures")
    require(
        len(classes) == 1 and classes[0] in _CLASSES,
        f"architectures is {classes} in a speculators config; expected one of {', '.join(_CLASSES)}",
    )
    layer = hf.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        layer = {}
    require(bool(layer), "the speculators config has no transformer_layer_config, an object")
    family = text(layer, "model_type")
    require(
        family in _ARCHITECTURES,
        f"model_type of transformer_layer_config is {family!r}; expected 'llama' or 'qwen3' (where it is missing, vLLM "
        "reads llama and speculators qwen3: write the one it was trained as)",
    )
    require(
        hf.get("norm_before_residual") is not None,
        "the speculators config has no norm_before_residual: vLLM reads true, speculators false; write which it is",
    )
    out = (_QWEN3_DEFAULTS if family == "qwen3" else {}) | dict(layer)
    out |= {key: hf[key] for key in (*_SHARED, "dtype", "torch_dtype") if hf.get(key) is not None}
    out["architectures"] = [_ARCHITECTURES[family]]
    out["norm_before_residual"] = flag(hf, "norm_before_residual")
    out["embed_requires_grad"] = flag(hf, "embed_requires_grad")
    for key in ("target_hidden_size", _AUX_IDS):
        if hf.get(key) is not None:
            out[key] = hf[key]
    if flag(hf, "tie_word_embeddings"):
        out["tie_word_embeddings"] = True
    return out


def verifier_name(hf: Mapping[str, Any]) -> str | None:
    """The target that a speculators config names."""
    inner = hf.get("speculators_config") or {}
    verifier = inner.get("verifier") if isinstance(inner, Mapping) else None
    return text(verifier, "name_or_path") if isinstance(verifier, Mapping) else None


def speculators_config(
    plain: Mapping[str, Any], config: DraftConfig, verifier: str, architectures: list[str]
) -> dict[str, Any]:
    """The `config.json` of a head for `vllm serve HEAD`, from its plain one; `verifier` is where vLLM finds the target.

    Every switch is written: where one is missing, vLLM and speculators read different things.
    """
    method = {"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS, "verifier_accept_k": 1}
    narrower = config.target_hidden_size != config.hidden_size
    return (
        {
            "architectures": [_CLASSES[0]],
            "speculators_model_type": "eagle3",
            "speculators_version": _VERSION,
            "target_hidden_size": config.target_hidden_size if narrower else None,
            _AUX_IDS: plain.get(_AUX_IDS),
            "norm_before_residual": config.norm_before_residual,
            "embed_requires_grad": config.own_embedding,
            "tie_word_embeddings": False,
            "transformer_layer_config": {"attention_bias": False} | {k: plain[k] for k in _LAYER_KEYS if k in plain},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [method | {"accept_tolerance": 0.0}],
                "verifier": {"name_or_path": verifier, "architectures": architectures},
            },
        }
        | {key: plain[key] for key in (*_SHARED, "dtype", "torch_dtype") if plain.get(key) is not None}
        | {name: getattr(config, name) for name in ("norm_before_fc", "fc_norm", "norm_output")}
    )


def speculators_tensor_name(ours: str) -> str:
    """The name of one of our tensors in that layout."""
    return "layers.0." + ours.removeprefix("midlayer.") if ours.startswith("midlayer.") else ours
