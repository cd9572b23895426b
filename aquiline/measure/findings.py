"""What the judgements of a head say: figures to causes, each with its evidence."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from aquiline.config import DraftConfig
from aquiline.measure.judge import STEPS, Gain, Judged, best_other_map, judge
from aquiline.measure.replies import Answers
from aquiline.measure.symptoms import Cause
from aquiline.measure.trials import Trial
from aquiline.model.draft import Draft
from aquiline.model.target import Target

_ROWS = 128  # rows of full-vocabulary logits at a time
_SHADOW = 1 / 3  # of the best trial's gain: what gains less is an effect of the same fault


def from_trials(tried: Sequence[tuple[Trial, Gain]]) -> Iterator[Cause]:
    best = max((gain.accepted for _, gain in tried if gain.likely), default=0.0)
    for trial, gain in tried:
        if gain.likely and gain.accepted >= _SHADOW * best:
            evidence = (
                f"{trial.words}, {gain.accepted:.2f} more of two drafted tokens are accepted "
                f"(z {gain.accepted_z:.1f}), and what the target wrote is {gain.nats:.2f} nats likelier "
                f"(z {gain.nats_z:.1f})"
            )
            yield Cause(trial.id, gain.certain, evidence, trial.advice, gain.accepted)


def from_map(base: Judged, answers: Answers, draft: Draft, causes: list[Cause]) -> Iterator[Cause]:
    """Another map of the ids, where it explains more than the target's head does, which fits any map: that is then no
    cause of its own.
    """
    ids_T = torch.cat([d.ids for d in answers.documents]).long()
    other = best_other_map(base, ids_T, draft.vocab.target_ids_W)
    by_head = max((c.weight for c in causes if c.id == "lm_head" and c.weight < 1), default=0.0)
    gain = other.right - other.given
    if gain < 0.1 or other.right < 2 * other.given or other.right < by_head:
        return
    causes[:] = [c for c in causes if c.id != "lm_head"]
    evidence = (
        f"with {other.words}, {other.right:.0%} of the first drafted tokens would be right instead of {other.given:.0%}"
    )
    advice = (
        "d2t names the wrong tokens: write the map that the head was trained with, as offsets (target id - draft id)"
    )
    yield Cause("d2t", True, evidence, advice, gain)


def from_parts(
    draft: Draft,
    random: Mapping[str, Sequence[str]],
    parts: Mapping[str, Gain],
    figures: Mapping[str, Any],
    causes: Sequence[Cause],
) -> Iterator[Cause]:
    """Parts without which the head does no worse, and matrices that look random."""
    explained = any(c.certain for c in causes)
    idle = {part for part, gain in parts.items() if gain.nats_z > -2 and gain.accepted_z > -2}
    strange = sum(map(len, random.values()))
    matrices = [name for name, weight in draft.named_parameters() if weight.ndim == 2]
    if strange > 1 and strange >= len(matrices) - 1:  # lm_head starts as the target's
        sure = figures["first_right"] < 0.05
        evidence = f"{strange} of its {len(matrices)} matrices cannot be told from fresh random numbers"
        yield Cause("untrained", sure, evidence, "train the head; this is what one starts as", 0.9)
        return
    for part, names in random.items():
        evidence = f"{', '.join(names)} cannot be told from random numbers"
        if part in idle:
            evidence += f"; without its {part} the head does no worse ({parts[part].nats:+.2f} nats a token)"
        advice = "the file does not hold what was trained: export the head again"
        yield Cause(part, part in idle and not explained, evidence, advice, 0.6 if part in idle else 0.25)
    for part, gain in parts.items():
        if gain.certain and not explained:
            evidence = f"without its {part}, {gain.accepted:.2f} more of two drafted tokens are accepted"
            yield Cause(part, True, evidence, "what is there does harm: export the head again", gain.accepted)
    if "fc" in idle and not explained and "fc" not in random:
        evidence = (
            f"without the target's states the head does no worse ({parts['fc'].nats:+.2f} nats a token): "
            "these are not the states that it was trained on"
        )
        advice = "give the target that the head was trained for, in the same quantisation, or train a head for this one"
        yield Cause("target_mismatch", False, evidence, advice, 0.5)


def from_coverage(figures: Mapping[str, Any]) -> Iterator[Cause]:
    covered, of_misses = figures["coverage"], figures["misses_outside_vocabulary"]
    if covered >= 0.85 and of_misses < 0.25:
        return
    worst = min(figures["by_source"], key=lambda s: figures["by_source"][s]["coverage"])
    evidence = (
        f"the head can propose {covered:.0%} of what the target writes here (least of {worst}: "
        f"{figures['by_source'][worst]['coverage']:.0%}); {of_misses:.0%} of the first drafted tokens that are wrong "
        "could not have been right"
    )
    advice = (
        "train a head on answers like these, with a larger --draft-vocab-size if need be (`aquiline data show` says "
        "what each size covers)"
    )
    yield Cause("coverage", covered < 0.6 and of_misses > 0.5, evidence, advice, 1 - covered)


def from_positions(base: Judged, answers: Answers, config: DraftConfig) -> Iterator[Cause]:
    if config.trained_length is None:
        return
    cycles = base.cycles(answers.documents)
    within = [n for at, n in cycles if at <= config.trained_length]
    beyond = [n for at, n in cycles if at > config.trained_length]
    if len(within) < 32 or len(beyond) < 32:
        return
    near, far = sum(within) / len(within), sum(beyond) / len(beyond)
    if far - 1 < 0.7 * (near - 1):
        evidence = f"tau is {near:.2f} up to the {config.trained_length} tokens it was trained to, and {far:.2f} beyond"
        yield Cause("trained_length", False, evidence, "train it on longer rows (--max-length)", near - far)


@torch.no_grad()
def from_prompts(target: Target, answers: Answers) -> Iterator[Cause]:
    """Does the target read the prompts as its own language?"""
    surprise = torch.zeros(())
    tokens, start = 0, 0
    for d in answers.documents:
        prompt = int(d.replies[0][0]) if d.replies else len(d)
        for a in range(start, start + prompt - 1, _ROWS):
            b = min(a + _ROWS, start + prompt - 1)
            follows = d.ids[a - start + 1 : b - start + 1].long()
            logits = target.logits(answers.last_TD[a:b].to(target.device)).cpu()
            surprise += (logits.logsumexp(-1) - logits.gather(1, follows[:, None])[:, 0]).sum()
            tokens += b - a
        start += len(d)
    chance = float(torch.tensor(float(target.config.vocab_size)).log())
    if tokens and float(surprise) / tokens > chance:
        evidence = (
            f"the prompts surprise the target more than random tokens would: {float(surprise) / tokens:.1f} nats a "
            f"token, and chance is {chance:.1f}"
        )
        advice = "check that tokenizer and weights of the target belong together: does `--draft none` write sense?"
        yield Cause("tokenizer", False, evidence, advice, 0.05)


def from_system(
    draft: Draft, target: Target, base: Judged, answers: Answers, with_system: Answers, figures: dict[str, Any]
) -> Iterator[Cause]:
    features = with_system.features(draft.config.capture_after)
    other = judge(draft, target, with_system.documents, features, STEPS)
    figures["tau_with_system"] = other.walk(with_system.documents).tau
    here, there = base.right_KT[0][base.valid_KT[0]].float(), other.right_KT[0][other.valid_KT[0]].float()
    if len(here) < 2 or len(there) < 2:
        return
    gain = float(there.mean() - here.mean())
    spread = float(here.var() / len(here) + there.var() / len(there)) ** 0.5
    if gain > 0.03 and gain > 3 * spread:
        evidence = (
            f"with the system message of its training, {there.mean():.0%} of the first drafted tokens are right, "
            f"without it {here.mean():.0%}"
        )
        advice = "decode with that system message (--system), or train on answers that were given without it"
        yield Cause("system_prompt", False, evidence, advice, gain)


def undertrained(figures: Mapping[str, Any]) -> Cause:
    evidence = (
        f"{figures['first_right']:.0%} of the first drafted tokens are right, and nothing that was made otherwise helps"
    )
    advice = "train it longer, on more answers of this very target to prompts like those it will be asked"
    return Cause("undertrained", False, evidence, advice, 0.02)
