"""runs/round_head.py: fewer bits of mantissa, the nearest values."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

SCRIPT = Path(__file__).parents[1] / "runs" / "round_head.py"
rounded = runpy.run_path(str(SCRIPT))["rounded"]


def test_values_are_the_nearest_with_so_many_bits():
    x = torch.tensor([1.0, 1.03125, 1.0390625, 1.09375, -1.9921875, 0.0, torch.inf, -3.0], dtype=torch.bfloat16)
    got = rounded(x, 4)  # of mantissas in sixteenths
    assert got.tolist() == [1.0, 1.0, 1.0625, 1.125, -2.0, 0.0, torch.inf, -3.0]  # of two as near the even one
    many = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    error = (rounded(many, 4).float() / many.float() - 1).abs()
    assert 0.02 < float(error.max()) <= 2**-5
    assert torch.equal(rounded(many, 7), many)
    assert torch.isnan(rounded(torch.tensor([torch.nan]).bfloat16(), 3)).all()


def test_a_folder_is_rounded_and_says_so(tmp_path):
    head = tmp_path / "head"
    head.mkdir()
    weight, norm, map_ = torch.randn(8, 8).bfloat16(), torch.randn(8).bfloat16(), torch.arange(8)
    save_file({"fc.weight": weight, "norm.weight": norm, "d2t": map_}, head / "model.safetensors")
    (head / "config.json").write_text('{"a": 1}')
    (head / "run.json").write_text('{"best": 2}')
    subprocess.run([sys.executable, SCRIPT, head, tmp_path / "out"], check=True)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["fc.weight"], rounded(weight, 4))
    assert torch.equal(tensors["norm.weight"], norm)
    assert torch.equal(tensors["d2t"], map_)
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == {"best": 2, "mantissa_bits": 4}
    assert (tmp_path / "out" / "config.json").read_text() == '{"a": 1}'


@pytest.mark.parametrize(
    ("out", "dtype", "said"), [("head", torch.bfloat16, "is the head itself"), ("out", torch.float32, "only bf16")]
)
def test_what_cannot_be_rounded_is_left_as_it_was(tmp_path, out, dtype, said):
    head = tmp_path / "head"
    head.mkdir()
    save_file({"fc.weight": torch.randn(8, 8).to(dtype)}, head / "model.safetensors")
    before = (head / "model.safetensors").read_bytes()
    ran = subprocess.run([sys.executable, SCRIPT, head, tmp_path / out], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert said in ran.stderr
    assert (head / "model.safetensors").read_bytes() == before
