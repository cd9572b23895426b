"""A quiet machine for what is timed: training runs stand still meanwhile, and what others computed is measured.

The pause file holds no text; what counts are locks, which end with their process, whatever ends it:

    PATH        held by one timed measurement at a time
    PATH.busy   held, shared, by every training run during an update

A measurement takes PATH, then waits for PATH.busy. A run takes PATH.busy, then looks whether PATH is free, so that one
of the two always sees the other. `flock PATH flock PATH.busy command` does the same for any other command; with PATH
alone it would begin while an update still goes on.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from aquiline.config import UserError, require
from aquiline.model.machine import LOADED, processor_seconds

PAUSE_FILE = "AQUILINE_PAUSE_FILE"  # the environment variable that names it
_POLL = 0.2  # seconds


@dataclass
class Quiet:
    """What a timed measurement says about the machine it had."""

    pause_file: bool
    load: float | None = None  # share of the machine's processor time that others took; None: not known here

    @property
    def loaded(self) -> bool:
        return self.load is not None and self.load > LOADED

    def record(self) -> dict[str, bool | float | None]:
        return {"load": self.load, "loaded": self.loaded, "pause_file": self.pause_file}

    def require(self) -> None:
        """UserError where times mean little."""
        require(
            not self.loaded, f"others took {self.load or 0:.0%} of the machine meanwhile: measure again without them"
        )


def pause_file() -> Path | None:
    """The pause file that the environment names."""
    name = os.environ.get(PAUSE_FILE)
    return Path(name) if name else None


@contextlib.contextmanager
def quiet(path: Path | None) -> Iterator[Quiet]:
    """Hold the pause file (None: there is none), once every training run stands still, and measure others' load."""
    with contextlib.ExitStack() as stack:
        if path is not None:
            for name in (path, _busy(path)):
                fcntl.flock(stack.enter_context(_open(name)), fcntl.LOCK_EX)
        found = Quiet(path is not None)
        before = processor_seconds()
        yield found
        after = processor_seconds()
        if before is not None and after is not None and after[1] > before[1]:
            found.load = round(max(0.0, (after[0] - before[0]) / (after[1] - before[1])), 3)


class GiveWay:
    """A training run's side: called between updates, it waits while a measurement holds the pause file."""

    def __init__(self, path: Path | None) -> None:
        self._files = None if path is None else (_open(path), _open(_busy(path)))

    def __call__(self, stop: Callable[[], bool]) -> float:
        """The seconds waited; earlier when `stop()`."""
        if self._files is None:
            return 0.0
        started = time.monotonic()
        asked, busy = self._files
        while not (_take(busy, fcntl.LOCK_SH) and _take(asked, fcntl.LOCK_SH)):
            fcntl.flock(busy, fcntl.LOCK_UN)
            if stop():
                return time.monotonic() - started
            time.sleep(_POLL)
        fcntl.flock(asked, fcntl.LOCK_UN)
        return time.monotonic() - started

    def close(self) -> None:
        for file in self._files or ():
            file.close()


def _busy(path: Path) -> Path:
    return path.with_name(f"{path.name}.busy")


def _open(path: Path) -> IO[str]:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"the pause file {path} cannot be opened: {error.strerror}") from error


def _take(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
