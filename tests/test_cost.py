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
            made._costs[kind, batch, 256] = PassCosts(points)
    return made


CHEAP = ({1: 1.0, 64: 1.4}, {1: 0.05, 8: 0.05})
DEAR = ({1: 1.0, 64: 64.0}, {1: 0.5, 8: 1.0})


class TestPassCosts:
    def test_between_points_and_beyond_them(self):
        made = PassCosts({1: 1.0, 3: 2.0, 5: 1.9})
        assert [made(n) for n in (1, 2, 3, 4, 5)] == [1.0, 1.5, 2.0, 2.0, 2.0]  # never falling
        assert made(10) == 4.0
        assert made.table().tolist() == [1.0, 1.0, 1.5, 2.0, 2.0, 2.0]

    def test_readings_move_the_points_around_them(self):
        made = PassCosts({1: 1.0, 2: 2.0, 4: 4.0})
        for _ in range(400):
            made.observe(3, 2.0)
        assert made(3) == pytest.approx(2.0, abs=0.01)
        assert made(1) == 1.0
        for _ in range(400):
            made.observe(1, 0.5)
        assert made(1) == pytest.approx(0.5, abs=0.01)

    def test_a_reading_far_off_moves_little_and_one_beyond_nothing(self):
        made = PassCosts({1: 1.0, 2: 2.0})
        made.observe(1, 1000.0)
        assert made(1) == pytest.approx(1.025)
        made.observe(3, 1000.0)
        assert made.points()[2] == 2.0


def test_a_probe_takes_the_faster_of_two_and_stops_when_its_time_is_up(monkeypatch):
    now, ran = [0.0], []
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])

    def run(n):
        ran.append(n)
        now[0] += {1: 9.0, 2: 0.3, 3: 0.2}[len(ran)] if n == 1 else 0.25 * n

    assert probe(run, (1, 2, 4, 8), seconds=10.5) == pytest.approx({1: 0.2, 2: 0.5, 4: 1.0, 8: 2.0})
    assert ran == [1, 1, 1, 2, 2, 2]  # 4 and 8 are in proportion


class TestCosts:
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

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            '{"depends": {}, "seconds": {"target 1": {"1": 1}}}',
            '{"depends": {}, "seconds": {"target 1 256": {}}}',
            '{"depends": {}, "seconds": {"target 1 256": {"1": -1}}}',
            '{"depends": {}, "seconds": {"target 1 256": {"1": 1}}}',  # without the draft's
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
            made._costs["target", 1, context] = PassCosts({1: seconds})
        assert made.of("target", 1, 257)(1) == 1.0  # the bucket of 512
        assert made.of("target", 1, 1500)(1) == 5.0
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
            (rows + extra + chances[:, :n].sum()) / (spent + seconds[1 + n])
            for n in range(min(made, len(seconds) - 2) + 1)
        ]
        nodes, rate = best_nodes(chances, seconds, spent, rows + extra)
        assert rate == pytest.approx(max(rates))
        assert rates[nodes] == pytest.approx(max(rates))
    assert best_nodes(np.array([[0.01]]), np.array([1.0, 1.0, 1.5]), 0.0, 1)[0] == 0


class TestCalibration:
    def test_begins_a_little_below_the_drafts_own(self):
        log_probs = torch.tensor([0.5, 0.05]).log()
        assert Calibration().log_chances(log_probs, 1).exp().tolist() == pytest.approx([0.45, 0.045])

    def test_learns_by_depth_and_probability(self):
        made = Calibration()
        generator = torch.Generator().manual_seed(0)
        for _ in range(3000):
            depths = torch.tensor([1, 1, 2])
            probs = torch.tensor([0.5, 0.05, 0.5])
            truth = torch.tensor([0.25, 0.1, 0.5])
            made.learn(depths, probs.log(), torch.rand(3, generator=generator) < truth)
        assert made.log_chances(torch.tensor([0.5, 0.05]).log(), 1).exp().tolist() == pytest.approx(
            [0.25, 0.1], rel=0.2
        )
        assert made.log_chances(torch.tensor([0.5]).log(), 2).exp().item() == pytest.approx(0.5, rel=0.2)
        assert made.log_chances(torch.tensor([0.5]).log(), 3).exp().item() == pytest.approx(0.45)
        assert bool((made.log_chances(torch.tensor([0.0, -torch.inf]), 9) <= 0).all())

    def test_judged_are_the_nodes_whose_parents_were_accepted(self):
        made = Chooser(costs(*CHEAP))
        #        root -> 0 (accepted) -> 2 (not), root -> 1 (not) -> 3 (never judged)
        tree = Tree.from_tokens([7, 8, 9, 9], [-1, -1, 0, 1], [-0.7, -0.9, -1.4, -1.6])
        tree = Tree(
            tree.tokens_N, tree.parents_N, tree.depths_N, tree.scores_N, torch.tensor([0.5, 0.4, 0.5, 0.5]).log()
        )
        before = made.calibration._expected.clone()
        made.learn(tree, [0], Mood())
        grown = (made.calibration._expected - before * 0.998).sum(1)
        assert grown[:3].tolist() == pytest.approx([0.9, 0.5, 0.0], abs=1e-5)
        gained = made.calibration._accepted
        assert gained.sum().item() == pytest.approx(1.0, abs=1e-4)


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
            mood.drafted(0.5, 0)
            rests.append(0)
            while mood.rests():
                rests[-1] += 1
        assert rests == [4, 8, 16, 32, 64, 64, 64, 64]
        mood.drafted(1.5, 3)  # a try that pays ends it
        assert not mood.rests()
        mood.drafted(0.9, 3)
        assert not mood.rests()  # one poor cycle among good ones
        mood.drafted(0.3, 1)  # one that costs thrice what it brings is enough
        assert mood.resting == 4

    def test_a_tree_without_nodes_has_failed_whatever_it_cost(self):
        mood = Mood()
        mood.drafted(1.0, 0)
        assert mood.rests()

    def test_resting_it_forgets(self):
        mood = Mood()
        for _ in range(6):
            mood.judged(1.0, 0)
        assert mood.trust < 0.4
        mood.resting = 64
        while mood.rests():
            pass
        assert mood.trust > 0.75


