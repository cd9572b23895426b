"""The loop: a resumed run ends where an uninterrupted one does; bad features are named; schedule and optimisers."""

import dataclasses
import itertools
import threading
import time

import pytest
import torch

from aquiline.config import TOP, Limits, TrainConfig, TreeConfig, UserError
from aquiline.data.dataset import fingerprint, hold_out
from aquiline.data.features import FeatureStore, compute
from aquiline.decode.engine import Engine, Request
from aquiline.measure.quiet import quiet
from aquiline.train import decoding, loop, optim
from aquiline.train.init import init_draft
from aquiline.train.loop import Trainer
from aquiline.train.optim import Float32Muon, _orthogonal, make_optimizers, schedule
from tests.conftest import tiny_draft, tiny_target
from tests.elsewhere import AWAY, elsewhere
from tests.test_features import document
from tests.test_quiet import taken

CONFIG = TrainConfig(
    ttt_steps=3, batch_tokens=48, epochs=2.0, held_out=3, eval_every=4, save_every=3, decode_every=0,
    draft_vocab_size=40,
)  # fmt: skip


def trainer(folder, config=CONFIG, saved=None, device="cpu", **layers):
    target = tiny_target(**layers).to(device)
    draft = tiny_draft(target).to(device)
    train, held = hold_out([document(10 + i % 9, i) for i in range(20)], config.held_out, config.seed)
    init_draft(draft, target, compute(target, train[:4]), config.seed)
    saved = [] if saved is None else saved
    return Trainer(
        config, target, draft, FeatureStore(None, target, train, ""), FeatureStore(None, target, held, ""), folder,
        lambda d, record: saved.append((record["step"], record["history"][-1]["tau"])), lambda p: None,
        {"documents": fingerprint(train)},
    )  # fmt: skip


def weights(t: Trainer) -> torch.Tensor:
    return torch.cat([p.flatten() for p in t.draft.parameters()]).detach().cpu()


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_resumed_training_equals_uninterrupted_training(tmp_path, optimizer):
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    whole = trainer(tmp_path / "a", config)
    assert whole.run()
    for stop_after in (2, 5):
        calls = iter(range(100))
        cut = trainer(tmp_path / f"b{stop_after}", config)
        assert not cut.run(lambda calls=calls, n=stop_after: next(calls) == n)
        again = trainer(tmp_path / f"b{stop_after}", config)
        assert again.run()
        assert torch.equal(weights(again), weights(whole))
    assert trainer(tmp_path / "a", config).run()  # nothing left to do


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"decode_every": 1}, {}),
        ({"optimizer": "adamw", "loss": "lk", "accumulate": 2, "checkpoint_activations": True}, {}),
        ({"feature_loss": True}, {"capture_after": TOP}),
    ],
    ids=["decoded", "accumulated", "feature loss"],
)
def test_a_run_on_another_device_is_that_of_the_cpu(tmp_path, monkeypatch, settings, layers):
    """Nothing of it meets a tensor of the CPU, and what it saves is gone on from there exactly."""
    monkeypatch.setattr(loop, "fast_bf16", lambda _: False)  # the rounding of bf16 is not what is tested
    monkeypatch.setattr(optim, "fast_bf16", lambda _: False)
    monkeypatch.setattr(decoding, "_PROMPTS", 1)
    monkeypatch.setattr(decoding, "_TOKENS", 4)
    config = dataclasses.replace(CONFIG, **{"ttt_steps": 2, "epochs": 0.5, "held_out": 2} | settings)
    reports = {}

    def run(name, device, *stops):
        for stop in (*stops, lambda: False):
            t = trainer(tmp_path / name, config, device=device, **layers)
            t.report = reports.setdefault(name, []).append
            t.run(stop)
        return weights(t)

    here = run("here", "cpu")
    with elsewhere():
        away = run("away", AWAY)
        cut = run("cut", AWAY, iter([False, True]).__next__)
    assert torch.equal(cut, away)
    assert torch.allclose(away, here, atol=1e-4)
    assert len(reports["here"]) == len(reports["away"]) >= 2
    assert len(reports["cut"]) == len(reports["here"])
    for one, two in zip(reports["here"], reports["away"], strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-4)
        assert two.accuracy == pytest.approx(one.accuracy, abs=1e-6)
        assert (two.evaluation is None) == (one.evaluation is None)
    one, two = (reports[name][-1].evaluation for name in ("here", "away"))
    assert two.loss == pytest.approx(one.loss, rel=1e-4)
    assert (two.tau, two.n_alpha) == (one.tau, one.n_alpha)
    assert (two.decoded or {}).keys() == (one.decoded or {}).keys()
    assert (two.decoded is not None) == (config.decode_every > 0)


