"""The engine's thread: everything that computes runs here, and nothing else does.

Handlers hand jobs in and get told of every step; whatever they do meanwhile, the next cycle does not wait for it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from aquiline.data.chat import StopMatcher
from aquiline.decode.engine import Engine, Request
from aquiline.decode.sampling import TokenLogprobs
from aquiline.decode.tree import Tree
from aquiline.serve.errors import Refused
from aquiline.serve.metrics import Metrics

_FAULTS = 3  # steps that fail one after another: then the fault is not a request's

log = logging.getLogger("aquiline.serve")


@dataclass(frozen=True)
class Step:
    """What one cycle adds to a reply, or why there is no more."""

    text: str = ""  # becomes visible now; may lag behind the tokens
    ids: Sequence[int] = ()
    origins: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()  # as many as ids, where they were asked for
    tree: tuple[Tree, list[int]] | None = None  # that was verified, and its accepted nodes
    finish_reason: str | None = None
    fault: Refused | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.fault is not None


@dataclass(eq=False)
class Job:
    """A request of the engine, and who is told of its steps; `tell` is called in the engine's thread, must not wait."""

    request: Request
    tell: Callable[[Step], None]
    deadline: float  # of time.perf_counter()
    told_ids: int = field(default=0, init=False)
    told_text: int = field(default=0, init=False)
    told_at: float = field(default=0.0, init=False)


class EngineLoop:
    """Runs one engine in a thread of its own. An engine that fails is replaced; one that only fails ends the loop."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        metrics: Metrics,
        watch: Callable[[Request], None] = lambda request: None,
        died: Callable[[], None] = lambda: None,
    ) -> None:
        """`watch` looks at every request that ended; `died` is called when the loop gives up. Both in its thread."""
        self.engine = make_engine()
        self.dead = False
        self._make_engine, self._metrics, self._watch, self._died = make_engine, metrics, watch, died
        self._jobs: dict[Request, Job] = {}
        self._coming: list[Job] = []
        self._leaving: list[Job] = []
        self._faults = 0
        self._stopping = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """End after the cycle that runs; who still waits is told that the server is gone."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue requests that `Engine.check` has passed."""
        with self._wake:
            if self._stopping or self.dead:
                raise Refused(503, "the server is shutting down", code="shutting_down")
            self._coming += jobs
            self._wake.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Free the slots of these jobs before the next cycle; those that have ended already are left alone."""
        with self._wake:
            self._leaving += jobs
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._take_in():
                self._turn()
        except Exception:
            log.exception("the engine's thread has failed")
            self.dead = True
        with self._wake:
            self._stopping = True
            self._jobs |= {job.request: job for job in self._coming}
        gone = "the engine has failed" if self.dead else "the server has shut down"
        self._fail(list(self._jobs.values()), Refused(503, gone, code="shutting_down"))
        if self.dead:
            self._died()

    def _take_in(self) -> bool:
        """Wait for something to do, and let jobs in and out; False when the loop is to end."""
        with self._wake:
            while not (self._coming or self._leaving or self._stopping or self.engine.busy):
                self._wake.wait()
            if self._stopping:
                return False
            coming, leaving = self._coming, self._leaving
            self._coming, self._leaving = [], []
        for job in coming:
            self._jobs[job.request] = job
            self.engine.submit(job.request)
        for job in leaving:
            if self._jobs.pop(job.request, None) is not None:
                self.engine.cancel(job.request)
                self._ended(job, "disconnected")
        now = time.perf_counter()
        late = [job for job in self._jobs.values() if job.deadline <= now]
        for job in late:
            self.engine.cancel(job.request)
        self._fail(late, Refused(504, "the request took longer than its timeout", code="timeout"))
        return True

    def _turn(self) -> None:
        try:
            touched = self.engine.step()
        except Exception:
            log.exception("the engine has failed in a step; the requests that ran have failed with it")
            self._recover()
            return
        self._faults = 0
        for request in touched:
            self._tell(self._jobs[request])
        self._metrics.look(self.engine)

    def _recover(self) -> None:
        """Those that had begun fail; those that waited go to a new engine, in their order."""
        self._faults += 1
        self._metrics.faults.inc()
        begun = [job for job in self._jobs.values() if job.request.finish_reason or job.request.output_ids]
        self._fail(begun, Refused(500, "the engine has failed; the request may be sent again", code="engine_fault"))
        if self._faults >= _FAULTS:
            raise RuntimeError(f"the engine has failed in {_FAULTS} steps one after another")
        self.engine = self._make_engine()
        for request in self._jobs:
            self.engine.submit(request)

    def _tell(self, job: Job) -> None:
        request = job.request
        assert isinstance(request.matcher, StopMatcher)
        text, now = request.matcher.text, time.perf_counter()
        if job.told_ids:
            self._metrics.gap(now - job.told_at, len(request.output_ids) - job.told_ids)
        step = Step(
            text[job.told_text :],
            request.output_ids[job.told_ids :],
            request.origins[job.told_ids :],
            request.output_logprobs[job.told_ids :],
            request.last_tree,
            request.finish_reason,
        )
        job.told_ids, job.told_text, job.told_at = len(request.output_ids), len(text), now
        if step.last:
            del self._jobs[request]
            self._ended(job, str(request.finish_reason))
        self._send(job, step)

    def _fail(self, jobs: Sequence[Job], fault: Refused) -> None:
        for job in jobs:
            self._jobs.pop(job.request, None)
            self._ended(job, fault.code or "fault")
            self._send(job, Step(fault=fault))

    def _ended(self, job: Job, how: str) -> None:
        self._metrics.ended(job.request, how)
        self._watch(job.request)

    def _send(self, job: Job, step: Step) -> None:
        try:
            job.tell(step)
        except RuntimeError:  # the handlers' event loop is closed: nobody is left to be told
            if self._jobs.pop(job.request, None) is not None:
                self.engine.cancel(job.request)
