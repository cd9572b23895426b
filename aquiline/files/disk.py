"""Files that are there whole or not at all: JSON, tensors, folders. Damaged ones become one-line errors."""

import contextlib
import ctypes
import errno
import gzip
import io
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
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
        return json_object(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of every line that is not blank; lines end at \\n only, as those of JSON lines do."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def utf8(data: bytes) -> str:
    """Bytes as text. UserError for other encodings; UTF-16 is known by its zero bytes, which no text holds."""
    try:
        require(b"\0" not in data, "not UTF-8 text; save the file as UTF-8", "not UTF-8")
        return data.decode("utf-8-sig")  # a byte order mark is no reason to refuse
    except UnicodeDecodeError as error:
        raise UserError("not UTF-8 text; save the file as UTF-8", "not UTF-8") from error


def json_object(data: bytes) -> dict[str, Any]:
    """The object that a file or a line holds; UserError for anything else."""
    try:
        value = json.loads(utf8(data))
    except ValueError as error:  # also an integer of more digits than Python reads
        raise UserError(f"not JSON ({error})", "broken JSON") from error
    except RecursionError as error:
        raise UserError("not JSON that can be read: nested too deeply", "broken JSON") from error
    require(isinstance(value, dict), f"expected an object, found {type(value).__name__}", "not an object")
    return value


def write_json_atomic(path: str | Path, value: Any) -> None:
    """Write a JSON file that is there whole or, if we are killed, as it was before."""
    write_text_atomic(path, _json_text(value))


def write_text_atomic(path: str | Path, text: str) -> None:
    """Write a text file that is there whole or, if we are killed, as it was before."""
    with atomic_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A scratch file to write, which takes the place of `path` when the block ends well; else nothing is there."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield scratch
        sync(scratch)
        os.replace(scratch, path)
        sync(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def write_json(path: Path, value: Any) -> None:
    path.write_text(_json_text(value), encoding="utf-8")


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    safetensors.torch.save_file({k: t.contiguous() for k, t in tensors.items()}, path, {"format": "pt"})
    shutil.copymode(folder / "config.json", path)  # safetensors makes it readable by its owner only


def free_bytes(path: Path) -> int:
    """On the disk where it is, or would be made."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_OWN_FILES = {"config.json", "model.safetensors", "run.json"}


@contextlib.contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """A scratch folder to write into, which takes the place of `folder` when the block ends well.

    Killed at any moment, `folder` is the old one or the new one. Files that others put there, a model card say, are
    carried over. UserError when it cannot be written, or holds a folder, which would be lost.
    """
    folder = Path(os.path.realpath(folder))
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        yield scratch
        if folder.exists():
            _carry_over(folder, scratch)
        for path in [*scratch.rglob("*"), scratch]:
            if not path.is_symlink():
                sync(path)
        _take_the_place(scratch, folder)
        sync(folder.parent)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise UserError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # after an exchange this is the old folder


def _carry_over(folder: Path, scratch: Path) -> None:
    require(folder.is_dir(), f"{folder} exists and is a file; give a folder")
    nested = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.is_symlink())
    require(
        not nested,
        f"{folder} holds the folder {', '.join(nested)}, which saving there would delete; give another folder",
    )
    new = {p.name for p in scratch.iterdir()} | _OWN_FILES
    for path in folder.iterdir():
        if path.name not in new:
            shutil.copy2(path, scratch / path.name, follow_symlinks=False)


def _take_the_place(scratch: Path, folder: Path) -> None:
    if not folder.exists():
        os.rename(scratch, folder)
        return
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


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, each read from it as it is used."""
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {one_line(error)}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: model.safetensors, its shards, or pytorch_model.bin, in this order."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    pickled = folder / "pytorch_model.bin"
    if single.is_file():
        return read_safetensors(single)
    if index.is_file():
        shards = sorted(set(_weight_map(index).values()))
        absent = [s for s in shards if not (folder / s).is_file()]
        require(not absent, f"{folder} lacks {', '.join(absent)}, which its index names; copy it there")
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            tensors |= read_safetensors(folder / shard)
        return tensors
    require(
        pickled.is_file(),
        f"{folder} has no model.safetensors, no model.safetensors.index.json and no pytorch_model.bin",
    )
    tensors = read_pickle(pickled)
    ok = isinstance(tensors, dict) and all(isinstance(k, str) and isinstance(t, Tensor) for k, t in tensors.items())
    require(ok, f"{pickled} holds no dictionary of tensors")
    return tensors


def weight_names(folder: Path) -> set[str]:
    """The names in what `read_weights` would read, without reading it where the format allows that."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        try:
            with safetensors.safe_open(single, "pt") as file:
                return set(file.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{single} cannot be read as safetensors: {one_line(error)}") from error
    return set(_weight_map(index)) if index.is_file() else set(read_weights(folder))


def _weight_map(index: Path) -> dict[str, str]:
    names: Any = read_json(index).get("weight_map")
    ok = isinstance(names, dict) and bool(names) and all(isinstance(shard, str) for shard in names.values())
    require(ok, f"{index} has no weight_map from the names of tensors to files")
    return names


def read_pickle(path: Path, mapped: bool = False) -> Any:
    """What torch.save wrote, also through gzip, of plain values and tensors only, on the CPU; `mapped` tensors are read
    from the file as they are used.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises many kinds on a damaged or an unsafe pickle
        raise UserError(f"{path} cannot be read as plain weights: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two records of settings differ in, in words; a key that one of them lacks counts as None."""
    names = sorted(before.keys() | now.keys())
    return [f"{k} was {before.get(k)!r} and is {now.get(k)!r}" for k in names if before.get(k) != now.get(k)]
