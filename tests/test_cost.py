"""Costs of passes, chances of nodes, and the choice that rests on both."""

import itertools
import json

import numpy as np
import pytest
import torch

from aquiline.config import AUTO_TREE, SamplingConfig, TreeConfig
from aquiline.decode import cost
from aquiline.decode.cost import Calibration, Chooser, Costs, Mood, PassCosts, best_nodes, costs_file, probe
from aquiline.decode.engine import Engine, Limits, Request
from aquiline.decode.tree import Tree
from tests.conftest import tiny_draft, tiny_target


class Load:
    """Of others, as the test says."""

    def __init__(self, answer):
        self.answer = answer

    def lately(self):
        return self.answer


def costs(target, level, load=False):
    made = Costs(None, {}, Load(load))
    for kind, points in zip(cost.KINDS, (target, level, level), strict=True):
        for batch in (1, 2, 4):
            made._costs[kind, batch, 256] = PassCosts(points, plain=kind == "target")
    made._trusted = set(made._costs)
    return made


CHEAP = ({1: 1.0, 64: 1.4}, {1: 0.05, 8: 0.05})
TREE = TreeConfig(3, 3, 8)
DEAR = ({1: 1.0, 64: 64.0}, {1: 0.5, 8: 1.0})


class TestPassCosts:
    def test_between_points_and_beyond_them(self):
        made = PassCosts({1: 1.0, 3: 2.0, 5: 1.9, 7: 2.9})
        assert [made(n) for n in (1, 2, 3, 4, 5)] == [1.0, 1.5, 2.0, 2.0, 2.0]  # never falling
        assert made(10) == pytest.approx(2.9 + 3 * 0.5)  # by the last slope
        assert made(1000) == made(64)
        assert PassCosts({1: 1.0})(9) == 1.0
        assert len(made.table()) == 2 + cost.MOST_NODES

    def test_readings_move_the_points_around_them(self):
        made = PassCosts({1: 1.0, 2: 2.0, 4: 4.0}, plain=True)
        for _ in range(400):
            made.observe(3, 2.0)
        assert made(3) == pytest.approx(2.0, abs=0.01)
        assert made.points()[2] < 1.5
        assert made(1) == 1.0  # the plain step goes with none
        made.observe(1, 0.8)
        assert made(1) == pytest.approx(1.0 - 0.4 * 0.2)  # it was seldom read
        four = made(4)
        for _ in range(400):
            made.observe(1, 0.5)
        assert made(1) == pytest.approx(0.5, abs=0.01)
        assert 0.5 < made(4) / four < 0.9  # all go with it a little

    def test_a_few_rows_with_a_node_do_not_tell_what_a_plain_step_takes(self):
        made = PassCosts({1: 1.0, 2: 2.0}, plain=True)
        made.observe(1.25, 2.0)
        assert made(1) == 1.0
        assert made.points()[2] > 2.0

    def test_a_reading_far_off_moves_little_and_one_beyond_makes_a_point(self):
        made = PassCosts({1: 1.0, 2: 2.0}, plain=True)
        made.observe(1, 1000.0)
        assert made.points() == pytest.approx({1: 1.04, 2: 2.02})
        made.observe(8, 2.6)
        assert made.points() == pytest.approx({1: 1.04, 2: 2.02, 8: 2.6})

    def test_a_point_below_a_lower_ones_stays_what_is_read_there(self):
        made = PassCosts({1: 3.0, 2: 2.0, 4: 4.0}, plain=True)
        for _ in range(1000):
            made.observe(2, 2.0)
        assert made.points() == pytest.approx({1: 3.0, 2: 2.0, 4: 4.0})
        assert made(2) == 3.0

    def test_readings_near_nothing_leave_no_point_below_it(self):
        made = PassCosts({1: 1.0, 4: 4.0}, plain=True)
        for _ in range(300):
            made.observe(3.5, 0.1)  # less than its share of the plain step, which it does not move
        assert made.points()[1] == 1.0
        assert 0 < made.points()[4] < 0.01
        for _ in range(200):
            made.observe(3.5, 3.5)
        assert made(4) == pytest.approx(4.0, rel=0.05)

    def test_a_reading_moves_the_point_that_is_seldom_read_more(self):
        made = PassCosts({2: 1.0, 4: 1.0})
        for _ in range(100):
            made.observe(2, 1.0)
        made.observe(3, 1.1)
        drift, step = 1 + cost._DRIFT * 0.1, 0.1 / 2
        assert made.points() == pytest.approx(
            {2: drift + step * (cost._STEP - cost._DRIFT), 4: drift + step * (0.4 - cost._DRIFT)}
        )
        before = made.points()[4]
        made.observe(3, made(3))
        assert made.points()[4] == before
        made.observe(4, 1.1 * before)  # read lately: half of the reading before was its
        assert made.points()[4] == pytest.approx(before * (1 + cost._STEP * 0.1))

    def test_where_the_least_tokens_are_no_plain_step_they_go_with_the_others(self):
        made = PassCosts({1: 1.0, 4: 1.0})
        for _ in range(400):
            made.observe(2, 2.0)
        assert made.points()[1] > 1.5
        assert made.points()[1] * 2 / 3 + made.points()[4] / 3 == pytest.approx(2.0, abs=0.01)


