"""Our head in other engines, run by them: vLLM, OpenVINO GenAI and llama.cpp; and what SGLang's sources make of it.

    python runs/interop.py OUT.json PROMPTS.jsonl [--work .interop] [--limit 20] [--tokens 64] [--engine NAME ...]

Every engine gets an environment of its own below --work, from PyPI, where it is not there yet (gigabytes; llama.cpp is
compiled), and our export: the target by export-target, the head by convert. All decode the same token ids greedily,
with a chain of four, one prompt after another. In float32 on both sides the text must be that of `aquiline --tree
4:1:4`, token for token but for near ties, and the tokens per target pass within 1 %, and all that was asked for must
run; else the exit code is 1. What ran is written, if anything did. bfloat16 is reported beside it. Times are kept only
from a machine that did nothing else.

Besides: heads made by speculators' and SpecForge's own classes are computed here, vLLM's own parser reads what
`serve-command` prints, and SGLang's own model code, which wants CUDA, runs over plain layers.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from interop_engines import ENVIRONMENTS, environment, forms, sglang_sources, trainers, vllm_flags  # noqa: E402
from versus_peers import Answer, Peer, adopting, prepared, rate  # noqa: E402

from aquiline.api import Model, load  # noqa: E402
from aquiline.files.disk import one_line, write_json_atomic  # noqa: E402
from aquiline.measure.evaluate import divergence, machine, model_settings, render, versions  # noqa: E402
from aquiline.measure.quiet import pause_file, quiet  # noqa: E402
from aquiline.measure.tasks import read_prompts, task_name  # noqa: E402

CHAIN = 4
DTYPES = ("float32", "bfloat16")
TIMED = ("bfloat16",)  # in which the others decode plainly, too: in float32 that would take longest, and prove nothing
DECODING = ("vllm", "openvino", "llamacpp")
DEFINITIONS = {
    "equal": "prompts whose token ids are those of aquiline with the same chain and dtype; of aquiline itself, those "
    "of its plain decoding",
    "parted": "the others: position is the first generated token that differs, gap the difference of the target's two "
    "largest float32 logits there; below tie it is rounding that decides",
    "accepted": "tokens behind the first / target passes behind the first, over all prompts; accepted_here: "
    "aquiline's. OpenVINO's passes are the batches that it lists of its main model, vLLM's the drafts that it counts, "
    "llama.cpp's the tokens less those that it counts as accepted",
    "tokens_per_second": "all tokens / all time, prompt by prompt, without a draft (plain) and with the chain; null "
    "where other processes took over a twentieth of the machine, and plain in float32, where only aquiline is asked",
    "tie": 1e-3,
}
TIMES = ("plain_tokens_per_second", "tokens_per_second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("file", help="prompts, one JSON object a line")
    parser.add_argument("--work", default=".interop", help="folder of environments and converted weights, kept")
    parser.add_argument("--limit", type=int, default=20, help="prompts (20)")
    parser.add_argument("--tokens", type=int, default=64, help="the most of a reply (64)")
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--engine", action="append", choices=[*ENVIRONMENTS, "sglang"], help="only this (all)")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="only this (both)")
    given = parser.parse_args()
    record = prove(given, Path(given.work).resolve())
    if record["engines"]:  # else it would replace one that has some
        write_json_atomic(given.out, record)
    print(table(record))
    sys.exit(1 if record["faults"] else 0)


def prove(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Every engine that is asked for, one after the other."""
    names, dtypes = given.engine or [*ENVIRONMENTS, "sglang"], given.dtype or DTYPES
    model = load(given.target, given.draft, dtype="float32")
    prompts = {task_name(given.file): read_prompts(given.file, given.limit)}
    asked = [p.ids for name, ps in prompts.items() for p in render(model, name, ps)]
    settings = prepared(given, model, work) | {"context": max(map(len, asked)) + given.tokens + 64, "eager": True}
    stops = sorted(model.chat.end_of_turn_ids | set(model.target.config.eos_token_ids))
    engines: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    ours: dict[str, list[list[Answer]]] = {}

    def attempt(name: str, of: Callable[[], dict[str, Any]]) -> None:
        print(f"asking {name}", file=sys.stderr, flush=True)
        try:
            engines[name] = of()
        except Exception as error:  # whatever one does not do must not cost what the others did
            missing[name] = one_line(error)

    pythons = {}
    for name in [n for n in names if n in ENVIRONMENTS]:  # before anything is timed
        try:
            pythons[name] = environment(name, work)
        except (OSError, subprocess.CalledProcessError) as error:
            missing[name] = one_line(error)
    with quiet(pause_file()) as found, adopting(), open(work / "interop.log", "wb") as log:

        def decode(python: str, way: dict[str, Any]) -> tuple[str, list[Answer]]:
            peer = Peer(python, {"chain": None, "tree": None} | settings | way, log)
            try:
                peer.ask(asked[0][:32], 16, stops)  # warm up
                return peer.version, [peer.ask(ids, given.tokens, stops) for ids in asked]
            finally:
                peer.close()

        def engine(name: str) -> dict[str, Any]:
            rows: dict[str, Any] = {}
            for dtype in dtypes:
                way = forms(name, dtype, work, settings) | {"dtype": dtype}
                plain = decode(pythons[name], way)[1] if dtype in TIMED else None
                rows["version"], chain = decode(pythons[name], way | {"chain": CHAIN})
                rows[dtype] = row(plain, chain, ours[dtype][1], model, asked)
                engines[name] = rows  # what is done stays, if the next fails
            return rows

        for dtype in dtypes:
            way = {"engine": "aquiline", "dtype": dtype, "quantize_draft": "none"}  # the others' heads are not either
            ours[dtype] = [decode(sys.executable, way | {"tree": t})[1] for t in (None, f"{CHAIN}:1:{CHAIN}")]
        for name in [n for n in DECODING if n in pythons]:
            attempt(name, lambda name=name: engine(name))
    if "vllm" in pythons:
        attempt("vllm flags", lambda: vllm_flags(pythons["vllm"], model))
    if "trainers" in pythons:
        attempt("trainers", lambda: trainers(pythons["trainers"]))
    if "sglang" in names:
        attempt("sglang", lambda: sglang_sources(work, settings))
    here = {dtype: own_row(plain, chain, model, asked) for dtype, (plain, chain) in ours.items()}
    record: dict[str, Any] = {
        "aquiline": {"version": versions()["aquiline"]} | here,
        "engines": engines,
        "missing": missing,
        "settings": model_settings(model, prompts)
        | {"dtype": list(dtypes), "chain": CHAIN, "max_new_tokens": given.tokens, "limit": given.limit},
        "machine": machine(model.target.device) | {"threads": settings["threads"]} | found.record(),
        "versions": versions(),
        "definitions": DEFINITIONS,
    }
    if found.loaded:
        for rows in (record["aquiline"], *engines.values()):
            for dtype in [d for d in DTYPES if d in rows]:
                rows[dtype] |= dict.fromkeys(TIMES)
    return record | {"faults": faults(record)}


