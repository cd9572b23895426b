"""A head with one thing at a time made otherwise: one that does clearly better with, say, other layers captured was
made for those. Nothing is compared with another copy of the head.
"""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aquiline.config import TOP, DraftConfig, RopeConfig, default_capture_after
from aquiline.measure.judge import TRIAL_STEPS, Judged, judge
from aquiline.measure.replies import Answers
from aquiline.model.draft import Draft
from aquiline.model.layers import RMSNorm, Rotary
from aquiline.model.target import Target


@dataclass(frozen=True)
class Trial:
    """One thing made otherwise. `change` is done to a copy of the head that shares the weights it leaves alone."""

    id: str
    words: str  # what is made otherwise: "with ..."
    advice: str
    change: Callable[[Draft], None] = lambda draft: None
    capture_after: tuple[int, ...] | None = None
    late: int = 0

    def judge(self, draft: Draft, target: Target, answers: Answers) -> Judged:
        changed = light_copy(draft)
        self.change(changed)
        features = answers.features(self.capture_after or draft.config.capture_after, self.late)
        return judge(changed, target, answers.documents, features, TRIAL_STEPS)


def light_copy(draft: Draft) -> Draft:
    """A copy in which modules may be replaced, over the same weights."""
    return copy.deepcopy(draft, {id(p): p for p in draft.parameters()})


def trials(draft: Draft, target: Target, head_rows_WD: Tensor | None) -> Iterator[Trial]:
    """All that may have been meant otherwise. `head_rows_WD`: the target's head, rows of the draft vocabulary, where it
    is as wide as the draft.
    """
    if not draft.config.top:
        yield from _other_states(draft.config, target.config.num_layers)
    yield from _other_ropes(draft.config, target.config.rope)
    yield from _other_switches(draft)
    yield from _other_tensors(draft, target, head_rows_WD)


