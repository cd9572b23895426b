"""Why so few tokens are accepted: a head examined on replies that its target writes, most likely causes first.

The target answers some prompts greedily; the head is judged on these replies as it is, and with one thing at a time
made otherwise (measure/trials.py). Healthy heads are best as they are.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.config import TOP, DoctorConfig, DraftConfig, Limits, UserError, require
from aquiline.data.chat import Chat, Message
from aquiline.data.dataset import Document
from aquiline.decode.engine import Engine, Request
from aquiline.files import checkpoint, disk
from aquiline.files.checkpoint import DraftInfo
from aquiline.measure.symptoms import Cause, Fact, facts, from_facts, from_weights, random_looking, refusal
from aquiline.measure.tasks import Prompt
from aquiline.measure.trials import (
    STEPS,
    Answers,
    Gain,
    Judged,
    Trial,
    best_other_map,
    judge,
    layers_needed,
    trials,
    without,
)
from aquiline.model.draft import Draft
from aquiline.model.target import Target

_BATCH = 8  # prompts that are answered at a time
_ROWS = 128  # rows of full-vocabulary logits at a time
_SHADOW = 1 / 3  # of the best trial's gain: what gains less is an effect of the same fault
_POOR = 0.3  # share of first drafted tokens that are right, below which a head is of little use
_EDGES = (128, 256, 512, 1024, 2048, 4096, 8192)  # of positions

_PASSAGE = (
    "The lighthouse stood at the end of a long spit of sand, where two currents met. For ninety years a keeper had lit "
    "the lamp at dusk, trimmed the wick at midnight and put it out at dawn, writing the weather of each day into a "
    "ledger. When the lamp was made electric, the keeper stayed on, for somebody had to clean the lenses and paint the "
    "iron stairs against the salt. The fishermen of the village said that they steered by the keeper's window more than "
    "by the lamp, because it showed that someone was awake. In the spring of the last year a storm took away the path. "
    "For three weeks nobody could reach the tower, and every evening the village counted the seconds between flashes. "
    "When the sea calmed, a boat brought bread, letters and a young engineer with a box, which could light the lamp "
    "without anyone. The keeper showed her the ledger, and how the glass sang before a storm. She stayed a week."
)
PROMPTS = {  # what is asked where the user gives no prompts, by kind
    "questions": (
        "Why is the sky blue?",
        "What is the capital of Italy, and what is it known for?",
        "Explain how a bicycle stays upright.",
        "List five tips for better sleep.",
    ),
    "writing": ("Write a short story about a fox and a river.", "Write an e-mail that asks a colleague for help."),
    "code": (
        "Write a Python function that adds two numbers.",
        "Write a Python function that counts the words of a text, with a docstring.",
    ),
    "mathematics": (
        "A pen costs 3 dollars and a book 12. How much are two pens and a book?",
        "Tom has 24 apples. He gives a third of them to Ann and eats two. How many are left?",
    ),
    "summaries": (f"Summarize this text in three sentences.\n\n{_PASSAGE}",),
}


@dataclass
class Pair:
    """What was loaded, or why it was not. The target is packed and captures what the trials read."""

    target: Target
    draft: Draft | None
    chat: Chat
    causes: list[Cause]  # that show before the head runs
    facts: list[Fact] = field(default_factory=list)
    random: dict[str, list[str]] = field(default_factory=dict)  # matrices that look random, by part
    head_rows_WD: Tensor | None = None  # of the target, for the draft's tokens, where both are equally wide
    systems: list[str] = field(default_factory=list)  # messages that the head was trained with, as far as it tells


def open_pair(target: str | Path, folder: Path, chat: Chat, dtype: torch.dtype, device: torch.device) -> Pair:
    """Load a target and the head in a folder. A head that is refused is a cause; a target that is, a UserError."""
    target_config = checkpoint.read_target_config(target)
    try:
        model, draft = checkpoint.load_pair(
            target, folder, dtype, device, tokenizer=chat.fingerprint(), template=chat.template_fingerprint()
        )
    except UserError as error:
        model = checkpoint.load_target(target, dtype, device, (target_config.num_layers - 1,))  # else it is the target
        return Pair(model, None, chat, [refusal(error)])
    pair = look_at(model, draft, folder, chat)
    pack_for_trials(model, layers_needed(draft.config.capture_after, target_config.num_layers))
    return pair


def look_at(target: Target, draft: Draft, folder: Path, chat: Chat) -> Pair:
    """All that shows before the head runs. The target is not packed."""
    info = checkpoint.draft_info(disk.read_json(folder / "config.json"))
    found = facts(draft, target, info, chat)
    causes = [*from_facts(found, draft, target.config, info), *from_weights(draft)]
    rows = None
    if draft.config.hidden_size == target.config.hidden_size:
        rows = target.head_weight[draft.vocab.target_ids_W].detach().clone()
    random = random_looking(draft)
    # In float32, whatever decoding takes: what was made otherwise is to show, not rounding; on CPUs it is faster here.
    return Pair(target, draft.float(), chat, causes, found, random, rows, _systems(folder))


def pack_for_trials(target: Target, layers: tuple[int, ...]) -> None:
    """The kernel is told what to capture when it is packed, so this is the time to ask for more than the head reads."""
    target.capture_after = layers
    target.pack()


def _systems(folder: Path) -> list[str]:
    """The system messages of a head's training, as its run.json has them, the most frequent first."""
    path = folder / "run.json"
    data = disk.read_json(path).get("data") if path.is_file() else None
    systems = data.get("systems") if isinstance(data, dict) else None
    return [s for s in systems if isinstance(s, str)] if isinstance(systems, list) else []


