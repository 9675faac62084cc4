"""The loop around an EngineCore: take what is asked, compute a step, tell what it brought."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from neper.engine import memory
from neper.engine.core import EngineCore
from neper.errors import StartupError
from neper.files import one_line
from neper.types import TokenChunk

logger = logging.getLogger("neper.engine")


@contextmanager
def starting() -> Iterator[None]:
    """Whatever keeps an engine from starting inside is a StartupError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        logger.exception("the engine could not start")
        raise StartupError(f"the engine could not start: {one_line(error)}") from error


def serve(core: EngineCore, take: Callable[[], bool], tell: Callable[[list[TokenChunk]], None]) -> int:
    """Compute until told to stop; returns the exit status. 1 = the device is lost: only a new process can go on.

    Args:
        take: acts on all that was asked, waiting for something where there is nothing to compute. False = stop.
        tell: says what a turn of the loop brought, which may be nothing.
    """
    usable = True
    while usable and take():
        chunks: list[TokenChunk] = []
        if core.has_work:
            try:
                chunks = core.step()
            except Exception as error:  # a step that raises must not take the requests of tomorrow with it
                logger.exception("a step failed; its requests end with an error")
                chunks = core.fail_all(memory.step_failure(error))
                usable = core.device_usable()
        tell(chunks)
    return 0 if usable else 1
