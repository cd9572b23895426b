"""A target in parts, in two processes, against a whole one in one process: the same losses, the same head."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch

from aquiline.cli import main as cli
from aquiline.config import TrainConfig
from aquiline.data.chat import Chat
from aquiline.data.dataset import packs
from aquiline.train.run import TrainingRun
from aquiline.train.shard import shard
from tests.test_api import END, folders  # noqa: F401 (a fixture)
from tests.test_parallel import data  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[1]
CONFIG = TrainConfig(
    ttt_steps=3, batch_tokens=40, epochs=2.0, held_out=2, eval_every=3, decode_every=0, patience=50, accumulate=2,
    init="target-layer", draft_vocab_size=200,
)  # fmt: skip
FLAGS = (
    "--ttt-steps 3 --batch-tokens 40 --epochs 2 --held-out 2 --eval-every 3 --patience 50 --init target-layer "
    "--draft-vocab-size 200 --dtype float32 --shard-target"
)


def train_sharded(*arguments) -> subprocess.CompletedProcess[str]:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.sharded_training"]
    return subprocess.run(
        [sys.executable, *command, *map(str, arguments), *FLAGS.split()],
        capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def log(run) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.filterwarnings("ignore:the data has")
def test_two_processes_with_half_the_target_each_do_what_one_does_with_all_of_it(folders, data, tmp_path):  # noqa: F811
    features, target = tmp_path / "features", folders / "target"
    chat = Chat.from_folder(target, [END])
    alone = TrainingRun.prepare([data], tmp_path / "alone", target, chat, CONFIG, features=features)
    assert alone.run(lambda _: None)
    # Of the first update the first process finds its features, of held-out documents one: passes differ in number.
    kept = {"train": next(packs(alone.training, CONFIG.batch_tokens, CONFIG.seed, 0)), "held_out": [0]}
    for name, numbers in kept.items():
        path = features / name / "present.bin"
        path.write_bytes(bytes(i in numbers for i in range(path.stat().st_size)))
    arguments = ["train", data, "--out", tmp_path / "parts", "--target", target, "--features", features]
    ended = train_sharded(tmp_path / "facts", *arguments)
    assert ended.returncode == 0, ended.stderr

    first, second = (json.loads((tmp_path / f"facts.{rank}").read_text()) for rank in (0, 1))
    assert first["whole"] == second["whole"]
    for facts in (first, second):
        assert 0.45 < facts["held"] / facts["whole"] < 0.55
        assert facts["left_over"] == 0
        assert facts["at_once"] == 1
    assert first["passes"] == second["passes"]
    assert first["stand_ins"] != second["stand_ins"]

    one, two = log(tmp_path / "alone"), log(tmp_path / "parts")
    assert len(one) == len(two) > 4
    for a, b in zip(one, two, strict=True):
        assert (a["step"], a["tokens"]) == (b["step"], b["tokens"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert (a.get("evaluation") is None) == (b.get("evaluation") is None)
        if a.get("evaluation"):
            assert b["evaluation"]["loss"] == pytest.approx(a["evaluation"]["loss"], rel=1e-3)
            assert b["evaluation"]["decoded"] is None
    heads = [safetensors.torch.load_file(tmp_path / n / "head" / "model.safetensors") for n in ("alone", "parts")]
    for name, tensor in heads[0].items():
        a, b = tensor.float(), heads[1][name].float()
        assert float((a - b).norm()) <= 0.01 * float(a.norm()), name
    records = [json.loads((tmp_path / n / "head" / "run.json").read_text()) for n in ("alone", "parts")]
    assert records[0]["target"] == records[1]["target"]
    assert records[1]["training"] == dataclasses.asdict(CONFIG) | {"accumulate": 1, "switches": []}
    assert ended.stderr.count("no prompts are really decoded on the way") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [([], "over several processes, and 1 was started"), (["--dry-run"], "leave one of them out")],
)
def test_alone_or_to_try_it_out_a_sharded_target_is_refused(more, words, folders, data, monkeypatch, capsys):  # noqa: F811
    arguments = ["train", data, "--out", data.parent / "out", "--target", folders / "target", *FLAGS.split(), *more]
    monkeypatch.setattr(sys, "argv", ["aquiline", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (data.parent / "out").exists()


def test_a_packed_target_is_not_sharded(target, monkeypatch):
    monkeypatch.setattr(target, "_decoder", object())
    with pytest.raises(AssertionError, match="packed"):
        shard(target, "cpu")
