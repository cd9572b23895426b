"""Prompts from files and data sets: what the target is to answer."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.config import UserError, require
from aquiline.data.chat import Message
from aquiline.data.rows import Dropped, conversation, language
from aquiline.files.disk import json_object, read_lines, utf8
from aquiline.files.tables import table_rows

_JSON_LINES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Prompt:
    """A conversation that the target answers turn by turn."""

    id: str  # the row's own, else file and line
    source: str  # the row's own, else the name of the file or data set
    messages: list[Message]  # without the assistant turns that the target writes anew
    language: str = ""  # the row's own


def read_prompts(sources: Sequence[str], dropped: Dropped, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts (None: all) of JSON lines, text files with one prompt a line, and data sets of Hugging
    Face, a folder or a name, with `:split` behind it where it is not `train`.

    A row that holds no prompt, or one that was there before, is counted in `dropped`.
    """
    names = [Path(source).name for source in sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"two sources are named {twice}, and prompts are named after their source; rename one")
    require(limit is None or limit >= 1, f"limit {limit} must be at least 1")
    prompts: list[Prompt] = []
    ids: set[str] = set()
    texts: set[bytes] = set()
    for source in sources:
        for number, row in _rows(source):
            if len(prompts) == limit:
                return prompts
            with dropped.row(f"{source}:{number}"):
                if isinstance(row, UserError):
                    raise row
                prompt = _prompt(row, Path(source).name, number)
                digest = hashlib.sha256(json.dumps(prompt.messages, sort_keys=True).encode()).digest()[:16]
                require(prompt.id not in ids, f"id {prompt.id!r} was there before", "duplicate id")
                require(digest not in texts, "the same prompt was there before", "duplicate prompt")
                ids.add(prompt.id)
                texts.add(digest)
                prompts.append(prompt)
    return prompts


def _prompt(row: dict[str, Any], file: str, number: int) -> Prompt:
    messages = unanswered(conversation(row))
    name = next((row[key] for key in ("id", "question_id") if row.get(key) is not None), f"{file}:{number}")
    return Prompt(str(name), str(row.get("source") or Path(file).stem), messages, language(row))


def unanswered(messages: Sequence[Message]) -> list[Message]:
    """A conversation without its assistant's turns; those that called a tool stay, for what it answered follows."""
    following = [m["role"] for m in messages[1:]] + [None]
    left = [m for m, after in zip(messages, following, strict=True) if m["role"] != "assistant" or after == "tool"]
    require(left[-1]["role"] in ("user", "tool"), f"it ends with the {left[-1]['role']}", "ends oddly")
    return left


def _rows(source: str) -> Iterator[tuple[int, dict[str, Any] | UserError]]:
    """(number, row or what is wrong with it)."""
    path = Path(source)
    if not path.is_file():
        exists = path.exists() or path.suffix.lower() not in (*_JSON_LINES, ".txt")
        require(exists, f"{source} does not exist; expected a file of prompts, a folder or the name of a data set")
        yield from enumerate(_dataset(source), 1)
        return
    lines = path.suffix.lower() in _JSON_LINES
    for number, line in read_lines(path):
        try:
            row = json_object(line) if lines else {"prompt": utf8(line).strip()}
        except UserError as error:
            yield number, error
            continue
        if not lines and number == 1:
            require(not row["prompt"].startswith("{"), f"{source} looks like JSON lines; name it .jsonl")
        yield number, row


def _dataset(source: str) -> Iterator[dict[str, Any]]:
    """A data set of the Hugging Face hub, or a folder that holds or saved one."""
    name, _, split = source.partition(":")
    return table_rows(name, split or "train")
