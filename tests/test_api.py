"""The Python API on tiny models on disk: generate, stream, conversations, what load refuses, what is warned of."""

import dataclasses
import itertools
import json
import warnings

import pytest
import torch

from aquiline import api
from aquiline.config import DEFAULT_TREE, AquilineWarning, Limits, SamplingConfig, UserError
from aquiline.decode.engine import Engine, Request
from aquiline.files import checkpoint
from aquiline.files.checkpoint import DraftInfo
from tests.conftest import tiny_draft, tiny_target
from tests.test_cost import DEAR, ready
from tests.tiny_chat import THINKING, assistant, byte_chat, user

# The random heads of these tests accept next to nothing; that this is said has its own test.
pytestmark = pytest.mark.filterwarnings("ignore:the draft's tokens are hardly ever accepted")

END = 261  # <|im_end|> of byte_chat, the last of its tokens


def make_target(folder, seed=0, chat=None, **changes):
    """A tiny target and its tokenizer on disk; returns the target as it is loaded back."""
    sizes = {"vocab_size": END + 1, "eos_token_ids": (END,), "max_positions": 512} | changes
    checkpoint.export_target(tiny_target(seed, **sizes), chat or byte_chat(), folder)
    return checkpoint.load_target(folder, torch.float32)


def make_draft(folder, target, zeroed=False, chat=None, **changes):
    """A random head for it, which accepts next to nothing."""
    draft = tiny_draft(target, **{"draft_vocab_size": 200, "max_positions": 512} | changes)
    if zeroed:
        for p in draft.parameters():
            p.data.zero_()
    chat = chat or byte_chat()
    info = DraftInfo.of(target, "tiny", chat.fingerprint(), chat.template_fingerprint())
    checkpoint.save_draft(draft, folder, info, {"note": "random"}, torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make_draft(root / "draft", make_target(root / "target"))
    return root


def load(folders, draft="draft") -> api.Model:
    return api.load(folders / "target", folders / "draft" if draft == "draft" else draft, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def model(folders):
    return load(folders)


def test_generate_is_the_targets_own_text(folders, model):
    target = checkpoint.load_target(folders / "target", torch.float32)
    ids = byte_chat().render([user("hi there")])
    reference = Request(ids, limits=Limits(40, frozenset({END})))
    Engine(target).run([reference])
    for draft in ("draft", "ngram", "none"):
        result = load(folders, draft).generate("hi there", max_new_tokens=40)
        assert result.token_ids == reference.output_ids
        assert result.text == byte_chat().text(reference.output_ids)
        assert result.finish_reason == reference.finish_reason
        assert (result.prompt_tokens, len(result.origins)) == (len(ids), result.generated_tokens)
        assert result.tokens_per_second > 0
        assert result.decode_tokens_per_second == (result.generated_tokens - 1) / result.decode_seconds
        if draft == "none":
            assert (result.tree, result.tau, result.cycles) == (None, None, 0)
        else:
            assert result.tree == str(DEFAULT_TREE)
            assert (result.tau is None) == (result.cycles == 0)  # whether any tree pays depends on the machine
    assert model.target.dtype == torch.float32
    assert model.dtype == "float32"


def test_prompts_are_a_text_a_conversation_or_ids(model):
    messages = [user("a"), assistant("b"), user("c")]
    assert model.prompt_ids("a") == byte_chat().render([user("a")])
    assert model.prompt_ids(messages) == byte_chat().render(messages)
    assert model.prompt_ids([5, 6]) == [5, 6]
    with pytest.raises(UserError, match="messages is empty"):
        model.prompt_ids([])


@pytest.mark.parametrize(
    "settings",
    [{}, {"tree": "5:1:5"}]
    + [{"temperature": 1.0, "seed": 3, "tree": "3:2:6"} | more for more in ({}, {"top_p": 0.9})],
)
def test_the_stream_gives_what_generate_gives(model, settings):
    whole = model.generate("hi", max_new_tokens=30, **settings)
    plain = model.generate("hi", max_new_tokens=30, plain=True, **{k: v for k, v in settings.items() if k != "tree"})
    deltas = list(model.stream("hi", max_new_tokens=30, **settings))
    assert "".join(d.text for d in deltas) == whole.text == plain.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids == plain.token_ids
    origins = [o for d in deltas for o in d.origins]
    assert len(origins) == len(whole.origins)
    if "tree" in settings:  # auto goes by time, too
        assert origins == whole.origins
    assert deltas[-1].result is not None
    assert deltas[-1].result.text == whole.text
    assert all(d.result is None for d in deltas[:-1])
    assert whole.tree == settings.get("tree", str(DEFAULT_TREE))


def test_ends(model):
    ended = model.generate("hi", logit_bias=((END, 100.0),))
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([END], "", "stop")
    assert ended.decode_tokens_per_second is None
    none = model.generate("hi", max_new_tokens=0)
    assert (none.token_ids, none.text, none.finish_reason, none.tau) == ([], "", "length", None)
    assert none.tokens_per_second == 0
    assert [d.result.finish_reason for d in model.stream("hi", max_new_tokens=0)] == ["length"]
    full = model.generate("x" * 600)
    assert (full.token_ids, full.finish_reason) == ([], "context")
    text = model.generate("hi", max_new_tokens=40).text
    stop = text[10:12]
    cut = model.generate("hi", max_new_tokens=40, stop=[stop])
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")


def test_what_is_refused(folders, model):
    with pytest.raises(UserError, match="tree 3:3:3 was given without a draft"):
        load(folders, "none").generate("hi", tree="3:3:3")
    with pytest.raises(UserError, match="temperature"):
        model.generate("hi", temperature=-1)
    with pytest.raises(TypeError, match="temprature"):
        model.generate("hi", temprature=1)
    with pytest.raises(UserError, match="dtype 'int8' is not supported; expected one of bfloat16, float16, float32"):
        api.load(folders / "target", "none", dtype="int8")
    for device in ("tpu", "nonsense", "cuda:99", "meta"):
        with pytest.raises(UserError, match=f"device '{device}'"):
            api.load(folders / "target", "none", device=device)
    with pytest.raises(UserError, match="no-such-draft does not exist"):
        api.load(folders / "target", "no-such-draft")


def test_the_default_draft_on_another_target_is_refused_with_what_to_do(folders):
    with pytest.raises(
        UserError, match=r"^the default draft belongs to the default target: give --draft .*hidden size"
    ):
        api.load(folders / "target", dtype="float32")


def test_template_arguments_reach_every_prompt_and_are_compared_with_those_of_the_head(tmp_path):
    chat, off = byte_chat(THINKING), {"enable_thinking": False}
    make_draft(tmp_path / "draft", make_target(tmp_path / "target", chat=chat), chat=chat)

    def load(**more) -> api.Model:
        return api.load(tmp_path / "target", tmp_path / "draft", dtype="float32", **more)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load().prompt_ids("a") == chat.render([user("a")])  # this head does not tell
        record = {"data": {"template_kwargs": [off]}}
        (tmp_path / "draft" / "run.json").write_text(json.dumps(record))
        model = load(template_kwargs=off)
    prompt = chat.render([user("a")], enable_thinking=False)
    assert prompt != chat.render([user("a")])
    assert model.prompt_ids("a") == model.prompt_ids([user("a")]) == prompt
    with pytest.warns(AquilineWarning, match=r"arguments \{'enable_thinking': False\}, and here they are \{\}"):
        load()
    with pytest.raises(UserError, match="does not know the setting 'thinking'"):
        load(template_kwargs={"thinking": False} | off).prompt_ids("a")


def test_the_default_dtype_is_the_weights_own_where_that_is_fast(folders, tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    for fast, kernel in itertools.product((True, False), repeat=2):
        monkeypatch.setattr(api, "fast_bf16", lambda kind, fast=fast: fast)
        monkeypatch.setattr(api, "usable", lambda dtype, device, kernel=kernel: kernel)
        for trains in (True, False):
            expected = torch.bfloat16 if fast or (kernel and not trains) else torch.float32
            assert api.pick_dtype(None, folders / "target", cpu, trains=trains) == expected
            assert api.pick_dtype("bfloat16", folders / "target", cpu, trains=trains) == torch.bfloat16
    monkeypatch.setattr(api, "fast_bf16", lambda kind: True)
    for stored in ("float32", "float16"):  # float16 is not fast on a CPU
        (tmp_path / "config.json").write_text(f'{{"torch_dtype": "{stored}"}}')
        assert api.pick_dtype(None, tmp_path, cpu) == torch.float32


def test_a_conversation_reuses_its_cache_and_says_what_a_fresh_run_says(folders, model):
    talk = api.Conversation(model, system="Be brief.", max_new_tokens=12, temperature=0.7, seed=5)
    messages = [{"role": "system", "content": "Be brief."}]
    for turn, text in enumerate(("hi", "and then?", "why")):
        reply = "".join(d.text for d in talk.say(text))
        messages.append(user(text))
        fresh = model.generate(messages, max_new_tokens=12, temperature=0.7, seed=5)
        assert reply == fresh.text
        assert (talk.reused_tokens > 0) == (turn > 0)
        messages.append(assistant(reply))
    assert talk.messages == messages[1:]
    for _ in talk.say("left early"):
        break
    assert talk.messages == messages[1:]  # no trace, and the only slot is free again
    assert "".join(d.text for d in talk.say("once more"))
    assert list(talk.say("x" * 600))[-1].result.finish_reason == "context"
    assert len(talk.messages) == 8
    talk.reset()
    assert (
        "".join(d.text for d in talk.say("hi"))
        == model.generate([messages[0], user("hi")], max_new_tokens=12, temperature=0.7, seed=5).text
    )
    assert talk.reused_tokens == 0


def test_a_turn_that_fails_does_not_block_the_next(model):
    talk = api.Conversation(model, max_new_tokens=4)
    list(talk.say("hi"))
    every = tuple((i, -100.0) for i in range(END + 1))
    talk._settings = {"max_new_tokens": 4, "logit_bias": every}
    with pytest.raises(UserError, match="bans every token"):
        list(talk.say("b"))
    talk._settings = {"max_new_tokens": 4}
    assert list(talk.say("b"))[-1].result.generated_tokens == 4


def test_a_draft_that_never_helps_is_said_once(folders, tmp_path):
    target = checkpoint.load_target(folders / "target", torch.float32)
    make_draft(tmp_path, target, zeroed=True)
    model = api.load(folders / "target", tmp_path, dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate("hi", max_new_tokens=20, tree="4:4:12")  # too few cycles to judge by
    with pytest.warns(AquilineWarning, match=r"hardly ever accepted \(tau 1\.0\d over \d+ cycles\)"):
        model.generate("hi", max_new_tokens=40, tree="4:4:12")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate("hi", max_new_tokens=40, tree="4:4:12")
        load(folders, "ngram").generate("hi", max_new_tokens=60)  # prompt lookup may find nothing, and says nothing


def test_that_no_tree_ever_pays_is_said_once(folders, tmp_path):
    target = checkpoint.load_target(folders / "target", torch.float32)
    make_draft(tmp_path, target, zeroed=True)
    model = api.load(folders / "target", tmp_path, dtype="float32")
    ready(model.engine, DEAR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate("hi", max_new_tokens=20, tree="auto")
    with pytest.warns(AquilineWarning, match=r"in \d\d of \d\d steps no drafted tree was expected to pay"):
        model.generate("hi", max_new_tokens=80, tree="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate("hi", max_new_tokens=80, tree="auto")


def test_decoding_past_the_trained_length_is_said_once(folders, tmp_path):
    target = checkpoint.load_target(folders / "target", torch.float32)
    make_draft(tmp_path, target, trained_length=64)
    model = api.load(folders / "target", tmp_path, dtype="float32")
    with pytest.warns(AquilineWarning, match="past the 64 tokens the draft was trained to"):
        model.generate("x" * 70, max_new_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate("x" * 70, max_new_tokens=3)
        model.generate("x" * 70, max_new_tokens=3, plain=True)


def test_settings_reach_the_request(model):
    request = model.request("hi", max_new_tokens=7, stop=["no"], tree="2:1:2", temperature=0.5, seed=9, top_k=4)
    assert request.sampling == dataclasses.replace(SamplingConfig(), temperature=0.5, seed=9, top_k=4)
    assert request.limits == Limits(7, frozenset({END}), ("no",))
    assert str(request.tree) == "2:1:2"
    assert model.request("hi", plain=True).tree is None
