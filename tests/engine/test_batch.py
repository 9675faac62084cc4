"""How a step is laid out: padded rows, their places in the buffer, and rows in the order of what they ask for."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from itertools import pairwise

import numpy as np
import torch

from neper.engine.plan.scheduler import SampledRow, ScheduledChunk, StepPlan
from neper.engine.plan.sequence import Sequence
from neper.engine.step.batch import BatchBuilder, BatchInputs, row_buckets
from neper.engine.step.inputs import InputBuffers, Layout, RowFields
from neper.engine.step.masks import MaskBuilder
from neper.ops import noise_keys
from neper.ops.attention.api import AttentionScratch
from neper.ops.attention.parts import Planner
from neper.types import LogprobParams, Request, SamplingParams

VOCAB = 500
CAPACITY = Layout(rows=16, tokens=200, seqs=16, items=30, targets=200, tiles=20, width=16)


def builder(buckets: tuple[int, ...] = (), scratch: AttentionScratch | None = None) -> BatchBuilder:
    return BatchBuilder(
        InputBuffers(CAPACITY, torch.device("cpu")),
        block_size=4,
        vocab_size=VOCAB,
        scores_on_device=True,
        longest_list=20,
        max_listed=150,
        buckets=buckets,
        scratch=scratch,
    )


def chunk(
    slot: int,
    start: int,
    length: int,
    *,
    tokens: int,
    samples: bool = True,
    pending: bool = False,
    top_k: int | None = None,
    scored: tuple[int, int] = (0, 0),
    prompt_top_k: int = 2,
    named: tuple[int, ...] = (),
    **sampling: float,
) -> ScheduledChunk:
    """A chunk of a sequence of `tokens` tokens 100 slot, 100 slot + 1, ... in blocks 10 slot, 10 slot + 1, ..."""
    request = Request(
        request_id=str(slot),
        prompt_token_ids=[100 * slot + i for i in range(tokens)],
        sampling=SamplingParams(**({"temperature": 0.0} | sampling)),  # type: ignore[arg-type]
        logprobs=LogprobParams(top_k=top_k, prompt_top_k=prompt_top_k, prompt_logprob_token_ids=named),
    )
    seq = Sequence(request, 64)
    seq.block_table = [10 * slot + i for i in range(-(-(start + length) // 4))]
    return ScheduledChunk(seq, start, length, samples, pending, scored[0], scored[1], slot, 0)


def rows(inputs: BatchInputs, name: str) -> list[float]:
    assert inputs.sample is not None
    found: list[float] = getattr(inputs.sample.fields, name).flatten().tolist()
    return found


def test_buckets_double_and_then_grow_slowly() -> None:
    assert row_buckets(1) == [1]
    assert row_buckets(8) == [1, 2, 4, 8]
    assert row_buckets(50) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 50]
    large = row_buckets(512)
    assert large[-1] == 512
    assert all(b - a <= max(a, 8) / 4 + 8 for a, b in pairwise(large))


def test_decode_rows_are_padded_and_padding_writes_nothing() -> None:
    plan = StepPlan((chunk(1, 5, 1, tokens=6), chunk(2, 9, 1, tokens=9, pending=True), chunk(3, 0, 1, tokens=1)))
    inputs = builder((1, 2, 4, 8)).build(plan)
    assert inputs.is_decode
    assert inputs.token_ids.tolist() == [105, -3, 300, 0]  # the second is only known to the device: -1 - slot
    attention = inputs.attention
    assert attention.positions.tolist() == [5, 9, 0, 0]
    assert attention.slot_mapping.tolist() == [11 * 4 + 1, 22 * 4 + 1, 30 * 4, -1]
    assert attention.context_lens.tolist() == [6, 10, 1, 0]
    assert attention.few_rows == 4
    assert attention.table_stride.tolist() == [3]
    assert attention.block_tables[1].tolist() == [20, 21, 22]
    assert rows(inputs, "offsets") == [0, 2, 4, -1]
    assert rows(inputs, "slots")[:3] == [1, 2, 3]
    assert attention.tiles is None


def test_rows_stand_by_what_they_ask_for_and_words_follow_them() -> None:
    plan = StepPlan(
        (
            chunk(1, 5, 1, tokens=6, top_k=5),
            chunk(2, 5, 1, tokens=6),
            chunk(3, 5, 1, tokens=6, top_k=3, temperature=0.5, top_p=0.9, seed=7),
            chunk(4, 2, 1, tokens=6, samples=False),
            chunk(5, 5, 1, tokens=6, top_k=0),
        )
    )
    inputs = builder((8,)).build(plan)
    sample = inputs.sample
    assert sample is not None
    assert [row.chunk.slot for row in sample.rows] == [2, 3, 5, 1]
    assert (sample.num_plain, sample.num_chosen, sample.drawn, sample.filtered) == (1, 2, (1,), True)
    assert sample.scored == ((3, 1), (0, 1), (5, 1))
    assert rows(inputs, "listed") == [-1, 3, 0, 5, -1, -1, -1, -1]
    assert rows(inputs, "offsets") == [0, 2, 11, 14, -1, -1, -1, -1]
    assert np.allclose(rows(inputs, "temperature"), [0, 0.5, 0, 0, 0, 0, 0, 0])
    assert rows(inputs, "top_k") == [0] * 8
    keys = sample.fields.keys[1].numpy().view(np.uint32).tolist()
    assert tuple(keys) == noise_keys(7, 0)
    assert inputs.token_ids.tolist()[:5] == [205, 305, 505, 105, 402]  # the row without a next token stands last
    draws = sample.draws()
    assert draws is not None
    assert (draws.keys.long() & 0xFFFFFFFF).tolist() == [list(noise_keys(7, 0))]


def test_longer_chunks_follow_with_their_tiles_and_targets() -> None:
    plan = StepPlan((chunk(1, 5, 1, tokens=6), chunk(2, 4, 130, tokens=134, scored=(6, 134))))
    inputs = builder((1, 2, 4)).build(plan)
    assert not inputs.is_decode
    assert len(inputs.token_ids) == 131  # such a step is not padded
    assert [(g.start, g.first_seq, g.num_seqs, g.query_len) for g in inputs.attention.groups] == [
        (0, 0, 1, 1),
        (1, 1, 1, 130),
    ]
    assert inputs.attention.tiles is not None
    assert inputs.attention.tiles.tolist() == [[1, 1, 128], [1, 129, 2]]
    [prompt] = inputs.prompt_scores
    # Position p is scored by the row of p - 1, which is row 1 + (p - 1 - 4).
    assert (prompt.chunks[0].rows, prompt.top_k) == (slice(2, 130), 2)
    assert prompt.token_ids.tolist() == list(range(206, 334))
    assert rows(inputs, "hidden_rows") == [0, 130]


def test_prompts_are_scored_together_by_the_length_of_their_lists() -> None:
    plan = StepPlan(
        (
            chunk(1, 0, 4, tokens=4, scored=(1, 4), prompt_top_k=9),
            chunk(2, 0, 3, tokens=9, scored=(2, 4), named=(7, 5, 7, 6)),
            chunk(3, 4, 2, tokens=8, scored=(5, 7), prompt_top_k=70),
            chunk(4, 0, 5, tokens=5, scored=(1, 5), prompt_top_k=2),
            chunk(4, 0, 2, tokens=5),
        )
    )
    first, second = builder().build(plan).prompt_scores
    # Chunks stand in the step by length: 3, 4, 2, 1, 4 again. 9 rows of 9 places fit into 150, and 11 of 70 do not.
    assert [(item.chunk.slot, item.rows) for item in first.chunks] == [
        (4, slice(11, 15)), (2, slice(5, 7)), (1, slice(7, 10))
    ]  # fmt: skip
    assert first.token_ids.tolist() == [401, 402, 403, 404, 202, 203, 101, 102, 103]
    assert first.listed == [(2, 4), (3, 2), (9, 3)]
    assert first.top_k == 9
    cpu = torch.device("cpu")
    assert (of := first.row_top_k(cpu)) is not None
    assert of.tolist() == [2] * 4 + [0] * 2 + [9] * 3
    assert (named := first.named(cpu)) is not None
    assert [named.row(row).tolist() for row in range(9)] == [[]] * 4 + [[5, 6, 7]] * 2 + [[]] * 3
    hidden = torch.arange(16.0).unsqueeze(1)
    assert first.hidden(hidden).flatten().tolist() == [11, 12, 13, 14, 5, 6, 7, 8, 9]
    assert [(item.chunk.slot, item.rows) for item in second.chunks] == [(3, slice(0, 2))]
    assert (second.token_ids.tolist(), second.row_top_k(cpu), second.named(cpu)) == ([305, 306], None, None)


def test_short_chunks_of_equal_lengths_are_one_group() -> None:
    lengths = {1: 1, 2: 3, 3: 17, 4: 16, 5: 3, 6: 1, 7: 20}
    plan = StepPlan(tuple(chunk(slot, 4, length, tokens=30) for slot, length in lengths.items()))
    attention = builder().build(plan).attention
    assert [(g.start, g.first_seq, g.num_seqs, g.query_len) for g in attention.groups] == [
        (0, 0, 2, 1), (2, 2, 2, 3), (8, 4, 1, 16), (24, 5, 1, 17), (41, 6, 1, 20)
    ]  # fmt: skip
    assert (attention.few_rows, attention.max_queries) == (24, 16)
    assert attention.tiles is not None
    assert attention.tiles.tolist() == [[5, 24, 17], [6, 41, 20]]


def test_items_name_the_rows_of_short_sequences_and_of_padding() -> None:
    empty = torch.empty(0)
    made = builder((1, 2, 4), AttentionScratch(Planner(4, 4, 100), empty, empty, empty, empty))

    def items(inputs: BatchInputs) -> list[list[int]]:
        attention = inputs.attention
        assert attention.items is not None
        assert attention.num_items is not None
        return attention.items[: attention.num_items.item(), :4].tolist()

    decode = made.build(StepPlan(tuple(chunk(slot, start, 1, tokens=60) for slot, start in ((1, 5), (2, 9), (3, 0)))))
    assert items(decode) == [[1, 1, 1, 10], [0, 0, 1, 6], [2, 2, 1, 1], [3, 3, 1, 0]]
    _, captured, _ = made.decode_inputs(4, window=3)
    assert captured.max_queries == 3
    assert captured.items is not None
    assert decode.attention.items is not None
    assert captured.items.storage_offset() == decode.attention.items.storage_offset()
    assert captured.items.shape == decode.attention.items.shape
    mixed = made.build(StepPlan((chunk(1, 0, 20, tokens=60), chunk(2, 50, 3, tokens=60), chunk(3, 5, 1, tokens=60))))
    assert items(mixed) == [[1, 1, 3, 53], [0, 0, 1, 6]]


def test_places_of_a_decode_step_depend_on_its_rows_alone() -> None:
    """What was captured for so many rows must find its inputs in every later step of as many."""
    captured = Layout(rows=8, tokens=8, seqs=8).places()
    later = Layout(rows=8, tokens=8, seqs=8, targets=5, tiles=3, width=9).places()
    for field in dataclasses.fields(captured):
        if field.name not in ("targets", "tiles"):
            assert getattr(captured, field.name).begin == getattr(later, field.name).begin, field.name


def test_places_of_rows_depend_on_their_number_alone() -> None:
    few, many = (
        Layout(rows=8, tokens=8, seqs=8).places(),
        Layout(rows=8, tokens=90, seqs=3, targets=4, width=9).places(),
    )
    for field in dataclasses.fields(RowFields):
        assert getattr(few, field.name) == getattr(many, field.name)


def test_a_slot_asks_for_what_its_sequence_now_asks_for() -> None:
    lay_out = builder()
    found = []
    for top_k, min_tokens in ((5, 0), (2, 0), (2, 1), (None, 0)):
        asks = chunk(1, 5, 1, tokens=6, top_k=top_k, min_tokens=min_tokens, stop_token_ids=(7,))  # type: ignore[arg-type]
        plan = StepPlan((asks,))
        sample = lay_out.build(plan).sample
        assert sample is not None
        found.append((sample.scored, sample.num_chosen))
    # The third bans its end token, so it does not take the first of its list.
    assert found == [(((5, 1),), 0), (((2, 1),), 0), (((2, 1),), 1), ((), 1)]


def test_masks_that_are_kept_die_with_their_sequence() -> None:
    masks = MaskBuilder(VOCAB)
    asks = chunk(1, 5, 1, tokens=6, allowed_token_ids=(3, 40))  # type: ignore[arg-type]
    first, again = (masks.build([SampledRow(asks)], [0], torch.device("cpu")) for _ in range(2))
    assert first is not None
    assert again is not None
    assert first.allowed(VOCAB).nonzero().tolist() == again.allowed(VOCAB).nonzero().tolist() == [[0, 3], [0, 40]]
    left = weakref.ref(asks.seq)
    del asks
    gc.collect()
    assert left() is None