@pytest.fixture
def clock(monkeypatch):
    """Of `perf_counter`; `run(n)` takes what `seconds` says."""
    now, ran = [0.0], []
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])

    def run(n):
        ran.append(n)
        now[0] += run.seconds(n)

    run.ran = ran
    return run


def test_a_probe_measures_the_plain_pass_and_one_more_however_slow_and_others_in_time(clock):
    clock.seconds = lambda n: 0.7 + 0.01 * n
    assert probe(clock, (1, 8, 2, 32), 1, until=2.5) == pytest.approx({1: 0.71, 8: 0.78})
    assert clock.ran == [1, 1, 8]
    clock.ran.clear()
    clock.seconds = lambda n: 0.01 * n
    found = probe(clock, (1, 8, 2, 32), 1, until=100)
    assert found == pytest.approx({1: 0.01, 8: 0.08, 2: 0.02, 32: 0.32})
    assert clock.ran == [1, 1, 1, 8, 8, 2, 2, 32]  # a slow pass is run once
    assert set(probe(clock, (1, 8, 2, 32), 64, until=1000)) == {1, 8, 2}  # 32 of each of 64 rows are too many


class TestCosts:
    def test_a_batch_that_shrinks_does_not_tell_what_the_whole_of_it_takes(self):
        made = costs(*CHEAP)
        assert [made.known(n) for n in (2, 3, 4, 5)] == [True, True, True, False]
        eight = made.of("target", 8, 10)
        assert eight is not made.of("target", 5, 10)
        assert (made.of("target", 9, 10), made.of("target", 17, 10)) == (
            made.of("target", 10, 10), made.of("target", 20, 10)
        )  # fmt: skip
        made.observe(made.of("target", 5, 10), 1, 0.5)
        assert (eight(1), made.of("target", 5, 10)(1) < 1) == (1.0, True)

    def test_are_kept_with_what_they_depend_on(self, tmp_path):
        depends = {"cpu": "a"}
        file = costs_file(tmp_path, depends)
        made = Costs(file, depends, Load(False))
        assert not made.known(1)
        made.probe(3, 300, lambda n: None, lambda n: None)
        again = Costs(file, depends, Load(False))
        assert again.known(4)  # to the next power of two
        assert not again.known(1)
        assert again.of("level", 3, 300).points() == made.of("level", 3, 300).points()
        assert not Costs(file, {"cpu": "b"}, Load(False)).known(4)
        assert costs_file(tmp_path, {"cpu": "b"}) != file
        assert costs_file(None, depends) is None

    def test_what_was_copied_is_forgotten_where_it_is_measured(self, tmp_path):
        made = Costs(costs_file(tmp_path, {}), {}, Load(False))
        made.probe(8, 1, lambda n: None, lambda n: None)
        made.of("first", 3, 1)  # of rows that draft among eight
        made.of("first", 8, 1000)
        made.probe(4, 1, lambda n: None, lambda n: None)
        made.save()
        again = Costs(costs_file(tmp_path, {}), {}, Load(False))
        assert {(kind, size) for kind, size, _ in again._costs} == {(k, n) for k in cost.KINDS for n in (4, 8)}
        assert ("first", 8, 1024) in again._costs

    def test_what_is_copied_from_other_sizes_is_no_measurement(self):
        made = Costs(None, {}, Load(False))
        made.probe(4, 1, lambda n: None, lambda n: None)
        assert made.of("target", 5, 1).points() == made.of("target", 4, 1).points()
        made._retries[8] = (0.0, 1.0)
        assert not made.known(5)
        made._load.answer = True
        made.probe(8, 1, lambda n: None, lambda n: None)
        assert made.of("target", 5, 1).points() == made.of("target", 8, 1).points()  # though 4 is nearer
        made._retries[8] = (0.0, 1.0)
        assert not made.known(5)

    def test_what_was_measured_under_load_is_not_kept(self, tmp_path):
        file = costs_file(tmp_path, {})
        made = Costs(file, {}, Load(True))
        made.probe(1, 1, lambda n: None, lambda n: None)
        assert made.known(1)
        assert not file.exists()
        at = made.of("target", 1, 1)
        before = at(1)
        made.observe(at, 1, before + 1)
        assert at(1) == before
        made._load.answer = None  # too soon to tell: it waits
        made.observe(at, 1, before + 1)
        assert at(1) == before
        made._load.answer = False
        made.observe(at, 1, before + 1)
        assert at(1) > before
        made.save()
        assert not file.exists()  # readings do not make up for what was measured badly
        made.probe(1, 1, lambda n: None, lambda n: None)
        assert file.exists()

    def test_what_was_measured_under_load_is_measured_again_ever_more_rarely(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(cost.time, "monotonic", lambda: now[0])
        made, waits = Costs(None, {}, Load(True)), []
        for _ in range(4):
            made.probe(1, 1, lambda n: None, lambda n: None)
            waits.append(0)
            while made.known(1):
                now[0] += 1
                waits[-1] += 1
        assert waits == [10, 20, 40, 80]
        made.of("target", 1, 5000).observe(1, 9.0)  # a copy of what is not trusted
        made._load.answer = False
        made.probe(1, 1, lambda n: None, lambda n: None)
        now[0] += 1e6
        assert made.known(1)
        assert made.of("target", 1, 5000).points() == made.of("target", 1, 1).points()

    def test_two_processes_keep_each_others(self, tmp_path):
        file = costs_file(tmp_path, {})
        one, two = Costs(file, {}, Load(False)), Costs(file, {}, Load(False))
        one.probe(1, 1, lambda n: None, lambda n: None)
        two.probe(8, 1, lambda n: None, lambda n: None)
        again = Costs(file, {}, Load(False))
        assert again.known(1)
        assert again.known(8)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            '{"depends": {}, "seconds": {"target 1": {"1": 1}}}',
            '{"depends": {}, "seconds": {"target 1 256": {}}}',
            '{"depends": {}, "seconds": {"target 1 256": {"1": -1}}}',
            '{"depends": {}, "seconds": {"target 1 256": {"1": 1}}}',  # without the draft's
            '{"depends": {}, "seconds": {"target 1 0": {"1": 1}, "first 1 0": {"1": 1}, "level 1 0": {"1": 1}}}',
        ],
    )
    def test_a_file_that_does_not_hold_them_is_no_file(self, tmp_path, text):
        file = costs_file(tmp_path, {})
        file.write_text(text)
        assert not Costs(file, {}, Load(False)).known(1)

    def test_a_folder_that_cannot_be_written_is_no_error(self, tmp_path):
        made = Costs(tmp_path / "missing" / "costs.json", {}, Load(False))
        made.probe(1, 1, lambda n: None, lambda n: None)
        assert made.known(1)

    def test_another_context_starts_as_the_nearest_known(self):
        made = Costs(None, {}, Load(False))
        for context, seconds in ((256, 1.0), (2048, 5.0)):
            made._costs["target", 1, context] = PassCosts({1: seconds}, plain=True)
        assert made.of("target", 1, 257)(1) == 1.0  # the bucket of 512
        assert made.of("target", 1, 1500)(1) == 5.0
        assert made.of("target", 8, 300)(1) == 1.0  # nor of another batch size than those known
        made.of("target", 1, 257).observe(1, 2.0)
        assert made.of("target", 1, 100)(1) == 1.0  # a copy


