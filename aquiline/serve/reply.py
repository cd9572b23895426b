"""One call, from its body to its last byte: admitted, queued, told step by step, given up when nobody listens."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aquiline.serve.answers import Answer
from aquiline.serve.asked import Asked
from aquiline.serve.door import send_json
from aquiline.serve.errors import Refused
from aquiline.serve.loop import EngineLoop, Job, Pace, Step

log = logging.getLogger("aquiline.serve")


class Places:
    """How many calls may be under way, running or waiting. Used in the event loop's thread only.

    A call has one place, however many replies it asks for: calls take turns in the engine, so that one of many keeps
    nobody waiting for longer than one of one does, and it must not shut the others out of the queue either.
    """

    def __init__(self, most: int) -> None:
        self.most, self.taken, self.closed = most, 0, False
        self._seconds = 1.0  # that a call took lately, from its place to its last byte

    @contextmanager
    def take(self) -> Iterator[None]:
        """Left by an exception, it was no call to learn from: one that failed, or that nobody listens to any more."""
        if self.closed:
            raise Refused(503, "the server is shutting down", code="shutting_down")
        if self.taken >= self.most:
            after = min(60, 1 + int(self._seconds / self.most))  # of so many calls one ends that often (Little's law)
            raise Refused(429, "the server is busy: its queue is full", code="queue_full", retry_after=after)
        self.taken += 1
        began = time.perf_counter()
        try:
            yield
        finally:
            self.taken -= 1
        self._seconds += 0.1 * (time.perf_counter() - began - self._seconds)


class Reply(Response):
    """Answers one call as a stream or as a whole, as its body asks."""

    def __init__(
        self,
        loop: EngineLoop,
        places: Places,
        stream: bool,
        each: bool,
        timeout: float,
        patience: float,
        ask: Callable[[], Asked],
        answer: Callable[[Asked], Answer],
    ) -> None:
        """`ask`: reads the prompt, in a thread. Both may raise Refused. `each`: no two steps are told together."""
        super().__init__()
        self._loop, self._places, self._stream = loop, places, stream
        self._pace = Pace.EACH if each else Pace.SOON if stream else Pace.LAST
        self._timeout, self._patience, self._ask, self._answer = timeout, patience, ask, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(_Over), self._places.take():
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
                async with _within(self._timeout + self._patience):
                    await (self._as_stream if self._stream else self._as_whole)(answer, _each(steps, len(jobs)), send)
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

        return [Job(request, teller(i), deadline, self._pace) for i, request in enumerate(asked.requests)]

    async def _as_whole(self, answer: Answer, steps: AsyncIterator[tuple[int, Step]], send: Send) -> None:
        async for index, step in steps:
            if step.fault is not None:
                raise step.fault
            answer.take(index, step)
        data = await asyncio.to_thread(lambda: written(answer.whole()).encode())  # of many logprobs it takes a while
        async with _within(self._patience):
            await send_json(send, 200, data)

    async def _as_stream(self, answer: Answer, steps: AsyncIterator[tuple[int, Step]], send: Send) -> None:
        """Nothing is sent before the first token: until then an error has a status of its own."""
        begun = False

        async def put(value: dict[str, Any] | str, *, more: bool = True) -> None:
            data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
            async with _within(self._patience):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        async for index, step in steps:
            if step.fault is not None and not begun:
                raise step.fault
            if not begun:
                async with _within(self._patience):
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
                begun = True
            if step.fault is not None:
                await put(step.fault.body, more=False)
                raise _Over
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


class _Over(Exception):
    """Nothing more is to be sent: the client is gone, does not read, or has been told of a failure."""


@asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise _Over from error


_EACH = 5  # levels of an answer: its choices, one of them, their logprobs, the tokens of these, one token


def written(value: Any, levels: int = _EACH) -> str:
    """As json.dumps writes it, which lets no other thread run meanwhile, however large the value; this does."""
    if not levels or not isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {written(v, levels - 1)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(written(v, levels - 1) for v in value) + "]"


async def _each(steps: asyncio.Queue[tuple[int, Step] | None], count: int) -> AsyncIterator[tuple[int, Step]]:
    """Steps until each of `count` replies has had its last; ends early with one that failed."""
    while count:
        item = await steps.get()
        if item is None:
            raise _Over
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