# ---------------------------------------------------------------- the target's answers


def own_prompts() -> dict[str, list[Prompt]]:
    return {
        kind: [Prompt(f"{kind} {i}", [{"role": "user", "content": text}]) for i, text in enumerate(texts, 1)]
        for kind, texts in PROMPTS.items()
    }


@torch.no_grad()
def answer(
    target: Target,
    chat: Chat,
    prompts: Mapping[str, Sequence[Prompt]],
    max_new_tokens: int,
    system: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Answers:
    """Let the target answer greedily, and keep the states that it captures. `system`: for prompts that have none."""
    stop_ids = chat.end_of_turn_ids | frozenset(target.config.eos_token_ids)
    limits = Limits(max_new_tokens, stop_ids)
    asked: list[tuple[str, str, Request]] = []
    for source, some in prompts.items():
        for prompt in some:
            ids = chat.render(_with_system(prompt.messages, system), **dict(template_kwargs or {}))
            asked.append((source, prompt.id, Request(ids, limits=limits)))
    context = max(len(request.prompt_ids) for *_, request in asked) + max_new_tokens
    Engine(target, None, min(_BATCH, len(asked)), context).run([request for *_, request in asked])
    documents, states, last = [], [], []
    for source, name, request in asked:
        ids = torch.tensor([*request.prompt_ids, *request.output_ids]).int()
        documents.append(Document(ids, torch.arange(len(ids)) >= len(request.prompt_ids), True, source, name))
        out = target(ids[None].long().to(target.device), torch.arange(len(ids), device=target.device)[None])
        states.append(out.aux_BNA[0].cpu().unflatten(-1, (len(target.capture_after), -1)))
        last.append(out.last_BND[0].cpu())
    return Answers(documents, target.capture_after, torch.cat(states), torch.cat(last))


def _with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    if system is None or any(m["role"] in ("system", "developer") for m in messages):
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


# ---------------------------------------------------------------- the examination


@dataclass(frozen=True)
class Examination:
    causes: list[Cause]  # the certain ones first, then by weight
    figures: dict[str, Any]
    tried: list[tuple[Trial, Gain]]


def examine(pair: Pair, answers: Answers, with_system: Answers | None = None) -> Examination:
    """Judge the head on these answers. `with_system`: the same prompts with the system message of its training."""
    draft, target = pair.draft, pair.target
    assert draft is not None
    config = draft.config
    base = judge(draft, target, answers.documents, answers.features(config.capture_after), STEPS)
    figures = _figures(base, answers, draft)
    tried: list[tuple[Trial, Gain]] = []
    for trial in trials(draft, target, pair.head_rows_WD):
        tried.append((trial, Gain.of(base, trial.judge(draft, target, answers), answers.documents)))
    causes = [*pair.causes, *_from_trials(tried)]
    causes += _from_map(base, answers, draft, causes)
    parts = {}
    for part in ("attention", "mlp", *(() if config.top else ("fc",))):
        trial = without(draft, part)
        parts[part] = Gain.of(base, trial.judge(draft, target, answers), answers.documents)
        tried.append((trial, parts[part]))
    causes += _from_parts(pair, parts, figures, causes)
    causes += [*_from_coverage(figures), *_from_positions(base, answers, config), *_from_prompts(target, answers)]
    if with_system is not None:
        causes += _from_system(draft, target, base, answers, with_system, figures)
    if not any(c.certain for c in causes) and figures["first_right"] < _POOR:
        causes.append(_undertrained(figures))
    return Examination(ranked(causes), figures, tried)


def ranked(causes: Sequence[Cause]) -> list[Cause]:
    """One of each id, with all its evidence; the certain ones first."""
    merged: dict[str, Cause] = {}
    for cause in sorted(causes, key=lambda c: (not c.certain, -c.weight)):
        first = merged.setdefault(cause.id, cause)
        if first is not cause:
            merged[cause.id] = dataclasses.replace(first, evidence=f"{first.evidence}; {cause.evidence}")
    return list(merged.values())


def _figures(base: Judged, answers: Answers, draft: Draft) -> dict[str, Any]:
    walk = base.walk(answers.documents)
    first = base.valid_KT[0]
    covered = draft.vocab.draft_ids_V.cpu() >= 0

    def coverage(documents: Sequence[Document]) -> float:
        written = torch.cat([d.ids[d.supervised] for d in documents]).long()
        return float(covered[written].float().mean())

    sources = {}
    for source in dict.fromkeys(d.source for d in answers.documents):
        some = [d for d in answers.documents if d.source == source]
        part = base.walk(answers.documents, source)
        sources[source] = {"prompts": len(some), "cycles": part.cycles, "tau": part.tau, "coverage": coverage(some)}
    ids = torch.cat([d.ids for d in answers.documents]).long()
    outside = first.clone()
    outside[first] = ~covered[ids[first.nonzero().squeeze(1) + 2]]
    misses = int((first & ~base.right_KT[0]).sum())
    return {
        "prompts": len(answers.documents),
        "tokens": int(sum(d.supervised.sum() for d in answers.documents)),
        "tree": f"{STEPS}:1:{STEPS}",
        "tau": walk.tau,
        "cycles": walk.cycles,
        "n_alpha": walk.n_alpha,
        "acceptance_per_depth": [a / max(walk.cycles, 1) for a in walk.accepted],
        "first_right": float(base.right_KT[0][first].float().mean()) if bool(first.any()) else 0.0,
        "coverage": coverage(answers.documents),
        "misses_outside_vocabulary": int(outside.sum()) / max(misses, 1),
        "by_source": sources,
        "by_position": _by_position(base, answers),
    }


def _by_position(base: Judged, answers: Answers) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    bounds = (0, *_EDGES, 2**31)
    for low, high in zip(bounds, bounds[1:], strict=False):
        emitted = [n for at, n in base.cycles(answers.documents) if low <= at < high]
        if emitted:
            name = f"{low} to {high - 1}" if high < 2**31 else f"from {low}"
            found[name] = {"cycles": len(emitted), "tau": sum(emitted) / len(emitted)}
    return found


def _from_trials(tried: Sequence[tuple[Trial, Gain]]) -> Iterator[Cause]:
    best = max((gain.accepted for _, gain in tried if gain.likely), default=0.0)
    for trial, gain in tried:
        if gain.likely and gain.accepted >= _SHADOW * best:
            evidence = (
                f"{trial.words}, {gain.accepted:+.2f} tokens are accepted of two drafted (z {gain.accepted_z:.1f}), and "
                f"what the target wrote is {gain.nats:.2f} nats likelier (z {gain.nats_z:.1f})"
            )
            yield Cause(trial.id, gain.certain, evidence, trial.advice, gain.accepted)


def _from_map(base: Judged, answers: Answers, draft: Draft, causes: list[Cause]) -> Iterator[Cause]:
    """Another map of the ids explains more than another `lm_head` does, which follows any map; that one is withdrawn."""
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
    advice = "d2t names the wrong tokens: write the map that the head was trained with, as offsets (target id - draft id)"
    yield Cause("d2t", True, evidence, advice, gain)


def _from_parts(
    pair: Pair, parts: Mapping[str, Gain], figures: Mapping[str, Any], causes: Sequence[Cause]
) -> Iterator[Cause]:
    """Parts without which the head does no worse, and matrices that look random."""
    explained = any(c.certain for c in causes)
    idle = {part for part, gain in parts.items() if gain.nats_z > -2 and gain.accepted_z > -2}
    matrices = {n: p for p, names in pair.random.items() for n in names}
    all_matrices = [n for n, w in pair.draft.named_parameters() if w.ndim == 2] if pair.draft is not None else []
    if len(matrices) > 1 and len(matrices) >= len(all_matrices) - 1:  # lm_head starts as the target's
        sure = figures["first_right"] < 0.05
        evidence = f"no matrix but {len(all_matrices) - len(matrices)} differs from fresh random numbers"
        yield Cause("untrained", sure, evidence, "train the head; this is what one starts as", 0.9)
        return
    for part, names in pair.random.items():
        evidence = f"{', '.join(names)} cannot be told from random numbers"
        if part in idle:
            evidence += f"; without its {part} the head does no worse ({parts[part].nats:+.2f} nats a token)"
        advice = "the file does not hold what was trained: export the head again"
        yield Cause(part, part in idle and not explained, evidence, advice, 0.6 if part in idle else 0.25)
    for part, gain in parts.items():
        if gain.certain and not explained:
            evidence = f"without its {part}, {gain.accepted:+.2f} tokens are accepted of two drafted"
            yield Cause(part, True, evidence, "what is there does harm: export the head again", gain.accepted)
    if "fc" in idle and not explained and "fc" not in pair.random:
        evidence = (
            f"without the target's states the head does no worse ({parts['fc'].nats:+.2f} nats a token): "
            "these are not the states that it was trained on"
        )
        advice = "give the target that the head was trained for, in the same quantisation, or train a head for this one"
        yield Cause("target_mismatch", False, evidence, advice, 0.5)


def _from_coverage(figures: Mapping[str, Any]) -> Iterator[Cause]:
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


def _from_positions(base: Judged, answers: Answers, config: DraftConfig) -> Iterator[Cause]:
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
def _from_prompts(target: Target, answers: Answers) -> Iterator[Cause]:
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


def _from_system(
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


def _undertrained(figures: Mapping[str, Any]) -> Cause:
    evidence = (
        f"{figures['first_right']:.0%} of the first drafted tokens are right, and nothing that was made otherwise helps"
    )
    advice = "train it longer, on more answers of this very target to prompts like those it will be asked"
    return Cause("undertrained", False, evidence, advice, 0.02)
