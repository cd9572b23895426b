"""What a server counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from aquiline.decode.engine import Engine, Request

disable_created_metrics()  # a second line for every counter

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.requests = Counter("aquiline_requests", "Requests that ended, by how", ["finish"], registry=r)
        self.refused = Counter("aquiline_refused", "Calls answered with an error, by status", ["status"], registry=r)
        self.faults = Counter("aquiline_engine_faults", "Steps in which the engine failed", registry=r)
        self.running = Gauge("aquiline_requests_running", "Requests that have a slot", registry=r)
        self.waiting = Gauge("aquiline_requests_waiting", "Requests that wait for a slot", registry=r)
        self.prompt_tokens = Counter("aquiline_prompt_tokens", "Tokens of prompts", registry=r)
        self.reused_tokens = Counter("aquiline_reused_prompt_tokens", "Of these, found in the cache", registry=r)
        self.tokens = Counter("aquiline_generated_tokens", "Tokens of replies", registry=r)
        self.cycles = Counter("aquiline_cycles", "Speculative cycles", registry=r)
        self.cycle_tokens = Counter("aquiline_cycle_tokens", "Tokens they yielded; over cycles: tau", registry=r)
        self.tau = Gauge("aquiline_tau", "Tokens per speculative cycle since the start", registry=r)
        self.tried = Counter("aquiline_draft_tried", "Cycles whose tree reached a depth, all above being accepted",
                             ["depth"], registry=r)  # fmt: skip
        self.accepted = Counter("aquiline_draft_accepted", "Of these, accepted there", ["depth"], registry=r)
        self.steps = Counter("aquiline_steps", "Steps by the nodes of their tree; 0: plain", ["nodes"], registry=r)
        self.first_token = Histogram("aquiline_time_to_first_token_seconds", "From request to first token",
                                     buckets=_FIRST, registry=r)  # fmt: skip
        self.between = Histogram("aquiline_inter_token_seconds", "From a token to the next; 0 within a step",
                                 buckets=_GAPS, registry=r)  # fmt: skip
        self.cache_tokens = Gauge("aquiline_cache_tokens", "Tokens in the target's cache", registry=r)
        self.cache_limit = Gauge("aquiline_cache_tokens_limit", "The most it may hold", registry=r)

        self._seen = (0, 0)  # tokens and cycles of tau

    def text(self, engine: Engine, requests: int) -> bytes:
        """All figures; of how full the engine is, with so many requests under way, those of now."""
        self.running.set(engine.running)
        self.waiting.set(max(0, requests - engine.running))  # read while both change
        self.cache_tokens.set(sum(engine.cache.lengths))
        self.cache_limit.set(engine.cache.tokens)
        return generate_latest(self.registry)

    def turned_away(self, status: int) -> None:
        self.refused.labels(status).inc()

    def gap(self, seconds: float, tokens: int) -> None:
        """So many tokens came that long after the last one."""
        for number in range(tokens):
            self.between.observe(0.0 if number else seconds)

    def ended(self, request: Request, how: str) -> None:
        self.requests.labels(how).inc()
        self.prompt_tokens.inc(len(request.prompt_ids))
        self.reused_tokens.inc(request.reused_tokens)
        self.tokens.inc(len(request.output_ids))
        if request.first_token_at is not None:
            self.first_token.observe(request.first_token_at - request.submitted_at)
        if request.cycles:
            self.cycles.inc(request.cycles)
            self.cycle_tokens.inc(sum(request.cycle_lengths))
            self._seen = (self._seen[0] + sum(request.cycle_lengths), self._seen[1] + request.cycles)
            self.tau.set(self._seen[0] / self._seen[1])
        for counters, counts in ((self.tried, request.tried), (self.accepted, request.accepted)):
            for depth, count in enumerate(counts, 1):
                counters.labels(depth).inc(count)
        for (_, nodes), count in request.trees.items():
            self.steps.labels(nodes).inc(count)
