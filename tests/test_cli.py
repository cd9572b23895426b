"""The command line, in this process, on tiny models: contracts, conversations, training with kills, bad input."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import typer

from aquiline import api
from aquiline.api import Model, load_chat
from aquiline.cli import main as cli
from aquiline.config import DEFAULT_TREE, BenchConfig, UserError
from aquiline.files import checkpoint
from aquiline.measure import quiet
from aquiline.train.run import TrainingRun
from tests.test_api import folders, load, make_draft  # noqa: F401 (a fixture)
from tests.test_evaluate import PLAIN_KEYS
from tests.test_quiet import taken
from tests.tiny_chat import assistant, byte_chat, user

decode, train = cli.decode, cli.train  # by way of main: verbs are declared in the order in which they are imported
pytestmark = pytest.mark.filterwarnings("ignore:the draft's tokens are hardly ever accepted")

LOADED = {"--target", "--draft", "--dtype", "--quantize", "--quantize-draft", "--device", "--exact", "--template-kwarg"}
MODEL = LOADED | {"--tree", "--max-new-tokens", "--temperature", "--seed"}
SAMPLING = {"--top-k", "--top-p", "--min-p", "--repetition-penalty", "--presence-penalty", "--frequency-penalty"}
FLAGS = {
    "generate": MODEL | SAMPLING | {"--system", "--compare", "--json"},
    "chat": MODEL | SAMPLING | {"--system", "--server", "--model"},
    "eval": MODEL | {"--json", "--limit", "--no-plain", "--pause-file", "--allow-load"},
    "bench": LOADED
    | {"--tree", "--max-new-tokens", "--json", "--pause-file", "--allow-load", "--batch", "--repeats"},
    "plot": set(),
    "serve": LOADED
    | {"--host", "--port", "--max-batch", "--queue", "--context", "--timeout", "--api-key-file"},
    "export-target": set(),
    "convert": {"--to", "--target", "--force"},
    "serve-command": {"--engine", "--target", "--record", "--tree", "--gpus", "--nodes"},
    "doctor": {
        "--prompts", "--limit", "--max-new-tokens", "--system", "--template-kwarg", "--json", "--device", "--dtype",
    },
    "train": {
        "--out", "--target", "--features", "--capture-after", "--epochs", "--batch-tokens", "--max-length",
        "--ttt-steps", "--draft-vocab-size", "--optimizer", "--learning-rate", "--adamw-learning-rate", "--held-out",
        "--eval-every", "--save-every", "--seed", "--dtype", "--warm-start", "--accumulate", "--decode-every",
        "--patience", "--pause-file", "--dry-run",
        "--loss", "--feature-loss", "--switch", "--init", "--freeze-lm-head", "--keep-outside",
        "--checkpoint-activations", "--strict", "--device", "--shard-target",
    },
    "data answer": {
        "--target", "--draft", "--server", "--model", "--in-flight", "--temperature", "--max-new-tokens",
        "--max-length", "--system", "--template-kwarg", "--limit", "--seed", "--strict", "--device", "--dtype",
    },
    "data invent": {
        "--target", "--draft", "--count", "--in-flight", "--temperature", "--max-new-tokens", "--system", "--seed",
        "--device", "--dtype",
    },
    "data show": {"--target", "--rows", "--max-length", "--strict"},
}  # fmt: skip
OUTPUTS = {"setup.json", "state", "head", "log.jsonl", "run.svg", "tensorboard"}
RESULT_KEYS = {
    "text", "token_ids", "finish_reason", "prompt_tokens", "generated_tokens", "cycles", "tau", "tokens_per_second",
    "decode_tokens_per_second", "tree",
}  # fmt: skip


def verbs() -> dict:
    """Every command by its name, `data answer` and the like with both words."""
    found = typer.main.get_command(cli.app).commands
    inner = {f"{n} {k}": v for n, c in found.items() for k, v in getattr(c, "commands", {}).items()}
    return {n: c for n, c in found.items() if not hasattr(c, "commands")} | inner


def test_the_flags_of_every_verb_are_these_and_no_others():
    commands = verbs()
    got = {n: {o for p in c.params for o in p.opts if o.startswith("--")} - {"--help"} for n, c in commands.items()}
    assert got == FLAGS


def test_the_help_needs_no_pytorch():
    code = (
        "import sys, aquiline.cli.main\n"
        "try: aquiline.cli.main.main(['generate', '--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.fixture
def aquiline(capsys, monkeypatch):
    """Run a command line; (exit code, stdout, stderr)."""

    def run(*arguments, stdin: bytes = b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/aquiline", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


def models(root, draft="draft"):
    draft = root / "draft" if draft == "draft" else draft
    return ["--target", root / "target", "--draft", draft, "--dtype", "float32", "--device", "cpu"]


def test_generate_streams_text_to_stdout_and_the_rest_to_stderr(aquiline, folders):  # noqa: F811
    reference = load(folders).generate("hi", max_new_tokens=20)
    code, out, err = aquiline("generate", "hi", *models(folders), "--max-new-tokens", 20)
    assert (code, out) == (0, reference.text + "\n")
    assert "target, draft draft, float32 on cpu" in err
    assert "20 tokens (length)" in err
    assert f"tree {DEFAULT_TREE}" in err
    code, piped, _ = aquiline("generate", "-", *models(folders), "--max-new-tokens", 20, stdin=b"hi")
    assert (code, piped) == (0, out)
    _, other, _ = aquiline("generate", "hi", *models(folders), "--max-new-tokens", 20, "--system", "S")
    assert other != out


@pytest.mark.parametrize("verb", ["generate", "chat", "eval", "bench", "serve"])
def test_what_is_loaded_is_what_was_asked_for(aquiline, monkeypatch, tmp_path, verb):
    asked = {"dtype": "float32", "device": "cpu", "quantize": "int8", "quantize_draft": "int4", "exact": True}
    given: dict[str, object] = {}

    def refuse(*names, **settings):
        given.update(settings, names=names)
        raise UserError("enough is known")

    monkeypatch.setattr(api, "load", refuse)
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "hi"}) + "\n")
    flags = [x for k, v in asked.items() for x in (f"--{k.replace('_', '-')}", v) if x is not True]
    what = {"generate": ["hi"], "eval": [tmp_path / "mine.jsonl"], "bench": [tmp_path / "mine.jsonl"]}.get(verb, [])
    port = ["--port", 0] if verb == "serve" else []
    code, _, err = aquiline(verb, *what, "--target", "t", "--draft", "d", *flags, *port)
    assert (code, "enough is known" in err) == (2, True)
    assert given == asked | {"names": ("t", "d"), "template_kwargs": {}}


@pytest.mark.parametrize("draft", ["draft", "ngram", "none"])
def test_generate_json_follows_its_contract(aquiline, folders, draft):  # noqa: F811
    tree = () if draft == "none" else ("--tree", "4:4:12")
    arguments = ["generate", "hi", *models(folders, draft), *tree, "--max-new-tokens", 20, "--json"]
    code, out, err = aquiline(*arguments, "--temperature", 1, "--seed", 7, "--top-p", 0.9)
    value = json.loads(out)
    assert code == 0
    assert "float32 on cpu" in err
    assert set(value) == RESULT_KEYS
    reference = load(folders, "none").generate("hi", max_new_tokens=20, temperature=1.0, seed=7, top_p=0.9)
    assert (value["text"], value["token_ids"]) == (reference.text, reference.token_ids)
    assert value["tree"] == (None if draft == "none" else "4:4:12")
    assert (value["tau"] is None) == (value["cycles"] == 0)  # no cycle, no tau
    assert (value["cycles"] > 0) == (draft == "draft")  # nothing repeats in this text
    if draft == "none":
        return
    code, out, _ = aquiline(*arguments, "--compare")
    value = json.loads(out)
    assert code == 0
    assert set(value) == RESULT_KEYS | {"plain", "equal", "speedup"}
    assert set(value["plain"]) == RESULT_KEYS - {"cycles", "tau", "tree"}
    assert value["equal"] is True
    assert value["speedup"] > 0
    assert value["plain"]["token_ids"] == value["token_ids"]


def test_compare_prints_the_text_once_and_the_comparison(aquiline, folders, monkeypatch):  # noqa: F811
    ran, run = [], Model.run
    monkeypatch.setattr(Model, "run", lambda self, request: ran.append(request) or run(self, request))
    code, out, err = aquiline("generate", "hi", *models(folders), "--max-new-tokens", 20, "--compare")
    assert [request.reused_tokens for request in ran[-2:]] == [0, 0]  # neither profits from the other
    monkeypatch.undo()
    assert (code, out) == (0, load(folders).generate("hi", max_new_tokens=20).text + "\n")
    assert "equal        yes · speed-up" in err
    assert err.count("tokens/s") == 2


def test_a_draft_that_never_helps_is_one_line_on_stderr(aquiline, folders, tmp_path):  # noqa: F811
    make_draft(tmp_path / "dull", checkpoint.load_target(folders / "target", torch.float32), zeroed=True)
    code, out, err = aquiline(
        "generate", "hi", *models(folders, tmp_path / "dull"), "--tree", "4:4:12", "--max-new-tokens", 80, "--json"
    )
    assert code == 0
    assert json.loads(out)["tau"] < 1.05
    (line,) = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert "hardly ever accepted" in line


def test_chat_keeps_the_conversation(aquiline, folders):  # noqa: F811
    model = load(folders)
    settings = {"max_new_tokens": 15}
    first = model.generate("hi", **settings).text
    second = model.generate([user("hi"), assistant(first), user("więcej")], **settings).text
    turns = "hi\n\nwięcej\n/reset\nhi\n/color\nhi\n/quit\nnever read\n".encode()
    code, out, err = aquiline("chat", *models(folders), "--max-new-tokens", 15, stdin=turns)
    assert code == 0
    plain, coloured = f"{first}\n{second}\n{first}\n", out[len(first + second + first) + 3 :]
    assert out.startswith(plain)
    third = model.generate([user("hi"), assistant(first), user("hi")], **settings).text
    assert decode._paint("x", 1)[:5] in err  # the legend
    for sequence in ("\x1b[0m", *(f"\x1b[{c}m" for c in decode._COLOURS)):
        coloured = coloured.replace(sequence, "")
    assert coloured == third + "\n"
    code, out, _ = aquiline("chat", *models(folders), "--max-new-tokens", 15, stdin=b"hi")  # ends without a line feed
    assert (code, out) == (0, first + "\n")


def test_colours_tell_the_origin():
    assert decode._paint("x", 0) == "x"
    assert decode._paint("", 3) == ""
    painted = {decode._paint("x", depth) for depth in range(1, 7)}
    assert len(painted) == 6
    assert decode._paint("x", 99) in painted


@pytest.fixture
def prompt_files(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"turns": ["hi", "more"]}\n{"turns": ["a b a b"]}\n')
    (tmp_path / "two.jsonl").write_text(json.dumps({"messages": [user("hi")], "id": "m"}) + "\n")
    return tmp_path / "one.jsonl", tmp_path / "two.jsonl"


def test_eval_json_follows_its_contract(aquiline, folders, prompt_files, tmp_path):  # noqa: F811
    arguments = ["eval", *prompt_files, *models(folders, "ngram"), "--max-new-tokens", 40]
    code, out, _ = aquiline(*arguments, "--json", tmp_path / "record.json", "--tree", "3:1:3")
    assert code == 0
    assert "speed-up" in out
    record = json.loads((tmp_path / "record.json").read_text())
    assert list(record["tasks"]) == ["one", "two"]
    assert [t["prompts"] for t in record["tasks"].values()] == [2, 1]
    contract = {"prompts", "tau", "acceptance_per_depth", "n_alpha", "tokens_per_second"} | PLAIN_KEYS
    assert all(set(t) >= contract and t["equal_share"] == 1.0 for t in record["tasks"].values())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    code, out, err = aquiline(*arguments, "--json", "-", "--limit", 1, "--no-plain")
    record = json.loads(out)
    assert code == 0
    assert "speed-up" in err
    assert record["tasks"]["one"]["prompts"] == 1
    assert not PLAIN_KEYS & set(record["tasks"]["one"])
    assert record["settings"]["limit"] == 1


def test_bench_json_follows_its_contract_and_can_be_drawn(aquiline, folders, prompt_files, tmp_path):  # noqa: F811
    record = tmp_path / "bench.json"
    arguments = ["bench", *prompt_files, *models(folders), "--max-new-tokens", 9, "--allow-load", "--repeats", 2]
    code, out, _ = aquiline(*arguments, "--json", record, "--batch", "1,3", "--tree", "2:2:3", "--tree", "auto")
    assert code == 0
    assert "speed-up" in out
    value = json.loads(record.read_text())
    assert list(value["batches"]) == ["1", "3"]
    assert all(list(block["trees"]) == ["2:2:3", "auto"] for block in value["batches"].values())
    assert set(value["startup"]) == {"load", "first_token", "first_tokens"}
    code, out, err = aquiline(*arguments, "--json", "-", "--batch", 2)
    assert code == 0
    assert "speed-up" in err
    assert json.loads(out)["settings"]["trees"] == [str(tree) for tree in BenchConfig.trees]
    code, out, err = aquiline("plot", record, tmp_path / "bench.svg")
    assert (code, out) == (0, "")
    assert "speed-up over plain decoding" in (tmp_path / "bench.svg").read_text()
    check_refused(aquiline("plot", record, tmp_path / "other.json"), "is no .svg file")
    check_refused(aquiline("plot", prompt_files[1], tmp_path / "x.svg"), "nothing to draw")
    assert not (tmp_path / "x.svg").exists()


def test_eval_takes_the_pause_file(aquiline, folders, prompt_files, tmp_path, monkeypatch):  # noqa: F811
    """And says when the machine was not its own."""
    asked = [(0.0, 0.0), (5.0, 10.0), (0.0, 0.0), (5.0, 10.0), (0.0, 0.0), (0.1, 10.0)]  # others', all processor time
    monkeypatch.setattr(quiet, "processor_seconds", lambda: asked.pop(0))
    monkeypatch.setenv("AQUILINE_PAUSE_FILE", str(tmp_path / "pause"))
    arguments = ["eval", prompt_files[1], *models(folders, "ngram"), "--max-new-tokens", 9, "--json", "-"]
    code, out, err = aquiline(*arguments)
    assert code == 0
    assert "took 50% of the machine meanwhile: the times are left out" in err
    assert json.loads(out)["tasks"]["two"]["tokens_per_second"] is None
    assert json.loads(out)["machine"]["pause_file"] is True
    code, out, err = aquiline(*arguments, "--allow-load")
    assert "kept all the same" in err
    assert json.loads(out)["tasks"]["two"]["tokens_per_second"] > 0
    assert json.loads(out)["machine"]["loaded"] is True
    code, out, err = aquiline(*arguments)
    assert "warning" not in err
    assert json.loads(out)["machine"]["load"] == 0.01
    assert (tmp_path / "pause").exists()


def test_export_target_loads_back_the_same(aquiline, folders, tmp_path):  # noqa: F811
    code, _, err = aquiline("export-target", folders / "target", tmp_path / "out")
    assert code == 0
    assert "target written to" in err
    (a, b) = (checkpoint.load_target(f, torch.float32) for f in (folders / "target", tmp_path / "out"))
    assert all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())
    assert load_chat(tmp_path / "out").fingerprint() == byte_chat().fingerprint()


def test_convert_prints_what_it_changed(aquiline, folders, tmp_path):  # noqa: F811
    code, out, err = aquiline("convert", folders / "draft", tmp_path / "out", "--to", "speculators")
    assert (code, err) == (0, "")
    assert "renamed midlayer.* to layers.0.* (10 tensors)" in out.splitlines()
    assert "--force" in aquiline("convert", "--help")[1]
    code, out, err = aquiline("convert", folders / "draft", tmp_path / "other", "--to", "vllm")
    assert (code, out) == (2, "")
    assert err == "error: --to vllm is not known; expected one of sglang, speculators, openvino, gguf\n"
    settings = ["--max-new-tokens", 20, "--tree", "4:2:8", "--json"]
    reference = load(folders).generate("hi", max_new_tokens=20, tree="4:2:8")
    _, out, _ = aquiline("generate", "hi", *models(folders, tmp_path / "out"), *settings)
    assert json.loads(out)["token_ids"] == reference.token_ids
    assert json.loads(out)["tau"] == reference.tau


# ---------------------------------------------------------------- training


@pytest.fixture(scope="module")
def answers(folders, tmp_path_factory):  # noqa: F811
    """Greedy answers of the tiny target, and one conversation that somebody else wrote in part."""
    model = load(folders, "none")
    rows = []
    for i in range(14):
        ids = model.prompt_ids(f"say {i}")
        reply = model.generate(ids, max_new_tokens=24).token_ids
        rows.append({"id": f"r{i}", "temperature": 0, "prompt_ids": ids, "response_ids": reply})
    talk = [user("a"), assistant("not ours"), user("b"), assistant("ours")]
    rows.append({"id": "talk", "messages": talk, "written": [False, True]})
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train_arguments(root, answers, out, *more):
    return [
        "train", answers, "--out", out, "--target", root / "target", "--device", "cpu", "--dtype", "float32",
        "--batch-tokens", 120,
        "--ttt-steps", 3, "--draft-vocab-size", 100, "--held-out", 2, "--eval-every", 4, "--save-every", 3,
        "--epochs", 2, "--features", answers.parent / "features", *more,
    ]  # fmt: skip


def state(out):
    return torch.load(out / "state" / "state.pt", weights_only=True)


@pytest.mark.filterwarnings("ignore:the data has")
def test_a_dry_run_writes_nothing(aquiline, folders, answers, tmp_path, monkeypatch):  # noqa: F811
    shutil.copy(answers, tmp_path / "answers.jsonl")
    pause, held, estimate = answers.parent / "pause", [], TrainingRun.estimate
    seconds = iter([(0.0, 0.0), (3.0, 10.0)])
    monkeypatch.setattr(quiet, "processor_seconds", lambda: next(seconds))
    monkeypatch.setattr(TrainingRun, "estimate", lambda run: held.append(taken(pause)) or estimate(run))
    arguments = train_arguments(folders, tmp_path / "answers.jsonl", tmp_path / "out", "--dry-run")
    code, _, err = aquiline(*arguments, "--pause-file", pause)
    assert code == 0
    assert held == [True]
    assert "warning: other processes took 30% of the machine meanwhile" in err
    free = float(re.search(r"([0-9.]+) GiB are free", err)[1])
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, abs=2)
    assert "as if no features were on disk yet" in err
    for fact in ("parameters are trained", "updates over", "s each", "in all", "GiB of memory", "GiB on disk"):
        assert fact in err
    assert "nothing was written" in err
    assert [p.name for p in tmp_path.iterdir()] == ["answers.jsonl"]


def test_a_warm_start_from_a_head_that_names_no_held_out_rows(aquiline, folders, answers, tmp_path):  # noqa: F811
    begun = ("--warm-start", folders / "draft", "--draft-vocab-size", 200, "--dry-run")
    code, _, err = aquiline(*train_arguments(folders, answers, tmp_path / "out", *begun))
    assert code == 0
    assert "draft does not say which rows were held out of its training: it may have learnt those here" in err
    assert "which it may have learnt" not in err
    assert "warning: the whole run is" in err


@pytest.mark.filterwarnings("ignore:the data has")
def test_training_end_to_end_and_after_kills(aquiline, folders, answers, tmp_path, monkeypatch):  # noqa: F811
    whole = tmp_path / "whole"
    code, _, err = aquiline(*train_arguments(folders, answers, whole))
    assert code == 0
    assert "complete; the head is" in err
    words = " ".join(err.split())  # the table is cut to the terminal's width
    for fact in ("embed_tokens.weight", "frozen", "fc.weight", "trained", "13 documents", "2 held out", "of the supe"):
        assert fact in words
    assert {p.name for p in whole.iterdir()} == OUTPUTS
    assert {p.name for p in (answers.parent / "features").iterdir()} == {"train", "held_out"}

    run = json.loads((whole / "head" / "run.json").read_text())
    assert run["command"][:4] == ["aquiline", "train", "answers.jsonl", "--out"]
    assert str(tmp_path) not in json.dumps(run)
    assert run["data"]["documents"] == 13
    assert run["training"]["ttt_steps"] == 3
    assert {"versions", "machine", "history", "minutes", "documents", "tokens", "step"} <= set(run)

    config = json.loads((whole / "head" / "config.json").read_text())
    info = checkpoint.draft_info(config)
    assert info is not None
    assert info.target == "target"
    assert info.tokenizer == byte_chat().fingerprint()
    code, out, err = aquiline("generate", "say 3", *models(folders, whole / "head"), "--json", "--compare")
    assert code == 0
    assert json.loads(out)["equal"] is True
    assert "draft whole/head" in err

    # A kill between two saves, then a SIGTERM, then to the end: as if nothing had happened.
    cut = tmp_path / "cut"
    report = train._training_report

    def breaking(at, act):
        def make(bar):
            inner = report(bar)
            return lambda p: (inner(p), act() if p.step == at else None)[0]

        monkeypatch.setattr(train, "_training_report", make)

    class Killed(Exception):
        pass

    def kill():
        raise Killed

    breaking(5, kill)
    with pytest.raises(Killed):
        aquiline_unchecked(train_arguments(folders, answers, cut))
    assert state(cut)["state"]["step"] == 3
    breaking(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    code, _, err = aquiline(*train_arguments(folders, answers, cut))
    assert code == 128 + signal.SIGTERM
    assert "going on from the state" in err
    assert "stopped and saved" in err
    assert signal.getsignal(signal.SIGTERM) is before
    assert state(cut)["state"]["step"] == 7
    monkeypatch.setattr(train, "_training_report", report)
    assert aquiline(*train_arguments(folders, answers, cut))[0] == 0
    a, b = state(whole)["draft"], state(cut)["draft"]
    assert all(torch.equal(x, b[name]) for name, x in a.items())
    assert (whole / "head" / "model.safetensors").read_bytes() == (cut / "head" / "model.safetensors").read_bytes()

    # Resumed with something else: refused, nothing changed.
    for more, words in (
        (("--epochs", 3), "epochs: 2.0 -> 3.0"),
        (("--capture-after", "0,2,5"), "capture_after was [1, 3, 4] and is [0, 2, 5]"),
        (("--draft-vocab-size", 90), "draft_vocabulary was"),
    ):
        code, _, err = aquiline(*train_arguments(folders, answers, cut, *more))
        assert code == 2
        assert words in err
    assert all(torch.equal(x, state(cut)["draft"][name]) for name, x in b.items())


def aquiline_unchecked(arguments):
    cli.main([str(a) for a in arguments])


def test_capture_layers_are_read_and_checked(aquiline, folders, answers, tmp_path):  # noqa: F811
    for layers, words in (("1,x", "is not layers A,B,C"), ("5,3,1", "ascending"), ("1,2,8", "within 0..7")):
        arguments = train_arguments(folders, answers, tmp_path / "out", "--capture-after", layers)
        check_refused(aquiline(*arguments), words)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:the data has")
def test_every_kind_of_head_is_trained_and_decoded(aquiline, folders, answers, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("COLUMNS", "200")  # of the table
    kinds = {
        "top": ["--capture-after", "top", "--feature-loss", "--ttt-steps", 1, "--switch", "norm_output"],
        "switches": [
            "--loss",
            "lk",
            "--switch",
            "fc_norm",
            "--switch",
            "qk_norm",
            "--switch",
            "attention_bias",
            "--keep-outside",
        ],
        "copied": ["--init", "target-layer", "--freeze-lm-head", "--checkpoint-activations"],
    }
    for name, flags in kinds.items():
        arguments = train_arguments(folders, answers, tmp_path / name, "--features", tmp_path / f"{name}-features")
        code, _, err = aquiline(*arguments, *flags, "--epochs", 1)
        assert code == 0, err
        head = tmp_path / name / "head"
        code, out, _ = aquiline("generate", "say 3", *models(folders, head), "--json", "--compare")
        assert code == 0
        assert json.loads(out)["equal"] is True
        if name == "copied":
            assert "q_proj.weight 32 x 64 trained the target's last layer; zeros where it reads the embedding" in strip(
                err
            )
            assert "lm_head.weight 100 x 32 frozen the target's head" in strip(err)
            rows, target_head = state(tmp_path / name)["draft"]["lm_head.weight"], safetensors_of(folders / "target")
            ids = checkpoint.load_pair(folders / "target", head, torch.float32)[1].vocab.target_ids_W
            assert torch.equal(rows, target_head[ids])
    config = json.loads((tmp_path / "top" / "head" / "config.json").read_text())
    assert (config["capture_after"], config["architectures"]) == ("top", ["TopFeatureDraft"])
    config = json.loads((tmp_path / "switches" / "head" / "config.json").read_text())
    assert (config["fc_norm"], config["attention_bias"]) == (True, True)
    assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    run = json.loads((tmp_path / "switches" / "head" / "run.json").read_text())
    assert run["training"]["switches"] == ["attention_bias", "fc_norm", "qk_norm"]  # sorted
    assert run["training"]["skip_outside"] is False
    # The state is gone: the head is recognised as this run's own, though JSON knows no tuples.
    shutil.rmtree(tmp_path / "switches" / "state")
    arguments = train_arguments(folders, answers, tmp_path / "switches", *kinds["switches"], "--epochs", 1)
    assert aquiline(*arguments)[0] == 0
    check_refused(aquiline(*arguments, "--loss", "ce"), "loss", "lk")


def strip(table: str) -> str:
    return " ".join(table.replace("│", " ").split())


def safetensors_of(folder):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    return weights["lm_head.weight"].float()


def test_flags_that_do_not_go_together_are_refused(aquiline, folders, answers, tmp_path):  # noqa: F811
    for flags, words in (
        (("--feature-loss",), "add --capture-after top"),
        (("--capture-after", "top", "--switch", "fc_norm"), "has no fc"),
        (("--switch", "fc_norm", "--switch", "norm_before_fc"), "exclude each other"),
    ):
        check_refused(aquiline(*train_arguments(folders, answers, tmp_path / "out", *flags)), words)
    assert not (tmp_path / "out").exists()


def test_each_of_several_processes_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert train._own_device(None) == torch.device("cuda")
    assert train._own_device("cuda:1") == torch.device("cuda:1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert train._own_device(None) == train._own_device("cuda") == torch.device("cuda:1")
    assert train._own_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="--device cuda:0 is one GPU, and 3 processes"):
        train._own_device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="'cuda:2' is not there: PyTorch sees 2"):
        train._own_device(None)


def test_a_command_line_is_recorded_without_paths():
    given = ["train", "/a/b/x.jsonl", "--out=/c/d/", "--epochs", "2"]
    assert train._plain_command(given) == ["train", "x.jsonl", "--out=d", "--epochs", "2"]


# ---------------------------------------------------------------- data


def test_data_answer_and_show(aquiline, folders, tmp_path):  # noqa: F811
    prompts, out = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    prompts.write_text('{"turns": ["hi", "więcej"]}\n{\n{"prompt": "a"}\n{"messages": []}\n{"prompt": "a"}\n')
    arguments = ["data", "answer", prompts, out, *models(folders), "--max-new-tokens", 9]
    code, stdout, err = aquiline(*arguments, "--temperature", "0,0.7", "--limit", 1)
    assert (code, stdout) == (0, "")
    code, _, err = aquiline(*arguments, "--temperature", "0,0.7")
    assert code == 0
    for words in ("2 prompts of 5 answered (1 of them before): 3 replies", "cut at the length limit: ", "tau 1.",
                  "dropped: 1 broken JSON", "dropped: 1 duplicate prompt", "dropped: 1 empty"):  # fmt: skip
        assert words in err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["id"] for row in rows} == {"p.jsonl:1", "p.jsonl:3"}
    record = json.loads((tmp_path / "a.jsonl.run.json").read_text())
    assert record["settings"]["temperatures"] == [0.0, 0.7]
    assert record["counts"]["dropped"] == {"broken JSON": 1, "duplicate prompt": 1, "empty": 1}
    assert record["settings"]["target"]["template"] == byte_chat().template_fingerprint()
    code, stdout, _ = aquiline("data", "show", out, "--target", folders / "target", "--rows", 1)
    assert code == 0
    assert "p.jsonl:1" in stdout
    assert "<|im_start|>user" in stdout
    assert f"{len(rows)} documents" in stdout
    assert "\x1b" not in stdout  # no terminal, no colour


def test_data_answers_go_into_a_head_and_bad_rows_are_counted(aquiline, folders, tmp_path):  # noqa: F811
    prompts, out = tmp_path / "p.txt", tmp_path / "a.jsonl"
    prompts.write_text("".join(f"say {n}\n" for n in range(6)))
    assert aquiline("data", "answer", prompts, out, *models(folders, "none"), "--max-new-tokens", 9)[0] == 0
    with open(out, "a") as file:
        file.write('{"messages": [{"role": "assistant", "content": "a"}]}\n{broken\n')
    command = ["train", out, "--out", tmp_path / "run", "--target", folders / "target", "--dtype", "float32",
               "--draft-vocab-size", 200, "--held-out", 2, "--ttt-steps", 1]  # fmt: skip
    check_refused(aquiline(*command, "--strict"), "a.jsonl:7", "starts with the assistant")
    code, _, err = aquiline(*command)
    assert code == 0, err
    assert "dropped: 1 broken JSON" in err
    assert "dropped: 1 starts with the assistant" in err
    assert "other weights" not in err
    assert "warning: the whole run is 1 updates, and a head takes hundreds" in err
    run = json.loads((tmp_path / "run/head/run.json").read_text())
    assert run["data"]["dropped"] == {"broken JSON": 1, "starts with the assistant": 1}
    from tests.test_api import make_target

    make_target(tmp_path / "other", seed=9)
    command[command.index(folders / "target")] = tmp_path / "other"
    command[3] = tmp_path / "another run"
    code, _, err = aquiline(*command)
    assert code == 0
    assert "warning: 6 of 6 rows were written by other weights" in err


def test_data_flags_that_do_not_work_are_refused(aquiline, folders, tmp_path):  # noqa: F811
    (tmp_path / "p.txt").write_text("hi\n")
    (tmp_path / "bad.jsonl").write_text("{\n")
    prompts, out = tmp_path / "p.txt", tmp_path / "a.jsonl"
    for arguments, words in (
        ((prompts,), "Missing argument"),
        ((prompts, tmp_path / "a.txt"), "ends in .jsonl"),
        ((prompts, tmp_path / "bad.jsonl", tmp_path / "bad.jsonl"), "is one of the prompt files"),
        ((prompts, tmp_path / "no" / "a.jsonl"), "cannot write"),
        ((prompts, out, "--temperature", "0,x"), "'0,x' is not a number"),
        ((prompts, out, "--temperature", "-1"), "temperature -1"),
        ((prompts, out, "--max-length", "0"), "max_length 0"),
        ((prompts, out, "--limit", "0"), "limit 0"),
        ((prompts, out, "--in-flight", "0"), "in_flight 0"),
        ((prompts, out, "--template-kwarg", "x"), "is not KEY=VALUE"),
        ((prompts, out, "--model", "m"), "give --server too"),
        ((prompts, out, "--server", "http://127.0.0.1:9", "--draft", "none"), "exclude each other"),
        ((tmp_path / "none.jsonl", out), "does not exist"),
        ((tmp_path / "bad.jsonl", out), "no prompt in"),
    ):
        check_refused(aquiline("data", "answer", *arguments), words)
    arguments = ["data", "answer", prompts, out, *models(folders, "none")]
    check_refused(aquiline(*arguments, "--template-kwarg", "enable_thinking=false"), "no prompt was answered", "know")
    check_refused(aquiline("data", "invent", out, "--count", "0"), "count 0")
    check_refused(aquiline("data", "show", tmp_path / "bad.jsonl", "--target", folders / "target"), "bad.jsonl:1")
    row = {"prompt_ids": [1], "response_ids": [2, 3], "target": {"name": "theirs", "tokenizer": "x"}}
    (tmp_path / "bad.jsonl").write_text(json.dumps(row))
    arguments = ["data", "show", tmp_path / "bad.jsonl", "--target", folders / "target"]
    check_refused(aquiline(*arguments), "bad.jsonl:1 holds the ids of another tokenizer, that of theirs: give --target")
    check_refused(aquiline("data"), "Missing command")


# ---------------------------------------------------------------- bad input


def check_refused(outcome, *words):
    code, out, err = outcome
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2, err
    assert out == ""
    assert len(errors) == 1
    assert err.splitlines()[-1] == errors[0]
    assert "Traceback" not in err
    for word in words:
        assert word in errors[0]


def test_what_is_wrong_with_the_flags_is_said_before_anything_is_loaded(aquiline, monkeypatch):
    monkeypatch.setattr(decode, "load_model", lambda *_: pytest.fail("loaded"))
    for arguments, words in {
        ("generate",): ("Missing argument", "aquiline generate --help"),
        ("generate", "hi", "--temprature", "1"): ("No such option", "--temprature"),
        ("generate", "hi", "--tree", "4,3,8"): ("'4,3,8' is neither auto nor DEPTH:TOPK:NODES", "6:8:60"),
        ("generate", "hi", "--tree", "0:3:8"): ("whole numbers from 1",),
        ("generate", "hi", "--tree", "4:3:8", "--draft", "none"): ("--draft none",),
        ("generate", "hi", "--compare", "--draft", "none"): ("--compare needs a draft",),
        ("generate", "hi", "--temperature", "-1"): ("temperature -1",),
        ("generate", "hi", "--temperature", "nan"): ("temperature nan",),
        ("generate", "hi", "--top-p", "0"): ("top_p",),
        ("generate", "hi", "--seed", "-1"): ("seed -1",),
        ("generate", "hi", "--max-new-tokens", "-1"): ("max_new_tokens -1",),
        ("eval", "x.jsonl", "--draft", "none"): ("needs a draft",),
        ("eval", "x.jsonl"): ("x.jsonl is not a file",),
        ("eval", "x.jsonl", "--limit", "0"): ("limit 0",),
        ("bench", "x.jsonl"): ("x.jsonl is not a file",),
        ("bench", "x.jsonl", "--draft", "none"): ("needs a draft",),
        ("bench", "x.jsonl", "--batch", "1,x"): ("'1,x' is not numbers",),
        ("bench", "x.jsonl", "--batch", "0"): ("batch 0",),
        ("bench", "x.jsonl", "--json", "y.jsonl"): ("looks like a prompt file",),
        ("plot", "x.json", "x.svg"): ("cannot read x.json",),
        ("train", "x.jsonl", "--out", "y", "--optimizer", "sgd"): ("muon or adamw",),
        ("train", "x.jsonl", "--out", "y", "--loss", "kl"): ("ce or lk",),
        ("train", "x.jsonl", "--out", "y", "--init", "zeros"): ("random or target-layer",),
        ("train", "x.jsonl", "--out", "y", "--switch", "norm"): ("switch 'norm'", "norm_before_fc, norm_output"),
        ("train", "x.jsonl", "--out", "y", "--switch", "qk_norm", "--switch", "qk_norm"): ("given twice: qk_norm",),
        ("no-such-verb",): ("No such command",),
    }.items():
        check_refused(aquiline(*arguments), *words)
    check_refused(aquiline("generate", "-", stdin=b"\xff\xfe"), "stdin is not UTF-8")


def test_models_that_do_not_fit_are_refused(aquiline, folders, tmp_path):  # noqa: F811
    check_refused(aquiline("generate", "hi", *models(tmp_path / "nowhere")), "nowhere", "does not exist")
    check_refused(aquiline("generate", "hi", *models(folders, tmp_path / "nope")), "nope does not exist")
    empty = tmp_path / "empty"
    empty.mkdir()
    check_refused(aquiline("generate", "hi", "--target", empty, "--draft", "none"), "config.json")
    check_refused(aquiline("generate", "hi", *models(folders), "--device", "tpu"), "device 'tpu'")
    check_refused(aquiline("generate", "hi", *models(folders), "--dtype", "int4"), "dtype 'int4'")

    corrupt = tmp_path / "corrupt"
    shutil.copytree(folders / "draft", corrupt)
    weights = (corrupt / "model.safetensors").read_bytes()
    (corrupt / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    check_refused(aquiline("generate", "hi", *models(folders, corrupt)), "safetensors", "cannot be read")

    lacking = tmp_path / "lacking"
    shutil.copytree(folders / "draft", lacking)
    tensors = safetensors.torch.load_file(lacking / "model.safetensors")
    tensors.pop("fc.weight")
    safetensors.torch.save_file(tensors, lacking / "model.safetensors")
    check_refused(aquiline("generate", "hi", *models(folders, lacking)), "no fc.weight", "no EAGLE-3 head")

    from tests.test_api import make_target

    make_draft(tmp_path / "wide", make_target(tmp_path / "wider", hidden_size=48))
    check_refused(aquiline("generate", "hi", *models(folders, tmp_path / "wide")), "48", "32")


def test_data_and_outputs_that_do_not_work_are_refused(aquiline, folders, answers, prompt_files, tmp_path):  # noqa: F811
    bad = tmp_path / "bad.jsonl"
    for line, words in (
        ("{", "not JSON"), ('{"text": "x"}', "messages"), ("[1]", "object"),
        ('{"prompt_ids": [1], "response_ids": [999]}', "within 0..261"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "wizard"),
    ):  # fmt: skip
        bad.write_text(line + "\n")
        check_refused(aquiline(*train_arguments(folders, bad, tmp_path / "out")), "bad.jsonl:1", words)
        if "prompt_ids" not in line:
            check_refused(aquiline("eval", bad, *models(folders)), "bad.jsonl:1")
    bad.write_text('{"prompt_ids": [1, 2], "response_ids": [3, 4], "temperature": 1}\n')
    check_refused(aquiline(*train_arguments(folders, bad, tmp_path / "out")), "greedily")
    bad.write_text('{"messages": [{"role": "user", "content": "nobody answers"}]}\n')
    check_refused(aquiline(*train_arguments(folders, bad, tmp_path / "out")), "1 nothing supervised")
    assert not (tmp_path / "out").exists()

    (tmp_path / "file").write_text("x")
    check_refused(aquiline(*train_arguments(folders, answers, tmp_path / "file" / "out")), "cannot write")
    check_refused(
        aquiline("eval", *prompt_files, *models(folders), "--json", tmp_path / "missing" / "r.json"), "cannot write"
    )
    check_refused(aquiline("eval", *prompt_files, *models(folders), "--json", tmp_path), "is no file")
    check_refused(aquiline("eval", prompt_files[0], prompt_files[0], *models(folders)), "two files are named one")
    check_refused(aquiline("export-target", folders / "target", tmp_path / "file"), "not empty")
    check_refused(aquiline("export-target", folders / "target", tmp_path), "not empty")
    assert {p.name for p in tmp_path.iterdir()} == {"bad.jsonl", "file", "one.jsonl", "two.jsonl"}


def test_an_interrupt_is_quiet(aquiline, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "load_model", interrupt)
    code, out, err = aquiline("generate", "hi")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_the_module_runs(folders):  # noqa: F811
    arguments = ["generate", "hi", *models(folders, "ngram"), "--max-new-tokens", 5, "--json"]
    command = [sys.executable, "-m", "aquiline", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == RESULT_KEYS


def test_eval_does_not_overwrite_its_prompts(tmp_path, capsys):
    prompts = tmp_path / "a.jsonl"
    prompts.write_text('{"turns": ["hi"]}\n')
    before = prompts.read_bytes()
    for arguments in (["--json", str(prompts), str(prompts)], ["--json", str(tmp_path / "b.jsonl"), str(prompts)]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["eval", *arguments])
        assert ended.value.code == 2
        assert "error:" in capsys.readouterr().err
    assert prompts.read_bytes() == before
    assert not (tmp_path / "b.jsonl").exists()


def test_export_target_writes_into_no_folder_that_holds_something(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        cli.main(["export-target", "default", str(tmp_path)])
    assert ended.value.code == 2
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_without_a_verb_it_shows_its_help(aquiline):
    code, out, err = aquiline()
    assert code == 0
    assert "generate" in out
    assert err == ""
