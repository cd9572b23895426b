"""Whether a target that Transformers computes is computed right: a few passes over a few tokens, when it is loaded.

A model whose code ignores our mask, our positions or our cache would still write text, other text with a draft than
without one. So a tree with branches, behind a cached prompt, is compared with plain passes of the model's own attention
over each of its paths, up to the logits; and tokens of one branch are exchanged, which must not reach another branch.
"""

import torch
from torch import Tensor

from aquiline.config import require
from aquiline.model.hf_target import ATTENTION, HFTarget

_PROMPT = 6
_PARENTS = (0, 0, 1, 1, 2, 2)  # of the nodes in the pass; the root is 0: two branches, each with two ends
_PATHS = ((0, 1, 3), (0, 1, 4), (0, 2, 5), (0, 2, 6))
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in a config: how many
_NEAR = 1e-3  # in float32
_ROUNDED = 0.1  # in 16 bits or quantised: sums are rounded otherwise, and an expert may be another
_FARTHEST = 3.0  # there, one token may be off by so many times what the median may, unless experts are chosen
_AGAIN = 0.02  # there, of the same pass with other tokens in another branch: the same sums, if not in the same order


@torch.no_grad()
def check(target: HFTarget) -> None:
    """UserError unless passes over a tree equal the model's own plain ones."""
    generator = torch.Generator().manual_seed(0)
    size = min(target.config.vocab_size, target.embedding.num_embeddings)
    ids = torch.randint(0, size, (_PROMPT + 1 + len(_PARENTS),), generator=generator).to(target.device)
    prompt, tree = ids[:_PROMPT], ids[_PROMPT:]
    found = _tree_pass(target, prompt, tree)
    rows = torch.stack([torch.cat((prompt, tree[list(path)])) for path in _PATHS])
    target.use_attention("eager")
    try:
        own = target.hf(input_ids=rows, use_cache=False).logits.float()
    finally:
        target.use_attention(ATTENTION)
    exact = target.dtype == torch.float32 and getattr(target.hf, "hf_quantizer", None) is None
    experts = any(getattr(target.hf.config, key, None) for key in _EXPERTS)
    farthest = float("inf") if experts else _FARTHEST
    for path, wanted in zip(_PATHS, own[:, _PROMPT:], strict=True):
        off = _distance(target.logits(found[list(path)]), wanted, exact, farthest)
        require(
            off < (_NEAR if exact else _ROUNDED),
            f"with our attention its logits are another model's (off by {off:.2g} of their size): positions, mask or "
            "cache do not reach its layers, or it does to scores or logits what is not known here",
        )
    tree[[2, 5, 6]] = (tree[[2, 5, 6]] + 1) % size
    off = _distance(_tree_pass(target, prompt, tree)[[3, 4]], found[[3, 4]], exact, farthest)
    hidden = f"its tokens see what the mask hides (off by {off:.2g} of their states' size)"
    require(off < (_NEAR if exact else _AGAIN), hidden)


def _tree_pass(target: HFTarget, prompt: Tensor, tree: Tensor) -> Tensor:
    """The final states of root and nodes."""
    device = prompt.device
    positions = torch.arange(_PROMPT, device=device)
    cache = target.new_cache(1, _PROMPT)
    out = target(prompt[None], positions[None])
    cache.keep(0, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
    mask = torch.eye(len(tree), dtype=torch.bool, device=device)
    depths = [0]
    for node, parent in enumerate(_PARENTS, 1):
        mask[node] |= mask[parent]
        depths.append(depths[parent] + 1)
    where = torch.tensor([depths], device=device) + _PROMPT
    return target(tree[None], where, mask[None], cache, [0]).last_BND[0]


def _distance(found: Tensor, wanted: Tensor, exact: bool, farthest: float = _FARTHEST) -> float:
    """How far tokens are from where they should be, as a share of their size: the farthest one, or where sums are
    inexact the median, or the farthest one over `farthest`.
    """
    a, b = found.float(), wanted.float()
    off = (a - b).norm(dim=-1) / (b - b.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-6)
    return float(off.max() if exact else torch.maximum(off.median(), off.max() / farthest))
