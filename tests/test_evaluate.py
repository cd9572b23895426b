"""The record: its keys, its formulas against single runs, divergences, what is left out without plain runs."""

import json
import math

import pytest
import torch

from aquiline.api import Result
from aquiline.config import EvalConfig, TreeConfig, UserError
from aquiline.measure import evaluate
from aquiline.measure.evaluate import (
    TIMED,
    compare,
    divergence,
    make_record,
    render,
    speedup,
    summarise,
    warm_up,
)
from aquiline.measure.quiet import Quiet
from aquiline.measure.tasks import Prompt
from tests.test_api import folders, load  # noqa: F401 (a fixture)
from tests.tiny_chat import user

pytestmark = pytest.mark.filterwarnings("ignore:the draft's tokens are hardly ever accepted")

PROMPTS = [Prompt(str(i), [user(text)]) for i, text in enumerate(("hi", "one two one two one", "zz", "a b a b a b"))]
PLAIN_KEYS = {
    "plain_tokens_per_second", "speedup_median", "speedup_min", "speedup_max", "speedup_prompts", "equal_share",
    "divergences",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(folders):  # noqa: F811
    return load(folders, "ngram")


def test_the_record_follows_its_contract_and_its_formulas(model):
    config = EvalConfig(TreeConfig(3, 1, 3), 60)
    warm_up(model, model.prompt_ids(PROMPTS[0].messages), config)
    done = list(compare(model, render(model, "t", PROMPTS), config))
    block = summarise(done, config, model.draft)
    singles = [model.request(p.messages, max_new_tokens=60, tree="3:1:3") for p in PROMPTS]
    for request in singles:
        model.run(request)
    lengths = [n for r in singles for n in r.cycle_lengths]
    assert block["tau"] == sum(lengths) / len(lengths)
    assert block["tau"] > 1.1  # tiny greedy models repeat themselves
    taus = [r.tau for r in singles if r.tau is not None]
    assert math.isclose(block["tau_per_prompt_mean"], sum(taus) / len(taus))
    assert block["prompts"] == 4
    assert block["cycles"] == len(lengths)
    assert block["generated_tokens"] == sum(len(r.output_ids) for r in singles)
    assert sum(block["finish_reasons"].values()) == 4
    accepted = [sum(r.accepted[n] for r in singles if n < len(r.accepted)) for n in range(3)]
    tried = [sum(r.tried[n] for r in singles if n < len(r.tried)) for n in range(3)]
    assert block["acceptance_per_depth"] == [a / len(lengths) for a in accepted]
    assert block["n_alpha"] == [a / t for a, t in zip(accepted, tried, strict=True)]
    assert set(block) > PLAIN_KEYS
    assert (block["equal_share"], block["divergences"], block["speedup_prompts"]) == (1.0, [], 4)
    assert block["speedup_min"] <= block["speedup_median"] <= block["speedup_max"]

    record = make_record(model, config, {"t": PROMPTS}, {"t": block})
    assert set(record) == {"tasks", "mean", "settings", "machine", "versions", "definitions"}
    assert record["mean"] == {"tau": block["tau"], "speedup_median": block["speedup_median"]}
    settings = record["settings"]
    assert settings["tree"] == "3:1:3"
    assert settings["dtype"] == "float32"
    assert settings["exact"] is model.target.exact
    assert (settings["target"], settings["draft"], settings["draft_sha256"]) == ("target", "ngram", None)
    assert settings["template"] == model.chat.template_fingerprint()
    assert settings["template_kwargs"] == {}
    assert len(settings["prompts_sha256"]) == 64
    other = make_record(model, config, {"t": PROMPTS[:3]}, {"t": block})
    assert other["settings"]["prompts_sha256"] != settings["prompts_sha256"]
    assert record["machine"]["device"] == "cpu"
    assert record["versions"]["torch"] == torch.__version__
    assert "tau" in record["definitions"]
    json.dumps(record, allow_nan=False)


def test_no_run_profits_from_what_another_has_cached(model, monkeypatch):
    ran, run = [], type(model).run
    monkeypatch.setattr(type(model), "run", lambda self, request: ran.append(request) or run(self, request))
    config = EvalConfig(TreeConfig(3, 1, 3), 8)
    for _ in range(2):
        list(compare(model, render(model, "t", PROMPTS[:2]), config))
    assert len(ran) == 8
    assert all(request.reused_tokens == 0 for request in ran)


def test_times_of_a_loaded_machine_are_left_out_unless_they_are_wanted(model):
    config = EvalConfig(TreeConfig(3, 1, 3), 12)
    block = summarise(list(compare(model, render(model, "t", PROMPTS[:2]), config)), config, model.draft)
    arguments = (model, config, {"t": PROMPTS[:2]}, {"t": block})
    for quiet, more in ((Quiet(True, 0.5), {"allow_load": True}), (Quiet(True, 0.01), {}), (Quiet(False, None), {})):
        record = make_record(*arguments, quiet, **more)
        assert record["tasks"]["t"] == block
        assert record["mean"]["speedup_median"] == block["speedup_median"]
        assert record["machine"].items() >= quiet.record().items()
    record = make_record(*arguments, Quiet(False, 0.5))
    assert (record["machine"]["loaded"], record["machine"]["load"]) == (True, 0.5)
    assert record["tasks"]["t"]["tau"] == record["mean"]["tau"] == block["tau"]
    assert {k for k in block if record["tasks"]["t"][k] != block[k]} == {
        "tokens_per_second", "plain_tokens_per_second", "speedup_median", "speedup_min", "speedup_max",
    }  # fmt: skip
    assert {record["tasks"]["t"][k] for k in TIMED} == {None}
    assert "speedup_median" not in record["mean"]


def test_without_plain_runs_their_keys_are_left_out_and_a_tree_has_no_n_alpha(model):
    config = EvalConfig(TreeConfig(3, 2, 4), 12, plain=False)
    done = list(compare(model, render(model, "t", PROMPTS[:1]), config))
    assert done[0].plain is None
    block = summarise(done, config, model.draft)
    assert not PLAIN_KEYS & set(block)
    assert "n_alpha" not in block
    assert "speedup_median" not in make_record(model, config, {"t": PROMPTS[:1]}, {"t": block})["mean"]


def test_which_way_goes_first_alternates(model, monkeypatch):
    order = []
    run = model.run
    monkeypatch.setattr(model, "run", lambda request: (order.append(request.tree is None), run(request))[1])
    list(compare(model, render(model, "t", PROMPTS[:3]), EvalConfig(max_new_tokens=4)))
    assert order == [False, True, True, False, False, True]


def test_both_ways_share_a_seed(model):
    done = list(compare(model, render(model, "t", PROMPTS), EvalConfig(max_new_tokens=20, temperature=1.0, seed=4)))
    assert all(c.divergence is None for c in done)
    alone = model.generate(PROMPTS[1].messages, max_new_tokens=20, temperature=1.0, seed=4)
    assert done[1].result.token_ids == alone.token_ids


def test_a_divergence_is_placed_and_weighed(model):
    ids = model.prompt_ids("hi")
    plain = model.generate("hi", max_new_tokens=9, plain=True).token_ids
    assert divergence(model.target, ids, plain, plain) is None
    parted = divergence(model.target, ids, plain, [*plain[:4], plain[4] ^ 1, *plain[5:]])
    assert parted.position == 4
    prefix = torch.tensor([[*ids, *plain[:4]]])
    logits = model.target.logits(model.target(prefix, torch.arange(prefix.shape[1])[None]).last_BND[0, -1])
    first, second = logits.sort(descending=True).values[:2].tolist()
    assert int(logits.argmax()) == plain[4]
    assert math.isclose(parted.logit_gap, first - second, rel_tol=1e-4)
    assert divergence(model.target, ids, plain, plain[:5]).position == 5


def result(tokens, seconds):
    return Result("", [1] * tokens, [0] * tokens, "length", 3, 0, None, None, seconds, seconds)


def test_speedup_compares_equal_numbers_of_tokens_only():
    assert speedup(result(10, 3.0), result(10, 1.5)) == 2.0
    assert speedup(result(10, 3.0), result(9, 1.5)) is None
    assert speedup(result(0, 3.0), result(0, 1.5)) is None


def test_acceptance_is_told_by_position(folders, tmp_path):  # noqa: F811
    from aquiline import api
    from tests.test_api import checkpoint, make_draft

    make_draft(tmp_path, checkpoint.load_target(folders / "target", torch.float32), trained_length=40)
    model = api.load(folders / "target", tmp_path, dtype="float32")
    config = EvalConfig(max_new_tokens=10, plain=False)
    prompts = [Prompt(str(n), [user("x" * n)]) for n in (2, 30, 60, 120)]
    with pytest.warns(UserWarning, match="past the 40 tokens"):
        done = list(compare(model, render(model, "t", prompts), config))
    block = summarise(done, config, model.draft)
    buckets = block["tau_by_position"]
    assert list(buckets) == ["to the trained length", "to twice", "beyond"]
    assert sum(b["cycles"] for b in buckets.values()) == block["cycles"]


def test_a_prompt_that_cannot_be_rendered_is_named(model):
    with pytest.raises(UserError, match="gsm8k, prompt q7: the text is not valid Unicode"):
        render(model, "gsm8k", [PROMPTS[0], Prompt("q7", [user("half a pair: \ud800")])])


def test_without_a_draft_there_is_nothing_to_measure(folders):  # noqa: F811
    with pytest.raises(UserError, match="nothing to measure"):
        list(compare(load(folders, "none"), [], EvalConfig()))


def test_the_revision_is_that_of_this_checkout_only(tmp_path):
    assert evaluate._revision(tmp_path) is None


def test_counts_of_a_known_histogram():
    """39 cycles accepted none of a chain of three, one accepted one, three accepted all: ten of 129 drafted tokens."""
    from aquiline.api import Result
    from aquiline.config import EvalConfig, TreeConfig
    from aquiline.decode.engine import Request
    from aquiline.measure.evaluate import Comparison, summarise

    lengths = [1] * 39 + [2] + [4] * 3
    request = Request([1], cycle_lengths=lengths, tried=[43, 4, 3], accepted=[4, 3, 3])
    result = Result("", [0] * 54, [0] * 54, "length", 1, 43, request.tau, "3:1:3", 1.0, 0.9)
    block = summarise([Comparison("p", request, result, None, None)], EvalConfig(TreeConfig(3, 1, 3)), "ngram")
    assert round(block["tau"], 4) == 1.2326
    assert [round(43 * a) for a in block["acceptance_per_depth"]] == [4, 3, 3]
    assert round(sum(block["acceptance_per_depth"]) / 3, 4) == 0.0775
    assert block["n_alpha"] == [4 / 43, 3 / 4, 1.0]  # conditional, from joint hits