def test_the_best_head_by_the_walk_is_the_one_written(tmp_path, monkeypatch):
    taus = [1.2, 1.5, 1.3, 1.5]
    made = iter(taus)
    monkeypatch.setattr(loop, "evaluate", lambda *a: loop.Evaluation([], [], next(made), []))
    saved: list = []
    trainer(tmp_path, dataclasses.replace(CONFIG, eval_every=3), saved=saved).run()
    assert [tau for _, tau in saved] == [1.2, 1.5, 1.5]
    assert [step for step, _ in saved][:2] == [3, 6]


def test_other_settings_or_data_do_not_resume(tmp_path):
    t = trainer(tmp_path)
    t.run(iter([False, False, True]).__next__)
    other = trainer(tmp_path, dataclasses.replace(CONFIG, clip=1.0))
    with pytest.raises(UserError, match="clip"):
        other.run()
    other = trainer(tmp_path)
    other.record["documents"] = "something else"
    with pytest.raises(UserError, match="training data"):
        other.run()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", None])
def test_a_damaged_state_is_the_users_to_delete(tmp_path, content):
    torch.save({"state": 1}, tmp_path / "state.pt")
    if content is not None:
        (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(UserError, match=f"state.pt .*Delete {tmp_path}"):
        trainer(tmp_path).run()


def test_a_kill_during_saving_leaves_the_old_state(tmp_path, monkeypatch):
    t = trainer(tmp_path)
    t.run(iter([False, False, True]).__next__)
    before = (tmp_path / "state.pt").read_bytes()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path).run()
    assert (tmp_path / "state.pt").read_bytes() == before


def test_features_with_an_infinity_are_skipped_and_named(tmp_path):
    t = trainer(tmp_path)
    get = t.store.get

    def poisoned(numbers, missing):
        features = get(numbers, missing)
        if 3 in numbers:
            features.aux_TA[0, 0] = torch.inf
        return features

    t.store.get = poisoned
    t.run()
    skipped = torch.load(tmp_path / "state.pt")["state"]["skipped"]
    assert len(skipped) == 2  # once an epoch
    assert all(t.store.documents[3].name in s["documents"] for s in skipped)
    assert bool(torch.isfinite(weights(t)).all())


def test_muon_trains_matrices_and_adamw_the_rest():
    draft = tiny_draft(tiny_target())
    muon, adamw = make_optimizers(draft, CONFIG)
    names = {id(p): n for n, p in draft.named_parameters()}
    of_muon = {names[id(p)] for g in muon.param_groups for p in g["params"]}
    of_adamw = {names[id(p)] for g in adamw.param_groups for p in g["params"]}
    assert of_muon | of_adamw == set(names.values())
    assert not of_muon & of_adamw
    assert "lm_head.weight" in of_adamw
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.mlp.down_proj.weight"} <= of_muon


def test_adamw_has_a_rate_of_its_own_whatever_it_trains():
    rates = {"learning_rate": 0.5, "adamw_learning_rate": 0.25}
    for optimizer, expected in (("muon", [0.5, 0.25]), ("adamw", [0.25])):
        made = make_optimizers(tiny_draft(tiny_target()), TrainConfig(optimizer=optimizer, **rates))
        assert [g["lr"] for o in made for g in o.param_groups] == expected


