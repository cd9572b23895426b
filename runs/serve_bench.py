"""What serving costs: the server against its own engine, and how long first tokens take under load.

    python runs/serve_bench.py OUT.json FILE.jsonl... [--target default] [--server NAME=URL[=COMMAND]]...

Throughput: `--batch` clients each ask for `--each` replies, one after the other, and the same prompts run through an
engine of that batch size in this process: batch behind batch, as `aquiline bench` runs them, and all submitted at once,
so that the next begins as soon as one ends; in turn, round by round. First tokens: 1, 8 and 32 clients ask at once, of
`aquiline serve`, which is started here, and of every `--server`, any OpenAI-compatible one with the same model, in
turn; with a COMMAND it is started, too. No prompt comes twice before all have come once, so caches of prompts help
nobody. Times count only from a machine that did nothing else.
"""

import argparse
import http.client
import io
import itertools
import json
import os
import re
import selectors
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from versus_peers import adopting

from aquiline.api import Model, load
from aquiline.config import UserError
from aquiline.data.chat import Message
from aquiline.data.server import Endpoint
from aquiline.decode.engine import Engine
from aquiline.files.disk import write_json_atomic
from aquiline.measure.evaluate import machine, model_settings, versions
from aquiline.measure.quiet import pause_file, quiet
from aquiline.measure.tasks import read_prompts, task_name

CLIENTS = (1, 8, 32)
DEFINITIONS = {
    "tokens_per_second": "tokens of all replies / seconds from before the first request to the last token, by round",
    "ratio_to_bench": "the server's over those of the engine that runs batch behind batch, of the same round: median, "
    "min and max",
    "ratio_to_engine": "the same over those of the engine to which all are submitted at once",
    "first_token_seconds": "from sending a request to its first chunk with text, over all requests of all rounds",
}
_PAUSE = 0.5  # seconds before a turn, for the threads of the one before to fall asleep


@dataclass(frozen=True)
class Asked:
    """What a client saw of one reply."""

    first: float  # seconds to its first text
    tokens: int


