"""Prompt files of the measured tasks: JSONL or text in, conversations that wait for a reply out, nothing else.

A line is an object with `turns` (a list of user turns, as MT-bench's questions; the first is asked), with `messages`
(everything up to the last user or tool turn is asked) or with `prompt`, a text; in a .txt file it is such a text. Other
keys, references above all, are not looked at.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.config import UserError, require
from aquiline.data.chat import Message, check_messages
from aquiline.files.disk import json_object, read_lines, utf8

_SHAPES = "'turns', 'messages' or 'prompt'"


@dataclass(frozen=True)
class Prompt:
    """One conversation that ends where the target is to answer."""

    id: str  # the line's `question_id` or `id`, else its line number
    messages: list[Message]


def task_name(path: str | Path) -> str:
    """A task is named after its file: `eval/gsm8k.jsonl` is gsm8k."""
    return Path(path).stem


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file in order, the first `limit` of them (None: all); lines beyond are not read."""
    path = Path(path)
    require(limit is None or limit >= 1, f"the number of prompts must be at least 1, not {limit}")
    require(path.is_file(), f"{path} is not a file; expected prompts, as JSONL or as text, one a line")
    prompts: list[Prompt] = []
    plain = path.suffix.lower() == ".txt"
    for number, line in read_lines(path):
        try:
            row = {"prompt": utf8(line).strip()} if plain else json_object(line)
            prompts.append(_prompt(row, str(number)))
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from error
        if len(prompts) == limit:
            break
    require(bool(prompts), f"{path} holds no prompt; expected one a line, in JSONL with {_SHAPES}")
    return prompts


def _prompt(row: dict[str, Any], number: str) -> Prompt:
    turns, prompt = row.get("turns"), row.get("prompt")
    messages: Any = row.get("messages")
    require(
        [turns, messages, prompt].count(None) == 2,
        f"expected one of {_SHAPES}, found the keys {', '.join(map(repr, row)) or '(none)'}",
    )
    if prompt is not None:
        require(isinstance(prompt, str), "'prompt' must be a text string")
        messages = [{"role": "user", "content": prompt}]
    elif turns is not None:
        require(
            isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) for turn in turns),
            "'turns' must be a list of at least one text string",
        )
        messages = [{"role": "user", "content": turns[0]}]
    check_messages(messages)
    asked = max((i + 1 for i, message in enumerate(messages) if message["role"] in ("user", "tool")), default=0)
    require(asked > 0, "'messages' has no user turn to answer")
    name = next((row[key] for key in ("question_id", "id") if row.get(key) is not None), number)
    return Prompt(str(name), messages[:asked])
