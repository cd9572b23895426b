"""One call: its place, what is learned from it, what it leaves behind, and what is answered when none is taken."""

import asyncio
import gc
import http.client
import json
import signal
import threading
from types import SimpleNamespace

import openai
import pytest

from aquiline.decode.engine import Request
from aquiline.serve.asked import asked
from aquiline.serve.errors import Refused
from aquiline.serve.loop import EngineLoop, Step
from aquiline.serve.reply import Places, Reply, written
from aquiline.serve.schema import CompletionBody
from tests.serving import WAIT, Gate, idle, in_thread, of_calls, serving, taken, until
from tests.test_api import END, folders, load  # noqa: F401 (a fixture)
from tests.test_serve import GREEDY, HI, ask, error_of, no_cache, post, text_of  # noqa: F401 (a fixture)
from tests.tiny_chat import user


@pytest.fixture
def quick(folders, no_cache):  # noqa: F811
    with serving(load(folders, "none"), max_batch=1, queue=1) as running:
        yield running


@pytest.fixture
def clock(monkeypatch):
    """[seconds]: the time as this module sees it."""
    now = [0.0]
    monkeypatch.setattr("aquiline.serve.reply.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def retry_after(places: Places) -> int:
    """What is said where all are taken."""
    places.taken, taken = places.most, places.taken
    with pytest.raises(Refused) as busy, places.take():
        pass
    places.taken = taken
    return int(busy.value.headers["Retry-After"])


def test_a_call_of_many_replies_has_one_place(quick):
    gate = Gate(quick.service)
    many = in_thread(lambda: ask(quick.client(), n=8, max_tokens=3))
    taken(quick.service, 8)
    one = in_thread(lambda: ask(quick.client(), max_tokens=3))
    taken(quick.service, 9)
    with pytest.raises(openai.RateLimitError):
        ask(quick.client(), max_tokens=3)
    gate.open()
    assert {choice.message.content for choice in many().choices} == {text_of(one())}


def test_places_free_as_often_as_calls_end(clock):
    places = Places(4)
    assert retry_after(places) == 1
    for _ in range(99):
        with places.take():
            clock[0] += 40
    assert retry_after(places) == 10  # four of them, 40 s each: one ends every ten
    for _ in range(99):
        with places.take():
            clock[0] += 4000
    assert retry_after(places) == 60


WAYS = {
    "whole": [Step("a"), Step("b", finish_reason="stop")],
    "failed": [Step("a"), Step(fault=Refused(500, "x"))],
    "failed first": [Step(fault=Refused(504, "x"))],
    "left": [Step("a")],
    "unread": [Step("a"), Step("b", finish_reason="stop")],
    "refused": [],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_learned_from_is_a_call_that_ended_by_itself(clock, way, stream):
    places, event = Places(1), asyncio.Event()
    loop = SimpleNamespace(cancel=lambda jobs: None)

    def submit(jobs):
        clock[0] += 30
        for step in WAYS[way]:
            jobs[0].tell(step)

    def read():
        clock[0] += 30
        if way == "refused":
            raise Refused(400, "x")
        return SimpleNamespace(requests=[Request([1])], prompt_tokens=1)

    async def receive():
        if way == "left":
            return {"type": "http.disconnect"}
        await event.wait()

    async def send(message):
        if way == "unread":
            await event.wait()

    loop.submit = submit
    answer = SimpleNamespace(id="x", chunk=lambda index, step: {}, last_chunk=lambda: None, take=lambda *_: None)
    answer.whole = dict
    reply = Reply(loop, places, stream, True, WAIT, 0.05 if way == "unread" else WAIT, read, lambda _: answer)
    try:
        asyncio.run(asyncio.wait_for(reply({}, receive, send), WAIT))
    except Refused:
        assert way in ("refused", "failed first") or (way == "failed" and not stream)
    assert places.taken == 0
    assert retry_after(places) == (7 if way == "whole" else 2)  # 1 + 0.1 * (60 - 1), or what it began with


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_cannot_be_read_fails_alone(quick, monkeypatch, caplog, stream):
    text = text_of(ask(quick.client(), max_tokens=3))
    with monkeypatch.context() as broken:
        broken.setattr(type(quick.service.model.chat), "render", lambda *_, **__: 1 / 0)
        status, error = error_of(quick, {"messages": HI, "stream": stream})
    assert (status, error["type"], error["code"]) == (500, "server_error", None)
    assert "division" not in error["message"]
    until(lambda: "ZeroDivisionError" in caplog.text)  # it is written after the answer
    assert idle(quick.service)
    assert text_of(ask(quick.client(), max_tokens=3)) == text


def test_who_comes_before_the_engine_is_warm_waits(folders, no_cache, monkeypatch):  # noqa: F811
    warm = threading.Event()
    monkeypatch.setattr(EngineLoop, "_try", lambda *_: warm.wait(WAIT))
    with serving(load(folders, "none"), warm=False) as running:
        status, error = error_of(running, b"", "/ready", method="GET")
        assert (status, error["type"], error["code"]) == (503, "server_error", "not_ready")
        assert post(running, b"", "/health", method="GET")[0] == 200
        early = in_thread(lambda: ask(running.client(), max_tokens=3))
        taken(running.service, 1)
        warm.set()
        assert early().usage.completion_tokens == 3
        assert post(running, b"", "/ready", method="GET")[0] == 200


def test_while_it_shuts_down_what_runs_ends_and_what_comes_is_told(quick):
    gate = Gate(quick.service)
    call = in_thread(lambda: ask(quick.client(), max_tokens=3))
    taken(quick.service, 1)
    quick.server.handle_exit(signal.SIGTERM, None)
    for body in ({"messages": HI}, {"messages": HI, "stream": True}):
        status, error = error_of(quick, body)
        assert (status, error["type"], error["code"]) == (503, "server_error", "shutting_down")
    assert error_of(quick, {"prompt": "a"}, "/v1/completions")[0] == 503
    assert error_of(quick, b"", "/ready", method="GET")[1]["code"] == "not_ready"
    assert post(quick, b"", "/health", method="GET")[0] == 200
    assert not quick.server.should_exit
    gate.open()
    assert call().usage.completion_tokens == 3
    until(lambda: quick.server.should_exit)


def test_who_still_waits_when_the_loop_ends_is_told(folders, no_cache):  # noqa: F811
    with serving(load(folders, "none"), max_batch=2) as running:
        gate, loop = Gate(running.service), running.service.loop
        body = GREEDY | {"max_tokens": 50}
        begun = in_thread(lambda: post(running, body | {"stream": True}))
        taken(running.service, 1)
        gate.let(1)
        until(lambda: any(job.told_ids for job in list(loop._jobs.values())))
        waiting = [in_thread(lambda more=more: error_of(running, body | more)) for more in ({}, {"stream": True}) * 2]
        taken(running.service, 5)
        ending = in_thread(loop.stop)
        until(lambda: loop._stopping)
        gate.open()
        ending()
        status, _, data = begun()
        last = data.decode().split("\n\n")[-2].removeprefix("data: ")
        assert (status, json.loads(last)["error"]["code"]) == (200, "shutting_down")
        for call in waiting:
            status, error = call()
            assert (status, error["type"], error["code"]) == (503, "server_error", "shutting_down")
        status, error = error_of(running, body)  # it is not even queued
        assert (status, error["code"]) == (503, "shutting_down")
        assert running.service.places.taken == 0


def test_the_replies_of_a_prompt_share_its_ids(quick):
    body = CompletionBody(prompt=[[1, 2], [3]], n=3)
    requests = asked(quick.service.model, quick.service.loop.engine, None, body).requests
    assert [request.prompt_ids for request in requests] == [[1, 2]] * 3 + [[3]] * 3
    assert len({id(request.prompt_ids) for request in requests}) == 2


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_call_for_more_than_may_be_kept_is_refused(quick, monkeypatch, field):
    monkeypatch.setattr("aquiline.serve.asked.MOST_KEPT", 4 * 5 * 3)
    body = {"messages": HI, "n": 4, field: 5, "logprobs": True, "top_logprobs": 2}
    assert post(quick, body)[0] == 200
    for more in ({"n": 5}, {field: 6}, {"top_logprobs": 3}):
        status, error = error_of(quick, body | more)
        assert (status, error["param"]) == (400, field)
        assert "more than the 60 tokens that are kept for one call" in error["message"]
    texts = {"prompt": ["a", "b"], "n": 2, "max_tokens": 15}
    assert post(quick, texts, "/v1/completions")[0] == 200
    assert error_of(quick, texts | {"logprobs": 1}, "/v1/completions")[1]["param"] == "max_tokens"
    monkeypatch.setattr("aquiline.serve.asked.MOST_KEPT", quick.service.loop.engine.context)
    assert post(quick, {"messages": HI})[0] == 200  # what has no room in the context does not count


def holders(text: str) -> list[str]:
    """What there is, beside `text` itself, of strings and bytes that hold it: the types that refer to them."""
    gc.collect()
    data, found = text.encode(), []
    for thing in gc.get_objects():
        for part in gc.get_referents(thing):
            held = type(part) in (bytes, bytearray) and data in part
            if held or (type(part) is str and part is not text and text in part):
                found.append(type(thing).__name__)
    return found


def test_a_stream_keeps_nothing_once_it_has_ended(quick):
    connection, before = http.client.HTTPConnection(quick.address, timeout=WAIT), of_calls()
    asked = f"{'secret'!r} of {id(connection)}"

    def stream():
        body = {"messages": [user(f"tell me, {asked}")], "max_tokens": 40, "logit_bias": {str(END): -100}}
        body |= {"stream": True, "token_origins": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        lines = connection.getresponse().read().decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines[:-2])

    gate = Gate(quick.service)
    running = in_thread(stream)
    taken(quick.service, 1)
    assert holders(asked)
    assert of_calls() > before
    gate.open()
    text = running()
    until(lambda: idle(quick.service))
    assert quick.server.server_state.connections  # its own, which may be used again
    del running, gate
    until(lambda: of_calls() <= before)
    assert holders(asked) == holders(text) == []
    connection.close()


def test_an_answer_is_written_as_json_writes_it():
    token = {"token": "\ud800\n", "logprob": -0.5, "bytes": [1, 2], "top": [{"a": {"b": [[], {}, None, True]}}]}
    whole = {"id": "x", "choices": [{"logprobs": {"content": [token, token]}, "n": None}, {}], "empty": [], "é": 1.0}
    for value in (whole, [whole], [], {}, "a", 3, None):
        assert written(value) == json.dumps(value)
        assert written(value, 1) == json.dumps(value)


def test_no_part_of_a_large_answer_is_written_for_long(quick, monkeypatch):
    """While json.dumps runs, nothing else does."""
    parts: list[int] = []

    def dumps(value):
        text = json.dumps(value)
        parts.append(len(text))
        return text

    monkeypatch.setattr("aquiline.serve.reply.json", SimpleNamespace(dumps=dumps))
    body = GREEDY | {"max_tokens": 100, "logprobs": True, "top_logprobs": 20, "token_origins": True}
    status, _, data = post(quick, body)
    assert status == 200
    assert len(json.loads(data)["choices"][0]["logprobs"]["content"]) == 100
    assert max(parts) < len(data) / 40
