"""What a run will take, found out by doing a little of it: nothing is written."""

import resource
import time
from dataclasses import dataclass

import torch

from aquiline.data.features import FeatureStore
from aquiline.train.loop import Trainer, evaluate

_UPDATES = 3  # the first, which also warms up, is not timed
_DOCUMENTS = 4  # held-out ones


@dataclass(frozen=True)
class Estimate:
    """Of the whole run, from its first update to its last; real decoding on the way is not in it.

    Features that are on disk already are not considered: the first epoch is taken to compute all of them.
    """

    updates: int
    tokens: int  # token passes
    update_seconds: float  # mean of an update, features computed
    features_share: float  # of that time: the target's pass
    evaluation_seconds: float  # of one evaluation
    seconds: float
    memory: int  # the most bytes that this process held
    gpu_memory: int  # the same of a GPU


def estimate(trainer: Trainer, *, keeps_features: bool) -> Estimate:
    """Run the trainer's largest updates, so that the memory is the most it takes; the learning rate is 0.

    `keeps_features`: only the first epoch computes them.
    """
    config, documents = trainer.config, trainer.store.documents
    lengths = [len(d) for d in documents]
    by_size = sorted(trainer.epoch(0), key=lambda group: -sum(lengths[i] for pack in group for i in pack))
    update_seconds = feature_seconds = 0.0
    timed_tokens = 0
    for number in range(_UPDATES):
        group = by_size[number % len(by_size)]
        started = time.perf_counter()
        for pack in group:
            trainer.store.get(pack)
        between = time.perf_counter()
        trainer.update(group, 0.0)  # which computes the features once more
        _wait(trainer)
        if number:
            feature_seconds += between - started
            update_seconds += time.perf_counter() - between
            timed_tokens += sum(lengths[i] for pack in group for i in pack)
    some = trainer.held_out.documents[:_DOCUMENTS]
    started = time.perf_counter()
    evaluate(trainer.draft, trainer.target, FeatureStore(None, trainer.target, some, ""), config, trainer.head_rows_WD)
    whole = sum(map(len, trainer.held_out.documents)) / sum(map(len, some))
    evaluation = (time.perf_counter() - started) * whole
    tokens = round(sum(lengths) * config.epochs)
    seconds = update_seconds / timed_tokens * tokens
    if keeps_features and config.epochs > 1:
        seconds -= feature_seconds / timed_tokens * (tokens - sum(lengths))
    seconds += evaluation * (-(-trainer.total // config.eval_every) + trainer.begun)
    return Estimate(
        trainer.total,
        tokens,
        update_seconds / timed_tokens * tokens / trainer.total,
        feature_seconds / update_seconds,
        evaluation,
        seconds,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        torch.cuda.max_memory_reserved(trainer.target.device) if trainer.target.device.type == "cuda" else 0,
    )


def _wait(trainer: Trainer) -> None:
    """A GPU works on behind what was asked of it."""
    if trainer.target.device.type == "cuda":
        torch.cuda.synchronize(trainer.target.device)
