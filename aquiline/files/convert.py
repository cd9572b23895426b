"""A head from one project's layout into another's: read strictly, written so that the engine's default path loads it
right; folders are read back bit for bit. Nothing is made up or lost in silence, and OUT appears whole or not at all.
"""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.config import DraftConfig, UserError, capture_name, require
from aquiline.files import checkpoint, draft_formats, draft_gguf, draft_openvino, engines, speculators_format
from aquiline.files.checkpoint import DraftFile, SavesTokenizer
from aquiline.files.disk import atomic_file, atomic_folder, write_json, write_tensors
from aquiline.model.target import Target

SGLANG, SPECULATORS, OPENVINO, GGUF = "sglang", "speculators", "openvino", "gguf"
ENGINES = {
    SGLANG: engines.SGLANG,
    SPECULATORS: engines.VLLM,
    OPENVINO: engines.OPENVINO,
    GGUF: engines.LLAMA_CPP,
}
_NAMES: dict[str, Callable[[str], str]] = {  # of our tensors
    SGLANG: str,
    SPECULATORS: speculators_format.speculators_tensor_name,
    OPENVINO: str,
    GGUF: draft_gguf.gguf_name,
}
# Keys of other layouts that say what the plain layout says under another name, or say what is always so.
_SAID_ELSEWHERE = {
    "eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "target_hidden_size", "attention_bias",
    "embed_requires_grad", "speculators_config", "speculators_model_type", "speculators_version", "rope_theta",
    "rope_scaling", "rope_parameters", "transformer_layer_config", "original_max_position_embeddings", "aquiline",
    "trained_length", "own_embedding", "fc_norm", "norm_before_fc", "norm_output", "draft_vocab_size", "layer_types",
}  # fmt: skip


def convert(
    draft: str | Path,
    out: Path,
    to: str,
    target_spec: str | None = None,
    *,
    force: bool = False,
    tokenizer: Callable[[], SavesTokenizer] | None = None,
) -> list[str]:
    """Write the head as `to`, one of ENGINES; the report, a line each.

    `target_spec` is needed for an OpenVINO IR (with `tokenizer`, which loads the target's), for a GGUF (there the .gguf
    file of the target), and where the head itself does not say which layers it reads or whose its embedding is. `force`
    writes a head although the engine ignores switches that it was trained with.
    """
    require(to in ENGINES, f"--to {to} is not known; expected one of {', '.join(ENGINES)}")
    _check_out(out, to)
    if to == OPENVINO:
        draft_openvino.exporter()
        require(target_spec is not None, "an OpenVINO IR holds the target's embedding and tokenizer: give --target")
    target_file = _target_file(target_spec) if to == GGUF else None
    checkpoint.draft_path(draft)  # first: a misspelt draft should not cost the loading of the target
    target = None if target_spec is None else checkpoint.load_target(target_spec, None, capture_after=(0,))
    file = checkpoint.read_draft(draft, target)
    checkpoint.check_finite(file.tensors, f"draft {file.folder}")
    report = [_read_line(file), *file.notes]
    if target is not None:
        report += checkpoint.pair_notes(file, target)
    file = _in_target_order(file, report)
    file = _fitting(file, to, force, report)
    embedding = {}
    if target is not None and to in (SPECULATORS, OPENVINO) and not file.config.own_embedding:
        embedding = {"embed_tokens.weight": target.embedding.weight.detach()}
    if to == GGUF:
        assert target_file is not None
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(out) as scratch:
            draft_gguf.write_gguf(scratch, file.config, file.tensors, file.target_ids_W, target_file)
    elif to == OPENVINO:
        assert tokenizer is not None
        with atomic_folder(out) as scratch:
            _write_ir(scratch, file, embedding, tokenizer())
    else:
        with atomic_folder(out) as scratch:
            config = _plain(file, target)
            if to == SPECULATORS:
                verifier = _verifier(file, target_spec, report)
                architectures = [] if target_spec is None else checkpoint.target_architectures(target_spec)
                config = speculators_format.speculators_config(config, file.config, verifier, architectures)
            _write_folder(scratch, config, file, embedding, _NAMES[to])
            _read_back(scratch, file, target)
            if (file.folder / "run.json").is_file():
                shutil.copyfile(file.folder / "run.json", scratch / "run.json")
    report += _changes(file, to, embedding)
    return [*report, _captured(file.config, to), f"written to {out} for {ENGINES[to]}"]


