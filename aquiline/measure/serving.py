"""The commands that serve a head on vLLM and SGLang, across GPUs and machines, with the tree that records found best.

Names and meanings of the flags: the argument parsers of vLLM 0.32 and SGLang 0.5.23. There the nodes of SGLang's tree
count the root (a chain of three is 4 draft tokens), and vLLM drafts chains only.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aquiline.config import DraftConfig, TreeConfig, UserError, require
from aquiline.files import engines, speculators_format
from aquiline.files.checkpoint import DEFAULT, draft_path, read_draft_config, read_target_config
from aquiline.files.disk import read_json

VLLM, SGLANG = "vllm", "sglang"
_ENGINES = {VLLM: engines.VLLM, SGLANG: engines.SGLANG}
DEFAULT_TREES = {
    VLLM: TreeConfig(3, 1, 3),  # what `vllm serve HEAD` drafts of a head that `convert` writes
    SGLANG: TreeConfig(5, 4, 7),  # SGLang's own for Llama targets: 5 steps, top-k 4, 8 draft tokens
}
_FIRST = "HOST1"  # the machine that all others reach, to be replaced


def read_head(draft: str, target: str | None) -> tuple[str, str, DraftConfig]:
    """What the engine is to load as head and as target, and the head's config. UserError where no target is named."""
    given = None if target is None or not Path(target).expanduser().exists() else read_target_config(target)
    config, hf = read_draft_config(draft, given)
    named = target or speculators_format.verifier_name(hf)
    if named is None:
        raise UserError(f"{draft} does not say where its target is: give --target, a folder or a hub id")
    require(
        not Path(named).is_file(), f"{named} is a file, and neither engine serves it: export-target writes a folder"
    )
    return str(draft_path(draft)) if draft == DEFAULT else draft, named, config


def best_tree(records: Sequence[str], engine: str) -> tuple[TreeConfig, str]:
    """The fixed tree with the highest speed-up of those that the engine can draft, and how that is known.

    From records of `bench`, those of the smallest batch; of `eval`, its tree and the mean over tasks. UserError where
    none holds one with its times. Without records, the engine's usual one.
    """
    require(engine in _ENGINES, f"--engine {engine} is not known; expected {' or '.join(_ENGINES)}")
    if not records:
        return DEFAULT_TREES[engine], f"{_ENGINES[engine]}'s usual one, for there is no --record of bench or eval"
    found = [(path, *entry) for path in records for entry in _speedups(read_json(path), path)]
    fitting = [entry for entry in found if engine == SGLANG or entry[1].is_chain]
    require(
        bool(fitting),
        f"the records hold no tree that {_ENGINES[engine]} drafts, with its speed-up"
        + (f", but only {', '.join(str(tree) for _, tree, _, _ in found)}" if found else "")
        + ": measure some, for instance by aquiline bench PROMPTS --tree "
        + ("2:1:2 --tree 3:1:3 --tree 5:1:5" if engine == VLLM else "3:1:3 --tree 3:4:7 --tree 5:4:15")
        + " --json record.json",
    )
    path, tree, speedup, device = max(fitting, key=lambda entry: entry[2])
    return tree, f"{speedup:.2f} times as fast as plain decoding in {path}, which is of aquiline on {device}"


def _speedups(record: Mapping[str, Any], path: str) -> Iterator[tuple[TreeConfig, float, str]]:
    """(tree, speed-up, device) of every fixed tree in a record that has its times."""
    try:
        device = record["machine"].get("cpu") if record["machine"]["device"] == "cpu" else record["machine"]["device"]
        if "batches" in record:
            smallest = record["batches"][min(record["batches"], key=int)]["trees"]
            ways = {tree: way["speedup"] for tree, way in smallest.items()}
        else:
            ways = {record["settings"]["tree"]: record["mean"].get("speedup_median")}
        trees = [
            (TreeConfig.parse(tree), speedup, str(device)) for tree, speedup in ways.items() if speedup is not None
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is no record of bench or eval: {error!r}") from error
    yield from (entry for entry in trees if not entry[0].auto)


def commands(
    head: str, target: str, config: DraftConfig, engine: str, tree: TreeConfig, gpus: int = 1, nodes: int = 1
) -> list[str]:
    """One a machine, for `gpus` each, the target's matrices spread over all of them. UserError for a head that the
    engine would compute otherwise, and a tree it does not draft.
    """
    require(engine in _ENGINES, f"--engine {engine} is not known; expected {' or '.join(_ENGINES)}")
    require(gpus >= 1 and nodes >= 1, f"{gpus} GPUs on {nodes} machines: give at least one of each")
    name = _ENGINES[engine]
    lost = [*engines.left_out(config, name), *engines.no_room(config, name)]
    require(not lost, f"{name} does not compute this head as it was trained, for it ignores: {'; '.join(lost)}")
    require(
        config.num_heads % (gpus * nodes) == 0,
        f"{gpus * nodes} GPUs cannot share {config.num_heads} attention heads evenly; give a number that divides them, "
        "or start several servers",
    )
    per_machine = _vllm if engine == VLLM else _sglang
    return [shlex.join(per_machine(head, target, tree, gpus, nodes, number)) for number in range(nodes)]


def _vllm(head: str, target: str, tree: TreeConfig, gpus: int, nodes: int, number: int) -> list[str]:
    require(tree.is_chain, f"vLLM drafts chains, and the tree is {tree}: give --tree D:1:D")
    drafting = {"method": "eagle3", "model": head, "num_speculative_tokens": tree.depth}
    command = ["vllm", "serve", target, "--speculative-config", json.dumps(drafting)]
    command += ["--tensor-parallel-size", str(gpus * nodes)] if gpus * nodes > 1 else []
    if nodes > 1:
        command += ["--nnodes", str(nodes), "--node-rank", str(number), "--master-addr", _FIRST]
        command += ["--headless"] if number else []
    return command


def _sglang(head: str, target: str, tree: TreeConfig, gpus: int, nodes: int, number: int) -> list[str]:
    command = ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "EAGLE3"]
    command += ["--speculative-draft-model-path", head, "--speculative-num-steps", str(tree.depth)]
    command += ["--speculative-eagle-topk", str(tree.top_k)]
    command += ["--speculative-num-draft-tokens", str(tree.num_nodes + 1)]
    command += ["--tp-size", str(gpus * nodes)] if gpus * nodes > 1 else []
    if nodes > 1:
        command += ["--nnodes", str(nodes), "--node-rank", str(number), "--dist-init-addr", f"{_FIRST}:20000"]
    return command
