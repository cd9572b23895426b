"""A quantised target against the same in bf16: how its distribution differs, what its passes cost, how fast it decodes.

    python runs/quantised.py OUT.json FILE.jsonl... [--limit 10] [--parts distribution,passes,decoding]

Distributions are compared token by token of the replies that the bf16 target writes greedily, and of the prompts before
them. Passes, over rows of one text with 200 tokens cached, and the final argmax of each row, are timed in turn; so is
the decoding of every prompt, plainly and with the default head and tree. There the first prompt is not counted.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from aquiline.api import Model, load
from aquiline.config import QUANTIZE
from aquiline.files.disk import write_json_atomic
from aquiline.measure.evaluate import machine, versions
from aquiline.measure.quiet import quiet
from aquiline.measure.tasks import read_prompts

CONTEXT, ROWS, ROUNDS = 200, (1, 4, 8, 16, 32), 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--limit", type=int, default=10, help="prompts of a file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--parts", default="distribution,passes,decoding")
    given = parser.parse_args()
    prompts = [p.messages for file in given.files for p in read_prompts(file, given.limit)]
    models = {name: load(dtype="bfloat16", quantize=None if name == "bf16" else name) for name in ("bf16", *QUANTIZE)}
    record: dict[str, Any] = {"prompts": len(prompts), "max_new_tokens": given.max_new_tokens}
    record |= {"ways": {name: model.target.decoding for name, model in models.items()}}
    record |= {"quantize_draft": models["bf16"].quantised_draft}
    with quiet(None) as load_of_others:
        for part in given.parts.split(","):
            record[part] = {"distribution": distribution, "passes": passes, "decoding": decoding}[part](
                models, prompts, given.max_new_tokens
            )
    device = models["bf16"].target.device
    record |= {"machine": machine(device) | load_of_others.record(), "versions": versions()}
    write_json_atomic(given.out, record)
    for part in given.parts.split(","):
        for name, found in record[part].items():
            print(part, name, found)


def distribution(models: dict[str, Model], prompts: list[Any], tokens: int) -> dict[str, Any]:
    """Of the tokens of prompts and replies: the share with the same best next token, and the mean divergence (KL, in
    nats, from the bf16 target's distribution).
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name in QUANTIZE}
    for prompt in prompts:
        model = models["bf16"]
        ids = model.prompt_ids(prompt)
        reply = model.generate(prompt, max_new_tokens=tokens, plain=True).token_ids
        every = torch.tensor([ids + reply])
        logits = {}
        for name, m in models.items():
            out = m.target(every, torch.arange(every.shape[1])[None], None, m.target.new_cache(1, every.shape[1]), [0])
            logits[name] = torch.log_softmax(m.target.logits(out.last_BND[0, :-1]), -1)
        for name in QUANTIZE:
            same = logits[name].argmax(-1) == logits["bf16"].argmax(-1)
            far = (logits["bf16"].exp() * (logits["bf16"] - logits[name])).sum(-1)
            for where, part in (("prompts", slice(0, len(ids) - 1)), ("replies", slice(len(ids) - 1, None))):
                found[name].setdefault(f"{where}, same best", []).extend(same[part].float().tolist())
                found[name].setdefault(f"{where}, divergence", []).extend(far[part].tolist())
    return {
        name: {"tokens": len(kinds["replies, divergence"])} | {kind: statistics.fmean(x) for kind, x in kinds.items()}
        for name, kinds in found.items()
    }


def passes(models: dict[str, Model], prompts: list[Any], tokens: int) -> dict[str, Any]:
    """Milliseconds by rows: median, and the quickest."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, models["bf16"].target.config.vocab_size, (1, CONTEXT + max(ROWS)), generator=generator)
    positions = torch.arange(ids.shape[1])[None]
    caches, seconds = {}, {(name, rows): list[float]() for name in models for rows in ROWS}
    for name, model in models.items():
        caches[name] = model.target.new_cache(1, ids.shape[1])
        out = model.target(ids[:, :CONTEXT], positions[:, :CONTEXT], None, caches[name], [0])
        caches[name].keep(0, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
    for _ in range(ROUNDS):
        for rows in ROWS:
            part = slice(CONTEXT, CONTEXT + rows)
            for name, model in models.items():
                began = time.perf_counter()
                out = model.target(ids[:, part], positions[:, part], None, caches[name], [0])
                model.target.best(out.last_BND)
                seconds[name, rows].append(time.perf_counter() - began)
    return {
        name: {r: [round(1e3 * f(seconds[name, r]), 2) for f in (statistics.median, min)] for r in ROWS}
        for name in models
    }


def decoding(models: dict[str, Model], prompts: list[Any], tokens: int) -> dict[str, Any]:
    """Tokens per second, prefill left out: median over prompts, and whether all texts are plain decoding's own."""
    rates: dict[str, list[float]] = {}
    equal: dict[str, bool] = {}
    for number, prompt in enumerate(prompts):
        for name, model in models.items():
            texts = []
            for plain in (True, False):
                model.engine.forget()
                result = model.generate(prompt, max_new_tokens=tokens, plain=plain)
                texts.append(result.token_ids)
                if number and result.decode_tokens_per_second is not None:
                    rates.setdefault(f"{name}, {'plain' if plain else 'auto'}", []).append(
                        result.decode_tokens_per_second
                    )
            equal[name] = equal.get(name, True) and texts[0] == texts[1]
    medians = {way: round(statistics.median(found), 1) for way, found in rates.items()}
    return medians | {f"{name}, texts equal": same for name, same in equal.items()}


if __name__ == "__main__":
    main()
