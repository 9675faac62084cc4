"""Plain ASGI: bodies in, JSON and errors out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from neper.errors import InvalidRequestError, NeperError, RequestTooLargeError, UnsupportedMediaTypeError
from neper.server.transport.disconnect import ClientDisconnected

Header = tuple[bytes, bytes]
Result = TypeVar("Result")

# Larger replies are sent in parts, without a length.
LARGE_REPLY = 2**20


class Error(msgspec.Struct, forbid_unknown_fields=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, forbid_unknown_fields=True):
    error: Error


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that name (lower case)."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def has_body(scope: Scope) -> bool:
    return header(scope, b"transfer-encoding") is not None or (header(scope, b"content-length") or b"0") != b"0"


async def read_body(scope: Scope, receive: Receive, limit: int, hold: Callable[[int, int], None]) -> list[bytes]:
    """The parts of the body, as text. Raises when its headers do not say that it is JSON, or it exceeds `limit` bytes.

    The content type is required, since browsers then ask first before a page of another origin can post here.

    Args:
        hold: called before anything is received, and at each part, with the bytes received so far and the least number
            of bytes that the body will have. It raises where they cannot be held.
    """
    content_type = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise InvalidRequestError("the request needs the header Content-Type: application/json")
    for name, plain in ((b"content-encoding", b"identity"), (b"transfer-encoding", b"chunked")):
        encoding = (header(scope, name) or plain).strip().lower()
        if encoding != plain:
            raise UnsupportedMediaTypeError(
                f"{name.decode().title()}: {encoding.decode('latin-1')} is not read here; send the JSON as it is"
            )
    length = header(scope, b"content-length")
    expected = int(length) if length is not None and length.isdigit() else 0
    if expected > limit:
        raise _too_large(limit)
    hold(0, expected)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        hold(size, max(size, expected))
        parts.append(part)
        if not message.get("more_body", False):
            return parts


async def unless_left(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Work for a client whose request is there. When it leaves, cancels the work and raises ClientDisconnected."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, body: bytes, *, status: int = 200, headers: Sequence[Header] = ()) -> None:
    await send_body(send, body, b"application/json", status=status, headers=headers)


async def send_parts(send: Send, parts: Iterator[bytes], content_type: bytes, *, in_thread: bool) -> int:
    """Send a body that is made in parts: whole if it is small, otherwise each part as soon as it is made.

    Args:
        in_thread: make the parts in a thread, since each may take long.

    Returns:
        The number of bytes that were sent.
    """

    async def make() -> bytes:
        if in_thread:
            return await asyncio.to_thread(next, parts, b"")
        return next(parts, b"")

    made = []
    size = 0
    while size < LARGE_REPLY and (part := await make()):
        made.append(part)
        size += len(part)
    part = b"".join(made)
    if size < LARGE_REPLY:
        await send_body(send, part, content_type)
        return size
    made.clear()
    headers = [(b"content-type", content_type)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while part:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        part = await make()
        size += len(part)
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return size


async def send_body(
    send: Send, body: bytes, content_type: bytes, *, status: int = 200, headers: Sequence[Header] = ()
) -> None:
    own = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: NeperError) -> None:
    await send_json(send, error_json(error), status=error.status, headers=error_headers(error))


def error_headers(error: NeperError) -> list[Header]:
    """The headers of an error."""
    extra: list[Header] = []
    if error.retry_after is not None:
        extra.append((b"retry-after", b"%d" % error.retry_after))
    if error.status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if error.status == 408:
        extra.append((b"connection", b"close"))  # late bytes are not a next request
    if not error.retry_helps:
        extra.append((b"x-should-retry", b"false"))  # clients retry each 500 and 408 otherwise
    return extra


def error_json(error: NeperError) -> bytes:
    return msgspec.json.encode(ErrorReply(Error(error.message, error.type, error.param, error.code)))


def _too_large(limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body is larger than {limit} bytes")
