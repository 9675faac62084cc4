"""The HTTP application: routes, and the small endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from neper.config import ServerConfig
from neper.engine.interface import Engine
from neper.errors import InvalidRequestError
from neper.server.asgi import read_json, send_json
from neper.server.chat import ChatReply
from neper.server.chat_protocol import ChatBody
from neper.server.chat_requests import chat_generation
from neper.server.completions import CompletionReply
from neper.server.gate import Gate, routing_error
from neper.server.generation import Generation
from neper.server.protocol import CompletionBody, DetokenizeBody, TokenizeBody
from neper.server.reply import Body, Reply, new_id
from neper.server.requests import completion_generation
from neper.server.service import Service
from neper.server.sse import deliver
from neper.server.strict import decode_body
from neper.text.tokenizer import Tokenizer
from neper.types import JsonObject

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

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        service.drain()
        service.close_all()

    def route(path: str, method: str, handler: Handler) -> Route:
        return Route(path, _Endpoint(service, handler), methods=[method])

    app = Starlette(
        routes=[
            route("/v1/chat/completions", "POST", _generates(ChatBody, "chatcmpl", chat_generation, ChatReply)),
            route(
                "/v1/completions", "POST", _generates(CompletionBody, "cmpl", completion_generation, CompletionReply)
            ),
            route("/v1/models", "GET", _models),
            route("/v1/models/{name:path}", "GET", _model),
            route("/tokenize", "POST", _tokenize),
            route("/detokenize", "POST", _detokenize),
            route("/health", "GET", _health),
        ],
        middleware=[Middleware(Gate, api_key=config.api_key)],
        exception_handlers={HTTPException: routing_error},
        lifespan=lifespan,
    )
    app.state.service = service
    return app


class _Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, service: Service, handler: Handler) -> None:
        self._service = service
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._service, scope, receive, send)


def _generates(
    kind: type[Body],
    prefix: str,
    start: Callable[[Service, Body, str], Awaitable[Generation]],
    shape: Callable[[Service, Body, Generation, str], Reply[Body]],
) -> Handler:
    """The handler of an endpoint that generates: its body, its replies' id prefix, its requests, its JSON."""

    async def handle(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        body = decode_body(await read_json(scope, receive, service.config.max_body_bytes), kind)
        service.check_model(body.model)
        body.check()
        service.check_available()
        reply_id = new_id(prefix)
        generation = await start(service, body, reply_id)
        await deliver(shape(service, body, generation, reply_id), receive, send)

    return handle


async def _models(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, orjson.dumps({"object": "list", "data": [_model_object(service)]}))


async def _model(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    service.check_model(scope["path_params"]["name"])
    await send_json(send, orjson.dumps(_model_object(service)))


def _model_object(service: Service) -> JsonObject:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "neper",
        "max_model_len": service.engine.capabilities.max_model_len,
    }


async def _tokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    body = decode_body(await read_json(scope, receive, service.config.max_body_bytes), TokenizeBody)
    service.check_model(body.model)
    tokens = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    await send_json(send, orjson.dumps({"tokens": tokens, "count": len(tokens)}))


async def _detokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    body = decode_body(await read_json(scope, receive, service.config.max_body_bytes), DetokenizeBody)
    service.check_model(body.model)
    vocab_size = service.engine.capabilities.vocab_size
    if body.tokens and max(body.tokens) >= vocab_size:
        raise InvalidRequestError(f"tokens: ids must be in 0..{vocab_size - 1}", param="tokens")

    def decode() -> bytes:
        return orjson.dumps({"prompt": service.tokenizer.decode_bytes(body.tokens).decode("utf-8", "replace")})

    await send_json(send, await service.run(len(body.tokens), decode))


async def _health(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    service.check_available()
    await send_json(send, b'{"status":"ok"}')
