"""Training throughput and peak memory of the unroll against one as the reference implementation does it.

    python runs/unroll_versus_reference.py OUT.json [--answers FILE.jsonl] [--length 2048] [--steps 7]

The reference, below, has float32 attention scores of every row at every step (one T x T block and k columns), the
draft's logits of all rows, and the teacher's logits over the full vocabulary. Both train the same head with the same
optimiser on the same packs of documents, cut from answers or else of random ids, with features computed before, under
the same autocast, on the same threads. They take turns, each turn in a process of its own, whose peak memory is read at
its end; ours also runs at twice the length, for its memory. An update is forward, backward and optimiser step; the
first of a turn is not timed.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aquiline.api import load_chat
from aquiline.config import DEFAULT_DRAFT_VOCAB, TrainConfig, require
from aquiline.data.dataset import Document, packs, read_documents, token_counts
from aquiline.data.features import compute
from aquiline.files import checkpoint
from aquiline.files.disk import write_json_atomic
from aquiline.measure.evaluate import machine, versions
from aquiline.measure.quiet import pause_file, quiet
from aquiline.model.backend import fast_bf16
from aquiline.model.draft import Draft
from aquiline.model.vocab import VocabMap
from aquiline.train.init import init_draft
from aquiline.train.loop import autocast, make_pack
from aquiline.train.optim import make_optimizers
from aquiline.train.run import draft_config
from aquiline.train.ttt import Pack, Plan, unroll


def reference_unroll(draft: Draft, pack: Pack, head_VD: Tensor, steps: int, decay: float) -> Tensor:
    """The loss, all rows at every step, through plain autograd."""
    plan = Plan.make(pack.supervised_T, pack.starts, steps)
    T, attention = len(pack.ids_T), draft.midlayer.self_attn
    groups = attention.heads // attention.kv_heads
    lengths = torch.tensor(pack.starts).diff()
    document_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    own = document_T[:, None] == document_T
    mask_TT = torch.zeros(T, T).masked_fill_(~(own & torch.ones(T, T, dtype=torch.bool).tril()), -torch.inf)
    with torch.no_grad():
        teacher_TV = F.linear(pack.last_TD.to(head_VD.dtype), head_VD).float()
    feature = draft.fuse(pack.aux_TA)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total = torch.zeros(())
    for k in range(steps):
        embeds, teacher = (_shifted(x, 1 + k) for x in (pack.embeds_TH, teacher_TV))
        x, residual = draft.midlayer.inputs(embeds, feature)
        q, key, value = attention.queries_keys_values(x, *draft.rotary(plan.position_T + k, x.dtype))
        q = q.transpose(0, 1).to(value.dtype)  # [h, T, E]
        keys.append(key.repeat_interleave(groups, 1).transpose(0, 1).to(value.dtype))
        values.append(value.repeat_interleave(groups, 1).transpose(0, 1))
        scale = q.shape[-1] ** -0.5
        scores = [(q @ keys[0].transpose(1, 2)).float() * scale + mask_TT]
        scores += [(q * keys[j]).sum(-1, keepdim=True).float() * scale for j in range(1, k + 1)]
        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).to(q.dtype)
        attended = weights[..., :T] @ values[0]
        for j in range(1, k + 1):
            attended = attended + weights[..., T + j - 1, None] * values[j]
        feature, hidden = draft.outputs(draft.midlayer.finish(residual, attended.transpose(0, 1).flatten(1)))
        logits = draft.lm_head(hidden).float()
        with torch.no_grad():
            inside = draft.vocab.draft_ids_V[teacher.argmax(-1)] >= 0
            probs = torch.softmax(teacher[:, draft.vocab.target_ids_W], dim=-1)
        scored = plan.valid_KT[k] & inside
        losses = -(probs * torch.log_softmax(logits, dim=-1)).sum(-1)
        total = total + decay**k * (losses * scored).sum() / scored.sum().clamp(min=1)
    return total


def _shifted(x: Tensor, by: int) -> Tensor:
    return torch.cat((x[by:], x.new_zeros(min(by, len(x)), *x.shape[1:])))


def prepare(folder: Path, target_spec: str, answers: str | None, length: int, updates: int) -> None:
    """Head, packs of `length` and of twice that, with their features, and the target's output rows, for `work`."""
    target = checkpoint.load_target(target_spec, torch.bfloat16 if fast_bf16("cpu") else torch.float32)
    V = target.config.vocab_size
    if answers is None:
        documents = [_random_document(number, length // 4, V) for number in range(8 * updates + 8)]
    else:
        documents = read_documents([Path(answers)], load_chat(target_spec), V, length).documents
    vocab = VocabMap.build(token_counts(documents, V), min(DEFAULT_DRAFT_VOCAB, V))
    config = TrainConfig(draft_vocab_size=vocab.draft_vocab_size)
    draft = Draft(draft_config(target, config, length), vocab)
    init_draft(draft, target, compute(target, documents[:8]), config.seed)
    for size in (length, 2 * length):
        made = []
        for _, numbers in zip(range(updates + 1), packs(documents, size, config.seed, 0), strict=False):
            chosen = [documents[i] for i in numbers]
            made.append(make_pack(chosen, compute(target, chosen), draft, target))
        require(len(made) == updates + 1, f"too few documents for {updates + 1} packs of {size} tokens")
        plain = [{k: v for k, v in vars(pack).items() if k != "head_form"} for pack in made]  # a Llama's is
        torch.save(plain, folder / f"packs-{size}.pt")
    torch.save(target.head_weight, folder / "head.pt")
    torch.save(target.head_weight[vocab.target_ids_W], folder / "head_rows.pt")
    torch.save(
        {"config": draft.config, "vocab": vocab.target_ids_W, "weights": draft.state_dict()}, folder / "draft.pt"
    )


def _random_document(number: int, length: int, vocab_size: int) -> Document:
    ids = torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(number)).int()
    return Document(ids, torch.arange(length) >= length // 2, True, "", str(number))


def work(folder: Path, way: str, size: int, steps: int) -> dict[str, Any]:
    """Train on the packs of one size, `way` being ours or reference; what it took."""
    saved = torch.load(folder / "draft.pt", weights_only=False)
    draft = Draft(saved["config"], VocabMap.of(saved["vocab"], saved["config"].vocab_size))
    draft.load_state_dict(saved["weights"])
    config = TrainConfig(ttt_steps=steps)
    rows = torch.load(folder / ("head_rows.pt" if way == "ours" else "head.pt"))
    made = [Pack(**values) for values in torch.load(folder / f"packs-{size}.pt", mmap=True)]
    optimizers = make_optimizers(draft, config)
    loss_of: dict[str, Callable[[Pack], Tensor]] = {
        "ours": lambda pack: unroll(draft, pack, rows, steps, config.ttt_decay)[0],
        "reference": lambda pack: reference_unroll(draft, pack, rows, steps, config.ttt_decay),
    }
    before, losses, tokens, start = _peak_mib(), [], 0, time.perf_counter()
    for number, pack in enumerate(made):
        if number == 1:
            start = time.perf_counter()
        with autocast(draft):
            loss = loss_of[way](pack)
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), config.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        tokens += len(pack.ids_T) if number else 0
    seconds = time.perf_counter() - start
    return {
        "tokens_per_second": tokens / seconds, "tokens": tokens, "seconds": seconds, "peak_mib": _peak_mib(),
        "mib_before_the_first_update": before, "losses": losses, "threads": torch.get_num_threads(),
    }  # fmt: skip


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux


def _in_process(*arguments: object) -> str:
    """Run a part of this script by itself. A child's peak starts at its parent's, so this process stays small."""
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All turns over the packs in `folder`, and the ratios that are judged."""
    turns: dict[str, list[dict[str, Any]]] = {"ours": [], "reference": []}
    for number in range(options.rounds):
        for way in list(turns) if number % 2 == 0 else list(turns)[::-1]:
            turns[way].append(json.loads(_in_process("work", folder, way, options.length, options.steps)))
            print(f"{way}: {turns[way][-1]['tokens_per_second']:.0f} tokens/s", file=sys.stderr, flush=True)
    double = json.loads(_in_process("work", folder, "ours", 2 * options.length, options.steps))
    ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(*turns.values(), strict=True)]
    peak = {way: max(turn["peak_mib"] for turn in done) for way, done in turns.items()}
    first = [done[0]["losses"][0] for done in turns.values()]
    return {
        "speed_ratio_median": statistics.median(ratios),
        "speed_ratio_min": min(ratios),
        "speed_ratio_max": max(ratios),
        "tokens_per_second_median": {
            way: statistics.median(turn["tokens_per_second"] for turn in done) for way, done in turns.items()
        },
        "peak_mib": peak,
        "memory_ratio": peak["ours"] / peak["reference"],
        "peak_mib_ours_at_twice_the_length": double["peak_mib"],
        "memory_ratio_of_twice_the_length": double["peak_mib"] / peak["ours"],
        "first_loss_relative_difference": abs(first[0] - first[1]) / first[1],
        "turns": turns | {"ours_at_twice_the_length": [double]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--answers")
    parser.add_argument("--target", default="default")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--updates", type=int, default=4, help="Timed ones of a turn.")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _in_process("prepare", folder, options.target, options.answers or "", options.length, options.updates)
        with quiet(pause_file()) as found:
            record = measure(options, Path(folder))
    found.require()
    settings = {k: v for k, v in vars(options).items() if k != "out"} | {"autocast_bf16": fast_bf16("cpu")}
    settings["answers"] = options.answers and Path(options.answers).name
    where = machine(torch.device("cpu")) | found.record()
    record |= {"settings": settings, "machine": where, "versions": versions()}
    write_json_atomic(options.out, record)
    print(json.dumps({k: v for k, v in record.items() if k.endswith(("_median", "_ratio", "_length", "_difference"))}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["prepare"]:
        prepare(Path(sys.argv[2]), sys.argv[3], sys.argv[4] or None, int(sys.argv[5]), int(sys.argv[6]))
    elif sys.argv[1:2] == ["work"]:
        print(json.dumps(work(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))))
    else:
        main()
