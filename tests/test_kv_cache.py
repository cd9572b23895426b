"""The cache: whatever rows grow, shrink, end and are copied, each reads what it was given, within the room there is."""

import random

import pytest
import torch

from aquiline.model.kv_cache import KVCache


def made(slots=4, capacity=40, tokens=None):
    return KVCache(2, slots, capacity, 3, 4, tokens=tokens)


def some(count, seed=0):
    """Keys and values [L, G, N, E] of a pass."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, count, 4, generator=generator) for _ in range(2)]


def check(cache, rows, slots):
    """`rows`: the keys and values that each slot should hold."""
    longest = max(rows[s][0].shape[2] for s in slots)
    for which, read in enumerate(cache.read(slots)):
        assert read.shape == (2, len(slots), 3, longest, 4)
        for b, slot in enumerate(slots):
            n = rows[slot][which].shape[2]
            assert torch.equal(read[:, b, :, :n], rows[slot][which])
            assert not read[:, b, :, n:].any()


@pytest.mark.parametrize("tokens", [None, 60])
@pytest.mark.parametrize("seed", range(3))
def test_rows_keep_what_they_were_given(tokens, seed, monkeypatch):
    monkeypatch.setattr("aquiline.model.kv_cache._FIRST", 8)
    cache, dice = made(tokens=tokens), random.Random(seed)
    rows = {slot: [torch.empty(2, 3, 0, 4) for _ in range(2)] for slot in range(4)}
    fullest = 0
    for step in range(400):
        slot = dice.randrange(4)
        length = rows[slot][0].shape[2]
        free = cache.tokens - sum(cache.lengths)
        if dice.random() < 0.7 and min(40 - length, free) > 0:
            given, index = some(9, step), dice.sample(range(9), min(dice.randrange(1, 9), 40 - length, free))
            cache.keep(slot, *(x if index is None else x[:, :, index] for x in given))
            rows[slot] = [torch.cat((a, b[:, :, index]), 2) for a, b in zip(rows[slot], given, strict=True)]
        elif length == 0:
            source = dice.randrange(4)
            length = min(dice.randrange(1 + rows[source][0].shape[2]), free)
            cache.copy(source, slot, length)
            rows[slot] = [x[:, :, :length] for x in rows[source]]
        else:
            length = dice.choice([0, dice.randrange(length + 1)])
            cache.truncate(slot, length)
            rows[slot] = [x[:, :, :length] for x in rows[slot]]
        assert cache.lengths == [rows[s][0].shape[2] for s in range(4)]
        assert cache.keys_LGSE.shape == cache.values_LGSE.shape
        assert cache.keys_LGSE.shape[2] <= cache.tokens
        fullest = max(fullest, sum(cache.lengths))
        for slots in ([0], [2], [0, 1, 2, 3], [3, 1]):
            check(cache, rows, slots)
    assert fullest > 0.9 * min(cache.tokens, 100)


def test_what_is_not_a_number_stays_in_its_row():
    cache = made()
    nan = [torch.full_like(x, torch.nan) for x in some(20)]
    cache.keep(0, *nan)
    cache.truncate(0, 0)
    rows = {1: some(3), 2: some(7)}
    for slot, row in rows.items():
        cache.keep(slot, *row)
    cache.keep(0, *nan)
    check(cache, rows, [1, 2])
    check(cache, rows | {3: [x[:, :, :0] for x in rows[1]]}, [1, 3])  # an empty row beside another


def test_memory_goes_by_the_tokens_kept():
    cache = made(slots=8, capacity=4000)
    assert cache.keys_LGSE.shape[2] == 1024
    long = some(1400)
    cache.keep(1, *long)
    assert cache.keys_LGSE.shape[2] == 2048
    for slot in (0, *range(2, 8)):
        cache.keep(slot, *some(10))  # beside a long one they take no more than they need
    assert cache.keys_LGSE.shape[2] == 2048
    check(cache, {1: long}, [1])


def test_rows_are_rarely_laid_out_anew(monkeypatch):
    layouts = []
    lay_out = KVCache._lay_out
    monkeypatch.setattr(KVCache, "_lay_out", lambda self, lengths: layouts.append(1) or lay_out(self, lengths))
    cache = made(slots=8, capacity=1000)
    for step in range(1000):
        for slot in range(8):
            cache.keep(slot, *some(1, step))
            if cache.lengths[slot] == 1000 - 130 * slot:
                cache.truncate(slot, 0)  # and it begins anew
    assert len(layouts) < 6


def test_no_more_than_there_is_room_for():
    cache = made(slots=2, capacity=10, tokens=15)
    with pytest.raises(AssertionError, match="a row of 11 tokens in a cache of 10"):
        cache.keep(0, *some(11))
    cache.keep(0, *some(8))
    with pytest.raises(AssertionError, match="16 tokens in a cache of 15"):
        cache.keep(1, *some(8))
    cache.keep(1, *some(7))
