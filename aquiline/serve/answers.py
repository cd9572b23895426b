"""Replies as OpenAI's clients read them: chunks of a stream, or one object at the end."""

import dataclasses
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from aquiline.data.chat import Chat
from aquiline.decode.sampling import TokenLogprobs
from aquiline.serve.asked import Asked
from aquiline.serve.forms import ChatLogprobs, ChosenLogprob, DrawnTree, Origin, TextLogprobs, TokenLogprob, Usage
from aquiline.serve.loop import Step
from aquiline.serve.schema import ChatBody, CompletionBody

_FINISH = {"stop": "stop", "length": "length", "context": "length"}


@dataclass(frozen=True)
class Token:
    """One token of a reply."""

    id: int
    origin: int
    text: str  # "" where it ends inside a character, or has none
    start: int  # where in the reply's text
    logprobs: TokenLogprobs | None


class Tokens:
    """The tokens of a reply, given out once their text is visible, and cut where it is: at a stop string, say."""

    def __init__(self, chat: Chat) -> None:
        self._stream = chat.text_stream()
        self._held: list[Token] = []
        self._read = 0  # characters of the tokens, and of them visible ones
        self._visible = 0

    def take(self, step: Step) -> list[Token]:
        """Those that a step makes visible."""
        none: list[TokenLogprobs | None] = [None] * len(step.ids)
        for number, origin, of_token in zip(step.ids, step.origins, step.logprobs or none, strict=True):
            self._hold(Token(number, origin, self._stream.push([number]), self._read, of_token))
        self._visible += len(step.text)
        if step.last and self._held:
            last = self._held.pop()
            self._read = last.start
            self._hold(dataclasses.replace(last, text=last.text + self._stream.finish()))
        given = []
        while self._held and (step.last or self._held[0].start + len(self._held[0].text) <= self._visible):
            token = self._held.pop(0)
            given.append(dataclasses.replace(token, text=token.text[: max(0, self._visible - token.start)]))
        return given

    def _hold(self, token: Token) -> None:
        self._held.append(token)
        self._read += len(token.text)


@dataclass
class _Reply:
    """One choice as it comes."""

    tokens: Tokens
    texts: list[str] = field(default_factory=list)
    shown: list[Token] = field(default_factory=list)
    tree: DrawnTree | None = None
    begun: bool = False
    finish_reason: str | None = None


