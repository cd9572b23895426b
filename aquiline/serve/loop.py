"""The engine's thread: everything that computes runs here, and nothing else does.

Handlers hand calls in and are told of what comes. No cycle waits for them, but for the interpreter and the cores, which
they share: so beside others a reply is told of several steps together.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from aquiline.config import DEFAULT_TREE, Limits
from aquiline.data.chat import StopMatcher
from aquiline.data.grammar import JsonGrammar
from aquiline.decode.engine import Engine, Request
from aquiline.decode.sampling import TokenLogprobs
from aquiline.decode.tree import Tree
from aquiline.serve.errors import Refused
from aquiline.serve.metrics import Metrics

_TRIED = 4  # tokens of a prompt, and of a reply, by which an engine is tried
_FAULTS = 5  # without a token between them, after which no other engine is tried
_TOLD = 200  # streams a second that are told of what has come: all at once, so that handlers wake seldom

log = logging.getLogger("aquiline.serve")


@dataclass(frozen=True)
class Step:
    """What one cycle, or some, add to a reply, or why there is no more."""

    text: str = ""  # becomes visible now; may lag behind the tokens
    ids: Sequence[int] = ()
    origins: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()  # as many as ids, where they were asked for
    tree: tuple[Tree, list[int]] | None = None  # that was verified last, and its accepted nodes
    finish_reason: str | None = None
    fault: Refused | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.fault is not None


class Pace(Enum):
    """When a reply is told of what has come."""

    EACH = "of each step"
    SOON = "of the first and the last, of others when all are told"
    LAST = "of all at the end"


@dataclass(eq=False)
class Job:
    """A request of the engine, and who is told of its steps; `tell` is called in the engine's thread, must not wait."""

    request: Request
    tell: Callable[[Step], None]
    deadline: float  # of time.perf_counter()
    pace: Pace = Pace.EACH
    came_at: float = field(default_factory=time.perf_counter, init=False)
    seen_ids: int = field(default=0, init=False)
    seen_at: float = field(default=0.0, init=False)
    told_ids: int = field(default=0, init=False)
    told_text: int = field(default=0, init=False)


