"""Any OpenAI-compatible server: replies as they are written, and, as the target, requests with retries in numbers.

`return_token_ids` is vLLM's: the answer then holds `prompt_token_ids`, and `token_ids` in each choice. Servers without
it give text, which is cut into tokens again.
"""

import json
import os
import queue
import random
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any

from aquiline.config import AquilineWarning, UserError, require
from aquiline.data.chat import Chat
from aquiline.data.dialogue import Dialogue, Reply, Turn
from aquiline.files.disk import one_line

_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_FATAL = (401, 403, 404)  # whatever is asked
_TRIES = 6
_MESSAGE_BYTES = 2**16
_HOPELESS = 16  # prompts given up in a row


class Endpoint:
    """One model of one server. `OPENAI_API_KEY`, where it is set, is sent as the key."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        timeout: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """UserError when it does not answer, or serves several models and `model` names none of them."""
        require(
            url.startswith(("http://", "https://")), f"server {url!r} is no http address; for example http://host:8000"
        )
        self.url = url.rstrip("/") if url.rstrip("/").count("/") > 2 else url.rstrip("/") + "/v1"
        self._timeout = timeout
        self._sleep = sleep
        self._given_up = 0
        self.model = model or self._only_model()

    def _only_model(self) -> str:
        listed = self._call("/models", None).get("data")
        names = (
            [str(entry.get("id")) for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        )
        require(len(names) == 1, f"{self.url} serves {', '.join(names) or 'no model'}; name one with --model")
        return names[0]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a streamed answer as they come; without retries, for somebody is waiting.

        UserError where the server refuses, is not there, or breaks off. Leaving the loop early ends the connection.
        """
        try:
            with self._open(path, body | {"stream": True}) as response:
                for line in response:
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        return
                    if data:
                        chunk = json.loads(data)
                        require(isinstance(chunk, dict), f"the server's answer is not one: {data[:200]!r}")
                        require(not chunk.get("error"), f"the server broke off: {_message(chunk)}")
                        yield chunk
        except urllib.error.HTTPError as error:
            try:
                said = _message(json.loads(error.read(_MESSAGE_BYTES)))
            except (OSError, ValueError):
                said = error.reason
            raise UserError(f"the server answered {error.code}: {said}", f"{error.code}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise UserError(f"the connection to {self.url} broke off: {one_line(error)}") from error
        raise UserError(f"{self.url} broke off in mid-reply")

    def _open(self, path: str, body: dict[str, Any] | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, data, headers)
        opened: HTTPResponse = urllib.request.urlopen(request, timeout=self._timeout)
        return opened

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        fault = ""
        for attempt in range(_TRIES if body is not None else 1):
            wait = min(60.0, 2.0**attempt) * random.uniform(0.5, 1.0)
            try:
                with self._open(path, body) as response:
                    answer = json.loads(response.read())
                require(isinstance(answer, dict), "the server's answer is no object", "odd answer")
                self._given_up = 0
                return answer
            except urllib.error.HTTPError as error:
                fault = f"{error.code} {' '.join(error.read()[:300].decode(errors='replace').split())}"
                if error.code in _FATAL or (error.code not in _RETRIED and body is None):
                    raise UserError(f"{self.url}{path} answered {fault}") from error
                if error.code not in _RETRIED or error.headers.get("X-Should-Retry") == "false":
                    raise UserError(f"the server answered {fault}", f"refused by the server: {error.code}") from error
                after = error.headers.get("Retry-After", "")
                wait = min(600.0, float(after)) if after.isdecimal() else wait
            except (OSError, HTTPException, ValueError) as error:  # no connection, a timeout, half an answer, no JSON
                fault = one_line(error)
            if attempt + 1 < _TRIES and body is not None:
                self._sleep(wait)
        self._given_up += 1
        require(
            body is not None and self._given_up < _HOPELESS,
            f"{self.url} does not answer ({fault}); when it does, the same command goes on from here",
        )
        raise UserError(f"the server did not answer in {_TRIES} tries ({fault})", "no answer from the server")


class Server(Endpoint):
    """A server that answers in the target's stead."""

    def __init__(
        self,
        url: str,
        chat: Chat,
        template_kwargs: dict[str, Any],
        model: str | None = None,
        timeout: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(url, model, timeout, sleep)
        self._chat = chat
        self._template_kwargs = template_kwargs
        self._asks_ids = True
        self._lacks_end = False

    def ask(self, turn: Turn) -> Reply:
        """The reply to one turn. UserError with a reason when this one is refused, without one when all would be."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": turn.messages,
            "max_tokens": turn.max_new_tokens,
            "temperature": turn.temperature,
            "seed": turn.seed % 2**31,
        }
        if self._template_kwargs:
            body["chat_template_kwargs"] = self._template_kwargs
        try:
            answer = self._call("/chat/completions", body | ({"return_token_ids": True} if self._asks_ids else {}))
        except UserError as error:
            if not self._asks_ids or "return_token_ids" not in str(error):
                raise
            self._asks_ids = False
            answer = self._call("/chat/completions", body)
        return self._reply(answer, turn)

    def _reply(self, answer: dict[str, Any], turn: Turn) -> Reply:
        try:
            choice = answer["choices"][0]
            message = {
                k: v for k, v in choice["message"].items() if v and k in ("content", "reasoning_content", "tool_calls")
            }
            finish = {"stop": "stop", "tool_calls": "stop", "length": "length"}[choice["finish_reason"]]
        except (LookupError, TypeError, AttributeError) as error:
            raise UserError(f"the server's answer is not one: {json.dumps(answer):.200}", "odd answer") from error
        ids, prompt = choice.get("token_ids"), answer.get("prompt_token_ids")
        message = {"role": "assistant", "content": "", **message}
        if not _is_ids(ids):
            return Reply(message, None, finish)
        if isinstance(prompt, list) and prompt != turn.ids:
            raise UserError(
                f"the server writes a prompt as {_where_parted(prompt, turn.ids)}: its chat template or tokenizer is "
                "not that of --target, and a head would be trained on other tokens than it will see; give the folder "
                "that the server runs as --target"
            )
        if finish == "stop" and ids[-1] not in self._chat.end_of_turn_ids and not self._lacks_end:
            self._lacks_end = True
            warnings.warn(
                "the server's replies end without their end-of-turn token, which the head will not learn to expect",
                AquilineWarning,
                stacklevel=2,
            )
        return Reply(message, ids, finish)


def _message(answer: Any) -> str:
    """What an error says of itself."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:300]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _where_parted(theirs: list[int], ours: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    return f"{len(theirs)} tokens, we as {len(ours)}, and they differ from token {at} on"


def through_server(server: Server, dialogues: Iterable[Dialogue], in_flight: int) -> Iterator[Dialogue]:
    """Run dialogues, `in_flight` at a time; those that ended, in the order in which they do."""
    waiting = iter(dialogues)
    lock = threading.Lock()
    ended: queue.Queue[Dialogue | Exception | None] = queue.Queue()
    stopped = threading.Event()

    def work() -> None:
        try:
            while not stopped.is_set():
                with lock:
                    dialogue = next(waiting, None)
                if dialogue is None:
                    break
                turn = dialogue.next()
                while turn is not None:
                    turn = _step(server, dialogue, turn)
                ended.put(dialogue)
        except Exception as error:  # it would die with its thread; it is raised where the rows are written
            ended.put(error)
        finally:
            ended.put(None)

    for _ in range(in_flight):
        threading.Thread(target=work, daemon=True).start()  # daemons: an interrupt need not wait for the answers
    working = in_flight
    try:
        while working:
            item = ended.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                working -= 1
            else:
                yield item
    finally:
        stopped.set()


def _step(server: Server, dialogue: Dialogue, turn: Turn) -> Turn | None:
    try:
        return dialogue.next(server.ask(turn))
    except UserError as error:
        if not error.reason:
            raise
        dialogue.error = error
        return None
