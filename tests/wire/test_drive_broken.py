"""LineEngine and lines that are wrong or missing: one request ends, and the next one is right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from neper.types import FinishReason
from neper.wire.drive import MAX_WARNINGS
from tests.wire.driven import (
    ALL_FORMS,
    BOTH,
    CANCEL,
    DONE,
    EOS,
    RAW,
    TAGGED,
    TWO,
    TWO_ROWS,
    UNTAGGED,
    VOCAB_SIZE,
    Reply,
    driven,
    expected,
    gather,
    go,
    is_broken,
    request,
    steps,
    stopped,
)

pytestmark = pytest.mark.usefixtures("soon")


@BOTH
def test_an_engine_without_scores(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, form="none") as child:
            assert child.engine.capabilities.logprobs is None
            await child.asks_right(request("0"))
            assert child.engine.capabilities.logprobs is None  # nobody asked
            reply = await child.ask(request("1", max_tokens=3, listed=2))
            assert reply == expected(request("1", max_tokens=3))
            assert child.engine.capabilities.logprobs is False
            await child.next_is_right(scores=False)
            assert await child.ask(request("2", listed=2)) == expected(request("2"))

    go(test())


@BOTH
def test_case_95_an_end_token_without_scores(tmp_path: Path, ready: str) -> None:
    """It is no token of a reply with scores, and says nothing of whether the engine has scores."""

    async def test() -> None:
        gens = [steps(f"T {EOS}", "DONE 1 3 1 2 stop"), steps(*TWO, f"T {EOS}", "DONE 3 3 1 2 stop")]
        async with driven(tmp_path, ready, gens=gens) as child:
            assert await child.ask(request("0", listed=2)) == Reply([], [], FinishReason.STOP)
            assert child.engine.capabilities.logprobs is None
            assert await child.ask(request("1", listed=2)) == Reply([5, 6], TWO_ROWS, FinishReason.STOP)
            assert child.engine.capabilities.logprobs is True
            await child.next_is_right()

    go(test())


@BOTH
def test_case_95_warnings_about_lines_are_bounded(tmp_path: Path, ready: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        lines = steps(*["PP 1", "T x"] * 500, *TWO, DONE)
        async with driven(tmp_path, ready, gens=[lines]) as child:
            await child.ask(request("0", listed=2))
            await child.next_is_right()
        warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == MAX_WARNINGS + 1
        assert "not logged" in warnings[-1]

    go(test())


@BOTH
def test_an_engine_that_says_it_has_no_scores(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, infos=["INFO logprobs=none"], form="none") as child:
            assert child.engine.capabilities.logprobs is False
            await child.next_is_right(scores=False)

    go(test())


@BOTH
@pytest.mark.parametrize(
    ("lines", "ids"),
    [
        (["T 5", "DONE 1 3 1 2 length"], [5]),
        (["T 5", "PP 3 3", "DONE 1 3 1 2 length"], [5]),
        (["T 5", "T 6", "DONE 2 3 1 2 length"], [5, 6]),
        (["T 5", "T 6", "LP -1 6:-1", "T 7", "DONE 3 3 1 2 length"], [5, 6, 7]),
    ],
)
def test_no_scores_of_the_first_token_are_none_of_all(
    tmp_path: Path, ready: str, lines: list[str], ids: list[int]
) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, gens=[steps(*lines)]) as child:
            assert await child.ask(request("0", listed=2)) == Reply(ids, [None] * len(ids), FinishReason.LENGTH)
            await child.next_is_right()

    go(test())


BROKEN: dict[str, tuple[list[str], int, str]] = {
    # lines, tokens that are right before, what the error says
    "T that is no number": ([*TWO[:2], "T five"], 1, "T five"),
    "T without an id": ([*TWO[:2], "T"], 1, "T"),
    "T with more words": ([*TWO[:2], "T 6 7"], 1, "T 6 7"),
    "T beyond the vocabulary": ([*TWO[:2], f"T {VOCAB_SIZE}", "LP -1"], 1, str(VOCAB_SIZE)),
    "LP nan": ([*TWO[:2], "T 6", "LP nan 6:-1"], 1, "LP nan 6:-1"),
    "LP -inf": ([*TWO[:2], "T 6", "LP -inf 6:-1"], 1, "LP -inf"),
    "LP above 0": ([*TWO[:2], "T 6", "LP 0.5 6:-1"], 1, "LP 0.5"),
    "LP of the first token malformed": (["T 6", "LP -1 6"], 0, "LP -1 6"),
    "LP with an id twice": ([*TWO[:2], "T 6", "LP -1 6:-1 6:-1"], 1, "twice"),
    "LP listing an id beyond the vocabulary": ([*TWO[:2], "T 6", f"LP -1 6:-1 {VOCAB_SIZE}:-2"], 1, str(VOCAB_SIZE)),
    "LP twice": ([*TWO[:2], TWO[1]], 1, "scores"),
    "LP before any T": ([TWO[1]], 0, "scores"),
    "LP missing later": ([*TWO[:2], "T 6", "T 7", "LP -1 7:-1"], 1, "scores"),
    "LP cut": ([*TWO[:2], "T 6", "LP"], 1, "LP"),
    "PP malformed": ([*TWO[:2], "PP 1"], 1, "PP 1"),
    "a word that engines do not send": ([*TWO[:2], "TT 5"], 1, "TT 5"),
    "bytes that are no words": ([*TWO[:2], "\x00\x7f"], 1, "\\x00"),
    "DONE without a word": ([*TWO[:2], "DONE 1 3 1 2"], 1, "DONE 1 3 1 2"),
    "DONE with nan": ([*TWO[:2], "DONE 1 3 nan 2 stop"], 1, "DONE 1 3 nan 2 stop"),
    "DONE with two counts": ([*TWO[:2], "DONE 1 3 1 2 stop 7 8"], 1, "DONE 1 3 1 2 stop 7 8"),
    "DONE while a later LP is due": ([*TWO[:2], "T 6", "DONE 2 3 1 2 stop"], 1, "scores"),
    "ERR": ([*TWO[:2], "ERR out of memory: 3 of 4"], 1, "out of memory: 3 of 4"),
    "ERR at once": (["ERR the prompt is too long"], 0, "the prompt is too long"),
    "DONE of a request that nobody cancelled": ([*TWO[:2], "DONE 1 3 1 2 cancel"], 1, "cancel"),
    "ERR without words": ([*TWO[:2], "ERR"], 1, ""),
}
ENDED = ("DONE", "ERR")


@ALL_FORMS
@pytest.mark.parametrize("name", BROKEN)
def test_broken_requests(tmp_path: Path, ready: str, name: str) -> None:
    lines, right, says = BROKEN[name]
    if "slots" in ready and lines[-1].split()[0] not in ("T", "LP", "PP", "DONE", "ERR"):
        lines = [*lines[:-1], f"{lines[-1]} #{{tag}}"]
    ended = lines[-1].startswith(ENDED)

    async def test() -> None:
        *before, last = lines
        broken: list[dict[str, Any]] = steps(*before)
        broken += steps(last) if "{tag}" not in last else [{"raw": last + "\n"}]
        async with driven(tmp_path, ready, gens=[broken if ended else broken + stopped(ready=ready)]) as child:
            await is_broken(child, await child.ask(request("0", listed=2)), right, says)
            stops = child.notes("STOP")
            assert len(stops) == (0 if ended or "stop" not in ready else 1)
            if stops and "slots" in ready:
                assert stops[0] == child.notes("GEN")[0].split()[0]

    go(test())


RAW_FIRST = "LP 0 raw 5 -0.5 2 5:-0.5 7:-2"
RAW_BROKEN: dict[str, tuple[list[str], str]] = {
    "index out of step": ([RAW_FIRST, "T 6", "LP 2 raw 6 -1 0"], ""),
    "index again": ([RAW_FIRST, "T 6", "LP 0 raw 6 -1 0"], ""),
    "another id than its T's": ([RAW_FIRST, "T 6", "LP 1 raw 7 -1 0"], ""),
    "too few": ([RAW_FIRST, "T 6", "LP 1 raw 6 -1 2 6:-1"], "count"),
    "too many": ([RAW_FIRST, "T 6", "LP 1 raw 6 -1 1 6:-1 7:-2"], "count"),
    "an id twice": ([RAW_FIRST, "LP 1 raw 6 -1 2 6:-1 6:-2"], "twice"),
    "nan": ([RAW_FIRST, "LP 1 raw 6 nan 0"], "nan"),
    "nan alternative": ([RAW_FIRST, "LP 1 raw 6 -1 1 6:nan"], "nan"),
    "beyond the vocabulary": ([RAW_FIRST, f"LP 1 raw {VOCAB_SIZE} -1 0"], str(VOCAB_SIZE)),
    "the plain form without its T": ([RAW_FIRST, "LP -1 6:-1"], "scores"),
}


@BOTH
@pytest.mark.parametrize("name", RAW_BROKEN)
def test_broken_requests_in_the_raw_form(tmp_path: Path, ready: str, name: str) -> None:
    lines, says = RAW_BROKEN[name]

    async def test() -> None:
        gens = [stopped(*lines, ready=ready)]
        async with driven(tmp_path, ready, infos=[RAW], form="raw-v1", gens=gens) as child:
            await is_broken(child, await child.ask(request("0", listed=2)), 1, says)
            assert len(child.notes("STOP")) == 1

    go(test())


ALLOWED_FIRST = ["T 5", "LP -0.5 5:-0.5 7:-2"]
NOT_ALLOWED: dict[str, list[str]] = {
    "T outside": ["T 6", "LP -1 5:-1 7:-1"],
    "LP with one more": ["T 5", "LP -1 5:-1 7:-1 6:-3"],
    "LP with one less": ["T 5", "LP -1 5:-1"],
    "LP with another": ["T 5", "LP -1 5:-1 6:-3"],
    "LP with none": ["T 5", "LP -1"],
}


@ALL_FORMS
@pytest.mark.parametrize("name", NOT_ALLOWED)
def test_broken_sets(tmp_path: Path, ready: str, name: str) -> None:
    async def test() -> None:
        gens = [stopped(*ALLOWED_FIRST, *NOT_ALLOWED[name], ready=ready)]
        async with driven(tmp_path, ready, gens=gens) as child:
            await is_broken(child, await child.ask(request("0", listed=1, allowed_token_ids=(7, 5))), 1, "allowed")

    go(test())


@ALL_FORMS
def test_a_token_outside_the_set_of_a_request_without_scores(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, gens=[stopped("T 5", "T 6", ready=ready)]) as child:
            reply = await child.ask(request("0", allowed_token_ids=(7, 5)))
            assert reply.token_ids == [5]
            assert reply.finish_reason is FinishReason.ERROR
            assert reply.error
            assert "allowed" in reply.error
            await child.next_is_right()

    go(test())


@ALL_FORMS
@pytest.mark.parametrize("top_k", [None, 2])
def test_more_tokens_than_asked_for_are_not_given_out(tmp_path: Path, ready: str, top_k: int | None) -> None:
    async def test() -> None:
        lines = [line for line in TWO if top_k is not None or line.startswith("T")]
        late = ["T 7", "LP -1 7:-1 8:-2"][: 1 if top_k is None else 2]
        async with driven(tmp_path, ready, gens=[stopped(*lines, *late, ready=ready)]) as child:
            reply = await child.ask(request("0", max_tokens=2, listed=top_k))
            assert reply.token_ids == [5, 6]
            assert reply.finish_reason in (FinishReason.LENGTH, FinishReason.ERROR)
            await child.next_is_right()

    go(test())


def test_lines_of_requests_that_are_gone_or_never_were(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "go"
        stray = [f"{line} #{{}}" for line in ("T 9", "LP -1 9:-1", "PP 1 2", "DONE 1 1 1 1 stop", "ERR oh", "T x")]
        raw = "".join(f"{line}\n".replace("{}", "nobody") for line in stray) + "T 5\nLP -1\nDONE 1 1 1 1 stop\n\n\n"
        second = [
            {"wait": f"file {file}"},
            *steps(*TWO[:1]),
            {"print": ["T 9", "LP -1 9:-1", "T x", "DONE 1 1 1 1 stop", "ERR oh"], "of": 0},
            {"raw": raw},
            *steps(*TWO[1:], DONE),
        ]
        async with driven(tmp_path, TAGGED, gens=[steps(*TWO, DONE), second]) as child:
            waiting = child.engine.submit(request("0", max_tokens=2, listed=2))
            other = child.engine.submit(request("1", max_tokens=2, listed=2))
            assert (await gather(waiting)).rows == TWO_ROWS
            file.touch()
            assert await gather(other) == Reply([5, 6], TWO_ROWS, FinishReason.LENGTH)
            await child.next_is_right()

    go(test())


@pytest.mark.parametrize("ready", ["READY 512", "READY 512 stop"])
def test_lines_while_nothing_runs(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        late = [{"sleep": 0.005}, *steps("T 9", "LP -1 9:-1", "PP 1 2", "T x", "", "ERR oh", "SLOT 1")]
        async with driven(tmp_path, ready, gens=[[*steps(*TWO, DONE), *late]]) as child:
            assert (await child.ask(request("0", max_tokens=2, listed=2))).rows == TWO_ROWS
            await asyncio.sleep(0.03)
            await child.next_is_right()
            assert len(child.pids) == 1

    go(test())


@BOTH
def test_a_line_without_end_is_not_kept(tmp_path: Path, ready: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neper.wire.child.MAX_LINE", 10_000)

    async def test() -> None:
        raw = "LP -1" + " " * 300_000 + "6:-1" + ("\n" if ready == UNTAGGED else " #{tag}\n")
        gens = [[*steps(*TWO[:3]), {"raw": raw}, *stopped(ready=ready)]]
        async with driven(tmp_path, ready, gens=gens) as child:
            reply = await child.ask(request("0", listed=2))
            assert len(reply.error or "") < 500
            await is_broken(child, reply, 1, "LP -1")

    go(test())


def test_two_requests_of_which_one_breaks(tmp_path: Path) -> None:
    async def test() -> None:
        broken = [*steps(*TWO[:2], "T x"), {"wait": "STOP"}, *steps("T 9", "LP -1 9:-1", CANCEL)]
        fine = [*steps(*TWO[:3]), {"wait": "GEN 2"}, {"sleep": 0.02}, *steps(*TWO[3:], DONE)]
        async with driven(tmp_path, TAGGED, gens=[fine, broken]) as child:
            replies = await asyncio.gather(
                *[child.ask(request(name, max_tokens=2, listed=2)) for name in ("fine", "broken")]
            )
            assert replies[0] == Reply([5, 6], TWO_ROWS, FinishReason.LENGTH)
            await is_broken(child, replies[1], 1, "T x")

    go(test())
