"""Figures of batches and steps, taken from a scripted engine on a made-up clock."""

from __future__ import annotations

import dataclasses
import gc

import pytest

from neper.bench.engine_cases import OFF, Case, requests
from neper.bench.engine_drive import Traffic, run_batch
from neper.bench.engine_rig import decode_bytes, kv_bytes_per_token
from neper.errors import NeperError
from neper.models.shapes import SHAPES
from neper.types import PackedRows, Request
from tests.bench.scripted_core import ScriptedCore, batch_of

K20 = Case(20)


def test_tpot_is_the_mean_of_decode_steps_without_the_prefill() -> None:
    # The first step is the prefill. Of 9 decode steps, the first one's results start the clock.
    batch = batch_of(ScriptedCore(lambda number: [50.0, 7.0][number] if number < 2 else 0.25), OFF, 4, 10)
    assert batch.tpot == 0.25
    assert batch.seconds == 50 + 7 + 8 * 0.25
    assert batch.prefill == 50
    assert batch.decode_rate == 4 * 9 / (7 + 8 * 0.25)
    assert len(batch.times) == 9
    assert batch.tokens["0-2"] == list(range(10))
    assert batch.peak_bytes is None


def test_only_steps_that_all_requests_share_count() -> None:
    # One starts in step 3, so it goes on alone for 3 steps, which are quicker.
    core = ScriptedCore(lambda number: 1.0 if number < 10 else 0.1, starts=[0, 3])
    batch = batch_of(core, OFF, 2, 10)
    assert len(batch.times) == 6
    assert batch.tpot == 1.0


def test_nothing_is_collected_while_the_clock_runs() -> None:
    enabled: list[bool] = []

    def seconds(_: int) -> float:
        enabled.append(gc.isenabled())
        return 1.0

    batch_of(ScriptedCore(seconds), OFF, 2, 4)
    with pytest.raises(NeperError):
        batch_of(ScriptedCore(fails=True), OFF, 2, 4)
    assert enabled == [False] * 4
    assert gc.isenabled()


def test_a_reply_without_decode_steps_has_no_tpot() -> None:
    batch = batch_of(ScriptedCore(), OFF, 2, 2)
    assert batch.traffic is None
    with pytest.raises(NeperError, match="less than two decode steps"):
        _ = batch.tpot


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("reply", [10, 64])
def test_bytes_a_step_are_those_of_the_packed_rows(ahead: bool, reply: int) -> None:
    for case, width in ((OFF, 8), (Case(0), 12), (K20, 12 + 20 * 8)):
        assert 4 * PackedRows(case.top_k, b"").width == width
        batch = batch_of(ScriptedCore(ahead=ahead), case, 3, reply)
        assert batch.traffic == Traffic(copies=1, bytes=3 * width, waits=1)
    mixed = batch_of(ScriptedCore(ahead=ahead), Case(20, asking=1), 3, reply)
    assert mixed.traffic == Traffic(copies=1, bytes=172 + 2 * 8, waits=1)


def test_a_failed_request_ends_the_batch() -> None:
    with pytest.raises(NeperError, match="a request failed: no numbers"):
        batch_of(ScriptedCore(fails=True), OFF, 2, 4)


def test_a_reply_that_is_too_short_is_noticed() -> None:
    core = ScriptedCore()
    made = requests(OFF, 1, prompt=3, reply=5, vocab_size=50, seed=0)
    original = core.add

    def add(request: Request) -> None:
        original(request)
        core.waiting[request.request_id][1] -= 1

    core.add = add  # type: ignore[method-assign]
    with pytest.raises(NeperError, match="brought 4 tokens instead of 5"):
        run_batch(core, made)  # type: ignore[arg-type]


def test_bytes_of_a_decode_step() -> None:
    config = SHAPES["qwen3-4b"]
    assert kv_bytes_per_token(config, 2) == 147_456
    assert decode_bytes(config, 2, tokens=0) == 2 * 4_022_468_096
    assert decode_bytes(config, 2, tokens=32 * 256) == 2 * 4_022_468_096 + 32 * 256 * 147_456


def test_embeddings_that_are_no_head_are_not_read() -> None:
    config = dataclasses.replace(SHAPES["qwen3-4b"], tie_word_embeddings=False)
    assert decode_bytes(config, 2, tokens=0) == 2 * 4_022_468_096
