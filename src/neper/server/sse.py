"""Delivery of a generation: as server-sent events, or folded into one body.

All deltas that are pending go out in one write. A client that leaves ends the generation at once, also while a write
waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.types import Receive, Send

from neper.errors import InternalError, NeperError
from neper.server.asgi import send_json
from neper.server.choice import Delta
from neper.server.exchange import Exchange
from neper.server.generation import ClientDisconnected, Generation
from neper.server.reply import Reply

log = logging.getLogger(__name__)

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Tells proxies (nginx) to pass events on as they come.
    (b"x-accel-buffering", b"no"),
]


async def deliver(reply: Reply[Any], exchange: Exchange, receive: Receive, send: Send) -> None:
    """Run the generation and send its reply. Raises what went wrong before anything was sent."""
    generation = reply.generation
    generation.start()
    watcher = asyncio.create_task(_watch(receive, generation))
    try:
        # Nothing is sent before the first delta, so that an early failure still has its own HTTP status.
        deltas = await generation.next_deltas()
        exchange.first_results = time.monotonic()
        if reply.request.stream:
            exchange.error = await _stream(reply, deltas, send)
        else:
            await send_json(send, await _fold(reply, deltas))
    finally:
        watcher.cancel()
        generation.close()
        usage = generation.usage()
        exchange.prompt_tokens, exchange.generated_tokens = usage["prompt_tokens"], usage["completion_tokens"]


async def _fold(reply: Reply[Any], deltas: list[Delta]) -> bytes:
    while deltas:
        for delta in deltas:
            if delta.first:
                await reply.open(delta)
            reply.add(delta)
        deltas = await reply.generation.next_deltas()
    return reply.body()


async def _stream(reply: Reply[Any], deltas: list[Delta], send: Send) -> NeperError | None:
    """Send events from the first deltas on; returns the error that ended them, which they tell as well."""
    failure: NeperError | None = None
    finished: set[int] = set()
    events: list[bytes] = []
    started = False
    try:
        while deltas:
            for delta in deltas:
                if delta.first:
                    await reply.open(delta)
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    events.append(reply.begin())
                    started = True
                events.append(reply.event(delta))
                if delta.finish_reason is not None:
                    finished.add(delta.index)
            body = b"".join(events)
            events.clear()
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            deltas = await reply.generation.next_deltas()
        events.append(reply.end())
    except ClientDisconnected:
        raise
    except Exception as error:
        if not started:
            raise
        if not isinstance(error, NeperError):
            log.exception("a stream failed")
            error = InternalError("internal error")
        failure = error
        reply.generation.close()
        unfinished = [choice.index for choice in reply.generation.choices if choice.index not in finished]
        events.append(reply.broken(error, unfinished))
    await send({"type": "http.response.body", "body": b"".join([*events, reply.done]), "more_body": False})
    return failure


async def _watch(receive: Receive, generation: Generation) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            generation.fail(ClientDisconnected())
            return
