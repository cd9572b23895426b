"""The same prompts with and without the draft, prompt by prompt in turn, to one record per run.

Both ways run on one loaded model and one engine, so they share every line that is not the draft; which of the two goes
first alternates, so that neither always meets the warmer machine.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from aquiline.api import Model, Result
from aquiline.config import EvalConfig, UserError, require
from aquiline.decode.engine import Request
from aquiline.files.checkpoint import weights_hash
from aquiline.measure.quiet import Quiet
from aquiline.measure.tasks import Prompt
from aquiline.model.draft import Draft
from aquiline.model.machine import cpu_flags, cpu_name
from aquiline.model.target import Target

DEFINITIONS = {
    "tau": "tokens emitted by speculative cycles / number of these cycles, pooled over the task's prompts; accepted "
    "drafted tokens + 1 on average, the floor is 1; the first token, from prefill, is in no cycle",
    "tau_per_prompt_mean": "the mean over prompts of each prompt's tau",
    "acceptance_per_depth": "[n]: share of all cycles that accepted at least n+1 drafted tokens",
    "n_alpha": "[n]: share of drafted tokens accepted at depth n+1 among cycles that accepted the n before",
    "tokens_per_second": "all generated tokens / all time, each prompt from request to last token",
    "speedup": "plain time / speculative time of one prompt, both from request to last token, over the prompts "
    "(speedup_prompts of them) for which both ways generated the same number of tokens",
    "equal_share": "share of prompts with the same token ids both ways",
    "divergences": "position: the first generated token (from 0) that differs; logit_gap: between the target's two "
    "largest logits there, in one pass over the plain run's tokens before it",
    "mean": "over tasks, each weighing the same",
    "exact": "whether a token's numbers are the same bits whatever else is in its pass, so that both texts are one",
    "load": "share of the machine's processor time that other processes took during the measurement; loaded: more "
    "than a twentieth, and times then mean little. pause_file: training runs stood still meanwhile",
}

TIMED = ("tokens_per_second", "plain_tokens_per_second", "speedup_median", "speedup_min", "speedup_max")


@dataclass(frozen=True)
class Divergence:
    """Where the two ways parted: `position` counts generated tokens."""

    position: int
    logit_gap: float


@dataclass(frozen=True)
class Comparison:
    """One prompt, decoded with the draft and, unless left out, plainly."""

    prompt: str
    request: Request  # the speculative one, for its counts
    result: Result
    plain: Result | None
    divergence: Divergence | None

    @property
    def speedup(self) -> float | None:
        """None without a plain run, and where the two ways generated different numbers of tokens."""
        return None if self.plain is None else speedup(self.plain, self.result)


def speedup(plain: Result, speculative: Result) -> float | None:
    """Plain time / speculative time; None unless both generated the same number of tokens."""
    same = plain.generated_tokens == speculative.generated_tokens > 0
    return plain.seconds / speculative.seconds if same else None


@torch.inference_mode()
def divergence(
    target: Target, prompt_ids: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Divergence | None:
    """The first difference between two replies to a prompt, and how near a tie the target's choice was there."""
    if list(plain) == list(other):
        return None
    pairs = zip(plain, other, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    ids = torch.tensor([[*prompt_ids, *plain[:position]]], device=target.device)
    out = target(ids, torch.arange(ids.shape[1], device=target.device)[None])
    best = target.logits(out.last_BND[0, -1]).topk(2).values
    return Divergence(position, float(best[0] - best[1]))


@dataclass(frozen=True)
class Rendered:
    """A prompt as the target reads it."""

    id: str
    ids: list[int]


def render(model: Model, task: str, prompts: Sequence[Prompt]) -> list[Rendered]:
    """The prompts as token ids. UserError names the one that the chat template refuses."""
    rendered = []
    for prompt in prompts:
        try:
            rendered.append(Rendered(prompt.id, model.prompt_ids(prompt.messages)))
        except UserError as error:
            raise UserError(f"{task}, prompt {prompt.id}: {error}") from error
    return rendered


def compare(model: Model, prompts: Sequence[Rendered], config: EvalConfig) -> Iterator[Comparison]:
    """Decode each prompt both ways."""
    require(model.draft is not None, "without a draft there is nothing to measure: give --draft a head or ngram")
    for number, prompt in enumerate(prompts):
        done: dict[bool, tuple[Request, Result]] = {}
        for plain in (False, True) if number % 2 == 0 else (True, False):
            if config.plain or not plain:
                request = _request(model, prompt.ids, config, plain=plain)
                model.engine.forget()  # each way runs its prompt
                done[plain] = request, model.run(request)
        request, result = done[False]
        other = done[True][1] if True in done else None
        parted = None if other is None else divergence(model.target, prompt.ids, other.token_ids, result.token_ids)
        yield Comparison(prompt.id, request, result, other, parted)


def warm_up(model: Model, ids: list[int], config: EvalConfig) -> None:
    """Decode a few tokens both ways, so that what only a first use costs falls on neither."""
    for plain in (True, False):
        model.run(_request(model, ids, config, plain=plain, tokens=min(16, config.max_new_tokens)))


def _request(model: Model, ids: list[int], config: EvalConfig, *, plain: bool, tokens: int | None = None) -> Request:
    return model.request(
        ids,
        max_new_tokens=config.max_new_tokens if tokens is None else tokens,
        temperature=config.temperature,
        seed=config.seed,
        tree=config.tree,
        plain=plain,
    )


def summarise(done: Sequence[Comparison], config: EvalConfig, draft: Draft | str | None) -> dict[str, Any]:
    """One task's block of the record."""
    requests = [c.request for c in done]
    cycles = sum(r.cycles for r in requests)
    taus = [r.tau for r in requests if r.tau is not None]
    tried, accepted = _added([r.tried for r in requests]), _added([r.accepted for r in requests])
    block: dict[str, Any] = {
        "prompts": len(done),
        "tau": pooled_tau(requests),
        "tau_per_prompt_mean": statistics.fmean(taus) if taus else None,
        "cycles": cycles,
        "generated_tokens": sum(c.result.generated_tokens for c in done),
        "finish_reasons": dict(Counter(c.result.finish_reason for c in done)),
        "acceptance_per_depth": [a / cycles for a in accepted],
    }
    if config.tree.auto:
        block["trees"] = chosen(requests)
    if config.tree.is_chain:
        block["n_alpha"] = [a / t if t else None for a, t in zip(accepted, tried, strict=True)]
    if isinstance(draft, Draft) and draft.config.trained_length is not None:
        block["tau_by_position"] = _by_position(requests, draft.config.trained_length)
    block["tokens_per_second"] = _rate([c.result for c in done])
    plain = [c.plain for c in done if c.plain is not None]
    if plain:
        ratios = [c.speedup for c in done if c.speedup is not None]
        block |= {
            "plain_tokens_per_second": _rate(plain),
            "speedup_median": statistics.median(ratios) if ratios else None,
            "speedup_min": min(ratios, default=None),
            "speedup_max": max(ratios, default=None),
            "speedup_prompts": len(ratios),
            "equal_share": sum(c.divergence is None for c in done) / len(done),
            "divergences": [{"prompt": c.prompt} | asdict(c.divergence) for c in done if c.divergence is not None],
        }
    return block


def pooled_tau(requests: Sequence[Request]) -> float | None:
    """Tokens per speculative cycle of all requests; None without a cycle."""
    cycles = sum(r.cycles for r in requests)
    return sum(sum(r.cycle_lengths) for r in requests) / cycles if cycles else None


def chosen(requests: Sequence[Request]) -> dict[str, Any]:
    """The trees that `auto` chose: the share of plain steps, and of the rest how deep and large the trees were."""
    steps = sum((r.trees for r in requests), Counter[tuple[int, int]]())
    total, plain = sum(steps.values()), steps.pop((0, 0), 0)
    drafted = total - plain
    mean = [sum(size[i] * n for size, n in steps.items()) / drafted if drafted else None for i in (0, 1)]
    return {
        "steps": total,
        "plain_share": plain / total if total else None,
        "mean_depth": mean[0],
        "mean_nodes": mean[1],
        "most_frequent": {f"{depth} deep, {nodes} nodes": n for (depth, nodes), n in steps.most_common(5)},
    }


def _added(lists: Sequence[Sequence[int]]) -> list[int]:
    """Sums per position of lists of different lengths."""
    return [sum(x[n] for x in lists if n < len(x)) for n in range(max(map(len, lists), default=0))]


def _rate(results: Sequence[Result]) -> float | None:
    seconds = sum(r.seconds for r in results)
    return sum(r.generated_tokens for r in results) / seconds if seconds else None


def _by_position(requests: Sequence[Request], trained_length: int) -> dict[str, dict[str, Any]]:
    """Tau of cycles that began within half, within, and beyond the length the draft was trained to."""
    edges = {"to half the trained length": 0.5, "to the trained length": 1.0, "to twice": 2.0, "beyond": float("inf")}
    lengths: dict[str, list[int]] = {name: [] for name in edges}
    for r in requests:
        for start, emitted in zip(r.cycle_starts, r.cycle_lengths, strict=True):
            position = len(r.prompt_ids) + start
            name = next(n for n, edge in edges.items() if position <= edge * trained_length)
            lengths[name].append(emitted)
    return {n: {"cycles": len(x), "tau": statistics.fmean(x)} for n, x in lengths.items() if x}


def make_record(
    model: Model,
    config: EvalConfig,
    prompts: Mapping[str, Sequence[Prompt]],
    tasks: Mapping[str, Mapping[str, Any]],
    quiet: Quiet | None = None,
    *,
    allow_load: bool = False,
) -> dict[str, Any]:
    """The whole record: what was measured (`tasks`, by `summarise`), with which settings, where.

    `quiet`: what else the machine did meanwhile. Times that were taken on a loaded machine are left empty, unless
    `allow_load`; what was accepted does not depend on it.
    """
    if quiet is not None and quiet.loaded and not allow_load:
        tasks = {name: without(TIMED, block) for name, block in tasks.items()}
    means = {}
    for key in ("tau", "speedup_median"):
        values = [t[key] for t in tasks.values() if t.get(key) is not None]
        if values:
            means[key] = statistics.fmean(values)
    settings = model_settings(model, prompts) | {
        "tree": str(config.tree),
        "temperature": config.temperature,
        "seed": config.seed,
        "max_new_tokens": config.max_new_tokens,
        "limit": config.limit,
        "plain": config.plain,
    }
    chooser = model.engine.chooser if config.tree.auto else None
    return {
        "tasks": dict(tasks),
        "mean": means,
        "settings": settings,
        **({} if chooser is None else {"costs_ms": chooser.costs.record()}),  # which the trees rested on, at the end
        "machine": machine(model.target.device) | ({} if quiet is None else quiet.record()),
        "versions": versions(),
        "definitions": DEFINITIONS,
    }


def without(timed: Sequence[str], block: Mapping[str, Any]) -> dict[str, Any]:
    """A block whose times mean nothing: they are left empty."""
    return {k: None if k in timed else v for k, v in block.items()}


def model_settings(model: Model, prompts: Mapping[str, Sequence[Prompt]]) -> dict[str, Any]:
    """What was measured, of everything that is the same for all kinds of measurement."""
    return {
        "target": model.target_name,
        "draft": model.draft_name,
        "draft_sha256": None if model.draft_folder is None else weights_hash(model.draft_folder),
        "dtype": model.dtype,
        "quantize": model.target.quantised,
        "quantize_draft": model.quantised_draft,
        "decoding": model.target.decoding,
        "exact": model.target.exact,
        "tokenizer": model.chat.fingerprint(),
        "template": model.chat.template_fingerprint(),
        "template_kwargs": model.template_kwargs,
        "prompts_sha256": prompts_hash(prompts),
    }


def prompts_hash(prompts: Mapping[str, Sequence[Prompt]]) -> str:
    asked = {name: [[p.id, p.messages] for p in ps] for name, ps in prompts.items()}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def machine(device: torch.device) -> dict[str, Any]:
    """The machine, in words that a table can name it by."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return {
        "cpu": cpu_name() or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "flags": [flag for flag in _FLAGS if flag in cpu_flags()],
        "memory_gib": round(pages / 2**30, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def versions() -> dict[str, str | None]:
    """What made a record. `revision` is that of this checkout, with `+changes` where files differ from it."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout
            return None

    named = {name: version(name) for name in ("aquiline", "torch", "transformers")}
    return named | {"python": platform.python_version(), "revision": _revision(Path(__file__).parents[2])}


def _revision(root: Path) -> str | None:
    """Of the repository whose top folder is `root`; an installed package may lie inside somebody else's."""
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git here
        return None
    return described.stdout.strip() or None
