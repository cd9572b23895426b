"""READ FIRST. One cycle of speculative decoding for a batch of rows: draft, verify, keep.

    known tokens   x_0 ... x_{n-1} x_n        x_n is the root: emitted, but in no cache yet
    target cache   0 ... n-1
    draft          a tree of guesses behind x_n
    target pass    [x_n, nodes] at positions n + depth, each seeing the cache, its ancestors and itself
    verify         walk from the root: accepted nodes, then one token of the target's own
    keep           keys and values of x_n and the accepted nodes; everything else of the cycle is dropped

The plain step is the same cycle with empty trees.

Letters: B rows, N tokens of the pass, A width of aux.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aquiline.decode.clock import lap
from aquiline.decode.cost import Chooser
from aquiline.decode.drafter import Drafter, Row
from aquiline.decode.sampling import TokenLogprobs, token_logprobs
from aquiline.decode.tree import Tree, flatten
from aquiline.decode.verify import Verdict, verify
from aquiline.model.kv_cache import KVCache
from aquiline.model.target import PassOutput, Target

PREFILL_CHUNK = 512  # tokens of prompts that are run between two cycles


@dataclass
class Outcome:
    """Of one row's cycle."""

    tree: Tree
    verdict: Verdict
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token of the verdict, where they are wanted


def prefill(target: Target, cache: KVCache, row: Row, count: int, *, reads_aux: bool) -> Outcome | None:
    """Run the next `count` tokens that are known but not cached. With the last of them comes the first new token, by
    the verdict on an empty tree; `known` has then grown by it.
    """
    start = cache.lengths[row.slot]
    ids = torch.tensor([row.known[start : start + count]], device=target.device)
    assert ids.shape[1] == count
    positions = torch.arange(start, start + count, device=target.device)[None]
    out = target(ids, positions, None, cache, [row.slot])
    cache.keep(row.slot, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
    if reads_aux and row.tree is not None:
        row.pending_aux.append(out.aux_BNA[0])
    if start + count < len(row.known):
        return None
    # With an empty tree the walk is a single choice: the first token goes the same way as every other.
    outcome = _verify(row, Tree.empty(), target.logits(out.last_BND[0, -1:]))
    row.known += outcome.verdict.tokens
    return outcome


def speculative_step(
    target: Target, cache: KVCache, drafter: Drafter | None, rows: Sequence[Row], chooser: Chooser | None = None
) -> list[Outcome]:
    """One cycle, from which `chooser` learns.

    Afterwards `known` of each row has grown by the verdict's tokens, and its cache by the tokens of the path and the
    root. A row that must stop inside them is cut back by the engine.
    """
    lap("other")
    trees = [Tree.empty()] * len(rows) if drafter is None else drafter.draft(rows, chooser)
    lap("draft")
    began = time.perf_counter()
    flat = flatten(trees, [row.known[-1] for row in rows], [len(row.known) - 1 for row in rows], target.device)
    mask_BNN = flat.mask_BNN if flat.ids_BN.shape[1] > 1 else None
    lap("other")
    slots, counts = [row.slot for row in rows], flat.counts
    out = target(flat.ids_BN, flat.positions_BN, mask_BNN, cache, slots, counts=counts)
    outcomes = _verify_batch(target, rows, trees, out)
    for b, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
        _keep(cache, drafter, row, outcome.verdict, out, b)
    lap("keep")
    if chooser is not None:
        chooser.fade()
        for row, outcome in zip(rows, outcomes, strict=True):
            if row.tree is not None and row.tree.auto:
                chooser.learn(outcome.tree, outcome.verdict.path, row.mood)
        costs = chooser.costs.of("target", len(rows), max(len(row.known) for row in rows))
        tokens = sum(counts) / len(rows) if target.ragged else max(counts)
        chooser.costs.observe(costs, tokens, time.perf_counter() - began)
    return outcomes


def _verify_batch(target: Target, rows: Sequence[Row], trees: Sequence[Tree], out: PassOutput) -> list[Outcome]:
    """The head runs once for the rows that do with an arg-max, and once for those that need logits."""
    greedy = [b for b, row in enumerate(rows) if row.sampler.plain_greedy and row.logprobs is None]
    others = [b for b in range(len(rows)) if b not in greedy]
    outcomes: dict[int, Outcome] = {}
    if greedy:
        states_MD, ends = _states(out, trees, greedy)
        best_M = target.best(states_MD).tolist()
        lap("target")
        for b, (start, end) in zip(greedy, ends, strict=True):
            verdict = verify(trees[b], rows[b].sampler, len(rows[b].known), argmax_N=best_M[start:end])
            outcomes[b] = Outcome(trees[b], verdict)
        lap("accept")
    if others:
        states_MD, ends = _states(out, trees, others)
        logits_MV = target.logits(states_MD)
        lap("target")
        for b, (start, end) in zip(others, ends, strict=True):
            outcomes[b] = _verify(rows[b], trees[b], logits_MV[start:end])
        lap("accept")
    return [outcomes[b] for b in range(len(rows))]


def _states(out: PassOutput, trees: Sequence[Tree], rows: list[int]) -> tuple[Tensor, list[tuple[int, int]]]:
    """What the head reads of these rows, `[M, D]` without padding, and where each row's part begins and ends."""
    (B, N), counts = out.last_BND.shape[:2], [1 + len(trees[b]) for b in rows]
    ends = list(itertools.accumulate(counts))
    states_MD = out.last_BND.flatten(0, 1)
    if ends[-1] < B * N:  # all of them are no copy
        places = [b * N + n for b, count in zip(rows, counts, strict=True) for n in range(count)]
        states_MD = states_MD[torch.tensor(places, device=states_MD.device)]
    return states_MD, list(zip([0, *ends], ends, strict=False))


def _verify(row: Row, tree: Tree, logits_NV: Tensor) -> Outcome:
    verdict = verify(tree, row.sampler, len(row.known), logits_NV=logits_NV)
    if row.logprobs is None:
        return Outcome(tree, verdict)
    return Outcome(tree, verdict, token_logprobs(logits_NV[verdict.rows], verdict.tokens, row.logprobs))


def _keep(cache: KVCache, drafter: Drafter | None, row: Row, verdict: Verdict, out: PassOutput, b: int) -> None:
    """Write the path into the cache and hand its aux to the draft; grow the known tokens."""
    rows = verdict.rows
    # The likeliest nodes stand first, so that the path often is a slice; taking others out costs more than the rest.
    index = slice(len(rows)) if rows[-1] == len(rows) - 1 else torch.tensor(rows, device=out.aux_BNA.device)
    cache.keep(row.slot, out.keys_LBGNE[:, b, :, index], out.values_LBGNE[:, b, :, index])
    if drafter is not None and drafter.reads_aux and row.tree is not None:
        aux = out.aux_BNA[b, index]
        row.pending_aux.append(aux.clone() if isinstance(index, slice) else aux)  # a view would keep the whole pass
    row.known += verdict.tokens
