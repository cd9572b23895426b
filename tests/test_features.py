"""Features belong to their tokens: whatever the batch, the order or a resumed folder."""

import json

import pytest
import torch

from aquiline.config import UserError
from aquiline.data import features
from aquiline.data.dataset import Document, hold_out, packs, token_counts
from aquiline.data.features import FeatureStore, compute
from tests.conftest import tiny_target


def document(length: int, seed: int, *, greedy: bool = True) -> Document:
    ids = torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).int()
    return Document(ids, torch.arange(length) >= length // 2, greedy, "", f"d{seed}")


def equal(a, b) -> bool:
    return all(torch.allclose(getattr(a, n).float(), getattr(b, n).float(), atol=1e-4) for n in vars(a))


def test_features_do_not_depend_on_the_company():
    target = tiny_target()
    a, b = document(9, 0), document(14, 1)
    alone = compute(target, [a])
    first, last = compute(target, [a, b]), compute(target, [b, a])
    for name in vars(alone):
        want = getattr(alone, name)
        assert torch.allclose(getattr(first, name)[:9].float(), want.float(), atol=1e-4), name
        assert torch.allclose(getattr(last, name)[14:].float(), want.float(), atol=1e-4), name


def test_the_teacher_is_the_targets_full_vocabulary():
    target = tiny_target()
    d = document(10, 3)
    got = compute(target, [d])
    logits = target.logits(got.last_TD)
    for p in range(9):
        if bool(d.supervised[p + 1]):
            assert int(got.argmax_T[p]) == int(logits[p].argmax())
            assert float(got.logsumexp_T[p]) == pytest.approx(float(logits[p].logsumexp(0)), abs=1e-4)
        else:
            assert int(got.argmax_T[p]) == -1
    assert int(got.argmax_T[9]) == -1  # nothing follows the last token


def test_store_returns_what_was_computed_in_any_order_and_after_reopening(tmp_path):
    target = tiny_target()
    docs = [document(7 + i, i) for i in range(4)]
    store = FeatureStore(tmp_path / "f", target, docs, "w")
    store.get([2, 0])
    store.flush()
    again = FeatureStore(tmp_path / "f", target, docs, "w")
    assert again.arrays["present"].tolist() == [1, 0, 1, 0]
    for order in ([0, 1, 2, 3], [3, 1], [2]):
        got, want = again.get(order), compute(target, [docs[i] for i in order])
        assert torch.equal(got.argmax_T, want.argmax_T)
        assert torch.equal(got.aux_TA, want.aux_TA.bfloat16())
        assert torch.equal(got.last_TD, want.last_TD.bfloat16())


def test_what_was_said_to_be_missing_is_computed_whoever_wrote_it_meanwhile(tmp_path, monkeypatch):
    target, docs = tiny_target(), [document(7 + i, i) for i in range(3)]
    passes = []
    monkeypatch.setattr(
        features, "compute", lambda t, documents: passes.append(len(documents)) or compute(t, documents)
    )
    ours, other = (FeatureStore(tmp_path / "f", target, docs, "w") for _ in range(2))
    assert ours.missing([2, 0]) == [2, 0]
    missing = ours.missing([2, 1])
    other.get([1, 2])
    other.flush()
    assert ours.missing([2, 0]) == [0]
    assert equal(ours.get([2, 1], missing), other.get([2, 1]))
    assert passes == [2, 2]
    assert ours.get([2, 1]).argmax_T.shape == (17,)
    assert passes == [2, 2]
    assert FeatureStore(None, target, docs, "w").missing([2, 0]) == [2, 0]


@pytest.mark.parametrize("change", ["weights", "documents", "capture", "dtype"])
def test_a_folder_of_something_else_is_refused(tmp_path, change):
    target = tiny_target()
    docs = [document(8, 0), document(9, 1)]
    FeatureStore(tmp_path / "f", target, docs, "w").get([0])
    fingerprint = "other" if change == "weights" else "w"
    target = tiny_target(capture_after=(0, 3, 4)) if change == "capture" else target
    target = target.to(torch.bfloat16) if change == "dtype" else target
    docs = docs[:1] if change == "documents" else docs
    with pytest.raises(UserError, match="something else"):
        FeatureStore(tmp_path / "f", target, docs, fingerprint)


def test_rows_of_other_tokens_are_noticed(tmp_path):
    target = tiny_target()
    docs = [document(8, 0)]
    store = FeatureStore(tmp_path / "f", target, docs, "w")
    store.get([0])
    store.arrays["ids"][3] += 1
    with pytest.raises(UserError, match="other tokens"):
        store.get([0])


@pytest.mark.parametrize("column", ["aux", "ids", "present"])
def test_columns_that_are_lost_or_cut_are_noticed(tmp_path, column):
    target, docs = tiny_target(), [document(8, 0)]
    path = tmp_path / "f" / f"{column}.bin"
    FeatureStore(tmp_path / "f", target, docs, "w").get([0])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{column}.bin is .* bytes long"):
        FeatureStore(tmp_path / "f", target, docs, "w")
    path.unlink()
    with pytest.raises(UserError, match=f"{column}.bin is missing"):
        FeatureStore(tmp_path / "f", target, docs, "w")
    (tmp_path / "f" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json: not JSON"):
        FeatureStore(tmp_path / "f", target, docs, "w")
    (tmp_path / "f" / "manifest.json").unlink()  # begun again: nothing counts as present
    assert FeatureStore(tmp_path / "f", target, docs, "w").arrays["present"].tolist() == [0]


def test_a_document_is_present_only_after_its_columns_reached_the_disk(tmp_path, monkeypatch):
    store = FeatureStore(tmp_path / "f", tiny_target(), [document(8, 0)], "w")
    store.get([0])
    assert store.arrays["present"].tolist() == [0]
    with monkeypatch.context() as patched:
        patched.setattr("numpy.memmap.flush", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.flush()
    assert store.arrays["present"].tolist() == [0]
    store.flush()
    assert store.arrays["present"].tolist() == [1]


def test_features_reach_the_disk_when_enough_of_them_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "_UNWRITTEN_TOKENS", 17)
    store = FeatureStore(tmp_path / "f", tiny_target(), [document(8, 0), document(8, 1), document(8, 2)], "w")
    computed = []
    monkeypatch.setattr(features, "compute", lambda *a: computed.append(1) or compute(*a))
    for i in (0, 1, 0):
        store.get([i])
    assert (store.arrays["present"].tolist(), len(computed)) == ([0, 0, 0], 2)  # waiting ones are not computed again
    store.get([2])
    assert store.arrays["present"].tolist() == [1, 1, 1]


def test_a_disk_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    target = tiny_target()
    docs = [document(8, 0)]
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 100})())
    with pytest.raises(UserError, match="GiB"):
        FeatureStore(tmp_path / "f", target, docs, "w")
    assert not list((tmp_path / "f").iterdir())


