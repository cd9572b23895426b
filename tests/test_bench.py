"""The bench: which batches, in which order, what the figures are, what a loaded machine leaves of them."""

import json
import math

import pytest

from aquiline.config import AUTO_TREE, PHASES, BenchConfig, TreeConfig, UserError
from aquiline.decode import clock
from aquiline.decode.engine import Request
from aquiline.measure import bench
from aquiline.measure.bench import (
    Run,
    in_turn,
    make_engine,
    make_record,
    number_of_runs,
    runs,
    start_up,
    summarise,
    warm_up,
)
from aquiline.measure.evaluate import Rendered, render
from aquiline.measure.quiet import Quiet
from aquiline.measure.tasks import Prompt
from tests.test_api import folders, load  # noqa: F401 (a fixture)
from tests.tiny_chat import user

pytestmark = pytest.mark.filterwarnings("ignore:the draft's tokens are hardly ever accepted")

PROMPTS = [Prompt(str(i), [user(text)]) for i, text in enumerate(("hi", "one two one two one", "a b a b a b"))]
CHAIN, TREE = TreeConfig(3, 1, 3), TreeConfig(2, 2, 4)


@pytest.fixture(scope="module")
def model(folders):  # noqa: F811
    return load(folders)


@pytest.fixture(scope="module")
def rendered(model):
    return render(model, "t", PROMPTS)


def test_the_record_of_real_runs(model, rendered):
    config = BenchConfig((CHAIN, AUTO_TREE), (1, 4), 12, 2)
    engine = make_engine(model, rendered, config)
    startup = start_up(model, engine, rendered[0], config)
    assert 0 < startup["first_token"] < startup["first_tokens"]
    done = list(runs(model, engine, rendered, config))
    assert len(done) == number_of_runs(config) == 2 * 3 * 3
    record = make_record(model, engine, config, {"t": PROMPTS}, summarise(done, config), startup, Quiet(False, 0.0))
    json.dumps(record, allow_nan=False)
    assert set(record) == {
        "batches", "startup", "settings", "costs_ms", "machine", "versions", "definitions",
    }  # fmt: skip
    assert list(record["batches"]) == ["1", "4"]
    for block in record["batches"].values():
        assert list(block["trees"]) == ["3:1:3", "auto"]
        assert block["best_fixed"] == "3:1:3"
        for name, way in block["trees"].items():
            assert way["equal_share"] == 1.0
            assert way["rounds"] == 2
            assert way["tau"] is None if way["mean_nodes"] is None else way["tau"] >= 1
            assert ("trees" in way) == (name == "auto")
            assert way["speedup_min"] <= way["speedup_median"] <= way["speedup_max"]
            parts = way["breakdown"]
            assert list(parts["ms"]) == list(parts["share"]) == list(PHASES)
            assert math.isclose(sum(parts["ms"].values()), parts["cycle_ms"])
            assert math.isclose(sum(parts["share"].values()), 1)
    assert any(name.startswith("target, batch to 4") for name in record["costs_ms"])
    settings = record["settings"]
    assert (settings["trees"], settings["batches"], settings["repeats"]) == (["3:1:3", "auto"], [1, 4], 2)


def test_files_take_turns():
    files = [[Rendered(name, []) for name in names] for names in ("ab", "c", "def")]
    assert "".join(prompt.id for prompt in in_turn(files)) == "acdbef"


