"""Activity: a line in the log every few seconds while the engine works."""

from __future__ import annotations

import asyncio
import logging
import time

from neper.engine.interface import Engine, EngineStats

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0


async def log_activity(engine: Engine, interval: float = INTERVAL_SECONDS) -> None:
    """Write what the engine does every `interval` seconds, until cancelled; nothing while it is idle."""
    before, then = engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        stats, now = engine.stats(), time.monotonic()
        if (line := activity_line(before, stats, now - then)) is not None:
            log.info(line)
        before, then = stats, now


def activity_line(before: EngineStats, stats: EngineStats, seconds: float) -> str | None:
    """What was done between two snapshots; None where nothing was."""
    # An engine that was started again counts from 0.
    prompt = max(0, stats.prompt_tokens - before.prompt_tokens)
    generated = max(0, stats.generated_tokens - before.generated_tokens)
    if not (prompt or generated or stats.running or stats.waiting):
        return None
    line = (
        f"prompts {prompt / seconds:.1f} tok/s, replies {generated / seconds:.1f} tok/s, "
        f"{stats.running} running, {stats.waiting} waiting"
    )
    if stats.total_blocks:
        line += f", cache {100 * (1 - stats.free_blocks / stats.total_blocks):.0f} % used"
    drafted = stats.draft_tokens - before.draft_tokens
    if drafted > 0:
        line += f", {100 * (stats.accepted_tokens - before.accepted_tokens) / drafted:.0f} % of drafts accepted"
    return line
