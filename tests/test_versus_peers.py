"""aquiline against other engines: the process that answers, the table of answers, and the same weights for all.

The other engines are played by a script; aquiline and Transformers are real, on tiny models.
"""

import json
import math
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch

from aquiline.config import BenchConfig, UserError
from aquiline.data.server import Endpoint
from aquiline.files import checkpoint
from aquiline.files.gguf_file import read_gguf
from tests.scripted_server import Scripted, chunk, stream
from tests.serving import WAIT, serving
from tests.test_api import END, folders, load  # noqa: F401 (a fixture)
from tests.test_checkpoint import hf_model, write_gguf

RUNS = Path(__file__).parents[1] / "runs"
PEER, SCRIPT = (runpy.run_path(str(RUNS / name)) for name in ("peer.py", "versus_peers.py"))

# Plain ways take 0.1 s a token, openvino's 0.2; chains 0.05, vllm's 0.04; the tree does not start, and vllm's longer
# chain ends in the middle.
FAKE = f"""#!{sys.executable}
import json, sys
s = json.loads(sys.argv[2])
drafts = s["chain"] or s["tree"]
if s["engine"] == "openvino" and s["tree"]:
    print(json.dumps({{"missing": "no trees today"}}))
    sys.exit(1)
print(json.dumps({{"version": s["engine"][0] + "9"}}), flush=True)
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    if s["engine"] == "vllm" and s["chain"] == 4 and number == 2:
        sys.exit(1)
    first = asked["ids"][-1] + (s["engine"] == "transformers")
    ids = [first] * min(11, asked["tokens"])
    own = {{("openvino", False): 0.2, ("vllm", True): 0.04}}
    seconds = len(ids) * own.get((s["engine"], bool(drafts)), 0.05 if drafts else 0.1)
    steps = 5 if drafts else None if s["engine"] == "vllm" else len(ids) - 1
    print(json.dumps({{"ids": ids, "seconds": seconds, "steps": steps}}), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    path = tmp_path / "fake-python"
    path.write_text(FAKE)
    path.chmod(0o755)
    return path


def test_what_is_there_is_compared_and_the_rest_is_named(folders, fake, tmp_path, monkeypatch, capsys):  # noqa: F811
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "hi"}\n{"prompt": "a b"}\n{"prompt": "beyond the limit"}\n')
    peers = [f"--peer={name}={fake}" for name in ("aquiline", "transformers", "openvino", "vllm")]
    models = ["--target", str(folders / "target"), "--draft", str(folders / "draft"), "--work", str(tmp_path / "work")]
    arguments = [str(out), str(prompts), *peers, *models, "--limit", "2", "--tokens", "20"]
    monkeypatch.setattr(sys, "argv", ["versus_peers.py", *arguments])
    monkeypatch.setitem(SCRIPT["main"].__globals__, "_PAUSE", 0.0)
    SCRIPT["main"]()
    record = json.loads(out.read_text())
    ways, missing = record["ways"], record["missing"]
    assert set(ways) | set(missing) == set(SCRIPT["WAYS"])
    assert missing == {
        "llamacpp plain": "no --peer llamacpp=PYTHON",
        "openvino tree 2:4:7": "no trees today",
        "vllm chain 4": "prompt 2: it ended without an answer",
    }
    assert (ways["aquiline plain"]["version"], ways["openvino chain 2"]["version"]) == ("a9", "o9")
    assert all(way["prompts"] == 2 for way in ways.values())
    chain = ways["openvino chain 2"]
    assert math.isclose(chain["tokens_per_second"], 20.0)
    assert all(math.isclose(chain[f"ratio_{k}"], 2.0) for k in ("median", "min", "max"))
    assert chain["tokens_per_step"] == 2.0
    assert ways["vllm plain"]["tokens_per_step"] is None
    assert (chain["equal_share"], ways["transformers plain"]["equal_share"]) == (1.0, 0.0)
    assert (record["settings"]["max_new_tokens"], record["settings"]["limit"]) == (20, 2)
    assert "load" in record["machine"]
    assert [(s["ours"], s["peer"], round(s["ratio_median"], 9)) for s in record["standings"]] == [
        ("aquiline plain", "transformers plain", 1.0),
        *((f"aquiline {tree}", "transformers plain", 2.0) for tree in BenchConfig.trees),
        ("aquiline plain", "vllm chain 2", 0.4),
        *((f"aquiline {tree}", "vllm chain 2", 0.8) for tree in BenchConfig.trees),
    ]
    table = capsys.readouterr().out
    assert "| openvino chain 2 | o9 | 20.0 | 2.00 (2.00 to 2.00) | 2.00 | 1.00 |" in table
    assert "| llamacpp plain | missing: no --peer llamacpp=PYTHON |" in table

    whole = tmp_path / "work" / "head"
    weights = checkpoint.read_weights(whole)
    assert weights.keys() == checkpoint.read_weights(folders / "draft").keys() | {"embed_tokens.weight"}
    assert torch.equal(weights["embed_tokens.weight"].float(), load(folders).target.embed(torch.arange(END + 1)))
    assert {"config.json", "tokenizer.json"} < {p.name for p in whole.iterdir()}


def test_an_engine_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["versus_peers.py", "out.json", "p.jsonl", "--peer", "openvno=python"])
    with pytest.raises(UserError, match="--peer openvno is no engine"):
        SCRIPT["main"]()


def test_nothing_is_compared_with_nothing(folders, fake, tmp_path, monkeypatch):  # noqa: F811
    """Without our own plain decoding no row would mean anything."""
    (tmp_path / "p.txt").write_text("hi\n")
    fake.write_text(FAKE.replace('s["engine"] == "openvino" and s["tree"]', 's["engine"] == "aquiline"'))
    arguments = ["out.json", str(tmp_path / "p.txt"), f"--peer=aquiline={fake}", f"--peer=transformers={fake}"]
    models = ["--target", str(folders / "target"), "--draft", str(folders / "draft")]
    monkeypatch.setattr(sys, "argv", ["versus_peers.py", *arguments, *models])
    with pytest.raises(UserError, match="aquiline plain does not start: no trees today"):
        SCRIPT["main"]()


def answers(code: str, lines: list[dict], engine: str) -> subprocess.CompletedProcess:
    start = f"import runpy; m = runpy.run_path({str(RUNS / 'peer.py')!r}); E = m['ENGINES']\n{code}\nm['main']()"
    stdin = "".join(json.dumps(line) + "\n" for line in lines)
    command = [sys.executable, "-c", start, json.dumps({"engine": engine})]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_the_process_speaks_the_protocol_whatever_its_engine_prints():
    noisy = (
        "import os\n"
        "def noisy(s): print('loading'); os.system('echo a banner'); return '7', lambda *a: (a[0] * 2 + a[2], a[1])\n"
        "E['noisy'] = noisy"
    )
    done = answers(
        noisy, [{"ids": [4, 5], "tokens": 9, "stops": [1]}, {"ids": [3], "tokens": 8, "stops": [3]}], "noisy"
    )
    ready, first, second = map(json.loads, done.stdout.splitlines())
    assert ready == {"version": "7"}
    assert (first["ids"], first["steps"], second["ids"]) == ([4, 5, 4, 5], 9, [])  # the stop token is no part of it
    assert first["seconds"] >= 0
    assert "loading\n" in done.stderr
    assert "a banner\n" in done.stderr


def test_an_engine_that_is_not_installed_says_so():
    done = answers("import sys; sys.modules['llama_cpp'] = None", [], "llamacpp")
    assert json.loads(done.stdout)["missing"].startswith("ModuleNotFoundError: ")
    assert done.returncode == 1


@pytest.mark.filterwarnings("ignore:the draft's tokens are hardly ever accepted")
def test_aquiline_and_transformers_answer_alike(folders):  # noqa: F811
    target = str(folders / "target")
    settings = {
        "target": target, "folder": target, "draft": str(folders / "draft"), "dtype": "float32", "threads": 1,
        "tree": None,
    }  # fmt: skip
    engines = PEER["ENGINES"]
    reference = load(folders, "none").generate("hi", max_new_tokens=12)
    ids = load(folders, "none").prompt_ids("hi")
    for engine, tree in (("aquiline", None), ("aquiline", "2:2:3"), ("transformers", None)):
        version, decode = engines[engine](settings | {"tree": tree})
        reply, steps = decode(ids, 12, [END])
        assert version
        assert reply == reference.token_ids
        assert steps == len(reply) - 1 if tree is None else 0 < steps < len(reply)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_the_gguf_in_bf16_has_the_weights_that_aquiline_takes(tmp_path, kind):
    source, out = tmp_path / "m.gguf", tmp_path / "bf16.gguf"
    write_gguf(source, hf_model(hidden_size=64, intermediate_size=96), "llama", kind)
    SCRIPT["write_bf16_gguf"](source, out)
    written = read_gguf(out)
    types = {tensor[0] for tensor in written.tensors.values() if len(tensor[1]) > 1}
    assert types == {gguf.GGMLQuantizationType.BF16}
    kept = read_gguf(source).fields
    assert kept.items() <= written.fields.items()
    ours, theirs = (checkpoint.load_target(path, torch.bfloat16).state_dict() for path in (source, out))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_a_peer_left_behind_has_computed_counts_as_ours():
    """A process that is started and not waited for by one that ends at once."""
    script = f"""
