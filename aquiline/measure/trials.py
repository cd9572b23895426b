"""A head judged on the target's own greedy replies: as it is, and with one thing at a time made otherwise.

What a head would do is computed by the training walk, which equals chain decoding; a head that does clearly better
with, say, other layers captured was made for those. Nothing is compared with another copy of the head.

Shapes: T tokens, D target width, L captured layers, K steps, W draft vocabulary, H draft width.
"""

import copy
import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aquiline.config import TOP, DraftConfig, RopeConfig, default_capture_after
from aquiline.data.dataset import Document
from aquiline.data.features import Features
from aquiline.model.draft import Draft
from aquiline.model.layers import RMSNorm, Rotary
from aquiline.model.target import Target
from aquiline.train.loop import make_pack
from aquiline.train.ttt import Plan, roll
from aquiline.train.walk import Walk

STEPS = 4  # of the chain by which a head is judged
TRIAL_STEPS = 2  # of a trial: the second is the first that reads a feature fed back
_FLOOR = -15.0  # no token counts as less likely, in log-probability: one wild guess would outweigh a hundred
_BLOCK = 16  # tokens: neighbours are not independent, so means are compared over blocks
_FEW_BLOCKS = 12  # tell nothing for certain
_ROWS = 256  # rows of logits at a time


@dataclass(frozen=True)
class Answers:
    """Prompts with the target's greedy replies, and its states after some of its layers."""

    documents: list[Document]
    layers: tuple[int, ...]
    states_TLD: Tensor
    last_TD: Tensor  # the final state, after its norm

    def features(self, capture_after: Sequence[int], late: int = 0) -> Features:
        """What a head that reads these layers is given; `late`: from so many tokens before, within a document."""
        ids = torch.cat([d.ids for d in self.documents]).long()
        if tuple(capture_after) == TOP:
            aux = self.last_TD
        else:
            aux = torch.cat([self.states_TLD[:, self.layers.index(i)] for i in capture_after], dim=-1)
        if late:
            parts = aux.split([len(d) for d in self.documents])
            aux = torch.cat([torch.cat((part[:1].expand(late, -1), part[:-late])) for part in parts])
        follows = torch.cat((ids[1:], ids[-1:]))  # greedy: what was written is the arg-max
        return Features(aux, self.last_TD, follows, torch.zeros(len(ids)))


@dataclass(frozen=True)
class Judged:
    """What a head proposes at the rows after which the target wrote on, and what came of it."""

    right_KT: Tensor  # bool
    valid_KT: Tensor  # bool: the row is followed by a token of the reply at this step
    proposed_KT: Tensor  # draft ids, -1 where not valid
    likely_KT: Tensor  # log-probability of the token written, over the draft vocabulary; _FLOOR outside it
    hidden_RH: Tensor  # of step 0, of its valid rows: what `lm_head` reads

    def walk(self, documents: Sequence[Document], source: str | None = None) -> Walk:
        """The accepted length of chain decoding over these documents, or over those of one source."""
        walk, start = Walk(), 0
        for d in documents:
            if source in (None, d.source):
                self._walk_one(walk, d, start)
            start += len(d)
        return walk

    def cycles(self, documents: Sequence[Document]) -> list[tuple[int, int]]:
        """Of every cycle, the position at which it begins and the tokens that it emits."""
        found, start = [], 0
        for d in documents:
            walk = Walk()
            self._walk_one(walk, d, start)
            at = d.replies[0][0] if d.replies else 0
            for emitted in walk.lengths:
                found.append((at, emitted))
                at += emitted
            start += len(d)
        return found

    def _walk_one(self, walk: Walk, document: Document, start: int) -> None:
        here = slice(start, start + len(document))
        for first, end in document.replies:
            walk.add(self.right_KT[:, here], self.valid_KT[:, here], first, end)


@torch.no_grad()
def judge(draft: Draft, target: Target, documents: Sequence[Document], features: Features, steps: int) -> Judged:
    """Run the head over stored replies."""
    pack = make_pack(documents, features, draft, target)
    # The first token of a reply comes from prefill: decoding starts behind it, at the row that embeds it.
    written = pack.supervised_T.clone()
    start = 0
    for d in documents:
        written[[start + first for first, _ in d.replies]] = False
        start += len(d)
    plan = Plan.make(written, pack.starts, steps, None, pack.embeds_TH.device)
    shape = plan.valid_KT.shape
    right, proposed = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1)
    likely = torch.zeros(shape)
    first_hidden = torch.empty(0)
    for k, (_, hidden) in enumerate(roll(draft, pack, plan)):
        rows = plan.scored[k]
        read = hidden[plan.scored_at[k]]
        if k == 0:
            first_hidden = read
        stored = pack.ids_T[rows + 2 + k]
        draft_ids = draft.vocab.draft_ids_V[stored.to(read.device)]
        for a in range(0, len(rows), _ROWS):
            here, wanted = rows[a : a + _ROWS], draft_ids[a : a + _ROWS]
            logits = draft.logits(read[a : a + _ROWS])
            best = logits.argmax(-1)
            found = logits.gather(1, wanted.clamp(min=0)[:, None])[:, 0] - logits.logsumexp(-1)
            found = torch.where(wanted < 0, _FLOOR, found).nan_to_num(_FLOOR).clamp(min=_FLOOR)
            proposed[k, here], likely[k, here] = best.cpu(), found.cpu()
            right[k, here] = draft.vocab.target_ids_W[best].cpu() == stored[a : a + _ROWS]
    return Judged(right, plan.valid_KT, proposed, likely, first_hidden)



