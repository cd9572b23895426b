"""A server that answers: what is sent, ids or text, retries, refusals. A real one on this machine, with a script."""

import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from aquiline.config import AnswerConfig, AquilineWarning, UserError
from aquiline.data.answer import answer
from aquiline.data.dialogue import Turn
from aquiline.data.prompts import Prompt
from aquiline.data.rows import Dropped
from aquiline.data.server import Server
from tests.tiny_chat import THINKING, assistant, byte_chat, user

END = 261
CHAT = byte_chat(THINKING)
KWARGS = {"enable_thinking": False}


class Fake:
    """Answers with the last message's text and `!`, unless the script holds something else for a prompt."""

    def __init__(self):
        self.script = {}  # user's text -> deque of (status, body) or "drop"
        self.requests, self.headers = [], []
        self.with_ids, self.kwargs, self.models = True, KWARGS, ["m"]
        self.finish, self.most, self.now = "stop", 0, 0
        self.lock, self.together = threading.Lock(), None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._send(200, {"data": [{"id": name} for name in fake.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.requests.append(body)
                    fake.headers.append(dict(self.headers))
                    fake.now += 1
                    fake.most = max(fake.most, fake.now)
                    scripted = fake.script.get(body["messages"][-1]["content"])
                    step = scripted.popleft() if scripted else None
                if fake.together is not None:
                    fake.together.wait(60)
                with fake.lock:
                    fake.now -= 1
                if step == "drop":
                    self.connection.close()
                    return
                self._send(*(step or (200, fake.answer(body))))

            def _send(self, status, value, headers=()):
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                for name, text in headers:
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, body):
        text = body["messages"][-1]["content"] + "!"
        choice = {"message": {"role": "assistant", "content": text, "tool_calls": []}, "finish_reason": self.finish}
        value = {"choices": [choice]}
        if self.with_ids and body.get("return_token_ids"):
            choice["token_ids"] = [*CHAT.encode(text), END][: None if self.finish == "stop" else -1]
            value["prompt_token_ids"] = CHAT.render(body["messages"], **self.kwargs)
        return value


@pytest.fixture
def fake():
    fake = Fake()
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


def run(fake, tmp_path, texts=("a", "b"), in_flight=2, config=None, **more):
    naps = []
    server = Server(fake.url, CHAT, KWARGS, sleep=naps.append, timeout=60, **more)
    dropped, out = Dropped(), tmp_path / "a.jsonl"
    config = config or AnswerConfig(template_kwargs=KWARGS, in_flight=in_flight, max_new_tokens=9)
    counts = answer([Prompt(t, "s", [user(t)]) for t in texts], out, server, CHAT, config, dropped)
    return {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}, counts, naps


def test_what_is_asked_and_what_becomes_of_the_answer(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    rows, counts, naps = run(fake, tmp_path)
    prompt = CHAT.render([user("a")], **KWARGS)
    assert rows["a"]["ids"] == [*prompt, *CHAT.encode("a!"), END]
    assert rows["a"]["replies"] == [[len(prompt), len(rows["a"]["ids"])]]
    assert rows["a"]["messages"] == [user("a"), assistant("a!")]
    assert rows["a"]["target"]["name"] == "m"
    assert "retokenised" not in rows["a"]
    assert (counts["replies"], naps) == ({"stop": 2}, [])
    body = fake.requests[0]
    assert body["chat_template_kwargs"] == KWARGS
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 9, 0.0)
    assert fake.headers[0]["Authorization"] == "Bearer k"


def test_a_server_without_ids_gives_text_and_the_row_says_so(fake, tmp_path):
    with_ids, _, _ = run(fake, tmp_path)
    fake.with_ids = False
    (tmp_path / "a.jsonl").unlink()
    rows, _, _ = run(fake, tmp_path)
    assert rows["a"].pop("retokenised") is True
    assert rows["a"]["ids"] == with_ids["a"]["ids"]
    fake.script["c"] = deque([(400, {"error": "Unrecognized request argument: return_token_ids"})])
    (tmp_path / "a.jsonl").unlink()
    fake.requests.clear()
    rows, _, _ = run(fake, tmp_path, ["c", "d"], in_flight=1)
    assert set(rows) == {"c", "d"}
    assert ["return_token_ids" in body for body in fake.requests] == [True, False, False]


def test_faults_that_pass_are_waited_for_with_growing_pauses(fake, tmp_path):
    fake.script["a"] = deque([(503, b"busy"), (429, b""), (500, b"<html>"), "drop", (200, b"not json")])
    rows, counts, naps = run(fake, tmp_path)
    assert set(rows) == {"a", "b"}
    assert counts["dropped"] == {}
    assert len(naps) == 5
    assert all(0.5 * 2**i <= nap <= 2**i for i, nap in enumerate(naps))


def test_retry_after_is_obeyed(fake, tmp_path, monkeypatch):
    original = fake.http.RequestHandlerClass._send

    def send(self, status, value, headers=()):
        original(self, status, value, [("Retry-After", "7")] if status == 429 else ())

    monkeypatch.setattr(fake.http.RequestHandlerClass, "_send", send)
    fake.script["a"] = deque([(429, b"")])
    assert run(fake, tmp_path)[2] == [7.0]


def test_what_a_server_says_is_in_vain_is_not_asked_again_in_the_same_run(fake, tmp_path):
    fake.script["a"] = deque([(504, b"too long", [("X-Should-Retry", "false")])])
    rows, counts, naps = run(fake, tmp_path)
    assert set(rows) == {"b"}
    assert counts["dropped"] == {"refused by the server: 504": 1}
    assert naps == []


def test_what_is_refused_is_counted_and_asked_again_by_the_next_run(fake, tmp_path):
    fake.script["a"] = deque([(400, {"error": {"message": "too\n long"}})])
    fake.script["b"] = deque([(500, b"")] * 6)
    fake.script["c"] = deque([(200, {"choices": []})])
    fake.script["d"] = deque([(200, {"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]})])
    rows, counts, naps = run(fake, tmp_path, "abcde")
    assert set(rows) == {"e"}
    assert len(naps) == 5
    assert counts["dropped"] == {
        "refused by the server: 400": 1, "no answer from the server": 1, "odd answer": 2,
    }  # fmt: skip
    rows, counts, _ = run(fake, tmp_path, "abcde")
    assert set(rows) == set("abcde")
    assert (counts["before"], counts["dropped"]) == (1, {})


def test_many_are_in_flight_and_no_more_than_asked_for(fake, tmp_path):
    fake.together = threading.Barrier(4)  # no request is answered before four are there
    rows, _, _ = run(fake, tmp_path, [f"p{i}" for i in range(12)], in_flight=4)
    assert len(rows) == 12
    assert fake.most == 4


def test_what_would_befall_every_prompt_ends_the_run(fake, tmp_path):
    fake.kwargs = {}
    with pytest.raises(UserError, match="its chat template or tokenizer is not that of --target"):
        run(fake, tmp_path)
    fake.kwargs = KWARGS
    fake.script["z"] = deque([(404, {"error": "no such model"})])  # not one that the run before may have answered
    with pytest.raises(UserError, match=r"chat/completions answered 404 .*no such model"):
        run(fake, tmp_path, ["z"])
    fake.script = {f"p{i}": deque([(500, b"down")] * 6) for i in range(40)}
    with pytest.raises(UserError, match=r"does not answer \(500 down\); when it does, the same command goes on"):
        run(fake, tmp_path, list(fake.script))
    fake.models = ["m", "n"]
    with pytest.raises(UserError, match="serves m, n; name one with --model"):
        run(fake, tmp_path)
    assert run(fake, tmp_path, model="m")[0]
    with pytest.raises(UserError, match="is no http address"):
        Server("localhost:8000", CHAT, {})
    fake.http.shutdown()
    fake.http.server_close()
    with pytest.raises(UserError, match="does not answer"):
        Server(fake.url, CHAT, {})


def test_replies_without_their_end_are_said_once(fake, tmp_path):
    turn = Turn([user("a")], CHAT.render([user("a")], **KWARGS), 9, 0.0, 1)
    server = Server(fake.url, CHAT, KWARGS)
    value = fake.answer({"messages": [user("a")], "return_token_ids": True})
    value["choices"][0]["token_ids"].pop()
    with pytest.warns(AquilineWarning, match="end-of-turn") as caught:
        assert [server._reply(value, turn).ids for _ in range(3)] == [CHAT.encode("a!")] * 3
    assert len(caught) == 1