def test_as_many_nodes_as_pay_among_all_numbers_of_them():
    generator = np.random.default_rng(0)
    for _ in range(200):
        rows, extra, made = generator.integers(1, 4), generator.integers(0, 3), generator.integers(1, 12)
        chances = -np.sort(-generator.random((rows, made)), axis=1)
        seconds = np.maximum.accumulate(np.repeat(generator.random(5), 3)[:14] + 0.1)  # stepped
        spent = generator.random()
        rates = [
            (rows + extra + chances[:, :n].sum()) / (spent + seconds[n]) for n in range(min(made, len(seconds) - 1) + 1)
        ]
        nodes, rate = best_nodes(chances, seconds, spent, rows + extra, False)
        assert rate == pytest.approx(max(rates))
        assert rates[max(nodes)] == pytest.approx(max(rates))
        assert len(set(nodes)) == 1
    assert best_nodes(np.array([[0.01]]), np.array([1.0, 1.5]), 0.0, 1, False)[0] == [0]


def test_nodes_of_all_rows_compete_where_padding_is_not_computed():
    generator = np.random.default_rng(1)
    for _ in range(200):
        sizes = generator.integers(0, 4, generator.integers(2, 4))
        chances = [(-np.sort(-generator.random(n))).tolist() for n in sizes]
        seconds, spent = np.maximum.accumulate(generator.random(1 + sum(sizes)) + 0.1), generator.random()
        rates = {
            counts: (len(sizes) + sum(sum(row[:n]) for row, n in zip(chances, counts, strict=True)))
            / (spent + seconds[sum(counts)])
            for counts in itertools.product(*(range(n + 1) for n in sizes))
        }
        nodes, rate = best_nodes(chances, seconds, spent, len(sizes), True)
        assert rate == pytest.approx(max(rates.values()))
        assert rates[tuple(nodes)] == pytest.approx(rate)
    # A node is not taken without those before it, of which its parent may be one.
    assert best_nodes([[0.1, 0.9], [0.5]], [1.0, 1.1, 9.0, 9.0], 0.0, 2, True)[0] == [0, 1]
    assert best_nodes([[0.1, 0.9], [0.5]], [1.0, 1.1, 1.2, 1.3], 0.0, 2, True)[0] == [2, 1]


