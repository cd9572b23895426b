"""How many connections there may be, and how long one may stand still: uvicorn itself bounds no more than the time from
an answer to the next byte.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from aquiline.serve.errors import Refused

_BUSY = Refused(429, "the server is busy: it has too many connections", code="too_many_connections", retry_after=1)
_HEADERS = {"Content-Type": "application/json", "Content-Length": str(len(_BUSY.data)), "Connection": "close"}
_HEAD = "".join(f"{name}: {text}\r\n" for name, text in (_HEADERS | _BUSY.headers).items())
_ANSWER = f"HTTP/1.1 429 Too Many Requests\r\n{_HEAD}\r\n".encode() + _BUSY.data


def limited(most: int, seconds: float, count: Callable[[int], None]) -> type[H11Protocol]:
    """What talks on a connection. Where `most` are open, a further one is told so, whatever it asks, and has `seconds`
    to read it; where as many again are being told, it is closed at once. `count` as in `Door`.
    """

    class Connection(H11Protocol):
        told: ClassVar[set[H11Protocol]] = set()  # of this server

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) <= most:
                return
            self.connections.discard(self)
            if len(self.told) >= most:
                transport.abort()
                return
            self.told.add(self)
            count(_BUSY.status)
            transport.write(_ANSWER)
            transport.write_eof()  # not closed yet: who is still sending would not see the answer
            self.loop.call_later(seconds, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self.told.discard(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self not in self.told:
                super().data_received(data)

    return Connection


class Idle:
    """Closes connections that stand still: within a request, or with an answer that is not read. Between requests it is
    uvicorn that does.
    """

    def __init__(self, connections: Collection[Any], seconds: float) -> None:
        """`connections`: those that are open, by uvicorn's account."""
        self._connections, self._seconds = connections, seconds
        self._time, self._at = 0.0, time.monotonic()
        self._seen: dict[Any, tuple[RequestResponseCycle | None, int, float]] = {}

    def close(self) -> None:
        """To be called again and again. A connection stands still as long as no request is answered on it, none has
        come since the last one, and the bytes that wait to be read are as many as they were.
        """
        then, self._at = self._at, time.monotonic()
        self._time += min(self._at - then, 1.0)  # while this process stands still itself, nobody keeps it waiting
        now, seen, self._seen = self._time, self._seen, {}
        for connection in list(self._connections):
            last, unread = connection.cycle, connection.transport.get_write_buffer_size()
            if last is not None and not unread and (not last.response_complete or _between_requests(connection)):
                continue
            was, waited, since = seen.get(connection, (None, 0, now))
            if was is not last or waited != unread:
                since = now
            if now - since > self._seconds:
                connection.transport.abort()
            else:
                self._seen[connection] = last, unread, since


def _between_requests(connection: H11Protocol) -> bool:
    """Nothing of a next one has come, and uvicorn's timer runs."""
    return connection.timeout_keep_alive_task is not None and not connection.conn.trailing_data[0]