def _check_out(out: Path, to: str) -> None:
    if to == GGUF:
        require(out.suffix == ".gguf", f"{out}: a GGUF is one file; give a name that ends in .gguf")
        require(not out.exists(), f"{out} exists; give another name")
    else:
        empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
        require(empty, f"{out} exists and is not empty; give a new folder")


def _target_file(spec: str | None) -> Path:
    """The target's GGUF, whose tokenizer the draft's file takes."""
    path = None if spec is None else checkpoint.target_path(spec)
    if path is None or not path.is_file():
        raise UserError(
            "a draft's GGUF holds the target's tokenizer, as its GGUF has it: give --target TARGET.gguf, the file that "
            "llama.cpp will run"
        )
    return path


def _read_line(file: DraftFile) -> str:
    layout = "speculators" if speculators_format.is_speculators(file.hf) else "SafeAILab/EAGLE"
    return f"read {file.folder}: {len(file.names)} tensors in the {layout} layout"


def _in_target_order(file: DraftFile, report: list[str]) -> DraftFile:
    """A full vocabulary has no map in any file, so it is in the target's order."""
    c, ids = file.config, file.target_ids_W
    if c.draft_vocab_size < c.vocab_size or torch.equal(ids, torch.arange(len(ids))):
        return file
    report.append("lm_head.weight: its rows are put into the target's order, for a full vocabulary has no map")
    head = {"lm_head.weight": file.tensors["lm_head.weight"][ids.argsort()]}
    return dataclasses.replace(file, tensors=file.tensors | head, target_ids_W=torch.arange(len(ids)))


def _fitting(file: DraftFile, to: str, force: bool, report: list[str]) -> DraftFile:
    """The head as far as the engine computes it; UserError where that is not the whole head, unless forced."""
    engine = ENGINES[to]
    impossible = engines.no_room(file.config, engine)
    require(not impossible, f"{engine} cannot take this head: it has {'; '.join(impossible)}")
    names = engines.left_out(file.config, engine)
    said = ", ".join(f"{name} ({engines.SWITCHES[name][0]})" for name in names)
    require(
        not names or force,
        f"{engine} ignores {said}: there the head would guess otherwise than it was trained to, and few of its guesses "
        "would be accepted. --force writes it all the same",
    )
    if names and to == SGLANG:
        report.append(f"kept although {engine} ignores it: {said}; the architecture's name is one that it refuses")
    elif names:
        off: dict[str, Any] = dict.fromkeys(names, False)
        config = dataclasses.replace(file.config, **off)
        kept = checkpoint.draft_shapes(config, f"draft {file.folder}")
        lost = [name for name in file.tensors if name not in kept]
        report.append(f"LEFT OUT, as {engine} ignores it: {said}" + "".join(f"; {name}" for name in lost))
        file = dataclasses.replace(file, config=config, tensors={k: t for k, t in file.tensors.items() if k in kept})
    if to == SGLANG:
        unread = [*engines.left_out(file.config, engines.REFERENCE), *engines.no_room(file.config, engines.REFERENCE)]
        if unread:
            report.append(f"SafeAILab/EAGLE's own code, which reads this layout too, ignores: {', '.join(unread)}")
    return file


# ---------------------------------------------------------------- writing


def _plain(file: DraftFile, target: Target | None) -> dict[str, Any]:
    dtype = str(file.tensors["lm_head.weight"].dtype).removeprefix("torch.")
    extra: dict[str, Any] = {"dtype": dtype, "torch_dtype": dtype}
    if file.info is not None:
        extra["aquiline"] = dataclasses.asdict(file.info)
    layers = target.config.num_layers if target is not None else file.info.target_layers if file.info is not None else 0
    return draft_formats.draft_config_to_dict(file.config, layers, extra)


def _write_folder(
    folder: Path,
    config: dict[str, Any],
    file: DraftFile,
    embedding: dict[str, Tensor],
    name: Callable[[str], str] = str,
) -> None:
    """config.json and model.safetensors. vLLM shares an embedding that equals the target's; speculators wants one."""
    write_json(folder / "config.json", config)
    tensors = draft_formats.file_tensors(file.tensors, file.target_ids_W, file.config) | embedding
    write_tensors(folder, {name(ours): tensor for ours, tensor in tensors.items()})