class TestCalibration:
    def test_begins_a_little_below_the_drafts_own(self):
        assert Calibration().chances([1, 1], np.log([0.5, 0.05])) == pytest.approx([0.45, 0.045])

    def test_learns_by_depth_and_probability(self):
        made = Calibration()
        generator = np.random.default_rng(0)
        for _ in range(3000):
            made.fade()
            accepted = generator.random(3) < [0.25, 0.1, 0.5]
            made.learn([1, 1, 2], np.log([0.5, 0.05, 0.5]), accepted.nonzero()[0])
        assert made.chances([1, 1], np.log([0.5, 0.05])) == pytest.approx([0.25, 0.1], rel=0.2)
        assert made.chances([2, 3], np.log([0.5, 0.5])) == pytest.approx([0.5, 0.45], rel=0.2)
        assert made.chances([9, 9], [0.0, -np.inf]) == [0.9, 0.0]
        for _ in range(200):
            made.learn([4], [0.0], [0])
            made.learn([4], np.log([0.97]), [0])
        assert made.chances([4], [0.0]) == [1.0]

    def test_of_a_verified_tree_all_nodes_are_judged(self):
        made = Chooser(costs(*CHEAP))
        #        root -> 0 (accepted) -> 2 (not), root -> 1 (not) -> 3 (not)
        tree = Tree.from_tokens([7, 8, 9, 9], [-1, -1, 0, 1], np.log([0.5, 0.4, 0.25, 0.2]).tolist())
        mood = Mood()
        made.learn(tree, [0], mood)
        assert mood.accepted == 1
        assert mood.expected == pytest.approx(0.9 * 1.35)
        assert [sum(row) for row in made.calibration._expected[:3]] == pytest.approx([0.9, 0.45, 0.0])
        assert [sum(row) for row in made.calibration._accepted[:3]] == [1.0, 0.0, 0.0]


class TestMood:
    def test_a_draft_that_is_not_accepted_is_trusted_less_within_a_few_cycles_and_more_again(self):
        mood = Mood()
        for _ in range(6):
            mood.judged(1.0, 0)
        assert mood.trust < 0.4
        for _ in range(10):
            mood.judged(1.0, 1)
        assert mood.trust > 0.7

    def test_it_rests_twice_as_long_each_time_and_not_once_trees_pay(self):
        mood, rests = Mood(), []
        for _ in range(8):
            mood.drafted(1.0, 2.0, 0)
            rests.append(0)
            while mood.rests():
                rests[-1] += 1
            assert mood.trying
        assert rests == [4, 8, 16, 32, 64, 64, 64, 64]
        mood.drafted(1.5, 1.0, 3)  # a try that pays ends it
        assert not mood.rests()
        mood.drafted(0.9, 1.0, 3)
        assert not mood.rests()  # one poor cycle among good ones
        mood.drafted(0.9, 3.0, 1)  # one that costs thrice what it brings is enough
        assert mood.resting == 4

    def test_what_was_accepted_ends_a_rest_that_was_expected_to_be_needed(self):
        mood = Mood()
        mood.drafted(1.1, 1.5, 2)
        assert mood.resting == 4
        mood.judged(0.1, 2)
        assert mood.resting == 0
        mood.drafted(1.1, 1.5, 2)
        mood.judged(0.1, 0)
        assert mood.resting == 4

    def test_a_tree_without_nodes_has_failed_whatever_it_cost(self):
        mood = Mood()
        mood.drafted(1.0, 1.0, 0)
        assert mood.rests()

    def test_resting_it_forgets(self):
        mood = Mood()
        for _ in range(6):
            mood.judged(1.0, 0)
        assert mood.trust < 0.4
        mood.resting = 64
        while mood.rests():
            mood.forget()
        assert mood.trust > 0.75


