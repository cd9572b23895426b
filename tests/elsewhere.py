"""Another device, played on the CPU: its tensors hold real numbers, say that they lie on `meta`, and meet no others.

What would fail on a GPU for lying on two devices fails here, and what comes out can be compared with the CPU's.
"""

import contextlib
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map

from aquiline.decode.engine import Engine

AWAY = torch.device("meta")  # a name that PyTorch takes without asking for a driver
aten = torch.ops.aten


class _Away(Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, held.shape, **layout, dtype=held.dtype, device=AWAY)
        made.held = held
        return made

    def tolist(self):
        return self.held.tolist()

    def __getitem__(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(tuple(torch.tensor(i, device=AWAY) if isinstance(i, list) else i for i in parts))

    def __reduce_ex__(self, protocol):
        return self.held.__reduce_ex__(protocol)  # in a file it is one of the CPU, as if read with map_location

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    away = any(isinstance(x, _Away) for x in tensors)
    strangers = any(not isinstance(x, _Away) and x.ndim for x in tensors)  # a number may come from anywhere
    moves = func in (aten.copy_.default, aten._to_copy.default)
    assert not (away and strangers) or moves, f"{func} of tensors on two devices"
    assert all(isinstance(x, _Away) or x.device != AWAY for x in tensors), f"{func} of a tensor without numbers"
    if kwargs.get("device") is not None:
        away, kwargs = kwargs["device"] == AWAY, kwargs | {"device": torch.device("cpu")}
    elif moves:
        away = isinstance(args[0], _Away)
    out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    out = tree_map(lambda x: _Away(x) if away and isinstance(x, Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if away and tensors else out


def _held(x):
    return x.held if isinstance(x, _Away) else x


@contextlib.contextmanager
def elsewhere():
    """Inside, `AWAY` is a device."""
    autocast = torch.is_autocast_enabled

    def moving(make):  # PyTorch itself leaves the numbers of a list behind, as in an index
        return lambda data, *, device=None, **more: make(data, **more).to(device or "cpu")

    with (
        _Mode(),
        mock.patch.multiple(torch, tensor=moving(torch.tensor), as_tensor=moving(torch.as_tensor)),
        mock.patch("torch.is_autocast_enabled", lambda kind: kind != AWAY.type and autocast(kind)),
        # It cannot be played under inference mode.
        mock.patch.multiple(Engine, step=Engine.step.__wrapped__, cancel=Engine.cancel.__wrapped__),
    ):
        yield