def row(
    plain: Sequence[Answer] | None,
    chain: Sequence[Answer],
    ours: Sequence[Answer],
    model: Model,
    asked: list[list[int]],
) -> dict[str, Any]:
    """One engine in one dtype, beside aquiline's answers."""
    parted = []
    for number, (theirs, mine) in enumerate(zip(chain, ours, strict=True)):
        apart = divergence(model.target, asked[number], mine["ids"], theirs["ids"])
        if apart is not None:
            parted.append({"prompt": number, "position": apart.position, "gap": round(apart.logit_gap, 6)})
    return {
        "prompts": len(chain),
        "equal": len(chain) - len(parted),
        "equal_to_its_plain": None
        if plain is None
        else sum(a["ids"] == b["ids"] for a, b in zip(plain, chain, strict=True)),
        "parted": parted,
        "accepted": accepted(chain),
        "accepted_here": accepted(ours),
        "plain_tokens_per_second": None if plain is None else rate(plain),
        "tokens_per_second": rate(chain),
    }


def own_row(plain: list[Answer], chain: list[Answer], model: Model, asked: list[list[int]]) -> dict[str, Any]:
    """aquiline itself: its texts beside those of its plain decoding."""
    return row(plain, chain, plain, model, asked) | {"accepted_here": accepted(chain)}


def accepted(done: Sequence[Answer]) -> float:
    return sum(len(a["ids"]) - 1 for a in done) / sum(a["steps"] for a in done)


def faults(record: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    found = [f"{name} did not run to its end: {why}" for name, why in record["missing"].items()]
    for name in DECODING:
        rows = record["engines"].get(name, {}).get("float32")
        if rows is None:
            continue
        far = [p for p in rows["parted"] if p["gap"] > DEFINITIONS["tie"]]
        if far:
            found.append(f"{name}: in float32 {len(far)} of {rows['prompts']} texts part where there is no tie")
        if abs(rows["accepted"] / rows["accepted_here"] - 1) > 0.01:
            found.append(f"{name}: accepted length {rows['accepted']:.3f}, here {rows['accepted_here']:.3f}")
    flags, classes = record["engines"].get("vllm flags"), record["engines"].get("trainers")
    if flags is not None and flags["read_right"] != flags["commands"]:
        found.append(f"vllm reads {flags['read_right']} of {flags['commands']} commands as they are meant")
    if classes is not None and not classes["passed"]:
        found.append(f"trainers: {classes['outcome']} {'; '.join(classes['skipped'])}")
    sg = record["engines"].get("sglang")
    if sg is not None:
        right = sg["map_equal"] and not sg["tensors_not_loaded"] and not sg["flags_missing"]
        if not right or sg["captures"] != sg["captures_here"] or max(sg["largest_difference"].values()) > 1e-4:
            found.append(f"sglang: {sg}")
    return found


def table(record: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [
        "| engine | version | dtype | texts equal | accepted length there | here | tokens/s plain | with the head |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in {"aquiline": record["aquiline"], **record["engines"]}.items():
        for dtype in [d for d in DTYPES if d in rows]:
            r = rows[dtype]
            times = " | ".join("-" if r[key] is None else f"{r[key]:.1f}" for key in TIMES)
            there = f"{r['accepted']:.3f} | {record['aquiline'][dtype]['accepted']:.3f}"
            equal = f"{r['equal']} of {r['prompts']}"
            lines.append(f"| {name} | {rows['version']} | {dtype} | {equal} | {there} | {times} |")
    others = {k: v for k, v in record["engines"].items() if k not in DECODING}
    lines += ["", *(f"- {name}: {what}" for name, what in others.items())]
    return "\n".join([*lines, *(f"- FAULT: {fault}" for fault in record["faults"])])


if __name__ == "__main__":
    main()
