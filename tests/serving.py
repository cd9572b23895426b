"""A server in a thread of the tests, and ways to hold its engine still."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import openai

from aquiline.api import Model
from aquiline.config import ServeConfig
from aquiline.serve import server

WAIT = 60.0  # seconds, for what takes far less


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

    def client(self, **settings) -> openai.OpenAI:
        return openai.OpenAI(**self._where(settings))

    def async_client(self, **settings) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._where(settings))

    def _where(self, settings):
        where = {"base_url": f"http://{self.address}/v1", "api_key": self.key or "none", "max_retries": 0}
        return where | {"timeout": WAIT} | settings


@contextlib.contextmanager
def serving(model: Model, key: str | None = None, **settings) -> Iterator[Served]:
    config = ServeConfig(**{"port": 0, "max_batch": 4} | settings)
    service = server.Service(model, config)
    listening = server.bind(config)
    running = server.make_server(service, key)
    thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
    thread.start()
    try:
        until(lambda: service.ready and running.started)
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
        self.made += 1
        return self._step()

    def let(self, steps: int) -> None:
        made = self.made
        self._steps.release(steps)
        until(lambda: self.made >= made + steps)

    def open(self) -> None:
        self._service.loop.engine.step = self._step
        self._steps.release(1)
