"""A head judged on stored replies: what it would propose, what of it is accepted, and whether another does better.

What it would do is computed by the training walk, which equals chain decoding.

Shapes: T tokens, K steps, W draft vocabulary.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.data.dataset import Document
from aquiline.data.features import Features
from aquiline.model.draft import Draft
from aquiline.model.target import Target
from aquiline.train.loop import make_pack
from aquiline.train.ttt import Plan, roll
from aquiline.train.walk import Walk

STEPS = 4  # of the chain by which a head is judged
TRIAL_STEPS = 2  # of a trial: the second is the first that reads a feature fed back
_FLOOR = -15.0  # no token counts as less likely, in log-probability: one wild guess would outweigh a hundred
_BLOCK = 16  # tokens: neighbours are not independent, so means are compared over blocks
_FEW_BLOCKS = 12  # tell nothing for certain
_MANY_BLOCKS = 40  # so many that what does not show in them is small
ENOUGH = _FEW_BLOCKS * _BLOCK  # rows
_ROWS = 256  # rows of logits at a time


@dataclass(frozen=True)
class Judged:
    """What a head proposes at the rows after which the target wrote on, and what came of it."""

    right_KT: Tensor  # bool
    valid_KT: Tensor  # bool: the row is followed by a token of the reply at this step
    proposed_KT: Tensor  # draft ids, -1 where not valid
    likely_KT: Tensor  # log-probability of the token written, over the draft vocabulary; _FLOOR outside it
    sure: float  # mean probability, by its own account, of the first drafted tokens

    def rows(self, documents: Sequence[Document], length: int | None) -> Tensor:
        """Bool `[T]`: the rows that verdicts rest on, no further into a document than the `length` of the training."""
        if length is None:
            return self.valid_KT[0]
        return self.valid_KT[0] & torch.cat([torch.arange(len(d)) < length for d in documents])

    def laid_as(self, other: "Judged") -> "Judged":
        """The same replies behind other prompts: what was found at their rows, at those of `other`."""
        at_KT = other.valid_KT[: len(self.valid_KT)]

        def laid(mine_KT: Tensor) -> Tensor:
            return mine_KT.new_zeros(at_KT.shape).masked_scatter(at_KT, mine_KT[self.valid_KT])

        return Judged(laid(self.right_KT), at_KT, laid(self.proposed_KT), laid(self.likely_KT), self.sure)

    def walk(self, documents: Sequence[Document], source: str | None = None) -> Walk:
        """The accepted length of chain decoding over these documents, or over those of one source."""
        walk, start = Walk(), 0
        for d in documents:
            if source in (None, d.source):
                self._walk_one(walk, d, start)
            start += len(d)
        return walk

    def cycles(self, documents: Sequence[Document]) -> list[tuple[int, int]]:
        """Of every cycle, the position at which it begins and the tokens that it emits."""
        found, start = [], 0
        for d in documents:
            walk = Walk()
            self._walk_one(walk, d, start)
            at = d.replies[0][0] if d.replies else 0
            for emitted in walk.lengths:
                found.append((at, emitted))
                at += emitted
            start += len(d)
        return found

    def _walk_one(self, walk: Walk, document: Document, start: int) -> None:
        here = slice(start, start + len(document))
        for first, end in document.replies:
            walk.add(self.right_KT[:, here], self.valid_KT[:, here], first, end)


@torch.no_grad()
def judge(draft: Draft, target: Target, documents: Sequence[Document], features: Features, steps: int) -> Judged:
    """Run the head over stored replies."""
    pack = make_pack(documents, features, draft, target)
    # The first token of a reply comes from prefill: decoding starts behind it, at the row that embeds it.
    written = pack.supervised_T.clone()
    start = 0
    for d in documents:
        written[[start + first for first, _ in d.replies]] = False
        start += len(d)
    plan = Plan.make(written, pack.starts, steps, None, pack.embeds_TH.device)
    shape = plan.valid_KT.shape
    right, proposed = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1)
    likely = torch.zeros(shape)
    sure = torch.zeros(())
    for k, (_, hidden) in enumerate(roll(draft, pack, plan)):
        rows = plan.scored[k]
        read = hidden[plan.scored_at[k]]
        stored = pack.ids_T[rows + 2 + k]
        draft_ids = draft.vocab.draft_ids_V[stored.to(read.device)]
        for a in range(0, len(rows), _ROWS):
            here, wanted = rows[a : a + _ROWS], draft_ids[a : a + _ROWS]
            logits = draft.logits(read[a : a + _ROWS])
            best = logits.argmax(-1)
            all_of_it = logits.logsumexp(-1)
            if k == 0:
                sure += (logits.amax(-1) - all_of_it).exp().sum().cpu()
            found = logits.gather(1, wanted.clamp(min=0)[:, None])[:, 0] - all_of_it
            found = torch.where(wanted < 0, _FLOOR, found).nan_to_num(_FLOOR).clamp(min=_FLOOR)
            proposed[k, here], likely[k, here] = best.cpu(), found.cpu()
            right[k, here] = draft.vocab.target_ids_W[best].cpu() == stored[a : a + _ROWS]
    return Judged(right, plan.valid_KT, proposed, likely, float(sure) / max(len(plan.scored[0]), 1))


# ---------------------------------------------------------------- better or worse


@dataclass(frozen=True)
class Gain:
    """How much better a head does than another on the same rows, per row: accepted tokens of a chain of two, and nats
    of the likelihood of what was written; of each, the mean over its standard error, from means of blocks.
    """

    accepted: float
    accepted_z: float
    nats: float
    nats_z: float
    blocks: int
    first_right: float  # share of first drafted tokens, of `accepted`

    @property
    def certain(self) -> bool:
        """No healthy head is that much better when something of it is made otherwise."""
        clear = self.nats_z >= 5 and self.accepted_z >= 2 and self.accepted >= 0.02
        return clear and self.blocks >= _FEW_BLOCKS

    @property
    def likely(self) -> bool:
        return self.nats_z >= 3 and self.accepted_z >= 1 and self.accepted >= 0.005 and self.blocks >= _FEW_BLOCKS // 2

    @property
    def no_loss(self) -> bool:
        """Without a part: of enough rows, none is worse for it."""
        return self.nats_z > -2 and self.accepted_z > -2 and self.blocks >= _FEW_BLOCKS

    @property
    def worthless(self) -> bool:
        """Without a part: no loss shows, and a gain does, or what may have been lost is next to nothing."""
        return self.no_loss and (self.nats_z >= 3 or (self.nats > -0.02 and self.blocks >= _MANY_BLOCKS))

    @staticmethod
    def of(here: Judged, other: Judged, documents: Sequence[Document], rows_T: Tensor) -> "Gain":
        """Of `other` over `here`, on these rows."""
        accepted, z, blocks = _mean(_per_row(other) - _per_row(here), rows_T, documents)
        more = other.likely_KT[:TRIAL_STEPS].sum(0) - here.likely_KT[:TRIAL_STEPS].sum(0)
        nats, nats_z, _ = _mean(more, rows_T, documents)
        first_right, _, _ = _mean(other.right_KT[0].float() - here.right_KT[0].float(), rows_T, documents)
        return Gain(accepted, z, nats, nats_z, blocks, first_right)


def block_means(of_T: Tensor, rows_T: Tensor, documents: Sequence[Document]) -> Tensor:
    """Means over blocks of these rows, each of one document."""
    blocks, start = [torch.zeros(0)], 0
    for d in documents:
        rows = of_T[start : start + len(d)][rows_T[start : start + len(d)]].float()
        blocks += [part.mean(0, keepdim=True) for part in rows.split(_BLOCK) if len(part) >= _BLOCK // 2]
        start += len(d)
    return torch.cat(blocks)


def _mean(of_T: Tensor, rows_T: Tensor, documents: Sequence[Document]) -> tuple[float, float, int]:
    """The mean over blocks, over its standard error, and of how many blocks."""
    means = block_means(of_T, rows_T, documents)
    if len(means) < 2:
        return 0.0, 0.0, len(means)
    mean, error = float(means.mean()), float(means.std()) / len(means) ** 0.5
    return mean, mean / max(error, 1e-9), len(means)


def _per_row(judged: Judged) -> Tensor:
    right = judged.right_KT[:TRIAL_STEPS] & judged.valid_KT[:TRIAL_STEPS]
    return right.int().cumprod(0).sum(0).float()


# ---------------------------------------------------------------- which tokens the draft's ids are


@dataclass(frozen=True)
class OtherMap:
    """Shares of the first drafted tokens that are right by the given map of draft ids to tokens, and by another."""

    words: str
    right: float
    given: float
    learnt: bool  # nobody wrote it down: of each draft id, the token that most often followed elsewhere
    certain: bool  # that it is the better one


def best_other_map(
    judged: Judged, documents: Sequence[Document], rows_T: Tensor, target_ids_W: Tensor
) -> OtherMap | None:
    """The map by which the same proposals would be right most often: `d2t` read in another way, or a learnt one. The
    latter counts only if it tells more than the same game played with the token before. Rows whose token the given map
    lacks are left out: what else a head proposes there says nothing of its map. None where no rows are left.
    """
    ids, ids_T = target_ids_W.cpu(), torch.cat([d.ids for d in documents]).long()
    counting = torch.arange(len(ids))
    follows_T = torch.cat((ids_T[2:], torch.full((2,), -1)))
    rows_T = rows_T & torch.isin(follows_T, ids)
    if not bool(rows_T.any()):
        return None
    proposed, stored, before = judged.proposed_KT[0, rows_T], follows_T[rows_T], ids_T.roll(-1)[rows_T]
    readings = {
        "d2t read as absolute ids, not as offsets": ids - counting,
        "d2t read as offsets, not as absolute ids": ids + counting,
        "every id one lower": ids - 1,
        "every id one higher": ids + 1,
        "the same ids in ascending order": ids.sort().values,
    }
    given = (ids[proposed] == stored).float()
    rights = {words: (other[proposed] == stored).float() for words, other in readings.items()}
    words = max(rights, key=lambda name: float(rights[name].mean()))
    right, by_map = rights[words], _learnt(proposed.tolist(), stored.tolist())
    learnt = float(by_map.mean()) > 1.4 * max(
        float(_learnt(before.tolist(), stored.tolist()).mean()), float(right.mean())
    )
    if learnt:
        words, right = "another map, learnt from the other rows", by_map
    more_T = torch.zeros(len(ids_T))
    more_T[rows_T] = right - given
    _, z, blocks = _mean(more_T, rows_T, documents)
    return OtherMap(words, float(right.mean()), float(given.mean()), learnt, z >= 5 and blocks >= _FEW_BLOCKS)


def _learnt(proposed: Sequence[int], stored: Sequence[int]) -> Tensor:
    """Per row, whether the token that most often followed its guess in the other rows is its own, as 0 or 1."""
    followed: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for guess, token in zip(proposed, stored, strict=True):
        followed[guess][token] += 1
    right = []
    for guess, token in zip(proposed, stored, strict=True):
        others = followed[guess] - Counter({token: 1})
        right.append(bool(others) and others.most_common(1)[0][0] == token)
    return torch.tensor(right).float()
