"""What the README shows is run, with a tiny model and head as `default`; the generated reference is compared."""

import io
import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from aquiline.cli import main as cli
from aquiline.config import UserError
from aquiline.files import checkpoint
from aquiline.serve.server import Server
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
    "eval": f"{SMALL} --device cpu",
    "bench": f"{SMALL} --device cpu --repeats 1 --allow-load",
    "plot": "",
    "serve": "--device cpu --dtype float32 --port 0",
    "train": "--device cpu --dtype float32 --draft-vocab-size 100 --held-out 2",
    "data answer": f"{SMALL} --device cpu",
    "data invent": f"{SMALL} --device cpu --count 2",
    "data show": "",
    "export-target": "",
    "convert": "",
    "serve-command": "",
}
SILENT = {"plot", "serve", "train", "export-target", "data answer", "data invent"}  # they write files

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

    async def ends_at_once(self, counter):
        return True

    monkeypatch.setattr(Server, "on_tick", ends_at_once)
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("".join(f"Say {n}.\n" for n in range(6)))
    for name in ("mt_bench", "gsm8k"):
        Path(f"{name}.jsonl").write_text('{"turns": ["hi"]}\n{"messages": [{"role": "user", "content": "a b"}]}\n')


def verb(line) -> str:
    words = shlex.split(line)[1:3]
    return " ".join(words) if words[0] == "data" else words[0]


def run_command(line, monkeypatch, capsys) -> str:
    arguments = shlex.split(line)[1:] + shlex.split(TINY[verb(line)])
    monkeypatch.setattr(sys, "argv", ["aquiline", *arguments])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n/color\nand then?\n"), encoding="utf-8"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert not ended.value.code, f"{line}\n{err}"
    if "--json" in arguments and arguments[0] == "generate":
        json.loads(out)
    if "--compare" in arguments:
        assert "equal        yes" in err
    return out


def test_every_block_runs_from_the_first_to_the_last(folder_of_its_own, monkeypatch, capsys):
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, "README.md", "exec"), {})
        else:
            for line in block.splitlines():
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
    assert {verb(line) for line in COMMANDS} == set(verbs()) == set(TINY)
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
