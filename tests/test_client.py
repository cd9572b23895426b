"""`chat --server`, before a real server with tiny models, and before servers that follow a script."""

import re

import pytest

from aquiline.api import Conversation
from aquiline.cli import decode
from tests.scripted_server import Scripted, chunk, stream, usage
from tests.test_api import folders, load  # noqa: F401 (a fixture)
from tests.test_cli import aquiline, check_refused  # noqa: F401 (a fixture)
from tests.test_serve import looked_up, no_cache  # noqa: F401 (fixtures)


@pytest.fixture(scope="module")
def url(looked_up):  # noqa: F811
    """Of a server whose draft looks tokens up in the text; tiny models repeat themselves, so many are accepted."""
    return f"http://{looked_up.address}"


@pytest.fixture
def scripted():
    server = Scripted()
    yield server
    server.close()


def replies(folders, *turns, **settings):  # noqa: F811
    conversation = Conversation(load(folders, "none"), **settings)
    return ["".join(delta.text for delta in conversation.say(turn)) for turn in turns]


def test_a_conversation_is_the_one_held_here(aquiline, folders, url):  # noqa: F811
    sampling = {"temperature": 1.0, "seed": 5, "top_k": 40, "repetition_penalty": 1.2, "system": "S"}
    flags = [part for key, value in sampling.items() for part in (f"--{key.replace('_', '-')}", value)]
    turns = b"hi\n/color\nand\n/color\n/reset\nhi\n/quit\nno more\n"
    code, out, err = aquiline("chat", "--server", url, "--max-new-tokens", 30, *flags, stdin=turns)
    assert code == 0
    expected = replies(folders, "hi", "and", max_new_tokens=30, **sampling)
    assert re.sub(r"\x1b\[\d+m", "", out) == "\n".join([*expected, expected[0], ""])
    assert f"target at {url}" in err
    assert err.count("30 tokens (length)") == 3
    assert "this server does not tell" not in err


def test_colours_are_the_origins_that_the_server_tells(aquiline, scripted):  # noqa: F811
    tree = {"tokens": [" b", " c"], "parents": [-1, 0], "accepted": [0, 1]}
    scripted.answers += [stream(chunk(("a", 0)), chunk((" b", 1), (" c", 2), (" d", 0), tree=tree), tau=3.0)]
    code, out, err = aquiline("chat", "--server", scripted.url, stdin=b"/color\nhi\n")
    assert code == 0
    assert out == f"a{decode._paint(' b', 1)}{decode._paint(' c', 2)} d\n"
    assert out.count("\x1b[") == 4
    assert re.search(r"4 tokens \(\) · [\d.]+ tokens/s · tau 3\.00\n", err)
    assert scripted.bodies[0]["token_origins"] is True


def test_a_server_that_knows_no_origins_is_talked_to_without(aquiline, scripted):  # noqa: F811
    plain = {"choices": [{"delta": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}]}
    refusal = 400, {"error": {"message": "unknown field token_origins"}}
    scripted.answers += [refusal, [plain, "[DONE]"], [plain, "[DONE]"]]
    code, out, err = aquiline("chat", "--server", scripted.url, stdin=b"/color\nhi\nyou\n")
    assert (code, out) == (0, "fine\nfine\n")
    assert err.count("does not tell which tokens were drafted") == 2
    assert ["token_origins" in body for body in scripted.bodies] == [True, False, False]
    assert [m["content"] for m in scripted.bodies[2]["messages"]] == ["hi", "fine", "you"]
    assert not {"top_k", "min_p", "repetition_penalty"} & set(scripted.bodies[0])  # which not every server knows


def test_nulls_and_thoughts_as_other_servers_write_them(aquiline, scripted):  # noqa: F811
    deltas = [None, {"reasoning_content": "so"}, {"reasoning": "me"}, {"reasoning": "", "content": "thing"}, {}]
    chunks = [{"error": None, "usage": None, "choices": [{"delta": delta}]} for delta in deltas]
    told = {"choices": [], "usage": {"completion_tokens": 3, "aquiline": None}}
    scripted.answers += [[*chunks, told, "[DONE]"]] * 2
    code, out, err = aquiline("chat", "--server", scripted.url, stdin=b"hi\nyou\n")
    assert (code, out) == (0, "some\n\nthing\n" * 2)
    assert "3 tokens" in err
    assert [m["content"] for m in scripted.bodies[1]["messages"]] == ["hi", "thing", "you"]


def test_what_goes_wrong_is_one_line(aquiline, scripted, monkeypatch):  # noqa: F811
    def failing(*answers):
        scripted.answers += answers
        code, _, err = aquiline("chat", "--server", scripted.url, stdin=b"hi\n")
        assert code == 2
        assert "Traceback" not in err
        return err.splitlines()[-1]

    assert (
        failing((429, {"error": {"message": "the queue is full"}}))
        == "error: the server answered 429: the queue is full"
    )
    assert "503" in failing((503, "odd"))
    assert "broke off in mid-reply" in failing([chunk(("half", 0))])
    assert "bug in it" in failing([chunk(("half", 0)), {"error": {"message": "bug in it"}}])
    assert "broke off" in failing(["{"])
    assert "not one: b'[1]'" in failing(["[1]"])
    scripted.close()
    assert "does not answer" in failing()


def test_a_reply_that_fails_leaves_no_trace_and_a_terminal_goes_on(aquiline, scripted, monkeypatch):  # noqa: F811
    busy = 429, {"error": {"message": "the queue is full"}}
    scripted.answers += [busy, [chunk(("half", 0))], [chunk(("fine", 0)), usage(1), "[DONE]"]]
    turns = iter(["one", "two", "three"])
    monkeypatch.setattr(decode, "_read_turn", lambda: next(turns, None))
    monkeypatch.setattr(decode, "_interactive", lambda: True)
    code, out, err = aquiline("chat", "--server", scripted.url)
    assert code == 0
    assert "fine" in out
    assert err.count("error: ") == 2
    assert [m["content"] for m in scripted.bodies[2]["messages"]] == ["three"]


def test_flags_that_belong_to_a_model_here_are_refused(aquiline):  # noqa: F811
    for flag, value in {"--target": "x", "--draft": "none", "--tree": "4:1:4", "--device": "cpu"}.items():
        check_refused(aquiline("chat", "--server", "http://127.0.0.1:1", flag, value), "--server and", flag)
    check_refused(aquiline("chat", "--server", "http://127.0.0.1:1", "--exact"), "--server and", "--exact")
    check_refused(aquiline("chat", "--model", "x"), "give --server too")
    check_refused(aquiline("chat", "--server", "host:8000"), "no http address")
