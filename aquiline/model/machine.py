"""The machine: what its CPU can do, memory in large pages, where a user's cache is, and how busy others keep it."""

import contextlib
import functools
import mmap
import os
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

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


class LargePages:
    """Memory for what is read from end to end again and again, in pages of 2 MiB where Linux grants them: with those of
    4 KiB, finding the pages of a model's weights costs up to a third of reading them.

    Tensors lie one behind the other in pieces of `_PIECE` bytes, of which only what is written to takes memory; a piece
    lives as long as a tensor in it.
    """

    _PIECE, _PAGE, _LINE = 1 << 25, 1 << 21, 64

    def __init__(self) -> None:
        self._piece, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._lock = threading.Lock()

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a CPU tensor."""
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return tensor.contiguous()
        with self._lock:
            start = -(-self._used // self._LINE) * self._LINE
            if start + size > len(self._piece):
                self._piece, start = self._new(max(size, self._PIECE)), 0
            self._used = start + size
            place = self._piece[start : self._used]
        with torch.no_grad():
            return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _new(self, size: int) -> Tensor:
        memory = mmap.mmap(-1, size + self._PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):  # else it could not be written to outside of that mode
            piece = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
        skipped = -piece.data_ptr() % self._PAGE
        return piece[skipped : skipped + size]


large_pages = LargePages()


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