class Client:
    """Asks for streamed replies, one after the other, on one connection, as HTTP clients do. It takes bytes and the
    time of the first text, and reads no more before the end: it shares the cores with what it measures.
    """

    def __init__(self, server: Endpoint, tokens: int) -> None:
        self._server, self._tokens, self._url = server, tokens, urlsplit(server.url)
        if self._url.scheme != "http":
            raise SystemExit(f"{server.url} is no http address; what encryption costs is not measured here")
        self.socket = socket.create_connection((self._url.hostname, self._url.port or 80), timeout=600)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, number: int, messages: Sequence[Message]) -> None:
        body = json.dumps({
            "model": self._server.model, "messages": messages, "max_tokens": self._tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }).encode()  # fmt: skip
        key = os.environ.get("OPENAI_API_KEY")
        lines = [f"POST {self._url.path}/chat/completions HTTP/1.1", f"Host: {self._url.netloc}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"Authorization: Bearer {key}"] if key else []
        self.number, self._raw, self._first = number, b"", 0.0
        self._began = time.perf_counter()
        with suppress(OSError):  # of a connection that is closed nothing comes, either
            self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def listen(self) -> Asked | None:
        """What has come; the reply, at its end."""
        came = b""
        with suppress(OSError):
            came = self.socket.recv(2**16)
        self._raw += came
        if not self._raw:
            raise SystemExit(f"{self._server.url} closes its connections between requests; they are to stay open")
        if not self._first and _TEXT.search(self._raw):
            self._first = time.perf_counter() - self._began
        head, _, text = self._raw.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
        if came and (len(text) < int(length[1]) if length else not text.endswith(b"0\r\n\r\n")):  # of a chunked one
            return None
        answer = http.client.HTTPResponse(_Socket(self._raw))  # type: ignore[arg-type]
        answer.begin()
        said = answer.read().decode()
        usage = re.findall(r'"completion_tokens": ?(\d+)', said)
        if answer.status != 200 or "[DONE]" not in said or not usage:
            raise SystemExit(f"{self._server.url} answered {answer.status}: {said[:500]}")
        return Asked(self._first or time.perf_counter() - self._began, int(usage[-1]))


_TEXT = re.compile(rb'"content": ?"[^"]')  # of a delta, not empty


class _Socket:
    """Bytes that have come, for http.client to read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def ask_all(
    server: Endpoint, prompts: Sequence[Sequence[Message]], tokens: int, clients: int
) -> tuple[list[Asked], float]:
    """By so many clients, each of which asks again when it has its reply; and the seconds until the last one has."""
    waiting, found = deque(enumerate(prompts)), dict[int, Asked]()
    with selectors.DefaultSelector() as selector:
        idle = [Client(server, tokens) for _ in range(min(clients, len(prompts)))]
        began = time.perf_counter()
        for client in idle:
            selector.register(client.socket, selectors.EVENT_READ, client)
            client.ask(*waiting.popleft())
        while len(found) < len(prompts):
            ready = selector.select(600)
            if not ready:
                raise SystemExit(f"{server.url} has said nothing for ten minutes")
            for key, _ in ready:
                client = key.data
                if (asked := client.listen()) is not None:
                    found[client.number] = asked
                    if waiting:
                        client.ask(*waiting.popleft())
                    else:
                        selector.unregister(client.socket)
        seconds = time.perf_counter() - began
        for client in idle:
            client.socket.close()
    return [found[number] for number in range(len(prompts))], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--dtype")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--each", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL[=COMMAND]")
    given = parser.parse_args()
    asked = {task_name(path): read_prompts(path) for path in given.files}
    prompts = itertools.cycle([p.messages for group in itertools.zip_longest(*asked.values()) for p in group if p])
    model = load(given.target, given.draft, dtype=given.dtype)
    with quiet(pause_file()) as found, adopting(), ExitStack() as running:
        own = running.enter_context(serving(given))
        servers = {"aquiline": own}
        for name, url, *command in (text.split("=", 2) for text in given.server):
            servers[name] = running.enter_context(another(url, command))
        throughput = compare(model, own, prompts, given)
        first = first_tokens(servers, prompts, given)
    found.require()
    record = {
        "throughput": throughput,
        "first_token_seconds": first,
        "settings": model_settings(model, asked)
        | {"batch": given.batch, "each": given.each, "max_new_tokens": given.max_new_tokens, "rounds": given.rounds},
        "machine": machine(model.target.device) | found.record(),
        "versions": versions(),
        "definitions": DEFINITIONS,
    }
    write_json_atomic(given.out, record)
    print(json.dumps({key: record[key] for key in ("throughput", "first_token_seconds")}, indent=2))


@contextmanager
def serving(given: argparse.Namespace) -> Iterator[Endpoint]:
    """`aquiline serve`, in a process of its own; it begins to answer when it is warm."""
    command = [sys.executable, "-m", "aquiline", "serve", "--target", given.target, "--draft", given.draft,
               "--port", "0", "--max-batch", str(given.batch)]  # fmt: skip
    command += ["--dtype", given.dtype] if given.dtype else []
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.match(r"serving at (http://\S+)", line):
                break
        else:
            raise SystemExit(f"the server did not start: {' '.join(said)}")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or it would wait with a full pipe
        server = Endpoint(wait_for(found[1]))
        ask_all(server, [[{"role": "user", "content": "Hello."}]], 4, 1)  # which waits until it is warm
        yield server
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def another(url: str, command: list[str]) -> Iterator[Endpoint]:
    """A server of others, started by its command if there is one."""
    process = subprocess.Popen(shlex.split(command[0]), start_new_session=True) if command else None
    try:
        server = Endpoint(wait_for(url, process))
        ask_all(server, [[{"role": "user", "content": "Hello."}]], 4, 1)
        yield server
    finally:
        if process is not None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with suppress(ProcessLookupError):  # what it started and has not ended itself
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(url: str, process: "subprocess.Popen[bytes] | None" = None) -> str:
    """Until it listens."""
    for _ in range(6000):
        try:
            http.client.HTTPConnection(urlsplit(url).netloc, timeout=5).connect()
            return url
        except OSError:
            time.sleep(0.1)
        if process is not None and process.poll() is not None:
            raise SystemExit(f"{process.args!r} has ended with {process.returncode}")
    raise SystemExit(f"{url} does not listen")


def compare(model: Model, own: Endpoint, prompts: Iterator[list[Message]], given: argparse.Namespace) -> dict[str, Any]:
    """In turn; one round first that is not counted."""
    engine = Engine(model.target, model.draft, given.batch)

    def served(asked: list[list[Message]]) -> int:
        return sum(reply.tokens for reply in ask_all(own, asked, given.max_new_tokens, given.batch)[0])

    def run(asked: list[list[Message]]) -> int:
        requests = [model.request(messages, max_new_tokens=given.max_new_tokens) for messages in asked]
        return sum(len(request.output_ids) for request in engine.run(requests))

    def run_in_batches(asked: list[list[Message]]) -> int:
        return sum(run(asked[at : at + given.batch]) for at in range(0, len(asked), given.batch))

    ways = {"server": served, "bench": run_in_batches, "engine": run}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds + 1):
        taken = list(itertools.islice(prompts, given.batch * given.each))
        first = number % len(ways)
        for name in [*ways][first:] + [*ways][:first]:
            time.sleep(_PAUSE)
            began = time.perf_counter()
            tokens = ways[name](taken)
            if number:
                rates[name].append(tokens / (time.perf_counter() - began))
    record: dict[str, Any] = {name: {"tokens_per_second": of_way} for name, of_way in rates.items()}
    for name in ("bench", "engine"):
        ratios = [a / b for a, b in zip(rates["server"], rates[name], strict=True)]
        record[f"ratio_to_{name}"] = {
            "median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)
        }  # fmt: skip
    return record


def first_tokens(
    servers: dict[str, Endpoint], prompts: Iterator[list[Message]], given: argparse.Namespace
) -> dict[str, Any]:
    """Of every server, at every number of clients, in turn."""
    found: dict[str, dict[int, list[float]]] = {name: {clients: [] for clients in CLIENTS} for name in servers}
    for clients in CLIENTS:
        for number in range(given.rounds):
            taken = list(itertools.islice(prompts, clients))
            names = list(servers)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                time.sleep(_PAUSE)
                asked, _ = ask_all(servers[name], taken, given.max_new_tokens, clients)
                found[name][clients] += [one.first for one in asked]
    return {
        name: {
            str(clients): {"median": statistics.median(times), "max": max(times), "requests": len(times)}
            for clients, times in of_server.items()
        }
        for name, of_server in found.items()
    }


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