def _verifier(file: DraftFile, target_spec: str | None, report: list[str]) -> str:
    """Where `vllm serve HEAD` finds the target."""
    if target_spec is not None and not checkpoint.target_path(target_spec).is_file():
        path = checkpoint.target_path(target_spec)
        given = str(path.resolve()) if Path(target_spec).expanduser().exists() else target_spec
        report.append(f"its config names the target {given!r}, which `vllm serve` will look for")
        return given
    named = speculators_format.verifier_name(file.hf) or (None if file.info is None else file.info.target)
    if named is None:
        raise UserError("a speculators head names its target, and this head names none: give --target FOLDER")
    report.append(
        f"its config names the target {named!r}, which `vllm serve` will look for; if that is no folder and no hub id, "
        "give --target FOLDER (export-target writes one)"
    )
    return named


def _write_ir(folder: Path, file: DraftFile, embedding: dict[str, Tensor], chat: SavesTokenizer) -> None:
    """By way of a plain folder. The exporter's class always has a map: that of a full vocabulary is written too."""
    source, c = folder / "plain", file.config
    source.mkdir()
    if c.draft_vocab_size == c.vocab_size:
        embedding = embedding | {
            "d2t": torch.zeros(c.vocab_size, dtype=torch.long),
            "t2d": torch.ones(c.vocab_size, dtype=torch.bool),
        }
    _write_folder(source, _plain(file, None), file, embedding)
    chat.save(source)
    draft_openvino.write_ir(source, folder, c.capture_after)
    shutil.rmtree(source)


def _read_back(folder: Path, file: DraftFile, target: Target | None) -> None:
    """What was written is what was read, bit for bit; else it is our fault and nothing appears."""
    again = checkpoint.read_draft(folder, target)
    assert again.config == file.config
    assert torch.equal(again.target_ids_W, file.target_ids_W)
    assert again.tensors.keys() == file.tensors.keys()
    for name, tensor in file.tensors.items():
        same = again.tensors[name].dtype == tensor.dtype and torch.equal(again.tensors[name], tensor)
        assert same, name


# ---------------------------------------------------------------- the report


def _changes(file: DraftFile, to: str, added: Mapping[str, Tensor]) -> list[str]:
    """How names changed, those alike together; what was left out or made; what of the config was left out."""
    name, mapped = _NAMES[to], file.config.draft_vocab_size < file.config.vocab_size
    renamed = Counter(
        _prefixes(theirs, name(ours))
        for theirs, ours in file.names.items()
        if ours in file.tensors and theirs != name(ours)
    )
    lines = [f"renamed {a} to {b}" + (f" ({n} tensors)" if n > 1 else "") for (a, b), n in renamed.items()]
    kept = {*file.tensors, *added, "d2t", *(["t2d"] if to != GGUF else [])}
    kept |= {draft_formats.OUTPUT_BIAS} if file.config.attention_bias else set()
    lines += sorted(f"left out {theirs}" for theirs, ours in file.names.items() if ours not in kept)
    lines += [f"left out {theirs}, which is computed" for theirs in file.computed]
    lines += [f"{ours}: the target's" for ours in added]
    if to == GGUF and mapped:
        lines.append("d2t: target ids in place of offsets, as llama.cpp wants them")
    elif mapped and "t2d" not in file.names.values():
        lines.append("t2d was made from d2t")
    keys = _unused_keys(file)
    return lines + ([f"not carried over from the config: {', '.join(keys)}"] if keys else [])


def _prefixes(a: str, b: str) -> tuple[str, str]:
    """The names without the parts that both end in."""
    left, right = a.split("."), b.split(".")
    same = 0
    while left and right and left[-1] == right[-1]:
        left.pop()
        right.pop()
        same += 1
    return tuple(".".join([*parts, *(["*"] if same else [])]) for parts in (left, right))  # type: ignore[return-value]


def _unused_keys(file: DraftFile) -> list[str]:
    known = _SAID_ELSEWHERE | set(_plain(file, None))
    layer = file.hf.get("transformer_layer_config")
    flat = {**file.hf, **(layer if isinstance(layer, Mapping) else {})}
    said = {k: v for k, v in flat.items() if v is not None and v is not False and v != [] and v != {}}
    return sorted(said.keys() - known)


def _captured(c: DraftConfig, to: str) -> str:
    how = {
        OPENVINO: ", named so in the IR's hidden_layers_list",
        GGUF: f", which enter layers {[i + 1 for i in c.capture_after]}: target_layers",
    }
    return f"it reads the states after layers {capture_name(c.capture_after)}" + how.get(to, "")
