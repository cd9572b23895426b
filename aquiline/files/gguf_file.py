"""The container of a GGUF file: metadata and stored tensors, as numbers. What they mean is for others to say."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from aquiline.config import UserError, require
from aquiline.files.disk import one_line
from aquiline.model.quantised import GROUP, Quantised


@dataclass(frozen=True)
class GGUF:
    """A GGUF file: metadata, and tensors as (quantisation type, shape with rows first, stored bytes by row)."""

    fields: dict[str, Any]
    tensors: dict[str, tuple[gguf.GGMLQuantizationType, tuple[int, ...], np.ndarray]]


_GGUF_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_GGUF_STRING, _GGUF_ARRAY = 8, 9


class _Cursor:
    """Reads a GGUF's header. The gguf package's own reader takes seconds to index the strings of a vocabulary."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def numbers(self, code: str, count: int = 1) -> list[Any]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{code}")
        return list(values)

    def string(self) -> str:
        (length,) = self.numbers("Q")
        if self.at + length > len(self.data):
            raise ValueError("a string runs past the end")
        self.at += length
        return str(self.data[self.at - length : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _GGUF_STRING:
            return self.string()
        if kind == _GGUF_ARRAY:
            (inner,), (count,) = self.numbers("I"), self.numbers("Q")
            if inner in _GGUF_NUMBERS:
                return self.numbers(_GGUF_NUMBERS[inner], count)
            return [self.value(inner) for _ in range(count)]
        return self.numbers(_GGUF_NUMBERS[kind])[0]


def read_gguf(path: str | Path) -> GGUF:
    """Metadata and tensors of a GGUF file; the tensors stay on disk until they are used."""
    require(Path(path).is_file(), f"{path} is not a file; expected a GGUF model file")
    require(Path(path).stat().st_size >= 24, f"{path} is not a GGUF file: it is too short")
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error
    require(bytes(data[:4]) == b"GGUF", f"{path} is not a GGUF file: it does not begin with GGUF")
    cursor = _Cursor(data.data)
    try:
        _, version = cursor.numbers("I", 2)
        require(version in (2, 3), f"{path}: GGUF version {version} is not supported; expected 2 or 3, little-endian")
        num_tensors, num_fields = cursor.numbers("Q", 2)
        # The key is read before its value: a dict display evaluates from left to right.
        fields = {cursor.string(): cursor.value(cursor.numbers("I")[0]) for _ in range(num_fields)}
        entries = []
        for _ in range(num_tensors):
            name, (rank,) = cursor.string(), cursor.numbers("I")
            dims = cursor.numbers("Q", rank)
            entries.append((name, tuple(reversed(dims)), *cursor.numbers("I"), *cursor.numbers("Q")))
        alignment = fields.get("general.alignment", 32)
        start = -(-cursor.at // alignment) * alignment
        tensors = {}
        for name, shape, raw_kind, offset in entries:
            kind = gguf.GGMLQuantizationType(raw_kind)
            stored = gguf.quant_shape_to_byte_shape(shape, kind)
            rows = data[start + offset : start + offset + int(np.prod(stored))]
            tensors[name] = (kind, shape, rows.reshape(stored))
    except (struct.error, ValueError, LookupError, ArithmeticError, MemoryError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged or cut short: {one_line(error)}") from error
    return GGUF(fields, tensors)


def stored_integers(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], stored: np.ndarray) -> Quantised | None:
    """A matrix stored as Q8_0, Q4_1 or Q4_0, its very numbers; None where it is stored otherwise.

    Blocks of 32: a float16 scale, with Q4_1 a float16 minimum, then the whole numbers, of 4 bits the first 16 in the
    lower halves of 16 bytes. Q4_0 is 8 too high, which is a minimum of -8 times the scale, exact in float16.
    """
    kinds = gguf.GGMLQuantizationType
    if kind not in (kinds.Q8_0, kinds.Q4_0, kinds.Q4_1) or len(shape) != 2:
        return None
    blocks = torch.from_numpy(np.array(stored)).view(shape[0], shape[1] // GROUP, -1)
    halves = 2 if kind == kinds.Q4_1 else 1
    numbers, values = blocks[..., : 2 * halves].clone().view(torch.float16), blocks[..., 2 * halves :]
    if kind == kinds.Q8_0:
        return Quantised(values.contiguous().view(torch.int8).flatten(1), numbers[..., 0].clone(), None, shape[1])
    q = torch.cat((values & 15, values >> 4), -1).flatten(1).view(torch.int8)
    scale, least = numbers[..., 0].clone(), numbers[..., 1] if kind == kinds.Q4_1 else -8 * numbers[..., 0]
    return Quantised(q, scale, least.clone(), shape[1])
