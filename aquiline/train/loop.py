"""The training loop: optimiser, schedule, precision, logging, save and resume.

An update is one pack of documents: the target's features of it (computed, or read back), the draft's unroll, one step.
Which documents an update sees depends only on the seed and the update's number, so a resumed run continues as it was.
"""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.config import TrainConfig, UserError, require
from aquiline.data.dataset import Document, packs
from aquiline.data.features import Features, FeatureStore
from aquiline.files.disk import read_pickle
from aquiline.model.backend import fast_bf16
from aquiline.model.draft import Draft
from aquiline.model.target import Target
from aquiline.train.ttt import Pack, StepStats, unroll
from aquiline.train.walk import Walk


class Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` with its Newton-Schulz iteration in float32.

    PyTorch's runs in bf16; on a CPU without bf16 arithmetic that costs more than the rest of the update.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                rate = group["lr"] * 0.2 * math.sqrt(max(p.shape))  # adjust_lr_fn="match_rms_adamw"
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(_orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"]), alpha=-rate)


def _orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iteration towards the orthogonal factor (as in `torch.optim.Muon`), in the matrix's own dtype."""
    a, b, c = coefficients
    x = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if matrix.shape[0] > matrix.shape[1] else x


def make_optimizers(draft: Draft, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for matrices and AdamW for the rest (`lm_head`, norms), or AdamW for everything."""
    trained = {n: p for n, p in draft.named_parameters() if p.requires_grad}
    decay, betas = config.weight_decay, (0.9, 0.95)
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(trained.values(), lr=config.learning_rate, betas=betas, weight_decay=decay)]
    matrices = [p for n, p in trained.items() if p.ndim == 2 and not n.startswith(("lm_head", "embed_tokens"))]
    chosen = {id(p) for p in matrices}
    rest = [p for p in trained.values() if id(p) not in chosen]
    kind = torch.optim.Muon if fast_bf16(draft.norm.weight.device.type) else Float32Muon
    return [
        kind(
            matrices,
            lr=config.learning_rate,
            momentum=0.95,
            nesterov=True,
            weight_decay=decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=config.adamw_learning_rate, betas=betas, weight_decay=decay),
    ]


def schedule(step: int, total: int, config: TrainConfig) -> float:
    """Share of the learning rate at an update: linear warm-up, then a cosine down to `final_share`."""
    warmup = max(1, round(config.warmup_share * total))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def make_pack(documents: Sequence[Document], features: Features, draft: Draft, target: Target) -> Pack:
    """What the unroll needs of these documents."""
    ids = torch.cat([d.ids for d in documents]).long()
    starts = [0]
    for d in documents:
        starts.append(starts[-1] + len(d))
    with torch.no_grad():
        embeds = draft.embed(ids, target.embed)
    supervised = torch.cat([d.supervised for d in documents])
    return Pack(
        ids, supervised, starts, features.aux_TA, features.last_TD, features.argmax_T, features.logsumexp_T, embeds
    )


def configured_unroll(draft: Draft, pack: Pack, head_rows_WD: Tensor, config: TrainConfig) -> tuple[Tensor, StepStats]:
    """`unroll` as the settings say, under the draft's autocast."""
    with autocast(draft):
        return unroll(
            draft, pack, head_rows_WD, config.ttt_steps, config.ttt_decay,
            skip_outside=config.skip_outside, loss=config.loss, feature_loss=config.feature_loss,
            checkpoint_activations=config.checkpoint_activations,
        )  # fmt: skip


def autocast(draft: Draft) -> contextlib.AbstractContextManager[Any]:
    """bf16 where it is native. For the unroll alone: the target's features keep the precision it decodes in."""
    kind = draft.norm.weight.device.type
    return torch.autocast(kind, torch.bfloat16) if fast_bf16(kind) else contextlib.nullcontext()


@dataclass
class Evaluation:
    """Of held-out greedy documents: per-step accuracy over the full target vocabulary, and the walk."""

    loss: list[float]
    accuracy: list[float]
    tau: float | None
    n_alpha: list[float | None]


@torch.no_grad()
def evaluate(
    draft: Draft, target: Target, store: FeatureStore, config: TrainConfig, head_rows_WD: Tensor
) -> Evaluation:
    """Unroll the held-out documents without gradients and walk their replies."""
    walk = Walk()
    loss, rows, right, counted = ([0.0] * config.ttt_steps for _ in range(4))
    for i, document in enumerate(store.documents):
        pack = make_pack([document], store.get([i]), draft, target)
        _, stats = configured_unroll(draft, pack, head_rows_WD, config)
        assert stats.right_KT is not None
        assert stats.counted_KT is not None
        # Decoding starts once a reply's first token is there: rows that embed a prompt's token do not count.
        known = torch.zeros(len(document), dtype=torch.bool)
        known[:-1] = document.supervised[1:]
        for k, n in enumerate(stats.rows):
            loss[k] += stats.loss[k] * n
            rows[k] += n
            right[k] += int((stats.right_KT[k] & stats.counted_KT[k] & known).sum())
            counted[k] += int((stats.counted_KT[k] & known).sum())
        for first, end in document.replies:
            if first > 0:
                walk.add(stats.right_KT, stats.counted_KT, first, end)
    return Evaluation(
        [x / max(n, 1) for x, n in zip(loss, rows, strict=True)],
        [x / max(n, 1) for x, n in zip(right, counted, strict=True)],
        walk.tau,
        walk.n_alpha,
    )


@dataclass
class Progress:
    """Handed to `report` after every update, with the evaluation where there was one."""

    step: int
    total: int
    tokens: int  # token passes so far
    seconds: float  # of training, over all parts of the run
    loss: float
    accuracy: list[float]
    skipped: int = 0  # updates without a finite gradient, over the whole run
    evaluation: Evaluation | None = None


@dataclass
class Trainer:
    """One run. `folder` holds the state while it goes on; `save_head` writes the head's files."""

    config: TrainConfig
    target: Target
    draft: Draft
    store: FeatureStore
    held_out: FeatureStore
    folder: Path
    save_head: Callable[[Draft, dict[str, Any]], None]
    report: Callable[[Progress], None]
    record: dict[str, Any] = field(default_factory=dict)  # the fixed part of run.json

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the end, or until `stop()`; resumes from `folder`. True when the run is complete.

        The best head by the walk's tau is the one that is written at every evaluation.
        """
        config, store = self.config, self.store
        require(
            len(self.held_out.documents) > 0, "no held-out greedy documents: the walk needs rows with temperature 0"
        )
        epoch_packs = len(list(packs(store.documents, config.batch_tokens, config.seed, 0)))
        total = max(1, round(config.epochs * epoch_packs))
        optimizers = make_optimizers(self.draft, config)
        bases = [[g["lr"] for g in o.param_groups] for o in optimizers]
        head_rows_WD = self.target.head_weight[self.draft.vocab.target_ids_W].detach().clone()
        state = self._resume(optimizers)
        started, before = time.monotonic(), state["seconds"]
        for step, numbers in self._updates(state["step"], total):
            if stop():
                self._save(state, optimizers)
                return False
            documents = [store.documents[i] for i in numbers]
            pack = make_pack(documents, store.get(numbers), self.draft, self.target)
            share = schedule(step, total, config)
            for optimizer, rates in zip(optimizers, bases, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * share
                optimizer.zero_grad()
            loss, stats = configured_unroll(self.draft, pack, head_rows_WD, config)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.draft.parameters(), config.clip or math.inf)
            if not math.isfinite(float(norm)):
                names = ", ".join(d.name for d in documents)
                state["skipped"].append({"step": step, "documents": names})
            else:
                for optimizer in optimizers:
                    optimizer.step()
            state["step"] = step + 1
            state["tokens"] += len(pack.ids_T)
            state["seconds"] = before + time.monotonic() - started
            done = step + 1 == total
            progress = Progress(
                step + 1,
                total,
                state["tokens"],
                state["seconds"],
                float(loss.detach()),
                stats.accuracy,
                len(state["skipped"]),
            )
            if done or (step + 1) % config.eval_every == 0:
                progress.evaluation = self._evaluate(state, head_rows_WD, progress)
            if done or (step + 1) % config.save_every == 0:
                self._save(state, optimizers)
            self.report(progress)
        return True

    def _updates(self, first: int, total: int) -> Iterator[tuple[int, list[int]]]:
        """(number, documents) of every update from `first` on."""
        step, epoch = 0, 0
        while step < total:
            for numbers in packs(self.store.documents, self.config.batch_tokens, self.config.seed, epoch):
                if step >= total:
                    return
                if step >= first:
                    yield step, numbers
                step += 1
            epoch += 1

    def _evaluate(self, state: dict[str, Any], head_rows_WD: Tensor, progress: Progress) -> Evaluation:
        evaluation = evaluate(self.draft, self.target, self.held_out, self.config, head_rows_WD)
        state["history"].append(
            {
                "step": progress.step,
                "tokens": progress.tokens,
                "minutes": round(progress.seconds / 60, 2),
                "train_loss": progress.loss,
            }
            | dataclasses.asdict(evaluation)
        )
        tau = evaluation.tau or 0.0
        if tau >= state["best"]:
            state["best"] = tau
            self.save_head(self.draft, self._run_record(state))
        return evaluation

    def _run_record(self, state: dict[str, Any]) -> dict[str, Any]:
        parts = {k: state[k] for k in ("step", "tokens", "skipped", "history")}
        return (
            self.record
            | {"training": dataclasses.asdict(self.config), "minutes": round(state["seconds"] / 60, 1)}
            | parts
        )

    def _save(self, state: dict[str, Any], optimizers: list[torch.optim.Optimizer]) -> None:
        """Write the whole state beside the old one, then rename: a kill at any moment leaves one of the two."""
        everything = {
            "state": state,
            "config": dataclasses.asdict(self.config),
            "documents": self.record.get("documents"),
            "draft": self.draft.state_dict(),
            "optimizers": [o.state_dict() for o in optimizers],
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / "state.pt.tmp"
            with open(temporary, "wb") as f:
                torch.save(everything, f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, self.folder / "state.pt")
        except (OSError, RuntimeError) as error:  # torch's own writer says RuntimeError when the disk is full
            raise UserError(f"{self.folder} cannot be written: {error}") from error

    def _resume(self, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
        path = self.folder / "state.pt"
        if not path.exists():
            return {"step": 0, "tokens": 0, "seconds": 0.0, "best": 0.0, "skipped": [], "history": []}
        try:
            saved = read_pickle(path, self.draft.norm.weight.device)
            parts = {"state", "config", "documents", "draft", "optimizers"}
            require(isinstance(saved, dict) and parts <= set(saved), f"{path} is no state of a training run")
        except UserError as error:
            raise UserError(f"{error}. Delete {self.folder} to begin the run again") from error
        now = dataclasses.asdict(self.config)
        changed = [f"{k}: {saved['config'].get(k)!r} -> {now[k]!r}" for k in now if saved["config"].get(k) != now[k]]
        if saved["documents"] != self.record.get("documents"):
            changed.append("the training data")
        require(
            not changed,
            f"{path} belongs to another run ({json.dumps(changed)}): give another output folder, or the same settings",
        )
        self.draft.load_state_dict(saved["draft"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        return saved["state"]
