"""Small comparisons: one change at a time against the default recipe, on equal token passes from one feature cache.

    python runs/compare_recipes.py WORK OUT.json ANSWERS.jsonl... --tokens N [--batch-tokens N] [--held-out N]

Rows of N tokens together are drawn from the answers; their features and those of the held-out greedy rows are computed
once, into WORK/features. Every recipe then trains a head on N token passes over those rows: the default one sees each
row once, the ones with less data see an eighth, a quarter or a half of them, more often. The draft vocabulary is always
the most frequent tokens of ALL answers that are not held out, so that only what is named differs. After its last update
each head is measured by the walk of a chain of four over the held-out rows, whatever steps it was trained with; the
head with 32,768 tokens is then cut to fewer, and measured again without any training.

Run again after it was stopped, it goes on. Several may run at once, on the same WORK: each takes the next recipe that
none has begun. With AQUILINE_PAUSE_FILE set they stand still while something is timed.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.api import load_chat, pick_dtype
from aquiline.config import DEFAULT_DRAFT_VOCAB, TOP, TrainConfig, require
from aquiline.data.dataset import Document, fingerprint, hold_out, read_documents, token_counts
from aquiline.data.features import Features, FeatureStore
from aquiline.files import checkpoint
from aquiline.files.disk import read_json, write_json_atomic
from aquiline.measure.evaluate import machine, versions
from aquiline.measure.quiet import GiveWay, pause_file
from aquiline.model.draft import Draft
from aquiline.model.target import Target
from aquiline.model.vocab import VocabMap
from aquiline.train.init import init_draft
from aquiline.train.loop import Progress, Trainer, evaluate
from aquiline.train.run import draft_config

DEPTH = 4  # of the chain that is walked
CUTS = (16_384, 8_192, 4_096)


@dataclass(frozen=True)
class Recipe:
    """What differs from the default recipe."""

    changes: dict[str, Any] = field(default_factory=dict)  # fields of TrainConfig
    share: float = 1.0  # of the rows; passes are the same
    top: bool = False  # the draft reads the target's final state alone
    cuts: tuple[int, ...] = ()  # draft vocabularies that the trained head is cut to


RECIPES = {
    "base": Recipe(),
    "ttt-1": Recipe({"ttt_steps": 1}),
    "top": Recipe(top=True),
    "data-1/8": Recipe(share=1 / 8),
    "data-1/4": Recipe(share=1 / 4),
    "data-1/2": Recipe(share=1 / 2),
    "base, seed 1": Recipe({"seed": 1}),
    "lk": Recipe({"loss": "lk"}),
    "adamw": Recipe({"optimizer": "adamw"}),
    "ttt-3": Recipe({"ttt_steps": 3}),
    "lm-head-frozen": Recipe({"train_lm_head": False}),
    "init-target-layer": Recipe({"init": "target-layer"}),
    "vocabulary-32768": Recipe({"draft_vocab_size": 32_768}, cuts=CUTS),
}


class Part(FeatureStore):
    """Some documents of a store whose features are all there. `top`: as a target that captures its final state."""

    def __init__(self, store: FeatureStore, numbers: Sequence[int], top: bool = False) -> None:
        self.store, self.numbers, self.top = store, numbers, top
        self.documents = [store.documents[i] for i in numbers]

    def missing(self, numbers: Sequence[int]) -> list[int]:
        return []

    def get(self, numbers: Sequence[int], missing: Sequence[int] | None = None) -> Features:
        features = self.store.get([self.numbers[i] for i in numbers])
        return dataclasses.replace(features, aux_TA=features.last_TD) if self.top else features


@dataclass
class Bench:
    """What all recipes share. The store holds the rows to train on, then those held out."""

    work: Path
    target: Target
    store: FeatureStore
    training: int  # rows
    counts_V: Tensor  # of the supervised tokens of all answers that are not held out
    always: tuple[int, ...]  # ids that every draft vocabulary has
    base: TrainConfig

    @staticmethod
    def prepare(args: argparse.Namespace) -> "Bench":
        dtype = pick_dtype(None, args.target, torch.device("cpu"), trains=True)
        target, chat = checkpoint.load_target(args.target, dtype), load_chat(args.target)
        base = TrainConfig(
            batch_tokens=args.batch_tokens, held_out=args.held_out, save_every=25, eval_every=10**9, decode_every=0
        )
        V = target.config.vocab_size
        longest = min(base.max_length, target.config.max_positions)
        rows, held_out = hold_out(read_documents(args.answers, chat, V, longest).documents, base.held_out, base.seed)
        chosen = first_rows(shuffled(rows, base.seed), args.tokens)
        require(
            sum(map(len, chosen)) >= args.tokens, f"the answers have fewer than {args.tokens} tokens: lower --tokens"
        )
        store = FeatureStore(
            args.work / "features", target, [*chosen, *held_out], checkpoint.target_fingerprint(target)
        )
        always = tuple(i for i in sorted(chat.end_of_turn_ids) if i < V)
        return Bench(args.work, target, store, len(chosen), token_counts(rows, V), always, base)

    @property
    def held_out(self) -> range:
        return range(self.training, len(self.store.documents))

    def fill(self, stop: list[int]) -> None:
        """Compute the features that are missing; the first process does it."""
        give_way = GiveWay(pause_file())
        with locked(self.work / "features.lock", wait=True):
            for i in range(len(self.store.documents)):
                if self.store.missing([i]):
                    give_way(lambda: bool(stop))
                    self.store.get([i])
                if stop:
                    break
            self.store.flush()
        give_way.close()

    def train(self, name: str, recipe: Recipe, stop: list[int]) -> dict[str, Any] | None:
        """Train and measure; None when stopped before the end."""
        whole = sum(map(len, self.store.documents[: self.training]))
        rows = len(first_rows(self.store.documents[: self.training], recipe.share * whole))
        store = Part(self.store, range(rows), recipe.top)
        tokens = sum(map(len, store.documents))
        size = min(DEFAULT_DRAFT_VOCAB, self.target.config.vocab_size)
        config = dataclasses.replace(self.base, **{"epochs": whole / tokens, "draft_vocab_size": size} | recipe.changes)
        draft = self.draft(config, recipe)
        init_draft(draft, self.target, self.store.get(range(8)), config.seed, config.init)
        draft.lm_head.weight.requires_grad_(config.train_lm_head)
        trainer = Trainer(
            config=config, target=self.target, draft=draft, store=store,
            held_out=Part(self.store, self.held_out[:1], recipe.top),  # the trainer's own measure is not used
            folder=self.folder(name) / "state", save_head=lambda *_: None, report=lambda p: tell(name, p),
            record={"documents": fingerprint(store.documents)}, pause_file=pause_file(),
        )  # fmt: skip
        if not trainer.run(lambda: bool(stop)):
            return None
        passes = tokens_of(trainer)
        result = {
            "changes": recipe.changes | ({"capture_after": "top"} if recipe.top else {}),
            "rows": rows, "tokens": tokens, "token_passes": passes, "updates": trainer.total,
            "parameters_trained": sum(p.numel() for p in draft.parameters() if p.requires_grad),
        } | self.measure(draft, recipe)  # fmt: skip
        if recipe.cuts:
            result["cut_to"] = {str(size): self.measure(self.cut(draft, size), recipe) for size in recipe.cuts}
        return result

    def draft(self, config: TrainConfig, recipe: Recipe) -> Draft:
        assert config.draft_vocab_size is not None
        vocab = VocabMap.build(self.counts_V, config.draft_vocab_size, self.always)
        shape = draft_config(self.target, config, max(map(len, self.store.documents)))
        return Draft(dataclasses.replace(shape, capture_after=TOP) if recipe.top else shape, vocab)

    def cut(self, draft: Draft, size: int) -> Draft:
        """The head with only the rows of its `lm_head` that belong to its `size` most frequent tokens."""
        vocab = VocabMap.build(self.counts_V, size, self.always)
        smaller = Draft(dataclasses.replace(draft.config, draft_vocab_size=size), vocab)
        rows = draft.vocab.draft_ids_V[vocab.target_ids_W]
        assert bool((rows >= 0).all())
        smaller.load_state_dict(draft.state_dict() | {"lm_head.weight": draft.lm_head.weight.detach()[rows]})
        return smaller

    def measure(self, draft: Draft, recipe: Recipe) -> dict[str, Any]:
        """The walk of a chain of DEPTH over the held-out rows."""
        config = dataclasses.replace(self.base, ttt_steps=DEPTH)
        held_out = Part(self.store, self.held_out, recipe.top)
        rows_WD = self.target.head_weight[draft.vocab.target_ids_W]
        found = evaluate(draft, self.target, held_out, config, rows_WD)
        return {
            "tau": found.tau, "n_alpha": found.n_alpha, "accuracy": found.accuracy, "loss": found.loss,
            "draft_vocab_size": draft.config.draft_vocab_size, "coverage": draft.vocab.coverage(self.counts_V),
        }  # fmt: skip

    def folder(self, name: str) -> Path:
        return self.work / name.replace("/", "-of-").replace(", ", "-").replace(" ", "-")


def shuffled(documents: Sequence[Document], seed: int) -> list[Document]:
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    return [documents[i] for i in order]


def first_rows(documents: Sequence[Document], tokens: float) -> list[Document]:
    """As many from the beginning as have at least so many tokens together."""
    chosen: list[Document] = []
    total = 0
    for d in documents:
        if total >= tokens:
            break
        chosen.append(d)
        total += len(d)
    return chosen


def tokens_of(trainer: Trainer) -> int:
    """Token passes of the whole run."""
    lengths = [len(d) for d in trainer.store.documents]
    return sum(lengths[i] for _, group in trainer._updates(0) for pack in group for i in pack)


def tell(name: str, p: Progress) -> None:
    if p.step % 10 == 0 or p.step == p.total:
        accuracy = " ".join(f"{a:.2f}" for a in p.accuracy)
        print(f"{name}: {p.step}/{p.total} · {p.seconds / 60:.1f} min · loss {p.loss:.3f} · {accuracy}", flush=True)


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Whether this process holds the lock, which ends with it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def write_record(out: Path, bench: Bench, args: argparse.Namespace) -> None:
    """Everything that is finished, by whatever process."""
    found = {name: bench.folder(name) / "result.json" for name in RECIPES}
    held_out = [bench.store.documents[i] for i in bench.held_out]
    record = {
        "command": ["runs/compare_recipes.py", "WORK", out.name, *(path.name for path in args.answers)]
        + [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("tokens", "batch-tokens", "held-out")],
        "target": checkpoint.target_name(args.target),
        "training": dataclasses.asdict(bench.base),
        "rows": bench.training,
        "tokens": sum(map(len, bench.store.documents[: bench.training])),
        "held_out": {"rows": len(held_out), "supervised_tokens": int(sum(d.supervised.sum() for d in held_out))},
        "depth": DEPTH,
        "recipes": {name: read_json(path) for name, path in found.items() if path.exists()},
        "not_run": [name for name, path in found.items() if not path.exists()],
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
    }
    with locked(bench.work / "record.lock", wait=True):
        write_json_atomic(out, record)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, required=True, help="Token passes of each recipe.")
    parser.add_argument("--batch-tokens", type=int, default=TrainConfig.batch_tokens)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--target", default="default")
    args = parser.parse_args()
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stop.append(number))
    bench = Bench.prepare(args)
    bench.fill(stop)
    for name, recipe in RECIPES.items():
        path = bench.folder(name) / "result.json"
        with locked(bench.folder(name) / "lock") as mine:
            if stop or not mine or path.exists():
                continue
            result = bench.train(name, recipe, stop)
            if result is not None:
                write_json_atomic(path, result)
                write_record(args.out, bench, args)
                print(f"{name}: tau {result['tau']:.3f}", flush=True)
    write_record(args.out, bench, args)
    sys.exit(128 + stop[0] if stop else 0)


if __name__ == "__main__":
    main()
