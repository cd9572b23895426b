"""The state of a training run on disk: whole or as it was before, and resumed only by the run it belongs to."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aquiline.config import TrainConfig, UserError, require
from aquiline.files.disk import read_pickle, sync
from aquiline.model.draft import Draft

# Settings that change neither an update nor what an evaluation means: a run may go on with others.
MAY_CHANGE = ("save_every", "decode_every", "checkpoint_activations", "patience")


@dataclass
class RunState:
    """Where a run stands. Every field has a default, so that states written before it was there can be read."""

    step: int = 0  # updates done
    tokens: int = 0  # token passes
    seconds: float = 0.0  # of training, pauses left out
    best: float = 0.0  # the highest accepted length of the walk, and the update it was measured after
    best_step: int = 0
    since_best: int = 0  # evaluations
    ended_early: bool = False
    skipped: list[dict[str, Any]] = field(default_factory=list)  # updates without a finite gradient
    history: list[dict[str, Any]] = field(default_factory=list)  # evaluations


def changed_settings(found: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """What differs from the settings of an earlier part of the run, `MAY_CHANGE` left out. A setting it did not know
    had its default. `found` may come from JSON, where a tuple is a list.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    changed = []
    for name, now in dataclasses.asdict(config).items():
        before = found.get(name, defaults[name])
        before = tuple(sorted(before)) if isinstance(before, (list, tuple)) else before
        if before != now and name not in MAY_CHANGE:
            changed.append(f"{name}: {before!r} -> {now!r}")
    return changed + [f"{name}: {found[name]!r}, which is not known here" for name in found if name not in defaults]


def save_state(
    folder: Path,
    state: RunState,
    config: TrainConfig,
    documents: str | None,
    draft: Draft,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Write the whole state beside the old one, then rename: a kill at any moment leaves one of the two."""
    everything = {
        "state": dataclasses.asdict(state),
        "config": dataclasses.asdict(config),
        "documents": documents,
        "draft": draft.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "random": torch.get_rng_state(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / "state.pt.tmp"  # the same name always: what a kill leaves is written over
        with open(temporary, "wb") as f:
            torch.save(everything, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, folder / "state.pt")
        sync(folder)
    except (OSError, RuntimeError) as error:  # torch's own writer says RuntimeError when the disk is full
        raise UserError(f"{folder} cannot be written: {error}") from error


def load_state(
    folder: Path,
    config: TrainConfig,
    documents: str | None,
    draft: Draft,
    optimizers: Sequence[torch.optim.Optimizer],
) -> RunState:
    """Go on from the state in `folder`, or begin. UserError when it belongs to another run, or is damaged."""
    path = folder / "state.pt"
    if not path.exists():
        return RunState()
    try:
        saved = read_pickle(path)  # loading moves what belongs elsewhere, and leaves the optimiser's counts here
        parts = {"state", "config", "documents", "draft", "optimizers"}
        require(isinstance(saved, dict) and parts <= set(saved), f"{path} is no state of a training run")
        known = {f.name for f in dataclasses.fields(RunState)}
        require(set(saved["state"]) <= known, f"{path} was written by a later version")
    except UserError as error:
        raise UserError(f"{error}. Delete {folder} to begin the run again") from error
    changed = changed_settings(saved["config"], config)
    if saved["documents"] != documents:
        changed.append("the training data")
    require(
        not changed,
        f"{path} belongs to another run ({json.dumps(changed)}): give another output folder, or the same settings",
    )
    draft.load_state_dict(saved["draft"])
    for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    if "random" in saved:
        torch.set_rng_state(saved["random"])
    state = RunState(**saved["state"])
    state.ended_early = bool(config.patience) and state.since_best >= config.patience  # patience may have changed
    return state
