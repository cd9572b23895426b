"""Prompts of the kinds that a first set of answers has few of: long inputs, second turns, whole conversations.

    python runs/more_prompts.py OUT.jsonl PROMPTS_FOLDER [--answered FILE.jsonl]... [--seed 0]

PROMPTS_FOLDER holds JSONL files of prompts named after their source; a row has `messages`, `source` and `id`. Rows that
are `--answered` already are left out. `aquiline data answer` then answers every turn, the second ones after its own
first answers.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

LONG = ("passages_long_templated", "passages_templated", "t0_summarisation")  # texts to be made shorter
LONG_CHARACTERS = 1500
CHAT = (
    "arena_hard", "awesome_prompts", "dolly_instructions", "gpteacher_roleplay", "gsm8k_train", "ifeval", "mbpp",
    "self_instruct_human", "superni_sample", "thealgorithms_python", "ultra_eval",
)  # fmt: skip
CONVERSATIONS = ("mtbench101", "llamafactory_demo")
SECOND_TURNS = (
    "Make it shorter.",
    "Summarise your answer in one sentence.",
    "Can you explain that in simpler words?",
    "Rewrite your answer as a list.",
    "Give me an example.",
    "Are you sure? Check your answer step by step.",
    "Now write it in a more formal tone.",
    "What is the most important point, and why?",
    "Continue.",
    "Rewrite it from another point of view.",
)


def choose(rows: list[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` rows, drawn by their hashed ids: which others there are does not matter."""

    def key(row: dict[str, Any]) -> bytes:
        return hashlib.sha256(f"{seed}:{row['id']}".encode()).digest()

    return sorted(rows, key=key)[:count]


def with_second_turn(row: dict[str, Any], number: int) -> dict[str, Any]:
    """The row with a user turn behind its first; `data answer` fills in what stands between."""
    follow_up = {"role": "user", "content": SECOND_TURNS[number % len(SECOND_TURNS)]}
    between = {"role": "assistant", "content": "..."}
    return row | {"id": f"{row['id']}-then", "messages": [*row["messages"], between, follow_up]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--answered", type=Path, action="append", default=[])
    parser.add_argument("--long", type=int, default=300)
    parser.add_argument("--second-turns", type=int, default=300)
    parser.add_argument("--conversations", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    answered = {json.loads(line)["id"] for path in options.answered for line in path.open(encoding="utf-8")}

    def read(sources: tuple[str, ...]) -> list[dict[str, Any]]:
        lines = (line for name in sources for line in (options.prompts / f"{name}.jsonl").open(encoding="utf-8"))
        return [row for row in map(json.loads, lines) if row["id"] not in answered]

    long = [r for r in read(LONG) if sum(len(m["content"]) for m in r["messages"]) >= LONG_CHARACTERS]
    short = [r for r in read(CHAT) if len(r["messages"]) == 1]
    several = [r for r in read(CONVERSATIONS) if len(r["messages"]) > 1]
    rows = choose(long, options.long, options.seed)
    seconds = choose(short, options.second_turns, options.seed)
    rows += [with_second_turn(row, number) for number, row in enumerate(seconds)]
    rows += choose(several, options.conversations, options.seed)
    rows = choose(rows, len(rows), options.seed)  # mixed, so that any first part has all kinds
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    options.out.write_text(text, encoding="utf-8")
    print(f"{len(rows)} prompts in {options.out}")


if __name__ == "__main__":
    main()
