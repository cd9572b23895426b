"""Hidden states that other trainers' fleets wrote, of targets that may run on no machine here.

SpecForge 0.2: a file a row, NAME.ckpt or NAME.ckpt.gz, written by torch.save, in folders below one another:
    input_ids [T], loss_mask [T]
    aux_hidden_state [1, T, A]      the captured states, low layer first
    hidden_state [1, T, D]          AFTER the target's final norm: its head reads them as they are

speculators 0.9: a data set of Hugging Face with input_ids and loss_mask, saved in the folder, and for its row i the
file hidden_states/hs_i.safetensors, as vLLM's connector wrote it:
    token_ids [T]
    hidden_states [T, layers, D]    the captured states, then the one after all layers, BEFORE the final norm

Neither says which layers were captured, nor of which target; which layout it is, is said by the folder's files.
Source: prepare_hidden_states.py and the readers of SpecForge 0.2, of speculators 0.9, and vLLM 0.32's connector.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.config import UserError, require
from aquiline.files.disk import read_pickle, read_safetensors
from aquiline.files.tables import is_saved_table, table_rows

SPECFORGE, SPECULATORS = "SpecForge", "speculators"
_SUFFIXES = (".ckpt", ".ckpt.gz")


@dataclass(frozen=True)
class States:
    """Of one row, as its file holds them."""

    ids_T: Tensor
    aux_TA: Tensor
    last_TD: Tensor
    normed: bool  # `last` is behind the final norm


@dataclass(frozen=True)
class StateFolder:
    """A folder of such files. The name of a row is that of its file, below the folder."""

    folder: Path
    layout: str

    @staticmethod
    def open(folder: Path) -> "StateFolder":
        """UserError when it holds neither layout."""
        if is_saved_table(folder):
            found = next((folder / "hidden_states").glob("hs_*.safetensors"), None)
            require(
                found is not None,
                f"{folder} holds a data set, and no hidden_states/hs_0.safetensors ... beside it: put there what "
                "`speculators generate-offline-data` wrote",
            )
            return StateFolder(folder, SPECULATORS)
        files = next((p for suffix in _SUFFIXES for p in folder.rglob("*" + suffix)), None)
        require(
            files is not None,
            f"{folder} is a folder, and holds no hidden states that can be trained on: neither SpecForge's files, "
            "NAME.ckpt or NAME.ckpt.gz, nor a data set of speculators with hidden_states/hs_0.safetensors ...",
        )
        return StateFolder(folder, SPECFORGE)

    def rows(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """(name, what reads ids and mask) of every row, in a fixed order."""
        if self.layout == SPECULATORS:
            for number, row in enumerate(table_rows(str(self.folder))):
                name = f"hidden_states/hs_{number}.safetensors"
                yield name, functools.partial(self._table_row, name, row)
            return
        for path in sorted(p for p in self.folder.rglob("*") if p.name.endswith(_SUFFIXES)):
            yield str(path.relative_to(self.folder)), functools.partial(self._file_row, path)

    def _table_row(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        require((self.folder / name).is_file(), "its hidden states are not there", "no hidden states")
        _check_keys(row, ("input_ids", "loss_mask"), self.folder)
        read = {key: torch.as_tensor(row[key]).tolist() for key in ("input_ids", "loss_mask")}  # lists, or tensors
        require(
            self._looked_at(name, self._held(name)).ids_T.tolist()[: len(read["input_ids"])] == read["input_ids"],
            f"{self.folder / name} holds the states of other tokens than its row has: write it again",
            "states of other tokens",
        )
        return read

    def _file_row(self, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(self.folder))
        held = self._held(name)
        self._looked_at(name, held)
        return {key: held[key].tolist() for key in ("input_ids", "loss_mask")}

    def _looked_at(self, name: str, held: dict[str, Tensor]) -> States:
        """The states of a row when it is listed: shapes, and the last token, whom a NaN of any earlier one has reached
        by attention. All of it is read, and looked at, when its turn comes.
        """
        found = self._states(name, held)
        _check_finite(self.folder / name, found.aux_TA[-1:], found.last_TD[-1:])
        return found

    def states(self, name: str) -> States:
        """What the file of a row holds; UserError where it is not what that layout says."""
        found = self._states(name, self._held(name))
        _check_finite(self.folder / name, found.aux_TA, found.last_TD)
        return found

    def _held(self, name: str) -> dict[str, Tensor]:
        path = self.folder / name
        if self.layout == SPECFORGE:
            return _specforge_file(path)
        held = read_safetensors(path)
        _check_keys(held, ("token_ids", "hidden_states"), path)
        return held

    def _states(self, name: str, held: dict[str, Tensor]) -> States:
        path = self.folder / name
        if self.layout == SPECFORGE:
            aux, last = (held[key].squeeze(0) for key in ("aux_hidden_state", "hidden_state"))
            ids, normed = held["input_ids"], True
        else:
            ids, layers, normed = held["token_ids"], held["hidden_states"], False
            require(
                layers.ndim == 3,
                f"{path}: hidden_states is {list(layers.shape)}; expected [tokens, layers, width]",
                "states of another shape",
            )
            aux, last = layers[:, :-1].flatten(1), layers[:, -1]
        shapes = [list(t.shape) for t in (ids, aux, last)]
        fit = [len(s) for s in shapes] == [1, 2, 2] and len({s[0] for s in shapes}) == 1
        require(
            fit,
            f"{path}: ids, captured states and last states are {shapes}; expected [T], [T, A] and [T, D]",
            "states of another shape",
        )
        return States(ids, aux, last, normed)


def _check_finite(path: Path, *states: Tensor) -> None:
    for t in states:
        bad = (~torch.isfinite(t)).any(dim=1).nonzero()
        require(
            not len(bad),
            f"{path} holds states that are NaN or infinite, {len(bad)} of {len(t)} tokens': write it again, and give "
            "the same command to go on; or delete it before a run begins, which would be another run without it",
            "states not finite",
        )


def _specforge_file(path: Path) -> dict[str, Tensor]:
    held = read_pickle(path, mapped=True)
    require(isinstance(held, dict), f"{path} holds a {type(held).__name__}; expected a dictionary of tensors")
    _check_keys(held, ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state"), path)
    odd = [key for key in held if not isinstance(held[key], Tensor)]
    require(not odd, f"{path}: {', '.join(odd)} is no tensor", "states that are no tensors")
    return held


def _check_keys(held: dict[str, Any], keys: tuple[str, ...], place: Path) -> None:
    missing = [key for key in keys if key not in held]
    if missing:
        raise UserError(f"{place} has no {', '.join(missing)}; it has {', '.join(sorted(held))}", "states incomplete")
