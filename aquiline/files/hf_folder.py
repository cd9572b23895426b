"""A model folder of Transformers that our own forward does not compute: its config in our words, and the model.

Which models those are is for Transformers to say; what of them cannot be decoded in trees is refused by name here and
in model/hf_target.py, and what slips through, by model/hf_check.py.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aquiline.config import RopeConfig, TargetConfig, UserError, require
from aquiline.files.disk import one_line
from aquiline.files.target_formats import rope_config, token_ids
from aquiline.model.hf_check import check
from aquiline.model.hf_target import HFTarget

# Of layers that keep keys and values.
_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# Keys of a config.json that change no hidden state, or that a library adds on saving.
_NO_MATTER = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "max_position_embeddings", "model_type",
    "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def hf_target_config(
    folder: Path, hf: Mapping[str, Any], generation: Mapping[str, Any] | None
) -> tuple[TargetConfig, list[str]]:
    """The config.json of `folder`, which is `hf`, as a TargetConfig, with notes.

    Of sizes that a head takes over from its target, those that a head can have.
    """
    family, config = hf.get("model_type"), _auto_config(folder)
    require(
        getattr(config, "text_config", None) is None and not config.is_encoder_decoder,
        f"model_type {family!r} is more than a decoder of text; only text models are supported",
    )
    class_name = _class_name(config)
    named = hf.get("architectures")
    require(
        class_name is not None and named in (None, [], [class_name]),
        f"architectures {named} of model_type {family!r} is not a plain language model; expected {class_name}",
    )
    kinds = set(getattr(config, "layer_types", None) or [])
    require(
        kinds <= _KINDS,
        f"{family} has layers of {', '.join(sorted(kinds - _KINDS))}, which keep a state of all tokens so far, and not "
        "the keys and values of each: it cannot be that of a tree",
    )
    notes: list[str] = []
    heads = _size(config, family, "num_attention_heads")
    hidden = _size(config, family, "hidden_size")
    inner = _value(config, "intermediate_size")
    eos = token_ids(hf.get("eos_token_id", config.eos_token_id), "eos_token_id")
    eos += token_ids((generation or {}).get("eos_token_id"), "eos_token_id of generation_config")
    eps = [getattr(config, key, None) for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")]
    return TargetConfig(
        family=str(family),
        vocab_size=_size(config, family, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=inner if isinstance(inner, int) and inner > 0 else 4 * hidden,
        num_layers=_size(config, family, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_value(config, "num_key_value_heads") or heads,
        head_dim=_value(config, "head_dim") or hidden // heads,
        norm_eps=next((e for e in eps if e), 1e-6),
        max_positions=_positions(config, str(family), notes),
        rope=_rope(config),
        tied_head=bool(config.tie_word_embeddings),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=(token_ids(hf.get("bos_token_id"), "bos_token_id") or (None,))[0],
        structure=_structure(hf),
    ), notes


def _auto_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # unknown model_type, values it does not take: each of its classes has its own way
        raise UserError(f"Transformers does not take it: {one_line(error)}") from error


def _class_name(config: Any) -> str | None:
    from transformers import AutoModelForCausalLM

    found: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return None if found is None else found.__name__


def _value(config: Any, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except Exception as error:  # Transformers' own, of no public name
        raise UserError(f"{config.model_type} has a {key} for each layer; one for all is expected") from error


def _size(config: Any, family: Any, key: str) -> int:
    value = _value(config, key)
    require(isinstance(value, int) and value > 0, f"model_type {family!r} has {key} = {value!r}; expected a number")
    assert isinstance(value, int)
    return value


def _positions(config: Any, family: str, notes: list[str]) -> int:
    """The longest context. Where frequencies change at a length, that one: a tree that reaches over it would turn keys
    in another way than its own text does later. Where scores are scaled by the token's place in the pass, which is not
    its position (Llama 4's layers without rotary positions), the longest in which that scale is 1.
    """
    longest = _size(config, family, "max_position_embeddings")
    for block in _rope_blocks(config):
        original = block.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if block.get("rope_type") == "longrope" and original and original < longest:
            notes.append(f"the target turns its keys otherwise beyond {original} tokens: the context is cut to that")
            longest = original
    floor = config.floor_scale if getattr(config, "attn_temperature_tuning", None) else None
    if floor is not None and floor <= longest:
        longest = floor - 1
        notes.append(f"the target scales its scores otherwise from {floor} tokens on: the context is cut to {longest}")
    return longest


def _rope_blocks(config: Any) -> list[Mapping[str, Any]]:
    """One, or one for each kind of layer, that of full attention first."""
    found = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(v, Mapping) for v in found.values()):
        return [found[k] for k in sorted(found, key=lambda k: k != "full_attention") if found[k]]
    return [found] if found else []


def _rope(config: Any) -> RopeConfig:
    """Of a head: the target's where a head can have that one, else its base alone. Any will do, as long as the head is
    trained with the one it decodes with.
    """
    block = next(iter(_rope_blocks(config)), {})
    try:
        return rope_config({"rope_parameters": dict(block), "max_position_embeddings": config.max_position_embeddings})
    except UserError:
        return RopeConfig(float(block.get("rope_theta") or 10000.0))


def _structure(hf: Mapping[str, Any]) -> str:
    """Of everything in config.json that may change what is computed; the file, for a library's release adds keys."""
    facts = {k: v for k, v in hf.items() if k not in _NO_MATTER}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def load_hf_target(
    folder: Path,
    config: TargetConfig,
    dtype: torch.dtype | None,
    device: torch.device | str,
    capture_after: tuple[int, ...],
) -> HFTarget:
    """The target, checked. `dtype` None: as stored, to read weights and not to run them. UserError for what does not
    fit, by the names of tensors, or cannot be decoded in trees.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    loader: Any = AutoModelForCausalLM
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        hf, report = loader.from_pretrained(
            folder, dtype=dtype or "auto", attn_implementation="eager", use_safetensors=True, local_files_only=True,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # of many classes: sizes that do not fit, a package for the quantisation missing
        raise UserError(f"target {folder}: Transformers cannot load it: {one_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    problems += [f"{name} is left over" for name in sorted(report["unexpected_keys"])]
    problems += [f"{name} has another shape" for name in sorted(map(str, report["mismatched_keys"]))]
    require(not problems, f"the weights of target {folder} do not fit its config: {'; '.join(problems[:24])}")
    refused = f"target {folder}: {config.family} cannot be decoded in trees here"
    try:
        target = HFTarget(hf.eval().requires_grad_(False), config, capture_after).to(device).eval()
        if dtype is not None:
            check(target)
    except UserError as error:
        raise UserError(f"{refused}: {error}") from error
    except Exception as error:  # the model's own code, of which we know nothing
        raise UserError(f"{refused}: its code ended with {type(error).__name__}: {one_line(error)}") from error
    return target
