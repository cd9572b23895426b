"""The target's features of documents: computed as they are needed, and kept on disk when a folder is given.

Per token: `aux` and `last` in bf16, the token id, the arg-max id and the log-sum-exp over the full vocabulary. The
folder describes itself: `manifest.json` is compared on every use, ids are stored and checked with every row read, and
a document counts as present only after its rows have reached the disk.

Shapes: T tokens, D target width, A width of aux, V vocabulary.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aquiline.config import UserError, capture_name, require
from aquiline.data.dataset import Document, fingerprint
from aquiline.files.disk import read_json, write_json_atomic
from aquiline.model.target import Target

_ROWS = 128  # rows of full-vocabulary logits at a time
_UNWRITTEN_TOKENS = 32_768  # features of so many tokens wait for one write to the disk


@dataclass
class Features:
    """Of some documents behind each other, on the CPU; in bf16 when they were kept on disk."""

    aux_TA: Tensor
    last_TD: Tensor
    argmax_T: Tensor  # int64; -1 where the next token is not supervised
    logsumexp_T: Tensor  # float32; 0 there


@torch.no_grad()
def compute(target: Target, documents: Sequence[Document]) -> Features:
    """One target pass over the documents, each seeing only itself."""
    ids = torch.cat([d.ids for d in documents]).long()
    starts = [0]
    for d in documents:
        starts.append(starts[-1] + len(d))
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    out = target(ids[None].to(target.device), positions[None].to(target.device), documents=starts)
    return of_states(target, documents, out.aux_BNA[0], out.last_BND[0])


@torch.no_grad()
def of_states(target: Target, documents: Sequence[Document], aux_TA: Tensor, last_TD: Tensor) -> Features:
    """Features from the documents' states, which are in the target's dtype and on its device: what its head says of
    them is added.
    """
    argmax = torch.full((len(last_TD),), -1, dtype=torch.long)
    logsumexp = torch.zeros(len(last_TD))
    # Position p teaches x_{p+1}: it matters only where that token is supervised and of the same document.
    taught = torch.cat([torch.cat((d.supervised[1:], torch.zeros(1, dtype=torch.bool))) for d in documents])
    rows = taught.nonzero().squeeze(1)
    found = [target.best_and_logsumexp(last_TD[at]) for at in rows.to(target.device).split(_ROWS)]
    argmax[rows], logsumexp[rows] = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    return Features(aux_TA.cpu(), last_TD.cpu(), argmax, logsumexp)


Source = Callable[[Target, Sequence[Document]], Features]


class FeatureStore:
    """Features of a fixed list of documents, filled as they are asked for."""

    def __init__(
        self,
        folder: Path | None,
        target: Target,
        documents: Sequence[Document],
        target_fingerprint: str,
        source: Source | None = None,
        made_by: str = "",
    ) -> None:
        """`folder` None computes every time. UserError when the folder holds features of something else, or the disk
        is too small for all of them. `source`: where features come from that no pass of the target here computes, and
        `made_by`, whose they are.
        """
        self.target, self.documents, self._source = target, documents, source
        self.offsets = np.cumsum([0] + [len(d) for d in documents])
        self.arrays: dict[str, np.memmap[Any, Any]] | None = None
        self._unwritten: set[int] = set()
        if folder is None:
            return
        total, width = int(self.offsets[-1]), target.config.hidden_size
        columns = {
            "aux": ("uint16", (total, width * len(target.capture_after))),  # bf16 bits
            "last": ("uint16", (total, width)),
            "ids": ("int32", (total,)),
            "argmax": ("int32", (total,)),
            "logsumexp": ("float32", (total,)),
            "present": ("uint8", (len(documents),)),
        }
        manifest = {
            "format": "aquiline features 1",
            "target": target_fingerprint,
            "dtype": made_by or str(target.dtype).removeprefix("torch."),
            "capture_after": capture_name(target.capture_after),
            "documents": fingerprint(documents),
            "tokens": total,
            "columns": {name: [kind, list(shape)] for name, (kind, shape) in columns.items()},
        }
        if (folder / "manifest.json").exists():
            _compare(folder, manifest)
            mode = "r+"
        else:
            _check_room(folder, self.bytes_needed(target, total))
            mode = "w+"
        try:
            self.arrays = {
                name: np.memmap(folder / f"{name}.bin", dtype=kind, mode=mode, shape=shape)  # type: ignore[call-overload]
                for name, (kind, shape) in columns.items()
            }
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error}") from error
        if mode == "w+":  # last: with a manifest, every column is there
            write_json_atomic(folder / "manifest.json", manifest)

    @staticmethod
    def bytes_needed(target: Target, tokens: int) -> int:
        """Size on disk of the features of so many tokens."""
        return tokens * (2 * target.config.hidden_size * (len(target.capture_after) + 1) + 12)

    def missing(self, numbers: Sequence[int]) -> list[int]:
        """Those of these documents that `get` would compute."""
        if self.arrays is None:
            return list(numbers)
        return [i for i in numbers if not self.arrays["present"][i] and i not in self._unwritten]

    def get(self, numbers: Sequence[int], missing: Sequence[int] | None = None) -> Features:
        """Features of these documents behind each other, in this order; missing ones are computed and kept, in one
        pass. `missing` is what the method of this name said before, where it must still hold although another process
        may have written meanwhile.
        """
        if self.arrays is None:
            return self._compute(numbers)
        missing = self.missing(numbers) if missing is None else missing
        if missing:
            self._put(missing, self._compute(missing))
        parts = [self._read(i) for i in numbers]
        return Features(
            *(torch.cat([getattr(p, name) for p in parts]) for name in ("aux_TA", "last_TD", "argmax_T", "logsumexp_T"))
        )

    def _compute(self, numbers: Sequence[int]) -> Features:
        documents = [self.documents[i] for i in numbers]
        return compute(self.target, documents) if self._source is None else self._source(self.target, documents)

    def _put(self, numbers: Sequence[int], features: Features) -> None:
        assert self.arrays is not None
        start = 0
        for i in numbers:
            rows, here = slice(self.offsets[i], self.offsets[i + 1]), slice(start, start + len(self.documents[i]))
            self.arrays["aux"][rows] = _bits(features.aux_TA[here])
            self.arrays["last"][rows] = _bits(features.last_TD[here])
            self.arrays["ids"][rows] = self.documents[i].ids.numpy()
            self.arrays["argmax"][rows] = features.argmax_T[here].int().numpy()
            self.arrays["logsumexp"][rows] = features.logsumexp_T[here].numpy()
            start += len(self.documents[i])
        self._unwritten.update(numbers)
        if sum(len(self.documents[i]) for i in self._unwritten) >= _UNWRITTEN_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Wait until everything computed so far is on the disk, then count it as present.

        In this order, so that what a kill or a power cut lost is computed again.
        """
        if self.arrays is None or not self._unwritten:
            return
        for name, column in self.arrays.items():
            if name != "present":
                column.flush()
        self.arrays["present"][list(self._unwritten)] = 1
        self._unwritten.clear()

    def _read(self, i: int) -> Features:
        assert self.arrays is not None
        rows = slice(self.offsets[i], self.offsets[i + 1])
        if not np.array_equal(self.arrays["ids"][rows], self.documents[i].ids.numpy()):
            raise UserError(
                f"stored features of document {self.documents[i].name!r} belong to other tokens: delete the folder"
            )
        return Features(
            _floats(self.arrays["aux"][rows]),
            _floats(self.arrays["last"][rows]),
            torch.from_numpy(self.arrays["argmax"][rows].astype(np.int64)),
            torch.from_numpy(self.arrays["logsumexp"][rows].copy()),
        )


