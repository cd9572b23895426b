"""The server as OpenAI's own client sees it, unmodified: replies, streams, settings, logprobs, JSON, errors."""

import http.client
import json
import re

import openai
import pytest
import torch

from aquiline.config import ServeConfig, TreeConfig, UserError
from aquiline.data.chat import Chat
from aquiline.files import checkpoint
from aquiline.serve import server
from tests.serving import WAIT, Served, serving
from tests.test_api import END, folders, load  # noqa: F401 (a fixture)
from tests.tiny_chat import CHATML, THINKING, assistant, byte_chat, user, wrap

pytestmark = pytest.mark.filterwarnings("ignore:the draft's tokens are hardly ever accepted")

TREE = TreeConfig(3, 4, 10)  # not auto: what pays depends on the machine
HI = [user("hi there")]
GREEDY = {"messages": HI, "temperature": 0}  # without it, a reply may by chance end with its first token
CONTEXT = 128
KEY = "the key of these tests"


@pytest.fixture(scope="module")
def no_cache():
    """As conftest has it, for what lives longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aquiline.decode.engine.cache_folder", lambda: None)
        for module in ("asked", "loop"):
            patch.setattr(f"aquiline.serve.{module}.DEFAULT_TREE", TREE)
        yield


@pytest.fixture(scope="module")
def served(folders, no_cache):  # noqa: F811
    with serving(load(folders), context=CONTEXT) as running:
        yield running


@pytest.fixture(scope="module")
def looked_up(folders, no_cache):  # noqa: F811
    """With prompt lookup, whose guesses are accepted in the repetitive texts of a random model."""
    with serving(load(folders, "ngram")) as running:
        yield running


@pytest.fixture(scope="module")
def client(served):
    return served.client()


@pytest.fixture(scope="module")
def model(folders):  # noqa: F811
    """Another one than is served."""
    return load(folders)


def ask(client, messages=HI, **settings):
    settings = {"model": "target", "temperature": 0, "max_tokens": 24} | settings
    return client.chat.completions.create(messages=messages, **settings)


def text_of(answer, index=0) -> str:
    return answer.choices[index].message.content


def joined(chunks, index=0) -> str:
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)


def post(served: Served, body, path="/v1/chat/completions", method="POST", **headers):
    """(status, headers, body) of a bare request."""
    connection = http.client.HTTPConnection(served.address, timeout=WAIT)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def error_of(served: Served, body, path="/v1/chat/completions", **more):
    """(status, error) of a request that is refused; its form is checked."""
    status, headers, data = post(served, body, path, **more)
    assert headers["Content-Type"] == "application/json"
    error = json.loads(data)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    return status, error


def test_a_reply_is_what_generate_gives(client, model):
    for settings in ({}, {"speculative": False}, {"max_nodes": 2}, {"max_nodes": 0}):
        answer = ask(client, extra_body=settings)
        result = model.generate(HI, max_new_tokens=24, tree=TREE)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", result.text)
        assert (choice.finish_reason, answer.object, answer.model) == ("length", "chat.completion", "target")
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (result.prompt_tokens, 24)
        assert usage.total_tokens == usage.prompt_tokens + 24
        figures = usage.aquiline
        assert (figures["cycles"] > 0) == (settings in ({}, {"max_nodes": 2}))
        assert figures["drafted"] <= settings.get("max_nodes", 10) * figures["cycles"]
        assert figures["plain_steps"] + figures["cycles"] > 0
        assert 0 < figures["first_token_seconds"] <= figures["seconds"]
        if not settings:
            assert (figures["cycles"], figures["tau"]) == (result.cycles, result.tau)
            assert figures["accepted"] == sum(origin > 0 for origin in result.origins)


def test_a_stream_is_the_reply_in_parts(client, model):
    result = model.generate(HI, max_new_tokens=24, tree=TREE)
    chunks = list(ask(client, stream=True))
    assert joined(chunks) == result.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)
    told = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert told[-1].choices == []
    assert told[-1].usage.completion_tokens == 24
    assert told[-1].usage.aquiline["cycles"] == result.cycles
    assert joined(told) == result.text
    assert len(chunks) > 3


def test_a_stream_as_it_is_sent(served):
    body = {"messages": HI, "max_tokens": 4, "temperature": 0, "stream": True}
    status, headers, data = post(served, body)
    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    lines = data.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert all("usage" not in chunk for chunk in chunks)
    with_usage = post(served, body | {"stream_options": {"include_usage": True}})[2].decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in with_usage[:-2]]
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_stop_strings_end_the_reply_and_are_not_shown(client, model):
    whole = model.generate(HI, max_new_tokens=24).text
    stop = whole[9:11]
    expected = whole[: whole.index(stop)]
    began = whole[3:5] + "but not so"  # held back until it is seen not to be the stop string
    for stops, wanted, reason in (
        (stop, expected, "stop"),
        ([stop], expected, "stop"),
        ([began, stop], expected, "stop"),
        (began, whole, "length"),
    ):
        answer = ask(client, stop=stops)
        assert (text_of(answer), answer.choices[0].finish_reason) == (wanted, reason)
        chunks = list(ask(client, stop=stops, stream=True, extra_body={"token_origins": True}))
        assert joined(chunks) == wanted
        assert chunks[-1].choices[0].finish_reason == reason
        shown = said = ""
        for chunk in chunks:
            (choice,) = chunk.choices
            shown += "".join(token["text"] for token in choice.aquiline["tokens"])
            said += choice.delta.content or ""
            assert said.startswith(shown)  # of a token that may go on into a stop string a part may be visible
        assert shown == said


def test_an_end_of_turn_token_ends_it_too(client, model):
    bias = {str(END): 100}
    answer = ask(client, logit_bias=bias, logprobs=True, extra_body={"token_origins": True})
    assert (text_of(answer), answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].aquiline["tokens"] == [{"id": END, "text": "", "origin": 0}]
    assert answer.choices[0].logprobs.content == []


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 0, "presence_penalty": 1.5},
    {"temperature": 0, "frequency_penalty": -1.5},
    {"temperature": 0, "repetition_penalty": 1.8},
    {"temperature": 0, "logit_bias": {"3": -100, "7": 40.5}},
]
OURS = ("top_k", "min_p", "repetition_penalty")  # not OpenAI's


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: list(s)[-1])
def test_sampling_is_that_of_generate(client, model, settings):
    theirs = {k: v for k, v in settings.items() if k not in OURS}
    ours = {k: v for k, v in settings.items() if k in OURS}
    bias = tuple((int(k), v) for k, v in settings.get("logit_bias", {}).items())
    plain = model.generate(HI, max_new_tokens=24).text
    expected = model.generate(HI, max_new_tokens=24, seed=11, **settings | {"logit_bias": bias}).text
    assert expected != plain  # the setting does something here
    for stream in (False, True):
        answer = ask(client, seed=11, stream=stream, extra_body=ours, **theirs)
        assert (joined(list(answer)) if stream else text_of(answer)) == expected


def test_choices_have_seeds_of_their_own_and_without_a_seed_any(client, model):
    texts = [model.generate(HI, max_new_tokens=24, temperature=1.0, seed=5 + n).text for n in range(3)]
    answer = ask(client, n=3, seed=5, temperature=None)  # OpenAI's default is 1
    assert [text_of(answer, n) for n in range(3)] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 72
    assert answer.usage.prompt_tokens == len(model.prompt_ids(HI))
    chunks = list(ask(client, n=3, seed=5, temperature=1, stream=True))
    assert [joined(chunks, n) for n in range(3)] == texts
    finished = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(finished) == [0, 1, 2]
    assert len({text_of(ask(client, temperature=1)) for _ in range(4)}) > 1


def test_limits_of_a_reply(client, model):
    assert ask(client, max_tokens=None, max_completion_tokens=7).usage.completion_tokens == 7
    answer = ask(client, max_tokens=None)  # as far as the context goes
    result = model.generate(HI, max_new_tokens=CONTEXT - len(model.prompt_ids(HI)))
    assert (text_of(answer), answer.choices[0].finish_reason) == (result.text, "length")
    assert answer.usage.total_tokens == CONTEXT


def test_logprobs_are_the_targets(client, model, folders):  # noqa: F811
    target = checkpoint.load_target(folders / "target", torch.float32)
    ids = model.prompt_ids(HI)
    result = model.generate(HI, max_new_tokens=24, temperature=1.0, seed=3)
    known = torch.tensor([ids + result.token_ids])
    out = target(known, torch.arange(known.shape[1])[None], None, target.new_cache(1, 512), [0])
    logprobs_NV = target.logits(out.last_BND[0]).log_softmax(-1)[len(ids) - 1 : -1]
    settings = {"temperature": 1.0, "seed": 3, "logprobs": True, "top_logprobs": 3}
    content = ask(client, **settings).choices[0].logprobs.content
    chat = byte_chat()
    names = [chat.token_bytes(i) for i in range(END + 1)]
    assert len(content) == 24
    for entry, token, logprobs_V in zip(content, result.token_ids, logprobs_NV, strict=True):
        assert bytes(entry.bytes) == names[token]
        assert entry.token == names[token].decode(errors="replace")
        assert entry.logprob == pytest.approx(float(logprobs_V[token]), abs=1e-4)
        best = logprobs_V.topk(3)
        assert [bytes(top.bytes) for top in entry.top_logprobs] == [names[i] for i in best.indices.tolist()]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
    streamed = [e for c in ask(client, **settings, stream=True) for e in c.choices[0].logprobs.content]
    assert streamed == content
    alone = ask(client, **settings | {"top_logprobs": None}).choices[0].logprobs.content
    assert [(e.logprob, e.top_logprobs) for e in alone] == [(e.logprob, []) for e in content]


def test_bytes_of_tokens(model):
    chat = byte_chat()
    text = "zażółć 😀\n hi"
    assert b"".join(map(chat.token_bytes, chat.encode(text))) == text.encode()
    assert chat.token_bytes(END) == b"<|im_end|>"
    assert chat.token_bytes(10**6) == b""


def test_bytes_of_tokens_of_a_tokenizer_of_pieces():
    from tokenizers import Tokenizer, decoders, models

    pieces = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), "▁the", "a"]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    chat: Chat = wrap(backend, ("<s>",), CHATML)
    assert [chat.token_bytes(i) for i in (0, 1, 256, 257, 258, 259)] == [
        b"<unk>", b"\x00", b"\xff", b" the", b"a", b"<s>",
    ]  # fmt: skip


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def in_form(schema):
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}


def test_json_of_a_schema(client):
    for settings in ({"temperature": 0}, {"temperature": 1.5, "seed": 1}):
        answer = ask(client, response_format=in_form(SCHEMA), max_tokens=None, **settings)
        value = json.loads(text_of(answer))
        assert value["name"] in ("ann", "bo")
        assert 0 <= value["age"] <= 99
        assert answer.choices[0].finish_reason == "stop"
        plain = ask(
            client, response_format=in_form(SCHEMA), extra_body={"speculative": False}, max_tokens=None, **settings
        )
        assert text_of(plain) == text_of(answer)
    assert text_of(ask(client, response_format={"type": "json_object"}, max_tokens=12)).lstrip()[0] == "{"
    both = ask(client, response_format=in_form(SCHEMA), max_tokens=None, n=2, temperature=1, seed=4)
    assert all(json.loads(text_of(both, n))["name"] in ("ann", "bo") for n in range(2))
    alone = [ask(client, response_format=in_form(SCHEMA), max_tokens=None, temperature=1, seed=4 + n) for n in range(2)]
    assert [text_of(both, n) for n in range(2)] == list(map(text_of, alone))  # they share no state
    assert text_of(ask(client, response_format={"type": "text"})) == text_of(ask(client))


def test_a_character_is_never_cut(client):
    letters = "zażółć 😀 日本語"
    chunks = list(ask(client, response_format=in_form({"const": letters}), max_tokens=None, stream=True))
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert json.loads("".join(parts)) == letters
    assert "�" not in "".join(parts)
    assert "😀" in "".join(parts)
    assert len(parts) > 10


def test_origins_say_where_tokens_came_from(looked_up, folders):  # noqa: F811
    messages = [user("aaaa bbbb aaaa bbbb aaaa")]
    result = load(folders, "ngram").generate(messages, max_new_tokens=60, tree=TREE)
    assert max(result.origins) > 1
    asked = {"max_tokens": 60, "extra_body": {"token_origins": True}}
    chunks = list(ask(looked_up.client(), messages, stream=True, **asked))
    tokens, drawn = [], 0
    for chunk in chunks:
        (choice,) = chunk.choices
        told = choice.aquiline
        assert "".join(token["text"] for token in told["tokens"]) == (choice.delta.content or "")
        tokens += told["tokens"]
        tree = told["tree"]
        if tree is None:
            continue
        assert len(tree["tokens"]) == len(tree["parents"]) <= TREE.num_nodes
        at = -1
        for node in tree["accepted"]:
            assert tree["parents"][node] == at
            at = node
        accepted = [token for token in told["tokens"] if token["origin"]]
        if len(told["tokens"]) == len(accepted) + 1:  # none was held back, or is from the step before
            assert [tree["tokens"][node] for node in tree["accepted"]][-len(accepted) or 99 :] == [
                byte_chat().token_bytes(token["id"]).decode(errors="replace") for token in accepted
            ]
            drawn += len(accepted)
    assert [token["id"] for token in tokens] == result.token_ids
    assert [token["origin"] for token in tokens] == result.origins
    assert drawn > 3
    whole = ask(looked_up.client(), messages, **asked)
    assert whole.choices[0].aquiline["tokens"] == tokens
    assert not hasattr(ask(looked_up.client(), messages).choices[0], "aquiline")


def test_the_templates_arguments(folders, no_cache, tmp_path):  # noqa: F811
    from aquiline import api
    from tests.test_api import make_target

    make_target(tmp_path / "thinker", chat=byte_chat(THINKING))
    thinker = api.load(tmp_path / "thinker", "none", dtype="float32", device="cpu")
    with serving(thinker) as running:
        client = running.client()
        texts = {
            text_of(ask(client, model="thinker", extra_body=extra))
            for extra in ({}, {"chat_template_kwargs": {"enable_thinking": False}})
        }
        quiet = thinker.chat.render(HI, enable_thinking=False)
        reference = api.load(tmp_path / "thinker", "none", dtype="float32", device="cpu")
        assert texts == {reference.generate(ids, max_new_tokens=24).text for ids in (quiet, reference.prompt_ids(HI))}
        assert len(texts) == 2
        asked = client.chat.completions.create(model="thinker", messages=HI, max_tokens=3).usage
        assert (asked.aquiline["cycles"], asked.aquiline["tau"]) == (0, None)
        assert client.models.list().data[0].draft == "none"


def test_conversations_and_parts_of_text(client, model):
    talk = [{"role": "system", "content": "S"}, user("a"), assistant("b"), user("hi there")]
    parts = [*talk[:3], user([{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}])]
    result = model.generate(talk, max_new_tokens=24)
    assert text_of(ask(client, talk)) == text_of(ask(client, parts)) == result.text
    returned = ask(client).choices[0].message  # as a client would send it back
    following = [*HI, returned, user("go on")]
    expected = model.generate([*HI, assistant(returned.content), user("go on")], max_new_tokens=24)
    assert text_of(ask(client, following)) == expected.text


def test_completions_of_texts_and_ids(client, model):
    def complete(prompt, **settings):
        settings = {"model": "target", "temperature": 0, "max_tokens": 12} | settings
        return client.completions.create(prompt=prompt, **settings)

    texts = ["one two", "three"]
    ids = [byte_chat().encode(text) for text in texts]
    expected = [model.generate(i, max_new_tokens=12).text for i in ids]
    for prompt, wanted in (
        (texts, expected),
        (texts[0], expected[:1]),
        (ids, expected),
        (ids[1], expected[1:]),
        ([texts[1]], expected[1:]),
    ):
        answer = complete(prompt)
        assert [choice.text for choice in answer.choices] == wanted
        assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "length")
    assert complete(texts).usage.prompt_tokens == sum(map(len, ids))
    twice = complete(texts, n=2, temperature=1, seed=8)
    seeded = [model.generate(i, max_new_tokens=12, temperature=1.0, seed=s).text for i in ids for s in (8, 9)]
    assert [choice.text for choice in twice.choices] == seeded
    chunks = list(complete(texts, stream=True))
    for index in range(2):
        assert "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index) == expected[index]
    assert complete(texts[0], max_tokens=None).usage.completion_tokens == 16  # OpenAI's default
    found = complete(texts[0], logprobs=2).choices[0].logprobs
    chat = ask(client, logprobs=True, top_logprobs=2, max_tokens=12)
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 12
    for top, logprob, entry in zip(
        found.top_logprobs, found.token_logprobs, chat.choices[0].logprobs.content, strict=True
    ):
        assert max(top.values()) == logprob  # greedy; parts of characters share a name
        assert len(entry.top_logprobs) == 2
    for token, start in zip(found.tokens, found.text_offset, strict=True):
        assert "�" in token or token in expected[0][start : start + len(token) + 1]


REFUSED = [
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),  # found by schemathesis: no logit stayed a number
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 17}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"seed": -1}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_nodes": -1}, "max_nodes"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 200}}, "logit_bias.1"),
    ({"timeout": 601}, "timeout"),
    ({"timeout": 0}, "timeout"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "oracle", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "name": "bob"}]}, "messages[0].name"),
    ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, "messages[0].content[0].type"),
    ({"messages": [user("a"), assistant("b")]}, "messages"),
    ({"messages": [user("a" * 600)]}, "messages"),
    ({"messages": [user("\ud800")]}, "messages"),
    ({"messages": [user("a"), assistant(None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]), user("b")]},
     "messages"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": in_form({"type": "frog"})}, "response_format"),
    ({"chat_template_kwargs": {"unknown": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}, "messages": [user("a"), assistant("b")]}, "messages"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 2, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_everything": True}}, "stream_options.include_everything"),
    *(({name: value}, name) for name, value in [
        ("tools", []), ("tool_choice", "auto"), ("functions", []), ("parallel_tool_calls", True), ("audio", {}),
        ("store", True), ("reasoning_effort", "low"), ("prediction", {}), ("ignore_eos", True), ("best_of", 2),
        ("echo", False), ("web_search_options", {}), ("temprature", 1),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=lambda x: json.dumps(x)[:50] if isinstance(x, dict) else "")
def test_what_cannot_be_done_is_refused_by_its_name(served, change, param):
    status, error = error_of(served, {"messages": HI, "max_tokens": 3} | change)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    if error["code"] == "unsupported":
        assert error["message"].startswith(f"{param} is not supported")


def test_nothing_of_this_machine_is_in_an_error(served, folders):  # noqa: F811
    for change, _ in REFUSED:
        text = json.dumps(error_of(served, {"messages": HI} | change)[1])
        assert str(folders) not in text
        assert "Traceback" not in text
        assert ".py" not in text


@pytest.mark.parametrize(
    ("change", "param"),
    [({"echo": True}, "echo"), ({"suffix": "a"}, "suffix"), ({"best_of": 3}, "best_of"), ({"prompt": ""}, "prompt"),
     ({"prompt": []}, "prompt"), ({"prompt": ["a", ""]}, "prompt"), ({"prompt": [1, "a"]}, "prompt[0]"),
     ({"prompt": [-1]}, "prompt[0]"), ({"prompt": [99999]}, "prompt"), ({"prompt": {}}, "prompt"),
     ({"prompt": [99999], "logit_bias": {"1": 1}}, "prompt"), ({"prompt": "\ud800", "logit_bias": {"1": 1}}, "prompt"),
     ({"prompt": [1], "logit_bias": {"99999": 1}}, "logit_bias"),
     ({"prompt": ["a"] * 99, "n": 2}, "n"), ({"prompt": ["a"] * 129, "n": 2}, "prompt"), ({"messages": HI}, "messages"),
     ({"logprobs": True}, "logprobs")],
)  # fmt: skip
def test_what_completions_refuse(served, change, param):
    status, error = error_of(served, {"prompt": "a", "max_tokens": 3} | change, "/v1/completions")
    assert (status, error["param"]) == (400, param)


def test_what_asks_for_nothing_is_taken(client):
    settings = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    nulls = {"tools": None, "stop": None, "logit_bias": None, "frequency_penalty": None, "whatever": None}
    assert text_of(ask(client, **settings, extra_body=nulls)) == text_of(ask(client))


def test_the_official_clients_errors(client, served):
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (bad.value.param, bad.value.code) == ("tools", "unsupported")
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, model="another")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="target", input="a")
    assert text_of(ask(client, model="target")) == text_of(ask(client))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b'"a"', b"\xff\xfe", b"[" * 100000, b'{"messages": NaN}'])
def test_bodies_that_are_none(served, data):
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert error_of(served, data, path)[0] == 400


def test_a_body_of_another_type_is_not_read(served):
    body = {"messages": HI, "max_tokens": 1}
    status, error = error_of(served, body, Content_Type="text/plain")
    assert (status, error["code"]) == (400, "no_object")
    assert "application/json" in error["message"]


def test_paths_and_methods(served):
    assert error_of(served, {}, "/v1/nothing")[0] == 404
    assert error_of(served, {}, "/v1/models")[0] == 405
    assert error_of(served, {}, "/docs", method="GET")[0] == 404


def test_models_and_health(client, served):
    (entry,) = client.models.list().data
    assert (entry.id, entry.object, entry.max_model_len, entry.draft) == ("target", "model", CONTEXT, "draft")
    assert client.models.retrieve("target") == entry
    for path in ("/health", "/ready"):
        assert post(served, b"", path, method="GET")[0] == 200


def test_the_document_names_every_field(served):
    document = json.loads(post(served, b"", "/openapi.json", method="GET")[2])
    chat = document["components"]["schemas"]["ChatBody"]
    assert chat["additionalProperties"] is False
    assert {"messages", "speculative", "max_nodes", "token_origins", "logit_bias"} <= set(chat["properties"])
    for path in ("/v1/chat/completions", "/v1/completions"):
        answers = document["paths"][path]["post"]["responses"]
        assert " ".join(sorted(answers)) == "200 400 401 403 404 408 413 429 431 500 503 504"
        assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "/" not in document["paths"]


def test_the_page_may_run_what_stands_in_it_and_nothing_else(served):
    status, headers, page = post(served, b"", "/", method="GET")
    assert status == 200
    assert headers["Content-Type"].startswith("text/html")
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    for tag in ("script", "style"):
        blocks = re.findall(rf"<{tag}[^>]*>", page.decode())
        assert policy[f"{tag}-src"].count("sha256-") == len(blocks)
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_what_is_counted(looked_up):
    from prometheus_client.parser import text_string_to_metric_families

    def figures():
        status, _, data = post(looked_up, b"", "/metrics", method="GET")
        assert status == 200
        families = text_string_to_metric_families(data.decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}

    before = figures()
    usage = ask(looked_up.client(), [user("aaaa bbbb aaaa bbbb aaaa")], max_tokens=40).usage
    error_of(looked_up, {"messages": HI, "tools": []})
    error_of(looked_up, {"messages": HI}, Origin="http://elsewhere")
    after = figures()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["aquiline_requests_total", "length"] == 1
    assert grown["aquiline_refused_total", "400"] == grown["aquiline_refused_total", "403"] == 1
    assert grown["aquiline_generated_tokens_total",] == 40
    assert grown["aquiline_prompt_tokens_total",] == usage.prompt_tokens
    assert grown["aquiline_reused_prompt_tokens_total",] == usage.aquiline["reused_prompt_tokens"]
    assert grown["aquiline_cycles_total",] == usage.aquiline["cycles"] > 0
    assert grown["aquiline_cycle_tokens_total",] == usage.aquiline["cycles"] * usage.aquiline["tau"]
    assert after["aquiline_tau",] == after["aquiline_cycle_tokens_total",] / after["aquiline_cycles_total",]
    accepted = sum(value for name, value in grown.items() if name[0] == "aquiline_draft_accepted_total")
    assert accepted == usage.aquiline["accepted"] > 0
    assert grown["aquiline_draft_tried_total", "1"] == usage.aquiline["cycles"]
    steps = {int(name[1]): value for name, value in grown.items() if name[0] == "aquiline_steps_total"}
    assert sum(nodes * count for nodes, count in steps.items()) == usage.aquiline["drafted"]
    assert steps[0] == usage.aquiline["plain_steps"]
    assert grown["aquiline_time_to_first_token_seconds_count",] == 1
    assert grown["aquiline_inter_token_seconds_count",] in (38, 39)  # the first step may bring two
    assert (after["aquiline_requests_running",], after["aquiline_requests_waiting",]) == (0, 0)
    assert 0 < after["aquiline_cache_tokens",] <= after["aquiline_cache_tokens_limit",] == 4 * 512


@pytest.fixture(scope="module")
def locked(folders, no_cache):  # noqa: F811
    with serving(load(folders, "none"), KEY) as running:
        yield running


def test_without_the_key_only_the_page_opens(locked):
    assert text_of(ask(locked.client(), max_tokens=2)) is not None
    with pytest.raises(openai.AuthenticationError):
        ask(locked.client(api_key="another"), max_tokens=2)
    body = {"messages": HI, "max_tokens": 2}
    for given in ({}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}, {"Authorization": f"Bearer {KEY}x"},
                  {"Authorization": "Bearer "}):  # fmt: skip
        status, error = error_of(locked, body, **given)
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert error_of(locked, b"", "/v1/models", method="GET", **given)[0] == 401
        assert error_of(locked, b"", "/metrics", method="GET", **given)[0] == 401
        assert error_of(locked, b"", "//v1/models", method="GET", **given)[0] == 401
    for path in ("/", "/health", "/ready", "/openapi.json"):
        assert post(locked, b"", path, method="GET")[0] == 200
    assert post(locked, body, Authorization=f"Bearer {KEY}")[0] == 200


def test_pages_of_others_and_other_names_are_kept_out(served):
    body = {"messages": HI, "max_tokens": 1}
    for name, value in (("Origin", "http://evil.example"), ("Origin", "null"), ("Host", "evil.example"),
                        ("Host", f"evil.example:{served.address.split(':')[1]}")):  # fmt: skip
        assert error_of(served, body, **{name: value})[0] == 403
    for extra in ({"Origin": f"http://{served.address}"}, {"Host": "localhost"}, {"Host": "LOCALHOST:1"},
                  {"Host": "[::1]:80"}):  # fmt: skip
        assert post(served, body, **extra)[0] == 200
    assert "Access-Control-Allow-Origin" not in post(served, body)[1]


def test_a_body_has_a_limit(served):
    large = b'{"messages": [' + b" " * 2**20 + b"]}"
    assert error_of(served, large)[0] == 413
    connection = http.client.HTTPConnection(served.address, timeout=WAIT)
    connection.request("POST", "/v1/completions", iter([b" " * 2**19] * 3), {"Content-Type": "application/json"},
                       encode_chunked=True)  # fmt: skip
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"] == "body_too_large"
    connection.close()
    assert error_of(served, large, Host="evil.example")[0] == 403  # an answer, though the body was not wanted


@pytest.mark.parametrize(("size", "status"), [(8000, 200), (8200, 431)])
def test_headers_have_a_limit(served, size, status):
    connection = http.client.HTTPConnection(served.address, timeout=WAIT)
    connection.putrequest("GET", "/health")
    for n in range(4):
        connection.putheader(f"X-{n}", "a" * size)
    connection.endheaders()
    assert connection.getresponse().status == status
    connection.close()


def test_where_it_listens():
    assert ServeConfig().host == "127.0.0.1"
    taken = server.bind(ServeConfig(port=0))
    with pytest.raises(UserError, match=r"cannot listen at 127\.0\.0\.1, port"):
        server.bind(ServeConfig(port=taken.getsockname()[1]))
    taken.close()
    with pytest.raises(UserError, match="cannot listen"):
        server.bind(ServeConfig(host="no such host", port=0))
    for wrong in ({"port": -1}, {"port": 65536}, {"max_batch": 0}, {"context": 1}, {"queue": -1}, {"timeout": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            ServeConfig(**wrong)
