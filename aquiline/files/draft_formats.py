"""Draft heads of other projects in our words: the layout of SafeAILab/EAGLE, SpecForge and SGLang, which is also what
we train into; with every switch off it is the form that all engines load. vLLM's speculators' is read by way of it. No
disk here. What we do not compute exactly as its origin does is refused by name, never ignored.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from aquiline.config import (
    TOP,
    DraftConfig,
    TargetConfig,
    UserError,
    capture_name,
    check_capture_after,
    default_capture_after,
    require,
)
from aquiline.files import engines, speculators_format
from aquiline.files.target_formats import (
    flag,
    number,
    require_silu,
    rope_config,
    rope_to_dict,
    split_heads,
    text,
    texts,
    token_ids,
)

# ---------------------------------------------------------------- drafts: config.json

DRAFT_ARCHITECTURE = "LlamaForCausalLMEagle3"
_DRAFT_ALIASES = {DRAFT_ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "LlamaEagle3DraftModel"}
_QK_NORM_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
# A head that reads the target's final state and has no fc, for comparison: a name that no engine knows, so all refuse.
_TOP_ARCHITECTURE = "TopFeatureDraft"
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
        "capture_after": capture_name(c.capture_after),
    }
    out |= rope_to_dict(c.rope)
    out |= {name: True for name in _SWITCHES if getattr(c, name)}
    if c.own_embedding or c.target_hidden_size != c.hidden_size:
        # Its presence is also how the reference learns to use the draft's own embedding.
        out["target_hidden_size"] = c.target_hidden_size
    if c.top:
        assert not set(out) & set(extra or {})
        return out | dict(extra or {})
    if len(c.capture_after) != 3:
        out["num_aux_hidden_states"] = len(c.capture_after)
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
    if c.top:
        return _TOP_ARCHITECTURE
    if c.qk_norm:
        return _QK_NORM_ARCHITECTURE
    return "Eagle3LlamaForCausalLM" if engines.left_out(c, engines.SGLANG) else DRAFT_ARCHITECTURE


def draft_config_from_dict(
    hf: Mapping[str, Any], target: TargetConfig | None, target_layers: int | None = None
) -> tuple[DraftConfig, list[str]]:
    """A draft's `config.json`, ours or another project's, with notes for the user; checked against its target if given.

    `target_layers` is how many layers the target has, where nothing else of it is known. `own_embedding` is only what
    the config says: the weights decide (`files/checkpoint.py`).
    """
    notes: list[str] = []
    if speculators_format.is_speculators(hf):
        beside = {key: hf[key] for key in (*_UNSUPPORTED, "eagle_config", "layer_types") if key in hf}
        hf = beside | speculators_format.plain_config(hf)  # what stands beside the layer's own is refused by name, too
    eagle = hf.get("eagle_config") or {}
    require(isinstance(eagle, Mapping), f"eagle_config is {eagle!r}; expected an object")
    qk_norm = _check_draft_architecture(hf)
    _check_draft_switches(hf, eagle)
    heads, hidden = number(hf, "num_attention_heads", int), number(hf, "hidden_size", int)
    target_hidden = number(hf, "target_hidden_size", int, hidden)
    vocab = number(hf, "vocab_size", int)
    if target is not None:
        target_layers = target.num_layers
        for what, ours, theirs in (
            ("hidden size", target_hidden, target.hidden_size),
            ("vocabulary", vocab, target.vocab_size),
        ):
            message = f"the draft was made for a target with {what} {ours}, this target has {theirs}"
            require(ours == theirs, message, "target_mismatch")
    if flag(hf, "tie_word_embeddings"):
        notes.append("the draft's config says tie_word_embeddings; its own lm_head is used all the same")
    positions = number(hf, "max_position_embeddings", int)
    trained = number(hf, "trained_length", int, None)
    if target is not None and positions < target.max_positions:
        # Positions come from the target, so the draft must reach as far; what it was trained on is another matter.
        trained = trained or positions
        notes.append(
            f"the draft's max_position_embeddings {positions} is raised to the target's {target.max_positions}; "
            f"acceptance beyond {trained} tokens is untested"
        )
    if flag(hf, "norm_output") and "capture_after" not in hf:
        notes.append("norm_output is read as engines read it: the normed state is fed back")
    capture_after = _capture_after(hf, eagle, target_layers, notes)
    switches = {k: flag(hf, k, flag(eagle, k)) for k in _SWITCHES}
    return DraftConfig(
        vocab_size=vocab,
        draft_vocab_size=number(hf, "draft_vocab_size", int, vocab),
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        intermediate_size=number(hf, "intermediate_size", int),
        num_heads=heads,
        num_kv_heads=number(hf, "num_key_value_heads", int, heads),
        head_dim=number(hf, "head_dim", int, None) or split_heads(hidden, heads),
        norm_eps=number(hf, "rms_norm_eps", float, 1e-6),
        max_positions=max(positions, target.max_positions if target is not None else 0),
        rope=rope_config(hf),
        capture_after=capture_after,
        trained_length=trained,
        qk_norm=qk_norm,
        own_embedding=flag(hf, "own_embedding") or hidden != target_hidden,
        **switches,
    ), notes


def _check_draft_architecture(hf: Mapping[str, Any]) -> bool:
    """UserError unless this is an EAGLE-3 head we know; True if it has norms on q and k."""
    architectures = texts(hf, "architectures") or [DRAFT_ARCHITECTURE]
    known = _DRAFT_ALIASES | {_QK_NORM_ARCHITECTURE, _TOP_ARCHITECTURE}
    require(
        len(architectures) == 1 and architectures[0] in known,
        f"draft architecture {architectures} is not supported; supported: {', '.join(sorted(known))}",
    )
    kind = text(hf, "model_type", "llama")
    require(kind in ("llama", "qwen3"), f"draft model_type {kind!r} is not supported; expected 'llama' or 'qwen3'")
    require(
        (architectures[0] == _TOP_ARCHITECTURE) == (hf.get("capture_after") == "top"),
        f"the draft's architecture is {architectures[0]}, its capture_after {hf.get('capture_after')!r}: "
        f"{_TOP_ARCHITECTURE} and 'top' go together",
    )
    return kind == "qwen3" if architectures[0] == _TOP_ARCHITECTURE else architectures[0] == _QK_NORM_ARCHITECTURE


def _check_draft_switches(hf: Mapping[str, Any], eagle: Mapping[str, Any]) -> None:
    require_silu(hf)
    require(not hf.get("quantization_config"), "the draft has a quantization_config, which is not supported")
    unknown = set(eagle) - _EAGLE_CONFIG_KNOWN
    require(not unknown, f"eagle_config has {', '.join(sorted(unknown))}, which is not known here")
    for name, neutral in _UNSUPPORTED.items():
        for value in (hf.get(name), eagle.get(name)):
            require(
                value is None or value == neutral, f"the draft's config has {name} = {value!r}, which is not supported"
            )
    windows = [kind for kind in texts(hf, "layer_types") if kind != "full_attention"]
    require(not windows, f"the draft's layer_types has {', '.join(windows)}; only full_attention is supported")
    use_aux_norm = flag(hf, "use_aux_norm")  # SGLang's other name of fc_norm
    require(not use_aux_norm or flag(hf, "fc_norm"), "the draft has use_aux_norm; write it as fc_norm: true")
    for name in _SWITCHES:
        if name in hf and name in eagle:
            require(
                hf[name] == eagle[name], f"{name} is {hf[name]!r} in the config and {eagle[name]!r} in eagle_config"
            )


def _capture_after(
    hf: Mapping[str, Any], eagle: Mapping[str, Any], num_layers: int | None, notes: list[str]
) -> tuple[int, ...]:
    """Which states the draft reads, from whichever convention its config uses; all given ones must agree."""
    if hf.get("capture_after") == "top":
        require(not any(_AUX_IDS in where for where in (hf, eagle)), f"capture_after is 'top', yet {_AUX_IDS} is given")
        return TOP
    given: dict[str, tuple[int, ...]] = {}
    if hf.get("capture_after") is not None:
        given["capture_after"] = token_ids(hf["capture_after"], "capture_after")
    if eagle.get(_AUX_IDS) is not None:  # names the layer the state comes after, as ours
        given[f"eagle_config.{_AUX_IDS}"] = token_ids(eagle[_AUX_IDS], f"eagle_config.{_AUX_IDS}")
    if hf.get(_AUX_IDS) is not None:  # counts the layers passed
        given[_AUX_IDS] = tuple(i - 1 for i in token_ids(hf[_AUX_IDS], _AUX_IDS))
        require(min(given[_AUX_IDS], default=0) >= 0, f"{_AUX_IDS} captures the embedding, which is not supported")
    if len(set(given.values())) > 1:
        said = "; ".join(f"{key} means after {list(ids)}" for key, ids in given.items())
        message = f"the draft's capture layers disagree: {said}. Keep capture_after and remove the others"
        raise UserError(message, "capture_layers")
    count = number(hf, "num_aux_hidden_states", int, None)
    if given:
        capture_after = next(iter(given.values()))
        if list(given) == [_AUX_IDS]:
            notes.append(
                f"{_AUX_IDS} {hf[_AUX_IDS]} is read as vLLM does: the states after layers {list(capture_after)}"
            )
    else:
        if num_layers is None:
            raise UserError(
                "the draft's config does not say which target layers it reads; the usual ones follow from the number "
                "of the target's layers, so give --target"
            )
        capture_after = default_capture_after(num_layers)
        notes.append(
            f"the draft's config does not say which target layers it reads: the usual {list(capture_after)} are taken. "
            "If it was trained on others its drafts are worthless; say so with capture_after in its config.json"
        )
    require(
        count in (None, len(capture_after)), f"num_aux_hidden_states is {count} but {len(capture_after)} are captured"
    )
    require(capture_after != TOP, f"capture_after is {list(TOP)}; expected layers, or 'top'")
    check_capture_after(capture_after, num_layers or max(capture_after, default=0) + 1)
    return capture_after


# ---------------------------------------------------------------- drafts: tensors

_AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
OUTPUT_BIAS = "midlayer.self_attn.o_proj.bias"  # engines expect it under `attention_bias`; we have none: zeros


def require_head(names: Iterable[str], hf: Mapping[str, Any]) -> None:
    """UserError unless a file with tensors of these names can be an EAGLE-3 head: what every one has, and only they."""
    found = "fc.weight" in {name.removeprefix("model.") for name in names}
    require(found or hf.get("capture_after") == "top", "no fc.weight: this is no EAGLE-3 head", "fc.weight")


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
            "d2t",
        )
        require(t2d is None or bool(t2d.all()), "the draft has a t2d that leaves tokens out, but no d2t", "d2t")
        return torch.arange(V), []
    require(
        tuple(d2t.shape) == (W,) and not d2t.dtype.is_floating_point and d2t.dtype != torch.bool,
        f"d2t is {d2t.dtype} {list(d2t.shape)}; expected {W} integers, as draft_vocab_size says",
        "d2t",
    )
    require(
        t2d is None or tuple(t2d.shape) == (V,),
        f"t2d is {list(t2d.shape) if t2d is not None else ''}; expected [{V}], the target's vocabulary",
        "d2t",
    )
    d2t = d2t.long().cpu()
    offsets, absolute = d2t + torch.arange(W), d2t
    fits_offsets, fits_absolute = _is_map(offsets, V), _is_map(absolute, V)
    if t2d is not None and (fits_offsets or fits_absolute):
        marked = torch.nonzero(t2d.cpu()).flatten()
        fits_offsets = fits_offsets and torch.equal(offsets.sort().values, marked)
        fits_absolute = fits_absolute and torch.equal(absolute.sort().values, marked)
        message = f"d2t and t2d disagree: t2d marks {len(marked)} tokens, d2t others"
        require(fits_offsets or fits_absolute, message, "d2t")
    require(
        fits_offsets or fits_absolute,
        f"d2t is no map: neither as offsets nor as ids does it name {W} different tokens of 0..{V - 1}",
        "d2t",
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


def file_tensors(tensors: Mapping[str, Tensor], target_ids_W: Tensor, config: DraftConfig) -> dict[str, Tensor]:
    """All tensors of a draft's file, from those of the model and its map; the same bytes."""
    head = tensors["lm_head.weight"]
    out = dict(tensors) | vocab_tensors(head, target_ids_W, config.vocab_size)
    if config.attention_bias:
        out[OUTPUT_BIAS] = torch.zeros(config.hidden_size, dtype=head.dtype)
    return out


def vocab_tensors(lm_head_WD: Tensor, target_ids_W: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`lm_head.weight`, `d2t` and `t2d` as files hold them.

    The full vocabulary is written in the target's order and without a map: vLLM has no place for one.
    """
    ids = target_ids_W.long().cpu()
    if len(ids) == vocab_size:
        return {"lm_head.weight": lm_head_WD[ids.argsort()]}
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"lm_head.weight": lm_head_WD, "d2t": ids - torch.arange(len(ids)), "t2d": t2d}
