"""What the machine is, where its user's cache is, and how busy others keep it."""

import types

import torch

from aquiline.model import machine
from aquiline.model.machine import ForeignLoad


def test_code_is_loaded_only_from_a_folder_that_is_the_users_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine.cache_folder() == tmp_path / ".cache" / "aquiline"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert machine.cache_folder() == tmp_path / "x" / "aquiline"
    (tmp_path / "x" / "aquiline").chmod(0o777)
    assert machine.cache_folder() is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert machine.cache_folder() is None


def test_our_own_work_is_no_load_and_a_stolen_second_is(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    tick = machine.os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(machine, "_STAT", str(stat))
    monkeypatch.setattr(machine.os, "times", lambda: types.SimpleNamespace(**own))
    own = {"user": 5.0, "system": 1.0, "children_user": 2.0, "children_system": 0.0}
    # user nice system idle iowait irq softirq steal guest guest_nice; guests are counted among users already
    stat.write_text("cpu  " + " ".join(str(n * tick) for n in (20, 1, 2, 100, 10, 1, 1, 5, 7, 0)) + "\ncpu0 1 2\n")
    assert machine.processor_seconds() == (30.0 - 8.0, 140.0)
    monkeypatch.setattr(machine, "_STAT", str(tmp_path / "none"))
    assert machine.processor_seconds() is None


def test_foreign_load_is_told_of_a_quarter_second_at_a_time(monkeypatch):
    now, seconds = [100.0], [(0.0, 100.0)]
    monkeypatch.setattr(machine.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine, "processor_seconds", lambda: seconds[0])
    load = ForeignLoad()
    now[0], seconds[0] = 100.1, (0.2, 100.2)
    assert load.lately() is None  # too soon
    now[0], seconds[0] = 100.3, (0.2, 100.6)
    assert load.lately() is True  # a third of the time
    now[0], seconds[0] = 100.6, (0.21, 101.2)
    assert load.lately() is False
    seconds[0], now[0] = None, 101.0
    assert load.lately() is False  # not known here


class TestLargePages:
    def test_copies_are_contiguous_equal_and_apart(self):
        pages = machine.LargePages()
        sources = [torch.randn(7, 5).T, torch.randn(3).bfloat16(), torch.arange(6).view(2, 3), torch.zeros(0, 4)]
        copies = [pages.copy(source) for source in sources]
        for source, copy in zip(sources, copies, strict=True):
            assert torch.equal(source, copy)
            assert copy.dtype == source.dtype
            assert copy.is_contiguous()
            assert copy.data_ptr() % 64 == 0
        copies[1].fill_(1)
        assert torch.equal(copies[0], sources[0])
        assert torch.equal(copies[2], sources[2])

    def test_a_piece_that_is_full_is_followed_by_another(self, monkeypatch):
        monkeypatch.setattr(machine.LargePages, "_PIECE", 1000)
        pages = machine.LargePages()
        sources = [torch.full((n,), float(n)) for n in (100, 100, 60, 3000, 1)]  # the one before the last needs its own
        copies = [pages.copy(source) for source in sources]
        assert all(torch.equal(source, copy) for source, copy in zip(sources, copies, strict=True))

    def test_a_piece_begun_in_inference_mode_serves_outside_of_it(self):
        pages = machine.LargePages()
        with torch.inference_mode():
            pages.copy(torch.ones(3))
        assert torch.equal(pages.copy(torch.ones(3)), torch.ones(3))

    def test_a_system_without_them_does_without(self, monkeypatch):
        monkeypatch.delattr(machine.mmap, "MADV_HUGEPAGE", raising=False)
        assert torch.equal(machine.LargePages().copy(torch.ones(3)), torch.ones(3))
