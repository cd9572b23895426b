"""How many connections there may be, and how long one may stand still: uvicorn itself bounds no more than the time from
an answer to the next byte.
"""

import asyncio
import time
from collections.abc import Collection
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


def limited(most: int) -> type[H11Protocol]:
    """What talks on a connection; where `most` are open, a further one is closed at once."""

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.abort()

    return Connection


class Idle:
    """Closes connections that stand still: without a whole request, or with an answer that is not read."""

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
            if last is not None and not last.response_complete and not unread:
                continue
            was, waited, since = seen.get(connection, (None, 0, now))
            if was is not last or waited != unread:
                since = now
            if now - since > self._seconds:
                connection.transport.abort()
            else:
                self._seen[connection] = last, unread, since
