"""The accepted length of a head in training, by really decoding: what the walk simulates, and the reference tree."""

import copy
from collections.abc import Sequence

from aquiline.config import REFERENCE_TREE, Limits, TreeConfig
from aquiline.data.dataset import Document
from aquiline.decode.engine import Engine, Request
from aquiline.model.draft import Draft
from aquiline.model.target import Target

_PROMPTS, _TOKENS = 8, 64  # bounds what it costs


def decode_some(target: Target, draft: Draft, documents: Sequence[Document], depth: int) -> dict[str, float]:
    """Tau per tree, over the first replies of a few greedy documents: a chain of `depth`, and the reference tree.

    A reply is decoded to its stored length, so that the tokens are those that the walk counts. Trees without a cycle
    are left out. The engine gets a copy: nothing it does can reach the head that is trained.
    """
    asked = []
    for document in documents:
        first, end = document.replies[0]
        if first > 0 and end - first > 1:  # the first token comes from prefill, in no cycle
            asked.append((document.ids[:first].tolist(), min(end - first, _TOKENS)))
    asked = asked[:_PROMPTS]
    if not asked:
        return {}
    frozen = copy.deepcopy(draft).requires_grad_(False)
    context = max(len(ids) + tokens for ids, tokens in asked)
    taus = {}
    for tree in (TreeConfig(depth, 1, depth), REFERENCE_TREE):
        requests = [Request(ids, limits=Limits(tokens), tree=tree) for ids, tokens in asked]
        Engine(target, frozen, len(requests), context).run(requests)
        cycles = sum(r.cycles for r in requests)
        if cycles:
            taus[str(tree)] = sum(sum(r.cycle_lengths) for r in requests) / cycles
    return taus
