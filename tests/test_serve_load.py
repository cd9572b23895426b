"""The server under load, and when things fail: queue, deadlines, clients that leave, faults, signals, odd bodies."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest

from aquiline.cli import main as cli
from aquiline.cli import serve
from aquiline.config import UserError
from aquiline.data.grammar import JsonGrammar
from aquiline.decode.engine import Request
from aquiline.serve.loop import Job, Pace, Step
from aquiline.serve.reply import Places, Reply
from tests.serving import WAIT, Gate, Leaver, idle, in_thread, of_calls, serving, taken, until
from tests.test_api import folders, load  # noqa: F401 (a fixture)
from tests.test_serve import GREEDY, HI, TREE, ask, error_of, joined, no_cache, post, text_of  # noqa: F401 (a fixture)
from tests.tiny_chat import user

pytestmark = pytest.mark.filterwarnings(
    "ignore:the draft's tokens are hardly ever accepted", "ignore:in .* steps no drafted tree"
)


@pytest.fixture
def quick(folders, no_cache):  # noqa: F811
    """Two slots, two places in the queue, and no draft: a step is a token."""
    with serving(load(folders, "none"), max_batch=2, queue=2) as running:
        yield running


@pytest.fixture
def three(folders, no_cache):  # noqa: F811
    """The same with three slots."""
    with serving(load(folders, "none"), max_batch=3, queue=2) as running:
        yield running


@pytest.fixture(scope="module")
def alone(folders):  # noqa: F811
    return load(folders, "none")


def test_a_full_queue_is_said_at_once_and_nobody_in_it_is_lost(quick, alone):
    gate = Gate(quick.service)
    expected = [alone.generate(HI, max_new_tokens=9, temperature=1.0, seed=n).text for n in range(4)]
    client = quick.client()
    calls = [in_thread(lambda n=n: ask(client, max_tokens=9, temperature=1, seed=n)) for n in range(4)]
    taken(quick.service, 4)
    with pytest.raises(openai.RateLimitError) as busy:
        ask(client)
    assert busy.value.code == "queue_full"
    assert int(busy.value.response.headers["Retry-After"]) >= 1
    gate.open()
    assert [text_of(call()) for call in calls] == expected
    until(lambda: idle(quick.service))
    assert text_of(ask(client, max_tokens=9, temperature=1, seed=2)) == expected[2]


def test_the_official_client_waits_and_tries_again(quick):
    gate = Gate(quick.service)
    calls = [in_thread(lambda: ask(quick.client(), max_tokens=3)) for _ in range(4)]
    taken(quick.service, 4)
    patient = in_thread(lambda: ask(quick.client(max_retries=4), max_tokens=3))
    until(lambda: quick.service.metrics.registry.get_sample_value("aquiline_refused_total", {"status": "429"}))
    gate.open()
    assert len({text_of(call()) for call in (*calls, patient)}) == 1


def test_calls_of_many_take_turns_with_the_others(folders, no_cache):  # noqa: F811
    with serving(load(folders, "none"), max_batch=2, queue=8) as running:
        gate, loop = Gate(running.service), running.service.loop
        client = running.client()
        many = in_thread(lambda: ask(client, n=6, max_tokens=3, temperature=1, seed=1))
        taken(running.service, 6)
        one = in_thread(lambda: ask(client, max_tokens=3))
        taken(running.service, 7)
        gate.let(5)  # each takes two: two of the many, then one of them beside the other call
        until(lambda: all(request.sampling.temperature for request in list(loop._jobs)))
        assert len(loop._jobs) >= 2
        gate.open()
        assert len(many().choices) == 6
        one()


def test_a_client_that_leaves_frees_its_slot_within_a_cycle(quick):
    gate = Gate(quick.service)
    client = quick.client()
    stream = in_thread(lambda: ask(client, stream=True, max_tokens=400))
    taken(quick.service, 1)
    waiting = Leaver(quick, GREEDY | {"max_tokens": 400})  # not streamed
    taken(quick.service, 2)
    gate.let(2)
    chunks = stream()
    assert next(iter(chunks)).choices[0].delta.role == "assistant"
    engine = quick.service.loop.engine
    until(lambda: gate.holds)
    assert engine.running == 2
    loop, counted = quick.service.loop, []
    loop._watch = lambda request: counted.append(request in loop._jobs)  # as soon as it has been counted
    chunks.close()
    waiting.leave()
    until(lambda: len(set(quick.service.loop._leaving)) == 2)  # one may be listed twice
    gate.let(2)  # one that was waited in already, one that comes after it
    assert engine.running == 0
    until(lambda: idle(quick.service))
    assert counted == [True, True]  # who sees that nothing is left finds them in the figures
    ended = {"finish": "disconnected"}
    assert quick.service.metrics.registry.get_sample_value("aquiline_requests_total", ended) == 2
    gate.open()
    assert ask(client, max_tokens=3).usage.completion_tokens == 3


def test_who_leaves_the_queue_is_never_run(quick):
    gate = Gate(quick.service)
    running = [in_thread(lambda: ask(quick.client(), max_tokens=5)) for _ in range(2)]
    taken(quick.service, 2)
    for stream in (False, True, False):
        leaver = Leaver(quick, GREEDY | {"max_tokens": 5, "stream": stream})
        taken(quick.service, 3)
        leaver.leave()
        until(lambda: quick.service.places.taken == 2)
        gate.let(1)  # which those who run outlast, and before the next of which it is taken out
        taken(quick.service, 2)
    gate.open()
    assert len({text_of(call()) for call in running}) == 1
    until(lambda: idle(quick.service))
    assert quick.service.metrics.registry.get_sample_value("aquiline_generated_tokens_total") == 10


def test_a_request_that_takes_too_long_ends_with_an_error(quick):
    for extra in ({}, {"stream": True}):
        with pytest.raises(openai.APIStatusError) as late:
            ask(quick.client(), extra_body={"timeout": 1e-9}, **extra)
        assert (late.value.status_code, late.value.code) == (504, "timeout")
    gate = Gate(quick.service)
    stream = in_thread(lambda: ask(quick.client(), stream=True, max_tokens=50))
    whole = in_thread(lambda: ask(quick.client(), max_tokens=50))
    taken(quick.service, 2)
    gate.let(2)
    chunks = iter(stream())
    next(chunks)
    for job in list(quick.service.loop._jobs.values()):
        job.deadline = 0.0
    gate.let(1)
    with pytest.raises(openai.APIError, match="longer than its timeout"):
        list(chunks)
    with pytest.raises(openai.APIStatusError) as late:
        whole()
    assert late.value.status_code == 504
    gate.open()
    until(lambda: idle(quick.service))


def test_what_would_end_alike_again_is_not_tried_again(quick, caplog):
    client = quick.client(max_retries=3)
    with pytest.raises(openai.InternalServerError) as late:
        ask(client, extra_body={"timeout": 1e-9})
    assert late.value.code == "timeout"
    quick.service.loop._tell = lambda job: 1 / 0
    with pytest.raises(openai.InternalServerError) as failed:
        ask(client)
    assert failed.value.code == "reply_fault"
    registry = quick.service.metrics.registry
    assert [registry.get_sample_value("aquiline_refused_total", {"status": s}) for s in ("504", "500")] == [1, 1]


def test_an_error_in_a_stream_is_its_end(quick):
    gate = Gate(quick.service)
    sent = in_thread(lambda: post(quick, GREEDY | {"max_tokens": 50, "stream": True}))
    taken(quick.service, 1)
    gate.let(2)
    until(lambda: any(job.told_ids for job in quick.service.loop._jobs.values()))
    for job in list(quick.service.loop._jobs.values()):
        job.deadline = 0.0
    gate.open()
    status, _, data = sent()
    *_, last, rest = data.decode().split("\n\n")
    assert (status, rest) == (200, "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"


def test_an_engine_that_fails_takes_those_in_flight_with_it_and_no_others(quick, alone, caplog):
    gate = Gate(quick.service)
    client, engine = quick.client(), quick.service.loop.engine
    stream = in_thread(lambda: ask(client, stream=True, max_tokens=50))
    taken(quick.service, 1)
    whole = in_thread(lambda: ask(client, max_tokens=50))
    taken(quick.service, 2)
    gate.let(2)
    until(lambda: engine.running == 2)
    queued = [in_thread(lambda: ask(client, max_tokens=9)) for _ in range(2)]
    taken(quick.service, 4)
    gate.let(2)
    until(lambda: not quick.service.loop._coming)  # they wait in the loop, no longer in front of it
    chunks = iter(stream())
    next(chunks)
    engine._step = lambda: 1 / 0
    gate.let(1)
    with pytest.raises(openai.APIError, match="the engine has failed"):
        list(chunks)
    with pytest.raises(openai.InternalServerError) as failed:
        whole()
    assert failed.value.code == "engine_fault"
    assert "division" not in failed.value.message
    expected = alone.generate(HI, max_new_tokens=9).text
    assert {text_of(call()) for call in queued} == {expected}
    assert quick.service.loop.engine is not engine
    assert quick.service.metrics.registry.get_sample_value("aquiline_engine_faults_total") == 1
    assert "ZeroDivisionError" in caplog.text
    until(lambda: idle(quick.service))
    assert post(quick, b"", "/health", method="GET")[0] == 200


def test_a_request_that_has_not_begun_goes_to_the_next_engine(quick, alone, caplog):
    quick.service.loop.engine._step = lambda: 1 / 0
    assert text_of(ask(quick.client(), max_tokens=9)) == alone.generate(HI, max_new_tokens=9).text
    assert quick.service.metrics.registry.get_sample_value("aquiline_engine_faults_total") == 1
    until(lambda: idle(quick.service))


class Panic(BaseException):
    """As a library in Rust raises it."""


def panic():
    raise Panic


def test_a_request_with_which_every_engine_fails_is_failed_alone(quick, alone, caplog):
    gate, make = Gate(quick.service), quick.service.loop._make_engine

    def weak():
        engine = make()
        step = engine._step

        def try_step():
            if any(request.sampling.seed == 13 for request, _ in engine._waiting):
                panic()
            return step()

        engine._step = try_step
        return engine

    quick.service.loop._make_engine, quick.service.loop.engine._step = weak, panic
    bad = in_thread(lambda: ask(quick.client(), max_tokens=9, seed=13))
    taken(quick.service, 1)
    good = [in_thread(lambda: ask(quick.client(), max_tokens=9, seed=1)) for _ in range(3)]
    taken(quick.service, 4)
    gate.open()
    with pytest.raises(openai.InternalServerError) as failed:
        bad()
    assert (failed.value.status_code, failed.value.code) == (500, "engine_fault")
    expected = alone.generate(HI, max_new_tokens=9).text
    assert {text_of(call()) for call in good} == {expected}
    until(lambda: idle(quick.service))
    assert quick.service.metrics.registry.get_sample_value("aquiline_engine_faults_total") == 2
    assert not quick.service.loop.dead


def test_engines_that_always_fail_end_the_server(folders, no_cache, caplog):  # noqa: F811
    with serving(load(folders, "none"), max_batch=2, queue=6) as running:
        loop = running.service.loop
        gate, make = Gate(running.service), loop._make_engine
        loop._try = lambda engine, size: None

        def broken():
            engine = make()
            engine._step = panic
            return engine

        loop._make_engine, loop.engine._step = broken, panic
        calls = [in_thread(lambda: ask(running.client(), max_tokens=9)) for _ in range(8)]
        taken(running.service, 8)
        gate.open()
        codes = []
        for call in calls:
            with pytest.raises(openai.InternalServerError) as failed:
                call()
            codes.append(failed.value.status_code)
        assert sorted(codes) == [500] * 3 + [503] * 5
        assert loop.dead
        until(lambda: running.server.should_exit)


def test_a_panic_anywhere_in_the_engines_thread_is_not_silent(folders, no_cache, caplog):  # noqa: F811
    with serving(load(folders, "none")) as running:
        running.service.loop._feed = panic
        with pytest.raises(openai.InternalServerError) as failed:
            ask(running.client(), max_tokens=400)
        assert failed.value.status_code == 503
        assert running.service.loop.dead
        until(lambda: running.server.should_exit)


def pieces_of(chunks) -> list[str]:
    return [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]


def test_beside_others_a_reply_is_told_in_larger_pieces_and_whole(quick, alone, monkeypatch):
    """One token at once, what both write, and what the later one writes alone."""
    monkeypatch.setattr("aquiline.serve.loop._TOLD", 1e-3)
    expected = alone.generate(HI, max_new_tokens=40).text
    for more, most in (({}, 5), ({"extra_body": {"token_origins": True}}, 100)):
        gate = Gate(quick.service)
        calls = [
            in_thread(lambda more=more: list(ask(quick.client(), stream=True, max_tokens=40, **more))) for _ in "12"
        ]
        taken(quick.service, 2)
        gate.open()
        for call in calls:
            chunks = call()
            assert joined(chunks) == expected
            assert 2 <= len(pieces_of(chunks)) <= most
            assert (len(pieces_of(chunks)) > 20) == bool(more)  # who asks for trees gets each
        until(lambda: idle(quick.service))


def test_what_is_withheld_is_told_soon_and_before_a_prompt_is_read_and_before_a_fault(three, monkeypatch):
    gate, loop, clock = Gate(three.service), three.service.loop, SimpleNamespace(now=1000.0)
    monkeypatch.setattr("aquiline.serve.loop.time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr("aquiline.serve.loop._TOLD", 0.1)  # two: within 10 s
    told: dict[int, list[int]] = {}

    def job(number: int, tokens: int) -> Job:
        told[number] = []

        def tell(step: Step) -> None:
            told[number].append(-len(step.ids) if step.fault else len(step.ids))

        request = three.service.model.request(HI, max_new_tokens=tokens, temperature=0.0)
        return Job(request, tell, clock.now + 1e6, Pace.SOON)

    loop.submit([job(0, 90)])
    loop.submit([job(1, 90)])
    taken(three.service, 2)
    gate.let(4)
    until(lambda: gate.holds)
    assert [len(t) for t in told.values()] == [1, 1]
    clock.now += 11
    gate.let(1)
    until(lambda: gate.holds)
    assert [len(t) for t in told.values()] == [2, 2]
    assert all(t[1] > 1 for t in told.values())
    gate.let(2)
    until(lambda: gate.holds)
    assert [len(t) for t in told.values()] == [2, 2]
    loop.submit([job(2, 90)])
    gate.let(1)
    until(lambda: gate.holds)  # at the step that reads the third one's prompt
    assert [len(t) for t in told.values()] == [3, 3, 0]
    gate.let(3)
    until(lambda: gate.holds)
    assert [len(t) for t in told.values()] == [3, 3, 1]
    made = [len(j.request.output_ids) for j in loop._jobs.values()]
    clock.now += 1e7  # past the deadline
    gate.open()
    until(lambda: idle(three.service))
    assert all(sum(t) >= n for t, n in zip(told.values(), made, strict=True))
    assert all(t[-1] == 0 for t in told.values())  # the fault, behind what was withheld


def test_a_text_that_cannot_be_read_fails_its_request_alone(quick, alone, caplog):
    gate, loop = Gate(quick.service), quick.service.loop
    stream = in_thread(lambda: ask(quick.client(), stream=True, max_tokens=9))
    taken(quick.service, 1)
    gate.let(1)
    other = in_thread(lambda: ask(quick.client(), max_tokens=9))
    taken(quick.service, 2)
    chunks = iter(stream())
    next(chunks)
    (job, *_) = loop._jobs.values()
    job.told_ids = "no number"
    gate.open()
    with pytest.raises(openai.APIError, match="could not be read"):
        list(chunks)
    assert text_of(other()) == alone.generate(HI, max_new_tokens=9).text
    until(lambda: idle(quick.service))
    assert quick.service.metrics.registry.get_sample_value("aquiline_engine_faults_total") == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_grammar_in_error_is_a_fault_only_where_it_cut_the_text(quick, monkeypatch, late):
    def error(self):
        return "a limit" if late is self._matcher.is_accepting() else None

    monkeypatch.setattr(JsonGrammar, "error", property(error))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "abc"}}}
    if late:
        answer = ask(quick.client(), response_format=form, max_tokens=50)
        assert (text_of(answer), answer.choices[0].finish_reason) == ('"abc"', "stop")
        return
    with pytest.raises(openai.BadRequestError) as failed:
        ask(quick.client(), response_format=form, max_tokens=50)
    assert failed.value.code == "grammar"
    assert "a limit" in failed.value.message
    until(lambda: idle(quick.service))


def test_an_engine_that_cannot_be_replaced_ends_the_server(folders, no_cache, caplog):  # noqa: F811
    with serving(load(folders, "none"), max_batch=2, queue=2) as running:
        gate = Gate(running.service)
        calls = [in_thread(lambda: ask(running.client(), max_tokens=50)) for _ in range(3)]
        taken(running.service, 3)
        gate.let(2)
        running.service.loop.engine._step = lambda: 1 / 0
        running.service.loop._make_engine = lambda: 1 / 0
        gate.let(1)
        codes = set()
        for call in calls:
            with pytest.raises(openai.InternalServerError) as failed:
                call()
            codes.add(failed.value.status_code)
        assert codes == {500, 503}
        assert running.service.loop.dead
        until(lambda: running.server.should_exit)


def test_the_command_fails_with_its_engine(folders, monkeypatch, capsys):  # noqa: F811
    switch = sys.getswitchinterval()
    monkeypatch.setattr("aquiline.serve.loop.EngineLoop._try", lambda *_: 1 / 0)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--target", str(folders / "target"), "--draft", "none", "--port", "0", "--host", "0.0.0.0"])
    sys.setswitchinterval(switch)
    assert ended.value.code == 1
    assert "there is no API key" in capsys.readouterr().err


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(serve.KEY, raising=False)
    assert serve._key(None) is None
    monkeypatch.setenv(serve.KEY, "one")
    assert serve._key(None) == "one"
    monkeypatch.setenv(serve.KEY, " one\r\n")
    assert serve._key(None) == "one"
    monkeypatch.setenv(serve.KEY, " ")
    assert serve._key(None) is None
    (tmp_path / "key").write_text("two\n")
    assert serve._key(tmp_path / "key") == "two"
    (tmp_path / "key").write_text("\n")
    for path in (tmp_path / "key", tmp_path / "none"):
        with pytest.raises(UserError, match="key"):
            serve._key(path)


def ask_and_not_read(running, **body):
    """A connection with hardly a buffer, on which a call has been sent and is being answered."""
    gate = Gate(running.service)
    listener = running.connect(small=True)
    data = json.dumps(GREEDY | {"max_tokens": 100, "logprobs": True, **body}).encode()
    listener.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    taken(running.service, 1)
    gate.open()
    return listener


def test_who_never_reads_does_not_keep_the_server_from_ending(folders, no_cache, monkeypatch):  # noqa: F811
    with serving(load(folders, "none")) as running:
        listener = ask_and_not_read(running, top_logprobs=5)  # less than is written without waiting for the reader
        until(lambda: idle(running.service))
        unread = [c.transport.get_write_buffer_size() for c in list(running.server.server_state.connections)]
        assert max(unread) > 0
        monkeypatch.setattr(running.server._idle, "_seconds", 0.5)
    listener.close()


def test_who_still_reads_an_answer_gets_all_of_it(folders, no_cache, monkeypatch):  # noqa: F811
    """However long it takes after the signal."""
    monkeypatch.setattr("aquiline.serve.server._CLOSE_SECONDS", 0)
    with serving(load(folders, "none")) as running:
        listener = ask_and_not_read(running, top_logprobs=5)
        until(lambda: idle(running.service))
        server, looks = running.server, []
        look = server._idle.close
        monkeypatch.setattr(server._idle, "close", lambda: look() if server.should_exit is False else looks.append(1))
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: len(looks) > 5 or not server.server_state.connections)
        with listener, listener.makefile("rb") as answer:
            head = iter(answer.readline, b"\r\n")
            (length,) = (int(line.split()[1]) for line in head if line.lower().startswith(b"content-length:"))
            assert len(answer.read(length)) == length


def test_a_reply_is_sent_until_its_deadline_however_slowly_it_is_read():
    sent, places = [], Places(1)
    loop = SimpleNamespace(cancel=lambda jobs: None)
    loop.submit = lambda jobs: [jobs[0].tell(Step("a")) for _ in range(1000)]
    answer = SimpleNamespace(id="x", chunk=lambda index, step: {"text": step.text})
    asked = SimpleNamespace(requests=[Request([1])], prompt_tokens=1)

    async def send(message):
        sent.append(message)
        await asyncio.sleep(0.02)

    reply = Reply(loop, places, True, True, 0.1, 0.1, lambda: asked, lambda _: answer)
    asyncio.run(asyncio.wait_for(reply({}, asyncio.Event().wait, send), WAIT))
    assert len(sent) < 100
    assert places.taken == 0


def test_who_does_not_read_loses_the_connection(folders, no_cache):  # noqa: F811
    with serving(load(folders, "none"), patience=2) as running:
        listener = ask_and_not_read(running, stream=True, top_logprobs=20)
        until(lambda: idle(running.service))
        listener.settimeout(WAIT)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := listener.recv(2**16):
                received += data
        assert b"[DONE]" not in received
        listener.close()


def test_a_reply_is_the_same_among_sixteen_others(folders, no_cache):  # noqa: F811
    model = load(folders)
    expected = model.generate(HI, max_new_tokens=30).text
    sampled = model.generate(HI, max_new_tokens=30, temperature=1.0, seed=5).text
    others = [f"other {n} {'x' * n}" for n in range(16)]
    texts = [model.generate(text, max_new_tokens=20 + n).text for n, text in enumerate(others)]
    with serving(load(folders), max_batch=18) as running:
        client = running.client()
        assert text_of(ask(client, max_tokens=30)) == expected
        calls = [
            in_thread(lambda n=n, text=text: ask(client, [user(text)], max_tokens=20 + n))
            for n, text in enumerate(others)
        ]
        among = in_thread(lambda: ask(client, max_tokens=30))
        seeded = in_thread(lambda: ask(client, max_tokens=30, temperature=1, seed=5, stream=True))
        assert text_of(among()) == expected
        assert joined(seeded()) == sampled
        assert [text_of(call()) for call in calls] == texts


CLIENTS, REQUESTS = 64, 4
INVALID = [{"temperature": 9}, {"tools": []}, {"messages": []}, {"messages": [user("a" * 999)]}, {"max_tokens": 0}]


async def one_client(client, number, expected, seen):
    """Some requests one after another: whole, streamed, left in mid-stream, invalid."""
    for turn in range(REQUESTS):
        rng = random.Random(number * REQUESTS + turn)
        key = rng.choice(list(expected))
        prompt, seed, length = key
        body = {"model": "target", "messages": [user(prompt)], "max_tokens": length, "temperature": 1, "seed": seed}
        way = ("leave", "stream", "whole")[(number + turn) % 3]
        if rng.random() < 0.2:
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**body | {"extra_body": rng.choice(INVALID)})
            seen.append(("invalid", None))
        if way == "whole":
            answer = await client.chat.completions.create(**body)
            assert text_of(answer) == expected[key]
            seen.append(("whole", answer.id))
            continue
        stream = await client.chat.completions.create(**body, stream=True)
        text, chunks, name = "", rng.randint(1, 4), None
        async for chunk in stream:
            name = name or chunk.id
            assert chunk.id == name
            text += chunk.choices[0].delta.content or ""
            chunks -= 1
            if way == "leave" and chunks == 0:
                break
        await stream.close()
        assert text == expected[key] if way == "stream" else expected[key].startswith(text)
        seen.append((way, name))


def test_many_clients_some_of_which_leave(folders, no_cache):  # noqa: F811
    model = load(folders)
    rng = random.Random(0)
    asked = {(f"{word} {'y' * rng.randint(0, 60)}", rng.randint(0, 9), rng.randint(3, 16)) for word in "abcdefghijkl"}
    expected = {
        (prompt, seed, length): model.generate(prompt, max_new_tokens=length, temperature=1.0, seed=seed).text
        for prompt, seed, length in sorted(asked)
    }

    async def crowd(running, seen):
        async with running.async_client() as client:
            await asyncio.gather(*(one_client(client, n, expected, seen) for n in range(CLIENTS)))

    with serving(load(folders), max_batch=8, queue=CLIENTS) as running:
        service = running.service
        before, sizes, left, ran = of_calls(), [], 0, 0
        for _ in range(2):
            seen: list = []
            asyncio.run(crowd(running, seen))
            until(lambda: idle(service))
            names = [name for _, name in seen if name is not None]
            assert len(names) == len(set(names)) == CLIENTS * REQUESTS
            ran += len(names)
            left += sum(way == "leave" for way, _ in seen)
            counted = {
                sample.labels["finish"]: sample.value
                for family in service.metrics.registry.collect()
                for sample in family.samples
                if sample.name == "aquiline_requests_total"
            }
            assert sum(counted.values()) == ran
            assert counted.get("disconnected", 0) <= left  # some had their whole reply before they left
            assert set(counted) <= {"length", "stop", "disconnected"}
            assert service.loop.engine.running == service.loop.engine.waiting == 0
            until(lambda: of_calls() <= before)
            sizes.append(resident())
        assert counted["disconnected"] > 0
        assert sizes[1] - sizes[0] < 8 * 2**20  # the second crowd leaves nothing behind
        assert sum(service.loop.engine.cache.lengths) <= service.loop.engine.cache.tokens


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def start(folders, *more):  # noqa: F811
    """The command, in a process of its own; (process, address)."""
    command = [sys.executable, "-m", "aquiline", "serve", "--target", str(folders / "target"), "--draft", "none",
               "--device", "cpu", "--dtype", "float32", "--port", "0", "--max-batch", "4", *more]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.match(r"serving at http://(\S+)", line):
            break
    else:
        raise AssertionError("".join(said))
    threading.Thread(target=lambda: said.extend(process.stderr), daemon=True).start()

    where = SimpleNamespace(address=found[1], said=said, process=process)
    until(lambda: ready(where))
    return where


def ready(where) -> bool:
    try:
        return post(where, b"", "/ready", method="GET")[0] == 200
    except OSError:
        return False


def client_of(where, **more):
    return openai.OpenAI(base_url=f"http://{where.address}/v1", api_key="k", max_retries=0, timeout=WAIT, **more)


def requests(where, *names) -> int:
    text = post(where, b"", "/metrics", method="GET")[2].decode()
    return sum(
        int(float(count)) for name in names for count in re.findall(rf"^aquiline_requests_{name} (\S+)", text, re.M)
    )


def test_the_first_signal_lets_what_runs_end(folders, alone):  # noqa: F811
    where = start(folders, "--max-batch", "1")  # one after the other, so that most still wait when all have come
    expected = alone.generate(HI, max_new_tokens=400).text
    calls = [in_thread(lambda: ask(client_of(where), max_tokens=400)) for _ in range(6)]
    calls += [in_thread(lambda: joined(list(ask(client_of(where), max_tokens=400, stream=True)))) for _ in range(6)]
    until(lambda: requests(where, "running", "waiting", r"total\S*") >= 12)
    where.process.send_signal(signal.SIGTERM)
    refused = set()
    while not refused:
        try:
            ask(client_of(where), max_tokens=2)
        except openai.InternalServerError as error:
            refused.add(error.code)
        except openai.APIConnectionError:
            refused.add("gone")
    assert refused == {"shutting_down"}  # it answers as long as anything runs
    texts = [call() for call in calls]
    assert {text if isinstance(text, str) else text_of(text) for text in texts} == {expected}
    assert where.process.wait(WAIT) == 0
    assert "hi there" not in "".join(where.said)  # the log holds no prompt


def test_the_second_signal_ends_at_once(folders):  # noqa: F811
    where = start(folders, "--max-batch", "1")
    call = in_thread(lambda: ask(client_of(where), max_tokens=400, n=16))
    until(lambda: requests(where, "running", "waiting") > 0)
    where.process.send_signal(signal.SIGTERM)
    until(lambda: not ready(where))
    where.process.send_signal(signal.SIGTERM)
    assert where.process.wait(WAIT) == -signal.SIGTERM
    with pytest.raises(openai.APIConnectionError):
        call()
