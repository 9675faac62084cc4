"""CPU time a token that LineEngine takes: from the bytes of an engine to chunks out of streams.

    python -m tests.wire.measure_drive

Eight requests at a time are answered by an engine that prints all of it at once, lines of the requests by turns.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.helpers.line_engine import made_up
from tests.wire.driven import Driven, driven, request

REQUESTS = 8
TOKENS = 500
ROUNDS = 5
FIRST_ID = 40_000
"""Ids are this and more, so that they have as many digits as those of a real vocabulary."""


async def microseconds_a_token(listed: int | None, *, batch: int | None = None) -> float:
    """The best of a few rounds.

    `batch`: tokens of each request that the engine prints in one write, 2 ms apart; None = all of them, 0 = each token
        of each request in a write of its own.
    """
    lines = []
    for place in range(TOKENS):
        token_id, pairs = made_up([place], 0, 97)
        # With digits as an engine prints them.
        texts = [f"{FIRST_ID + listed_id}:{value - 0.0123456:.6g}" for listed_id, value in pairs[: listed or 0]]
        lines.append([f"T {FIRST_ID + token_id}"])
        if listed is not None:
            lines[-1].append(" ".join([f"LP {dict(pairs)[token_id] - 0.0123456:.6g}", *texts]))
    turns: list[dict[str, Any]] = []
    for place, token in enumerate(lines):
        for number in range(REQUESTS):
            turns.append({"print": token, "of": number})
            if batch == 0:
                turns.append({"sleep": 0.0002})
        if batch and place % batch == batch - 1:
            turns.append({"sleep": 0.002})
    done = f"DONE {TOKENS} 1 1 1 length"
    with tempfile.TemporaryDirectory() as directory:
        best = float("inf")
        for number in range(ROUNDS):
            path = Path(directory) / str(number)
            path.mkdir()
            last = [{"wait": f"GEN {REQUESTS}"}, {"wait": f"file {path / 'go'}"}, *_joined(turns)]
            last += [{"print": [done], "of": who} for who in range(REQUESTS)]
            gens: list[list[dict[str, Any]]] = [[] for _ in range(REQUESTS - 1)]
            ready, infos = f"READY 4096 stop slots={REQUESTS}", [f"INFO vocab_size={FIRST_ID + 97}"]
            async with driven(path, ready, infos=infos, gens=[*gens, last]) as child:
                best = min(best, await _round(child, path / "go", listed))
    return 1e6 * best / (REQUESTS * TOKENS)


def _joined(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is between two pauses as one write. The driver names requests by whole numbers from 1."""
    steps: list[dict[str, Any]] = [{"raw": ""}]
    for turn in turns:
        if "sleep" in turn:
            steps += [turn, {"raw": ""}]
        else:
            steps[-1]["raw"] += "".join([f"{line} #{turn['of'] + 1}\n" for line in turn["print"]])
    return steps


async def _round(child: Driven, go: Path, listed: int | None) -> float:
    async def read(number: int) -> None:
        stream = child.engine.submit(request(f"{number}-0", [number], TOKENS, listed=listed))
        tokens = 0
        async for chunk in stream:
            tokens += 0 if chunk.tokens is None else len(chunk.tokens)
        stream.close()
        assert tokens == TOKENS

    readers = [asyncio.ensure_future(read(number)) for number in range(REQUESTS)]
    while len(child.notes("GEN")) < REQUESTS:
        await asyncio.sleep(0.01)
    began = time.process_time()
    go.touch()
    await asyncio.gather(*readers)
    return time.process_time() - began


if __name__ == "__main__":
    for batch in (None, 8, 1, 0):
        for listed in (20, 0, None):
            micros = asyncio.run(microseconds_a_token(listed, batch=batch))
            print(f"{listed} listed, {batch} tokens a write: {micros:.1f} µs a token", flush=True)
