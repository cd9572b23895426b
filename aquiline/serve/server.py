"""An OpenAI-compatible server: routes, errors, start and end. Handlers only queue requests for the one engine."""

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
import signal
import socket
import time
import warnings
from collections.abc import AsyncIterator, Callable
from importlib import resources
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from aquiline.api import Model
from aquiline.config import AquilineWarning, ServeConfig, UserError
from aquiline.data.grammar import Grammars
from aquiline.decode.engine import Engine
from aquiline.serve.answers import Answer
from aquiline.serve.asked import asked, check_count, check_name
from aquiline.serve.connections import Idle, limited
from aquiline.serve.door import HEADER_BYTES, LOOPBACK, Door
from aquiline.serve.errors import Refused
from aquiline.serve.forms import OF_A_BODY, ChatAnswer, Models, ServedModel, Status, TextAnswer, documented
from aquiline.serve.loop import EngineLoop
from aquiline.serve.metrics import Metrics
from aquiline.serve.reply import Places, Reply
from aquiline.serve.schema import ChatBody, CompletionBody

_SPARE = 128  # connections beyond those that hold a place: of browsers, of probes, of who is told that it is busy
_BACKLOG = 512
_KEEP_SECONDS = 100  # for the next request: proxies keep a connection for 90, and must be those who give it up first
_CLOSE_SECONDS = 5  # at the end, for what has neither been answered nor will be
_BODY_BYTES, _BYTES_PER_TOKEN = 2**20, 16  # a body may have the larger of the two, for the whole context

log = logging.getLogger("aquiline.serve")


