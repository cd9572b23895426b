"""One call, from its body to its last byte: admitted, queued, told step by step, given up when nobody listens."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aquiline.serve.answers import Answer
from aquiline.serve.asked import Asked
from aquiline.serve.door import send_json
from aquiline.serve.errors import Refused
from aquiline.serve.loop import EngineLoop, Job, Step

_SEND_SECONDS = 60.0  # for who does not read what was asked for: of one part, and of all after the deadline

log = logging.getLogger("aquiline.serve")


class Places:
    """How many replies may be under way, running or waiting. Used in the event loop's thread only."""

    def __init__(self, most: int, at_a_time: int) -> None:
        self.most, self.taken, self.closed = most, 0, False
        self._at_a_time = at_a_time
        self._seconds = 1.0  # that a call took lately

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        if count > self.most:
            raise Refused(400, f"{count} replies at a time are more than the {self.most} that this server takes at all")
        if self.closed:
            raise Refused(503, "the server is shutting down", code="shutting_down")
        if self.taken + count > self.most:
            after = min(60, 1 + int(self._seconds / self._at_a_time))
            raise Refused(429, "the server is busy: its queue is full", code="queue_full", retry_after=after)
        self.taken += count
        began = time.perf_counter()
        try:
            yield
        finally:
            self.taken -= count
            self._seconds += 0.1 * (time.perf_counter() - began - self._seconds)


class Reply(Response):
    """Answers one call as a stream or as a whole, as its body asks."""

    def __init__(
        self,
        loop: EngineLoop,
        places: Places,
        count: int,
        stream: bool,
        timeout: float,
        ask: Callable[[], Asked],
        answer: Callable[[Asked], Answer],
    ) -> None:
        """`ask`: reads the prompt, in a thread. Both may raise Refused."""
        super().__init__()
        self._loop, self._places, self._count, self._stream = loop, places, count, stream
        self._timeout, self._ask, self._answer = timeout, ask, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._places.take(self._count):
            asked = await run_in_threadpool(self._ask)
            answer = self._answer(asked)
            steps: asyncio.Queue[tuple[int, Step] | None] = asyncio.Queue()  # None: the client is gone
            jobs = self._jobs(asked, steps)
            self._loop.submit(jobs)

            def leave(_: Any = None) -> None:
                self._loop.cancel(jobs)
                steps.put_nowait(None)

            gone = asyncio.create_task(_disconnected(receive))
            gone.add_done_callback(leave)
            try:
                async with asyncio.timeout(self._timeout + _SEND_SECONDS):
                    await (self._as_stream if self._stream else self._as_whole)(answer, _each(steps, len(jobs)), send)
            except (_Gone, TimeoutError):  # or does not read, or too slowly
                pass
            finally:
                gone.cancel()
                self._loop.cancel(jobs)
                _note(answer.id, asked)

    def _jobs(self, asked: Asked, steps: asyncio.Queue[tuple[int, Step] | None]) -> list[Job]:
        event_loop, deadline = asyncio.get_running_loop(), time.perf_counter() + self._timeout

        def teller(index: int) -> Callable[[Step], None]:
            def tell(step: Step) -> None:
                event_loop.call_soon_threadsafe(steps.put_nowait, (index, step))

            return tell

        return [Job(request, teller(i), deadline) for i, request in enumerate(asked.requests)]

    async def _as_whole(self, answer: Answer, steps: AsyncIterator[tuple[int, Step]], send: Send) -> None:
        async for index, step in steps:
            if step.fault is not None:
                raise step.fault
            answer.take(index, step)
        whole = await asyncio.to_thread(answer.whole)  # logprobs of many long replies take a while to write down
        async with asyncio.timeout(_SEND_SECONDS):
            await send_json(send, 200, whole)

    async def _as_stream(self, answer: Answer, steps: AsyncIterator[tuple[int, Step]], send: Send) -> None:
        """Nothing is sent before the first token: until then an error has a status of its own."""
        begun = False

        async def put(value: dict[str, Any] | str, *, more: bool = True) -> None:
            data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
            async with asyncio.timeout(_SEND_SECONDS):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        async for index, step in steps:
            if step.fault is not None and not begun:
                raise step.fault
            if not begun:
                async with asyncio.timeout(_SEND_SECONDS):
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
                begun = True
            if step.fault is not None:
                await put(step.fault.body, more=False)
                return
            if (chunk := answer.chunk(index, step)) is not None:
                await put(chunk)
        if (usage := answer.last_chunk()) is not None:
            await put(usage)
        await put("[DONE]", more=False)


_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy in between is not to wait for the end
]


class _Gone(Exception):
    """The client is."""


async def _each(steps: asyncio.Queue[tuple[int, Step] | None], count: int) -> AsyncIterator[tuple[int, Step]]:
    """Steps until each of `count` replies has had its last; ends early with one that failed."""
    while count:
        item = await steps.get()
        if item is None:
            raise _Gone
        count -= item[1].last
        yield item


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _note(name: str, asked: Asked) -> None:
    """A line for the log: figures, no text."""
    requests = asked.requests
    ends = ",".join(sorted({request.finish_reason or "left" for request in requests}))
    tokens = sum(len(request.output_ids) for request in requests)
    log.info("%s: %d prompt tokens, %d tokens, %s", name, asked.prompt_tokens, tokens, ends)
