"""A server on this machine that follows a script, in a thread, and what scripts are made of."""

import dataclasses
import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclasses.dataclass
class Sent:
    content: bytes
    headers: dict[str, str]


class Scripted:
    """Answers that a test has written: (status, body, headers), or what a stream is made of; one after the other.

    `page`: what it sends at /.
    """

    def __init__(self, page=None, port=0):
        self.answers, self.bodies, self.keys = deque(), [], []
        self.model, self.left = "tiny", threading.Event()
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/":
                    headers = {k: v for k, v in page.headers.items() if k.lower() not in ("content-length", "date")}
                    self.whole(200, page.content, headers)
                else:
                    self.whole(200, json.dumps({"data": [{"id": scripted.model}]}).encode())

            def do_POST(self):
                scripted.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                scripted.keys.append(self.headers["Authorization"])
                answer = scripted.answers.popleft()
                if isinstance(answer, tuple):
                    self.whole(answer[0], json.dumps(answer[1]).encode(), *answer[2:])
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                try:
                    for chunk in answer:
                        self.wfile.write(f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n".encode())
                        self.wfile.flush()
                except (BrokenPipeError, ConnectionResetError):
                    scripted.left.set()

            def whole(self, status, data, headers=()):
                self.send_response(status)
                for name, value in {"Content-Length": len(data), **dict(headers)}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def close(self):
        self.http.shutdown()
        self.http.server_close()


def chunk(*tokens, tree=None):
    """One of a stream; tokens as (text, origin)."""
    told = [{"id": hash(text) % 1000, "text": text, "origin": origin} for text, origin in tokens]
    choice = {"delta": {"content": "".join(text for text, _ in tokens)}, "finish_reason": None}
    return {"choices": [choice | {"aquiline": {"tokens": told, "tree": tree}}]}


def usage(tokens, tau=None):
    figures = {"cycles": 1, "tau": tau, "seconds": 2.0, "first_token_seconds": 1.0}
    return {"choices": [], "usage": {"completion_tokens": tokens, "aquiline": figures}}


def stream(*chunks, tau=None):
    return [*chunks, usage(sum(len(c["choices"][0]["aquiline"]["tokens"]) for c in chunks), tau), "[DONE]"]