class EngineLoop:
    """Runs one engine in a thread of its own. An engine that has failed is replaced, if the next one works.

    Calls are taken in the order in which they come; those of many requests take turns with the others, so that nobody
    waits for all of them.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        slots: int,
        metrics: Metrics,
        watch: Callable[[Request], None] = lambda request: None,
        died: Callable[[], None] = lambda: None,
    ) -> None:
        """`watch` looks at every request that ended; `died` is called when the loop gives up. Both in its thread."""
        self.engine = make_engine()
        self.warm = self.dead = False
        self._make_engine, self._slots, self._metrics = make_engine, slots, metrics
        self._watch, self._died = watch, died
        self._jobs: dict[Request, Job] = {}  # all that have not ended
        self._calls: deque[deque[Job]] = deque()  # whose jobs the engine does not have yet; the next one first
        self._coming: list[Sequence[Job]] = []
        self._leaving: list[Job] = []
        self._untold: list[Job] = []  # of what the last steps added
        self._told_at = 0.0  # all of them
        self._stopping = False
        self._faults = 0  # since the last token
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def under_way(self) -> int:
        """Requests that have not ended and have been taken in."""
        return len(self._jobs)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """End after the cycle that runs; who still waits is told that the server is gone."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def submit(self, call: Sequence[Job]) -> None:
        """Queue the requests of a call, which `Engine.check` has passed."""
        with self._wake:
            if self._stopping:
                raise Refused(503, "the server is shutting down", code="shutting_down")
            self._coming.append(call)
            self._wake.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Free the slots of these jobs before the next cycle; those that have ended already are left alone."""
        with self._wake:
            self._leaving += jobs
            self._wake.notify()

    def _run(self) -> None:
        try:
            for size in _sizes(self._slots):
                self._try(self.engine, size)
            self.warm = True
            while self._take_in():
                self._feed()
                self._turn()
        except BaseException:  # a panic of a library in Rust is no Exception
            log.exception("the engine's thread has failed")
            self.dead = True
        with self._wake:
            self._stopping = True
            self._take_calls()
        gone = "the engine has failed" if self.dead else "the server has shut down"
        try:
            self._fail(list(self._jobs.values()), Refused(503, gone, code="shutting_down"))
        finally:
            if self.dead:
                self._died()

    def _try(self, engine: Engine, size: int) -> None:
        """Run a batch to its end. What a first use costs, above all to see which trees pay, then falls on nobody."""
        tree = None if engine.drafter is None else DEFAULT_TREE
        limits = Limits(min(_TRIED, max(1, engine.context - 1)))
        prompt = [0] * min(_TRIED, engine.context - 1)
        engine.run([Request(prompt, limits=limits, tree=tree) for _ in range(size)])
        engine.forget()

    def _take_in(self) -> bool:
        """Wait for something to do, and let jobs in and out; False when the loop is to end."""
        with self._wake:
            while not (self._coming or self._leaving or self._stopping or self._jobs):
                self._wake.wait()
            if self._stopping:
                return False
            self._take_calls()
            leaving, self._leaving = self._leaving, []
        leaving = [job for job in dict.fromkeys(leaving) if job.request in self._jobs]
        for job in leaving:
            self._ended(job, "disconnected")  # before it is out: who sees that nothing is left finds it counted
        self._drop(leaving)
        now = time.perf_counter()
        late = [job for job in self._jobs.values() if job.deadline <= now]
        if late:
            self._tell_untold()
        self._drop(late)
        self._fail(late, Refused(504, "the request took longer than its timeout", code="timeout", in_vain=True))
        return True

    def _take_calls(self) -> None:
        for call in self._coming:
            self._calls.append(deque(call))
            self._jobs |= {job.request: job for job in call}
        self._coming = []

    def _drop(self, jobs: Sequence[Job]) -> None:
        """Take jobs out, wherever they stand."""
        for job in jobs:
            del self._jobs[job.request]
            self.engine.cancel(job.request)
        if jobs:
            kept = (deque(job for job in call if job.request in self._jobs) for call in self._calls)
            self._calls = deque(call for call in kept if call)

    def _feed(self) -> None:
        """Give the engine as many requests as it has slots, a call giving one at a time.

        After a fault it gets one alone, until a token has come: if it fails again, that one is to blame.
        """
        most = 1 if self._faults else self._slots
        while self._calls and self.engine.running + self.engine.waiting < most:
            call = self._calls.popleft()
            job = call.popleft()
            if call:
                self._calls.append(call)
            self.engine.submit(job.request)
            job.request.submitted_at = job.came_at

    def _turn(self) -> None:
        if self._untold and self.engine.reads_prompts:
            self._tell_untold()
        try:
            touched = self.engine.step()
        except BaseException:
            log.exception("the engine has failed in a step, and the requests that ran with it")
            self._recover()
            return
        now = time.perf_counter()
        all_told = now - self._told_at >= (self.engine.running - 1) / _TOLD
        if all_told:
            self._told_at = now
        news = dict.fromkeys([*self._untold, *(self._jobs[request] for request in touched)])
        self._untold = []
        for request in touched:
            self._faults = 0
            self._saw(self._jobs[request], now)
        for job in news:
            if job.request not in self._jobs:
                continue
            if self._due(job, all_told):
                self._read(job, self._tell)
            elif job.pace is not Pace.LAST:
                self._untold.append(job)

    def _saw(self, job: Job, now: float) -> None:
        count = len(job.request.output_ids)
        if job.seen_ids:
            self._metrics.gap(now - job.seen_at, count - job.seen_ids)
        job.seen_ids, job.seen_at = count, now

    def _due(self, job: Job, all_told: bool) -> bool:
        """A grammar is looked at with every step, as it may have failed there."""
        if job.request.finish_reason is not None or job.request.grammar is not None or job.pace is Pace.EACH:
            return True
        return job.pace is Pace.SOON and (all_told or not job.told_ids)

    def _tell_untold(self) -> None:
        untold, self._untold = self._untold, []
        for job in untold:
            if job.request in self._jobs:
                self._read(job, lambda job: self._send(job, self._news(job, None)))

    def _read(self, job: Job, tell: Callable[[Job], None]) -> None:
        try:
            tell(job)
        except BaseException:
            log.exception("a reply could not be read, and its request fails")
            self.engine.cancel(job.request)
            self._fail([job], Refused(500, "the reply could not be read", code="reply_fault", in_vain=True))

    def _recover(self) -> None:
        """Those that had begun fail; those that had not go to a new engine, before all others. At the second fault
        without a token in between they fail as well.
        """
        self._metrics.faults.inc()
        self._faults += 1
        if self._faults == _FAULTS:
            raise RuntimeError(f"{_FAULTS} faults, and no token between them")
        not_given = {job for call in self._calls for job in call}
        given = [job for job in self._jobs.values() if job not in not_given]
        begun = [job for job in given if self._faults > 1 or job.request.finish_reason or job.request.output_ids]
        self._fail(begun, Refused(500, "the engine has failed; the request may be sent again", code="engine_fault"))
        self.engine = self._make_engine()
        self._try(self.engine, 1)
        self._calls.extendleft(deque([job]) for job in reversed(given) if job.request in self._jobs)

    def _news(self, job: Job, finish_reason: str | None) -> Step:
        """What the job has not been told of."""
        request = job.request
        text = _text(request)
        step = Step(
            text[job.told_text :],
            request.output_ids[job.told_ids :],
            request.origins[job.told_ids :],
            request.output_logprobs[job.told_ids :],
            request.last_tree,
            finish_reason,
        )
        job.told_ids, job.told_text = len(request.output_ids), len(text)
        return step

    def _tell(self, job: Job) -> None:
        request = job.request
        step = self._news(job, request.finish_reason)
        problem = request.grammar.error if isinstance(request.grammar, JsonGrammar) else None
        if problem is not None and request.finish_reason in (None, "stop") and not _whole(_text(request)):
            self._drop([job])
            fault = f"the reply could not be kept to the response_format: {problem}"
            self._fail([job], Refused(400, fault, param="response_format", code="grammar"))
            return
        if step.last:
            del self._jobs[request]
            self._ended(job, str(request.finish_reason))
        self._send(job, step)

    def _fail(self, jobs: Sequence[Job], fault: Refused) -> None:
        """`fault` is why these jobs end; what they have is told before."""
        if jobs:
            self._tell_untold()
        for job in jobs:
            self._jobs.pop(job.request, None)
            try:
                self._ended(job, fault.code or "fault")
            finally:
                self._send(job, Step(fault=fault))

    def _ended(self, job: Job, how: str) -> None:
        self._metrics.ended(job.request, how)
        self._watch(job.request)

    def _send(self, job: Job, step: Step) -> None:
        try:
            job.tell(step)
        except RuntimeError:  # the handlers' event loop is closed: nobody is left to be told
            self.cancel([job])


def _sizes(most: int) -> list[int]:
    """Powers of two up to the next one: for these, costs are measured."""
    return [min(2**n, most) for n in range((most - 1).bit_length() + 1)]


def _text(request: Request) -> str:
    assert isinstance(request.matcher, StopMatcher)
    return request.matcher.text


def _whole(text: str) -> bool:
    """Is it JSON to its end?"""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
