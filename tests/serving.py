"""A server in a thread of the tests, and ways to hold its engine still."""

import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import openai

from aquiline.api import Model
from aquiline.config import ServeConfig
from aquiline.data.chat import StopMatcher
from aquiline.decode.engine import Request
from aquiline.serve import server
from aquiline.serve.answers import Answer
from aquiline.serve.asked import Asked
from aquiline.serve.loop import Job, Step
from aquiline.serve.reply import Reply
from aquiline.serve.schema import ChatBody

WAIT = 300.0  # seconds, for what takes far less, on a machine that does much else


@dataclass
class Served:
    """A server that runs, where it is, and the official client for it."""

    service: server.Service
    server: server.Server
    listening: socket.socket
    key: str | None = None

    @property
    def address(self) -> str:
        return "{}:{}".format(*self.listening.getsockname()[:2])

    def connect(self, *, small: bool = False) -> socket.socket:
        """A bare connection. `small`: it, and whatever is accepted from now on, has hardly a buffer."""
        connection = socket.socket()
        if small:
            self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those accepted there have it, too
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.settimeout(WAIT)
        connection.connect(self.listening.getsockname())
        return connection

    def client(self, **settings) -> openai.OpenAI:
        return openai.OpenAI(**self._where(settings))

    def async_client(self, **settings) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._where(settings))

    def _where(self, settings):
        where = {"base_url": f"http://{self.address}/v1", "api_key": self.key or "none", "max_retries": 0}
        return where | {"timeout": WAIT} | settings


@contextlib.contextmanager
def serving(model: Model, key: str | None = None, *, warm: bool = True, **settings) -> Iterator[Served]:
    """Given once it is ready, or where not `warm` as soon as it listens."""
    config = ServeConfig(**{"port": 0, "max_batch": 4} | settings)
    service = server.Service(model, config)
    listening = server.bind(config)
    running = server.make_server(service, key)
    thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
    thread.start()
    try:
        until(lambda: running.started and (service.ready or not warm))
        yield Served(service, running, listening, key)
    finally:
        running.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


def until(condition, seconds: float = WAIT) -> None:
    """Wait for something that must come about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)


def in_thread(work):
    """Start it; returns a function that waits for what it returns or raises."""
    found: list = []

    def run():
        try:
            found.append((work(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(WAIT)
        ((value, error),) = found
        if error is not None:
            raise error
        return value

    return result


def taken(service, jobs: int) -> None:
    """Wait until the loop has so many."""
    loop = service.loop

    def now() -> int:
        with loop._wake:  # from one to the other they go under it
            return len(loop._jobs) + sum(map(len, loop._coming))

    until(lambda: now() == jobs)


def idle(service) -> bool:
    """Nothing of any call is left."""
    loop = service.loop
    kept = loop._jobs or loop._calls or loop._coming or loop.engine.busy
    return not kept and service.places.taken == 0


def of_calls() -> int:
    """Things of any call that there are."""
    gc.collect()
    kinds = {Request, Job, Step, Asked, Answer, Reply, ChatBody, StopMatcher}
    return sum(type(thing) in kinds for thing in gc.get_objects())


class Leaver:
    """A client that sends a call and, when it is told to, hangs up."""

    def __init__(self, served: Served, body: dict) -> None:
        self._connection = served.connect()
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def leave(self) -> None:
        self._connection.close()


class Gate:
    """Lets the engine of a server make so many steps and no more."""

    def __init__(self, service: server.Service) -> None:
        self._steps, self._step = threading.Semaphore(0), service.loop.engine.step
        self.made = 0
        self.holds = False  # is the engine's thread at it
        service.loop.engine.step = self._wait
        self._service = service

    def _wait(self):
        self.holds = True
        self._steps.acquire()
        self.holds = False
        try:
            return self._step()
        finally:
            self.made += 1

    def let(self, steps: int) -> None:
        made = self.made
        self._steps.release(steps)
        until(lambda: self.made >= made + steps)

    def open(self) -> None:
        self._service.loop.engine.step = self._step
        self._steps.release(1)
