"""The engine: lossless with every kind of draft, caches equal to a fresh prefill, stops, limits, batches."""

import dataclasses
import gc
import itertools
import weakref

import pytest
import torch

from aquiline.config import Limits, SamplingConfig, TreeConfig, UserError
from aquiline.decode.drafter import EagleDrafter, NgramDrafter, Row
from aquiline.decode.engine import OWN, Engine, Request
from aquiline.decode.tree import Tree
from tests.conftest import tiny_draft, tiny_target

TREES = [TreeConfig(4, 1, 4), TreeConfig(3, 4, 10), TreeConfig(6, 8, 60), TreeConfig(1, 3, 3)]


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode(target, draft, prompts, *, tree=None, limit=40, max_batch=1, **sampling):
    engine = Engine(target, draft, max_batch=max_batch)
    requests = [Request(p, SamplingConfig(**sampling), Limits(max_new_tokens=limit), tree) for p in prompts]
    engine.run(requests)
    return requests


class Scripted:
    """Wraps a drafter and plants the target's own continuation at chosen nodes among junk."""

    reads_aux = True

    def __init__(self, inner: EagleDrafter, continuation: dict[tuple[int, ...], list[int]], shapes) -> None:
        self.inner, self.continuation, self.shapes = inner, continuation, itertools.cycle(shapes)
        self.planted: list[int] = []

    def draft(self, rows: list[Row], chooser=None) -> list[Tree]:
        self.inner.draft(rows)  # the real draft catches up all the same, so that its cache can be compared
        return [self._plant(row) for row in rows]

    def _plant(self, row: Row) -> Tree:
        parents, right = next(self.shapes)
        start = next(len(p) for p in self.continuation if tuple(row.known[: len(p)]) == p)
        text = self.continuation[tuple(row.known[:start])]
        ahead = text[len(row.known) - start :]
        if row.room - 1 < len(right) or len(ahead) <= len(parents):
            return Tree.empty()
        tokens: list[int] = []
        for node in range(len(parents)):
            if node in right:
                tokens.append(ahead[right.index(node)])
            else:
                siblings = [t for t, p in zip(tokens, parents, strict=False) if p == parents[node]]
                planted = [ahead[right.index(r)] for r in right if parents[r] == parents[node]]
                depth, up = 0, parents[node]
                while up != -1:
                    depth, up = depth + 1, parents[up]
                wrong = [t for t in range(64) if t not in siblings and t not in planted and t != ahead[depth]]
                tokens.append(wrong[node % len(wrong)])
        self.planted.append(len(right))
        return Tree.from_tokens(tokens, parents)

    def copy(self, source, destination, length):
        self.inner.copy(source, destination, length)

    def truncate(self, slot, length):
        self.inner.truncate(slot, length)

    def length(self, slot):
        return self.inner.length(slot)


# (parents, the nodes that carry the target's own continuation, in order)
SHAPES = [
    ([-1, -1, -1, 0, 0, 1, 1, 3, 5, 8], []),
    ([-1, -1, -1, 0, 0, 1, 1, 3, 5, 8], [0]),
    ([-1, -1, -1, 0, 0, 1, 1, 3, 5, 8], [2]),
    ([-1, -1, -1, 0, 0, 1, 1, 3, 5, 8], [0, 3, 7]),
    ([-1, -1, -1, 0, 0, 1, 1, 3, 5, 8], [1, 6]),
    ([-1, -1, -1, 0, 0, 1, 1, 3, 5, 8], [1, 5, 8, 9]),
    ([-1, 0, 1, 2, 3], [0, 1, 2, 3, 4]),
    ([-1, -1, -1, -1], [3]),
]


def fresh_caches(target, draft, known):
    """Both caches after a prefill of the same tokens."""
    n = len(known) - 1
    ids = torch.tensor([known])
    out = target(ids[:, :n], torch.arange(n)[None])
    g = draft.fuse(out.aux_BNA)
    real = draft(draft.embed(ids[:, 1:], target.embed), g, torch.arange(n)[None])
    return out, real