def test_manifest_and_columns_are_there_before_the_features(tmp_path):
    FeatureStore(tmp_path / "f", tiny_target(), [document(8, 0)], "w")
    manifest = json.loads((tmp_path / "f" / "manifest.json").read_text())
    assert manifest["tokens"] == 8
    assert manifest["capture_after"] == [1, 3, 4]


def test_packs_are_a_shuffle_within_the_limit_and_depend_only_on_seed_and_epoch():
    docs = [document(5 + i % 7, i) for i in range(40)] + [document(60, 99)]
    for epoch in (0, 1):
        made = list(packs(docs, 30, 7, epoch))
        assert sorted(i for p in made for i in p) == list(range(41))
        assert all(sum(len(docs[i]) for i in p) <= 30 or len(p) == 1 for p in made)
        assert made == list(packs(docs, 30, 7, epoch))
    assert list(packs(docs, 30, 7, 0)) != list(packs(docs, 30, 7, 1))


def test_held_out_documents_are_greedy_disjoint_and_stable():
    docs = [document(8, i, greedy=i % 3 == 0) for i in range(60)]
    train, held = hold_out(docs, 5, 0)
    assert len(held) == 5
    assert all(d.greedy for d in held)
    assert not {d.name for d in train} & {d.name for d in held}
    fewer = [d for d in docs if d.name != train[0].name]
    assert [d.name for d in hold_out(fewer, 5, 0)[1]] == [d.name for d in held]


def test_counts_are_of_supervised_tokens_only():
    d = Document(torch.tensor([1, 2, 3, 3]).int(), torch.tensor([False, False, True, True]), True, "", "")
    assert token_counts([d], 5).tolist() == [0, 0, 0, 2, 0]
    assert d.replies == [(2, 4)]
    flags = torch.tensor([True, False, True, True, False, True])
    assert Document(torch.arange(6).int(), flags, True, "", "").replies == [(0, 1), (2, 4), (5, 6)]
