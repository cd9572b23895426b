"""Features from hidden states that another trainer's fleet wrote, for a target whose layers run on no machine here.

Of the target only embedding, final norm and head are then needed: the teacher is the head over the stored last states.
"""

import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from aquiline.config import TOP, AquilineWarning, capture_name, require
from aquiline.data.dataset import Document, state_name
from aquiline.data.features import Features, of_states
from aquiline.files.state_files import StateFolder
from aquiline.model.target import Target

_OURS, _GREEDY = 0.2, 0.97  # see `check`
_SAMPLE = 4096  # bytes of a file at three places, see `digest`


class StoredStates:
    """The states of documents that were read from folders of `files/state_files.py`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """UserError unless all are such folders, of different names: their documents are named after them."""
        files = [str(path) for path in paths if not path.is_dir()]
        require(
            not files,
            f"answers and folders of hidden states were given together ({', '.join(files)} is a file): train on one "
            "kind, for answers need the target's layers",
        )
        self._folders = {state_name(path, ""): StateFolder.open(path) for path in paths}
        require(len(self._folders) == len(paths), "two of the folders have one name; rename one")

    @property
    def made_by(self) -> str:
        return " and ".join(sorted({f"{folder.layout} files" for folder in self._folders.values()}))

    def digest(self, documents: Sequence[Document]) -> str:
        """Names the files of these documents, by their sizes and some of their bytes: states that are written again are
        seldom the same, and never where torch.save or gzip ended the file with a checksum.
        """
        digest = hashlib.sha256()
        for d in documents:
            with self._path(d).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(size.to_bytes(8, "little"))
                for start in (0, size // 2, max(0, size - _SAMPLE)):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE))
        return digest.hexdigest()[:32]

    @torch.no_grad()
    def features(self, target: Target, documents: Sequence[Document]) -> Features:
        """Of these documents behind each other. UserError where a file does not fit its row or the target."""
        parts = [self._read(target, d) for d in documents]
        aux, last = (torch.cat(of_all) for of_all in zip(*parts, strict=True))
        return of_states(target, documents, aux, last)

    def _path(self, d: Document) -> Path:
        top, _, name = d.name.partition("/")
        return self._folders[top + "/"].folder / name

    def _read(self, target: Target, d: Document) -> tuple[Tensor, Tensor]:
        top, _, name = d.name.partition("/")
        found, n = self._folders[top + "/"].states(name), len(d)
        where = self._path(d)
        require(
            torch.equal(found.ids_T[:n].to(torch.int32), d.ids),
            f"{where} holds the states of other tokens than its row has: write it again",
        )
        width, layers = target.config.hidden_size, target.capture_after
        require(
            layers != TOP and found.last_TD.shape[1] == width and found.aux_TA.shape[1] == width * len(layers),
            f"{where} holds {found.aux_TA.shape[1]} numbers a token of captured layers and {found.last_TD.shape[1]} of "
            f"the last; layers {capture_name(layers)} of a target {width} wide have {width * len(layers)} and {width}: "
            "give --capture-after the layers that were captured",
        )
        aux, last = (t[:n].to(target.device, target.dtype) for t in (found.aux_TA, found.last_TD))
        return aux, last if found.normed else target.final_norm(last)

    def check(self, target: Target, documents: Sequence[Document]) -> float:
        """The share of the supervised tokens that by these states and this target's head are the most likely ones.

        Of tokens that the target wrote greedily it is all but near ties, of sampled ones most; UserError where it is so
        low that the states must be another target's. Which layers were captured it cannot tell.
        """
        right = taught = 0
        for d in documents:
            argmax = self.features(target, [d]).argmax_T
            at = (argmax >= 0).nonzero().squeeze(1)
            right += int((argmax[at] == d.ids[at + 1]).sum())
            taught += len(at)
        share = right / taught
        require(
            share >= _OURS,
            f"only {share:.1%} of the tokens in {len(documents)} rows are what the target's head makes of their last "
            "states: they are another target's states or other weights', or the tokens were not written by it",
        )
        if share < _GREEDY:
            warnings.warn(
                f"{share:.1%} of the tokens held out are the target's most likely ones: the rows were not all decoded "
                "greedily, and tau, whose cycles end at the others, is lower here than in decoding; compare it with "
                "that of the same rows alone",
                AquilineWarning,
                stacklevel=2,
            )
        return share
