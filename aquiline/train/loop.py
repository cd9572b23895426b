"""The training loop: updates, precision, evaluation.

An update is one pack of documents, or several whose gradients are added: the target's features of it (computed, or read
back), the draft's unroll, one step. Which documents an update sees depends only on the seed and the update's number,
so a resumed run continues as it was.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.config import TrainConfig, require
from aquiline.data.dataset import Document, packs
from aquiline.data.features import Features, FeatureStore
from aquiline.measure.quiet import GiveWay
from aquiline.model.backend import fast_bf16
from aquiline.model.draft import Draft
from aquiline.model.target import Target
from aquiline.train.decoding import decode_some
from aquiline.train.optim import make_optimizers, schedule
from aquiline.train.parallel import ALONE, Processes
from aquiline.train.shard import passes_together, whole
from aquiline.train.state import RunState, load_state, save_state
from aquiline.train.ttt import Pack, StepStats, rows_in_loss, unroll
from aquiline.train.walk import Walk


def make_pack(documents: Sequence[Document], features: Features, draft: Draft, target: Target) -> Pack:
    """What the unroll needs of these documents, on the device of the two models."""
    ids, device = torch.cat([d.ids for d in documents]).long(), target.device
    starts = [0]
    for d in documents:
        starts.append(starts[-1] + len(d))
    with torch.no_grad():
        embeds = draft.embed(ids.to(device), target.embed)
    outside = draft.vocab.draft_ids_V[features.argmax_T.clamp(min=0).to(device)] < 0
    return Pack(
        ids_T=ids,
        supervised_T=torch.cat([d.supervised for d in documents]),
        starts=starts,
        aux_TA=features.aux_TA.to(device),
        last_TD=features.last_TD.to(device),
        argmax_T=features.argmax_T,
        outside_T=outside.cpu(),
        logsumexp_T=features.logsumexp_T.to(device),
        embeds_TH=embeds,
        head_form=target.head_form.of(draft.vocab.target_ids_W),
    )


def configured_unroll(
    draft: Draft, pack: Pack, head_rows_WD: Tensor, config: TrainConfig, update_rows: Sequence[int] | None = None
) -> tuple[Tensor, StepStats]:
    """`unroll` as the settings say, under the draft's autocast."""
    with autocast(draft):
        return unroll(
            draft, pack, head_rows_WD, config.ttt_steps, config.ttt_decay,
            skip_outside=config.skip_outside, loss=config.loss, feature_loss=config.feature_loss,
            checkpoint_activations=config.checkpoint_activations, update_rows=update_rows,
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
    decoded: dict[str, float] | None = None  # tau of real decoding, per tree


@torch.no_grad()
def evaluate(
    draft: Draft, target: Target, store: FeatureStore, config: TrainConfig, head_rows_WD: Tensor
) -> Evaluation:
    """Unroll the held-out documents without gradients and walk their replies. A step's loss is the mean over its scored
    rows in all documents.
    """
    walk = Walk()
    loss, scored, right, counted = ([0.0] * config.ttt_steps for _ in range(4))
    for i, document in enumerate(store.documents):
        pack = make_pack([document], store.get([i]), draft, target)
        _, stats = configured_unroll(draft, pack, head_rows_WD, config)
        assert stats.right_KT is not None
        assert stats.counted_KT is not None
        # Decoding starts once a reply's first token is there: rows that embed a prompt's token do not count.
        known = torch.zeros(len(document), dtype=torch.bool)
        known[:-1] = document.supervised[1:]
        for k, n in enumerate(stats.scored):
            loss[k] += stats.loss[k] * n
            scored[k] += n
            right[k] += int((stats.right_KT[k] & stats.counted_KT[k] & known).sum())
            counted[k] += int((stats.counted_KT[k] & known).sum())
        for first, end in document.replies:
            if first > 0:
                walk.add(stats.right_KT, stats.counted_KT, first, end)
    return Evaluation(
        [x / max(n, 1) for x, n in zip(loss, scored, strict=True)],
        [x / max(n, 1) for x, n in zip(right, counted, strict=True)],
        walk.tau,
        walk.n_alpha,
    )


@dataclass
class Progress:
    """Handed to `report` after every update, with the evaluation where there was one.

    Step 0, before the first update, has an evaluation alone: no loss (NaN), no accuracy.
    """

    step: int
    total: int
    tokens: int  # token passes so far
    seconds: float  # of training, over all parts of the run
    loss: float
    accuracy: list[float]
    skipped: int = 0  # updates without a finite gradient, over the whole run
    evaluation: Evaluation | None = None
    ended_early: bool = False  # there was no better accepted length for `patience` evaluations


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
    pause_file: Path | None = None  # while a timed measurement holds it, no update begins
    processes: Processes = ALONE
    begun: bool = False  # the draft is a trained head: it is measured before the first update, and to be surpassed

    def __post_init__(self) -> None:
        require(
            len(self.held_out.documents) > 0, "no held-out greedy documents: the walk needs rows with temperature 0"
        )
        self.optimizers = make_optimizers(self.draft, self.config)
        self._rates = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        with whole(self.target):
            self.head_rows_WD = self.target.head_weight[self.draft.vocab.target_ids_W].detach().clone()
        self.total = max(1, round(self.config.epochs * len(list(self.epoch(0)))))  # updates

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the end, or until `stop()`; resumes from `folder`. True when the run is complete.

        At every evaluation the head is written if its tau by the walk is the best so far, which for a head that was
        `begun` before means: not below its tau at the start.
        """
        config = self.config
        state = load_state(self.folder, config, self.record.get("documents"), self.draft, self.optimizers)
        self.processes.make_alike(self.draft.parameters())
        give_way = GiveWay(self.pause_file)
        try:
            return state.ended_early or self._run(state, give_way, stop)
        finally:
            give_way.close()

    def _run(self, state: RunState, give_way: GiveWay, stop: Callable[[], bool]) -> bool:
        config, last = self.config, time.monotonic()
        if self.begun and state.step == 0 and not state.history:
            if self.processes.first:
                last += give_way(stop)
            progress = Progress(0, self.total, 0, 0.0, math.nan, [])
            progress.evaluation = self._evaluate(state, progress)
            self.report(progress)
        for step, group in self._updates(state.step):
            if self.processes.first:
                last += give_way(stop)
            if self.processes.any(stop()):
                self._save(state)
                return False
            loss, accuracy, finite = self.update(group, schedule(step, self.total, config))
            if not finite:
                names = ", ".join(self.store.documents[i].name for numbers in group for i in numbers)
                state.skipped.append({"step": step, "documents": names})
            state.step = step + 1
            state.tokens += sum(len(self.store.documents[i]) for numbers in group for i in numbers)
            now = time.monotonic()
            state.seconds, last = state.seconds + now - last, now
            progress = Progress(state.step, self.total, state.tokens, state.seconds, loss, accuracy, len(state.skipped))
            done = state.step == self.total
            if done or state.step % config.eval_every == 0:
                progress.evaluation = self._evaluate(state, progress)
            progress.ended_early = state.ended_early
            done |= state.ended_early
            self.report(progress)  # before it is saved: a row of the log too many is dropped when the run goes on
            if done or state.step % config.save_every == 0:
                self._save(state)
            if done:
                break
        return True

    def epoch(self, number: int) -> Iterator[list[list[int]]]:
        """The updates of an epoch: each some packs, each pack some documents, by number."""
        group: list[list[int]] = []
        for pack in packs(self.store.documents, self.config.batch_tokens, self.config.seed, number):
            group.append(pack)
            if len(group) == self.config.accumulate * self.processes.count:
                yield group
                group = []
        if group:
            yield group

    def _updates(self, first: int) -> Iterator[tuple[int, list[list[int]]]]:
        """(number, packs) of every update from `first` on."""
        step, epoch = 0, 0
        while step < self.total:
            for group in self.epoch(epoch):
                if step >= self.total:
                    return
                if step >= first:
                    yield step, group
                step += 1
            epoch += 1

    def update(self, group: Sequence[Sequence[int]], share: float) -> tuple[float, list[float], bool]:
        """One optimiser update over these packs, at a share of the learning rate.

        Returns the loss, the accuracy of every step, and whether the gradient was finite; else nothing is changed.
        """
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for parameters, rate in zip(optimizer.param_groups, rates, strict=True):
                parameters["lr"] = rate * share
            optimizer.zero_grad()
        loss, accuracy = self.backward(group)
        norm = nn.utils.clip_grad_norm_(self.draft.parameters(), self.config.clip or math.inf)
        finite = math.isfinite(float(norm))
        if finite:
            for optimizer in self.optimizers:
                optimizer.step()
        return loss, accuracy, finite

    def backward(self, group: Sequence[Sequence[int]]) -> tuple[float, list[float]]:
        """Add the gradient of an update's loss to the draft's; that loss and the accuracy of every step.

        However the documents are packed, it is the same: a step's mean is over its rows in all packs.
        """
        c, made = self.config, self._packs(self.processes.share(group))
        rows = None
        if len(group) > 1:
            counts = [rows_in_loss(p, c.ttt_steps, skip_outside=c.skip_outside) for p in made]
            here = [sum(of_step) for of_step in zip(*counts, strict=True)] or [0] * c.ttt_steps
            rows = [round(n) for n in self.processes.sum(here)]
        total, right, seen = 0.0, [0.0] * c.ttt_steps, [0.0] * c.ttt_steps
        for pack in made:
            loss, stats = configured_unroll(self.draft, pack, self.head_rows_WD, c, rows)
            loss.backward()
            total += float(loss.detach())
            for k, n in enumerate(stats.rows):
                right[k] += stats.accuracy[k] * n
                seen[k] += n
        self.processes.sum_gradients(self.draft.parameters())
        total, *sums = self.processes.sum([total, *right, *seen])
        return total, [r / max(n, 1) for r, n in zip(sums[: c.ttt_steps], sums[c.ttt_steps :], strict=True)]

    def _packs(self, share: Sequence[Sequence[int]]) -> list[Pack]:
        """This process's packs of an update."""
        documents, missing = self.store.documents, [self.store.missing(n) for n in share]
        with passes_together(self.target, sum(map(bool, missing)), self.processes):
            return [
                make_pack([documents[i] for i in n], self.store.get(n, m), self.draft, self.target)
                for n, m in zip(share, missing, strict=True)
            ]

    def _evaluate(self, state: RunState, progress: Progress) -> Evaluation | None:
        """Measure the held-out documents; keep the head when it is the best so far, count when it is not."""
        config, evaluation, first = self.config, None, self.processes.first
        passes = len(self.held_out.missing(range(len(self.held_out.documents)))) if first else 0  # one a document
        with passes_together(self.target, passes, self.processes):
            if first:
                evaluation = evaluate(self.draft, self.target, self.held_out, config, self.head_rows_WD)
        tau = self.processes.sum([0.0 if evaluation is None else evaluation.tau or 0.0])[0]
        better = tau >= state.best
        state.since_best = 0 if tau > state.best or state.step == 0 else state.since_best + 1
        state.ended_early = bool(config.patience) and state.since_best >= config.patience
        if better:
            state.best, state.best_step = tau, state.step
        if evaluation is None:
            return None
        done = state.ended_early or state.step == self.total
        if config.decode_every and (done or (len(state.history) + 1) % config.decode_every == 0):
            evaluation.decoded = decode_some(self.target, self.draft, self.held_out.documents, config.ttt_steps)
        state.history.append(
            {
                "step": progress.step,
                "tokens": progress.tokens,
                "minutes": round(progress.seconds / 60, 2),
                "train_loss": progress.loss if math.isfinite(progress.loss) else None,  # JSON has no NaN
            }
            | dataclasses.asdict(evaluation)
        )
        if better:
            self.save_head(self.draft, self._run_record(state))
        return evaluation

    def _run_record(self, state: RunState) -> dict[str, Any]:
        return self.record | {
            "training": dataclasses.asdict(self.config),
            "minutes": round(state.seconds / 60, 1),
            "best": {"tau": state.best, "step": state.best_step},
            **{name: getattr(state, name) for name in ("step", "tokens", "skipped", "history")},
        }

    def _save(self, state: RunState) -> None:
        if self.processes.first:
            save_state(self.folder, state, self.config, self.record.get("documents"), self.draft, self.optimizers)
        self.processes.wait()
