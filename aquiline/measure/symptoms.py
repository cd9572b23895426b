"""What a head shows before it runs: why it is refused, what its files say of the target it was trained for, and tensors
that no training leaves behind.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.config import TargetConfig, UserError, capture_name
from aquiline.data.chat import Chat
from aquiline.files.checkpoint import DraftInfo, target_fingerprint
from aquiline.measure.trials import rope_words
from aquiline.model.draft import Draft
from aquiline.model.target import Target

WEIGHTS, TEMPLATE = "weights of the target", "chat template"  # two of the facts
_RANDOM_BELOW = 1.08  # of `spike`: fresh random numbers are near 1, what was trained is mostly above 1.2
_EVEN_BELOW = 1.8  # of `unevenness`: fresh random numbers are below 1.4, what was trained is above 2.5
_FEW_ROWS = 32  # a smaller matrix of random numbers strays further


@dataclass(frozen=True)
class Cause:
    """Why fewer tokens may be accepted than should be. `weight`: tokens per cycle it seems to cost, for the order."""

    id: str
    certain: bool
    evidence: str
    advice: str
    weight: float = 0.0


_PARTS = {  # of a head, by how a tensor's name begins
    "fc.": "fc",
    "norm.": "norm",
    "lm_head.": "lm_head",
    "embed_tokens.": "embedding",
    "input_norm.": "norm_before_fc",
    "fc_norm.": "fc_norm",
    "midlayer.self_attn.": "attention",
    "midlayer.mlp.": "mlp",
    "midlayer.": "norm",
}
_AGAIN = "export the head again from where it was trained; the file here lost something on the way"
_ADVICE = {
    "target_mismatch": "give the target that the head was trained for, or train a head for this one (`aquiline train "
    "--warm-start` begins with this head)",
    "tokenizer": "put the tokenizer files back that came with the target which the head was trained for",
    "d2t": "write d2t anew: for each draft id in order, the target's id minus the draft id; t2d marks the same ids",
    "capture_layers": "keep one list of layers in config.json, the one that the head was trained with",
    "files": "put the folder right, or fetch it again; `aquiline convert` says what it finds in a head",
}


def part_of(tensor: str) -> str | None:
    """The part of the head that a tensor belongs to; None for what is no name of a tensor."""
    return next((part for start, part in _PARTS.items() if tensor.startswith(start)), None)


def refusal(error: UserError) -> Cause:
    """Why the head cannot even be loaded."""
    id = part_of(error.reason) or (error.reason if error.reason in _ADVICE else "files")
    return Cause(id, True, f"it is refused: {error}", _ADVICE.get(id, _AGAIN), 9.0)


# ---------------------------------------------------------------- what the files say


@dataclass(frozen=True)
class Fact:
    """One property of the pair: what the head was made for (None: it does not say), and what is here."""

    what: str
    head: str | None
    here: str

    @property
    def differs(self) -> bool:
        return self.head not in (None, self.here)


def facts(draft: Draft, target: Target, info: DraftInfo | None, chat: Chat) -> list[Fact]:
    """Of a pair that loads. `target` is not packed."""
    c, t = draft.config, target.config
    dtype = str(target.dtype).removeprefix("torch.")
    layers = capture_name(c.capture_after)
    said = {} if info is None else dataclasses.asdict(info)
    return [
        Fact(WEIGHTS, said.get("target_fingerprint"), target_fingerprint(target)),
        Fact("tokenizer", said.get("tokenizer"), chat.fingerprint()),
        Fact(TEMPLATE, said.get("template"), chat.template_fingerprint()),
        Fact("dtype of the target", said.get("target_dtype"), dtype),
        Fact("vocabulary", str(c.vocab_size), str(t.vocab_size)),
        Fact("hidden size", str(c.target_hidden_size), str(t.hidden_size)),
        Fact("rope", rope_words(c.rope), rope_words(t.rope)),
        Fact("reads", None, f"{layers} of {t.num_layers} layers" if layers != "top" else "the final state"),
        Fact("proposes", None, f"{c.draft_vocab_size} of {c.vocab_size} tokens"),
        Fact("trained to", None, "unknown" if c.trained_length is None else f"{c.trained_length} tokens"),
    ]


def from_facts(found: list[Fact], draft: Draft, target: TargetConfig, info: DraftInfo | None) -> Iterator[Cause]:
    """What the pair's records alone make suspect. None of it is certain to cost anything."""
    differs = {fact.what: fact for fact in found if fact.differs}
    weights, template = differs.get(WEIGHTS), differs.get(TEMPLATE)
    if weights is not None and info is not None:
        evidence = f"it was trained on other weights: {info.target}, {weights.head}; here they are {weights.here}"
        yield Cause("target_mismatch", False, evidence, _ADVICE["target_mismatch"], 0.2)
    if template is not None:
        yield Cause(
            "template", False, f"it was trained with chat template {template.head}, and here it is {template.here}",
            "put the chat template back that the head was trained with, or train it on answers written with this one",
            0.3,
        )  # fmt: skip
    if draft.config.rope != target.rope:
        evidence = f"its rope is {draft.config.rope}, the target's {target.rope}"
        yield Cause(
            "rope_base", False, f"{evidence}; trainers copy the target's, but for those that always take 10000",
            f"unless it was trained so, give its config.json {rope_words(target.rope)}, in all its rope keys", 0.1,
        )  # fmt: skip


