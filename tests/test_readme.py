"""What the README shows is run, with a tiny model and head as `default`; the generated reference is compared."""

import io
import json
import re
import runpy
import shlex
import shutil
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch

from aquiline.cli import main as cli
from aquiline.config import UserError
from aquiline.files import checkpoint
from aquiline.serve import server
from tests.serving import WAIT, until
from tests.test_api import make_draft
from tests.test_cli import verbs
from tests.test_invent import make_writing_target, writing_chat

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(sh|python) run-in-test\n(.*?)^```", README, re.M | re.S)
COMMANDS = [line for language, block in BLOCKS if language == "sh" for line in block.splitlines()]

# What a tiny model needs beyond the README's flags.
SMALL = "--dtype float32 --max-new-tokens 24"
TINY = {
    "generate": f"{SMALL} --device cpu",
    "chat": f"{SMALL} --device cpu",
    "chat --server": "--max-new-tokens 24",
    "serve": "--dtype float32 --device cpu",
    "eval": f"{SMALL} --device cpu",
    "bench": f"{SMALL} --device cpu --repeats 1 --allow-load",
    "plot": "",
    "train": "--device cpu --dtype float32 --draft-vocab-size 100 --held-out 2",
    "data answer": f"{SMALL} --device cpu",
    "data invent": f"{SMALL} --device cpu --count 2",
    "data show": "",
    "export-target": "",
    "convert": "",
    "serve-command": "",
    "doctor": f"{SMALL} --device cpu",
}
SILENT = {"plot", "train", "export-target", "data answer", "data invent"}  # they write files

pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in ("the draft's tokens are", "the data has")]


@pytest.fixture
def folder_of_its_own(tmp_path, monkeypatch):
    """A working directory with the files that the README speaks of."""
    target = make_writing_target(tmp_path / "models/target", max_positions=200)
    make_draft(tmp_path / "models/draft", target, chat=writing_chat(), draft_vocab_size=80)
    for name, folder in (("target_path", "target"), ("draft_path", "draft")):
        find, tiny = getattr(checkpoint, name), tmp_path / "models" / folder
        monkeypatch.setattr(
            checkpoint, name, lambda spec, find=find, tiny=tiny: tiny if spec == "default" else find(spec)
        )
    shutil.copytree(tmp_path / "models/target", tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("".join(f"Say {n}.\n" for n in range(6)))
    for name in ("mt_bench", "gsm8k"):
        Path(f"{name}.jsonl").write_text('{"turns": ["hi"]}\n{"messages": [{"role": "user", "content": "a b"}]}\n')


@pytest.fixture
def serve(monkeypatch):
    """Runs the command of a server, until the test is over; the port it has instead of 8000."""
    threads, servers = [], []
    make = server.make_server
    monkeypatch.setattr(server, "make_server", lambda *given: servers.append(make(*given)) or servers[-1])

    def run(line) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = shlex.split(f"{line} {TINY['serve']} --port {port}")
        threads.append(threading.Thread(target=lambda: cli.app(command[1:], standalone_mode=False), daemon=True))
        threads[-1].start()
        until(lambda: servers and servers[-1].started)
        return port

    yield run
    for running, thread in zip(servers, threads, strict=True):
        running.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


def verb(line) -> str:
    words = shlex.split(line)[1:3]
    return " ".join(words) if words[0] == "data" or words[1:] == ["--server"] else words[0]


def run_command(line, monkeypatch, capsys) -> str:
    arguments = shlex.split(line)[1:] + shlex.split(TINY[verb(line)])
    monkeypatch.setattr(sys, "argv", ["aquiline", *arguments])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n/color\nand then?\n"), encoding="utf-8"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    # Of a head that a few updates made, something may be certainly wrong.
    assert not ended.value.code or (arguments[0], ended.value.code) == ("doctor", 1), f"{line}\n{err}"
    if "--json" in arguments and arguments[0] == "generate":
        json.loads(out)
    if "--compare" in arguments:
        assert "equal        yes" in err
    return out


def test_every_block_runs_from_the_first_to_the_last(folder_of_its_own, serve, monkeypatch, capsys):
    port = 8000
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, "README.md", "exec"), {})
        else:
            for line in block.splitlines():
                if verb(line) == "serve":
                    port = serve(line)
                    continue
                line = line.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
                assert run_command(line, monkeypatch, capsys) or verb(line) in SILENT, line
    record = json.loads(Path("record.json").read_text())
    assert list(record["tasks"]) == ["mt_bench", "gsm8k"]
    assert checkpoint.load_target("smollm2", torch.float32).config.hidden_size == 32


def test_the_python_example_runs_on_the_real_default(capsys):
    try:
        checkpoint.target_path("default")
        checkpoint.draft_path("default")
    except UserError as error:
        pytest.skip(str(error))
    exec(compile(next(b for language, b in BLOCKS if language == "python"), "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 100


def test_commands_are_marked_to_be_run_and_every_verb_has_one():
    assert {verb(line) for line in COMMANDS} == set(verbs()) | {"chat --server"} == set(TINY)
    unmarked = re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S)
    words = [line.split()[:2] for block in unmarked for line in block.splitlines()]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert words
    assert all(command == "make" and target in targets for command, target in words)


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_command_line_reference_is_current():
    written = runpy.run_path(str(ROOT / "runs" / "cli_reference.py"))["reference"]()
    assert (ROOT / "docs" / "cli.md").read_text("utf-8") == written, "run: python runs/cli_reference.py"
