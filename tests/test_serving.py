"""The commands that serve a head elsewhere, and the tree that records found best."""

import argparse
import json
import shlex
from pathlib import Path

import pytest
import torch

from aquiline.config import TreeConfig, UserError
from aquiline.files import checkpoint
from aquiline.files.convert import convert
from aquiline.measure import serving
from aquiline.measure.serving import SGLANG, VLLM, best_tree, commands
from tests.conftest import tiny_draft_config, tiny_target_config
from tests.test_api import folders, make_draft  # noqa: F401 (a fixture)

RECORDS = Path(__file__).parents[1] / "docs" / "records"
CHAIN, TREE = TreeConfig(4, 1, 4), TreeConfig(3, 4, 7)
CONFIG = tiny_draft_config(tiny_target_config(), num_heads=8)


def vllm_parser():
    """What vLLM's own parser does with these flags; `runs/interop.py` asks that itself."""
    parser = argparse.ArgumentParser(prog="vllm serve", exit_on_error=False)
    parser.add_argument("model")
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr")
    parser.add_argument("--headless", action="store_true")
    return parser


def test_vllm_alone_and_on_two_machines_of_four():
    (line,) = commands("my head", "org/target", CONFIG, VLLM, CHAIN)
    program, verb, *rest = shlex.split(line)
    assert (program, verb) == ("vllm", "serve")
    given = vllm_parser().parse_args(rest)
    assert given.model == "org/target"
    assert given.speculative_config == {"method": "eagle3", "model": "my head", "num_speculative_tokens": 4}
    assert "parallel" not in line
    first, second = (shlex.split(c)[2:] for c in commands("h", "t", CONFIG, VLLM, CHAIN, gpus=4, nodes=2))
    first, second = vllm_parser().parse_args(first), vllm_parser().parse_args(second)
    assert (first.node_rank, first.headless, second.node_rank, second.headless) == (0, False, 1, True)
    for one in (first, second):
        assert (one.tensor_parallel_size, one.nnodes, one.master_addr) == (8, 2, "HOST1")


def test_sglang_counts_the_root_and_says_where_the_first_machine_is():
    (line,) = commands("h", "t", CONFIG, SGLANG, TREE)
    assert line == (
        "python -m sglang.launch_server --model-path t --speculative-algorithm EAGLE3 --speculative-draft-model-path h "
        "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
    )
    (chain,) = commands("h", "t", CONFIG, SGLANG, CHAIN, gpus=2)
    assert chain.endswith("-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5 --tp-size 2")
    both = commands("h", "t", CONFIG, SGLANG, TREE, gpus=1, nodes=2)
    for number, command in enumerate(both):
        assert command.endswith(f" --tp-size 2 --nnodes 2 --node-rank {number} --dist-init-addr HOST1:20000")


def test_what_is_refused():
    with pytest.raises(UserError, match=r"vLLM drafts chains, and the tree is 3:4:7: give --tree D:1:D"):
        commands("h", "t", CONFIG, VLLM, TREE)
    with pytest.raises(UserError, match="--engine trt is not known; expected vllm or sglang"):
        commands("h", "t", CONFIG, "trt", CHAIN)
    with pytest.raises(UserError, match="3 GPUs cannot share 8 attention heads"):
        commands("h", "t", CONFIG, VLLM, CHAIN, gpus=3)
    with pytest.raises(UserError, match="0 GPUs on 1 machines"):
        commands("h", "t", CONFIG, VLLM, CHAIN, gpus=0)
    odd = tiny_draft_config(tiny_target_config(), norm_before_residual=True)
    with pytest.raises(UserError, match=r"SGLang does not compute this head as it was trained.*norm_before_residual"):
        commands("h", "t", odd, SGLANG, CHAIN)
    assert commands("h", "t", odd, VLLM, CHAIN)


def record(path, body):
    path.write_text(json.dumps({"machine": {"device": "cpu", "cpu": "A chip"}} | body))
    return str(path)