def test_rounds_take_the_next_prompts_and_ways_take_turns(model, rendered):
    config = BenchConfig((CHAIN, TREE), (2,), 4, 3)
    done = list(runs(model, make_engine(model, rendered, config), rendered, config))
    asked = {tuple(p.ids): p.id for p in rendered}
    rounds = [[[asked[tuple(r.prompt_ids)] for r in run.requests] for run in done[i : i + 3]] for i in (0, 3, 6, 9)]
    assert rounds == [[list(ids)] * 3 for ids in ("01201201", "20120120", "12012012", "01201201")]
    turns = [None, CHAIN, TREE, CHAIN, TREE, None, TREE, None, CHAIN, None, CHAIN, TREE]
    assert [run.tree for run in done] == turns
    assert [run.cycles is None for run in done] == [True] * 9 + [False] * 3
    alone = BenchConfig((CHAIN,), (1,), 4, 2)
    for run in runs(model, make_engine(model, rendered, alone), rendered, alone):
        reused = [request.reused_tokens for request in run.requests]
        assert reused[0] == 0  # no way profits from the one before


def test_the_clock_counts_cycles_of_the_whole_batch(model, rendered):
    config = BenchConfig((CHAIN,), (2,), 12, 1)
    requests = [bench._requests(model, [p.ids], None, n)[0] for p, n in zip(rendered, (4, 9, 3), strict=True)]
    cycles = bench._clocked(make_engine(model, rendered, config), requests, 2)
    assert [len(r.output_ids) for r in requests] == [4, 9, 3]
    # Of the first two the first token is no cycle's, and the second's step has the prefill in it: two tokens. Likewise
    # of the second and the third: one token.
    assert len(cycles) == 3
    assert all(cycle[phase] > 0 for cycle in cycles for phase in PHASES)
    assert clock._running is None


def test_as_one_reply_ends_the_next_prompt_begins(model, rendered):
    config = BenchConfig((CHAIN,), (2,), 12, 1)
    engine = make_engine(model, rendered, config)
    requests = [bench._requests(model, [rendered[i % 3].ids], CHAIN, 3 + 2 * i)[0] for i in range(5)]
    seen = []
    bench._decode(engine, requests, 2, lambda: (engine.step(), seen.append(engine.running + engine.waiting)))
    assert [len(r.output_ids) for r in requests] == [3, 5, 7, 9, 11]
    assert max(seen) == 2
    submitted = [r.submitted_at for r in requests]
    ended = sorted(r.finished_at for r in requests)
    assert submitted == sorted(submitted)
    assert all(begin > end for begin, end in zip(submitted[2:], ended, strict=False))
    assert not engine.busy


def test_a_round_that_fails_leaves_nothing_behind(model, rendered):
    config = BenchConfig((CHAIN,), (2,), 12, 1)
    engine = make_engine(model, rendered, config)
    requests = bench._requests(model, [p.ids for p in rendered], CHAIN, 9)
    steps = iter((engine.step, engine.step))
    with pytest.raises(StopIteration):
        bench._decode(engine, requests, 2, lambda: next(steps)())
    assert not engine.busy


def run(tree, tokens, seconds, *, cycles=None, lengths=(), nodes=0, batch=2, wait=0.25):
    """A batch of two requests with such times."""
    requests = [
        Request(
            [1], tree=tree, output_ids=list(range(n)), cycle_lengths=list(lengths), drafted_nodes=nodes,
            submitted_at=100.0 + i, first_token_at=100.0 + i + wait, finished_at=100.0 + seconds - i,
        )
        for i, n in enumerate(tokens)
    ]  # fmt: skip
    return Run(batch, tree, requests, cycles)


