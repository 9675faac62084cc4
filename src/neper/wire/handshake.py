"""The handshake: the lines of an engine about itself until it is ready."""

from __future__ import annotations

import asyncio
import logging
import time

from neper.errors import StartupError
from neper.wire.child import Child
from neper.wire.lines import Info, LineError, ReadyLine, parse_answer

logger = logging.getLogger("neper.engine")


class Handshake:
    """The lines of a process up to READY. Lines other than INFO are skipped: it may print a greeting.

    Attributes:
        fields: those of its INFO lines.
    """

    def __init__(self, timeout: float) -> None:
        self.fields: dict[str, str] = {}
        self._timeout = timeout
        self._heard = time.monotonic()
        self._ready: asyncio.Future[ReadyLine] = asyncio.get_running_loop().create_future()

    def take(self, lines: list[bytes]) -> None:
        self._heard = time.monotonic()
        for line in lines:
            try:
                answer = parse_answer(line, tagged=False)
            except LineError as error:
                if error.line.startswith("READY") and not self._ready.done():
                    self._ready.set_exception(StartupError(f"the engine sent a malformed line: {error}"))
                continue
            if isinstance(answer, Info):
                logger.debug("the engine: %s", answer.text)
                if "=" in answer.text.partition(" ")[0]:  # else it is prose, or the progress of loading
                    self.fields |= answer.fields
            elif isinstance(answer, ReadyLine) and not self._ready.done():
                self._ready.set_result(answer)

    async def ready(self, child: Child) -> ReadyLine:
        while not self._ready.done():
            left = self._heard + self._timeout - time.monotonic()
            if left <= 0:
                raise StartupError(f"the engine said nothing for {self._timeout:g} seconds")
            await asyncio.wait((self._ready, child.gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if child.gone.done() and not self._ready.done():
                raise StartupError(f"the engine ended before it was ready (exit status {child.status})")
        return self._ready.result()
