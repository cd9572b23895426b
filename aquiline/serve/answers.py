"""Replies as OpenAI's clients read them: chunks of a stream, or one object at the end."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aquiline.data.chat import Chat
from aquiline.decode.engine import Request
from aquiline.serve.asked import Asked
from aquiline.serve.loop import Step
from aquiline.serve.schema import ChatBody, CompletionBody

_FINISH = {"stop": "stop", "length": "length", "context": "length"}


@dataclass(frozen=True)
class Token:
    """One token of a reply; its text is "" where it ends inside a character or has none."""

    id: int
    origin: int
    text: str


class Tokens:
    """The tokens of a reply, given out once their text is visible, and cut where it is: at a stop string, say."""

    def __init__(self, chat: Chat) -> None:
        self._stream = chat.text_stream()
        self._held: list[Token] = []
        self._given = 0  # characters
        self._visible = 0

    def take(self, step: Step) -> list[Token]:
        """Those that a step makes visible."""
        for number, origin in zip(step.ids, step.origins, strict=True):
            self._held.append(Token(number, origin, self._stream.push([number])))
        self._visible += len(step.text)
        if step.last and self._held:
            last = self._held[-1]
            self._held[-1] = Token(last.id, last.origin, last.text + self._stream.finish())
        given = []
        while self._held:
            token, room = self._held[0], self._visible - self._given
            if len(token.text) > room and not step.last:
                break
            given.append(Token(token.id, token.origin, token.text[:room]))
            self._given += len(given[-1].text)
            del self._held[0]
        return given


@dataclass
class _Reply:
    """One choice as it comes."""

    tokens: Tokens
    text: str = ""
    shown: list[Token] = field(default_factory=list)
    begun: bool = False
    finish_reason: str | None = None


class Answer:
    """Of one call."""

    def __init__(self, body: ChatBody | CompletionBody, asked: Asked, chat: Chat, model: str) -> None:
        self.id = ("chatcmpl-" if isinstance(body, ChatBody) else "cmpl-") + uuid.uuid4().hex
        self._created, self._model, self._body, self._asked = int(time.time()), model, body, asked
        self._began = time.perf_counter()
        self._chats = isinstance(body, ChatBody)
        self._replies = [_Reply(Tokens(chat)) for _ in asked.requests]

    def chunk(self, index: int, step: Step) -> dict[str, Any] | None:
        """What a stream says of a step; None where nothing of it is visible."""
        reply, body = self._replies[index], self._body
        shown = reply.tokens.take(step) if body.token_origins else []
        if not (step.text or shown or step.last or not reply.begun):
            return None
        choice: dict[str, Any] = {"index": index}
        if self._chats:
            role = {} if reply.begun else {"role": "assistant"}
            choice["delta"] = role | ({"content": step.text} if step.text or not reply.begun else {})
        else:
            choice["text"] = step.text
        choice |= {"logprobs": None, "finish_reason": _FINISH.get(step.finish_reason or "")}
        if body.token_origins:
            choice["aquiline"] = _origins(shown)
        reply.begun = True
        usage = {"usage": None} if self._tells_usage else {}
        return self._head(chunk=True) | {"choices": [choice]} | usage

    def last_chunk(self) -> dict[str, Any] | None:
        """The usage, for who asked for it."""
        return self._head(chunk=True) | {"choices": [], "usage": self.usage()} if self._tells_usage else None

    def take(self, index: int, step: Step) -> None:
        """A step of a reply that is not streamed."""
        reply = self._replies[index]
        reply.text += step.text
        reply.finish_reason = step.finish_reason
        if self._body.token_origins:
            reply.shown += reply.tokens.take(step)

    def whole(self) -> dict[str, Any]:
        """The answer once every reply has ended."""
        return self._head(chunk=False) | {"choices": list(map(self._choice, range(len(self._replies)))),
                                          "usage": self.usage()}  # fmt: skip

    def _choice(self, index: int) -> dict[str, Any]:
        reply = self._replies[index]
        choice: dict[str, Any] = {"index": index}
        if self._chats:
            choice["message"] = {"role": "assistant", "content": reply.text, "refusal": None}
        else:
            choice["text"] = reply.text
        choice |= {"logprobs": None, "finish_reason": _FINISH.get(reply.finish_reason or "")}
        if self._body.token_origins:
            choice["aquiline"] = _origins(reply.shown)
        return choice

    @property
    def _tells_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and options.include_usage

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self._chats:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def usage(self) -> dict[str, Any]:
        """Tokens, and what speculation made of them."""
        requests = self._asked.requests
        prompt, generated = self._asked.prompt_tokens, sum(len(request.output_ids) for request in requests)
        reused = sum(request.reused_tokens for request in requests)
        cycles, emitted = _sum(requests, "cycles"), sum(sum(request.cycle_lengths) for request in requests)
        firsts = [r.first_token_at - self._began for r in requests if r.first_token_at is not None]
        ends = [r.finished_at - self._began for r in requests if r.finished_at is not None]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": min(reused, prompt)},
            "aquiline": {
                "cycles": cycles,
                "tau": emitted / cycles if cycles else None,
                "accepted": sum(sum(request.accepted) for request in requests),
                "drafted": _sum(requests, "drafted_nodes"),
                "plain_steps": sum(request.trees[0, 0] for request in requests),
                "reused_prompt_tokens": reused,
                "seconds": max(ends, default=0.0),
                "first_token_seconds": min(firsts, default=0.0),
            },
        }


def _sum(requests: Sequence[Request], name: str) -> int:
    return sum(getattr(request, name) for request in requests)


def _origins(tokens: Sequence[Token]) -> dict[str, Any]:
    return {"tokens": [{"id": t.id, "text": t.text, "origin": t.origin} for t in tokens], "tree": None}
