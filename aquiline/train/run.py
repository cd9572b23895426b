"""One training run on disk: from data files and settings to a `Trainer`, and what its output folder holds.

OUT/setup.json   what the run was begun with; compared when it is resumed
OUT/state/       the trainer's state while the run goes on
OUT/log.jsonl    every update and evaluation; OUT/tensorboard/ and OUT/run.svg show them
OUT/head/        the best head so far, replaced as a whole: this is the draft's folder
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aquiline.config import (
    DEFAULT_DRAFT_VOCAB,
    SWITCHES,
    DraftConfig,
    TrainConfig,
    UserError,
    capture_name,
    check_capture_after,
    require,
)
from aquiline.data.chat import Chat
from aquiline.data.dataset import (
    Document,
    check_writers,
    fingerprint,
    hold_out,
    prompt_hash,
    read_documents,
    still_held_out,
    token_counts,
)
from aquiline.data.features import FeatureStore, compute
from aquiline.data.stored_states import StoredStates
from aquiline.files import checkpoint, disk
from aquiline.files.checkpoint import DraftInfo
from aquiline.measure.evaluate import machine, versions
from aquiline.model.draft import Draft
from aquiline.model.target import LlamaTarget, Target
from aquiline.model.vocab import VocabMap
from aquiline.train.estimate import Estimate, estimate
from aquiline.train.init import init_draft
from aquiline.train.log import RunLog
from aquiline.train.loop import Progress, Trainer
from aquiline.train.parallel import ALONE, Processes, launched
from aquiline.train.shard import passes_together, shard, whole
from aquiline.train.state import changed_settings

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
    sources: dict[str, str]  # where each of the draft's tensors comes from
    stored: StoredStates | None = None  # in place of the target's passes

    @staticmethod
    def prepare(
        data: Sequence[Path],
        out: Path,
        target_spec: str | Path,
        chat: Chat,
        config: TrainConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        capture_after: tuple[int, ...] | None = None,
        features: Path | None = None,
        warm_start: str | Path | None = None,
        command: Sequence[str] = (),
        strict: bool = False,
        shard_target: bool = False,
        processes: Processes = ALONE,
    ) -> "TrainingRun":
        """Read the data, load the target, make the draft. UserError for what does not fit; writes nothing.

        `data`: files of answers, or folders of hidden states that other trainers' fleets wrote (files/state_files.py).
        `warm_start`: a head (folder, hub id or `default`) whose weights, vocabulary map, captured layers and switches
        the run begins with. `command`: the command line, for the record. `strict`: the first row of no
        use is an error. `shard_target`: each of several `processes` keeps a part of the target; all call this.
        """
        require(
            not shard_target or launched() > 1,
            f"--shard-target spreads the target over several processes, and {launched()} was started: start them with "
            "torchrun --nproc-per-node N -m aquiline train ..., or leave it out",
        )
        require(
            launched() == 1 or not config.feature_loss,
            f"the feature loss, an ablation, is for one process, and {launched()} were started: leave torchrun out",
        )
        stored = _stored_states(data, capture_after, warm_start, shard_target)
        home = device if not shard_target and stored is None else "cpu"  # a part of it goes to the device
        loaded_as = dtype if stored is None else None  # else its layers would be read from the disk, for nothing
        target_config = checkpoint.read_target_config(target_spec)
        if capture_after is not None:
            check_capture_after(capture_after, target_config.num_layers)
        longest = min(config.max_length, target_config.max_positions)
        reading = read_documents(data, chat, target_config.vocab_size, longest, strict)
        earlier = {} if warm_start is None else _run_record(warm_start)
        before = earlier.get("held_out")  # an older head does not tell
        before = before if isinstance(before, list) else None
        training, held_out = hold_out(
            reading.documents, config.held_out, config.seed, before or (), sampled=stored is not None
        )
        require(
            bool(held_out),
            "no row was decoded greedily by the target (`temperature` 0), and some must be held out to measure the "
            "accepted length: add greedy answers, and leave held_out above 0",
        )
        require(
            bool(training), f"all {len(reading.documents)} rows would be held out: give more data, or a lower held_out"
        )
        longest_row = max(map(len, training))
        started: dict[str, Any] | None = None
        if warm_start is None:
            target = checkpoint.load_target(target_spec, loaded_as, home, capture_after)
            counts = token_counts(training, target.config.vocab_size)
            size = config.draft_vocab_size or min(DEFAULT_DRAFT_VOCAB, target.config.vocab_size)
            config = dataclasses.replace(config, draft_vocab_size=size)
            known = range(target.config.vocab_size)  # configs name ids beyond it
            vocab = VocabMap.build(counts, size, always=tuple(i for i in sorted(chat.end_of_turn_ids) if i in known))
            draft = Draft(draft_config(target, config, longest_row), vocab).to(home)
        else:
            target, draft, started = _warm_start(
                warm_start, earlier, target_spec, loaded_as, home, chat, config, capture_after
            )
            started["held_out"] = None if before is None else still_held_out(held_out, before, started["head"])
            counts, vocab = token_counts(training, target.config.vocab_size), draft.vocab.to("cpu")
            longest_row = max(longest_row, draft.config.trained_length or 0)
            draft.config = dataclasses.replace(draft.config, trained_length=longest_row)
        require(
            draft.config.top or not config.feature_loss,
            "the feature loss is only for a head that reads the target's final state: add --capture-after top, or "
            "leave --feature-loss out (with a trained fc, the feature to be met could be shrunk to nothing)",
        )
        config = dataclasses.replace(config, draft_vocab_size=vocab.draft_vocab_size)
        info = DraftInfo.of(
            target, checkpoint.target_name(target_spec), chat.fingerprint(), chat.template_fingerprint()
        )
        check_writers(reading, info.target_fingerprint, info.template)
        setup = (
            _setup(info, draft)
            | {"processes": launched()}
            | ({} if started is None else {"warm_start": started["sha256"]})
        )
        _compare_setup(out, setup)
        if shard_target:  # from here on nothing reads the target's weights but passes_together and whole
            shard(target, torch.device(device).type)
            draft.to(device)
            config = dataclasses.replace(config, decode_every=0)  # whose number of passes no other process knows
        if started is None:
            with passes_together(target, 1, processes):
                features_of_some = (compute if stored is None else stored.features)(target, training[:_INIT_DOCUMENTS])
                with whole(target.model.layers[-1] if isinstance(target, LlamaTarget) else target):
                    sources = init_draft(draft, target, features_of_some, config.seed, config.init)
        else:
            sources = {name: started["head"] for name, _ in draft.named_parameters()}
        draft.lm_head.weight.requires_grad_(config.train_lm_head)
        greedy_share = None
        if stored is not None:
            target.drop_layers()
            target.to(device, dtype)
            draft.to(device)
            config = dataclasses.replace(config, decode_every=0)
            greedy_share = stored.check(target, held_out)
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
                "systems": reading.systems,
                "tokens": sum(map(len, training)),
                "supervised_tokens": int(counts.sum()),
                "coverage": vocab.coverage(counts),
            }
            | ({} if stored is None else {"states": stored.made_by, "greedy_share": greedy_share}),
            "documents": fingerprint(training),
            "held_out": sorted({prompt_hash(d) for d in held_out}),
            "machine": machine(target.device),
            "versions": versions(),
        } | ({} if started is None else {"warm_start": started})
        run = TrainingRun(
            out, config, target, draft, info, training, held_out, vocab.coverage(counts), features, record, setup,
            sources, stored,
        )  # fmt: skip
        run._check_head()
        return run

    @property
    def head(self) -> Path:
        """The folder of the best head."""
        return self.out / "head"

    def tensors(self) -> list[tuple[str, str, str, str]]:
        """(name, shape, trained or frozen, where its values come from) of everything the draft computes with."""
        head = self.record.get("warm_start", {}).get("head")
        rows = []
        if not self.draft.config.own_embedding:
            rows = [("embed_tokens.weight", _shape(self.target.embedding.weight), "frozen", "the target's")]
        for name, p in self.draft.named_parameters():
            rows.append((name, _shape(p), "trained" if p.requires_grad else "frozen", self.sources[name]))
        vocab = self.draft.vocab
        chosen = head or f"the most frequent of {vocab.vocab_size} target tokens"
        rows.append(("d2t", f"{vocab.draft_vocab_size}", "frozen", chosen))
        return rows

    def parameters(self) -> tuple[int, int]:
        """How many numbers are trained, and how many the draft computes with that are not."""
        frozen = 0 if self.draft.config.own_embedding else self.target.embedding.weight.numel()
        sizes = [(p.numel(), p.requires_grad) for p in self.draft.parameters()]
        return sum(n for n, trained in sizes if trained), frozen + sum(n for n, trained in sizes if not trained)

    def run(
        self,
        report: Callable[[Progress], None],
        stop: Callable[[], bool] = lambda: False,
        pause_file: Path | None = None,
        processes: Processes = Processes(),
    ) -> bool:
        """Train, going on from `OUT/state` if there is one; True when the run is complete, False when stopped.

        Of several `processes` the first one makes and writes the files.
        """
        if processes.first:
            store, held_out = (
                self._store(documents, self.features and self.features / name)
                for name, documents in (("train", self.training), ("held_out", self.held_out))
            )
            try:
                self.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"cannot write {self.out}: {error.strerror}") from error
            disk.write_json_atomic(self.out / "setup.json", self.setup)
            processes.wait()
        else:
            processes.wait()  # until the folder of features is there
            store = self._store(self.training, self.features and self.features / "train")
            held_out = self._store(self.held_out)
        with RunLog(self.out, self.record | {"training": dataclasses.asdict(self.config)}) as log:

            def tell(progress: Progress) -> None:
                if processes.first:
                    log.add(progress)
                    report(progress)

            trainer = self._trainer(store, held_out, tell, processes, pause_file)
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

    def estimate(self) -> Estimate:
        """What the run will take, from a few of its updates; nothing is written."""
        store, held_out = self._store(self.training), self._store(self.held_out)
        return estimate(self._trainer(store, held_out, lambda _: None), keeps_features=self.features is not None)

    def _trainer(
        self,
        store: FeatureStore,
        held_out: FeatureStore,
        report: Callable[[Progress], None],
        processes: Processes = Processes(),
        pause_file: Path | None = None,
    ) -> Trainer:
        return Trainer(
            config=self.config,
            target=self.target,
            draft=self.draft,
            store=store,
            held_out=held_out,
            folder=self.out / "state",
            save_head=self._save_head,
            report=report,
            record=self.record,
            pause_file=pause_file,
            processes=processes,
            begun="warm_start" in self.record,
        )

    def _check_head(self) -> None:
        """UserError when a run that is yet to begin would replace a head that it did not write."""
        if not self.head.exists() or (self.out / "state" / "state.pt").exists():
            return
        path = self.head / "run.json"
        found = disk.read_json(path) if path.is_file() else {}
        same = all(found.get(key) == self.record.get(key) for key in ("target", "documents", "warm_start"))
        same = same and "training" in found and not changed_settings(found["training"], self.config)
        require(same, f"{self.head} exists and was not written by this run; give another output folder")

    def _store(self, documents: list[Document], folder: Path | None = None) -> FeatureStore:
        if self.stored is None:
            return FeatureStore(folder, self.target, documents, self.info.target_fingerprint)
        made_by = f"{self.stored.made_by} {self.stored.digest(documents)}" if folder else ""
        return FeatureStore(folder, self.target, documents, self.info.target_fingerprint, self.stored.features, made_by)

    def _save_head(self, draft: Draft, record: dict[str, Any]) -> None:
        checkpoint.save_draft(draft, self.head, self.info, record)


def _stored_states(
    data: Sequence[Path], capture_after: tuple[int, ...] | None, warm_start: str | Path | None, shard_target: bool
) -> StoredStates | None:
    """Where the data are folders of hidden states. Which layers they are of is nowhere in them, and is not guessed."""
    if not any(path.is_dir() for path in data):
        return None
    stored = StoredStates(data)
    require(
        capture_after is not None or warm_start is not None,
        "nothing in the folders says which layers the hidden states are of: give --capture-after A,B,C, counted from "
        "0, the state after each. SpecForge counts so, too; from each of the ids given to speculators or vLLM take 1, "
        "and leave out the last, that of all layers",
    )
    require(
        not shard_target, "--shard-target spreads the target's layers, which stored states do without: leave it out"
    )
    return stored


def _run_record(head: str | Path) -> dict[str, Any]:
    path = checkpoint.draft_path(head) / "run.json"
    return disk.read_json(path) if path.is_file() else {}


def _warm_start(
    head: str | Path,
    earlier: dict[str, Any],
    target_spec: str | Path,
    dtype: torch.dtype | None,
    device: torch.device | str,
    chat: Chat,
    config: TrainConfig,
    capture_after: tuple[int, ...] | None,
) -> tuple[Target, Draft, dict[str, Any]]:
    """Target and head to begin with, and what run.json says of that head.

    Its vocabulary map stays as it is, whatever the data: with another one every row of its `lm_head` would mean another
    token, and nothing would look wrong.
    """
    folder = checkpoint.draft_path(head)
    target, draft = checkpoint.load_pair(
        target_spec, folder, dtype, device, chat.fingerprint(), chat.template_fingerprint(), torch.float32
    )
    if draft.embed_tokens is not None:
        draft.embed_tokens.requires_grad_(False)
    size, layers = draft.config.draft_vocab_size, draft.config.capture_after
    switches = [name for name in SWITCHES if getattr(draft.config, name)]
    require(
        config.draft_vocab_size in (None, size),
        f"{head} has a draft vocabulary of {size}, which a run that begins with it keeps, and "
        f"{config.draft_vocab_size} was asked for: leave --draft-vocab-size out",
    )
    require(
        capture_after in (None, layers),
        f"{head} has --capture-after {capture_name(layers)}, and {capture_name(capture_after or ())} was asked for: "
        "leave --capture-after out",
    )
    others = [name for name in config.switches if name not in switches]
    require(
        not others,
        f"{head} has {', '.join(switches) or 'no switches'} on, which a run that begins with it keeps, and "
        f"{', '.join(others)} was asked for: leave --switch out",
    )
    require(
        config.init == "random",
        f"a run that begins with {head} starts as that head, and init {config.init} was asked for: leave --init out",
    )
    return (
        target,
        draft,
        {
            "head": str(head) if str(head) == checkpoint.DEFAULT else checkpoint.draft_name(folder),
            "sha256": checkpoint.weights_hash(folder),
            "step": earlier.get("step"),
            "tokens": earlier.get("tokens"),
            "switches": switches,
        },
    )


def draft_config(target: Target, config: TrainConfig, trained_length: int) -> DraftConfig:
    """A head of the target's own shape: its heads, widths, norm and whole rope block."""
    assert config.draft_vocab_size is not None
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
        **dict.fromkeys(config.switches, True),
    )


def _setup(info: DraftInfo, draft: Draft) -> dict[str, Any]:
    ids = draft.vocab.target_ids_W.cpu().numpy().tobytes()
    return dataclasses.asdict(info) | {
        "capture_after": capture_name(draft.config.capture_after),
        "draft_vocabulary": hashlib.sha256(ids).hexdigest(),
    }


def _compare_setup(out: Path, setup: dict[str, Any]) -> None:
    """Resumed on another target or draft vocabulary, every row of the head would mean something else, and nothing
    would look wrong.
    """
    path = out / "setup.json"
    if not path.exists():
        return
    found = {"processes": 1} | disk.read_json(path)
    changed = disk.changes(found, setup)
    warm = found.get("warm_start") != setup.get("warm_start")
    hint = ". A run goes on only with the head it began from (--warm-start), and only while that is unchanged"
    require(
        not changed,
        f"{out} belongs to another run: {'; '.join(changed)}{hint if warm else ''}. Give another output folder",
    )


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(map(str, tensor.shape))