def test_figures_of_known_runs():
    config = BenchConfig((CHAIN, TREE), (2,), 64, 2)
    laps = [dict.fromkeys(PHASES, 0.001) | {"target": x} for x in (0.004, 0.008)]
    done = [
        run(None, (10, 30), 8.0),  # 5 tokens/s
        run(CHAIN, (10, 30), 4.0, lengths=[2, 3], nodes=6, wait=0.5),
        run(TREE, (10, 30), 16.0),
        run(None, (20, 20), 20.0),  # 2 tokens/s
        run(CHAIN, (20, 20), 5.0, lengths=[4], nodes=3, wait=0.75),
        run(TREE, (20, 21), 16.4),
        run(None, (9, 9), 0.001, cycles=[]),
        run(CHAIN, (9, 9), 0.001, cycles=laps),
        run(TREE, (9, 9), 0.001, cycles=[]),
    ]
    block = summarise(done, config)["2"]
    plain, chain, tree = block["plain"], block["trees"]["3:1:3"], block["trees"]["2:2:4"]
    assert [plain[f"tokens_per_second{end}"] for end in ("", "_min", "_max")] == [3.5, 2.0, 5.0]
    assert (plain["first_token_ms"], plain["first_token_ms_max"], plain["rounds"]) == (250.0, 250.0, 2)
    assert (plain["generated_tokens"], plain["breakdown"]) == (80, None)
    assert [chain[f"speedup{end}"] for end in ("", "_median", "_min", "_max")] == [28 / 9, 3.0, 2.0, 4.0]
    assert (chain["first_token_ms"], chain["first_token_ms_max"]) == (625.0, 750.0)
    assert (chain["tau"], chain["mean_nodes"], chain["equal_share"]) == (3.0, 3.0, 1.0)
    assert chain["breakdown"]["cycles"] == 2
    assert math.isclose(chain["breakdown"]["ms"]["target"], 6.0)
    assert math.isclose(chain["breakdown"]["share"]["target"], 0.6)
    assert (tree["tau"], tree["equal_share"]) == (None, 5 / 6)


def test_times_of_a_loaded_machine_are_left_out_and_the_best_tree_is_named(model, rendered):
    config = BenchConfig((CHAIN, TREE, AUTO_TREE), (1,), 3, 1)
    engine = make_engine(model, rendered, config)
    blocks = summarise(list(runs(model, engine, rendered, config)), config)
    for name, speedup in (("3:1:3", 1.5), ("2:2:4", 2.0), ("auto", 1.9)):
        blocks["1"]["trees"][name]["speedup"] = speedup
    arguments = (model, engine, config, {"t": PROMPTS}, blocks, {"load": 1.0})
    for busy, more in ((0.5, {"allow_load": True}), (0.0, {})):
        block = make_record(*arguments, Quiet(False, busy), **more)["batches"]["1"]
        assert block == blocks["1"] | {"best_fixed": "2:2:4", "auto_of_best_fixed": 0.95}
    record = make_record(*arguments, Quiet(False, 0.5))
    block = record["batches"]["1"]
    assert (record["startup"], record["machine"]["loaded"]) == (None, True)
    assert set(block) == {"plain", "trees"}
    for way in (block["plain"], *block["trees"].values()):
        assert not [k for k in way if ("second" in k or "speedup" in k or "_ms" in k) and way[k] is not None]
        assert way["breakdown"] is None
        assert way["generated_tokens"] > 0


def test_warming_up_meets_every_size_that_a_batch_shrinks_through(model, rendered):
    config = BenchConfig((AUTO_TREE,), (3,), 12, 1)
    engine = make_engine(model, rendered, config)
    warm_up(model, engine, rendered, config)
    assert all(engine.chooser.costs.known(n) for n in (1, 2, 3))
    assert not engine.chooser.costs.known(5)


def test_what_cannot_be_compared_is_refused(folders, model, rendered):  # noqa: F811
    with pytest.raises(UserError, match="nothing to compare"):
        make_engine(load(folders, "none"), rendered, BenchConfig())
    limit = model.target.config.max_positions
    with pytest.raises(UserError, match=f"prompt q has {limit} tokens"):
        make_engine(model, [*rendered, Rendered("q", [1] * limit)], BenchConfig())
    for settings, words in (
        ({"trees": ()}, "--tree must name"), ({"trees": (TREE, TREE)}, "nothing twice"), ({"batches": (0,)}, "batch 0"),
        ({"batches": (2, 2)}, "nothing twice"), ({"max_new_tokens": 1}, "at least 2"), ({"repeats": 0}, "repeats 0"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            BenchConfig(**settings)
