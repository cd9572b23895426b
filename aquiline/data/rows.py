"""What one row of a data file holds: the one place that decides what a conversation is. Rows of no use are counted."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from aquiline.config import UserError, require
from aquiline.data.chat import Message, check_messages

SHAPES = ("messages", "conversations", "turns", "prompt")  # the first of them that a row has is read
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # ShareGPT's words
_AFTER = {  # what may stand before a turn of this role
    "user": ("system", "developer", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


class Dropped:
    """Rows of no use by reason. Strict: the first one is an error."""

    def __init__(self, strict: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.first = ""  # an example, for when nothing is left
        self._strict = strict

    @contextlib.contextmanager
    def row(self, where: str, otherwise: str = "cannot be written as tokens") -> Iterator[None]:
        """A UserError raised inside is counted by its reason (`otherwise` if it has none), and the work goes on."""
        try:
            yield
        except UserError as error:
            self.add(where, error, otherwise)

    def add(self, where: str, error: UserError, otherwise: str = "cannot be written as tokens") -> None:
        if self._strict:
            raise UserError(f"{where}: {error}") from error
        self.first = self.first or f"{where}: {error}"
        self.counts[error.reason or otherwise] += 1

    def __str__(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.counts.most_common()) or "none"


def conversation(row: dict[str, Any]) -> list[Message]:
    """The messages of a row with `messages`, `conversations`, `turns` or `prompt`; UserError with a reason."""
    shape = next((key for key in SHAPES if row.get(key) is not None), None)
    if shape is None:
        raise UserError(f"no conversation: expected one of {', '.join(SHAPES)}; got {sorted(row)}", "no conversation")
    value: Any = row[shape]
    if isinstance(value, str) and shape == "prompt":
        value = [value]
    require(isinstance(value, list), f"{shape!r} must be a list, it is a {type(value).__name__}", "not a conversation")
    if value and all(isinstance(turn, str) for turn in value):  # what a user says, turn by turn
        messages: list[Message] = [{"role": "user", "content": turn} for turn in value]
        _check_texts(messages)
        return messages
    messages = [_message(turn) for turn in value]
    check_messages(messages)
    _check_texts(messages)
    _check_order(messages)
    return messages


def language(row: dict[str, Any]) -> str:
    """What a row says of its language, in its own words; "" where it does not."""
    given = row.get("language") or row.get("lang")
    return given if isinstance(given, str) else ""


def _message(turn: Any) -> Any:
    """A turn with `role` and `content`, whichever way it is written; what else it holds stays, but for nulls."""
    if not isinstance(turn, dict):
        return turn
    # A table of all rows gives each turn the keys of every other one, as nulls.
    message = {key: value for key, value in turn.items() if value is not None}
    for ours, theirs in (("role", "from"), ("content", "value")):
        if ours not in message:
            message[ours] = message.pop(theirs, None)
    role = message["role"]
    message["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
    return message


def _check_texts(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages, 1):
        text, role = message["content"], message["role"]
        empty = not (text or "").strip() and not message.get("tool_calls") and role in ("user", "assistant")
        require(not empty, f"message {number} ({role}) is empty", "empty")
        try:
            (text or "").encode("utf-8")
        except UnicodeEncodeError as error:  # JSON may carry "\ud800" alone, which is no character
            raise UserError(f"message {number} holds half of a surrogate pair", "not valid Unicode") from error


def _check_order(messages: Sequence[Message]) -> None:
    talk = [m["role"] for m in messages if m["role"] not in ("system", "developer")]
    require(bool(talk), "there are only system messages", "ends oddly")
    require(talk[0] != "assistant", "it starts with the assistant", "starts with the assistant")
    for before, role in zip(["system", *talk], talk, strict=False):
        reason = f"two {role} turns in a row" if before == role else f"a {role} turn after the {before}'s"
        require(before in _AFTER[role], reason, reason)
