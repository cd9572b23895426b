"""What serving costs: the server against its own engine, and how long first tokens take under load.

    python runs/serve_bench.py OUT.json FILE.jsonl... [--target default] [--server NAME=URL[=COMMAND]]...

Throughput: `--batch` clients each ask for `--each` replies, one after the other, and the same prompts run through an
engine of that batch size in this process, in turn, round by round. First tokens: 1, 8 and 32 clients ask at once, of
`aquiline serve`, which is started here, and of every `--server`, any OpenAI-compatible one with the same model, in
turn; with a COMMAND it is started, too. No prompt comes twice before all have come once, so caches of prompts help
nobody. Times count only from a machine that did nothing else.
"""

import argparse
import http.client
import itertools
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    "tokens_per_second": "tokens of all replies / seconds from the first request to the last token, of each round",
    "ratio": "the server's over the engine's, of the same round: median, min and max",
    "first_token_seconds": "from sending a request to its first chunk with text, over all requests of all rounds",
}
_PAUSE = 0.5  # seconds before a turn, for the threads of the one before to fall asleep


@dataclass(frozen=True)
class Asked:
    """What a client saw of one reply."""

    first: float  # seconds to its first text
    tokens: int


def ask(server: Endpoint, messages: Sequence[Message], tokens: int) -> Asked:
    """One streamed reply."""
    body = {"model": server.model, "messages": messages, "max_tokens": tokens, "temperature": 0,
            "stream_options": {"include_usage": True}}  # fmt: skip
    began, first, count = time.perf_counter(), None, 0
    for chunk in server.stream("/chat/completions", body):
        if first is None and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
            first = time.perf_counter() - began
        count = (chunk.get("usage") or {}).get("completion_tokens", count)
    return Asked(time.perf_counter() - began if first is None else first, count)


def ask_all(
    server: Endpoint, prompts: Sequence[Sequence[Message]], tokens: int, clients: int
) -> tuple[list[Asked], float]:
    """By so many clients, each of which asks again when it has its reply; and the seconds until the last one has."""
    with ThreadPoolExecutor(clients) as pool:
        ready = threading.Barrier(clients + 1)
        for _ in range(clients):
            pool.submit(ready.wait)
        ready.wait()  # every client's thread is there
        began = time.perf_counter()
        found = list(pool.map(lambda messages: ask(server, messages, tokens), prompts))
    return found, time.perf_counter() - began


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
        ask(server, [{"role": "user", "content": "Hello."}], 4)  # which waits until it is warm
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
        ask(server, [{"role": "user", "content": "Hello."}], 4)
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
    """The server and an engine in this process in turn; one round first that is not counted."""
    engine = Engine(model.target, model.draft, given.batch)
    served: list[float] = []
    run: list[float] = []
    for number in range(given.rounds + 1):
        taken = list(itertools.islice(prompts, given.batch * given.each))
        turns = ((served, by_server), (run, by_engine))
        for rates, way in turns if number % 2 else turns[::-1]:
            time.sleep(_PAUSE)
            rate = way(model, engine, own, taken, given)
            if number:
                rates.append(rate)
    ratios = [a / b for a, b in zip(served, run, strict=True)]
    return {
        "server": {"tokens_per_second": served},
        "engine": {"tokens_per_second": run},
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def by_server(
    model: Model, engine: Engine, own: Endpoint, prompts: list[list[Message]], given: argparse.Namespace
) -> float:
    found, seconds = ask_all(own, prompts, given.max_new_tokens, given.batch)
    return sum(asked.tokens for asked in found) / seconds


def by_engine(
    model: Model, engine: Engine, own: Endpoint, prompts: list[list[Message]], given: argparse.Namespace
) -> float:
    began = time.perf_counter()
    requests = engine.run([model.request(messages, max_new_tokens=given.max_new_tokens) for messages in prompts])
    return sum(len(request.output_ids) for request in requests) / (time.perf_counter() - began)


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
