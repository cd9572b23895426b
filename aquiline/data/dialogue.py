"""A prompt on its way to a row of training data: which turn the target has to write next, and what it has written.

    the first prompt      <user>Hi<end><assistant>
    its reply                                     Hello<end>
    the second prompt     <user>Hi<end><assistant>Hello<end>\\n<user>And now?<end><assistant>
    its reply                                                                            ...

A row goes on as long as the next prompt continues it, token by token. A template that rewrites earlier turns, or text
that is cut into other tokens than it was written in, begins a new row: ids are those that were read and written.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from aquiline.config import AnswerConfig, UserError, require
from aquiline.data.chat import Chat, Message
from aquiline.data.prompts import Prompt


@dataclass(frozen=True)
class Turn:
    """What the target is asked next."""

    messages: list[Message]
    ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Reply:
    """What it wrote: `finish` is stop or length. `ids` None: only its text is known."""

    message: Message
    ids: list[int] | None
    finish: str


@dataclass
class _Row:
    ids: list[int]
    replies: list[tuple[int, int]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # which messages they are
    finish: list[str] = field(default_factory=list)


class Dialogue:
    """One conversation between a prompt's user and the target."""

    def __init__(self, prompt: Prompt, chat: Chat, config: AnswerConfig) -> None:
        self.prompt = prompt
        self.error: UserError | None = None  # why nothing came of it
        self.left_out = ""  # why the last turns were not asked
        self._chat = chat
        self._config = config
        own_system = any(m["role"] in ("system", "developer") for m in prompt.messages)
        system = [] if config.system is None or own_system else [{"role": "system", "content": config.system}]
        self._coming = deque([*system, *prompt.messages])
        self._messages: list[Message] = []
        self._rows: list[_Row] = []
        self._turn: Turn | None = None
        self._retokenised = False
        draw = self._draw("temperature")
        self.temperature = config.temperatures[draw % len(config.temperatures)]

    def next(self, reply: Reply | None = None) -> Turn | None:
        """Take the reply to the last turn and give the next one. None: it has ended, with an `error` or with rows.

        What goes wrong in a later turn takes nothing from those before.
        """
        try:
            if reply is not None:
                self._take(reply)
            self._turn = self._ask()
        except UserError as error:
            self._turn = None
            if self._rows:
                self.left_out = error.reason or "cannot be written as tokens"
            else:
                self.error = error
        return self._turn

    def _ask(self) -> Turn | None:
        while self._coming:
            self._messages.append(self._coming.popleft())
            if self._messages[-1]["role"] not in ("user", "tool"):
                continue
            if not self._coming or self._coming[0]["role"] not in ("assistant", "tool"):
                break
        else:
            return None
        ids = self._chat.render(self._messages, **self._config.template_kwargs)
        room = self._config.max_length - len(ids)
        require(room >= 1, f"{len(ids)} tokens, of {self._config.max_length} at most", "prompt longer than the context")
        seed = self._draw(str(len(self._messages))) % 2**63
        return Turn(list(self._messages), ids, min(room, self._config.max_new_tokens), self.temperature, seed)

    def _draw(self, what: str) -> int:
        """A number that depends on the prompt's id, not on what else is answered, when and beside what."""
        digest = hashlib.sha256(f"{self._config.seed}:{what}:{self.prompt.id}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def _take(self, reply: Reply) -> None:
        assert self._turn is not None
        prompt = self._turn.ids
        ids = self._ids_of(reply) if reply.ids is None else reply.ids
        empty = self._chat.end_of_turn_ids.issuperset(ids)
        require(not empty, "the answer is empty", "empty answer")
        row = _Row(prompt)
        if self._rows and prompt[: len(self._rows[-1].ids)] == self._rows[-1].ids:
            row = self._rows.pop()
        row.ids = prompt + ids
        row.replies.append((len(prompt), len(row.ids)))
        row.turns.append(len(self._messages))
        row.finish.append(reply.finish)
        self._rows.append(row)
        self._messages.append(reply.message)

    def _ids_of(self, reply: Reply) -> list[int]:
        """The reply's text in the tokens that our template would write it in."""
        assert self._turn is not None
        self._retokenised = True
        messages = [*self._messages, reply.message]
        last = sum(m["role"] == "assistant" for m in messages) - 1
        (row,) = self._chat.rows(messages, [i == last for i in range(last + 1)], **self._config.template_kwargs)
        ids = row.ids[len(self._turn.ids) :]
        return ids[:-1] if reply.finish == "length" else ids  # the end of turn was not written

    def rows(self, target: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of a data file. `target`: who wrote them."""
        rows = []
        for number, row in enumerate(self._rows, 1):
            messages = self._messages[: row.turns[-1] + 1]
            value = {
                "id": self.prompt.id,
                "source": self.prompt.source,
                "messages": messages,
                "written": [i in row.turns for i, m in enumerate(messages) if m["role"] == "assistant"],
                "temperature": self.temperature,
                "finish": row.finish,
                "target": target,
                "ids": row.ids,
                "replies": row.replies,
            }
            if self.prompt.language:
                value["language"] = self.prompt.language
            if self._config.template_kwargs:
                value["template_kwargs"] = self._config.template_kwargs
            if self._retokenised:
                value["retokenised"] = True
            if len(self._rows) > 1:
                value["part"] = [number, len(self._rows)]
            rows.append(value)
        return rows