class TestNextWidth:
    LEVEL = np.array([[0.8, 0.1]])

    def test_deeper_while_it_pays(self):
        made = Chooser(costs(*CHEAP))
        made.saw(np.full((1, 1, 2), 0.4), np.ones((1, 1)), 1)
        assert made.next_width(self.LEVEL, self.LEVEL, 1, 0.1, 1, 10) > 0
        made = Chooser(costs(*DEAR))
        made.saw(np.full((1, 1, 2), 0.4), np.ones((1, 1)), 1)
        assert made.next_width(self.LEVEL, self.LEVEL, 1, 0.1, 1, 10) == 0

    def test_as_wide_as_pays(self):
        flat = np.full((1, 8), 0.12)
        made = Chooser(costs({1: 1.0, 64: 1.0}, {1: 0.01, 8: 0.01}))
        made.saw(np.full((1, 1, 8), 0.12), np.ones((1, 1)), 1)
        assert made.next_width(flat, flat, 1, 0.0, 1, 10) == 8
        made = Chooser(costs({1: 1.0, 64: 1.0}, {1: 0.01, 2: 1.0, 8: 9.0}))
        made.saw(np.full((1, 1, 8), 0.12), np.ones((1, 1)), 1)
        assert made.next_width(flat, flat, 1, 0.0, 1, 10) == 1

    def test_what_children_are_worth_is_learnt_by_rank(self):
        made = Chooser(costs(*CHEAP))
        for _ in range(200):
            made.saw(np.array([[[0.9, 0.05], [0.0, 0.0]]]), np.array([[1.0, 0.0]]), 2)
        assert made.profile_DC[1] == pytest.approx([0.9, 0.05], abs=0.01)
        assert made.profile_DC[0] == pytest.approx([0.5, 0.2])


def ready(engine, points, load=False):
    """The engine with given costs, which no reading moves."""
    engine.drafter.chooser = Chooser(costs(*points, load=load))
    engine.drafter.chooser.costs.observe = lambda *_: None
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


def test_a_draft_that_is_never_right_is_asked_ever_more_rarely():
    target = tiny_target()
    draft = tiny_draft(target)
    with torch.no_grad():
        draft.lm_head.weight.zero_()
    engine = ready(Engine(target, draft), ({1: 1.0, 64: 1.9}, {1: 0.1, 8: 0.1}))
    calls = itertools.count()
    catch_up = engine.drafter.catch_up
    engine.drafter.catch_up = lambda rows: (next(calls) and None) or catch_up(rows)
    (done,) = engine.run([request([5, 6, 7], tokens=100)])
    assert len(done.output_ids) == 100
    assert next(calls) <= 6  # of 99 steps


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
    (done,) = first.run([request([5, 6, 7])])
    assert sizes[0] == 1  # how many more depends on how fast the machine is
    assert set(sizes) <= set(cost.PROBED)
    (file,) = tmp_path.glob("costs-*.json")
    assert json.loads(file.read_text())["depends"]["dtypes"] == ["torch.float32", "torch.float32"]
    sizes.clear()
    (again,) = Engine(target, draft).run([request([5, 6, 7])])
    assert not sizes
    assert again.output_ids == done.output_ids
    before = [first.cache.lengths[:], first.drafter.cache.lengths[:]]
    assert before == [[0], [0]]
