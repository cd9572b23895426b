"""The machine: what its CPU can do, where a user's cache is, and how busy others keep it."""

import functools
import os
import time
from pathlib import Path

_STAT = "/proc/stat"
_LOOK = 0.25  # seconds between two looks at the load
LOADED = 0.05  # of the machine's processor time, taken by others: above, times mean little


@functools.cache
def _cpu_lines() -> tuple[str, ...]:
    """What Linux says of the CPU; nothing elsewhere."""
    try:
        return tuple(Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    except OSError:
        return ()


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of the CPU as Linux names them; none where that is not known."""
    lines = (line for line in _cpu_lines() if line.startswith(("flags", "Features")))
    return frozenset(word for line in lines for word in line.split()[2:])


@functools.cache
def cpu_name() -> str:
    """The CPU as Linux names it; empty where that is not known."""
    return next((line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")), "")


def cache_folder() -> Path | None:
    """The user's cache, when it is theirs alone: code is loaded from it."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (base if base.is_absolute() else Path.home() / ".cache") / "aquiline"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):
        return None
    safe = found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(folder, os.W_OK)
    return folder if safe else None


def processor_seconds() -> tuple[float, float] | None:
    """(what others computed, all there was) since the machine started, in processor seconds; None where not known."""
    try:
        with open(_STAT, encoding="utf-8") as f:
            counts = [int(n) for n in f.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, idle, waiting, irq, softirq, steal = counts
    tick = os.sysconf("SC_CLK_TCK")
    own = os.times()
    ours = own.user + own.system + own.children_user + own.children_system
    busy = (user + nice + system + irq + softirq + steal) / tick
    return busy - ours, busy + (idle + waiting) / tick


class ForeignLoad:
    """Whether others kept the machine busy, looked at now and then."""

    def __init__(self) -> None:
        self._at, self._before = time.monotonic(), processor_seconds()

    def lately(self) -> bool | None:
        """Of the time since the last answer; None: too short a time to tell. Where it cannot be known, False."""
        now = time.monotonic()
        if now - self._at < _LOOK:
            return None
        after, before = processor_seconds(), self._before
        self._at, self._before = now, after
        if before is None or after is None or after[1] <= before[1]:
            return False
        return (after[0] - before[0]) / (after[1] - before[1]) > 2 * LOADED
