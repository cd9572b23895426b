"""Why so few tokens are accepted: a head examined on replies that its target writes, most likely causes first.

The target answers some prompts greedily; the head is judged on these replies as it is, and with one thing at a time
made otherwise (measure/trials.py). Healthy heads are best as they are.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.config import AquilineWarning, DoctorConfig, UserError
from aquiline.data.chat import Chat
from aquiline.data.dataset import Document
from aquiline.files import checkpoint, disk
from aquiline.measure.findings import (
    from_coverage,
    from_map,
    from_parts,
    from_positions,
    from_prompts,
    from_system,
    from_templates,
    from_trials,
    idle_parts,
    undertrained,
)
from aquiline.measure.judge import ENOUGH, STEPS, Gain, Judged, judge
from aquiline.measure.replies import Answers, answer
from aquiline.measure.symptoms import (
    TEMPLATE,
    WEIGHTS,
    Cause,
    Fact,
    facts,
    from_facts,
    from_weights,
    random_looking,
    refusal,
)
from aquiline.measure.tasks import Prompt
from aquiline.measure.templates import other_templates
from aquiline.measure.trials import Trial, layers_needed, trials, without
from aquiline.model.draft import Draft
from aquiline.model.target import Target

_HOPELESS = 0.15  # share of first drafted tokens that are right, below which no part of a head can show its worth
_JUDGED_COVERAGE = 0.3  # of what the target writes, below which a head is not to be judged at all
DEFINITIONS = {
    "tau": "tokens emitted per cycle of a chain (figures.tree) over the target's greedy replies, by the walk that "
    "equals chain decoding; the floor is 1",
    "n_alpha": "[n]: share of drafted tokens accepted at depth n+1 among cycles that accepted the n before",
    "acceptance_per_depth": "[n]: share of all cycles that accepted at least n+1 drafted tokens",
    "rows": "positions, of prompts' last and replies' tokens, at which the head is judged",
    "first_right": "share of all rows, not only those at which a cycle begins, whose first drafted token is right",
    "coverage": "share of the tokens of the replies that the head can propose",
    "misses_outside_vocabulary": "share of the wrong first drafted tokens for which the right one cannot be proposed",
    "by_position": "by the position at which a cycle begins",
    "trials": "one thing made otherwise, on the same rows (template, system_prompt: the same replies behind other "
    "prompts): accepted, more tokens of two drafted; first_right, more of that share; nats, how much likelier the "
    "written tokens of two steps are; _z, over the standard error, from means of blocks of 16 rows",
    "certain": "no such gain, or no such tensor, is found in a healthy head",
}
_EDGES = (128, 256, 512, 1024, 2048, 4096, 8192)  # of positions


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
        rows = target.head_rows(draft.vocab.target_ids_W)
    random = random_looking(draft)
    # In float32, whatever decoding takes: what was made otherwise is to show, not rounding; on CPUs it is faster here.
    return Pair(target, draft.float().requires_grad_(False), chat, causes, found, random, rows, _systems(folder))


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


# ---------------------------------------------------------------- the examination


def ask(
    pair: Pair,
    prompts: Mapping[str, Sequence[Prompt]],
    config: DoctorConfig,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Answers, Answers | None]:
    """The target's answers to these prompts; the same under the system message of the head's training, where one is
    known.
    """
    settings = (config.max_new_tokens, template_kwargs)
    answers = answer(pair.target, pair.chat, prompts, *settings)
    if config.system is not None:
        return answers, answer(pair.target, pair.chat, prompts, *settings, system=config.system)
    if not pair.systems or not pair.systems[0]:
        return answers, None
    try:
        return answers, answer(pair.target, pair.chat, prompts, *settings, system=pair.systems[0])
    except UserError as error:  # the template is not that of the training, which is another cause
        warnings.warn(
            f"the system message of the training cannot be written here: {error}", AquilineWarning, stacklevel=2
        )
        return answers, None


@dataclass(frozen=True)
class Examination:
    """What was found."""

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
    rows_T = base.rows(answers.documents, config.trained_length)
    removed = [without(draft, part) for part in ("attention", "mlp", *(() if config.top else ("fc",)))]
    tried = [
        (trial, Gain.of(base, trial.judge(draft, target, answers), answers.documents, rows_T))
        for trial in (*trials(draft, target, pair.head_rows_WD), *removed)
    ]
    parts = {trial.id: gain for trial, gain in tried[-len(removed) :]}
    right = base.right_KT[0][rows_T].float()
    if len(right) < ENOUGH:
        warnings.warn(
            f"only {len(right)} drafted tokens can be judged, and nothing is certain of fewer than {ENOUGH}: give more "
            "prompts, or a larger --max-new-tokens",
            AquilineWarning,
            stacklevel=2,
        )
    first_right = float(right.mean()) if len(right) >= ENOUGH else 1.0
    hopeless = first_right < _HOPELESS
    idle = idle_parts(parts)
    causes = [*pair.causes, *from_trials(tried, broken=hopeless or bool(idle), right=first_right)]
    causes += from_map(base, answers, rows_T, draft, causes)
    same = next((not f.differs for f in pair.facts if f.what == WEIGHTS and f.head is not None), None)
    if figures["coverage"] > _JUDGED_COVERAGE:
        causes += from_parts(draft, pair.random, parts, causes, hopeless=hopeless, right_target=same)
    causes += [*from_coverage(figures), *from_positions(base, answers, config), *from_prompts(target, answers)]
    if with_system is not None:
        causes += from_system(draft, target, base, answers, with_system, figures)
    told = any(f.what == TEMPLATE and f.head == f.here for f in pair.facts)
    if not told and not any(c.certain for c in pair.causes):
        others = list(other_templates(draft, target, pair.chat, base, answers, rows_T))
        tried += others
        for named in from_templates(others):  # strange prompts make a head strange: what gains less may come of them
            causes = [dataclasses.replace(c, certain=c.certain and c.weight > named.weight) for c in causes]
            causes.append(named)
    if not any(c.certain for c in causes):
        causes += undertrained(first_right, tried)
    if any(c.certain for c in pair.causes):  # what is seen beside it may come of it
        causes = [c if c in pair.causes else dataclasses.replace(c, certain=False) for c in causes]
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
        "rows": int(first.sum()),
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
    for low, high in itertools.pairwise((0, *_EDGES, 2**31)):
        emitted = [n for at, n in base.cycles(answers.documents) if low <= at < high]
        if emitted:
            name = f"{low} to {high - 1}" if high < 2**31 else f"from {low}"
            found[name] = {"cycles": len(emitted), "tau": sum(emitted) / len(emitted)}
    return found


# ---------------------------------------------------------------- the record


def make_record(pair: Pair, found: Examination | None) -> dict[str, Any]:
    """What `--json` writes; `found` is None where the head was refused."""
    causes = pair.causes if found is None else found.causes
    return {
        "causes": [{k: v for k, v in dataclasses.asdict(c).items() if k != "weight"} for c in causes],
        "figures": None if found is None else found.figures,
        "pair": [dataclasses.asdict(fact) for fact in pair.facts],
        "trials": [
            {"id": trial.id, "what": trial.words} | dataclasses.asdict(gain)
            for trial, gain in (() if found is None else found.tried)
        ],
        "definitions": DEFINITIONS,
    }


def summary(figures: Mapping[str, Any]) -> str:
    """What limits a head that has no fault."""
    first, covered = figures["first_right"], figures["coverage"]
    outside = figures["misses_outside_vocabulary"]
    return (
        f"as it is, the head fits its target: {first:.0%} of the first drafted tokens are right. Of the misses, "
        f"{outside:.0%} are tokens that its vocabulary lacks (it covers {covered:.0%}); the others it does not know "
        "better. A head trained longer, or on answers to prompts more like these, may"
    )