class TestChooser:
    def test_a_level_is_worth_its_price_in_tokens_over_what_it_brings(self):
        made, mood = Chooser(costs(*CHEAP)), Mood(trees=1)
        made.gains[4] = [0.5, 0.1, *[0.5] * 6]

        def worth():
            return made.worth(mood, 0.2, 0.05, 3, 1.0)[:3]  # of single nodes, of the first two levels

        assert worth() == pytest.approx([0.05, 0.4, 2.0])
        mood.pace = 3.0
        assert worth() == pytest.approx([0.15, 1.2, 6.0])
        mood.expected = 2.0  # a text that is not trusted
        assert worth() == pytest.approx([0.3, 2.4, 12.0])
        assert made.worth(mood, 0.2, 0.05, 1, 1.0)[:3] == pytest.approx([0.3, 2.4, 2.4])  # gains of another batch size
        assert made.worth(mood, 0.2, 9.0, 1, 1.0)[0] == 0.9
        mood.trees = 32  # one that may look far
        assert made.worth(mood, 0.2, 9.0, 1, 1.0)[0] == 0.0

    def test_what_one_node_more_takes(self):
        known = costs({1: 1.0, 9: 2.6, 64: 2.6}, {1: 0.1})
        padded, ragged = Chooser(known), Chooser(known, ragged=True)

        def margin(made, batch, nodes, taken=()):
            return made.margin(made.pass_seconds(batch, 10, taken, 40), batch, Mood(nodes=nodes))

        assert margin(padded, 1, 3.2) == pytest.approx(0.2)
        assert margin(padded, 1, 20) == pytest.approx(0.0)
        assert margin(padded, 4, 3.2) == pytest.approx(0.05)  # a node in each row
        assert margin(ragged, 4, 3.2) == pytest.approx(0.05)
        assert margin(ragged, 4, 3.2, [32, 0, 0, 0]) == pytest.approx(0.0)
        assert margin(padded, 1, 63) == pytest.approx(0.0)  # as many as are known of

    def test_what_a_level_brings_is_learnt_and_forgotten(self):
        made, V = Chooser(costs(*CHEAP)), np.ones(9)
        #                        root -> 0 -> 1, root -> 2 -> 3
        tree = Tree.from_tokens([7, 8, 9, 9], [-1, 0, -1, 2], np.log([0.5, 0.25, 0.2, 0.1]).tolist())
        for _ in range(300):
            assert made.nodes([tree], 2, V, 0.0, 1, [Mood()]) == [4]
        gains = made.gains[1]
        assert gains[:2] == pytest.approx([0.9 * (0.25 + 0.1) / 0.7, 0.5], abs=0.01)
        for _ in range(300):  # room for two: without the level 0 and 2, with it 0 and 1
            assert made.nodes([tree], 2, np.array([1, 1, 1, 9, 9.0]), 0.0, 1, [Mood()]) == [2]
        assert gains[0] == pytest.approx(0.9 * (0.25 - 0.2) / 0.7, abs=0.01)
        shallow = Tree.from_tokens([7], [-1], [-0.7])
        for _ in range(300):  # it was run, and nothing of it was good enough for the tree
            made.nodes([shallow], 2, V, 0.0, 1, [Mood()])
        assert gains[0] == pytest.approx(0.0, abs=0.01)
        for _ in range(5000):
            made.fade()
        assert gains[0] == pytest.approx(0.5, abs=0.01)

    def test_seconds_of_a_pass_by_nodes_of_each_row_or_of_all(self):
        known = costs({1: 1.0, 3: 2.0}, {1: 0.1})
        padded, ragged = Chooser(known), Chooser(known, ragged=True)
        assert padded.pass_seconds(4, 10, (), 2) == [1.0, 1.5, 2.0]
        assert padded.pass_seconds(4, 10, [1, 0, 0, 0], 2) == [1.5, 1.5, 2.0]  # beside a tree of one node
        assert ragged.pass_seconds(4, 10, (), 8) == pytest.approx([1 + n / 8 for n in range(9)])
        assert ragged.pass_seconds(4, 10, [3, 0, 0, 0], 1) == pytest.approx([1.375, 1.5])
        assert ragged.pass_seconds(1, 10, (), 2) == [1.0, 1.5, 2.0]

    def test_behind_a_rest_a_node_is_tried(self):
        made, mood, tree = Chooser(costs(*CHEAP)), Mood(), Tree.from_tokens([7], [-1], [-1.0])
        assert made.nodes([tree], 1, [1.0, 9.0, 9.0, 9.0], 0.0, 1, [mood]) == [0]
        mood.trying = True
        assert made.nodes([tree], 1, [1.0, 9.0, 9.0, 9.0], 0.0, 1, [mood]) == [1]

    def test_limits_follow_what_paid(self):
        made, mood = Chooser(costs(*CHEAP)), Mood(nodes=1.0)

        def limits(config=AUTO_TREE):
            return made.limits(config, mood, 1, 10)

        assert limits() == TreeConfig(8, 4, 8, auto=True)
        mood.nodes = 7.5
        assert limits() == TreeConfig(8, 4, 16, auto=True)
        mood.nodes = 50
        assert limits() == TreeConfig(8, 8, 63, auto=True)
        mood.nodes = 1.0
        sizes = [limits(TreeConfig(12, 16, 40, auto=True)) for _ in range(64)]
        assert sizes.count(TreeConfig(8, 8, 40, auto=True)) == 2  # deeper than what is learnt of levels it never goes
        assert sizes.count(TreeConfig(8, 4, 8, auto=True)) == 62
        dear = Chooser(costs({1: 1.0, 2: 1.5, 4: 2.1, 64: 60.0}, {1: 0.1}))
        sizes = [dear.limits(AUTO_TREE, mood, 1, 10) for _ in range(32)]
        assert set(sizes) == {TreeConfig(4, 2, 4, auto=True)}  # 3 tokens take less than 2 plain steps


def ready(engine, points, load=False):
    """The engine with given costs, which no reading moves."""
    engine.chooser = Chooser(costs(*points, load=load))
    engine.chooser.costs.observe = lambda *_: None
    return engine


def request(ids, tree=AUTO_TREE, tokens=24, **sampling):
    return Request(ids, SamplingConfig(**sampling), Limits(tokens), tree)


@pytest.mark.parametrize("points", [CHEAP, DEAR])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["head", "ngram"])
def test_the_text_is_the_same_whatever_tree_is_chosen(points, temperature, draft):
    target = tiny_target()
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 9, 8, 7], [11]]
    plain = [
        r.output_ids for r in Engine(target, None, 3).run([request(p, None, temperature=temperature) for p in prompts])
    ]
    engine = ready(Engine(target, tiny_draft(target) if draft == "head" else draft, 3), points)
    mixed = [AUTO_TREE, AUTO_TREE, TreeConfig(2, 2, 4)]
    done = engine.run([request(p, t, temperature=temperature) for p, t in zip(prompts, mixed, strict=True)])
    assert [r.output_ids for r in done] == plain
    if points is CHEAP and draft == "head":
        assert done[0].drafted_nodes > 0


