"""Delivery of a generation: as server-sent events, or folded into one body.

A stream's headers go out once its request is queued. A comment line goes out after a while of silence, which a proxy or
a client may take for a dead connection. All pending deltas go out in one write. A client that leaves ends the
generation at once, also while a write waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.types import Receive, Send

from neper.errors import InternalError, NeperError
from neper.server.generation import Generation
from neper.server.replies.reply import Reply
from neper.server.transport.asgi import send_parts
from neper.server.transport.disconnect import ClientDisconnected
from neper.server.transport.exchange import Exchange

log = logging.getLogger(__name__)

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Tells proxies (nginx) to pass events on as they come.
    (b"x-accel-buffering", b"no"),
]


# Larger events, those of scored prompts, are sent before the next one is written.
LARGE_EVENT = 2**16
_COMMENT = b": waiting\n\n"


async def deliver(reply: Reply[Any], exchange: Exchange, receive: Receive, send: Send, *, interval: float) -> None:
    """Run the generation and send its reply. Raises errors from before anything was sent.

    Args:
        interval: seconds of silence after which a stream sends a comment; 0 = never.
    """
    generation = reply.generation
    generation.start()
    watcher = asyncio.create_task(_watch(receive, generation))
    try:
        if reply.request.stream:
            exchange.error = await _stream(reply, exchange, send, interval)
        else:
            await _fold(reply, exchange)
            exchange.reply_bytes += await send_parts(
                send, reply.parts(), reply.content_type, in_thread=generation.scores_prompts
            )
    finally:
        watcher.cancel()
        generation.close()
        usage = generation.usage()
        exchange.prompt_tokens, exchange.generated_tokens = usage.prompt_tokens, usage.completion_tokens


async def _fold(reply: Reply[Any], exchange: Exchange) -> None:
    deltas = await reply.generation.next_deltas()
    exchange.first_results = time.monotonic()
    while deltas:
        for delta in deltas:
            if delta.first:
                await reply.open(delta)
            reply.add(delta)
        deltas = await reply.generation.next_deltas()


async def _stream(reply: Reply[Any], exchange: Exchange, send: Send, interval: float) -> NeperError | None:
    """Send all events. Returns the error that ended them, which is among the events as well."""
    failure: NeperError | None = None
    finished: set[int] = set()
    # Clients measure the time to the first token by the first event, so that one comes with the first token.
    events: list[bytes] = []
    begun = False
    opening = reply.begin()
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    silence = _Silence(send, interval)
    try:
        deltas = await reply.generation.next_deltas()
        exchange.first_results = time.monotonic()
        while deltas:
            for delta in deltas:
                if delta.first:
                    await reply.open(delta)
                if not begun:
                    events.append(opening)
                    begun = True
                events.append(reply.event(delta))
                if delta.finish_reason is not None:
                    finished.add(delta.index)
                if len(events[-1]) > LARGE_EVENT:
                    silence.broken = True
                    exchange.reply_bytes += len(events[-1])
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                    events.clear()
            body = b"".join(events)
            events.clear()
            if body:
                silence.broken = True
                await send({"type": "http.response.body", "body": body, "more_body": True})
            deltas = await reply.generation.next_deltas()
        events.append(reply.end())
    except ClientDisconnected:
        raise
    except Exception as error:
        if not isinstance(error, NeperError):
            log.exception("a stream failed")
            error = InternalError("internal error")
        failure = error
        reply.generation.close()
        unfinished = [choice.index for choice in reply.generation.choices if choice.index not in finished]
        if not begun:
            events.append(opening)
        events.append(reply.broken(error, unfinished))
    finally:
        silence.close()
    await send({"type": "http.response.body", "body": b"".join([*events, reply.done]), "more_body": False})
    return failure


class _Silence:
    """Sends a comment for every `interval` in which `broken` was not set."""

    def __init__(self, send: Send, interval: float) -> None:
        self.broken = False
        self._task = asyncio.create_task(self._break(send, interval)) if interval else None

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _break(self, send: Send, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            if not self.broken:
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
            self.broken = False


async def _watch(receive: Receive, generation: Generation) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            generation.fail(ClientDisconnected())
            return
