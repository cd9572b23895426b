"""The pause file and the load: between processes, for those who come, go, and are killed."""

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from aquiline.config import UserError
from aquiline.measure import quiet as module
from aquiline.measure.quiet import GiveWay, Quiet, quiet

HOLD = """
import sys, time
from pathlib import Path
from aquiline.measure.quiet import quiet
with quiet(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


def never() -> bool:
    return False


def test_training_waits_for_a_measurement_and_goes_on_when_its_process_is_killed(tmp_path):
    path = tmp_path / "pause"
    run = GiveWay(path)
    assert run(never) < 0.1
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert not module._take(module._open(module._busy(path)), module.fcntl.LOCK_EX)  # an update is going on
        calls = []
        while not taken(path):
            time.sleep(0.05)
        assert run(lambda: bool(calls.append(1)) or len(calls) == 3) >= 0.3  # it gave way; then it was told to stop
        assert holder.stdout.readline() == "held\n"
        threading.Timer(0.5, holder.kill).start()
        assert run(never) > 0.3
    finally:
        holder.kill()
        holder.wait()
    run.close()


def taken(path) -> bool:
    with open(path) as f:
        return not module._take(f, module.fcntl.LOCK_SH)


def test_a_measurement_waits_until_every_update_is_over_and_for_other_measurements(tmp_path):
    path, began, order = tmp_path / "pause", threading.Event(), []
    runs = [GiveWay(path), GiveWay(path)]
    for run in runs:
        run(never)

    def measure(name):
        with quiet(path):
            order.append(f"{name} begins")
            began.set()
            time.sleep(0.3)
            order.append(f"{name} ends")

    threads = [threading.Thread(target=measure, args=[name]) for name in "ab"]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    runs[0].close()  # one run is over; the other is still in its update
    assert not began.wait(0.3)
    waiting = threading.Thread(target=runs[1], args=[never])
    waiting.start()
    for thread in [*threads, waiting]:
        thread.join(10)
    assert [order[0][2:], order[1], order[2][2:]] == ["begins", f"{order[0][0]} ends", "begins"]
    assert len(order) == 4


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed")
def test_any_command_waits_for_the_update_as_the_readme_says(tmp_path):
    path, readme = tmp_path / "pause", Path(__file__).parents[1] / "README.md"
    assert "`flock FILE flock FILE.busy command`" in " ".join(readme.read_text("utf-8").split())
    run = GiveWay(path)
    run(never)
    command = subprocess.Popen(["flock", path, "flock", f"{path}.busy", "true"])
    try:
        while not taken(path):
            time.sleep(0.05)
        with pytest.raises(subprocess.TimeoutExpired):
            command.wait(0.5)  # the update goes on
        run.close()
        assert command.wait(60) == 0
    finally:
        command.kill()


def test_without_a_pause_file_nobody_waits(monkeypatch):
    monkeypatch.delenv(module.PAUSE_FILE, raising=False)
    assert module.pause_file() is None
    assert GiveWay(None)(never) == 0.0
    with quiet(None) as found:
        pass
    assert found.record()["pause_file"] is False
    with pytest.raises(UserError, match="cannot be opened"), quiet(module.Path("/nowhere/at/all")):
        pass


def test_load_is_what_others_computed(monkeypatch):
    seconds = iter([(100.0, 400.0), (103.0, 440.0)])  # of 40 processor seconds 3 were others'
    monkeypatch.setattr(module, "processor_seconds", lambda: next(seconds))
    with quiet(None) as found:
        assert found.load is None
    assert found.record() == {"load": 0.075, "loaded": True, "pause_file": False}
    with pytest.raises(UserError, match="took 8% of the machine"):
        found.require()
    Quiet(False, 0.04).require()
    Quiet(False, None).require()  # where the system does not tell