def test_the_fastest_tree_that_the_engine_drafts(tmp_path):
    ways = {"auto": 1.9, "2:4:7": 1.5, "4:1:4": 1.2, "2:1:2": 1.3, "7:1:7": None}
    trees = {tree: {"speedup": speedup} for tree, speedup in ways.items()}
    bench = record(
        tmp_path / "bench.json", {"batches": {"8": {"trees": {"5:1:5": {"speedup": 9}}}, "1": {"trees": trees}}}
    )
    eval_ = record(tmp_path / "eval.json", {"settings": {"tree": "3:1:3"}, "mean": {"speedup_median": 1.4}})
    auto = record(tmp_path / "auto.json", {"settings": {"tree": "auto"}, "mean": {"speedup_median": 2.0}})
    untimed = record(tmp_path / "untimed.json", {"settings": {"tree": "6:8:60"}, "mean": {"tau": 3.0}})
    assert best_tree([bench], VLLM)[0] == TreeConfig(2, 1, 2)
    assert best_tree([bench, eval_, auto], VLLM)[0] == TreeConfig(3, 1, 3)
    tree, why = best_tree([bench, eval_, untimed], SGLANG)
    assert tree == TreeConfig(2, 4, 7)
    assert why == f"1.50 times as fast as plain decoding in {bench}, which is of aquiline on A chip"
    with pytest.raises(UserError, match=r"hold no tree that vLLM drafts, with its speed-up: measure some"):
        best_tree([auto, untimed], VLLM)
    only = record(tmp_path / "only.json", {"settings": {"tree": "2:4:7"}, "mean": {"speedup_median": 2.0}})
    with pytest.raises(UserError, match=r"but only 2:4:7: measure some, .*--tree 2:1:2"):
        best_tree([only], VLLM)
    with pytest.raises(UserError, match=r"strange\.json is no record of bench or eval"):
        best_tree([record(tmp_path / "strange.json", {})], VLLM)


def test_without_a_record_it_is_the_engines_own_choice_and_says_so():
    assert best_tree([], VLLM)[0] == TreeConfig(3, 1, 3)
    assert best_tree([], SGLANG)[0] == TreeConfig(5, 4, 7)
    assert "no --record" in best_tree([], SGLANG)[1]
    with pytest.raises(UserError, match="expected vllm or sglang"):
        best_tree([], "trt")


def test_the_records_of_this_project_are_read():
    assert best_tree([str(RECORDS / "trees.json")], SGLANG)[0] == TreeConfig(2, 4, 5)
    assert best_tree([str(RECORDS / "trees.json")], VLLM)[0] == TreeConfig(4, 1, 4)


def test_the_verb(folders, tmp_path, capsys):  # noqa: F811
    from aquiline.cli.main import main

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["serve-command", *map(str, arguments)])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, " ".join(captured.err.split())

    code, out, err = run(folders / "draft", "--engine", "vllm", "--target", "org/big", "--gpus", 2, "--tree", "5:1:5")
    assert (code, out.count("\n")) == (None, 1)
    assert shlex.split(out)[2] == "org/big"
    assert json.loads(shlex.split(out)[4])["num_speculative_tokens"] == 5
    assert "tree 5:1:5: as asked for" in err
    code, out, err = run(folders / "draft", "--engine", "vllm")
    assert (code, out) == (2, "")
    assert "does not say where its target is: give --target" in err
    convert(folders / "draft", tmp_path / "vllm", "speculators", str(folders / "target"))
    code, out, err = run(tmp_path / "vllm", "--engine", "sglang", "--nodes", 2)
    assert (code, out.count("\n"), shlex.split(out)[4]) == (None, 2, str(folders / "target"))
    assert "SGLang's usual one" in err
    code, _, err = run(folders / "draft", "--engine", "vllm", "--target", "t", "--tree", "4:1:4", "--record", "x")
    assert code == 2
    assert "give one" in err
    (tmp_path / "t.gguf").write_bytes(b"")
    code, _, err = run(folders / "draft", "--engine", "vllm", "--target", tmp_path / "t.gguf")
    assert code == 2
    head, _, _ = serving.read_head("default", "org/target")
    assert (Path(head) / "config.json").is_file()


def test_a_head_that_says_nothing_of_its_target_is_read_with_it(folders, tmp_path):  # noqa: F811
    target = checkpoint.load_target(folders / "target", torch.float32, "cpu", (1, 3, 4))
    make_draft(tmp_path / "head", target)
    path = tmp_path / "head" / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("aquiline", "capture_after")}
    path.write_text(json.dumps(config))
    assert serving.read_head(str(tmp_path / "head"), str(folders / "target"))[2].capture_after == (1, 3, 4)
