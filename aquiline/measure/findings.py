"""What the judgements of a head say: figures to causes, each with its evidence."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aquiline.config import DraftConfig
from aquiline.measure.judge import ENOUGH, STEPS, Gain, Judged, best_other_map, block_means, judge
from aquiline.measure.replies import Answers
from aquiline.measure.symptoms import Cause, even
from aquiline.measure.trials import Trial
from aquiline.model.draft import Draft
from aquiline.model.target import Target

_ROWS = 128  # rows of full-vocabulary logits at a time
_CLEAR = 0.1  # a gain in accepted tokens, of two drafted, that no accident explains
# Shares of first drafted tokens that are right:
_OF_USE = 0.3  # in a head without a fault, however little it was trained
_MUCH = 0.2  # a gain that no other fault leaves room for
_POOR = 0.3  # below which a head is of little use
_NOT_TRAINED = "the file does not hold what was trained: export the head again"
_OTHER_TARGET = "give the target that the head was trained for, in the same quantisation, or train a head for this one"
_SHADOW = 1 / 3  # of the best trial's gain: what gains less is an effect of the same fault


def idle_parts(parts: Mapping[str, Gain]) -> set[str]:
    """Those without which the head does no worse. In a healthy head every part helps; in a hopeless one none can."""
    return {part for part, gain in parts.items() if gain.no_loss}


def from_trials(tried: Sequence[tuple[Trial, Gain]], *, broken: bool, right: float) -> Iterator[Cause]:
    """What is better otherwise; only the best is certain. In a head that is `broken`, or that is likelier in several
    unrelated ways, a small gain may come from anything; and of one that is no use afterwards either, something else is
    wrong. `right`: the share of first drafted tokens that are, as the head is.
    """
    likely = [(trial, gain) for trial, gain in tried if gain.likely]
    if not likely:
        return
    first, most = max(likely, key=lambda pair: pair[1].accepted)
    likelier = {trial.id for trial, gain in tried if gain.nats_z >= 3 and gain.nats > 0.02}
    needed = _CLEAR if broken or len(likelier) > 2 else 0.0
    for trial, gain in likely:
        if gain.accepted >= _SHADOW * most.accepted:
            evidence = (
                f"{trial.words}, {gain.accepted:.2f} more of two drafted tokens are accepted "
                f"(z {gain.accepted_z:.1f}), and what the target wrote is {gain.nats:.2f} nats likelier "
                f"(z {gain.nats_z:.1f})"
            )
            certain = gain.certain and gain.accepted >= needed and trial.id == first.id
            certain = certain and (right + gain.first_right >= _OF_USE or gain.first_right >= _MUCH)
            yield Cause(trial.id, certain, evidence, trial.advice, gain.accepted)


def from_map(base: Judged, answers: Answers, rows_T: Tensor, draft: Draft, causes: list[Cause]) -> Iterator[Cause]:
    """Another map of the ids, where it explains more than the target's head does, which fits any map: that is then no
    cause of its own. A learnt map fits a random `lm_head` too, but that one is not sure of what it proposes.
    """
    other = best_other_map(base, answers.documents, rows_T, draft.vocab.target_ids_W)
    if other is None:
        return
    by_head = max((c.weight for c in causes if c.id == "lm_head" and c.weight < 1), default=0.0)
    gain = other.right - other.given
    if gain < _CLEAR or other.right < 2 * other.given or other.right < by_head:
        return
    evidence = (
        f"with {other.words}, {other.right:.0%} of the first drafted tokens would be right instead of {other.given:.0%}"
    )
    if other.learnt and base.sure < 0.6 * other.right:
        evidence = f"{evidence}, yet it gives them a probability of {base.sure:.0%} on average"
        advice = "lm_head.weight is not what was trained: export the head again"
        yield Cause("lm_head", other.certain, evidence, advice, gain)
        return
    causes[:] = [c for c in causes if c.id != "lm_head" or c.certain > other.certain]
    advice = "d2t names the wrong tokens: write the map that the head was trained with, target id minus draft id"
    yield Cause("d2t", other.certain, evidence, advice, gain)


def from_parts(
    draft: Draft,
    random: Mapping[str, Sequence[str]],
    parts: Mapping[str, Gain],
    causes: Sequence[Cause],
    *,
    hopeless: bool,
    right_target: bool | None,
) -> Iterator[Cause]:
    """Parts without which the head does no worse, and matrices that look random. `right_target`: the target is the one
    that the head was trained for, as far as it tells.
    """
    explained = any(c.certain for c in causes)
    if right_target is False and hopeless and not explained:
        evidence = "next to nothing that it drafts is accepted"
        yield Cause("target_mismatch", True, evidence, _OTHER_TARGET, 0.5)
    strange, matrices = sum(map(len, random.values())), sum(weight.ndim == 2 for weight in draft.parameters())
    if strange > matrices / 2:  # small or hardly trained ones do: it tells nothing of a part
        norms = [weight for weight in draft.parameters() if weight.ndim == 1]
        untouched = all(bool(((weight == 0) | (weight == 1)).all()) for weight in norms)  # biases start as zeros
        if strange >= matrices - 1 and hopeless and untouched:  # lm_head starts as the target's
            evidence = f"{strange} of its {matrices} matrices are as fresh random numbers, and all its norms are ones"
            yield Cause("untrained", True, evidence, "train the head: this is what one starts as", 0.1)
        random = {}
    even_too = {part: [n for n in names if even(draft.get_parameter(n))] for part, names in random.items()}
    random = {part: names for part, names in even_too.items() if names}
    idle = idle_parts(parts)
    worthless = {part for part in idle if hopeless or parts[part].worthless}
    for part, names in random.items():
        evidence = f"{', '.join(names)} cannot be told from random numbers"
        sure = part in worthless and not explained
        yield Cause(part, sure, evidence, _NOT_TRAINED, 0.6 if part in idle else 0.25)
    some = idle if len(idle) < len(parts) else set()
    for part in sorted(some - {"fc"}):
        evidence = f"without its {part} the head does no worse ({parts[part].nats:+.2f} nats a token)"
        yield Cause(part, parts[part].certain and not explained, evidence, _NOT_TRAINED, 0.5)
    if right_target is None and hopeless and not explained:
        evidence = "next to nothing that it drafts is accepted, and it does not say which target it was trained on"
        yield Cause("target_mismatch", False, evidence, _OTHER_TARGET, 0.55)
    if "fc" not in idle or explained or "fc" in random:
        return
    evidence = f"without the target's states the head does no worse ({parts['fc'].nats:+.2f} nats a token)"
    if right_target:
        evidence += ", though this is the target that it was trained on"
        yield Cause("fc", False, evidence, _NOT_TRAINED, 0.7)
    else:
        evidence += ": these are not the states that it was trained on"
        # It may say itself that they are another target's: a fine-tuned one's are often still worth something.
        yield Cause("target_mismatch", right_target is False and "fc" in worthless, evidence, _OTHER_TARGET, 0.7)


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
    sure = covered < 0.6 and of_misses > 0.5 and figures["rows"] >= ENOUGH
    yield Cause("coverage", sure, evidence, advice, 1 - covered)


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
    here, there = (
        block_means(judged.right_KT[0], judged.valid_KT[0], documents)
        for judged, documents in ((base, answers.documents), (other, with_system.documents))
    )
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


def from_templates(tried: Sequence[tuple[Trial, Gain]]) -> Iterator[Cause]:
    """The best of other templates, where it is beyond doubt; what the head was trained with may be yet another."""
    if not tried:
        return
    trial, gain = max(tried, key=lambda pair: pair[1].accepted)
    if gain.certain:
        evidence = (
            f"{trial.words}, {gain.accepted:.2f} more of two drafted tokens are accepted (z {gain.accepted_z:.1f}), "
            f"though the target wrote them behind its own"
        )
        yield Cause(trial.id, False, evidence, trial.advice, gain.accepted)


def undertrained(first_right: float, tried: Sequence[tuple[Trial, Gain]]) -> Iterator[Cause]:
    """A head of little use, and of little in every trial."""
    most = first_right + max([0.0, *(gain.first_right for _, gain in tried)])
    if most < _POOR:
        evidence = f"{first_right:.0%} of the first drafted tokens are right, and in no trial more than {most:.0%}"
        advice = "train it longer, on more answers of this very target to prompts like those it will be asked"
        yield Cause("undertrained", False, evidence, advice, 0.02)
