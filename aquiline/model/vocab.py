"""The draft's smaller vocabulary: which target ids it can propose. Absolute ids inside; offsets only in files.

Shapes: V target vocabulary, W draft vocabulary.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.config import AquilineWarning, UserError, require


@dataclass(frozen=True)
class VocabMap:
    """Draft ids to target ids and back. `draft_ids_V` is -1 where the draft has no such token."""

    target_ids_W: Tensor
    draft_ids_V: Tensor

    @staticmethod
    def of(target_ids_W: Tensor, vocab_size: int) -> "VocabMap":
        """From absolute target ids, in the draft's order. UserError unless they are unique and in the vocabulary."""
        ids = target_ids_W.long().cpu()
        require(ids.ndim == 1 and len(ids) > 0, "the draft vocabulary is empty")
        low, high = int(ids.min()), int(ids.max())
        require(low >= 0 and high < vocab_size, f"draft vocabulary: target ids {low}..{high} leave 0..{vocab_size - 1}")
        repeated = ids[torch.bincount(ids, minlength=vocab_size)[ids] > 1]
        require(
            len(repeated) == 0,
            f"draft vocabulary: target id {int(repeated[0]) if len(repeated) else 0} stands for two draft ids",
        )
        back = torch.full((vocab_size,), -1, dtype=torch.long)
        back[ids] = torch.arange(len(ids))
        return VocabMap(ids, back)

    @staticmethod
    def build(counts_V: Tensor, draft_vocab_size: int, always: tuple[int, ...] = ()) -> "VocabMap":
        """The most frequent tokens of the supervised text (ids ascending), `always` (end-of-turn ids) included.

        A corpus with fewer distinct tokens is filled up with the lowest unused ids, and says so if some are left.
        Source: EAGLE-3 paper, section 4 (draft vocabulary).
        """
        vocab_size = len(counts_V)
        require(
            len(always) <= draft_vocab_size <= vocab_size,
            f"draft vocabulary of {draft_vocab_size} must be at least {len(always)} and at most {vocab_size} (target)",
        )
        counts = counts_V.double().clone()
        if not bool(counts.any()):
            raise UserError("no token was counted: a draft vocabulary needs supervised text")
        counts[list(always)] = torch.inf
        seen = int((counts > 0).sum())
        if seen < draft_vocab_size < vocab_size:
            warnings.warn(
                f"the data has {seen} distinct tokens; "
                f"the draft vocabulary of {draft_vocab_size} is filled up with low ids",
                AquilineWarning,
                stacklevel=2,
            )
        # Stable: among equal counts (unseen tokens are all 0) the lower id comes first.
        order = torch.sort(counts, descending=True, stable=True).indices
        return VocabMap.of(order[:draft_vocab_size].sort().values, vocab_size)

    @property
    def vocab_size(self) -> int:
        return len(self.draft_ids_V)

    @property
    def draft_vocab_size(self) -> int:
        return len(self.target_ids_W)

    def coverage(self, counts_V: Tensor) -> float:
        """Share of the counted tokens that the draft can propose."""
        return float(counts_V[self.target_ids_W].sum() / counts_V.sum().clamp(min=1))

    def to(self, device: torch.device | str) -> "VocabMap":
        return VocabMap(self.target_ids_W.to(device), self.draft_ids_V.to(device))
