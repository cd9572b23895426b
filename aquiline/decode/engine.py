"""Continuous batching: requests join and leave between steps; every step is one cycle for all that run.

A request carries its own sampling, limits, tree and stop matcher. What it gets does not depend on what else runs:
neither on the rest of its batch, nor on whose cache it shares, nor on whether it had to give its own back for a while.
"""

import functools
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from aquiline.config import Limits, SamplingConfig, TreeConfig, UserError, require
from aquiline.decode.cost import PROBED, PROBED_WIDTHS, Chooser, Costs, costs_file
from aquiline.decode.drafter import Drafter, EagleDrafter, NgramDrafter, Row
from aquiline.decode.sampling import Grammar, Sampler, TokenLogprobs
from aquiline.decode.slots import Slots
from aquiline.decode.step import PREFILL_CHUNK, Outcome, prefill, speculative_step
from aquiline.decode.tree import Tree
from aquiline.model.backend import kernel_fingerprint
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
    grammar: Grammar | None = None
    logprobs: int | None = None  # how many of the likeliest tokens are noted beside each chosen one; None: nothing is

    output_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)  # per output token: OWN, or the depth it was drafted at
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per output token, if wanted
    last_tree: tuple[Tree, list[int]] | None = None  # of the last step, and its accepted nodes; None: it had none
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
    reused_tokens: int = 0  # of the prompt, found in the cache
    preempted: int = 0  # times that its part of the cache was needed by older requests

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
        self,
        target: Target,
        draft: Draft | Drafter | str | None = None,
        max_batch: int = 1,
        context: int | None = None,
        cache_tokens: int | None = None,
    ) -> None:
        """`draft`: an EAGLE-3 head, `"ngram"` for prompt lookup, a drafter of one's own, or None.
        `context`: the most tokens of prompt and reply together, by default what the target allows.
        `cache_tokens`: the most tokens of all requests that are cached; by default there is room for `max_batch` of
        the longest.
        """
        self.target = target
        self.context = min(context or target.config.max_positions, target.config.max_positions)
        require(max_batch >= 1, f"max_batch {max_batch} must be at least 1")
        require(cache_tokens is None or cache_tokens >= 1, f"cache_tokens {cache_tokens} must be at least 1")
        self._num_slots = max_batch
        self.cache = target.new_cache(max_batch, self.context, cache_tokens)
        self.drafter: Drafter | None
        if isinstance(draft, Draft):
            self.drafter = EagleDrafter(draft, target.embedding, max_batch, self.context, cache_tokens)
        elif isinstance(draft, str):
            require(draft == "ngram", f"draft {draft!r} is not known to the engine; give a head or 'ngram'")
            self.drafter = NgramDrafter()
        else:
            self.drafter = draft
        self.chooser: Chooser | None = None  # of trees that are `auto`
        self._slots = Slots(self.cache, self.drafter, max_batch)
        # First come, first served: in both the oldest stands first, and all that run are older than all that wait.
        self._waiting: deque[tuple[Request, Row | None]] = deque()  # with a row: it has run before
        self._running: list[tuple[Request, Row]] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def reads_prompts(self) -> bool:
        """Whether the next step begins with tokens of prompts, which take it longer than a cycle."""
        return bool(self._waiting) or any(self._missing(*pair) for pair in self._running)

    def submit(self, request: Request) -> Request:
        """Queue a request. UserError as in `check`."""
        self.check(request)
        request.submitted_at = time.perf_counter()
        self._waiting.append((request, None))
        return request

    def check(self, request: Request) -> None:
        """UserError for an empty prompt, ids outside the vocabulary, and more tokens than the cache has room for. Reads
        only what never changes, so any thread may ask.
        """
        vocab_size = self.target.config.vocab_size
        require(len(request.prompt_ids) > 0, "the prompt is empty: give at least one token")
        bad = [i for i in request.prompt_ids if not 0 <= i < vocab_size]
        require(not bad, f"prompt token {bad[0] if bad else 0} is outside the target's vocabulary of {vocab_size}")
        Sampler(request.sampling, (), vocab_size)  # what is wrong with it is refused here, not in somebody's step
        longest = min(len(request.prompt_ids) + request.limits.max_new_tokens, self.context)
        require(
            longest - 1 <= self.cache.tokens or self._ends_at_once(request) is not None,
            f"a prompt of {len(request.prompt_ids)} tokens and a reply of up to {longest - len(request.prompt_ids)} do "
            f"not fit into a cache of {self.cache.tokens} tokens; give less of either, or a larger cache_tokens",
        )

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
                return

    def forget(self) -> None:
        """Drop what requests that ended have left in the cache; for measurements, which must not profit from it."""
        self._slots.shrink(0)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit what fits, run a part of the prompts and one cycle, retire what has ended. Returns the requests that
        gained tokens or ended.

        Left by an exception, it has cancelled all that ran: a row may stand between two states.
        """
        try:
            return self._step()
        except BaseException:
            for request, row in self._running:
                self._finish(request, row, "cancelled")
            self.forget()
            raise

    def _step(self) -> list[Request]:
        self._make_room()
        touched = self._prefill()
        ready = [(request, row) for request, row in self._running if not self._missing(request, row)]
        if ready:
            rows = [row for _, row in ready]
            outcomes = speculative_step(self.target, self.cache, self.drafter, rows, self._choosing(rows))
            for (request, row), outcome in zip(ready, outcomes, strict=True):
                self._take(request, row, outcome)
                touched.append(request)
        if self.chooser is not None and not self.busy:
            self.chooser.costs.save_now_and_then()
        return list(dict.fromkeys(touched))

    def _choosing(self, rows: Sequence[Row]) -> Chooser | None:
        """What chooses the trees of the rows whose tree is `auto`; a batch size not met before is probed first."""
        if self.drafter is None or not any(row.tree is not None and row.tree.auto for row in rows):
            return None
        if self.chooser is None:
            depends = self._what_costs_depend_on(self.drafter)
            self.chooser = Chooser(Costs(costs_file(cache_folder(), depends), depends), self.target.ragged)
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
            "probed": [*PROBED, *PROBED_WIDTHS],
            "decoding": [self.target.decoding, kernel_fingerprint(), str(torch.__version__)],
            "target": [repr(self.target.config), str(self.target.dtype)],
            "draft": [
                type(drafter).__name__,
                *(() if model is None else (repr(model.config), str(model.dtype), str(model.quantised))),
            ],
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

    def stream(self, request: Request) -> Iterator[list[tuple[int, int]]]:
        """Submit one request and yield its new (token id, origin) pairs after each step, until it ends.

        Leaving the loop early cancels the request.
        """
        self.submit(request)
        sent = 0
        try:
            while request.finish_reason is None:
                self.step()
                if len(request.output_ids) > sent:
                    yield list(zip(request.output_ids[sent:], request.origins[sent:], strict=True))
                    sent = len(request.output_ids)
        finally:
            self.cancel(request)

    def _make_room(self) -> None:
        """For the coming cycle. Where the rows might outgrow the cache, the youngest gives its part back and waits
        before all others, to be run again from what it knows; nothing it has emitted changes.
        """
        while self._needed() > self.cache.tokens:
            request, row = self._running.pop()
            self._slots.leave(row, keep=False)
            request.preempted += 1
            self._waiting.appendleft((request, row))
        self._slots.shrink(self.cache.tokens - self._needed())

    def _needed(self) -> int:
        return sum(_needs(request, row) for request, row in self._running)

    def _prefill(self) -> list[Request]:
        """Run a limited number of tokens that are known but not cached, those of the oldest request first. So those
        that are further on wait for a part of a long prompt, not for all of it. Requests join as long as some are left,
        or until one has its first token, which is not to wait for the prompts of others.
        """
        touched: list[Request] = []
        left = PREFILL_CHUNK
        while left > 0:
            coming = next((pair for pair in self._running if self._missing(*pair)), None) or self._admit(touched)
            if coming is None:
                break
            request, row = coming
            count = min(left, self._missing(request, row))
            left -= count
            reads_aux = self.drafter is not None and self.drafter.reads_aux
            first = prefill(self.target, self.cache, row, count, reads_aux=reads_aux)
            if first is not None:
                request.first_token_at = time.perf_counter()
                self._emit(request, row, first)
                touched.append(request)
                if PREFILL_CHUNK - left >= PREFILL_CHUNK // 8:  # short ones are not worth a cycle each
                    break
        return touched

    def _missing(self, request: Request, row: Row) -> int:
        """Known tokens to be run before the first cycle; the last one belongs to that, once there is output."""
        return len(row.known) - bool(request.output_ids) - self.cache.lengths[row.slot]

    def _admit(self, touched: list[Request]) -> tuple[Request, Row] | None:
        """The request that has waited longest, if there is a slot and room for all that it knows; nobody overtakes it.

        Those that end without a token are `touched`.
        """
        while self._waiting and len(self._running) < self._num_slots:
            request, row = self._waiting[0]
            reason = None if row is not None else self._ends_at_once(request)
            if reason is not None:
                self._waiting.popleft()
                self._finish(request, None, reason)
                touched.append(request)
                continue
            row = row or self._row(request)
            spare = self.cache.tokens - self._needed() - _needs(request, row)
            if spare < 0:
                self._waiting[0] = request, row
                return None
            self._waiting.popleft()
            most = len(row.known) - bool(request.output_ids) - 1  # the last one is run: the draft begins with its aux
            self._running.append((request, row))
            shared = self._slots.enter(row, most, spare)
            if not request.output_ids:
                request.reused_tokens = shared
            return request, row
        return None

    def _ends_at_once(self, request: Request) -> str | None:
        if request.limits.max_new_tokens == 0:
            return "length"
        return "context" if len(request.prompt_ids) >= self.context else None

    def _row(self, request: Request) -> Row:
        prompt = list(request.prompt_ids)
        vocab_size, device = self.target.config.vocab_size, self.target.device
        sampler = Sampler(request.sampling, prompt, vocab_size, device, request.grammar)
        tree = request.tree if self.drafter is not None else None
        room = min(request.limits.max_new_tokens, self.context - len(prompt))
        return Row(-1, prompt, sampler, tree, room, logprobs=request.logprobs)

    def _take(self, request: Request, row: Row, outcome: Outcome) -> None:
        """Book one cycle: its tokens, where they came from, and what was accepted."""
        tree, verdict = outcome.tree, outcome.verdict
        emitted = self._emit(request, row, outcome)
        reached = max(tree.depths, default=0)
        request.trees[reached, len(tree)] += 1
        request.last_tree = (tree, verdict.path) if len(tree) else None
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

    def _emit(self, request: Request, row: Row, outcome: Outcome) -> int:
        """Scan the tokens in order; nothing after a stop is emitted, and a stop beats the limit. Returns how many."""
        assert request.matcher is not None
        path, tokens = outcome.verdict
        start = len(row.known) - len(tokens)
        for i, token in enumerate(tokens):
            request.output_ids.append(token)
            request.origins.append(1 + i if i < len(path) else OWN)
            request.output_logprobs += outcome.logprobs[i : i + 1]
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
        """`row` of a request that runs; what it has cached stays, for others."""
        request.finish_reason = reason
        request.finished_at = time.perf_counter()
        if reason != "stop":
            assert request.matcher is not None
            request.matcher.finish()
        if row is not None:
            self._slots.leave(row, keep=True)
            self._running = [pair for pair in self._running if pair[0] is not request]


def _needs(request: Request, row: Row) -> int:
    """Tokens that a row's cache may have to hold at the end of the next cycle."""
    depth = row.tree.depth if row.tree is not None else 0
    return len(row.known) + min(depth + (not request.output_ids), row.room - 1)


def check_tree_and_draft(draft: object | None, tree: TreeConfig | None) -> None:
    """UserError when a tree is given without anything to draft it."""
    if tree is not None and draft is None:
        raise UserError(f"tree {tree} was given without a draft; give --draft, or leave --tree out")