def layers_needed(capture_after: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The layers whose states the trials of a head read."""
    if capture_after == TOP:
        return TOP
    near = {i + shift for i in capture_after for shift in (-1, 0, 1)} | set(_usual(num_layers))
    return tuple(sorted(near & set(range(num_layers))))


def _usual(num_layers: int) -> tuple[int, ...]:
    return default_capture_after(num_layers) if num_layers >= 7 else ()


def _other_states(c: DraftConfig, num_layers: int) -> Iterator[Trial]:
    shifted = {shift: tuple(i + shift for i in c.capture_after) for shift in (-1, 1)}
    mend = "set capture_after to {} in its config.json, and leave other lists of layers out"
    for shift, layers in shifted.items():
        if min(layers) >= 0 and max(layers) < num_layers:
            words = f"with the states one layer {'earlier' if shift < 0 else 'later'}, after {list(layers)}"
            yield Trial(
                "capture_shift", words,
                f"{mend.format(list(layers))}: writers differ in whether they count layers or name them",
                capture_after=layers,
            )  # fmt: skip
    usual = _usual(num_layers)
    if len(usual) == len(c.capture_after) and usual not in (c.capture_after, *shifted.values()):
        words = f"with the usual states, after {list(usual)}"
        yield Trial("capture_layers", words, mend.format(list(usual)), capture_after=usual)
    for order in _orders(c.capture_after):
        yield Trial(
            "capture_order", f"with the states in the order {list(order)} instead of {list(c.capture_after)}",
            f"fc was trained on the states in the order {list(order)}, and is given the lowest layer first: put the "
            "column blocks of fc.weight (and fc_norm, input_norm, if any) in ascending order of their layers",
            capture_after=order,
        )  # fmt: skip
    yield Trial(
        "alignment", "with the states of one token before",
        "the head was trained with states and tokens out of step by one: train it again with data that is aligned",
        late=1,
    )  # fmt: skip


def _orders(layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Others than the given one: all of up to three layers; of more, two exchanged, or all reversed."""
    if len(layers) <= 3:
        return list(itertools.permutations(layers))[1:]
    exchanged = []
    for i, j in itertools.combinations(range(len(layers)), 2):
        order = list(layers)
        order[i], order[j] = order[j], order[i]
        exchanged.append(tuple(order))
    return [*exchanged, layers[::-1]]


def _other_ropes(c: DraftConfig, target: RopeConfig) -> Iterator[Trial]:
    bases = [RopeConfig(theta) for theta in (1e4, 1e5, 5e5, 1e6)]
    for rope in dict.fromkeys([target, dataclasses.replace(c.rope, rope_theta=target.rope_theta), *bases]):
        if rope == c.rope:
            continue

        def change(draft: Draft, rope: RopeConfig = rope) -> None:
            draft.rotary = Rotary(rope, c.head_dim, c.max_positions).to(draft.norm.weight.device)

        whose = ", the target's" if rope == target else ""
        name = rope_words(rope)
        yield Trial("rope_base", f"with {name}{whose}", f"give its config.json {name}, in all its rope keys", change)


def rope_words(rope: RopeConfig) -> str:
    return f"rope_theta {rope.rope_theta:g}" + ("" if rope.rope_type == "default" else f" and rope {rope.rope_type}")


def _other_switches(draft: Draft) -> Iterator[Trial]:
    c = draft.config

    def residual(d: Draft) -> None:
        d.midlayer.norm_before_residual = not c.norm_before_residual

    def output(d: Draft) -> None:
        d.config = dataclasses.replace(c, norm_output=not c.norm_output)

    def no_fc_norm(d: Draft) -> None:
        d.fc_norm = None

    def no_input_norm(d: Draft) -> None:
        d.input_norm = None

    for name, change, on in (
        ("norm_before_residual", residual, c.norm_before_residual),
        ("norm_output", output, c.norm_output),
        ("fc_norm", no_fc_norm, c.fc_norm),
        ("norm_before_fc", no_input_norm, c.norm_before_fc),
    ):
        if on or change in (residual, output):
            way = "off" if on else "on"
            advice = (
                f"set {name} to {str(not on).lower()} in its config.json; writers differ in what a missing key means"
            )
            yield Trial(name, f"with {name} {way}", advice, change)


def _other_tensors(draft: Draft, target: Target, head_rows_WD: Tensor | None) -> Iterator[Trial]:
    for name, module in draft.named_modules():
        if isinstance(module, RMSNorm) and bool((module.weight != 1).any()):
            yield Trial(
                "norm", f"with ones for {name}.weight",
                f"{name}.weight is not what the head was trained with: export the head again",
                functools.partial(_put, name=name, make=torch.ones_like),
            )  # fmt: skip
    if head_rows_WD is not None:
        yield Trial(
            "lm_head", "with the target's own rows for lm_head",
            "lm_head.weight is not the one that was trained: export the head again, with its own lm_head",
            lambda d: _put(d, "lm_head", lambda w: head_rows_WD.to(w)),
        )  # fmt: skip
    if draft.embed_tokens is not None and draft.config.hidden_size == target.config.hidden_size:

        def share(d: Draft) -> None:
            d.embed_tokens = None

        yield Trial(
            "embedding", "with the target's embedding",
            "remove embed_tokens.weight from its file, and set own_embedding to false: the target's is then used",
            share,
        )  # fmt: skip


def _put(draft: Draft, name: str, make: Callable[[Tensor], Tensor]) -> None:
    module = draft.get_submodule(name)
    assert isinstance(module.weight, Tensor)
    module.weight = nn.Parameter(make(module.weight.detach()), requires_grad=False)


def without(draft: Draft, part: str) -> Trial:
    """The head without one of its parts; when it does no worse, the part is broken. Without `fc`, it has no states
    of the target.
    """
    paths = {"attention": "midlayer.self_attn.o_proj", "mlp": "midlayer.mlp.down_proj", "fc": "fc"}
    return Trial(
        part,
        f"without its {part}",
        f"{part} does harm: export the head again",
        lambda d: _put(d, paths[part], torch.zeros_like),
    )
