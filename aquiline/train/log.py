"""What a run says of itself: a line an update, TensorBoard, a plot, and Weights & Biases where set up.

A resumed run repeats the updates since its last save: what the files say of them is dropped first. Weights & Biases
takes nothing back and no step twice, so there the earlier values stay.
"""

import hashlib
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from aquiline.config import AquilineWarning
from aquiline.files.disk import one_line, write_text_atomic
from aquiline.train.loop import Progress
from aquiline.train.plot import plot
from aquiline.train.state import MAY_CHANGE

_WANDB = ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_MODE")  # one of them set: the user wants it


class RunLog:
    """Opened by its first `add`, which tells where the run goes on."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder, self._settings = folder, settings
        self._rows: list[dict[str, Any]] = []
        self._file: Any = None
        self._board: Any = None
        self._wandb: Any = None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._board.close()
            self._plot()
        if self._wandb is not None:
            self._wandb.finish()

    def add(self, progress: Progress) -> None:
        if self._file is None:
            self._open(progress.step)
        row = {k: v for k, v in vars(progress).items() if k != "evaluation"}
        row["loss"] = progress.loss if math.isfinite(progress.loss) else None  # JSON has no NaN
        if progress.evaluation is not None:
            row["evaluation"] = vars(progress.evaluation)
        self._rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        values = scalars(progress)
        for name, value in values.items():
            self._board.add_scalar(name, value, progress.step)
        if self._wandb is not None:
            self._wandb.log(values, step=progress.step)
        if progress.evaluation is not None:
            self._board.flush()
            self._plot()

    def _open(self, first: int) -> None:
        path = self._folder / "log.jsonl"
        if path.exists():
            self._rows = [row for row in _whole_rows(path) if row["step"] < first]
            write_text_atomic(path, "".join(json.dumps(row) + "\n" for row in self._rows))
        self._file = path.open("a", buffering=1, encoding="utf-8")  # a line leaves us as it is written
        self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=first, filename_suffix=f".{first}")
        self._wandb = _start_wandb(self._folder, self._settings)

    def _plot(self) -> None:
        write_text_atomic(self._folder / "run.svg", plot(self._rows))


def scalars(progress: Progress) -> dict[str, float]:
    """What is drawn over the updates, by name."""
    values: dict[str, float | None] = {"train/tokens": progress.tokens}
    if progress.step > 0:  # before the first update there is no loss
        values["train/loss"] = progress.loss
    values |= {f"train/accuracy_{k}": a for k, a in enumerate(progress.accuracy)}
    evaluation = progress.evaluation
    if evaluation is not None:
        values["held_out/tau"] = evaluation.tau
        for name in ("loss", "accuracy", "n_alpha"):
            values |= {f"held_out/{name}_{k}": x for k, x in enumerate(getattr(evaluation, name))}
        values |= {f"decoded/{tree.replace(':', '-')}": tau for tree, tau in (evaluation.decoded or {}).items()}
    return {name: value for name, value in values.items() if value is not None}


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """All lines but one that a kill cut off."""
    rows = []
    for line in path.read_text("utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _start_wandb(folder: Path, settings: dict[str, Any]) -> Any:
    """A run of Weights & Biases, the same one when training goes on; None where it is not set up."""
    if not any(os.environ.get(name) for name in _WANDB):
        return None
    try:
        import wandb
    except ImportError:
        return None
    training = {k: v for k, v in settings.get("training", {}).items() if k not in MAY_CHANGE}
    facts = [str(folder.resolve()), settings.get("documents"), training]
    identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    try:
        return wandb.init(id=identity, resume="allow", name=folder.name, dir=str(folder), config=settings)
    except Exception as error:  # no login, no network: it has a class for each, and a run is worth more than its log
        warnings.warn(f"Weights & Biases is left out: {one_line(error)}", AquilineWarning, stacklevel=2)
        return None
