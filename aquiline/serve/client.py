"""A conversation with an OpenAI-compatible server, as it writes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aquiline.config import SamplingConfig, UserError
from aquiline.data.chat import Message
from aquiline.data.server import Endpoint

_EXTRAS = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")  # not all know all
_THOUGHTS = ("reasoning_content", "reasoning")  # what a server took out of the content: vLLM wrote both names in turn


@dataclass(frozen=True)
class Piece:
    """What one chunk adds to a reply."""

    text: str
    tokens: list[tuple[str, int]] | None  # their texts and origins; None where the server does not tell


@dataclass(frozen=True)
class Summary:
    """Of a reply."""

    finish_reason: str
    tokens: int | None  # None: the server does not count
    seconds: float  # from sending to the last chunk
    tau: float | None  # None: the server does not say, or ran no speculative cycle


class RemoteConversation:
    """Turns with the model of a server, which gets the whole conversation every time."""

    def __init__(
        self, server: Endpoint, system: str | None, settings: dict[str, Any], template_kwargs: dict[str, Any]
    ) -> None:
        """`settings` as in `Model.request`, without `tree`."""
        self._server = server
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._body = {
            "model": server.model,
            "stream_options": {"include_usage": True},
            "max_tokens": settings["max_new_tokens"],
            "temperature": settings["temperature"],
            "seed": settings["seed"],
        }
        self._body |= {key: settings[key] for key in _EXTRAS if settings[key] != getattr(SamplingConfig, key)}
        if template_kwargs:
            self._body["chat_template_kwargs"] = template_kwargs
        self._refuses_origins = False
        self.messages: list[Message] = []
        self.summary: Summary | None = None  # of the last reply

    def say(self, text: str, *, origins: bool) -> Iterator[Piece]:
        """Add a user's turn and stream the reply. One that is left early, or broken off, leaves no trace.

        What a server tells of its model's thoughts is shown, with an empty line behind it, and not sent back.
        """
        question: Message = {"role": "user", "content": text}
        body = self._body | {"messages": [*self._system, *self.messages, question]}
        usage: dict[str, Any] = {}
        reply, thinks, started, finish = "", False, time.perf_counter(), ""
        for chunk in self._chunks(body, origins):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                finish = choice.get("finish_reason") or finish
                delta, told = choice.get("delta") or {}, choice.get("aquiline")
                said = delta.get("content") or ""
                thought = "" if told else next((delta[key] for key in _THOUGHTS if delta.get(key)), "")
                if thought:
                    thinks = True
                    yield Piece(thought, None)
                elif said and thinks:
                    thinks = False
                    yield Piece("\n\n", None)
                reply += said
                yield Piece(said, None if told is None else [(t["text"], t["origin"]) for t in told["tokens"]])
        tau = (usage.get("aquiline") or {}).get("tau")
        self.summary = Summary(finish, usage.get("completion_tokens"), time.perf_counter() - started, tau)
        if reply:
            self.messages += [question, {"role": "assistant", "content": reply}]

    def _chunks(self, body: dict[str, Any], origins: bool) -> Iterator[dict[str, Any]]:
        """Servers that refuse what they do not know are asked again without it."""
        path = "/chat/completions"
        if origins and not self._refuses_origins:
            try:
                yield from self._server.stream(path, body | {"token_origins": True})
                return
            except UserError as error:
                if "token_origins" not in str(error):
                    raise
                self._refuses_origins = True
        yield from self._server.stream(path, body)

    def reset(self) -> None:
        """Begin anew."""
        self.messages = []
