"""The gate around all routes: request ids, hosts, the API key, limits of number and time, the log, the metrics,
and errors in the API's own form.

Plain ASGI, since Starlette's BaseHTTPMiddleware would stand between a stream and the client's disconnect.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neper.errors import (
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NeperError,
    NotFoundError,
    ReceiveTimeoutError,
    RequestTimeoutError,
)
from neper.server.explorer.files import FILES
from neper.server.service import Service
from neper.server.transport.asgi import error_json, has_body, header, send_error
from neper.server.transport.disconnect import ClientDisconnected
from neper.server.transport.exchange import Exchange
from neper.server.transport.hosts import AllowedHosts

log = logging.getLogger(__name__)

# They neither use the model nor tell its contents, and must answer when nothing else does.
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/openapi.json", *FILES})
# A generation ends itself when its time is over. After this much more the request is cut: its body may come byte by
# byte, or its client may not read.
CUT_SECONDS = 10.0

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")


class Gate:
    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        config = service.config
        self._app = app
        self._service = service
        self._api_key = None if config.api_key is None else config.api_key.encode()
        self._hosts = AllowedHosts(config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = header(scope, b"x-request-id") or b""
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16).encode()
        exchange = Exchange(request_id.decode(), arrived=not has_body(scope))
        exchange.attach(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            self._hosts.check(scope)
            if scope["path"] in OPEN_PATHS:
                await self._app(scope, receive, send_with_id)
            else:
                self._check_key(scope)
                with self._service.request(exchange):
                    await self._timed(exchange, scope, receive, send_with_id)
        except ClientDisconnected:
            log.debug("request %s: the client is gone", exchange.request_id)
        except Exception as error:
            if not isinstance(error, NeperError):
                log.exception("request %s failed", exchange.request_id)
                error = InternalError("internal error")
            exchange.error = error
            if not exchange.status:
                await send_error(send_with_id, error)
            # Its frames refer to the exchange. In such a cycle the body would stay until the next full collection.
            error.__traceback__ = error.__context__ = error.__cause__ = None
        finally:
            self._note(scope, exchange)

    async def _timed(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = self._service.config.request_timeout
        late = RequestTimeoutError(f"the request took longer than {seconds:g} seconds")

        def cut_off() -> None:
            exchange.cut(late if exchange.arrived else ReceiveTimeoutError("the request's body did not arrive in time"))

        timer = asyncio.get_running_loop().call_later(seconds + CUT_SECONDS, cut_off)
        try:
            await self._app(scope, self._receiver(exchange, receive), send)
        except asyncio.CancelledError:
            if exchange.cut_by is None:
                raise
            raise exchange.cut_by from None
        finally:
            timer.cancel()

    def _receiver(self, exchange: Exchange, receive: Receive) -> Receive:
        """`receive` with a limit on the wait for a body."""
        seconds = self._service.config.receive_timeout
        error = ReceiveTimeoutError(f"nothing more of the request's body came for {seconds:g} seconds")

        async def receive_in_time() -> Message:
            if exchange.arrived:
                return await receive()
            timer = asyncio.get_running_loop().call_later(seconds, exchange.cut, error)
            try:
                message = await receive()
            finally:
                timer.cancel()
            if not message.get("more_body", False):
                self._service.arrived(exchange)
            return message

        return receive_in_time

    def _check_key(self, scope: Scope) -> None:
        if self._api_key is None:
            return
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._api_key):
            raise AuthenticationError("a valid API key is needed: Authorization: Bearer KEY")

    def _note(self, scope: Scope, exchange: Exchange) -> None:
        endpoint = getattr(scope.get("endpoint"), "path", "other")
        self._service.metrics.observe(exchange, endpoint)
        error = exchange.error
        if error is not None and error.status == 500:
            log.error("request %s ended with an error: %s", exchange.request_id, error.message)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "request %s: %s %s, status %d, %d prompt and %d generated tokens, %.3f s%s",
                exchange.request_id,
                scope["method"],
                endpoint,
                exchange.status,
                exchange.prompt_tokens,
                exchange.generated_tokens,
                time.monotonic() - exchange.started,
                "" if error is None else f" ({error.code})",
            )


async def routing_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors (no such route, wrong method) in our form."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        ours: NeperError = NotFoundError(f"there is no {path} here")
    elif error.status_code == 405:
        ours = MethodNotAllowedError(f"{path} does not take {request.method}")
    else:
        ours = InvalidRequestError(error.detail)
    return Response(error_json(ours), ours.status, error.headers, "application/json")
