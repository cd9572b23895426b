"""A trained head's folder with weights of fewer mantissa bits, which a repository stores in fewer bytes.

    python runs/round_head.py HEAD OUT [--bits 4]

The matrices stay bf16, whose mantissa has 7 bits, and are rounded to the nearest value with so many; the other bits are
then zeros, which compress. OUT gets model.safetensors, config.json and run.json, which tells of it.
"""

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor

from aquiline.config import require
from aquiline.files.disk import atomic_folder, read_json, read_safetensors, write_json, write_tensors

MANTISSA = 7  # bits of a bf16, without the leading one


def rounded(x: Tensor, bits: int) -> Tensor:
    """The nearest bf16 with `bits` bits of mantissa, of two as near the one that ends in a zero."""
    drop = MANTISSA - bits
    whole = x.view(torch.int16).int() & 0xFFFF
    if drop == 0:
        return x
    up = (1 << (drop - 1)) - 1 + (whole >> drop & 1)
    kept = (whole + up) >> drop << drop  # a mantissa that overflows raises the exponent, as it should
    return torch.where(x.isfinite(), kept.to(torch.int16).view(torch.bfloat16), x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, default=4, choices=range(1, MANTISSA + 1))
    given = parser.parse_args()
    require(given.out.resolve() != given.head.resolve(), f"{given.out} is the head itself: give another folder")
    tensors = read_safetensors(given.head / "model.safetensors")
    others = {str(x.dtype) for x in tensors.values() if x.is_floating_point()} - {"torch.bfloat16"}
    require(not others, f"{given.head} has weights of {', '.join(others)}: only bf16 is rounded here")
    record = read_json(given.head / "run.json")
    made = {k: rounded(x, given.bits) if x.is_floating_point() and x.ndim > 1 else x for k, x in tensors.items()}
    with atomic_folder(given.out) as scratch:
        shutil.copyfile(given.head / "config.json", scratch / "config.json")
        write_tensors(scratch, made)
        write_json(scratch / "run.json", record | {"mantissa_bits": given.bits})
    print(f"{given.out}: matrices with {given.bits} bits of mantissa")


if __name__ == "__main__":
    main()
