"""Requests at random, interleaved and some of them left: each gets what its own lines say, and nothing else."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neper.types import FinishReason, Request
from tests.wire.driven import EOS, FORMS, VOCAB_SIZE, Driven, Reply, driven, folded, go, request, row, rows_of, until

pytestmark = pytest.mark.usefixtures("soon")

MALFORMED = ["T", "T five", "LP", "LP nan", "LP -1 5:-1 5:-1", "PP", "PP 1 x", "T 2147483648"]
RAW_FORMS = ("raw-v1", "raw-v1 alone")


@dataclass
class Story:
    """A request, the lines that answer it, and what they amount to.

    Attributes:
        leaves_after: rows after which its stream is closed; 0: as soon as it was sent. None: it is not.
    """

    listed: int | None
    max_tokens: int
    lines: list[str]
    reply: Reply
    leaves_after: int | None


@st.composite
def stories(draw: st.DrawFn, form: str, leaves: bool) -> Story:
    count = draw(st.integers(0, 8))
    listed = draw(st.sampled_from([None, 0, 1, 3]))
    unscored = listed is None or draw(st.sampled_from([False, False, False, True]))
    broken = draw(st.one_of(st.none(), st.none(), st.integers(0, count)))
    lines: list[str] = []
    reply = Reply([], [], None)
    for place in range(count):
        if place == broken:
            break
        token_id = draw(st.integers(0, VOCAB_SIZE - 2))
        if unscored:
            lines.append(f"T {token_id}")
            reply.rows.append(None)
        else:
            text, scores = draw(scores_of(form, place, token_id, listed or 0))
            lines += text
            reply.rows.append(scores)
        reply.token_ids.append(token_id)
        if draw(st.integers(0, 5)) == 0:
            lines.append(f"PP {place} {count}")
    if broken is not None:
        if listed is not None and unscored and broken == 1:  # it waited for its scores
            reply.rows, reply.token_ids = [], []
        lines.append(draw(st.sampled_from(MALFORMED)))
        lines += ["T 9", "LP -1 9:-1"][: draw(st.integers(0, 2))]
        reply.finish_reason = FinishReason.ERROR
    else:
        reply.finish_reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
        reply.num_cached_tokens = draw(st.integers(0, 3))
    word = "length" if reply.finish_reason is FinishReason.LENGTH else "stop"
    if word == "stop" and reply.rows and reply.rows[-1] is None and broken is None and draw(st.booleans()):
        lines.append(f"T {EOS}")
        reply.rows.append(None)
        reply.token_ids.append(EOS)
        reply.stop_token_id = EOS
    lines.append(f"DONE {len(reply.rows)} 1 1.5 2.5 {word} 0 0 {reply.num_cached_tokens}")
    left = draw(st.integers(0, count)) if leaves else None
    return Story(listed, len(reply.rows) + (word == "stop"), lines, reply, left)


@st.composite
def scores_of(draw: st.DrawFn, form: str, place: int, token_id: int, listed: int) -> tuple[list[str], Any]:
    """The lines of a token with scores, and its row."""
    ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=listed, max_size=listed, unique=True))
    falling = draw(st.lists(st.integers(1, 40), min_size=len(ids), max_size=len(ids), unique=True))
    pairs = [(listed_id, -value / 8) for listed_id, value in zip(ids, sorted(falling), strict=True)]
    own = dict(pairs).get(token_id, -draw(st.integers(41, 60)) / 8)
    texts = [f"{listed_id}:{value}" for listed_id, value in draw(st.permutations(pairs))]
    scores = row(token_id, pairs if token_id in ids else [*pairs, (token_id, own)], listed)
    if form == "plain":
        return [f"T {token_id}", " ".join(["LP", str(own), *texts])], scores
    raw = " ".join([f"LP {place} raw {token_id} {own} {listed}", *texts])
    return [raw] if form == "raw-v1 alone" else [f"T {token_id}", raw], scores


@dataclass
class Play:
    """Rounds of requests: the lines of a round come in an order of their own, once all of its requests were sent.

    Attributes:
        orders: of each round, whose line is next.
        cut: bytes of the engine's writes at most.
    """

    ready: str
    form: str
    rounds: list[list[Story]]
    orders: list[list[int]]
    cut: int | None


@st.composite
def plays(draw: st.DrawFn) -> Play:
    ready, form = draw(st.sampled_from(FORMS)), draw(st.sampled_from(["plain", *RAW_FORMS]))
    rounds, orders = [], []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 3))
        left = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        told = [draw(stories(form, leaves)) for leaves in left]
        order = [number for number, story in enumerate(told) for _ in story.lines]
        if "slots" in ready:
            draw(st.randoms(use_true_random=False)).shuffle(order)
        rounds.append(told)
        orders.append(order)
    return Play(ready, form, rounds, orders, draw(st.sampled_from([None, None, 1, 5, 40])))


def script(play: Play) -> list[list[dict[str, Any]]]:
    """The steps of each GEN. Requests are sent in the order in which they are submitted."""
    gens: list[list[dict[str, Any]]] = []
    for told, order in zip(play.rounds, play.orders, strict=True):
        first = len(gens)
        lines = [iter(story.lines) for story in told]
        merged: list[dict[str, Any]] = [{"print": [next(lines[who])], "of": first + who} for who in order]
        if "slots" in play.ready:
            gens += [[] for _ in told[1:]]
            gens.append(merged)
        else:
            gens += [[step for step in merged if step["of"] == first + who] for who in range(len(told))]
    return gens


async def take_part(child: Driven, asked: Request, story: Story, number: int) -> None:
    stream = child.engine.submit(asked)
    chunks = []
    try:
        if story.leaves_after == 0:
            await until(lambda: len(child.notes("GEN")) > number)
            return
        rows = 0
        async for chunk in stream:
            chunks.append(chunk)
            rows += 0 if chunk.tokens is None else len(chunk.tokens)
            if story.leaves_after is not None and rows >= story.leaves_after:
                break
    finally:
        stream.close()
    if story.leaves_after is None:
        reply = folded(chunks)
        assert (reply.error is None) == (reply.finish_reason is not FinishReason.ERROR)
        reply.error = None
        assert reply == story.reply
    else:
        rows_read = [found for chunk in chunks for found in rows_of(chunk)]
        assert rows_read == story.reply.rows[: len(rows_read)]


async def perform(play: Play, directory: Path) -> None:
    infos = ["INFO logprobs=raw-v1"] if play.form in RAW_FORMS else []
    async with driven(directory, play.ready, infos=infos, form=play.form, gens=script(play), cut=play.cut) as child:
        number = 0
        for told in play.rounds:
            parts = []
            for story in told:
                asked = request(f"{number}-0", [number], story.max_tokens or 1, listed=story.listed)
                parts.append(take_part(child, asked, story, number))
                number += 1
            await asyncio.gather(*parts)
        await child.next_is_right(scores=child.engine.capabilities.logprobs is not False)
        assert len(child.pids) == 1
        await until(lambda: child.engine.stats().running == 0)


@pytest.mark.rounds(60)
def test_random_requests(rounds: int) -> None:
    @settings(max_examples=rounds, deadline=None)
    @given(plays())
    def check(play: Play) -> None:
        with tempfile.TemporaryDirectory() as directory:
            go(perform(play, Path(directory)))

    check()