@pytest.mark.parametrize("batch", [1, 4])
def test_rows_near_their_end_or_beside_others_do_not_disturb_a_batch(batch):
    target = tiny_target()
    draft = tiny_draft(target, draft_vocab_size=5)  # fewer than the children a node is given
    slopes = ({1: 1.0, 64: 1.1}, {1: 0.01, 2: 0.02, 4: 0.2, 8: 0.9})
    engine = ready(Engine(target, draft, batch), slopes)
    limits = [6, 24, 9, 17, 2, 30]
    prompts = [[5, 6, 7 + i] for i in range(len(limits))]
    trees = [AUTO_TREE, AUTO_TREE, TreeConfig(3, 2, 5), AUTO_TREE, AUTO_TREE, None]
    plain = [
        r.output_ids for r in Engine(target).run([request(p, None, n) for p, n in zip(prompts, limits, strict=True)])
    ]
    done = engine.run([request(p, t, n) for p, t, n in zip(prompts, trees, limits, strict=True)])
    assert [r.output_ids for r in done] == plain
    assert [len(r.output_ids) for r in done] == limits
    assert sum(r.trees.total() for r in done) > 0


def test_a_draft_that_is_never_right_is_asked_ever_more_rarely():
    target = tiny_target()
    draft = tiny_draft(target)
    with torch.no_grad():
        draft.lm_head.weight.zero_()
    engine = ready(Engine(target, draft), ({1: 1.0, 64: 1.9}, {1: 0.1, 8: 0.1}))
    calls = itertools.count()
    grow = engine.drafter.grow
    engine.drafter.grow = lambda *given: (next(calls) and None) or grow(*given)
    (done,) = engine.run([request([5, 6, 7], tokens=100)])
    assert len(done.output_ids) == 100
    assert next(calls) <= 6  # of 99 steps


def test_text_that_repeats_nothing_lets_rows_of_a_batch_rest():
    target = tiny_target()
    engine = ready(Engine(target, "ngram", 2), ({1: 1.0, 64: 64.0}, {1: 0.1}))
    looked = itertools.count()
    lookup = engine.drafter._lookup
    engine.drafter._lookup = lambda *given: (next(looked) and None) or lookup(*given)
    done = engine.run([request([5, 6, 7 + i, 5, 6, 7 + i, 5], tokens=100) for i in range(2)])
    assert [len(r.output_ids) for r in done] == [100] * 2
    assert next(looked) < 100  # of 198


def test_a_batch_rests_as_a_whole():
    target = tiny_target()
    draft = tiny_draft(target)
    with torch.no_grad():
        draft.lm_head.weight.zero_()
    engine = ready(Engine(target, draft, 4), ({1: 1.0, 64: 1.9}, {1: 0.1, 8: 0.1}))
    grow, widths = engine.drafter.grow, []
    engine.drafter.grow = lambda rows, *given: widths.append(len(rows)) or grow(rows, *given)
    done = engine.run([request([5, 6, 7 + i], tokens=100) for i in range(4)])
    assert [len(r.output_ids) for r in done] == [100] * 4
    assert set(widths) == {1}  # one tries for all
    assert len(widths) <= 6  # of 99 steps


def test_when_one_has_tried_for_all_and_it_pays_all_draft_again():
    target = tiny_target()
    engine = ready(Engine(target, tiny_draft(target), 4), CHEAP)
    resting = engine.chooser.resting(Mood(), 4)
    resting.resting, resting.value = 3, -1.0
    engine.drafter._guesses = lambda row, start, hidden_NH: row.known[start + 2 :][: len(hidden_NH)]  # all of it
    grow, widths = engine.drafter.grow, []
    engine.drafter.grow = lambda rows, *given: widths.append(len(rows)) or grow(rows, *given)
    for i in range(4):
        engine.submit(request([5, 6, 7 + i], tokens=30))
    assert [widths[:] for _ in range(5) if engine.step()] == [[], [], [], [1], [1, 4]]


def test_a_try_where_nodes_compete_verifies_several_and_is_a_reading_of_such_a_pass():
    target = tiny_target()
    engine = ready(Engine(target, tiny_draft(target), 3), DEAR)
    engine.chooser.ragged = True
    read = []
    engine.chooser.costs.observe = lambda costs, tokens, seconds: read.append(tokens)
    done = engine.run([request([5, 6, 7 + i], tokens=60) for i in range(3)])
    sizes = {nodes for r in done for _, nodes in r.trees if nodes}
    assert sizes == {8}
    assert set(read) == {1, 1 + 8}


def test_rows_take_turns_in_trying_for_a_batch():
    target = tiny_target()
    engine = ready(Engine(target, tiny_draft(target), 3), DEAR)
    whole = engine.chooser.resting(Mood(), 3)
    whole.rest = whole.longest_rest = 40
    grow, tried = engine.drafter.grow, []
    engine.drafter.grow = lambda rows, *given: tried.extend(row.slot for row in rows) or grow(rows, *given)
    engine.run([request([5, 6, 7 + i], tokens=400) for i in range(3)])
    assert len(tried) >= 5
    assert max(map(tried.count, range(3))) - min(map(tried.count, range(3))) == 1