# ---------------------------------------------------------------- what the weights show


def from_weights(draft: Draft) -> Iterator[Cause]:
    """Tensors that are zero, or the same number everywhere."""
    norms_trained = False
    plain: list[str] = []
    for name, weight in draft.named_parameters():
        part = part_of(name) or "files"
        low, high = (float(value) for value in weight.detach().aminmax())
        if name.endswith("bias"):
            continue
        if low == high == 0:
            id = "fc_zero" if part == "fc" else part
            yield Cause(id, True, f"{name} is zero everywhere", _AGAIN, 8.0)
        elif weight.ndim == 1:
            if low == high:
                plain.append(name)
            norms_trained |= low < high
        elif low == high:
            yield Cause(part, True, f"{name} is {low:g} everywhere", _AGAIN, 8.0)
        else:
            yield from _zero_stretches(name, part, weight, len(draft.config.capture_after))
    for name in plain if norms_trained else []:
        evidence = f"{name} is {float(draft.get_parameter(name)[0]):g} everywhere, as before training; others are not"
        yield Cause(part_of(name) or "norm", False, evidence, _AGAIN, 0.15)
    ids = draft.vocab.target_ids_W.cpu()
    if len(ids) < draft.vocab.vocab_size and torch.equal(ids, torch.arange(len(ids))):
        evidence = f"the draft vocabulary is simply the first {len(ids)} tokens of the target's"
        yield Cause("d2t", False, evidence, _ADVICE["d2t"], 0.3)


def _zero_stretches(name: str, part: str, weight: Tensor, states: int) -> Iterator[Cause]:
    zero_rows = int((weight == 0).all(dim=1).sum())
    if zero_rows > 0.01 * len(weight):
        yield Cause(part, False, f"{zero_rows} of the {len(weight)} rows of {name} are zero", _AGAIN, 0.4)
    elif part == "fc":
        for i, block in enumerate(weight.chunk(states, dim=1)):
            if not bool(block.any()):
                evidence = f"the columns of {name} that read captured state {i + 1} of {states} are zero"
                yield Cause("fc_zero", False, evidence, _AGAIN, 0.5)


@torch.no_grad()
def random_looking(draft: Draft) -> dict[str, list[str]]:
    """By part, matrices in which no direction stands out, as in fresh random numbers."""
    found: dict[str, list[str]] = {}
    for name, weight in draft.named_parameters():
        if weight.ndim == 2 and min(weight.shape) >= _FEW_ROWS and spike(weight) < _RANDOM_BELOW:
            found.setdefault(part_of(name) or "files", []).append(name)
    return found


def even(weight: Tensor) -> bool:
    """Whether no row or column stands out either. Directions alone do not tell: Muon keeps them alike."""
    return unevenness(weight) < _EVEN_BELOW


@torch.no_grad()
def unevenness(weight: Tensor) -> float:
    """How much the norms of rows, or of columns, differ, over how much they would of independent random numbers."""
    found = []
    for dim in (0, 1):
        norms = weight.float().norm(dim=dim)
        found.append(float(norms.std() / norms.mean().clamp(min=1e-30)) * (2 * weight.shape[dim]) ** 0.5)
    return max(found)


@torch.no_grad()
def spike(weight: Tensor) -> float:
    """The largest singular value over the largest that independent random numbers of this size would have."""
    w = weight.float()
    x = torch.ones(w.shape[1], device=w.device) / w.shape[1] ** 0.5
    x = x + torch.randn(w.shape[1], generator=torch.Generator().manual_seed(0)).to(w.device) / w.shape[1] ** 0.5
    for _ in range(16):  # power iteration
        x = w.T @ (w @ (x / x.norm()))
    largest = float(x.norm()) ** 0.5
    size = float(w.square().mean()) ** 0.5
    return largest / max(size * (w.shape[0] ** 0.5 + w.shape[1] ** 0.5), 1e-30)
