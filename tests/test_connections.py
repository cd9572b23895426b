"""Connections that stand still, and too many of them."""

import http.client
import socket

import openai
import pytest

from aquiline.serve import server
from tests.serving import WAIT, Gate, in_thread, serving, taken, until
from tests.test_api import folders, load  # noqa: F401 (a fixture)
from tests.test_serve import HI, ask, no_cache, post  # noqa: F401 (a fixture)

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(running) -> socket.socket:
    host, port = running.address.split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT)


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes it."""
    with connection:
        try:
            return b"".join(iter(lambda: connection.recv(2**16), b""))
        except ConnectionResetError:
            return b""


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


@pytest.fixture(scope="module")
def impatient(folders, no_cache):  # noqa: F811
    with serving(load(folders, "none"), patience=2) as running:
        yield running


def test_who_sends_no_whole_request_loses_the_connection(impatient):
    begun = {b"": 0, b"GET": 0, HEAD: 0, get("/health")[:-2]: 0, get("/health") + b"GET / HT": 1}  # answers to each
    connections = [connect(impatient) for _ in begun]
    for connection, data in zip(connections, begun, strict=True):
        connection.sendall(data)
    assert [received(connection).count(b"HTTP/1.1 200 ") for connection in connections] == list(begun.values())
    until(lambda: not impatient.server.server_state.connections)


def test_bytes_that_drip_are_no_request(impatient):
    connection = connect(impatient)
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
    connection = connect(impatient)
    connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "timeout"' in answer


def test_a_reply_that_takes_longer_is_waited_for(impatient):
    """As is the next request on its connection: what counts is how long it stood still."""
    gate = Gate(impatient.service)
    call = in_thread(lambda: ask(impatient.client(), max_tokens=3))
    taken(impatient.service, 1)
    assert received(connect(impatient)) == b""  # one that came later has been closed meanwhile
    gate.open()
    assert call().usage.completion_tokens == 3


def test_an_answer_that_nobody_reads_is_given_up(folders, no_cache):  # noqa: F811
    with serving(load(folders, "none"), patience=1) as running:
        running.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those accepted there have it, too
        host, port = running.address.split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect((host, int(port)))
            connection.sendall(get("/") * 20)
            connections = running.server.server_state.connections
            until(lambda: any(c.transport.get_write_buffer_size() for c in connections))
            until(lambda: not connections)


def test_there_is_room_for_every_place_and_some_more_but_not_for_any_number(folders, no_cache, monkeypatch):  # noqa: F811
    monkeypatch.setattr(server, "_SPARE", 2)
    with serving(load(folders, "none"), max_batch=1, queue=2) as running:
        connections = running.server.server_state.connections
        until(lambda: not connections)
        kept = [connect(running) for _ in range(5)]
        until(lambda: len(connections) == 5)
        assert received(connect(running)) == b""
        assert len(connections) == 5
        kept.pop().close()
        until(lambda: len(connections) == 4)
        assert post(running, b"", "/health", method="GET")[0] == 200
        for connection in kept:
            connection.close()


def test_a_connection_is_kept_for_longer_than_clients_keep_theirs(impatient):
    """If both gave it up after as long, a request might be on its way to a server that closes."""
    assert impatient.server.config.timeout_keep_alive > 2 * openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry


def test_a_connection_serves_many_requests(impatient):
    connection = http.client.HTTPConnection(impatient.address, timeout=WAIT)
    for _ in range(3):
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
    connection.close()
