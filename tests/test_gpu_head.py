"""The script for a machine with a GPU, on this one: answers and a head come out in parts, and limits are kept."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from aquiline.files import checkpoint
from tests.test_invent import make_writing_target

SCRIPT = Path(__file__).parents[1] / "runs" / "gpu_head.sh"
TINY = {"DEVICE": "cpu", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def run(stage: str, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | TINY | {"WORK": str(folder / "work"), "OUT": str(folder / "out")} | settings
    return subprocess.run([SCRIPT, stage], env=environment, capture_output=True, text=True, check=False, cwd=folder)


def joined(out: Path, name: str) -> tarfile.TarFile:
    """What comes out, put together as its note says."""
    parts = sorted(out.glob(f"{name}.tar.gz.part-*"))
    assert (out / f"{name}.JOIN.txt").read_text().startswith(f"cat {name}.tar.gz.part-* | tar xz ")
    return tarfile.open(fileobj=io.BytesIO(b"".join(p.read_bytes() for p in parts)))


@pytest.fixture
def prompts(tmp_path):
    make_writing_target(tmp_path / "target", max_positions=200)
    (tmp_path / "prompts.txt.part-00").write_text("Say 1.\nSay 2.\nSa")
    (tmp_path / "prompts.txt.part-01").write_text("y 3.\nSay 4.\n")
    return {"TARGET": "target", "PROMPTS": "prompts.txt", "ANSWER_FLAGS": "--dtype float32 --max-new-tokens 16"}


def test_from_prompts_in_parts_to_a_head_in_parts(prompts, tmp_path):
    flags = "--dtype float32 --held-out 1 --epochs 2 --draft-vocab-size 60 --ttt-steps 2 --decode-every 0"
    done = run("all", tmp_path, **prompts, TRAIN_FLAGS=flags)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {f"{name}.{end}" for name in ("answers", "head") for end in ("tar.gz.part-00", "JOIN.txt")}
    assert {p.name for p in (tmp_path / "out").iterdir()} == parts | {"answers.log", "train.log"}
    rows = joined(tmp_path / "out", "answers").extractfile("answers.jsonl").read().splitlines()
    assert len(rows) == 4
    joined(tmp_path / "out", "head").extractall(tmp_path / "came", filter="data")
    target = checkpoint.load_target(tmp_path / "target", torch.float32, capture_after=(1, 3, 4))
    assert checkpoint.load_draft(tmp_path / "came" / "head", target).config.draft_vocab_size == 60
    assert (tmp_path / "came" / "log.jsonl").is_file()


def test_a_stage_that_is_stopped_says_so_and_hands_over_what_there_is(prompts, tmp_path):
    done = run("answers", tmp_path, **prompts, ANSWER_SECONDS="0.1")
    assert (done.returncode, "there is no answers.jsonl yet" in done.stderr) == (1, True)
    (tmp_path / "work" / "answers.jsonl").write_text("{}\n")
    (tmp_path / "work" / "answers.jsonl.run.json").write_text("{}")
    done = run("answers", tmp_path, **prompts, ANSWER_SECONDS="0.1")
    assert (done.returncode, "stopped after 0.1 seconds" in done.stdout) == (124, True)
    assert joined(tmp_path / "out", "answers").getnames() == ["answers.jsonl", "answers.jsonl.run.json"]
    done = run("train", tmp_path, **prompts, TRAIN_SECONDS="0.1")
    assert (done.returncode, "there is no head yet" in done.stderr) == (1, True)
    assert run("anything", tmp_path).returncode == 2
