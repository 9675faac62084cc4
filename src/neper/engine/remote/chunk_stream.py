"""The chunks of one request on their way from an engine's process to whoever reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from neper.errors import EngineDeadError
from neper.types import TokenChunk


class ChunkStream:
    """A TokenStream (see neper.engine.interface) that is filled by `put`.

    Args:
        forget: called with the request's id by `close`, each time: the engine is to stop what is left of its work.
    """

    def __init__(self, request_id: str, forget: Callable[[str], None]) -> None:
        self._request_id = request_id
        self._forget = forget
        self._chunks: asyncio.Queue[TokenChunk | EngineDeadError | None] = asyncio.Queue()
        self._ended = False

    def put(self, chunk: TokenChunk | EngineDeadError) -> None:
        self._chunks.put_nowait(chunk)

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self

    async def __anext__(self) -> TokenChunk:
        if self._ended:
            raise StopAsyncIteration
        chunk = await self._chunks.get()
        if self._ended or chunk is None:  # closed while it waited
            raise StopAsyncIteration
        if isinstance(chunk, EngineDeadError):
            self._ended = True
            raise chunk
        self._ended = chunk.finish_reason is not None
        return chunk

    def close(self) -> None:
        self._ended = True
        self._chunks.put_nowait(None)  # wakes a task that waits for the next chunk
        self._forget(self._request_id)
