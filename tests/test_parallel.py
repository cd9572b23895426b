"""Several processes under torchrun against one that accumulates: the same losses, the same head."""

import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from aquiline.train.parallel import Processes
from tests.test_api import END, folders  # noqa: F401 (a fixture)


def train(folder, data, target, *more: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    command = ["-m", "aquiline", "train", str(data), "--out", str(folder), "--target", str(target)]
    command += ["--batch-tokens", "24", "--epochs", "2", "--held-out", "2", "--eval-every", "3", "--decode-every", "0"]
    command += ["--ttt-steps", "3", "--device", "cpu", "--dtype", "float32", "--patience", "50", *more]
    command += ["--warm-start", str(target.parent / "draft")]  # so that there is an evaluation before the first update
    if processes > 1:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [
        {"id": f"r{i}", "temperature": 0, "prompt_ids": [i, 2, 3], "response_ids": [4, 5 + i % 3, 6 + i, 7, END]}
        for i in range(25)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_two_processes_do_what_one_does_with_twice_the_packs(folders, data, tmp_path):  # noqa: F811
    target = folders / "target"
    alone = train(tmp_path / "alone", data, target, "--accumulate", "2")
    assert alone.returncode == 0, alone.stderr
    both = train(tmp_path / "both", data, target, "--features", str(tmp_path / "features"), processes=2)
    assert both.returncode == 0, both.stderr
    logs = []
    for name in ("alone", "both"):
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        logs.append([json.loads(line) for line in lines])
    assert len(logs[0]) == len(logs[1]) > 4
    starts = [log.pop(0) for log in logs]
    assert [(row["step"], row["evaluation"]["tau"]) for row in starts] == 2 * [(0, starts[0]["evaluation"]["tau"])]
    for one, two in zip(*logs, strict=True):
        assert (one["step"], one["tokens"]) == (two["step"], two["tokens"])
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["accuracy"] == pytest.approx(one["accuracy"], abs=1e-6)
    heads = [safetensors.torch.load_file(tmp_path / n / "head" / "model.safetensors") for n in ("alone", "both")]
    for name, tensor in heads[0].items():
        # Not value by value: AdamW steps as far for a gradient that is rounding alone, and there the two differ.
        one, two = tensor.float(), heads[1][name].float()
        assert float((one - two).norm()) <= 0.01 * float(one.norm()), name
    assert both.stderr.count("complete; the head is") == 1
    # Another number of processes would make other updates of the same numbers.
    again = train(tmp_path / "both", data, target)
    assert again.returncode == 2
    assert "processes was 2 and is 1" in again.stderr


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "cpu:gloo,cuda:nccl")])
def test_gradients_go_by_the_way_of_their_device(monkeypatch, device, backend):
    """NCCL itself needs GPUs: here only what is asked for."""
    asked, current = [], []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "init_process_group", asked.append)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    processes = Processes.joined(torch.device(device))
    assert (processes.rank, processes.count) == (1, 2)
    assert (asked, current) == ([backend], [torch.device(device)] if device != "cpu" else [])


def test_alone_nothing_is_exchanged():
    alone = Processes()
    p = torch.nn.Parameter(torch.ones(2))
    assert alone.sum([1.0, 2.0]) == [1.0, 2.0]
    assert alone.most(3) == 3
    assert alone.share([1, 2, 3]) == [1, 2, 3]
    assert (alone.any(True), alone.any(False), alone.first) == (True, False, True)
    alone.sum_gradients([p])
    assert p.grad is None


def test_the_packs_of_an_update_are_shared_out():
    assert [list(Processes(rank, 3).share([0, 1, 2, 3, 4])) for rank in range(3)] == [[0, 3], [1, 4], [2]]