import os, runpy, subprocess, sys
adopting = runpy.run_path({str(RUNS / "versus_peers.py")!r})["adopting"]
burn = "import time\\nwhile time.process_time() < 0.4: pass"
with adopting(300):
    leave = "import subprocess, sys; subprocess.Popen(sys.argv[1:])"
    subprocess.run([sys.executable, "-c", leave, sys.executable, "-c", burn])
print(sum(os.times()[2:4]))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=RUNS.parent)
    assert float(found.stdout) > 0.3


def test_what_a_server_of_others_has_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(RUNS)
    another = runpy.run_path(str(RUNS / "serve_bench.py"))["another"]
    scripted, script = Scripted(), tmp_path / "server.py"
    scripted.answers += [stream(chunk(("hi", 0)))]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WAIT)
        child = f"import socket, time; s = socket.create_connection({listening.getsockname()!r}); time.sleep({WAIT})"
        script.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
        with another(scripted.url, [f"{sys.executable} {script}"]):
            connection, _ = listening.accept()
    with connection:
        connection.settimeout(WAIT / 2)
        assert connection.recv(1) == b""
    scripted.close()


def test_clients_ask_again_on_their_connections_and_count_what_came(folders, monkeypatch):  # noqa: F811
    monkeypatch.syspath_prepend(RUNS)
    ask_all = runpy.run_path(str(RUNS / "serve_bench.py"))["ask_all"]
    model = load(folders)
    prompts = [[{"role": "user", "content": text}] for text in ("hi", "ab", "a longer one", "hi", "c")]
    wanted = [len(model.generate(messages, max_new_tokens=9).token_ids) for messages in prompts]
    with serving(model, "secret") as served:
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        found, seconds = ask_all(Endpoint(f"http://{served.address}"), prompts, 9, 2)
        assert [asked.tokens for asked in found] == wanted
        assert all(0 < asked.first < seconds for asked in found)
        with pytest.raises(SystemExit, match=r"answered 400: .*max_tokens"):
            ask_all(Endpoint(f"http://{served.address}"), prompts, -1, 2)


def test_a_server_that_closes_its_connections_is_named(monkeypatch):
    monkeypatch.syspath_prepend(RUNS)
    ask_all = runpy.run_path(str(RUNS / "serve_bench.py"))["ask_all"]
    scripted = Scripted()
    scripted.answers += [stream(chunk(("hi", 0)))] * 2
    with pytest.raises(SystemExit, match="closes its connections between requests"):
        ask_all(Endpoint(scripted.url), [[{"role": "user", "content": "hi"}]] * 2, 4, 1)
    scripted.close()
