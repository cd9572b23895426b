"""One training run on disk: from data files and settings to a `Trainer`, and what its output folder holds.

OUT/setup.json   what the run was begun with; compared when it is resumed
OUT/state/       the trainer's state while the run goes on
OUT/head/        the best head so far, replaced as a whole: this is the draft's folder
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aquiline.config import DraftConfig, TrainConfig, UserError, check_capture_after, require
from aquiline.data.chat import Chat
from aquiline.data.dataset import Document, check_writers, fingerprint, hold_out, read_documents, token_counts
from aquiline.data.features import FeatureStore, compute
from aquiline.files import checkpoint, disk
from aquiline.files.checkpoint import DraftInfo
from aquiline.measure.evaluate import machine, versions
from aquiline.model.draft import Draft
from aquiline.model.target import Target
from aquiline.model.vocab import VocabMap
from aquiline.train.loop import Progress, Trainer, init_draft

_INIT_DOCUMENTS = 8  # whose captured states the new head is scaled to


@dataclass
class TrainingRun:
    """Everything read and checked; `run` trains."""

    out: Path
    config: TrainConfig
    target: Target
    draft: Draft
    info: DraftInfo
    training: list[Document]
    held_out: list[Document]
    coverage: float  # share of the supervised tokens that the draft can propose
    features: Path | None
    record: dict[str, Any]  # the fixed part of run.json
    setup: dict[str, Any]  # setup.json

    @staticmethod
    def prepare(
        data: Sequence[Path],
        out: Path,
        target_spec: str | Path,
        chat: Chat,
        config: TrainConfig,
        *,
        dtype: torch.dtype = torch.float32,
        capture_after: tuple[int, ...] | None = None,
        features: Path | None = None,
        command: Sequence[str] = (),
        strict: bool = False,
    ) -> "TrainingRun":
        """Read the data, load the target, make the draft. UserError for what does not fit; writes nothing.

        `command`: the command line, for the record. `strict`: the first row of no use is an error.
        """
        target_config = checkpoint.read_target_config(target_spec)
        if capture_after is not None:
            check_capture_after(capture_after, target_config.num_layers)
        longest = min(config.max_length, target_config.max_positions)
        reading = read_documents(data, chat, target_config.vocab_size, longest, strict)
        training, held_out = hold_out(reading.documents, config.held_out, config.seed)
        require(
            bool(held_out),
            "no row was decoded greedily by the target (`temperature` 0), and some must be held out to measure the "
            "accepted length: add greedy answers, and leave held_out above 0",
        )
        require(
            bool(training), f"all {len(reading.documents)} rows would be held out: give more data, or a lower held_out"
        )
        target = checkpoint.load_target(target_spec, dtype, "cpu", capture_after)
        counts = token_counts(training, target.config.vocab_size)
        ends = [i for i in sorted(chat.end_of_turn_ids) if i < target.config.vocab_size]  # configs name ids beyond it
        vocab = VocabMap.build(counts, config.draft_vocab_size, always=tuple(ends))
        draft = Draft(draft_config(target, config, max(map(len, training))), vocab)
        info = DraftInfo.of(
            target, checkpoint.target_name(target_spec), chat.fingerprint(), chat.template_fingerprint()
        )
        check_writers(reading, info.target_fingerprint, info.tokenizer, info.template)
        setup = _setup(info, draft)
        _compare_setup(out, setup)
        init_draft(draft, target, compute(target, training[:_INIT_DOCUMENTS]), config.seed)
        record = {
            "command": list(command),
            "target": dataclasses.asdict(info),
            "data": {
                "files": [path.name for path in data],
                "documents": len(training),
                "held_out": len(held_out),
                "cut": reading.cut,
                "dropped": reading.dropped,
                "template_kwargs": reading.template_kwargs,
                "tokens": sum(map(len, training)),
                "supervised_tokens": int(counts.sum()),
                "coverage": vocab.coverage(counts),
            },
            "documents": fingerprint(training),
            "machine": machine(target.device),
            "versions": versions(),
        }
        run = TrainingRun(
            out, config, target, draft, info, training, held_out, vocab.coverage(counts), features, record, setup
        )
        run._check_head()
        return run

    @property
    def head(self) -> Path:
        """The folder of the best head."""
        return self.out / "head"

    def tensors(self) -> list[tuple[str, str, str, str]]:
        """(name, shape, trained or frozen, where its values come from) of everything the draft computes with."""
        sources = {
            "lm_head.weight": "the target's head, rows of the draft vocabulary",
            "fc.weight": "random, scaled to the captured states",
        }
        rows = [("embed_tokens.weight", _shape(self.target.model.embed_tokens.weight), "frozen", "the target's")]
        for name, p in self.draft.named_parameters():
            fresh = "random" if p.ndim == 2 else "zeros" if name.endswith("bias") else "ones"
            rows.append((name, _shape(p), "trained" if p.requires_grad else "frozen", sources.get(name, fresh)))
        vocab = self.draft.vocab
        rows.append(
            ("d2t", f"{vocab.draft_vocab_size}", "frozen", f"the most frequent of {vocab.vocab_size} target tokens")
        )
        return rows

    def run(self, report: Callable[[Progress], None], stop: Callable[[], bool] = lambda: False) -> bool:
        """Train, going on from `OUT/state` if there is one; True when the run is complete, False when stopped."""
        store, held_out = self._store("train", self.training), self._store("held_out", self.held_out)
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {self.out}: {error.strerror}") from error
        disk.write_json_atomic(self.out / "setup.json", self.setup)
        trainer = Trainer(
            config=self.config,
            target=self.target,
            draft=self.draft,
            store=store,
            held_out=held_out,
            folder=self.out / "state",
            save_head=self._save_head,
            report=report,
            record=self.record,
        )
        try:
            complete = trainer.run(stop)
        finally:
            store.flush()
            held_out.flush()
        require(
            not complete or (self.head / "config.json").is_file(),
            f"the run in {self.out} is complete, but its head, {self.head}, is gone; "
            f"to train it again, give another output folder or delete {self.out / 'state'}",
        )
        return complete

    def _check_head(self) -> None:
        """UserError when a run that is yet to begin would replace a head that it did not write."""
        if not self.head.exists() or (self.out / "state" / "state.pt").exists():
            return
        path = self.head / "run.json"
        found = disk.read_json(path) if path.is_file() else {}
        ours = {**self.record, "training": dataclasses.asdict(self.config)}
        same = all(found.get(key) == ours[key] for key in ("target", "documents", "training"))
        require(same, f"{self.head} exists and was not written by this run; give another output folder")

    def _store(self, name: str, documents: list[Document]) -> FeatureStore:
        folder = None if self.features is None else self.features / name
        return FeatureStore(folder, self.target, documents, self.info.target_fingerprint)

    def _save_head(self, draft: Draft, record: dict[str, Any]) -> None:
        checkpoint.save_draft(draft, self.head, self.info, record)


def draft_config(target: Target, config: TrainConfig, trained_length: int) -> DraftConfig:
    """A head of the target's own shape: its heads, widths, norm and whole rope block."""
    t = target.config
    return DraftConfig(
        vocab_size=t.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        hidden_size=t.hidden_size,
        target_hidden_size=t.hidden_size,
        intermediate_size=t.intermediate_size,
        num_heads=t.num_heads,
        num_kv_heads=t.num_kv_heads,
        head_dim=t.head_dim,
        norm_eps=t.norm_eps,
        max_positions=t.max_positions,
        rope=t.rope,
        capture_after=target.capture_after,
        trained_length=trained_length,
    )


def _setup(info: DraftInfo, draft: Draft) -> dict[str, Any]:
    ids = draft.vocab.target_ids_W.numpy().tobytes()
    return dataclasses.asdict(info) | {
        "capture_after": list(draft.config.capture_after),
        "draft_vocabulary": hashlib.sha256(ids).hexdigest(),
    }


def _compare_setup(out: Path, setup: dict[str, Any]) -> None:
    """Resumed on another target or draft vocabulary, every row of the head would mean something else, and nothing
    would look wrong.
    """
    path = out / "setup.json"
    if not path.exists():
        return
    found = disk.read_json(path)
    changed = [f"{k} was {found.get(k)!r} and is {v!r}" for k, v in setup.items() if found.get(k) != v]
    require(not changed, f"{out} belongs to another run: {'; '.join(changed)}. Give another output folder")


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(map(str, tensor.shape))