def _bits(x: Tensor) -> np.ndarray[Any, Any]:
    return x.to(torch.bfloat16).view(torch.uint16).numpy()


def _floats(bits: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(bits.copy()).view(torch.bfloat16)


def _compare(folder: Path, manifest: dict[str, Any]) -> None:
    """UserError when an existing folder holds features of something else, or not all of its columns."""
    found = read_json(folder / "manifest.json")
    for key, value in manifest.items():
        require(
            found.get(key) == value,
            f"{folder} holds features of something else: {key} is {found.get(key)!r:.80}, expected {value!r:.80}. "
            "Give another --features folder, or delete this one",
        )
    for name, (kind, shape) in manifest["columns"].items():
        path, size = folder / f"{name}.bin", np.dtype(kind).itemsize * math.prod(shape)
        found_size = path.stat().st_size if path.is_file() else None
        require(
            found_size == size,
            f"{path} is {'missing' if found_size is None else f'{found_size} bytes long'}; expected {size} bytes. "
            f"The features are damaged: delete {folder}",
        )


def _check_room(folder: Path, needed: int) -> None:
    """Make the folder; UserError when it cannot be made or the disk is too small."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from error
    require(
        needed < free,
        f"the features need {needed / 2**30:.1f} GiB in {folder}, and {free / 2**30:.1f} GiB are free",
    )
