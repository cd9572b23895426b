"""Replies in JSON: what may follow, the same text with and without a draft, logprobs beside it."""

import json

import pytest
import torch

from aquiline.config import Limits, SamplingConfig, TreeConfig, UserError
from aquiline.data.grammar import Grammars
from aquiline.decode.engine import Engine, Request
from aquiline.decode.sampling import Sampler
from aquiline.decode.tree import Tree
from tests.conftest import tiny_draft, tiny_target
from tests.tiny_chat import byte_chat

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT = byte_chat()
END = next(iter(CHAT.end_of_turn_ids))
VOCAB = 270  # the model's is larger than the tokenizer's


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(CHAT, CHAT.end_of_turn_ids, VOCAB)


def follow(grammar, text: str) -> set[str]:
    """What may come behind `text`, as text; the end as ""."""
    return {CHAT.text([i]) for i in grammar.allowed(CHAT.encode(text)).nonzero()[:, 0].tolist()}


def test_what_may_follow(grammars):
    grammar = grammars.json(SCHEMA)
    assert {"{"} <= follow(grammar, "") <= {"{", " ", "\n", "\t", "\r", "  ", "\n\n"}
    assert follow(grammar, '{"name": "') == {"a", "b"}
    assert follow(grammar, '{"name": "b') == {"o"}  # it goes on
    assert follow(grammar, '{"name": "a') == {"n"}  # and back to another path
    grammar.commit(CHAT.encode('{"name": "ann", "age": '))
    assert follow(grammar, "1") >= set("0123456789}")
    assert follow(grammar, "10") == {"}", " ", "\n", "\t", "\r", "  ", "\n\n"}  # 100 is too much
    assert follow(grammar, "7}") == {""}  # nothing but the end
    assert not grammar.allowed([])[END]
    assert grammar.allowed(CHAT.encode("7}")).shape == (VOCAB,)
    assert grammar.error is None


def test_spaces_come_to_an_end(grammars):
    grammar = grammars.json()
    assert " " in follow(grammar, "{" + " " * 19)
    assert " " not in follow(grammar, "{" + " " * 20)


def test_a_matcher_in_error_ends_the_reply(grammars):
    grammar = grammars.json(SCHEMA)
    grammar.commit(CHAT.encode("no"))
    assert grammar.allowed([]).nonzero()[:, 0].tolist() == [END]
    assert grammar.error
    assert "\n" not in grammar.error  # what follows is the library's state


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [TreeConfig(3, 1, 3), TreeConfig(4, 4, 12)])
def test_json_with_and_without_a_draft(grammars, temperature, tree):
    """A random model obeys too, and its text is the same, whatever is drafted."""
    target = tiny_target(vocab_size=VOCAB)
    draft = tiny_draft(target, draft_vocab_size=200).requires_grad_(False)

    def replies(tree):
        requests = [
            Request(
                CHAT.encode("hi " * (1 + seed)), SamplingConfig(temperature=temperature, seed=seed),
                Limits(200, CHAT.end_of_turn_ids), tree, grammar=grammars.json(SCHEMA), logprobs=3,
            )
            for seed in range(3)
        ]  # fmt: skip
        return Engine(target, draft, max_batch=3).run(requests)

    plain, speculative = replies(None), replies(tree)
    for a, b in zip(plain, speculative, strict=True):
        assert a.finish_reason == "stop"
        assert json.loads(CHAT.text(a.output_ids)).keys() == {"name", "age"}
        assert a.output_ids == b.output_ids
        assert len(b.output_logprobs) == len(b.output_ids)
        assert [x.chosen for x in a.output_logprobs] == pytest.approx([x.chosen for x in b.output_logprobs], abs=1e-4)
    assert any(b.cycles for b in speculative)