class Answer:
    """Of one call."""

    def __init__(self, body: ChatBody | CompletionBody, asked: Asked, chat: Chat, model: str) -> None:
        self._chats = isinstance(body, ChatBody)
        self.id = f"{'chatcmpl' if self._chats else 'cmpl'}-{uuid.uuid4().hex}"
        self._created, self._model, self._body, self._asked, self._chat = int(time.time()), model, body, asked, chat
        self._began = time.perf_counter()
        self._logprobs = any(request.logprobs is not None for request in asked.requests)
        self._replies = [_Reply(Tokens(chat)) for _ in asked.requests]

    def take(self, index: int, step: Step) -> None:
        """Keep a step of one of the replies for the whole."""
        reply = self._replies[index]
        reply.texts.append(step.text)
        reply.shown += self._shown(index, step)

    def _shown(self, index: int, step: Step) -> list[Token]:
        """The tokens that a step makes visible, where anybody asked for them."""
        reply = self._replies[index]
        reply.finish_reason = step.finish_reason
        if not (self._body.token_origins or self._logprobs):
            return []
        reply.tree = _tree(self._chat, step) if self._body.token_origins else None
        return reply.tokens.take(step)

    def chunk(self, index: int, step: Step) -> dict[str, Any] | None:
        """What a stream says of a step; None where nothing of it is visible."""
        reply = self._replies[index]
        shown = self._shown(index, step)
        if not (step.text or shown or step.last or not reply.begun):
            return None
        if self._chats:
            role = {} if reply.begun else {"role": "assistant"}
            said: dict[str, Any] = {"delta": role | ({"content": step.text} if step.text or not reply.begun else {})}
        else:
            said = {"text": step.text}
        reply.begun = True
        usage = {"usage": None} if self._tells_usage else {}
        return self._head(chunk=True) | {"choices": [self._choice(index, said, shown)]} | usage

    def last_chunk(self) -> dict[str, Any] | None:
        """The usage, for who asked for it."""
        return self._head(chunk=True) | {"choices": [], "usage": self.usage()} if self._tells_usage else None

    def whole(self) -> dict[str, Any]:
        """The answer once every reply has ended."""
        choices = []
        for index, reply in enumerate(self._replies):
            text = "".join(reply.texts)
            message = {"role": "assistant", "content": text, "refusal": None}
            choices.append(self._choice(index, {"message": message} if self._chats else {"text": text}, reply.shown))
        return self._head(chunk=False) | {"choices": choices, "usage": self.usage()}

    def _choice(self, index: int, said: dict[str, Any], shown: list[Token]) -> dict[str, Any]:
        """`said`: the part that is the text's."""
        reply = self._replies[index]
        logprobs = (self._of_chat if self._chats else self._of_text)(_spoken(shown, reply)) if self._logprobs else None
        finish = _FINISH.get(reply.finish_reason or "")
        choice: dict[str, Any] = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}
        if self._body.token_origins:
            tokens: list[Origin] = [{"id": t.id, "text": t.text, "origin": t.origin} for t in shown]
            choice["aquiline"] = {"tokens": tokens, "tree": reply.tree}
        return choice

    def _of_chat(self, shown: list[Token]) -> ChatLogprobs:
        def entry(token: int, logprob: float) -> TokenLogprob:
            data = self._chat.token_bytes(token)
            return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}

        content: list[ChosenLogprob] = []
        for token in shown:
            assert token.logprobs is not None
            top = [entry(*pair) for pair in token.logprobs.top]
            content.append({**entry(token.id, token.logprobs.chosen), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _of_text(self, shown: list[Token]) -> TextLogprobs:
        def name(token: int) -> str:
            return self._chat.token_bytes(token).decode(errors="replace")

        return {
            "tokens": [name(t.id) for t in shown],
            "token_logprobs": [_finite(t.logprobs.chosen) for t in shown if t.logprobs],
            "top_logprobs": [{name(i): _finite(p) for i, p in reversed(t.logprobs.top)} for t in shown if t.logprobs],
            "text_offset": [t.start for t in shown],
        }

    @property
    def _tells_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and options.include_usage

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self._chats:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def usage(self) -> Usage:
        """Tokens, and what speculation made of them."""
        requests = self._asked.requests
        prompt, generated = self._asked.prompt_tokens, sum(len(r.output_ids) for r in requests)
        cycles, emitted = sum(r.cycles for r in requests), sum(sum(r.cycle_lengths) for r in requests)
        reused = sum(r.reused_tokens for r in requests)
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
                "accepted": sum(sum(r.accepted) for r in requests),
                "drafted": sum(r.drafted_nodes for r in requests),
                "plain_steps": sum(r.trees[0, 0] for r in requests),
                "reused_prompt_tokens": reused,
                "seconds": max(ends, default=0.0),
                "first_token_seconds": min(firsts, default=0.0),
            },
        }


def _spoken(shown: list[Token], reply: _Reply) -> list[Token]:
    """Without those at the end that only ended the reply: its end-of-turn token, the rest of a stop string."""
    count = len(shown)
    while reply.finish_reason == "stop" and count and not shown[count - 1].text:
        count -= 1
    return shown[:count]


def _tree(chat: Chat, step: Step) -> DrawnTree | None:
    if step.tree is None:
        return None
    tree, path = step.tree
    texts = [chat.token_bytes(token).decode(errors="replace") for token in tree.tokens]
    return {"tokens": texts, "parents": tree.parents, "accepted": path[: sum(map(bool, step.origins))]}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this one."""
    return max(logprob, -9999.0)
