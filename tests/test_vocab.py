"""The draft vocabulary: built from counts, validated, and said aloud when the corpus is small."""

import warnings

import pytest
import torch

from aquiline.config import AquilineWarning, UserError
from aquiline.model.vocab import VocabMap


def test_most_frequent_tokens_in_ascending_order_with_the_ones_always_needed():
    counts = torch.tensor([0, 5, 9, 0, 7, 1, 0, 2])
    vocab = VocabMap.build(counts, 4, always=(6,))
    assert vocab.target_ids_W.tolist() == [1, 2, 4, 6]
    assert vocab.draft_ids_V.tolist() == [-1, 0, 1, -1, 2, -1, 3, -1]
    assert vocab.coverage(counts) == pytest.approx(21 / 24)


def test_a_small_corpus_is_filled_up_and_says_so():
    counts = torch.zeros(64, dtype=torch.long)
    counts[40:50] = 3
    with pytest.warns(AquilineWarning, match="10 distinct tokens"):
        vocab = VocabMap.build(counts, 32)
    assert vocab.draft_vocab_size == 32
    assert set(range(40, 50)) <= set(vocab.target_ids_W.tolist())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left out
        assert VocabMap.build(counts, 64).draft_vocab_size == 64


def test_impossible_maps_are_refused():
    with pytest.raises(UserError, match="two draft ids"):
        VocabMap.of(torch.tensor([1, 3, 3]), 8)
    with pytest.raises(UserError, match=r"0\.\.7"):
        VocabMap.of(torch.tensor([1, 8]), 8)
    with pytest.raises(UserError, match="at most 8"):
        VocabMap.build(torch.ones(8), 9)
    with pytest.raises(UserError, match="no token was counted"):
        VocabMap.build(torch.zeros(8), 4)
