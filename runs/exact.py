"""Whether `--exact` keeps its word where PyTorch decodes, and its price.

    AQUILINE_KERNEL=off python runs/exact.py OUT.json FILE.jsonl... [--limit 20] [--price]

Prompts are decoded in batches, with and without the draft, exactly and as PyTorch does it ordinarily, and the two texts
are compared. Shorter prompts come first, so that a batch has prompts of like length. What is done is kept in
OUT.json.rows, and the next run goes on from there. `--price` takes the times alone, of plain decoding at batch 1, both
ways in turn: the machine should have nothing else to do. It adds them to the record, or begins one.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from aquiline.api import Model, load
from aquiline.config import TreeConfig, require
from aquiline.decode.engine import Engine, Request
from aquiline.files.disk import read_json, write_json_atomic
from aquiline.measure.evaluate import Rendered, machine, model_settings, render, versions
from aquiline.measure.tasks import read_prompts, task_name

DEFINITIONS = {
    "equal": "prompts for which plain and speculative decoding, each in batches, gave the same token ids",
    "parted_at": "the first generated token (from 0) that differs, of the others",
    "price": "seconds a token of plain decoding at batch 1, without prefill: exact / ordinary, of one prompt, in turn",
}
_PRICED = 24  # tokens


def decode(model: Model, prompts: list[Rendered], tokens: int, tree: TreeConfig | None) -> list[list[int]]:
    """One batch; plainly without a tree."""
    longest = max(len(prompt.ids) for prompt in prompts)
    engine = Engine(model.target, None if tree is None else model.draft, len(prompts), longest + tokens)
    requests = [model.request(p.ids, max_new_tokens=tokens, tree=tree, plain=tree is None) for p in prompts]
    return [request.output_ids for request in engine.run(requests)]


def decode_all(models: dict[str, Model], prompts: list[Rendered], given: argparse.Namespace, path: Path) -> None:
    """A row of `path` for each batch that has none yet."""
    path.touch()
    done = {json.loads(line)["start"] for line in path.read_text().splitlines()}
    for start in range(0, len(prompts), given.batch):
        if start in done:
            continue
        batch = prompts[start : start + given.batch]
        row: dict[str, Any] = {"start": start, "prompts": [prompt.id for prompt in batch]}
        for name, model in models.items():
            for way, tree in (("plain", None), ("tree", given.tree)):
                row[f"{name}_{way}"] = decode(model, batch, given.max_new_tokens, tree)
        with path.open("a") as rows:
            rows.write(json.dumps(row) + "\n")


def compared(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    pairs = [pair for row in rows for pair in zip(row[f"{name}_plain"], row[f"{name}_tree"], strict=True)]
    parted = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairs
        if a != b
    ]
    tokens = sum(len(plain) for plain, _ in pairs)
    return {"prompts": len(pairs), "equal": len(pairs) - len(parted), "tokens": tokens, "parted_at": sorted(parted)}


def price(models: dict[str, Model], prompts: list[Rendered], rounds: int) -> dict[str, Any]:
    """Of prompts that are about as long as the middle one."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    engines = {name: Engine(model.target) for name, model in models.items()}
    middle = prompts[len(prompts) // 2 :][:rounds]
    for prompt in middle:
        for name, model in models.items():
            request = model.request(prompt.ids, max_new_tokens=_PRICED, plain=True)
            engines[name].run([request])
            seconds[name].append(_per_token(request))
    ratios = [a / b for a, b in zip(seconds["exact"], seconds["ordinary"], strict=True)]
    spread = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    per_token = {f"{name}_seconds": statistics.median(taken) for name, taken in seconds.items()}
    return {"rounds": len(ratios), "prompt_tokens": [len(p.ids) for p in middle], "ratio": spread, **per_token}


def _per_token(request: Request) -> float:
    assert request.finished_at is not None
    assert request.first_token_at is not None
    return (request.finished_at - request.first_token_at) / (len(request.output_ids) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tree", type=TreeConfig.parse, default="3:2:6")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--price", type=int, metavar="ROUNDS")
    given = parser.parse_args()

    models = {name: load(dtype=given.dtype, exact=name == "exact") for name in ("exact", "ordinary")}
    require(not models["ordinary"].target.exact, "the kernel is exact by itself: AQUILINE_KERNEL=off leaves it out")
    asked = {task_name(path): read_prompts(path, given.limit) for path in given.files}
    prompts = [prompt for name, of_file in asked.items() for prompt in render(models["exact"], name, of_file)]
    prompts.sort(key=lambda prompt: len(prompt.ids))
    record = read_json(given.out) if given.out.exists() else {}
    if given.price is not None:
        record["price"] = price(models, prompts, given.price)
    else:
        rows = given.out.with_suffix(".json.rows")
        decode_all(models, prompts, given, rows)
        done = [json.loads(line) for line in rows.read_text().splitlines()]
        record |= {name: compared(done, name) for name in models}
        record["settings"] = model_settings(models["exact"], asked) | {
            "batch": given.batch, "tree": str(given.tree), "max_new_tokens": given.max_new_tokens, "limit": given.limit,
        }  # fmt: skip
    device = models["exact"].target.device
    record |= {"machine": machine(device), "versions": versions(), "definitions": DEFINITIONS}
    write_json_atomic(given.out, record)


if __name__ == "__main__":
    main()
