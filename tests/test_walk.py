"""The walk, by hand and against real chain decoding; and a head that has learnt one text is then decoded by it."""

import pytest
import torch

from aquiline.config import SWITCHES, TOP, Limits, TrainConfig, TreeConfig
from aquiline.data.dataset import Document
from aquiline.data.features import compute
from aquiline.decode.engine import Engine, Request
from aquiline.train.loop import make_pack
from aquiline.train.optim import make_optimizers
from aquiline.train.ttt import unroll
from aquiline.train.walk import Walk
from tests.conftest import tiny_draft, tiny_target


def test_walk_by_hand():
    # Reply at 4..9 (six tokens); the first comes from prefill, so five are left. Rows t = 3..8, two steps.
    right = torch.zeros(2, 10, dtype=torch.bool)
    counted = torch.ones(2, 10, dtype=torch.bool)
    right[0, 3] = right[1, 3] = True  # cycle 1: x_5 x_6 right, the target adds x_7
    right[0, 6] = True  # cycle 2: x_8 right, x_9 wrong, so it is the target's own
    walk = Walk()
    walk.add(right, counted, 4, 10)
    assert walk.lengths == [3, 2]
    assert walk.tau == 2.5
    assert (walk.tried, walk.accepted) == ([2, 2], [2, 1])
    assert walk.n_alpha == [1.0, 0.5]


def test_walk_ends_uncounted_where_the_stored_token_is_not_the_argmax():
    right = torch.ones(2, 8, dtype=torch.bool)
    counted = torch.ones(2, 8, dtype=torch.bool)
    counted[1, 1] = False
    walk = Walk()
    walk.add(right, counted, 2, 8)
    assert walk.lengths == [2, 3]  # x_3 accepted and x_4 the target's own; then x_5 x_6 and x_7
    assert (walk.tried, walk.accepted) == ([2, 1], [2, 1])


def test_no_cycle_no_tau():
    walk = Walk()
    walk.add(torch.ones(2, 5).bool(), torch.ones(2, 5).bool(), 4, 5)  # a reply of one token
    assert walk.tau is None


class StopAfter:
    """Ends a request at its n-th token, as an end-of-turn token standing there would."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def push(self, token_id: int) -> object | None:
        self.left -= 1
        return token_id if self.left == 0 else None

    def finish(self) -> None:
        raise AssertionError("the request should have stopped by itself")


def decode_chain(target, draft, prompt: list[int], tokens: int) -> Request:
    request = Request(prompt, limits=Limits(200), tree=TreeConfig(4, 1, 4), matcher=StopAfter(tokens))
    Engine(target, draft).run([request])
    assert request.finish_reason == "stop"
    return request


def learn(
    steps: int,
    ttt_steps: int,
    draft_vocab_size: int = 64,
    capture_after: tuple[int, ...] = (1, 3, 4),
    target=None,
    **switches,
):
    """A tiny target's own greedy reply, 64 tokens in all, and a draft overfitted to it."""
    if target is None:
        target = tiny_target(seed=6, capture_after=capture_after)
        with torch.no_grad():
            target.lm_head.weight.mul_(40)  # a decided teacher: its arg-max can be learnt
    prompt = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = Engine(target)
    (reply,) = engine.run([Request(prompt, limits=Limits(52))])
    ids = torch.tensor(prompt + reply.output_ids).int()
    doc = Document(ids, torch.arange(len(ids)) >= len(prompt), True, "", "one")
    draft = tiny_draft(target, draft_vocab_size=draft_vocab_size, **switches)
    head = target.head_weight[draft.vocab.target_ids_W]
    pack = make_pack([doc], compute(target, [doc]), draft, target)
    config = TrainConfig(ttt_steps=ttt_steps, optimizer="adamw", adamw_learning_rate=3e-3)
    (optimizer,) = make_optimizers(draft, config)
    stats = None
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = config.adamw_learning_rate * (1 - step / steps)
        optimizer.zero_grad()
        loss, stats = unroll(draft, pack, head, ttt_steps, 1.0)
        loss.backward()
        optimizer.step()
        if min(stats.accuracy) >= 0.99:
            break
    with torch.no_grad():
        _, stats = unroll(draft, pack, head, ttt_steps, 1.0)
    return target, draft.requires_grad_(False), doc, prompt, stats


# A poor head rejects much and a good one little; with 40 of 64 tokens some of the text is outside its vocabulary.
@pytest.mark.parametrize("draft_vocab_size", [64, 40])
@pytest.mark.parametrize("steps", [3, 400])
def test_the_walk_equals_real_chain_decoding_cycle_by_cycle(steps, draft_vocab_size):
    check_walk(*learn(steps, 4, draft_vocab_size))


@pytest.mark.parametrize("switch", [*SWITCHES, "top"])
def test_a_head_with_any_switch_is_decoded_as_it_was_trained(switch):
    """With a draft good enough to be accepted and poor enough to be rejected, so that both are compared."""
    settings = {"capture_after": TOP} if switch == "top" else {switch: True}
    learnt = learn(60, 4, 64, **settings)
    tau = check_walk(*learnt)
    assert 1.5 < tau < 4.8


def check_walk(target, draft, doc, prompt, stats) -> float:
    walk = Walk()
    walk.add(stats.right_KT, stats.counted_KT, len(prompt), len(doc))
    request = decode_chain(target, draft, prompt, len(doc) - len(prompt))
    assert prompt + request.output_ids == doc.ids.tolist()
    assert request.cycle_lengths == walk.lengths
    assert request.tau == pytest.approx(walk.tau)
    assert request.accepted == walk.accepted
    assert request.tried == walk.tried
    return walk.tau


def test_an_overfitted_conversation_is_decoded_accepting_nearly_all_of_every_chain():
    target, draft, doc, prompt, stats = learn(1500, 4)
    assert min(stats.accuracy) >= 0.99
    request = decode_chain(target, draft, prompt, len(doc) - len(prompt))
    assert prompt + request.output_ids == doc.ids.tolist()
    assert request.tau >= 4.5  # the most is 5
    # Zeros instead of the target's states: still lossless, so the accepted length is what must fall.
    with torch.no_grad():
        draft.fc.weight.zero_()
    broken = decode_chain(target, draft, prompt, len(doc) - len(prompt))
    assert broken.output_ids == request.output_ids
    assert broken.tau < 3