# ---------------------------------------------------------------- better or worse


@dataclass(frozen=True)
class Gain:
    """How much better a head does than another on the same rows, per row: accepted tokens of a chain of two, and nats
    of the likelihood of what was written; of each, the mean over its standard error, from means of blocks.
    """

    accepted: float
    accepted_z: float
    nats: float
    nats_z: float
    blocks: int

    @property
    def certain(self) -> bool:
        """No healthy head is that much better when something of it is made otherwise."""
        clear = self.nats_z >= 5 and self.accepted_z >= 2 and self.accepted >= 0.02
        return clear and self.blocks >= _FEW_BLOCKS

    @property
    def likely(self) -> bool:
        return self.nats_z >= 3 and self.accepted_z >= 1 and self.accepted >= 0.005 and self.blocks >= _FEW_BLOCKS // 2

    @staticmethod
    def of(here: Judged, other: Judged, documents: Sequence[Document]) -> "Gain":
        """Of `other` over `here`."""
        accepted, nats = (_per_row(j) for j in (here, other)), (j.likely_KT[:TRIAL_STEPS].sum(0) for j in (here, other))
        steps = []
        for before, after in (accepted, nats):
            blocks, start = [], 0
            for d in documents:
                rows = (after - before)[start : start + len(d)][here.valid_KT[0, start : start + len(d)]]
                blocks += [part.mean() for part in rows.split(_BLOCK) if len(part) >= _BLOCK // 2]
                start += len(d)
            means = torch.stack(blocks) if blocks else torch.zeros(1)
            spread = float(means.std()) / len(means) ** 0.5 if len(means) > 1 else float("inf")
            steps += [float(means.mean()), float(means.mean()) / max(spread, 1e-9)]
        return Gain(*steps, blocks=len(means))


def _per_row(judged: Judged) -> Tensor:
    right = judged.right_KT[:TRIAL_STEPS] & judged.valid_KT[:TRIAL_STEPS]
    return right.int().cumprod(0).sum(0).float()


# ---------------------------------------------------------------- what is made otherwise


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
        if 0 <= min(layers) and max(layers) < num_layers:
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
    for order in itertools.islice(itertools.permutations(c.capture_after), 1, 6):
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
            advice = f"set {name} to {str(not on).lower()} in its config.json; writers differ in what a missing key means"
            yield Trial(name, f"with {name} {way}", advice, change)


def _other_tensors(draft: Draft, target: Target, head_rows_WD: Tensor | None) -> Iterator[Trial]:
    for name, module in draft.named_modules():
        if isinstance(module, RMSNorm) and bool((module.weight != 1).any()):
            yield Trial(
                "norm", f"with ones for {name}.weight",
                f"{name}.weight is not what the head was trained with: export the head again",
                lambda d, name=name: _put(d, name, torch.ones_like),
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
    """The head without one of its parts: when it does no worse, the part is broken. `fc`: without the target's states."""
    paths = {"attention": "midlayer.self_attn.o_proj", "mlp": "midlayer.mlp.down_proj", "fc": "fc"}
    return Trial(part, f"without its {part}", "", lambda d: _put(d, paths[part], torch.zeros_like))


# ---------------------------------------------------------------- which tokens the draft's ids are


@dataclass(frozen=True)
class OtherMap:
    """Share of the first drafted tokens that are right by another map of draft ids to tokens."""

    words: str
    right: float
    given: float


def best_other_map(judged: Judged, ids_T: Tensor, target_ids_W: Tensor) -> OtherMap:
    """The map by which the same proposals would be right most often: `d2t` read in another way, or, for a map nobody
    wrote down, for each draft id the token that most often followed where else it was proposed.
    """
    rows = judged.valid_KT[0].nonzero().squeeze(1)
    proposed, stored = judged.proposed_KT[0, rows], ids_T[rows + 2]
    ids, counting = target_ids_W.cpu(), torch.arange(len(target_ids_W))
    readings = {
        "d2t as absolute ids where it was read as offsets": ids - counting,
        "d2t as offsets where it was read as absolute ids": ids + counting,
        "every id one lower": ids - 1,
        "every id one higher": ids + 1,
        "the same ids in ascending order": ids.sort().values,
    }
    shares = {words: float((other[proposed] == stored).float().mean()) for words, other in readings.items()}
    shares["another map, learnt from the other replies"] = _learnt(proposed.tolist(), stored.tolist())
    words = max(shares, key=lambda name: shares[name])
    return OtherMap(words, shares[words], float((ids[proposed] == stored).float().mean()))


def _learnt(proposed: Sequence[int], stored: Sequence[int]) -> float:
    followed: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for guess, token in zip(proposed, stored, strict=True):
        followed[guess][token] += 1
    right = 0
    for guess, token in zip(proposed, stored, strict=True):
        others = followed[guess] - Counter({token: 1})
        right += bool(others) and others.most_common(1)[0][0] == token
    return right / max(len(stored), 1)