def test_logprobs_are_those_of_the_raw_logits():
    target = tiny_target()
    draft = tiny_draft(target).requires_grad_(False)
    sampling = SamplingConfig(temperature=0.5, top_k=3, presence_penalty=0.3, seed=5)
    for tree, count in ((None, 4), (TreeConfig(4, 4, 12), 4), (TreeConfig(4, 4, 12), 0)):
        request = Request([5, 6, 7], sampling, Limits(20), tree, logprobs=count)
        Engine(target, draft).run([request])
        ids = torch.tensor([[*request.prompt_ids, *request.output_ids]])
        logits = target.logits(target(ids, torch.arange(ids.shape[1])[None]).last_BND[0, 2:-1])
        expected = logits.log_softmax(-1)
        assert len(request.output_logprobs) == len(request.output_ids) == len(expected)
        for row, token, found in zip(expected, request.output_ids, request.output_logprobs, strict=True):
            assert found.chosen == pytest.approx(float(row[token]), abs=1e-4)
            assert [i for i, _ in found.top] == row.topk(count).indices.tolist()
            assert [p for _, p in found.top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)


def test_logprobs_do_not_change_greedy_text_and_are_absent_unless_wanted():
    target = tiny_target()
    requests = [Request([5, 6, 7], limits=Limits(20)), Request([5, 6, 7], limits=Limits(20), logprobs=0)]
    Engine(target, max_batch=2).run(requests)
    assert requests[0].output_ids == requests[1].output_ids
    assert requests[0].output_logprobs == []


def test_the_last_tree_is_the_one_of_the_last_step():
    target = tiny_target()
    draft = tiny_draft(target).requires_grad_(False)
    engine = Engine(target, draft)
    request = engine.submit(Request([5, 6, 7], limits=Limits(12), tree=TreeConfig(2, 2, 5)))
    seen = 0
    while request.finish_reason is None:
        before = request.cycles
        engine.step()
        if request.cycles > before:
            tree, path = request.last_tree
            assert [tree.tokens[n] for n in path] == request.output_ids[-len(path) - 1 : -1]
            seen += 1
    assert seen == request.cycles > 0
    assert request.last_tree is None or request.trees[0, 0] == 0  # a plain step at the end has none


class Foreseeing:
    """Drafts what is known to come, as a chain."""

    reads_aux = False

    def __init__(self, text, depth):
        self.text, self.depth = text, depth

    def draft(self, rows, chooser=None):
        done = len(rows[0].known) - 3
        return [Tree.from_paths([self.text[done : done + self.depth]])]

    def copy(self, source, destination, length): ...

    def truncate(self, slot, length): ...

    def length(self, slot):
        return 0


def test_an_end_that_was_drafted_is_no_error(grammars):
    target = tiny_target(vocab_size=VOCAB)

    def reply(drafter, tree):
        grammar = grammars.json(SCHEMA)
        request = Request([5, 6, 7], limits=Limits(200, CHAT.end_of_turn_ids), tree=tree, grammar=grammar)
        Engine(target, drafter).run([request])
        assert request.finish_reason == "stop"
        assert grammar.error is None
        return request

    plain = reply(None, None)
    drafted = [reply(Foreseeing(plain.output_ids, n), TreeConfig(n, 1, n)) for n in (2, 3, 4)]
    assert all(d.output_ids == plain.output_ids for d in drafted)
    assert plain.output_ids[-1] == END
    assert any(d.origins[-1] > 0 for d in drafted)


class OnlyThree:
    def allowed(self, path_tokens):
        return torch.arange(8) == 3

    def commit(self, tokens):
        pass


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_that_leave_nothing_yield_to_the_grammar(temperature):
    logits_V = torch.arange(8.0)
    sampling = SamplingConfig(temperature=temperature, logit_bias=((3, -100.0),))
    assert Sampler(sampling, [], 8, grammar=OnlyThree()).choose(logits_V, 0) == 3


def test_schemas_that_cannot_be_enforced_are_refused(grammars):
    with pytest.raises(UserError, match="objct"):
        grammars.json({"type": "objct"})
    for beyond in ({"type": "integer", "maximum": 2**64}, {"enum": ["\ud800"]}):
        with pytest.raises(UserError, match="cannot be enforced"):
            grammars.json(beyond)
    with pytest.raises(UserError, match="no end-of-turn"):
        Grammars(CHAT, frozenset(), VOCAB)