def check_caches(target, draft, engine, row):
    """Of a row between two cycles: both as after a fresh prefill of its tokens."""
    out, real = fresh_caches(target, draft, row.known)
    n, r = len(row.known) - 1, engine.drafter.length(row.slot)
    assert engine.cache.lengths[row.slot] == n
    assert r <= n  # rows of this cycle's path are fed at the next
    caches = [(engine.cache, n, out), (getattr(engine.drafter, "inner", engine.drafter).cache, r, real)]
    for cache, length, fresh in caches:
        keys, values = cache.read([row.slot])
        assert torch.allclose(keys, fresh.keys_LBGNE[:, :, :, :length], atol=1e-4)
        assert torch.allclose(values, fresh.values_LBGNE[:, :, :, :length], atol=1e-4)
    pending = torch.cat([out.aux_BNA[0, :0], *row.pending_aux])
    assert torch.allclose(pending, out.aux_BNA[0, r:], atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_scripted_acceptance_leaves_both_caches_as_a_fresh_prefill(batch):
    target = tiny_target()
    draft = tiny_draft(target).requires_grad_(False)
    prompts = [prompt(n, seed) for seed, n in enumerate((7, 3, 12))][:batch]
    plain = decode(target, None, prompts, limit=60)
    continuation = {tuple(p): r.output_ids for p, r in zip(prompts, plain, strict=True)}
    inner = EagleDrafter(draft, target.model.embed_tokens, batch, 256)
    scripted = Scripted(inner, continuation, SHAPES)
    engine = Engine(target, scripted, max_batch=batch)
    requests = [engine.submit(Request(p, limits=Limits(60), tree=TreeConfig(5, 5, 10))) for p in prompts]
    lengths = set()
    while engine.busy:
        engine.step()
        for request, row in engine._running:
            known = row.known
            assert known == list(request.prompt_ids) + request.output_ids
            check_caches(target, draft, engine, row)
            lengths.update(request.cycle_lengths)
    for request, reference in zip(requests, plain, strict=True):
        assert request.output_ids == reference.output_ids
        assert request.tau is not None
        assert request.tau > 2  # the script accepts, so this test cannot pass by rejecting everything
    assert lengths >= {1, 2, 3, 4, 5, 6}  # every path length happened
    assert set(scripted.planted) >= {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("kind", ["random", "zeroed", "ngram", "own embedding"])
def test_greedy_text_equals_plain_decoding(tree, kind):
    target = tiny_target()
    draft = {
        "random": lambda: tiny_draft(target),
        "zeroed": lambda: tiny_draft(target),
        "ngram": lambda: "ngram",
        "own embedding": lambda: tiny_draft(target, own_embedding=True, hidden_size=16, head_dim=4),
    }[kind]()
    if kind == "zeroed":
        for p in draft.parameters():
            p.data.zero_()
    prompts = [prompt(n, seed) for seed, n in enumerate((1, 2, 9, 30))]
    plain = decode(target, None, prompts)
    speculative = decode(target, draft, prompts, tree=tree)
    assert target.dtype == torch.float32
    for a, b in zip(plain, speculative, strict=True):
        assert a.output_ids == b.output_ids
        assert a.tau is None
        assert b.cycles > 0


def test_prompt_lookup_accepts_repeated_text():
    target = tiny_target()
    once = prompt(1, 4)
    text = decode(target, None, [once], limit=200)[0].output_ids
    repeated = once + text  # a greedy tiny model runs into a loop; its own text is in the prompt
    requests = decode(target, "ngram", [repeated], tree=TreeConfig(5, 2, 8), limit=40)
    assert requests[0].output_ids == decode(target, None, [repeated], limit=40)[0].output_ids
    assert requests[0].tau > 1.5


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_sampled_text_depends_on_the_seed_alone(tree):
    target = tiny_target()
    draft = tiny_draft(target)
    settings = {"temperature": 1.0, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
    prompts = [prompt(5, 1), prompt(8, 2)]
    for seed in (0, 1):
        plain = decode(target, None, prompts, seed=seed, **settings)
        for drafted in (draft, "ngram"):
            got = decode(target, drafted, prompts, tree=tree, seed=seed, **settings)
            assert [r.output_ids for r in got] == [r.output_ids for r in plain]
    other = decode(target, None, prompts, seed=2, **settings)
    assert [r.output_ids for r in other] != [r.output_ids for r in plain]


def test_a_batch_gives_each_request_what_it_gets_alone():
    target = tiny_target()
    draft = tiny_draft(target)
    requests = []
    for i, n in enumerate((3, 17, 40, 5, 9)):
        sampling = SamplingConfig(temperature=0.8 if i % 2 else 0.0, seed=i)
        tree = [TreeConfig(3, 3, 7), None, TreeConfig(5, 1, 5), TreeConfig(6, 8, 60), TreeConfig(2, 2, 4)][i]
        requests.append(Request(prompt(n, i), sampling, Limits(12 + 7 * i), tree))
    alone = [dataclasses.replace(r) for r in requests]
    for r in alone:
        r.output_ids, r.origins, r.cycle_lengths, r.tried, r.accepted = [], [], [], [], []
        Engine(target, draft).run([r])
    engine = Engine(target, draft, max_batch=3)  # five requests share three slots, joining and leaving
    engine.run(requests)
    for together, single in zip(requests, alone, strict=True):
        assert together.output_ids == single.output_ids
        assert together.cycle_lengths == single.cycle_lengths
        assert together.origins == single.origins


def test_stop_inside_an_accepted_run_ends_the_text_there():
    target = tiny_target()
    draft = tiny_draft(target)
    p = prompt(1, 0)
    text = decode(target, None, [p], limit=40)[0].output_ids
    at = 3
    stop = text[at]
    assert stop not in text[:at]
    for limit in (at + 1, 40):  # a stop beats the limit reached by the same token
        inner = EagleDrafter(draft, target.model.embed_tokens, 1, 256)
        engine = Engine(target, Scripted(inner, {tuple(p): text}, [([-1, 0, 1, 2, 3], [0, 1, 2, 3, 4])]))
        r = Request(p, limits=Limits(limit, frozenset({stop})), tree=TreeConfig(5, 1, 5))
        engine.run([r])
        assert r.output_ids == text[: at + 1]
        assert r.finish_reason == "stop"
        assert len(r.origins) == len(r.output_ids)
        if limit == 40:  # the whole chain was accepted, and two tokens behind the stop dropped
            assert r.origins == [OWN, 1, 2, 3]
            ((known, unread),) = engine._slots._ended.values()
            assert sum(map(len, unread)) == len(known) - 1 - inner.length(0)
            assert known == p + text[: at + 1]
            assert engine.cache.lengths[0] == len(known) - 1


def test_limits_and_reasons():
    target = tiny_target()
    draft = tiny_draft(target)
    tree = TreeConfig(6, 8, 60)
    for limit in (0, 1, 2, 3):
        r = decode(target, draft, [prompt(5)], tree=tree, limit=limit)[0]
        assert (len(r.output_ids), r.finish_reason) == (limit, "length")
    whole = decode(target, None, [prompt(5)], limit=100)[0].output_ids
    for length, reason in ((31, "context"), (32, "context"), (40, "context"), (30, "context")):
        for drafted in (None, draft):
            engine = Engine(target, drafted, context=32)
            r = Request(prompt(length), limits=Limits(100), tree=tree)
            engine.run([r])
            assert r.finish_reason == reason
            assert len(r.output_ids) == max(0, 32 - length)
    engine = Engine(target, draft, context=32)
    r = Request(prompt(5), limits=Limits(100), tree=tree)
    engine.run([r])
    assert r.output_ids == whole[:27]
    assert r.finish_reason == "context"


def test_bad_prompts_are_refused():
    engine = Engine(tiny_target())
    with pytest.raises(UserError, match="empty"):
        engine.submit(Request([]))
    with pytest.raises(UserError, match="64"):
        engine.submit(Request([3, 64]))
    with pytest.raises(UserError, match="bans every token"):
        engine.run([Request([3], SamplingConfig(logit_bias=tuple((i, -100.0) for i in range(64))))])


def test_streaming_gives_every_token_once_with_its_origin_and_leaving_cancels():
    target = tiny_target()
    draft = tiny_draft(target)
    engine = Engine(target, draft)
    request = Request(prompt(5), limits=Limits(30), tree=TreeConfig(4, 4, 12))
    pairs = [pair for chunk in engine.stream(request) for pair in chunk]
    assert [t for t, _ in pairs] == request.output_ids
    assert [o for _, o in pairs] == request.origins
    assert request.origins[0] == OWN
    left = Request(prompt(5), limits=Limits(30), tree=TreeConfig(4, 4, 12))
    for _ in engine.stream(left):
        break
    assert left.finish_reason == "cancelled"
    assert not engine.busy
    assert (
        engine.run([Request(prompt(5), limits=Limits(30), tree=TreeConfig(4, 4, 12))])[0].output_ids
        == request.output_ids
    )


def test_a_cache_found_again_changes_neither_text_nor_tau():
    target = tiny_target()
    draft = tiny_draft(target)
    tree = TreeConfig(4, 4, 12)
    for cut in (0, 3, 8):  # the second prompt keeps all of the first turn, or only part of it
        engine = Engine(target, draft)
        first = Request(prompt(9), limits=Limits(15), tree=tree)
        engine.run([first])
        history = list(first.prompt_ids) + first.output_ids
        second_prompt = history[: len(history) - cut] + prompt(6, 5)
        second = engine.submit(Request(second_prompt, limits=Limits(25), tree=tree))
        engine.step()
        ((_, row),) = engine._running
        check_caches(target, draft, engine, row)
        while engine.busy:
            engine.step()
        alone = Request(second_prompt, limits=Limits(25), tree=tree)
        Engine(target, draft).run([alone])
        assert second.reused_tokens >= len(history) - cut - 6
        assert second.output_ids == alone.output_ids
        assert second.cycle_lengths == alone.cycle_lengths


def test_draft_positions_of_the_algorithms_example():
    # 7 prompt tokens and the first sampled one: the last real row is 6, the first drafted node stands at 7.
    target = tiny_target()
    draft = tiny_draft(target)
    seen = []
    forward = draft.forward

    def spy(embeds, g, positions, *rest):
        seen.append(positions.tolist())
        return forward(embeds, g, positions, *rest)

    draft.forward = spy
    engine = Engine(target, draft)
    engine.submit(Request(prompt(7), limits=Limits(8), tree=TreeConfig(3, 2, 4)))
    engine.step()
    assert seen[0] == [list(range(7))]
    assert seen[1] == [[7, 7]]
    assert seen[2] == [[8, 8]]


def test_draft_longer_than_its_own_max_positions_neither_crashes_nor_changes_text():
    target = tiny_target()
    draft = tiny_draft(target, max_positions=16)
    p = prompt(40)
    assert (
        decode(target, draft, [p], tree=TreeConfig(4, 4, 12))[0].output_ids == decode(target, None, [p])[0].output_ids
    )


def test_a_drafted_stop_token_counts_only_once_the_target_accepts_it():
    target = tiny_target()
    draft = tiny_draft(target, draft_vocab_size=64)
    p = prompt(6, 3)
    text = decode(target, None, [p], limit=30)[0].output_ids
    stop = next(t for t in range(64) if t not in text)
    with torch.no_grad():  # a head that always proposes the stop token
        draft.lm_head.weight.zero_()
        draft.norm.weight.fill_(1.0)
        draft.lm_head.weight[stop] = 1.0
    engine = Engine(target, draft)
    r = Request(p, limits=Limits(30, frozenset({stop})), tree=TreeConfig(4, 4, 12))
    engine.run([r])
    assert r.output_ids == text
    assert r.finish_reason == "length"


def test_ngram_drafter_proposes_the_latest_longest_match():
    drafter = NgramDrafter(longest=3, shortest=2)
    known = [1, 2, 3, 7, 8, 1, 2, 3, 9, 4, 1, 2, 3]
    row = Row(0, known, sampler=None, tree=TreeConfig(2, 2, 4), room=10)  # type: ignore[arg-type]
    tree = drafter.draft([row])[0]
    assert tree.tokens == [9, 4, 7, 8]
    assert tree.parents == [-1, 0, -1, 2]


def test_every_path_of_the_drafted_tree_equals_drafting_that_path_alone():
    """Row 46 of what users trip over: a deeper node must attend to its own ancestors and carry their features."""
    target = tiny_target()
    draft = tiny_draft(target)
    p = prompt(7)
    engine = Engine(target, draft)
    engine.submit(Request(p, limits=Limits(20), tree=TreeConfig(4, 3, 30)))
    levels = []
    forward = draft.forward

    def spy(embeds, g, positions, *rest):
        out = forward(embeds, g, positions, *rest)
        levels.append((embeds, out.feature_BNH))
        return out

    draft.forward = spy
    trees = []
    grow = engine.drafter.draft
    engine.drafter.draft = lambda rows, _: trees.extend(grow(rows)) or trees
    with torch.inference_mode():
        engine._prefill()
        ((_, row),) = engine._running
        known = list(row.known)
        engine.step()
        draft.forward = forward
        n = len(known) - 1
        out = target(torch.tensor([known[:n]]), torch.arange(n)[None])
        g = draft.fuse(out.aux_BNA)
        embeds = target.embed(torch.tensor([known[1:]]))
        tree = trees[0]
        parents, tokens = tree.parents, tree.tokens
        checked = 0
        for node in range(len(tree)):
            path = [node]
            while parents[path[0]] != -1:
                path.insert(0, parents[path[0]])
            cache = draft.new_cache(1, 64)
            real = draft(embeds, g, torch.arange(n)[None])
            cache.keep(0, real.keys_LBGNE[:, 0], real.values_LBGNE[:, 0])
            feature, hidden, drafted = real.feature_BNH[:, -1:], real.hidden_BNH[:, -1:], None
            score = 0.0
            for depth, i in enumerate(path):
                log_probs = torch.log_softmax(draft.logits(hidden[0, -1]), -1)
                score += float(log_probs[draft.vocab.draft_ids_V[tokens[i]]])
                embed = target.embed(torch.tensor([[tokens[i]]]))
                mask = torch.ones(1, 1, depth + 1, dtype=torch.bool)
                step = draft(embed, feature, torch.tensor([[n + depth]]), mask, cache, [0], drafted)
                new = (step.keys_LBGNE, step.values_LBGNE)
                drafted = new if drafted is None else tuple(torch.cat(x, 3) for x in zip(drafted, new, strict=True))
                feature, hidden = step.feature_BNH, step.hidden_BNH
            assert tree.scores[node] == pytest.approx(score, abs=1e-3)
            checked = max(checked, len(path))
        assert checked >= 3


@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_target_and_draft_may_have_different_dtypes(kinds):
    target = tiny_target().to(kinds[0])
    draft = tiny_draft(tiny_target()).to(kinds[1])
    r = decode(target, draft, [prompt(9)], tree=TreeConfig(3, 3, 8), limit=20)[0]
    assert len(r.output_ids) == 20
    assert r.cycles > 0
    if kinds[0] == torch.float32:
        assert r.output_ids == decode(target, None, [prompt(9)], limit=20)[0].output_ids


def test_an_exception_in_a_step_leaves_no_row_half_way():
    target = tiny_target()
    draft = tiny_draft(target)
    engine = Engine(target, draft, max_batch=2)
    a, b = (engine.submit(Request(prompt(n), limits=Limits(20), tree=TreeConfig(3, 2, 5))) for n in (5, 9))
    engine.step()
    grow, engine.drafter.model.logits = engine.drafter.model.logits, lambda hidden: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.drafter.model.logits = grow
    assert (a.finish_reason, b.finish_reason) == ("cancelled", "cancelled")
    assert not engine.busy
    again = engine.run([Request(prompt(9), limits=Limits(20), tree=TreeConfig(3, 2, 5))])[0]
    assert again.output_ids == decode(target, None, [prompt(9)], limit=20)[0].output_ids


def test_bad_settings_are_refused_at_submit_and_disturb_nobody():
    engine = Engine(tiny_target(), max_batch=2)
    running = engine.submit(Request(prompt(5), limits=Limits(10)))
    with pytest.raises(UserError, match="99"):
        engine.submit(Request(prompt(5), SamplingConfig(logit_bias=((99, 1.0),))))
    while engine.busy:
        engine.step()
    assert running.finish_reason == "length"
    with pytest.raises(UserError, match="stop strings"):
        Request(prompt(5), limits=Limits(5, stop_strings=("x",)))


def test_cancel_moves_rows_of_a_cache_that_has_grown():
    target = tiny_target(max_positions=4096)
    engine = Engine(target, tiny_draft(target), max_batch=2)
    long = engine.submit(Request(prompt(1100), limits=Limits(5), tree=TreeConfig(2, 2, 3)))
    short = engine.submit(Request(prompt(7), limits=Limits(12), tree=TreeConfig(2, 2, 3)))
    engine.step()
    engine.cancel(long)
    while engine.busy:
        engine.step()
    assert short.output_ids == decode(target, None, [prompt(7)], limit=12)[0].output_ids


def test_what_is_not_a_number_in_one_request_does_not_reach_the_next():
    target = tiny_target()
    with torch.no_grad():
        target.model.embed_tokens.weight[50] = torch.inf
    clean = [t for t in prompt(30) if t != 50][:9]
    alone = decode(target, None, [clean], limit=6)[0]
    if 50 in alone.output_ids:
        pytest.skip("the clean text meets the poisoned token")
    engine = Engine(target, None, max_batch=2)
    engine.run([Request([50] * 20, limits=Limits(3)), Request(clean, limits=Limits(3))])
    later = [Request([t for t in prompt(60, 1) if t != 50][:25], limits=Limits(6)), Request(clean, limits=Limits(6))]
    engine.run(later)
    assert later[1].output_ids == alone.output_ids


def test_a_plain_turn_with_a_head_loaded_reuses_its_cache():
    target = tiny_target()
    engine = Engine(target, tiny_draft(target))
    (first,) = engine.run([Request(prompt(9), limits=Limits(6))])
    (second,) = engine.run([Request([*first.prompt_ids, *first.output_ids, 3], limits=Limits(6))])
    assert second.reused_tokens >= 12


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_lossless_on_every_family(family):
    switches = {"qwen2": {"qkv_bias": True, "tied_head": True}, "qwen3": {"qk_norm": True, "head_dim": 16}}
    target = tiny_target(family=family, **switches.get(family, {}))
    draft = tiny_draft(target)
    prompts = [prompt(n, n) for n in (4, 11)]
    plain = decode(target, None, prompts)
    for drafted in (draft, "ngram"):
        got = decode(target, drafted, prompts, tree=TreeConfig(4, 4, 12), max_batch=2)
        assert [r.output_ids for r in got] == [r.output_ids for r in plain]


@pytest.mark.parametrize("packed", [True, False])
def test_a_draft_foresees_what_is_drawn(packed):
    """Where target and draft know next to nothing, the random numbers decide: at other positions, or of other tokens,
    one guess in 24 would be right.
    """
    target = tiny_target(vocab_size=24)
    draft = tiny_draft(target, draft_vocab_size=24)
    with torch.no_grad():
        target.head_weight.mul_(0.05)
        draft.lm_head.weight.mul_(0.05)
    if packed:
        target, draft = target.pack(), draft.pack()
    engine = Engine(target, draft, max_batch=3, context=64)
    requests = [
        Request([7, *range(n)], SamplingConfig(temperature=t, seed=n), Limits(30), TreeConfig(4, 1, 4))
        for n, t in ((4, 1.0), (9, 0.8), (5, 3.0))
    ]
    for r in engine.run(requests):
        assert sum(r.cycle_lengths) / r.cycles > 3


def test_emitted_tokens_follow_the_targets_distribution():
    """End to end at temperature 1 on a 24-token vocabulary: 960 seeds, chi-square at level 1e-3."""
    target = tiny_target(vocab_size=24)
    draft = tiny_draft(target, draft_vocab_size=24)
    p = [3, 7, 1, 20]
    out = target(torch.tensor([p]), torch.arange(4)[None])
    first = torch.softmax(target.logits(out.last_BND[0, -1]), -1)
    # The law of the SECOND token, a drafted one where the tree holds it: summed over all first tokens.
    rows = torch.tensor([[*p, t] for t in range(24)])
    second = torch.softmax(target.logits(target(rows, torch.arange(5).expand(24, 5)).last_BND[:, -1]), -1)
    expected = (first[:, None] * second).sum(0)
    engine = Engine(target, draft, max_batch=16, context=16)
    counts, drafted = torch.zeros(24), 0
    for start in range(0, 960, 16):
        requests = [
            Request(p, SamplingConfig(temperature=1.0, seed=s), Limits(4), TreeConfig(2, 4, 8))
            for s in range(start, start + 16)
        ]
        for r in engine.run(requests):
            counts[r.output_ids[1]] += 1
            drafted += r.origins[1] > 0
    n = counts.sum()
    statistic = float(((counts - n * expected) ** 2 / (n * expected)).sum())
    assert statistic < 49.7  # 23 degrees of freedom, level 1e-3
    assert drafted > 100  # many of these tokens came from the tree


def test_the_head_runs_once_a_cycle_for_the_rows_that_need_logits_and_once_for_the_others(monkeypatch):
    target = tiny_target()
    sampled, greedy = SamplingConfig(temperature=1.0, seed=3), SamplingConfig()
    kinds = [sampled, greedy, sampled, greedy, sampled]
    alone = [
        Engine(target).run([Request([5, 6, 7 + i], kind, Limits(6))])[0].output_ids for i, kind in enumerate(kinds)
    ]
    seen: dict[str, list[int]] = {"logits": [], "best": []}
    for name, calls in seen.items():
        whole = getattr(type(target), name)
        monkeypatch.setattr(
            type(target), name, lambda self, last, w=whole, c=calls: c.append(last.shape[0]) or w(self, last)
        )
    engine = Engine(target, max_batch=5)
    requests = [engine.submit(Request([5, 6, 7 + i], kind, Limits(6))) for i, kind in enumerate(kinds)]
    engine.step()  # prefills, then one cycle of all
    assert seen["best"] == [2]
    assert seen["logits"][-2:] == [2, 3]  # an arg-max of a target that is not packed takes its logits; then the others
    while engine.busy:
        engine.step()
    assert [r.output_ids for r in requests] == alone


def alone(target, draft, request):
    """What the same request gets from an engine of its own."""
    return Engine(target, draft).run([Request(request.prompt_ids, request.sampling, request.limits, request.tree)])[0]


def test_a_long_prompt_holds_nobody_up_for_longer_than_its_part_of_a_step(monkeypatch):
    monkeypatch.setattr("aquiline.decode.engine.PREFILL_CHUNK", 16)
    target = tiny_target()
    draft = tiny_draft(target)
    engine = Engine(target, draft, max_batch=3)
    tree = TreeConfig(3, 2, 5)
    first = engine.submit(Request(prompt(5), limits=Limits(60), tree=tree))
    engine.step()
    long = engine.submit(Request(prompt(100, 1), limits=Limits(10), tree=tree))
    short = engine.submit(Request(prompt(6, 2), limits=Limits(10), tree=tree))
    forward, passes = type(target).forward, []
    monkeypatch.setattr(
        type(target),
        "forward",
        lambda self, ids, *rest, **more: passes.append(ids.shape) or forward(self, ids, *rest, **more),
    )
    steps = 0
    while long.first_token_at is None:
        had, passes[:] = len(first.output_ids), []
        touched = engine.step()
        steps += 1
        assert first in touched
        assert len(first.output_ids) > had
        assert sum(tokens for rows, tokens in passes[:-1]) <= 16  # the last pass is the cycle's
        assert passes[-1] == (1 if steps < 7 else 2, 6)
    assert steps == 7  # 100 tokens
    assert short.first_token_at is None  # a first token is told before another prompt begins
    engine.step()
    assert short.first_token_at is not None
    while engine.busy:
        engine.step()
    for r in (first, long, short):
        single = alone(target, draft, r)
        assert r.output_ids == single.output_ids
        assert r.cycle_lengths == single.cycle_lengths


def stepped(engine, requests):
    """Run to the end; the tokens as they became known, and that the cache kept its bound."""
    seen = {id(r): list(r.output_ids) for r in requests}
    while engine.busy:
        engine.step()
        assert sum(engine.cache.lengths) <= engine.cache.tokens
        assert engine.cache.keys_LGSE.shape[2] <= engine.cache.tokens
        assert engine.drafter is None or engine.drafter.cache.keys_LGSE.shape[2] <= engine.cache.tokens
        for r in requests:
            tokens = seen[id(r)]
            assert r.output_ids[: len(tokens)] == tokens
            tokens += r.output_ids[len(tokens) :]
    return [seen[id(r)] for r in requests]


@pytest.mark.parametrize("tree", [None, TreeConfig(4, 3, 10)], ids=str)
def test_the_youngest_gives_way_when_the_cache_is_full_and_loses_nothing(tree):
    target = tiny_target()
    draft = tiny_draft(target)
    engine = Engine(target, draft, max_batch=4, cache_tokens=100)
    sampling = [SamplingConfig(temperature=0.9, seed=i, frequency_penalty=0.4, top_k=20) for i in range(3)]
    requests = [Request(prompt(12, i), s, Limits(40), tree) for i, s in enumerate([*sampling, SamplingConfig()])]
    for r in requests:
        engine.submit(r)
    streamed = stepped(engine, requests)
    assert requests[0].preempted == 0
    assert requests[3].preempted >= requests[2].preempted >= 1
    for r, tokens in zip(requests, streamed, strict=True):
        single = alone(target, draft, r)
        assert tokens == r.output_ids == single.output_ids
        assert r.cycle_lengths == single.cycle_lengths
        assert r.origins == single.origins
        assert r.finish_reason == "length"


def test_a_cache_with_no_token_to_spare_is_not_outgrown_when_everything_is_accepted():
    target = tiny_target()
    prompts = [prompt(10, seed) for seed in (1, 2)]
    plain = decode(target, None, prompts, limit=30)
    continuation = {tuple(p): r.output_ids for p, r in zip(prompts, plain, strict=True)}
    for tokens in range(24, 48):  # from room for one to room for both
        inner = EagleDrafter(tiny_draft(target), target.model.embed_tokens, 2, 256, tokens)
        engine = Engine(target, Scripted(inner, continuation, [([-1, 0, 1, 2, 3], [0, 1, 2, 3, 4])]), 2, None, tokens)
        requests = [Request(p, limits=Limits(15), tree=TreeConfig(5, 1, 5)) for p in prompts]
        engine.run(requests)  # the cache asserts its bound
        assert [r.output_ids for r in requests] == [r.output_ids[:15] for r in plain]
        assert all(max(r.cycle_lengths) == 6 for r in requests)


def test_a_request_that_can_never_fit_is_refused():
    engine = Engine(tiny_target(), max_batch=4, context=60, cache_tokens=40)
    with pytest.raises(UserError, match="prompt of 30 tokens and a reply of up to 12 do not fit into a cache of 40"):
        engine.submit(Request(prompt(30), limits=Limits(12)))
    with pytest.raises(UserError, match="a reply of up to 10 do"):  # no more than the context has
        engine.submit(Request(prompt(50), limits=Limits(500)))
    with pytest.raises(UserError, match="cache_tokens 0"):
        Engine(tiny_target(), cache_tokens=0)
    fits, none = Request(prompt(30), limits=Limits(11)), Request(prompt(80), limits=Limits(11))
    engine.run([fits, none])  # the second has no place in the context, which is no matter of the cache
    assert (fits.finish_reason, none.finish_reason) == ("length", "context")


def test_first_come_first_served_even_if_the_first_needs_much_room():
    target = tiny_target()
    engine = Engine(target, None, max_batch=4, cache_tokens=100)
    order = []

    def submit(n, seed, limit):
        return engine.submit(Request(prompt(n, seed), limits=Limits(limit)))

    running = [submit(20, 0, 30), submit(20, 1, 30)]
    engine.step()
    long = submit(60, 2, 5)
    shorts = [submit(3, 3 + i, 2) for i in range(20)]
    while engine.busy:
        order += [r for r in engine.step() if r.finish_reason is not None]
        if long.first_token_at is None:
            assert all(r.first_token_at is None for r in shorts)
    assert long.preempted == 0
    assert order[:2] == running
    started = [r.first_token_at for r in (long, *shorts)]
    assert started == sorted(started)


@pytest.mark.parametrize("packed", [False, True])
def test_what_a_request_gets_does_not_depend_on_the_others(packed, monkeypatch):
    """Other lengths, settings, trees; a full cache, shared prefixes, prompts in parts, and two that are cancelled."""
    monkeypatch.setattr("aquiline.decode.engine.PREFILL_CHUNK", 20)
    target = tiny_target()
    draft = tiny_draft(target)
    if packed:  # where the kernel runs
        target.pack()
        draft.pack()
    kinds = [
        SamplingConfig(),
        SamplingConfig(temperature=0.8, seed=1, repetition_penalty=1.3),
        SamplingConfig(temperature=1.0, seed=2, top_p=0.9),
        SamplingConfig(logit_bias=((5, -100.0), (7, 1.5))),
        SamplingConfig(temperature=0.7, seed=3, presence_penalty=0.5),
    ]
    trees = [TreeConfig(6, 8, 60), None, TreeConfig(3, 3, 7), TreeConfig(5, 1, 5)]
    prompts = [prompt(n, i) for i, n in enumerate((3, 47, 9, 30, 18, 5, 64))]
    prompts.append([*prompts[3][:25], *prompt(6, 9)])
    requests = [
        Request(p, kinds[i % 5], Limits(20 + 7 * (i % 4), frozenset({11})), trees[i % 4]) for i, p in enumerate(prompts)
    ]
    singles = [alone(target, draft, r) for r in requests]
    engine = Engine(target, draft, max_batch=6, cache_tokens=170)
    for r in requests:
        engine.submit(r)
    while not any(r.preempted for r in requests):
        engine.step()
    left = [engine._running[1][0], engine._waiting[0][0]]
    assert left[1].preempted
    for r in left:
        assert r.output_ids
        engine.cancel(r)
    stepped(engine, requests)
    assert sum(r.preempted for r in requests if r not in left) > 0
    assert any(r.reused_tokens for r in requests)
    for r, single in zip(requests, singles, strict=True):
        if r in left:
            assert r.finish_reason == "cancelled"
            assert r.output_ids == single.output_ids[: len(r.output_ids)]
        else:
            assert r.output_ids == single.output_ids
            assert r.cycle_lengths == single.cycle_lengths
            assert r.finish_reason == single.finish_reason


def test_nothing_grows_over_2000_requests():
    target = tiny_target(num_layers=3, capture_after=(0, 1, 2), hidden_size=16, intermediate_size=16, head_dim=4).pack()
    draft = tiny_draft(target).pack()
    engine = Engine(target, draft, max_batch=8, cache_tokens=60)
    alive: weakref.WeakSet[Request] = weakref.WeakSet()
    measured, preempted = {}, 0
    for number in range(20, 2001, 20):
        sampling = SamplingConfig(temperature=1.0, seed=number, presence_penalty=0.1)
        tree = None if number % 40 else TreeConfig(2, 2, 3)
        requests = [Request(prompt(4 + i % 3, number + i), sampling, Limits(4), tree) for i in range(20)]
        alive.update(requests)
        for r in requests:
            engine.submit(r)
        engine.step()
        engine.cancel(requests[2])
        while engine.busy:
            engine.step()
        preempted += sum(r.preempted for r in requests)
        if number in (200, 2000):
            del requests, r
            engine.forget()  # what ended rows hold is bounded, and another thing each time
            gc.collect()
            tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
            held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
            measured[number] = len(tensors), sum(held.values()), len(alive)
    assert engine.cache.keys_LGSE.shape[2] == engine.drafter.cache.keys_LGSE.shape[2] == 60
    assert preempted > 20
    assert measured[200] == measured[2000]
    assert measured[2000][2] == 0
