"""Prefixes found in the cache: who shares with whom, how much of it, who gives way, and that nothing else changes."""

import pytest

from aquiline.config import Limits, SamplingConfig, TreeConfig
from aquiline.decode.engine import Engine, Request
from tests.conftest import tiny_draft, tiny_target
from tests.test_engine import check_caches, prompt

TREE = TreeConfig(4, 4, 12)


def request(ids, limit=12, tree=TREE, **sampling):
    return Request(ids, SamplingConfig(**sampling), Limits(limit), tree)


def alone(target, draft, r):
    """What the same request gets from an engine of its own."""
    return Engine(target, draft).run([Request(r.prompt_ids, r.sampling, r.limits, r.tree)])[0]


def check_equal(target, draft, *requests):
    for r in requests:
        single = alone(target, draft, r)
        assert r.output_ids == single.output_ids
        assert r.cycle_lengths == single.cycle_lengths


def drain(engine):
    while engine.busy:
        engine.step()


@pytest.mark.parametrize("steps", [1, 3])
def test_two_requests_share_the_prefix_of_one_that_runs(steps):
    target = tiny_target()
    draft = tiny_draft(target)
    engine = Engine(target, draft, max_batch=3)
    system = prompt(30, 1)
    first = engine.submit(request([*system, *prompt(5, 2)], 30, temperature=0.9, seed=1))
    for _ in range(steps):
        engine.step()
    others = [engine.submit(request([*system, *prompt(4, seed)], 20)) for seed in (3, 4)]
    engine.step()
    assert first.finish_reason is None
    assert first.reused_tokens == 0
    assert [r.reused_tokens for r in others] == [29, 29]  # of 30
    for _, row in engine._running:
        check_caches(target, draft, engine, row)
    drain(engine)
    check_equal(target, draft, first, *others)


def test_samples_of_one_prompt_share_it_from_the_first_step_on():
    target = tiny_target()
    draft = tiny_draft(target)
    engine = Engine(target, draft, max_batch=4)
    samples = [engine.submit(request(prompt(20), temperature=1.0, seed=seed)) for seed in range(6)]
    engine.step()
    assert [r.reused_tokens for r in samples[:4]] == [0, 19, 19, 19]
    for _, row in engine._running:
        check_caches(target, draft, engine, row)
    drain(engine)
    assert [r.reused_tokens for r in samples[4:]] == [19, 19]
    check_equal(target, draft, *samples)
    assert len({tuple(r.output_ids) for r in samples}) == 6


def test_turns_of_two_conversations_find_their_own_cache():
    target = tiny_target()
    draft = tiny_draft(target)
    engine = Engine(target, draft, max_batch=2)
    system, histories = prompt(80, 1), []
    for seed in (2, 3):
        r = request([*system, *prompt(70, seed)])
        engine.run([r])
        histories.append([*r.prompt_ids, *r.output_ids])
    for turn in range(2):  # the second one's row is a copy, for the first would have lost too much
        for i in (0, 1):
            r = request([*histories[i], *prompt(3, 10 + turn)], 6)
            engine.run([r])
            assert r.reused_tokens >= len(histories[i]) - 7
            check_equal(target, draft, r)
            histories[i] = [*r.prompt_ids, *r.output_ids]


def test_who_has_not_been_of_use_for_longest_gives_way():
    target = tiny_target()
    engine = Engine(target, None, max_batch=3)

    def reused(seed):
        (r,) = engine.run([request([*prompt(70, seed), 5], 3, None)])
        return r.reused_tokens

    assert [reused(seed) for seed in (1, 2, 3)] == [0, 0, 0]
    assert reused(1) == 70
    assert reused(4) == 0  # in place of 2
    assert [reused(seed) for seed in (1, 3, 4)] == [70, 70, 70]
    assert reused(2) == 0
    engine.forget()
    assert engine.cache.lengths == [0, 0, 0]
    assert reused(2) == 0


def test_ended_rows_give_way_to_tokens_too():
    target = tiny_target()
    engine = Engine(target, tiny_draft(target), max_batch=4, cache_tokens=100)
    kept = [request(prompt(25, seed), 5) for seed in range(3)]
    for r in kept:
        engine.run([r])
    assert engine.cache.lengths == [29, 29, 29, 0]
    long = request([*prompt(25, 1), *prompt(40, 9)], 10)
    engine.run([long])
    assert long.reused_tokens == 24  # of one that would have been the next to go
    assert sum(engine.cache.lengths) <= 100
    check_equal(target, tiny_draft(target), long)


def test_a_row_that_the_draft_has_not_read_is_of_use_to_plain_requests_only():
    target = tiny_target()
    draft = tiny_draft(target)
    engine = Engine(target, draft, max_batch=3)
    engine.run([request(prompt(20), 3, None)])
    plain = engine.submit(request(prompt(20), 20, None))
    engine.step()
    drafted = engine.submit(request(prompt(20), 20))
    drain(engine)
    assert plain.reused_tokens == 19
    assert drafted.reused_tokens == 0
    check_equal(target, draft, plain, drafted)


def test_a_request_that_is_cancelled_leaves_what_it_has_and_one_that_failed_leaves_nothing():
    target = tiny_target()
    draft = tiny_draft(target)
    engine = Engine(target, draft, max_batch=2)
    left = engine.submit(request(prompt(20), 50))
    engine.step()
    engine.step()
    engine.cancel(left)
    after = request(prompt(20))
    engine.run([after])
    assert after.reused_tokens == 19
    check_equal(target, draft, after)
    keep, engine.cache.keep = engine.cache.keep, lambda *_: 1 / 0
    engine.submit(request(prompt(20)))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.cache.keep = keep
    assert engine.cache.lengths == engine.drafter.cache.lengths == [0, 0]
    assert not engine.busy
    again = request(prompt(20))
    engine.run([again])
    check_equal(target, draft, again)


def test_a_row_that_was_copied_from_has_been_of_use():
    target = tiny_target()
    engine = Engine(target, None, max_batch=3)
    x, y, z = [*prompt(80, 1), *prompt(70, 2)], prompt(70, 3), [*prompt(80, 1), *prompt(70, 4)]
    requests = [request([*ids, 5], 3, None) for ids in (x, y, z, prompt(70, 5), x, y)]
    for r in requests:
        engine.run([r])
    assert [r.reused_tokens for r in requests] == [0, 0, 79, 0, 150, 0]  # the fourth took the place of y