def test_a_pass_is_priced_as_one_of_all_rows_is_whoever_drafts():
    target = tiny_target()
    engine = ready(Engine(target, tiny_draft(target), 2), DEAR)
    of, asked = engine.chooser.costs.of, []
    engine.chooser.costs.of = lambda kind, batch, context: asked.append((kind, context)) or of(kind, batch, context)
    engine.run([request([5, 6, 7], tokens=20), request(list(range(40)) * 2, None, 20)])
    assert min(context for kind, context in asked if kind == "target") >= 23
    assert {context > 80 for kind, context in asked if kind == "target"} == {True}
    assert max(context for kind, context in asked if kind == "first") < 24


def test_all_rows_of_a_batch_that_rests_forget_what_made_it_rest():
    target = tiny_target()
    engine = ready(Engine(target, tiny_draft(target), 4), DEAR)
    for i in range(4):
        engine.submit(request([5, 6, 7 + i], tokens=60))
    engine.step()
    moods = [row.mood for _, row in engine._running]
    for mood in moods:
        mood.expected, mood.accepted = 4.0, 0.0
    engine.chooser.resting(moods[0], 4).resting = 50
    for _ in range(50):
        engine.step()
    assert min(mood.trust for mood in moods) > 0.6


def test_what_a_row_knows_is_of_use_to_the_next_turn_even_if_its_draft_never_read_it():
    target = tiny_target()
    draft = tiny_draft(target)
    engine = ready(Engine(target, draft, 2), DEAR)
    first = [request(list(range(i, 60 + i)), tokens=8) for i in (0, 1)]
    engine.run(first)
    for done in first:
        turn = [*done.prompt_ids, *done.output_ids, 5]
        (next_one,) = engine.run([request(turn, TREE, tokens=20)])
        assert next_one.reused_tokens == len(turn) - 2
        (alone,) = Engine(target, draft).run([request(turn, TREE, tokens=20)])
        assert (next_one.output_ids, next_one.cycle_lengths) == (alone.output_ids, alone.cycle_lengths)


class TestTries:
    def test_what_would_have_been_guessed_decides(self):
        whole = Mood(trying=True, longest_rest=256)
        whole.tried(0.5, 30, 60, 1.0, 1.4)
        assert whole.value == pytest.approx(np.log(1.5 / 1.4) - cost._READING_PRICE)
        assert (whole.trying, whole.resting, whole.failed) == (False, 0, 0)
        whole.tried(0.5, 0, 20, 1.0, 1.4)  # what was seen before counts less behind 20 tokens more
        kept = cost._TRIED**20
        assert whole.value == pytest.approx(
            np.log((1 + (1 + kept * 30) / (2 + kept * 60 + 20)) / 1.4) - cost._READING_PRICE
        )
        assert (whole.resting, whole.failed) == (4, 1)

    def test_rests_grow_to_the_longest_and_one_lucky_try_does_not_end_them(self):
        whole = Mood(longest_rest=256)
        rests = []
        for _ in range(8):
            whole.tried(0.0, 0, 60, 1.0, 1.4)
            rests.append(whole.resting)
        assert rests == [4, 8, 16, 32, 64, 128, 256, 256]
        whole.tried(1.0, 600, 600, 1.0, 1.4)
        assert whole.rest == 256
        whole.drafted(2.0, 1.4, 8, whole=True)
        assert (whole.rest, whole.failed) == (230, 0)
        for _ in range(60):
            whole.drafted(2.0, 1.4, 8, whole=True)
        assert whole.rest == cost._FIRST_REST

    def test_a_batch_has_to_pay_for_what_its_drafts_read_and_is_judged_slowly(self):
        alone, whole = Mood(value=0.0), Mood(value=0.0)
        alone.drafted(1.5, 1.5, 8)
        whole.drafted(1.5, 1.5, 8, whole=True)
        assert (alone.value, whole.value) == (0.0, pytest.approx(-0.1 * cost._READING_PRICE))
        assert (alone.resting, whole.resting) == (0, 4)

    def test_what_drafting_costs_is_doubted_more_with_each_try_that_fails(self):
        made = Chooser(costs(*CHEAP))
        tree, tried, whole = Tree.from_tokens([7], [-1], [-0.7]), [], Mood()
        whole.tried = lambda *given: tried.append(given[-1])
        for failed in (0, 1, 1000):
            whole.failed = failed
            made.tried(tree, 1, 2, [1.0, 1.5], 1.0, 2, 2, Mood(), whole)
        assert tried == pytest.approx([2.5, 2.45, 2.0])


def test_behind_many_trees_a_plain_step_is_looked_at():
    mood = Mood()
    plain = 0
    for _ in range(330):
        if mood.rests():
            plain += 1
            assert not mood.trying
        else:
            mood.drafted(2.0, 1.5, 3)
            mood.judged(1.0, 2)  # it has paid
    assert plain == 10