class Service:
    """One model behind one engine loop."""

    def __init__(self, model: Model, config: ServeConfig) -> None:
        self.model, self.config, self.metrics = model, config, Metrics()
        self.died: Callable[[], None] = lambda: None
        self.loop = EngineLoop(self._make_engine, config.max_batch, self.metrics, model.watch, lambda: self.died())
        self.places = Places(config.max_batch + config.queue)
        self.created = int(time.time())
        try:
            target = model.target.config
            self.grammars: Grammars | None = Grammars(model.chat, model.stop_ids, target.vocab_size)
        except UserError as error:
            self.grammars = None
            warnings.warn(f"replies in JSON will be refused: {error}", AquilineWarning, stacklevel=2)

    def _make_engine(self) -> Engine:
        return Engine(self.model.target, self.model.draft, self.config.max_batch, self.config.context)

    def reply(self, body: ChatBody | CompletionBody) -> Reply:
        timeout, most = body.timeout or self.config.timeout, self.config.timeout
        if timeout > most:
            raise Refused(400, f"timeout {timeout:g} is more than this server's {most:g} seconds", param="timeout")
        check_count(body)
        return Reply(
            self.loop,
            self.places,
            body.stream,
            body.token_origins,
            timeout,
            self.config.patience,
            lambda: asked(self.model, self.loop.engine, self.grammars, body),
            lambda what: Answer(body, what, self.model.chat, self.model.target_name),
        )

    @property
    def ready(self) -> bool:
        return self.loop.warm and not (self.loop.dead or self.places.closed)

    def model_served(self) -> ServedModel:
        return {
            "id": self.model.target_name,
            "object": "model",
            "created": self.created,
            "owned_by": "aquiline",
            "max_model_len": self.loop.engine.context,
            "draft": self.model.draft_name,
        }


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Without 422, which FastAPI documents by itself and this server never answers."""
        document = super().openapi()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


def make_app(service: Service, key: str | None = None, names: tuple[str, ...] | None = None) -> FastAPI:
    """The app of one service; `key` and `names` as in `Door`."""

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        service.loop.start()
        yield
        await asyncio.to_thread(service.loop.stop)

    # The documentation pages of FastAPI load scripts from elsewhere.
    app = _App(title="aquiline", version="1", docs_url=None, redoc_url=None, lifespan=life)
    _answer_errors(app, service)
    _add_routes(app, service)
    most = max(_BODY_BYTES, _BYTES_PER_TOKEN * service.loop.engine.context)
    patience, count = service.config.patience, service.metrics.turned_away
    app.add_middleware(Door, key=key, names=names, most_bytes=most, patience=patience, count=count)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=documented(ChatAnswer, *OF_A_BODY, streams=True))
    async def chat_completions(body: ChatBody) -> Response:
        return service.reply(body)

    @app.post("/v1/completions", responses=documented(TextAnswer, *OF_A_BODY, streams=True))
    async def completions(body: CompletionBody) -> Response:
        return service.reply(body)

    @app.get("/v1/models", responses=documented(Models, 401))
    async def models() -> Models:
        return {"object": "list", "data": [service.model_served()]}

    @app.get("/v1/models/{name:path}", responses=documented(ServedModel, 401, 404))
    async def one_model(name: str) -> ServedModel:
        check_name(service.model, name)
        return service.model_served()

    @app.get("/health", responses=documented(Status, 503))
    async def health() -> Status:
        if service.loop.dead:
            raise Refused(503, "the engine has failed", code="engine_fault")
        return {"status": "ok"}

    @app.get("/ready", responses=documented(Status, 503))
    async def ready() -> Status:
        if not service.ready:
            raise Refused(503, "the server is starting or shutting down", code="not_ready")
        return {"status": "ready"}

    @app.get("/metrics", responses=documented(None, 401), response_class=Response)
    async def metrics() -> Response:
        text = service.metrics.text(service.loop.engine, service.loop.under_way)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    page, policy = _page()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def _page() -> tuple[bytes, str]:
    """The page, and a policy that lets it run what stands in it and talk to this server, nothing else."""
    file = resources.files("aquiline.serve") / "chat.html"
    page = file.read_bytes()
    hashes = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
            for text in re.findall(rb"<%b[^>]*>(.*?)</%b>" % (tag, tag), page, re.S)
        )
        for tag in (b"script", b"style")
    }
    scripts, styles = (hashes[tag] or "'none'" for tag in (b"script", b"style"))
    return page, (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _answer_errors(app: FastAPI, service: Service) -> None:
    def answer(refused: Refused) -> Response:
        service.metrics.turned_away(refused.status)
        return Response(refused.data, refused.status, refused.headers, "application/json")

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return answer(_invalid(error))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        found = Refused(error.status_code, str(error.detail))
        found.headers |= dict(error.headers or {})
        return answer(found)

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        return answer(Refused(500, "an error inside the server; its log says more"))


def _invalid(error: RequestValidationError) -> Refused:
    """The fault that lies deepest in a body, for of a union's kinds that is the one that was meant; its field is named
    as OpenAI does: `messages[0].role`.
    """
    fault = max(error.errors(), key=lambda e: len(e["loc"]))
    if fault["type"] == "json_invalid":
        return Refused(400, "the body is not JSON", code="invalid_json")
    path, at = "", error.body
    for depth, part in enumerate(fault["loc"][1:], 2):
        missing = fault["type"] == "missing" and depth == len(fault["loc"])
        if missing or isinstance(part, int) or (isinstance(at, dict) and part in at):  # others name a kind of a union
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
            at = at.get(part) if isinstance(at, dict) else at[part] if isinstance(at, list) else None
    path = path.removeprefix(".")
    if fault["type"] == "extra_forbidden":
        return Refused(400, f"{path} is not supported by this server; leave it out", param=path, code="unsupported")
    if not path and fault["type"] != "value_error":
        return Refused(400, "the body must be a JSON object, sent as Content-Type: application/json", code="no_object")
    message = fault["msg"].removeprefix("Value error, ")
    return Refused(400, f"{path}: {message}" if path else message, param=path or None, code="invalid_value")


class Server(uvicorn.Server):
    """The first signal lets what runs end and refuses what comes; the second ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._idle = Idle(self.server_state.connections, service.config.patience)
        service.died = self._give_up

    def _give_up(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.places.closed:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._service.places.closed = True

    async def on_tick(self, counter: int) -> bool:
        if self._service.places.closed and not self._service.places.taken:
            self.should_exit = True
        self._idle.close()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What has been answered is sent for as long as it is being read."""
        while any(connection.transport.get_write_buffer_size() for connection in self.server_state.connections):
            self._idle.close()
            await asyncio.sleep(0.1)
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def make_server(service: Service, key: str | None = None) -> Server:
    config = service.config
    app = make_app(service, key, (*LOOPBACK, config.host) if config.is_local else None)
    settings = uvicorn.Config(
        app,
        http=limited(service.places.most + _SPARE, config.patience, service.metrics.turned_away),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=2 * HEADER_BYTES,  # names, values and what stands between them, in one piece
        timeout_keep_alive=_KEEP_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    return Server(settings, service)


def bind(config: ServeConfig) -> socket.socket:
    """The address, taken before a model is loaded for it: who calls too early waits. UserError where that cannot be."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        taken = socket.socket(family, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((config.host, config.port))
        taken.listen(_BACKLOG)  # only now nobody else has it
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen at {config.host}, port {config.port}: {error}") from error
    return taken
