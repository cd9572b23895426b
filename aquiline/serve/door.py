"""Who and how much gets in: everything that is looked at before a body is read as JSON."""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aquiline.serve.errors import Refused

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_OPEN = ("/", "/health", "/ready", "/openapi.json")  # without a key
HEADER_BYTES = 2**15
_ENDURED = 8  # times the largest body


class Door:
    """ASGI, around the app.

    `names`: the hosts by which a browser may call this server; None: any. A web page elsewhere that has its own name
    point to this machine is thereby kept out, as is one that calls from its own address (Origin).
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        names: Sequence[str] | None,
        most_bytes: int,
        patience: float,
        count: Callable[[int], None] = lambda status: None,
    ) -> None:
        """`most_bytes` of a body, and the seconds it may take; `count` is told the status of what is turned away."""
        self._app, self._names, self._most, self._patience, self._count = app, names, most_bytes, patience, count
        self._key = None if key is None else _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused: Refused | None = None
        try:
            self._check(scope)
        except Refused as error:
            refused = error
        try:
            # Read to its end even if it is not wanted: who is still sending would not see an answer.
            most = self._most if refused is None else 0  # bytes that are kept of it
            body = await self._read(receive, most) if scope["method"] == "POST" else b""
        except Refused as error:
            refused = refused or error
        if refused is not None:
            self._count(refused.status)
            await send_json(send, refused.status, refused.data, {**refused.headers, "Connection": "close"})
            return
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again if scope["method"] == "POST" else receive, send)

    def _check(self, scope: Scope) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
            raise Refused(431, f"the headers are larger than {HEADER_BYTES} bytes", code="headers_too_large")
        headers = dict(reversed(scope["headers"]))  # the first of each
        host = headers.get(b"host", b"").decode("latin-1")
        if self._names is not None and _without_port(host) not in self._names:
            raise Refused(403, "this server is not called by that name; use 127.0.0.1 or localhost", code="host")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host.lower():
            raise Refused(403, "pages of other origins may not call this server", code="origin")
        if self._key is not None and scope["path"] not in _OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            right = hmac.compare_digest(_digest(given.strip()), self._key)
            if scheme.lower() != b"bearer" or not right:
                raise Refused(401, "the API key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key")

    async def _read(self, receive: Receive, most: int) -> bytes:
        """The whole body, once and for all: no handler sees a part of one. Of one that is too large nothing is kept."""
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self._patience):
                while more and size <= _ENDURED * self._most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "the connection ended inside the body")
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    parts.append(part)
                    if size > most:
                        parts.clear()
        except TimeoutError as error:
            raise Refused(408, f"the body took longer than {self._patience:g} seconds", code="timeout") from error
        if size > most:
            raise Refused(413, f"the body is larger than {self._most} bytes", code="body_too_large")
        return b"".join(parts)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # of one length, so that comparing tells nothing of it


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


async def send_json(send: Send, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
    named = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
    lines = [(name.encode(), text.encode()) for name, text in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": data})
