"""Picks stored answers for a training run on a small machine.

    python runs/select_answers.py OUT.jsonl TOKENS IN.jsonl...

A token of a prompt costs a target pass and teaches nothing, so rows whose prompt is at most three quarters of the reply
are preferred; one in six of the others is kept, so that no kind of prompt is missing. The draw hashes the row's id:
the same input gives the same output.
"""

import hashlib
import json
import os
import sys


def main() -> None:
    out, budget, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    rows = []
    for path in paths:
        with open(path, encoding="utf-8") as f:
            for line in f:
                row = json.loads(line)
                if "ids" in row:
                    reply = sum(end - first for first, end in row["replies"])
                    prompt = len(row["ids"]) - reply
                else:
                    prompt, reply = len(row["prompt_ids"]), len(row["response_ids"])
                draw = int.from_bytes(hashlib.sha256(row["id"].encode()).digest()[:4], "little") / 2**32
                rows.append((draw if prompt <= 0.75 * reply else 6 * draw, prompt + reply, line))
    rows.sort()
    total = 0
    with open(out + ".tmp", "w", encoding="utf-8") as f:
        for _, tokens, line in rows:
            if total + tokens > budget:
                break
            total += tokens
            f.write(line)
    os.replace(out + ".tmp", out)
    print(f"{total} tokens")


if __name__ == "__main__":
    main()
