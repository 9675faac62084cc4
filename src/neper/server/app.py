"""The HTTP application: routes, and the small endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import neper
from neper.config import ServerConfig
from neper.engine.interface import Engine
from neper.errors import InvalidRequestError
from neper.server.bodies.chat import ChatBody
from neper.server.bodies.completion import CompletionBody
from neper.server.bodies.responses import ResponsesBody
from neper.server.candidates import candidates
from neper.server.explorer.files import FOLDER, PAGE, send_file
from neper.server.gate import Gate, routing_error
from neper.server.generation import Generation
from neper.server.openapi import ApiDocument
from neper.server.replies.chat import ChatReply
from neper.server.replies.completions import CompletionReply
from neper.server.replies.encoding import encode
from neper.server.replies.reply import Body, Reply, new_id
from neper.server.replies.responses import ResponsesReply
from neper.server.replies.sse import deliver
from neper.server.requests.chat import chat_generation
from neper.server.requests.generation import completion_generation, table_generation
from neper.server.requests.responses import response_generation
from neper.server.schemas.models import Model, ModelList
from neper.server.schemas.status import Health, Version
from neper.server.service import Service
from neper.server.tokenization import detokenize, tokenize, tokenizer_info
from neper.server.transport.accept import takes_arrow
from neper.server.transport.asgi import header, send_body, send_json, unless_left
from neper.server.transport.exchange import Exchange
from neper.text.tokenizer import Tokenizer

Handler = Callable[[Service, Scope, Receive, Send], Awaitable[None]]


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    model_name: str,
    eos_token_ids: Sequence[int] | None = None,
) -> Starlette:
    """The application over a started engine, which it neither starts nor closes.

    `app.state.service` is the Service: `drain()` it to refuse new requests while running ones end.

    Args:
        eos_token_ids: the model's end-of-sequence ids. Default: the tokenizer's one.
    """
    if eos_token_ids is None:
        eos_token_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    service = Service(engine, tokenizer, config, model_name=model_name, eos_token_ids=tuple(eos_token_ids))

    def route(path: str, method: str, handler: Handler) -> Route:
        return Route(path, _Endpoint(service, path, handler), methods=[method])

    def page(path: str) -> Route:
        return Route(path, _Endpoint(service, path, _page), methods=["GET"], include_in_schema=False)

    document = ApiDocument(needs_key=config.api_key is not None)

    async def openapi(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        version = query.get("version", ["3.1"])[-1]
        if version not in ("3.1", "3.2"):
            raise InvalidRequestError("version must be 3.1 or 3.2", param="version")
        await send_json(send, document.json(version))

    app = Starlette(
        routes=[
            route("/v1/chat/completions", "POST", _generates(ChatBody, "chatcmpl", chat_generation, ChatReply)),
            route("/v1/completions", "POST", _completions),
            route("/v1/responses", "POST", _generates(ResponsesBody, "resp", response_generation, ResponsesReply)),
            route("/v1/candidates", "POST", candidates),
            route("/v1/models", "GET", _models),
            route("/v1/models/{name:path}", "GET", _model),
            route("/tokenize", "POST", tokenize),
            route("/detokenize", "POST", detokenize),
            route("/tokenizer_info", "GET", tokenizer_info),
            route("/health", "GET", _health),
            route("/ping", "GET", _health),
            route("/version", "GET", _version),
            route("/metrics", "GET", _metrics),
            route("/openapi.json", "GET", openapi),
            *([page(PAGE), page(FOLDER + "{name}")] if config.explorer else []),
        ],
        middleware=[*_cross_origin(config), Middleware(Gate, service=service)],
        exception_handlers={HTTPException: routing_error},
    )
    # A path with an extra slash is not found. A redirect would lose the body of some clients' requests.
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _cross_origin(config: ServerConfig) -> list[Middleware]:
    """CORS, where origins are allowed. It answers preflights before the gate, since browsers send them without keys."""
    if not config.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    ]


class _Endpoint:
    """A handler as an ASGI application. `path` is that of its route, for metrics and the log."""

    def __init__(self, service: Service, path: str, handler: Handler) -> None:
        self.path = path
        self._service = service
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._service, scope, receive, send)


def _generates(
    kind: type[Body],
    prefix: str,
    start: Callable[[Service, Body, str], Coroutine[Any, Any, Generation]],
    shape: Callable[[Service, Body, Generation, str], Reply[Body]],
) -> Handler:
    """The handler of an endpoint that generates: its body, its replies' id prefix, its requests, its JSON."""

    async def handle(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        service.check_room()
        body = await service.read_json(scope, receive, kind)
        service.check_model(body.model)
        reply_id = new_id(prefix)
        generation = await unless_left(start(service, body, reply_id), receive)
        reply = shape(service, body, generation, reply_id)
        interval = service.config.stream_ping_interval
        await deliver(reply, Exchange.of(scope), receive, send, interval=interval)

    return handle


_completions_as_json = _generates(CompletionBody, "cmpl", completion_generation, CompletionReply)


async def _completions(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    if not await takes_arrow(scope):
        return await _completions_as_json(service, scope, receive, send)
    from neper.server.replies.table import CompletionTable  # where pyarrow is there

    await _generates(CompletionBody, "cmpl", table_generation, CompletionTable)(service, scope, receive, send)


async def _models(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, encode(ModelList("list", [_model_object(service)])))


async def _model(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    service.check_model(scope["path_params"]["name"])
    await send_json(send, encode(_model_object(service)))


def _model_object(service: Service) -> Model:
    return Model(service.model_name, "model", service.created, "neper", service.engine.capabilities.max_model_len)


async def _health(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    service.check_available()
    await send_json(send, encode(Health("ok")))


async def _version(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, encode(Version(neper.__version__)))


async def _page(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_file(scope, send)


async def _metrics(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    accept = (header(scope, b"accept") or b"").decode("latin-1")
    body, content_type = service.metrics.write(accept)
    await send_body(send, body, content_type.encode())
