"""LineEngine over a scripted engine: replies as they should be, and what it sends."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from neper.config import LineEngineConfig
from neper.types import LISTED_WHOLE, FinishReason
from neper.wire.drive import LineEngine
from neper.wire.lines import Gen, parse_request
from tests.wire.driven import (
    BOTH,
    DONE,
    EOS,
    LOOPS,
    PROGRAM,
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
    request,
    rows_of,
    steps,
    until,
)

pytestmark = pytest.mark.usefixtures("soon")


@LOOPS
@BOTH
@pytest.mark.parametrize("form", ["plain", "raw-v1", "raw-v1 alone"])
def test_replies(tmp_path: Path, ready: str, form: str, loop: Any) -> None:
    async def test() -> None:
        infos = [RAW] if form.startswith("raw") else []
        async with driven(tmp_path, ready, infos=infos, form=form) as child:
            asked = [
                request(f"{k}-{size}", [k or 0, size], size, listed=k) for k in (None, 0, 1, 3, 20) for size in (1, 7)
            ]
            await asyncio.gather(*map(child.asks_right, asked))
            assert child.engine.stats().generated_tokens == 5 * (1 + 7)
            assert child.engine.capabilities.logprobs
            await child.next_is_right()

    go(test(), loop)


@BOTH
def test_allowed_sets(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready) as child:
            for k, allowed in ((3, (5, 9)), (1, (9, 5, 40, 9)), (0, (5, 7)), (None, (5, 7)), (2, (61,))):
                await child.asks_right(request("0", listed=k, allowed_token_ids=allowed))

    go(test())


def test_a_set_too_large_to_be_listed_is_checked_whole_and_shown_in_part(tmp_path: Path) -> None:
    async def test() -> None:
        async with driven(tmp_path, infos=["INFO vocab_size=4096"]) as child:
            allowed = tuple(range(7, 7 + LISTED_WHOLE + 1))
            await child.asks_right(request("0", listed=3, allowed_token_ids=allowed))
            await child.asks_right(request("1", listed=3, allowed_token_ids=allowed[1:]))

    go(test())


@LOOPS
def test_lines_longer_than_any_buffer(tmp_path: Path, loop: Any) -> None:
    async def test() -> None:
        async with driven(tmp_path, TAGGED, infos=["INFO vocab_size=50257 max_logprobs=-1"]) as child:
            assert child.engine.capabilities.max_logprobs == -1
            long = request("0", [1] * 300, 2, listed=50_000)
            wanted = expected(long, 50_257)
            await asyncio.gather(child.asks_right(long), child.asks_right(request("1", listed=2)))
            assert len(wanted.rows[0][3]) == 50_000  # type: ignore[index]
            [sent] = [line for line in child.notes("GEN") if "logprobs=50000" in line]
            assert sent
            assert (await child.ask(request("2", max_tokens=1, listed=-1))).token_ids
            assert "logprobs=50257" in child.notes("GEN")[-1]

    go(test(), loop)


@BOTH
def test_lists_of_other_lengths_than_asked_for(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        lines = ["T 5", "LP -0.5 5:-0.5", "T 6", "LP -9 1:-1 2:-2 3:-3", "T 7", "LP -0.5", "T 8", "LP -1 4:-3 9:-2"]
        async with driven(tmp_path, ready, gens=[steps(*lines, "DONE 4 3 1 2 length")]) as child:
            unused = (-1, -float("inf"))
            assert (await child.ask(request("0", listed=2))).rows == [
                (5, 1, -0.5, ((5, -0.5), unused)),
                (6, 4, -9.0, ((1, -1.0), (2, -2.0))),
                (7, 1, -0.5, (unused, unused)),
                (8, 1, -1.0, ((9, -2.0), (4, -3.0))),
            ]
            await child.next_is_right()

    go(test())


def test_a_token_waits_for_its_scores_and_without_them_for_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "go"
        lines = [*steps("T 5"), {"wait": f"file {file}"}, *steps("LP -0.5 5:-0.5", "DONE 1 3 1 1 stop")]
        async with driven(tmp_path, TAGGED, gens=[lines, lines]) as child:
            scored = child.engine.submit(request("0", listed=1))
            waiting = asyncio.ensure_future(scored.__anext__())
            await until(lambda: child.notes("GEN"))
            plain = child.engine.submit(request("1"))
            assert (await plain.__anext__()).tokens.token_ids.tolist() == [5]  # type: ignore[union-attr]
            assert not waiting.done()
            file.touch()
            assert rows_of(await waiting) == [(5, 1, -0.5, ((5, -0.5),))]
            scored.close()
            plain.close()

    go(test())


@BOTH
def test_lines_of_the_engine_between_those_of_a_request(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        between = ["SLOT 0 busy", "WAIT 3", "INFO load=1"]
        lines = ["PP 1 3", *between, "PP 3 3"]
        for line in TWO:
            lines += [line, *between]
        async with driven(tmp_path, ready, gens=[steps(*lines, DONE)]) as child:
            assert (await child.ask(request("0", max_tokens=2, listed=2))).rows == TWO_ROWS
            await child.next_is_right()

    go(test())


@BOTH
def test_lines_with_carriage_returns_and_pieces_of_lines(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        tag = "" if ready == UNTAGGED else " #{tag}"
        raw = "".join(f"{line}{tag}\r\n" for line in [*TWO, DONE])
        async with driven(tmp_path, ready, gens=[[{"raw": raw, "ends": True}]], cut=9) as child:
            assert (await child.ask(request("0", max_tokens=2, listed=2))).rows == TWO_ROWS
            await child.next_is_right()

    go(test())


@pytest.mark.parametrize(
    ("word", "token", "finish", "stop_token_id"),
    [
        ("stop", EOS, FinishReason.STOP, EOS),
        ("stop", 6, FinishReason.STOP, None),
        ("length", 6, FinishReason.LENGTH, None),
        ("end-of-turn", 6, FinishReason.STOP, None),
        ("grün", EOS, FinishReason.STOP, EOS),
    ],
)
@BOTH
def test_ends(
    tmp_path: Path, ready: str, word: str, token: int, finish: FinishReason, stop_token_id: int | None
) -> None:
    async def test() -> None:
        lines = steps(*TWO[:2], f"T {token}", f"LP -1 {token}:-1", f"DONE 2 3 1 2 {word} 0 0 2")
        async with driven(tmp_path, ready, gens=[lines, [*lines[:1]]]) as child:
            reply = await child.ask(request("0", max_tokens=9, listed=2))
            assert reply.token_ids == [5, token]
            assert reply.rows[0] == TWO_ROWS[0]
            assert (reply.finish_reason, reply.stop_token_id) == (finish, stop_token_id)
            assert reply.num_cached_tokens == 2
            plain = await child.ask(request("1", max_tokens=9))
            assert (plain.token_ids, plain.finish_reason, plain.stop_token_id) == ([5, token], finish, stop_token_id)
            await child.next_is_right()
            assert not child.notes("STOP")

    go(test())


@BOTH
def test_a_reply_without_tokens(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, gens=[steps("DONE 0 3 1 0 stop"), steps("DONE 0 3 1 0 length")]) as child:
            assert await child.ask(request("0", listed=2)) == Reply([], [], FinishReason.STOP)
            assert await child.ask(request("1")) == Reply([], [], FinishReason.LENGTH)
            await child.next_is_right()
            assert child.engine.capabilities.logprobs  # nothing was learned about them

    go(test())


@pytest.mark.parametrize(
    ("sampling", "top_k", "keys"),
    [
        ({}, None, {}),
        ({}, 0, {"logprobs": 0}),
        ({"temperature": 0.7, "seed": 2**64 - 1}, 5, {"temperature": 0.7, "seed": 2**64 - 1, "logprobs": 5}),
        ({"seed": 0}, None, {"seed": 0}),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}, None, {"temperature": 1.0}),
        ({"temperature": 1e-6}, None, {"temperature": 0.0}),
        ({"top_p": 0.5, "top_k": -1}, None, {"top_p": 0.5}),
        ({"top_k": 40, "min_p": 0.05}, None, {"top_k": 40, "min_p": 0.05}),
        ({"presence_penalty": 0.5}, None, {"penalty_present": 0.5, "penalty_last_n": -1}),
        ({"frequency_penalty": -0.5}, None, {"penalty_freq": -0.5, "penalty_last_n": -1}),
        ({"repetition_penalty": 1.1}, None, {"penalty_repeat": 1.1, "penalty_last_n": -1}),
        ({"allowed_token_ids": (9, 5, 9)}, None, {"allowed": {9, 5}}),
        ({"stop": ("x",), "stop_token_ids": (95,), "skip_special_tokens": False}, None, {}),
    ],
)
@BOTH
def test_requests_as_sent(
    tmp_path: Path, ready: str, sampling: dict[str, Any], top_k: int | None, keys: dict[str, Any]
) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready) as child:
            await child.asks_right(request("0", [4, 5, 6], 3, listed=top_k, **sampling))
            [line] = child.received
            gen = parse_request(line.encode(), tagged=ready == TAGGED)
            assert isinstance(gen, Gen)
            temperature = 0.0 if sampling.get("temperature", 0) < 1e-5 else sampling["temperature"]
            wanted = Gen(**{"max_new": 3, "prompt_token_ids": [4, 5, 6], "temperature": temperature, "tag": gen.tag})
            wanted = msgspec.structs.replace(wanted, **{key: value for key, value in keys.items() if key != "allowed"})
            assert msgspec.structs.replace(gen, allowed=[]) == wanted
            assert set(gen.allowed) == keys.get("allowed", set())
            if gen.temperature:
                return
            assert "temperature=0" in line
            await child.next_is_right()

    go(test())


def test_an_allowed_set_is_scored_whatever_number_is_asked_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with driven(tmp_path) as child:
            await child.asks_right(request("0", listed=0, allowed_token_ids=(9, 5)))
            gen = parse_request(child.received[0].encode(), tagged=False)
            assert isinstance(gen, Gen)
            assert gen.logprobs is not None
            assert set(gen.allowed) == {5, 9}

    go(test())


def test_without_a_length_the_reply_gets_the_rest_of_the_context(tmp_path: Path) -> None:
    async def test() -> None:
        async with driven(tmp_path, "READY 40 stop") as child:
            reply = await child.ask(request("0", [1, 2, 3], None, listed=1))
            assert len(reply.token_ids) == 37
            assert child.notes("GEN")[0].startswith("37 ")
            assert reply == expected(request("0", [1, 2, 3], 37, listed=1))

    go(test())


@pytest.mark.parametrize(
    ("infos", "ready", "found"),
    [
        ([], "READY 512", (VOCAB_SIZE, 512, 1, 20, None)),
        (["INFO hello", "INFO logprobs=raw-v1 vocab_size=90"], "READY 40 slots=1", (90, 40, 1, 20, True)),
        (["INFO max_logprobs=-1"], "READY 512 stop slots=8", (VOCAB_SIZE, 512, 8, -1, None)),
        (["INFO max_logprobs=5 logprobs=none"], "READY 512 slots=0", (VOCAB_SIZE, 512, 1, 5, False)),
        (["INFO vocab_size=95", "INFO vocab_size=94", "SLOT 0", "WAIT"], "READY 7", (94, 7, 1, 20, None)),
    ],
)
def test_capabilities(tmp_path: Path, infos: list[str], ready: str, found: tuple[Any, ...]) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, infos=infos) as child:
            has = child.engine.capabilities
            assert found == (has.vocab_size, has.max_model_len, has.max_num_seqs, has.max_logprobs, has.logprobs)
            assert has.logprobs_modes == ("raw_logprobs",)
            assert not has.logprob_token_ids
            assert not has.prompt_logprobs
            assert has.sampling_fields == {
                *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
                *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids"),
                *("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
            }
            assert child.engine.alive

    go(test())


def test_the_command_is_run_as_it_is_given(tmp_path: Path) -> None:
    async def test() -> None:
        directory = tmp_path / "with spaces 'and quotes'"
        directory.mkdir()
        record, script = directory / "record", directory / "script.json"
        script.write_text(json.dumps({"record": str(record)}))
        command = shlex.join([sys.executable, "-I", "-S", str(PROGRAM), str(script)]) + " --serve '$HOME *' \"a  b\" ''"
        config = LineEngineConfig(engine_command=command, tokenizer="none", engine_log=str(tmp_path / "log"))
        engine = LineEngine(config, vocab_size=VOCAB_SIZE)
        await engine.start()
        await engine.close()
        [note] = [line for line in record.read_text().splitlines() if line.startswith("#start")]
        assert json.loads(note.removeprefix("#start "))[1] == [str(script), "--serve", "$HOME *", "a  b", ""]

    go(test())


@pytest.mark.parametrize("ready", ["READY 512 stop", "READY 512", "READY 512 slots=1"])
def test_untagged_engines_get_one_request_at_a_time_and_clients_take_turns(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, pause=0.005) as child:
            names = ["a-0", "a-1", "a-2", "b-0", "c-0", "b-1"]
            asked = [request(name, [number], 3, listed=2) for number, name in enumerate(names)]
            streams = [child.engine.submit(item) for item in asked]
            replies = await asyncio.gather(*map(gather, streams))
            assert replies == [expected(item) for item in asked]
            order = [names[int(line.split()[-1])] for line in child.notes("GEN")]
            assert order[0] == "a-0"
            assert order[1] == "b-0"
            assert sorted(order[1:4]) == ["a-1", "b-0", "c-0"]
            assert [name for name in order if name[0] == "a"] == names[:3]
            assert order.index("b-0") < order.index("b-1")

    go(test())


def test_tagged_engines_get_as_many_as_they_have_slots(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "go"
        wait: list[dict[str, Any]] = [{"wait": f"file {file}"}, *steps(*TWO, DONE)]
        async with driven(tmp_path, TAGGED, gens=[wait] * 5) as child:
            asked = [request(f"a-{number}", [number], 2, listed=2) for number in range(5)]
            streams = [child.engine.submit(item) for item in asked]
            await until(lambda: len(child.notes("GEN")) == 3)
            stats = child.engine.stats()
            assert (stats.running, stats.waiting) == (3, 2)
            await asyncio.sleep(0.02)
            assert len(child.notes("GEN")) == 3
            file.touch()
            for reply in await asyncio.gather(*map(gather, streams)):
                assert reply.rows == TWO_ROWS
            tags = [line.split()[0] for line in child.notes("GEN")]
            assert len(set(tags[:3])) == 3
            stats = child.engine.stats()
            assert (stats.running, stats.waiting, stats.restarts) == (0, 0, 0)
            assert stats.generated_tokens == 10
            assert stats.prompt_tokens == 5
            await child.next_is_right()

    go(test())


def test_an_id_in_use_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with driven(tmp_path) as child:
            first = child.engine.submit(request("0", listed=1))
            with pytest.raises(ValueError, match="in use"):
                child.engine.submit(request("0"))
            assert await gather(first) == expected(request("0", listed=1))
            await child.asks_right(request("0"))

    go(test())