def test_float32_muon_follows_torchs_muon():
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(24, 16, generator=generator), torch.randn(3, 24, 16, generator=generator)
    results = []
    for kind in (torch.optim.Muon, Float32Muon):
        p = torch.nn.Parameter(start.clone())
        optimizer = kind([p], lr=0.1, momentum=0.95, nesterov=True, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        for g in grads:
            p.grad = g.clone()
            optimizer.step()
        results.append(p.detach() - start)
    assert float((results[0] - results[1]).norm() / results[0].norm()) < 0.02  # torch iterates in bf16


def test_orthogonal_brings_the_singular_values_near_one():
    matrix = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(_orthogonal(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.5


def test_schedule_warms_up_and_ends_low():
    shares = [schedule(s, 100, CONFIG) for s in range(100)]
    assert shares[0] == pytest.approx(1 / 3)
    assert max(shares) == pytest.approx(1.0)
    assert shares[-1] < 0.03
    assert all(a >= b for a, b in itertools.pairwise(shares[3:]))


@pytest.mark.parametrize("switch", [None, "fc_norm", "norm_before_fc"])
def test_every_captured_layer_starts_with_the_same_weight(switch):
    target = tiny_target()
    draft = tiny_draft(target, **({} if switch is None else {switch: True}))
    features = compute(target, [document(30, 0)])
    features.aux_TA[:, 32:64] *= 50
    features.aux_TA[0, 70] = 1e5  # a massive activation must not rule the scale
    init_draft(draft, target, features, 0)
    weight = draft.fc.weight.detach().clone()
    for layer in range(3):  # its part of the feature: the other layers weigh nothing
        with torch.no_grad():
            draft.fc.weight.zero_()
            draft.fc.weight[:, 32 * layer : 32 * layer + 32] = weight[:, 32 * layer : 32 * layer + 32]
            size = float(draft.fuse(features.aux_TA).pow(2).mean(-1).sqrt().median())
        assert 0.4 < size < 0.8  # three layers of this size add up to about one
    assert torch.equal(draft.lm_head.weight, target.head_weight[draft.vocab.target_ids_W])


def test_every_setting_reaches_the_unroll(monkeypatch):
    settings = {"skip_outside": False, "loss": "lk", "feature_loss": True, "checkpoint_activations": True}
    config = TrainConfig(ttt_steps=2, ttt_decay=0.5, **settings)
    monkeypatch.setattr(loop, "unroll", lambda draft, pack, head, *steps, **given: (steps, given))
    got = loop.configured_unroll(tiny_draft(tiny_target()), None, None, config)
    assert got == ((2, 0.5), settings | {"update_rows": None})


def test_the_targets_features_are_computed_in_its_own_precision_whatever_the_draft_trains_in(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "fast_bf16", lambda _: True)
    t = trainer(tmp_path)
    assert t.run()  # features of training and held-out documents were needed on the way
    seen = []
    logits = type(t.target).logits
    monkeypatch.setattr(
        type(t.target), "logits", lambda self, last: seen.append(torch.is_autocast_enabled("cpu")) or logits(self, last)
    )
    loop.evaluate(t.draft, t.target, t.held_out, t.config, t.target.head_weight[t.draft.vocab.target_ids_W])
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("skip_outside", [True, False])
def test_gradients_of_an_update_do_not_depend_on_how_it_is_packed(tmp_path, monkeypatch, skip_outside):
    monkeypatch.setattr(loop, "fast_bf16", lambda _: False)  # rounding is not what is tested
    config = dataclasses.replace(CONFIG, skip_outside=skip_outside)
    t = trainer(tmp_path, config)
    t.store.documents[1].supervised[:-2] = False  # packs differ in how many rows they teach, step by step
    found = []
    for group in ([[0, 1, 2, 3, 4]], [[0, 1], [2], [3, 4]], [[1], [4, 3, 2, 0]]):
        t.draft.zero_grad()
        loss, accuracy = t.backward(group)
        found.append((loss, accuracy, torch.cat([p.grad.flatten() for p in t.draft.parameters()])))
    for loss, accuracy, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert accuracy == pytest.approx(found[0][1])
        assert torch.allclose(gradient, found[0][2], rtol=1e-4, atol=1e-6)
    assert found[0][2].abs().max() > 1e-3
    # The mean of the packs' own means is something else: what they teach differs in size.
    t.draft.zero_grad()
    halves = [t.backward([numbers])[0] for numbers in ([0, 1], [2], [3, 4])]
    assert sum(halves) / 3 != pytest.approx(found[0][0], rel=1e-4)


def test_updates_group_the_packs_of_an_epoch(tmp_path):
    single = list(trainer(tmp_path).epoch(1))
    assert all(len(group) == 1 for group in single)
    double = list(trainer(tmp_path, dataclasses.replace(CONFIG, accumulate=3)).epoch(1))
    assert [pack for group in double for pack in group] == [pack for group in single for pack in group]
    assert [len(group) for group in double[:-1]] == [3] * (len(double) - 1)
    assert trainer(tmp_path, dataclasses.replace(CONFIG, accumulate=3)).total == 2 * len(double)


def test_a_run_that_gets_no_better_ends_early_and_stays_ended(tmp_path, monkeypatch):
    made = iter([1.2, 1.5, 1.5, 1.4])  # equal is no better
    monkeypatch.setattr(loop, "evaluate", lambda *a: loop.Evaluation([], [], next(made), []))
    config = dataclasses.replace(CONFIG, eval_every=1, save_every=50, patience=2)
    saved, reported = [], []
    t = trainer(tmp_path, config, saved)
    t.report = lambda p: reported.append((p.step, p.ended_early))
    assert t.run()
    assert reported == [(1, False), (2, False), (3, False), (4, True)]
    assert [tau for _, tau in saved] == [1.2, 1.5, 1.5]
    again = trainer(tmp_path, config)
    again.report = lambda p: pytest.fail("trained on")
    assert again.run()
    assert next(made, None) is None


def test_a_head_that_was_begun_before_is_measured_first_and_only_surpassed(tmp_path, monkeypatch):
    made = iter([1.5, 1.2, 1.4])
    monkeypatch.setattr(loop, "evaluate", lambda *a: loop.Evaluation([], [], next(made), []))
    config = dataclasses.replace(CONFIG, eval_every=1, patience=2)
    saved, reported = [], []
    t = trainer(tmp_path, config, saved)
    t.begun, start = True, weights(t)
    t.save_head = lambda draft, record: saved.append((record["best"], torch.equal(weights(t), start)))
    assert not t.run(lambda: True)  # stopped before the first update, behind the evaluation
    again = trainer(tmp_path, config, saved)
    again.begun = True
    again.report = lambda p: reported.append((p.step, p.evaluation.tau, p.ended_early))
    assert again.run()
    assert saved == [({"tau": 1.5, "step": 0}, True)]
    assert reported == [(1, 1.2, False), (2, 1.4, True)]
    state = torch.load(tmp_path / "state.pt")["state"]
    assert (state["best"], state["best_step"], state["since_best"]) == (1.5, 0, 2)
    assert [(row["step"], row["train_loss"] is None) for row in state["history"]] == [(0, True), (1, False), (2, False)]


def test_a_start_without_a_cycle_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "evaluate", lambda *a: loop.Evaluation([], [], None, []))
    reported = []
    t = trainer(tmp_path, dataclasses.replace(CONFIG, eval_every=1, patience=1))
    t.begun, t.report = True, lambda p: reported.append((p.step, p.ended_early))
    assert t.run()
    assert reported == [(0, False), (1, True)]


def test_an_update_is_reported_before_it_is_saved(tmp_path):
    def killed(progress):
        if progress.step == CONFIG.save_every:
            raise KeyboardInterrupt

    t = trainer(tmp_path)
    t.report = killed
    with pytest.raises(KeyboardInterrupt):
        t.run()
    assert not (tmp_path / "state.pt").exists()  # the update is done, and reported, once more


def test_the_held_out_loss_is_the_mean_over_every_scored_row(tmp_path):
    t = trainer(tmp_path)
    t.held_out.documents[0].supervised[4:] = False  # documents differ in how many of their rows are scored
    found = loop.evaluate(t.draft, t.target, t.held_out, CONFIG, t.head_rows_WD)
    documents = t.held_out.documents
    pack = loop.make_pack(documents, compute(t.target, documents), t.draft, t.target)
    _, stats = loop.configured_unroll(t.draft, pack, t.head_rows_WD, CONFIG)
    assert found.loss == pytest.approx(stats.loss, rel=1e-4)
    assert any(scored < rows for scored, rows in zip(stats.scored, stats.rows, strict=True))


def test_the_count_of_evaluations_without_progress_is_resumed(tmp_path, monkeypatch):
    made = iter([1.5, 1.2, 1.2, 1.2])
    monkeypatch.setattr(loop, "evaluate", lambda *a: loop.Evaluation([], [], next(made), []))
    config = dataclasses.replace(CONFIG, eval_every=1, patience=2)
    assert not trainer(tmp_path, config).run(iter([False, False, True]).__next__)  # after 1.5 and one without progress
    assert trainer(tmp_path, config).run()
    assert len(torch.load(tmp_path / "state.pt")["state"]["history"]) == 3
    assert torch.load(tmp_path / "state.pt")["state"]["best"] == 1.5


def test_decoding_on_the_way_is_real_and_disturbs_nothing(tmp_path):
    histories, runs = [], []
    for every in (0, 2):
        t = trainer(tmp_path / str(every), dataclasses.replace(CONFIG, eval_every=2, decode_every=every))
        assert t.run()
        runs.append(t)
        histories.append(torch.load(tmp_path / str(every) / "state.pt")["state"]["history"])
    assert torch.equal(weights(runs[0]), weights(runs[1]))
    assert all(row["decoded"] is None for row in histories[0])
    decoded = [row["decoded"] for row in histories[1]]
    assert [d is not None for d in decoded[:-1]] == [i % 2 == 1 for i in range(len(decoded) - 1)]
    t, last = runs[1], decoded[-1]
    assert set(last) == {"3:1:3", "6:8:60"}
    for tree, tau in last.items():  # each prompt on its own, in an engine of its own
        lengths = []
        for d in t.held_out.documents:
            first, end = d.replies[0]
            request = Request(d.ids[:first].tolist(), limits=Limits(end - first), tree=TreeConfig.parse(tree))
            Engine(t.target, t.draft).run([request])
            lengths += request.cycle_lengths
        assert tau == sum(lengths) / len(lengths)


def test_a_run_waits_while_a_measurement_holds_the_pause_file_and_the_time_does_not_count(tmp_path):
    t = trainer(tmp_path / "run")
    t.pause_file = tmp_path / "pause"
    seconds, held = [], []

    def report(progress):
        seconds.append(progress.seconds)
        if progress.step == 3:
            thread.start()
            while not taken(t.pause_file):
                time.sleep(0.01)

    def measure():
        with quiet(t.pause_file):
            held.append(len(seconds))
            time.sleep(1.5)
            held.append(len(seconds))

    thread = threading.Thread(target=measure)
    t.report = report
    started = time.monotonic()
    assert t.run()
    took = time.monotonic() - started
    thread.join()
    assert held == [3, 3]
    assert len(seconds) == t.total
    assert took - seconds[-1] > 1.4
