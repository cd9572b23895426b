"""Continuous batching: requests join and leave between steps; every step is one cycle for all that run.

A request carries its own sampling, limits, tree and stop matcher. Rows in use stay in adjacent slots, so that a pass
reads the cache as a view.
"""

import functools
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from aquiline.config import Limits, SamplingConfig, TreeConfig, UserError, require
from aquiline.decode.cost import Chooser, Costs, costs_file
from aquiline.decode.drafter import Drafter, EagleDrafter, NgramDrafter, Row
from aquiline.decode.sampling import Sampler
from aquiline.decode.step import Outcome, prefill, speculative_step
from aquiline.model.backend import describe, kernel_fingerprint
from aquiline.model.draft import Draft
from aquiline.model.machine import cache_folder, cpu_flags, cpu_name
from aquiline.model.target import Target

OWN = 0  # origin of a token that the target chose itself; a drafted one has its depth, from 1


class Matcher(Protocol):
    """Scans emitted tokens in order; something other than None means that this token is the last."""

    def push(self, token_id: int) -> object | None: ...

    def finish(self) -> None:
        """The request ended otherwise: by length, context or cancelling."""


class StopIds:
    """The matcher of requests without text: stop ids only."""

    def __init__(self, stop_ids: frozenset[int]) -> None:
        self._stop_ids = stop_ids

    def push(self, token_id: int) -> object | None:
        return token_id if token_id in self._stop_ids else None

    def finish(self) -> None:
        pass


