"""Connections that stand still, and too many of them."""

import http.client
import json
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import openai
import pytest

from aquiline.serve import server
from aquiline.serve.connections import Idle
from tests.serving import WAIT, Gate, in_thread, serving, taken, until
from tests.test_api import folders, load  # noqa: F401 (a fixture)
from tests.test_serve import ask, no_cache, post  # noqa: F401 (a fixture)

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes it."""
    parts = []
    with connection:
        try:
            while data := connection.recv(2**16):
                parts.append(data)
        except ConnectionResetError:
            pass
    return b"".join(parts)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


@pytest.fixture(scope="module")
def impatient(folders, no_cache):  # noqa: F811
    """For who is to lose the connection."""
    with serving(load(folders, "none"), patience=2) as running:
        yield running


@pytest.fixture
def patient(folders, no_cache):  # noqa: F811
    with serving(load(folders, "none")) as running:
        yield running


def test_who_sends_no_whole_request_loses_the_connection(impatient):
    begun = {b"": 0, b"GET": 0, HEAD: 0, get("/health")[:-2]: 0, get("/health") + b"GET / HT": 1}  # answers to each
    connections = [impatient.connect() for _ in begun]
    for connection, data in zip(connections, begun, strict=True):
        connection.sendall(data)
    assert [received(connection).count(b"HTTP/1.1 200 ") for connection in connections] == list(begun.values())
    until(lambda: not impatient.server.server_state.connections)


def test_bytes_that_drip_are_no_request(impatient):
    connection = impatient.connect()
    connection.sendall(HEAD)
    connection.settimeout(0.02)

    def closed() -> bool:
        try:
            connection.sendall(b"x")  # of a header without an end
            return connection.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    until(closed)
    connection.close()


def test_half_a_body_is_answered_and_the_connection_closed(impatient):
    connection = impatient.connect()
    connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "timeout"' in answer


def test_a_reply_that_takes_longer_is_waited_for(patient, monkeypatch):
    gate = Gate(patient.service)
    call = in_thread(lambda: ask(patient.client(), max_tokens=3))
    taken(patient.service, 1)
    monkeypatch.setattr(patient.server._idle, "_seconds", 0.5)
    assert received(patient.connect()) == b""  # one that came later has been closed meanwhile
    gate.open()
    assert call().usage.completion_tokens == 3


def test_between_requests_a_connection_may_stand_still_for_longer(monkeypatch):
    """Unless a part of the next one has come: then no timer of uvicorn's runs, or it ran before."""
    now = [0.0]
    monkeypatch.setattr("aquiline.serve.connections.time", SimpleNamespace(monotonic=lambda: now[0]))

    def connection(timer: object | None, come: bytes) -> Mock:
        made = Mock(
            cycle=Mock(response_complete=True), timeout_keep_alive_task=timer, conn=Mock(trailing_data=(come, 0))
        )
        made.transport.get_write_buffer_size.return_value = 0
        return made

    connections = [connection("a timer", b""), connection(None, b""), connection("a timer", b"GET / HT")]
    look = Idle(connections, 10)
    for _ in range(30):
        now[0] += 1
        look.close()
    assert [made.transport.abort.called for made in connections] == [False, True, True]


def test_an_answer_that_nobody_reads_is_given_up(impatient):
    served = impatient.server.server_state.total_requests
    connection = impatient.connect(small=True)
    connection.sendall(get("/") * 20)
    until(lambda: impatient.server.server_state.total_requests > served)
    until(lambda: not impatient.server.server_state.connections)
    assert received(connection).count(b"HTTP/1.1 200 ") < 20


def test_there_is_room_for_every_place_and_some_more_but_not_for_any_number(folders, no_cache, monkeypatch):  # noqa: F811
    monkeypatch.setattr(server, "_SPARE", 2)
    with serving(load(folders, "none"), max_batch=1, queue=2) as running:
        connections = running.server.server_state.connections
        until(lambda: not connections)
        kept = [running.connect() for _ in range(5)]
        until(lambda: len(connections) == 5)
        with pytest.raises(openai.RateLimitError) as busy:  # told so, not cut off
            ask(running.client())
        assert (busy.value.code, busy.value.response.headers["Retry-After"]) == ("too_many_connections", "1")
        told = running.server.config.http.told
        until(lambda: not told)
        more = [running.connect() for _ in range(5)]
        until(lambda: len(told) == 5)
        assert received(running.connect()) == b""  # there is an end to telling, too
        for connection in more:
            head, _, data = received(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ")
            assert json.loads(data)["error"]["type"] == "rate_limit_error"
        assert len(connections) == 5
        kept.pop().close()
        until(lambda: len(connections) == 4)
        assert post(running, b"", "/health", method="GET")[0] == 200
        for connection in kept:
            connection.close()


def test_a_connection_is_kept_for_longer_than_clients_keep_theirs(impatient):
    """If both gave it up after as long, a request might be on its way to a server that closes."""
    assert impatient.server.config.timeout_keep_alive > 90  # as proxies do at most, and OpenAI's clients after 5


def test_a_connection_serves_many_requests(patient):
    connection = http.client.HTTPConnection(patient.address, timeout=WAIT)
    for _ in range(3):
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
    connection.close()
