"""The gate around all routes: request ids, the API key, and every error in the API's own form.

Plain ASGI, since Starlette's BaseHTTPMiddleware would stand between a stream and the client's disconnect.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neper.errors import AuthenticationError, InvalidRequestError, MethodNotAllowedError, NeperError, NotFoundError
from neper.server.asgi import error_json, header, send_error
from neper.server.generation import ClientDisconnected

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")


class Gate:
    def __init__(self, app: ASGIApp, *, api_key: str | None) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = header(scope, b"x-request-id") or b""
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16).encode()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            self._check_key(scope)
            await self._app(scope, receive, send_with_id)
        except ClientDisconnected:
            log.debug("request %s: the client is gone", request_id.decode())
        except Exception as error:
            if not isinstance(error, NeperError):
                log.exception("request %s failed", request_id.decode())
                error = NeperError("internal error")
            if not started:
                await send_error(send_with_id, error)

    def _check_key(self, scope: Scope) -> None:
        if self._api_key is None or not scope["path"].startswith("/v1/"):
            return
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._api_key):
            raise AuthenticationError("a valid API key is needed: Authorization: Bearer KEY")


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
