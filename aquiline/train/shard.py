"""A target too large for one process: each of the run's processes holds a part of every tensor (PyTorch's FSDP2).

A layer is gathered from all processes while it runs, so a pass of the target needs all of them, and whoever leaves one
out lets the others wait. Training therefore makes every pass inside `passes_together`. Of a target that is whole these
functions do nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from aquiline.config import UserError
from aquiline.model.target import LlamaTarget, Target
from aquiline.train.parallel import Processes


def shard(target: Target, device: str) -> None:
    """Keep this process's part of each tensor, on a device of this kind; all processes call it together.

    One unit is gathered at a time: each layer, and embedding, final norm and head. They are moved and cut one after the
    other, so that of a target that was mapped from its file each process reads its own part.
    """
    if not isinstance(target, LlamaTarget):
        raise UserError(f"--shard-target cannot spread a {target.config.family} target: leave it out")
    assert target._decoder is None, "a packed target cannot be sharded"
    from torch.distributed.device_mesh import init_device_mesh  # seconds to import
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for layer in target.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(target, mesh=mesh, reshard_after_forward=False)  # `whole` decides


@contextlib.contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Inside, this unit's tensors are complete: a layer's, or of the target embedding, norm and head. All processes
    enter together.
    """
    unit: Any = module
    sharded = hasattr(module, "unshard")  # a unit got another class, which cannot be named here without that import
    if sharded:
        unit.unshard()
    yield
    if sharded:
        unit.reshard()


@contextlib.contextmanager
def passes_together(target: Target, passes: int, processes: Processes) -> Iterator[None]:
    """Inside, this process makes so many passes, and may read embedding and head. All processes enter together, each
    with a number of its own; then they take part in as many as the one with the most makes.
    """
    if not hasattr(target, "unshard"):
        yield
        return
    most = processes.most(passes)  # before the first pass: what is exchanged has one order for all
    with whole(target):
        yield
        token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
        with torch.no_grad():
            for _ in range(most - passes):
                target(token, token)
