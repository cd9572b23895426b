"""Plain decoding, ours against Transformers' `generate`, interleaved prompt by prompt with the same weights.

    python runs/versus_transformers.py OUT.json LIMIT MAX_NEW_TOKENS FILE.jsonl...

Both run in the dtype that `generate` takes on this machine, on the same threads, greedily, from the prompt to the last
token; who goes first alternates. In bf16 texts may part where two logits nearly tie: the two round at different places.
The record holds the dtype, the median ratio over prompts and its spread. Transformers' default attention is used.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from aquiline.api import load, load_chat, load_target
from aquiline.files.checkpoint import export_target
from aquiline.files.disk import write_json_atomic
from aquiline.measure.evaluate import machine, versions
from aquiline.measure.quiet import pause_file, quiet
from aquiline.measure.tasks import read_prompts
from aquiline.model.backend import describe


def main() -> None:
    out, limit, tokens, paths = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    ours = load(draft="none")
    with tempfile.TemporaryDirectory() as folder:
        export_target(load_target("default", torch.bfloat16), load_chat("default"), Path(folder) / "target")
        dtype = getattr(torch, ours.dtype)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "target", dtype=dtype).eval()

    def run_ours(ids: list[int]) -> tuple[list[int], float]:
        ours.engine.forget()  # every turn runs its prompt
        result = ours.generate(ids, max_new_tokens=tokens)
        return result.token_ids, result.seconds

    @torch.inference_mode()
    def run_theirs(ids: list[int]) -> tuple[list[int], float]:
        start = time.perf_counter()
        text = theirs.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)[0, len(ids) :].tolist()
        return text, time.perf_counter() - start

    ratios: list[float] = []
    rates: dict[str, list[float]] = {"ours": [], "transformers": []}
    equal = 0
    with quiet(pause_file()) as found:
        for path in paths:
            for number, prompt in enumerate(read_prompts(path, limit)):
                ids = ours.prompt_ids(prompt.messages)
                if not ratios:
                    run_ours(ids[:64]), run_theirs(ids[:64])  # warm up
                order = (run_ours, run_theirs) if number % 2 == 0 else (run_theirs, run_ours)
                done = {run: run(ids) for run in order}
                (mine, my_time), (other, their_time) = done[run_ours], done[run_theirs]
                equal += mine == other
                rates["ours"].append(len(mine) / my_time)
                rates["transformers"].append(len(other) / their_time)
                if len(mine) == len(other):
                    ratios.append(their_time / my_time)
                    print(f"{Path(path).stem} {prompt.id}: {ratios[-1]:.2f}", flush=True)
    found.require()
    record = {
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "prompts": len(rates["ours"]),
        "compared": len(ratios),
        "equal": equal,
        "tokens_per_second_median": {name: statistics.median(values) for name, values in rates.items()},
        "dtype": ours.dtype,
        "decoding": describe(ours.target.dtype, ours.target.device),
        "max_new_tokens": tokens,
        "files": [Path(p).name for p in paths],
        "machine": machine(torch.device("cpu")) | found.record(),
        "versions": versions(),
    }
    write_json_atomic(out, record)
    print(json.dumps({k: record[k] for k in ("ratio_median", "ratio_min", "ratio_max", "equal", "compared")}))


if __name__ == "__main__":
    main()