class Moody:
    """A drafter that guesses a chain, rightly from a step on and before it wrongly; sure of it always."""

    reads_aux = False

    def __init__(self, text, right_from):
        self.text, self.right_from, self.asked = text, right_from, []

    def draft(self, rows, chooser=None):
        (row,) = rows
        n = len(row.known)
        if row.mood.rests():
            row.mood.forget()
            return [Tree.empty()]
        self.asked.append(n)
        tokens = [int(t) if n >= self.right_from else (int(t) + 1) % 64 for t in self.text[n : n + 3]]
        scores = np.log(0.9) * np.arange(1, 1 + len(tokens))
        tree = Tree.from_tokens(tokens, list(range(-1, len(tokens) - 1)), scores.tolist())
        V = chooser.pass_seconds(1, n, (), len(tree))
        return [tree.prefix(*chooser.nodes([tree], 1, V, 0.3, 1, [row.mood]))]

    def copy(self, source, destination, length): ...
    def truncate(self, slot, length): ...
    def probe_level(self, slots, width): ...
    def length(self, slot):
        return 2**62


def test_a_draft_that_turns_wrong_is_left_alone_and_found_again_once_it_is_right():
    target = tiny_target(max_positions=2048)
    (plain,) = Engine(target).run([request([5, 6, 7], None, 1200)])
    drafter = Moody([5, 6, 7, *plain.output_ids], 700)
    engine = Engine(target, drafter)
    engine.chooser = Chooser(costs({1: 1.0, 64: 1.3}, {1: 0.1}))
    engine.chooser.costs.observe = lambda *_: None
    (done,) = engine.run([request([5, 6, 7], tokens=1200)])
    assert done.output_ids == plain.output_ids
    wrong = [n for n in drafter.asked if n < 700]
    assert len(wrong) < 40  # of 697 steps
    right = [n for n in drafter.asked if n >= 700]
    assert right[0] < 780  # the longest rest later
    assert right[-1] - right[0] < 4.2 * len(right)  # from then on nearly every step, each with all three accepted
    assert len(right) > 60


def test_the_room_left_bounds_the_depth():
    target = tiny_target()
    engine = ready(Engine(target, tiny_draft(target)), ({1: 1.0, 64: 1.0}, {1: 0.0, 8: 0.0}))
    (done,) = engine.run([request([5, 6, 7], tokens=4)])
    assert len(done.output_ids) == 4
    assert len(done.tried) <= 3


def test_costs_are_probed_once_and_found_again(monkeypatch, tmp_path):
    monkeypatch.setattr("aquiline.decode.engine.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("aquiline.decode.cost.ForeignLoad", lambda: Load(False))
    target = tiny_target()
    draft = tiny_draft(target)
    sizes = []
    probe_pass = Engine._probe_pass
    monkeypatch.setattr(Engine, "_probe_pass", lambda self, slots, n: sizes.append(n) or probe_pass(self, slots, n))
    first = Engine(target, draft)
    monkeypatch.setattr(cost, "_PROBE_SECONDS", 1e9)
    (done,) = first.run([request([5, 6, 7])])
    assert set(sizes) == set(cost.PROBED)
    (file,) = tmp_path.glob("costs-*.json")
    assert json.loads(file.read_text())["depends"]["target"][1] == "torch.float32"
    sizes.clear()
    (again,) = Engine(target, draft).run([request([5, 6, 7])])
    assert not sizes
    assert again.output_ids == done.output_ids
    assert first.cache.lengths == [3 + 24 - 1]  # the request's own: nothing of the probe was kept
    assert first.drafter.cache.lengths[0] <= 3 + 24 - 1


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.8, seed=5)])
def test_what_a_row_would_have_guessed_is_what_it_would_have_drafted(sampling):
    target = tiny_target()
    draft = tiny_draft(target)
    chain, drafted = Engine(target, draft), {}
    grow = chain.drafter.grow

    def noted(rows, *given):
        trees, seconds = grow(rows, *given)
        drafted[len(rows[0].known)] = trees[0].tokens[0]
        return trees, seconds

    chain.drafter.grow = noted
    prompt = [5, 6, 7, 8]
    (drafting,) = chain.run([Request(prompt, sampling, Limits(40), TreeConfig(1, 1, 1))])
    engine = ready(Engine(target, draft, 2), CHEAP)
    resting = engine.chooser.resting(Mood(), 2)
    resting.resting, resting.value = 30, -1.0
    guesses, told, tried = engine.drafter._guesses, {}, []

    def compared(row, start, hidden_NH):
        found = guesses(row, start, hidden_NH)
        told.update(enumerate(found, start + 2))
        return found

    engine.drafter._guesses = compared
    tell, resting.tried = resting.tried, lambda *given: tried.append(given) or tell(*given)
    one, _ = engine.run([Request(prompt, sampling, Limits(40), AUTO_TREE), Request([9], sampling, Limits(60), None)])
    assert one.output_ids == drafting.output_ids
    assert min(told) == 4  # nothing is asked about what the user wrote
    assert len(told) >= 28
    shared = told.keys() & drafted.keys()
    assert len(shared) >= 20
    assert {at: told[at] for at in shared} == {at: drafted[at] for at in shared}
    text = prompt + one.output_ids
    guessed = sum(token == text[at] for at, token in told.items())
    assert (sum(given[1] for given in tried), sum(given[2] for given in tried)) == (guessed, len(told))
