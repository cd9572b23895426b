"""Which fixed tree decodes fastest on this machine, and how near `auto` comes.

    python runs/choose_tree.py OUT.json TOKENS FILE.jsonl...

Every prompt is decoded plainly and with each tree of the grid, in an order that rotates from prompt to prompt. A tree's
figure is plain time over its time, summed over prompts that gave the same number of tokens; the spread is over prompts.
"""

import json
import statistics
import sys

from aquiline.api import load
from aquiline.files.disk import write_json_atomic
from aquiline.measure.evaluate import machine, versions
from aquiline.measure.quiet import pause_file, quiet
from aquiline.measure.tasks import read_prompts
from aquiline.model.backend import describe

GRID = ["1:7:7", "2:4:5", "2:4:7", "2:8:15", "3:3:7", "3:4:7", "3:4:9", "3:5:11", "3:6:15", "4:1:4", "4:4:11", "5:6:31"]


def main() -> None:
    out, tokens, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    model = load()
    prompts = [p for path in paths for p in read_prompts(path)]
    ways = [None, "auto", *GRID]
    seconds: dict[str | None, list[float]] = {way: [] for way in ways}
    emitted: dict[str | None, list[int]] = {way: [] for way in ways}
    steps: dict[str | None, list[int]] = {way: [] for way in ways}
    with quiet(pause_file()) as found:
        for number, prompt in enumerate(prompts):
            ids = model.prompt_ids(prompt.messages)
            if number == 0:
                for way in ways:
                    model.generate(ids, max_new_tokens=8, tree=way, plain=way is None)
            turn = number % len(ways)
            for way in ways[turn:] + ways[:turn]:
                model.engine.forget()  # each way runs its prompt
                request = model.request(ids, max_new_tokens=tokens, tree=way, plain=way is None)
                result = model.run(request)
                steps[way].append(request.trees.total())
                seconds[way].append(result.seconds)
                emitted[way].append(result.generated_tokens)
                print(f"{number + 1}/{len(prompts)}", file=sys.stderr, flush=True)
    found.require()
    same = [i for i in range(len(prompts)) if len({emitted[way][i] for way in ways}) == 1]
    rows = {}
    for way in ways[1:]:
        ratios = [seconds[None][i] / seconds[way][i] for i in same]
        rows[way] = {
            "speedup": sum(seconds[None][i] for i in same) / sum(seconds[way][i] for i in same),
            "speedup_median": statistics.median(ratios),
            "speedup_min": min(ratios),
            "speedup_max": max(ratios),
            "tokens_per_step": sum(emitted[way]) / sum(steps[way]),
        }
    record = {
        "trees": rows,
        "best_fixed": max(GRID, key=lambda way: rows[way]["speedup"]),
        "prompts": len(same),
        "max_new_tokens": tokens,
        "plain_tokens_per_second": sum(emitted[None]) / sum(seconds[None]),
        "settings": {
            "target": model.target_name,
            "draft": model.draft_name,
            "dtype": model.dtype,
            "decoding": describe(model.target.dtype, model.target.device),
        },
        "machine": machine(model.target.device) | found.record(),
        "versions": versions(),
    }
    write_json_atomic(out, record)
    print(
        json.dumps({way: round(row["speedup"], 3) for way, row in rows.items()} | {"best_fixed": record["best_fixed"]})
    )


if __name__ == "__main__":
    main()
