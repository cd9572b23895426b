"""Files that are there whole or not at all: JSON, tensors, folders. Damaged ones become one-line errors."""

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from aquiline.config import UserError, require


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON object from a file; UserError when it is missing, damaged or no object."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    require(isinstance(value, dict), f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def write_json_atomic(path: str | Path, value: Any) -> None:
    """Write a JSON file that is there whole or, if we are killed, as it was before."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_json(scratch, value)
        _sync(scratch)
        os.replace(scratch, path)
        _sync(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    safetensors.torch.save_file({k: t.contiguous() for k, t in tensors.items()}, path, {"format": "pt"})
    shutil.copymode(folder / "config.json", path)  # safetensors makes it readable by its owner only


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_OWN_FILES = {"config.json", "model.safetensors", "run.json"}


@contextlib.contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """A scratch folder to write into, which takes the place of `folder` when the block ends well.

    Killed at any moment, `folder` is the old one or the new one. UserError when it cannot be written, or when it
    holds files that would be lost.
    """
    folder = Path(os.path.realpath(folder))
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            _sync(path)
        _take_the_place(scratch, folder)
        _sync(folder.parent)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise UserError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # after an exchange this is the old folder


def _take_the_place(scratch: Path, folder: Path) -> None:
    if not folder.exists():
        os.rename(scratch, folder)
        return
    require(folder.is_dir(), f"{folder} exists and is a file; give a folder")
    lost = {p.name for p in folder.iterdir()} - {p.name for p in scratch.iterdir()} - _OWN_FILES
    require(not lost, f"{folder} holds {', '.join(sorted(lost))}, which saving there would delete; give another folder")
    if not _exchange(scratch, folder):
        # Two renames: killed between them, the old folder still exists, under the scratch name with `.old`.
        old = scratch.with_suffix(".old")
        os.rename(folder, old)
        try:
            os.rename(scratch, folder)
        except OSError:
            os.rename(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step, where the system can (Linux); False where it cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP):  # a file system that cannot
        return False
    raise OSError(code, os.strerror(code))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {one_line(error)}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: model.safetensors, its shards, or pytorch_model.bin, in this order."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    pickled = folder / "pytorch_model.bin"
    if single.is_file():
        return _read_safetensors(single)
    if index.is_file():
        weight_map = read_json(index).get("weight_map") or {}
        require(bool(weight_map), f"{index} has no weight_map")
        shards = sorted(set(weight_map.values()))
        absent = [s for s in shards if not (folder / s).is_file()]
        require(not absent, f"{folder} lacks {', '.join(absent)}, which its index names; copy it there")
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            tensors |= _read_safetensors(folder / shard)
        return tensors
    require(
        pickled.is_file(),
        f"{folder} has no model.safetensors, no model.safetensors.index.json and no pytorch_model.bin",
    )
    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds on a damaged or an unsafe pickle
        raise UserError(f"{pickled} cannot be read as plain weights: {one_line(error)}") from error
    require(isinstance(tensors, dict), f"{pickled} holds no dictionary of tensors")
    return tensors


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