@dataclass(eq=False)
class Request:
    """One prompt and, as it runs, its reply.

    `tree` None decodes plainly. `finish_reason` is None while it runs, then `stop`, `length`, `context` or `cancelled`.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    limits: Limits = field(default_factory=Limits)
    tree: TreeConfig | None = None
    matcher: Matcher | None = None
    hold: bool = False  # keep its cache for a following request (`Engine.submit(..., after=this)`)

    output_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)  # per output token: OWN, or the depth it was drafted at
    finish_reason: str | None = None
    cycle_lengths: list[int] = field(default_factory=list)  # tokens emitted by each speculative cycle
    cycle_starts: list[int] = field(default_factory=list)  # output tokens before it
    tried: list[int] = field(default_factory=list)  # [n]: cycles that accepted n, in trees deeper than n
    accepted: list[int] = field(default_factory=list)  # [n]: cycles that accepted at least n+1 drafted tokens
    drafted_nodes: int = 0
    trees: Counter[tuple[int, int]] = field(default_factory=Counter)  # steps by (depth, nodes); (0, 0): plain ones
    submitted_at: float = 0.0
    first_token_at: float | None = None
    finished_at: float | None = None
    reused_tokens: int = 0  # of the prompt, taken over from the request before

    @property
    def cycles(self) -> int:
        return len(self.cycle_lengths)

    @property
    def tau(self) -> float | None:
        """Tokens per speculative cycle; the first token, from prefill, is in none. None without a cycle."""
        return sum(self.cycle_lengths) / self.cycles if self.cycles else None

    def __post_init__(self) -> None:
        if self.matcher is None:
            require(not self.limits.stop_strings, "stop strings need a matcher that reads text, such as Chat's")
            self.matcher = StopIds(self.limits.stop_ids)


class Engine:
    """Runs requests on one target, with or without a draft."""

    def __init__(
        self, target: Target, draft: Draft | Drafter | str | None = None, max_batch: int = 1, context: int | None = None
    ) -> None:
        """`draft`: an EAGLE-3 head, `"ngram"` for prompt lookup, a drafter of one's own, or None.
        `context`: the most tokens of prompt and reply together, by default what the target allows.
        """
        self.target = target
        self.context = min(context or target.config.max_positions, target.config.max_positions)
        require(max_batch >= 1, f"max_batch {max_batch} must be at least 1")
        self._num_slots = max_batch
        self.cache = target.new_cache(max_batch, self.context)
        self.drafter: Drafter | None
        if isinstance(draft, Draft):
            self.drafter = EagleDrafter(draft, target.model.embed_tokens, max_batch, self.context)
        elif isinstance(draft, str):
            require(draft == "ngram", f"draft {draft!r} is not known to the engine; give a head or 'ngram'")
            self.drafter = NgramDrafter(target.device)
        else:
            self.drafter = draft
        self.chooser: Chooser | None = None  # of trees that are `auto`
        self._waiting: deque[tuple[Request, Request | None]] = deque()
        self._running: list[tuple[Request, Row]] = []
        self._held: dict[int, tuple[Request, Row]] = {}  # by id of the request

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, request: Request, after: Request | None = None) -> Request:
        """Queue a request. `after`: a finished request that was held; what the two prompts share is not run again.

        UserError for an empty prompt or ids outside the vocabulary.
        """
        vocab_size = self.target.config.vocab_size
        require(len(request.prompt_ids) > 0, "the prompt is empty: give at least one token")
        bad = [i for i in request.prompt_ids if not 0 <= i < vocab_size]
        require(not bad, f"prompt token {bad[0] if bad else 0} is outside the target's vocabulary of {vocab_size}")
        Sampler(request.sampling, (), vocab_size)  # what is wrong with it is refused here, not in somebody's step
        request.submitted_at = time.perf_counter()
        self._waiting.append((request, after))
        return request

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """End a request where it stands and free its slot; nothing happens when it has ended already."""
        for i, (waiting, _) in enumerate(self._waiting):
            if waiting is request:
                del self._waiting[i]
                self._finish(request, None, "cancelled")
                return
        for running, row in self._running:
            if running is request:
                self._finish(request, row, "cancelled")
                self._remove([request])
                return

    def release(self, request: Request) -> None:
        """Give back the cache of a held request."""
        self._held.pop(id(request), None)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit what fits, run one cycle, retire what has ended. Returns the requests that gained tokens or ended.

        Left by an exception, it has cancelled all that ran: a row may stand between two states.
        """
        try:
            return self._step()
        except BaseException:
            for request, row in self._running:
                if request.finish_reason is None:
                    self._finish(request, row, "cancelled")
            self._remove([request for request, _ in self._running])
            raise

    def _step(self) -> list[Request]:
        touched = self._admit()
        self._remove([r for r, _ in self._running if r.finish_reason is not None])  # by their first token
        if self._running:
            rows = [row for _, row in self._running]
            outcomes = speculative_step(self.target, self.cache, self.drafter, rows, self._choosing(rows))
            for (request, row), outcome in zip(self._running, outcomes, strict=True):
                self._take(request, row, outcome)
                touched.append(request)
        self._remove([r for r, _ in self._running if r.finish_reason is not None])
        if self.chooser is not None and not self.busy:
            self.chooser.costs.save_now_and_then()
        return list(dict.fromkeys(touched))

    def _choosing(self, rows: Sequence[Row]) -> Chooser | None:
        """What chooses the trees of the rows whose tree is `auto`; a batch size not met before is probed first."""
        if self.drafter is None or not any(row.tree is not None and row.tree.auto for row in rows):
            return None
        if self.chooser is None:
            depends = self._what_costs_depend_on(self.drafter)
            self.chooser = Chooser(Costs(costs_file(cache_folder(), depends), depends))
        if not self.chooser.costs.known(len(rows)):
            context, slots = max(len(row.known) for row in rows), [row.slot for row in rows]
            level = functools.partial(self.drafter.probe_level, slots)
            self.chooser.costs.probe(len(rows), context, functools.partial(self._probe_pass, slots), level)
        return self.chooser

    def _probe_pass(self, slots: list[int], tokens: int) -> None:
        """A target pass over so many tokens of each row, for its time: nothing is kept."""
        ids_BN = torch.zeros(len(slots), tokens, dtype=torch.long, device=self.target.device)
        start = max(0, min(max(self.cache.lengths[s] for s in slots), self.context - tokens))
        positions_BN = torch.arange(start, start + tokens, device=self.target.device).expand_as(ids_BN)
        self.target.best(self.target(ids_BN, positions_BN, None, self.cache, slots).last_BND).tolist()

    def _what_costs_depend_on(self, drafter: Drafter) -> dict[str, Any]:
        model = drafter.model if isinstance(drafter, EagleDrafter) else None
        device = self.target.device
        return {
            "cpu": [cpu_name(), *sorted(cpu_flags())],
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "threads": torch.get_num_threads(),
            "decoding": [describe(self.target.dtype, device), kernel_fingerprint(), str(torch.__version__)],
            "target": [repr(self.target.config), str(self.target.dtype)],
            "draft": [type(drafter).__name__, *(() if model is None else (repr(model.config), str(model.dtype)))],
        }

    def run(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Submit requests and step until all have ended. Left by an exception, none of them stays behind."""
        try:
            for request in requests:
                self.submit(request)
            while any(r.finish_reason is None for r in requests):
                self.step()
        finally:
            for request in requests:
                self.cancel(request)
        return requests

    def stream(self, request: Request, after: Request | None = None) -> Iterator[list[tuple[int, int]]]:
        """Submit one request and yield its new (token id, origin) pairs after each step, until it ends.

        Leaving the loop early cancels the request.
        """
        self.submit(request, after)
        sent = 0
        try:
            while request.finish_reason is None:
                self.step()
                if len(request.output_ids) > sent:
                    yield list(zip(request.output_ids[sent:], request.origins[sent:], strict=True))
                    sent = len(request.output_ids)
        finally:
            self.cancel(request)

    def _admit(self) -> list[Request]:
        touched = []
        while self._waiting:
            request, after = self._waiting[0]
            before = self._held.pop(id(after), None) if after is not None else None
            if before is None and len(self._running) + len(self._held) >= self._num_slots:
                if not self._held:
                    break
                self.release(next(iter(self._held.values()))[0])  # only a cache: what needs it is computed again
            self._waiting.popleft()
            touched.append(request)
            try:
                self._start(request, before[1] if before is not None else None)
            except BaseException:
                request.finish_reason = request.finish_reason or "cancelled"
                raise
        return touched

    def _start(self, request: Request, before: Row | None) -> None:
        """Prefill; the first token comes from it."""
        prompt = list(request.prompt_ids)
        slot = before.slot if before is not None else self._free_slot()
        if request.limits.max_new_tokens == 0 or len(prompt) >= self.context:
            reason = "length" if request.limits.max_new_tokens == 0 else "context"
            self._clear(slot)
            self._finish(request, None, reason)
            return
        sampler = Sampler(request.sampling, prompt, self.target.config.vocab_size, self.target.device)
        tree = request.tree if self.drafter is not None else None
        row = Row(slot, prompt, sampler, tree, min(request.limits.max_new_tokens, self.context - len(prompt)))
        self._truncate(slot, self._reusable(before, prompt, tree))
        request.reused_tokens = self.cache.lengths[slot]
        first = prefill(self.target, self.cache, row, reads_aux=self.drafter is not None and self.drafter.reads_aux)
        request.first_token_at = time.perf_counter()
        row.known.append(first)
        self._running.append((request, row))
        self._emit(request, row, [first], [OWN])

    def _reusable(self, before: Row | None, prompt: list[int], tree: TreeConfig | None) -> int:
        """Of L shared tokens, L-1 rows: draft row L-1 pairs the last shared feature with the first token that differs.

        Running that one token again also brings back its aux, so nothing has to be stored for it.
        """
        if before is None:
            return 0
        shared = 0
        for old, new in zip(before.known, prompt, strict=False):
            if old != new:
                break
            shared += 1
        have = self.cache.lengths[before.slot]
        if self.drafter is not None and tree is not None:
            have = min(have, self.drafter.length(before.slot))
        return max(0, min(shared - 1, len(prompt) - 1, have))

    def _free_slot(self) -> int:
        used = {row.slot for _, row in self._running} | {row.slot for _, row in self._held.values()}
        return next(s for s in range(self._num_slots) if s not in used)

    def _take(self, request: Request, row: Row, outcome: Outcome) -> None:
        """Book one cycle: its tokens, where they came from, and what was accepted."""
        tree, verdict = outcome.tree, outcome.verdict
        depths = list(range(1, len(verdict.path) + 1))
        emitted = self._emit(request, row, verdict.tokens, [*depths, OWN])
        reached = int(tree.depths_N.max()) if len(tree) else 0
        request.trees[reached, len(tree)] += 1
        if len(tree) == 0:
            return
        request.cycle_lengths.append(emitted)
        request.cycle_starts.append(len(request.output_ids) - emitted)
        request.drafted_nodes += len(tree)
        short = max(0, reached - len(request.tried))
        request.tried += [0] * short
        request.accepted += [0] * short
        accepted = min(len(verdict.path), emitted)
        for n in range(min(reached, accepted + 1)):
            if n < accepted:
                request.accepted[n] += 1
            if n < accepted or emitted > accepted:  # after a stop the next depth was not judged
                request.tried[n] += 1

    def _emit(self, request: Request, row: Row, tokens: list[int], origins: list[int]) -> int:
        """Scan the tokens in order; nothing after a stop is emitted, and a stop beats the limit. Returns how many."""
        assert request.matcher is not None
        start = len(row.known) - len(tokens)
        for i, (token, origin) in enumerate(zip(tokens, origins, strict=True)):
            request.output_ids.append(token)
            request.origins.append(origin)
            row.room -= 1
            reason = None
            if request.matcher.push(token) is not None:
                reason = "stop"
            elif row.room == 0:
                reason = "length" if len(request.output_ids) >= request.limits.max_new_tokens else "context"
            if reason is not None:
                del row.known[start + i + 1 :]
                self._finish(request, row, reason)
                return i + 1
        row.sampler.commit(tokens)
        return len(tokens)

    def _finish(self, request: Request, row: Row | None, reason: str) -> None:
        request.finish_reason = reason
        request.finished_at = time.perf_counter()
        if reason != "stop":
            assert request.matcher is not None
            request.matcher.finish()
        if row is not None:
            self._truncate(row.slot, len(row.known) - 1)  # what stood behind a stop

    def _remove(self, ended: list[Request]) -> None:
        """Take ended requests out of the batch; held ones keep their slot, of the others the slots close up."""
        leaving = [(request, row) for request, row in self._running if any(request is e for e in ended)]
        self._running = [(request, row) for request, row in self._running if not any(request is e for e in ended)]
        for request, row in leaving:
            if request.hold:
                row.pending_aux = []
                self._held[id(request)] = (request, row)
            else:
                self._clear(row.slot)
        # The rows that run move down to the lowest slots not held, in order.
        held = {row.slot for _, row in self._held.values()}
        wanted = [s for s in range(self._num_slots) if s not in held]
        self._running.sort(key=lambda pair: pair[1].slot)
        for slot, (_, row) in zip(wanted, self._running, strict=False):
            if row.slot != slot:
                self.cache.move(row.slot, slot)
                if self.drafter is not None:
                    self.drafter.move(row.slot, slot)
                row.slot = slot

    def _clear(self, slot: int) -> None:
        self._truncate(slot, 0)

    def _truncate(self, slot: int, length: int) -> None:
        self.cache.truncate(slot, min(length, self.cache.lengths[slot]))
        if self.drafter is not None:
            self.drafter.truncate(slot, length)


def check_tree_and_draft(draft: object | None, tree: TreeConfig | None) -> None:
    """UserError when a tree is given without anything to draft it."""
    if tree is not None and draft is None:
        raise UserError(f"tree {tree} was given without a draft; give --draft, or leave --tree out")
