"""The walk: from the target's logits at the root and the nodes of a tree to the accepted path and the bonus token.

At the node where it stands the walk chooses the target's next token as plain decoding would. If a child carries it, the
walk steps there; otherwise, and always at a leaf, it is the bonus: the tree decides how many tokens a cycle yields,
never which. Children come from a top-k, so each is a point mass, and for a tree that knows nothing of the draws this
has the same joint law over (path, bonus) as sequential rejection with renormalisation (speculative sampling, arXiv
2211.17192). One that does know them (`Foresight`) is accepted more often, with the same text.

Letters: N = 1 + nodes, the rows of the target pass of one request, row 0 being the root; V target vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from aquiline.decode.sampling import Sampler
from aquiline.decode.tree import ROOT, Tree


class Verdict(NamedTuple):
    """What one request gets out of a cycle: 1 + len(path) tokens.

        rows      0        1+path[0]   1+path[1]      rows of the pass, in order
        chosen    |            |           |          each from its row's logits
        tokens    tokens[0]  tokens[1]  tokens[2]     the tokens of the path, then the bonus

    If a stop leaves only the first m tokens, the first m rows are the ones to keep: the last token is never in a cache.
    """

    path: list[int]  # accepted nodes, from the root down
    tokens: list[int]  # emitted: the path's tokens, then the bonus

    @property
    def bonus(self) -> int:
        return self.tokens[-1]

    @property
    def rows(self) -> list[int]:
        """Rows of the pass that belong to the text: the root's and the path's."""
        return [0, *(1 + node for node in self.path)]


def walk(tree: Tree, choose: Callable[[int, list[int]], int]) -> Verdict:
    """The acceptance rule alone. `choose(row, path_tokens)`: the target's token after that row of the pass."""
    path: list[int] = []
    tokens: list[int] = []
    node: int | None = ROOT
    while node is not None:
        tokens.append(choose(1 + node, list(tokens)))
        node = tree.child(node, tokens[-1])
        if node is not None:
            path.append(node)
    return Verdict(path, tokens)


def verify(
    tree: Tree,
    sampler: Sampler,
    position: int,
    *,
    logits_NV: Tensor | None = None,
    argmax_N: Sequence[int] | None = None,
) -> Verdict:
    """Walk `tree` by what the target says: float32 logits, or their arg-max ids where `sampler.plain_greedy` allows.

    `position`: absolute position of the first new token, one past the root. Only the rows the walk visits are looked
    at. Nothing is committed: the caller commits what is left of the tokens after stops and limits.
    """
    if argmax_N is not None:
        assert sampler.plain_greedy, "arg-max ids serve plain greedy requests only"
        ids = argmax_N
        return walk(tree, lambda row, _: ids[row])
    assert logits_NV is not None, "neither logits nor arg-max ids given"
    rows = logits_NV
    return walk(tree, lambda row, path: sampler.choose(rows[row], position + len(path), path))
