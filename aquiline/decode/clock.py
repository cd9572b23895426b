"""Where the time of a cycle goes, for whoever asks. While nobody does, a lap is one look at a name.

`step.py` ends every phase with a lap: what has passed since the lap before is that phase's.
"""

import contextlib
import time
from collections.abc import Iterator

import torch

from aquiline.config import PHASES


class Clock:
    """Seconds by phase. On a GPU a lap waits until it has done its work, which slows a cycle down a little."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


_running: Clock | None = None


def lap(phase: str) -> None:
    """The phase, one of `PHASES`, ends here."""
    if _running is not None:
        _running.lap(phase)


@contextlib.contextmanager
def running(device: torch.device) -> Iterator[Clock]:
    """A clock that the cycles inside go by."""
    global _running
    _running = Clock(device)
    try:
        yield _running
    finally:
        _running = None
