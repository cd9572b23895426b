"""Several processes on one run, started by `torchrun`: each takes its share of an update's packs.

Gradients are summed, and a step's mean is over the rows of all processes, so N of them do what one does with N times as
many packs to an update. They stay alike, for they begin alike and take the same updates; the first one measures, logs
and writes.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

Item = TypeVar("Item")


def launched() -> int:
    """How many processes `torchrun` started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_number() -> int:
    """Which of the processes on this machine it is: its GPU has the same number."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@dataclass(frozen=True)
class Processes:
    """This process among those of the run; alone by default."""

    rank: int = 0
    count: int = 1

    @staticmethod
    def joined(device: torch.device) -> "Processes":
        """Wait for the processes that `torchrun` started with this one. `device`: where its gradients are."""
        if launched() == 1:
            return Processes()
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL takes the current one
        distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        return Processes(distributed.get_rank(), launched())

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.count > 1:
            distributed.destroy_process_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        return items[self.rank :: self.count]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Of every process's values, in float64, place by place; on the CPU, so by gloo."""
        if self.count == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(total)
        return total.tolist()

    def most(self, value: int) -> int:
        """The largest of every process's values."""
        largest = torch.tensor(value)
        if self.count > 1:
            distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return int(largest)

    def any(self, flag: bool) -> bool:
        """Whether it is True in one of them."""
        return self.sum([float(flag)])[0] > 0

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        if self.count == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trained])
        distributed.all_reduce(flat)
        for p, grad in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
            p.grad = grad.view_as(p)

    def make_alike(self, parameters: Iterable[Tensor]) -> None:
        """Everyone takes over the first one's values."""
        if self.count > 1:
            for p in parameters:
                distributed.broadcast(p.data, src=0)

    def wait(self) -> None:
        """Until all are here. (Whether `barrier` would ask gloo or NCCL is not ours to say.)"""
        self.any(False)


ALONE = Processes()
