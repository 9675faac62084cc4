"""Scheduler and blocks under random load, without a model: the books balance and every request ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neper.engine.plan.blocks import BlockManager
from neper.engine.plan.scheduler import Scheduler, StepPlan
from neper.engine.plan.sequence import Sequence
from neper.types import FinishReason, LogprobParams, Request, SamplingParams

MAX_MODEL_LEN = 40


def sequence(
    name: str, prompt: list[int], max_tokens: int = 4, *, prompt_top_k: int | None = None, start: int = 1
) -> Sequence:
    request = Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        logprobs=LogprobParams(prompt_top_k=prompt_top_k, prompt_start=start),
    )
    return Sequence(request, MAX_MODEL_LEN)


def scheduler(num_blocks: int = 12, block_size: int = 4, seqs: int = 4, tokens: int = 16) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, block_size), max_num_seqs=seqs, max_num_batched_tokens=tokens)


def launch(sched: Scheduler) -> StepPlan:
    """Plan a step, and check what every plan must be."""
    before = {seq: (seq.num_computed_tokens, seq.next_score) for seq in [*sched.running, *sched.waiting]}
    plan = sched.plan()
    sched.check()
    assert plan.num_tokens <= sched.max_num_batched_tokens
    assert len({chunk.seq for chunk in plan.chunks}) == len(plan.chunks)
    lengths = [chunk.length for chunk in plan.chunks]
    assert lengths == sorted(lengths, key=lambda n: n > 1), "single tokens come first"
    for chunk in plan.chunks:
        seq, (computed, next_score) = chunk.seq, before[chunk.seq]
        assert chunk.length > 0
        assert chunk.start == computed or computed == 0  # a prefix may have been found on admission
        assert seq.num_computed_tokens == chunk.end
        assert len(seq.block_table) * sched.blocks.block_size >= chunk.end
        assert not chunk.samples or seq.num_pending >= 1
        assert not (chunk.samples and seq.scores_left)
        if chunk.score_end > chunk.score_start:
            assert chunk.score_start == next_score, "a score is skipped or repeated"
    return plan


def finish(sched: Scheduler, plan: StepPlan) -> None:
    """Act out a plan's results as the engine would, with token ids that depend on the text."""
    for chunk in plan.chunks:
        seq = chunk.seq
        if seq not in sched.running and seq not in sched.waiting:
            continue
        if chunk.samples:
            if chunk.num_preemptions == seq.num_preemptions:
                sched.blocks.commit(seq, chunk.end)
            if seq.append(sum(seq.token_ids) % 3) is not None:
                sched.remove(seq)
        elif seq.max_tokens == 0 and chunk.score_end == seq.num_prompt_tokens:
            sched.remove(seq)
        sched.check()


def step(sched: Scheduler) -> None:
    finish(sched, launch(sched))


@settings(deadline=None, max_examples=150)
@given(
    load=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=24),
            st.integers(0, 12),
            st.one_of(st.none(), st.integers(1, 24)),
            st.integers(0, 10),
        ),
        min_size=1,
        max_size=12,
    ),
    blocks=st.integers(11, 30),
    tokens=st.integers(1, 40),
    aborts=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 30))),
    overlap=st.booleans(),
)
def test_random_load(
    load: list[tuple[list[int], int, int | None, int]],
    blocks: int,
    tokens: int,
    aborts: set[tuple[int, int]],
    overlap: bool,
) -> None:
    sched = scheduler(num_blocks=blocks, tokens=tokens)
    alive: dict[int, Sequence] = {}
    todo = {
        i: (
            arrival,
            sequence(f"{i % 3}-{i}", prompt, max_tokens, prompt_top_k=None if start is None else 1, start=start or 1),
        )
        for i, (prompt, max_tokens, start, arrival) in enumerate(load)
    }
    launched = StepPlan(())
    for number in range(2000):
        for i, (arrival, seq) in list(todo.items()):
            if arrival <= number:
                del todo[i]
                if seq.max_tokens > 0 or seq.scores_left:
                    sched.add(seq)
                    alive[i] = seq
        for i, moment in aborts:
            if moment == number and i in alive and (alive[i] in sched.running or alive[i] in sched.waiting):
                sched.remove(alive[i])
                sched.check()
        if not sched.has_work and not todo and not launched.chunks:
            break
        plan = launch(sched)
        assert plan.chunks or launched.chunks or not sched.has_work, "work waits and nothing is computed"
        if overlap:  # the results of a step are known when the next one is launched
            plan, launched = launched, plan
        finish(sched, plan)
    assert not sched.has_work
    assert sched.blocks.num_free_blocks == sched.blocks.num_usable_blocks


def test_decodes_go_before_prompts_that_take_the_rest() -> None:
    sched = scheduler(num_blocks=40, tokens=8)
    old, new = sequence("old", [1] * 3, 10), sequence("new", [2] * 30)
    sched.add(old)
    step(sched)
    sched.add(new)
    for _ in range(3):
        plan = sched.plan()
        assert [(chunk.seq.request.request_id, chunk.length) for chunk in plan.chunks] == [("old", 1), ("new", 7)]
        old.append(0)


def test_a_plan_is_made_before_the_last_ones_tokens_are_known() -> None:
    sched = scheduler(num_blocks=40)
    seq = sequence("a", [1] * 5, 3)
    sched.add(seq)
    plans = [sched.plan() for _ in range(4)]
    chunks = [plan.chunks[0] for plan in plans[:3]]
    assert [(chunk.start, chunk.length, chunk.samples, chunk.pending) for chunk in chunks] == [
        (0, 5, True, False),
        (5, 1, True, True),
        (6, 1, True, True),
    ]
    assert [row.num_output_tokens for chunk in chunks for row in chunk.rows()] == [0, 1, 2]
    assert not plans[3].chunks  # the last token is on its way
    assert [seq.append(0) for _ in range(3)] == [None, None, FinishReason.LENGTH]


def test_the_youngest_is_preempted_and_goes_first_in_line() -> None:
    sched = scheduler(num_blocks=11, block_size=4, tokens=64)
    first, second, third = (sequence(name, [i] * 12, 20) for i, name in enumerate("abc"))
    for seq in (first, second, third):
        sched.add(seq)
    while sched.num_preemptions == 0:
        step(sched)
    assert sched.running == [first, second]
    assert list(sched.waiting) == [third]
    assert third.num_computed_tokens == 0
    assert third.block_table == []


def drain(sched: Scheduler) -> list[str]:
    """Compute all that there is; the ids of what started, in their order."""
    started = [seq.request.request_id for seq in sched.running]
    for _ in range(10_000):
        if not sched.has_work:
            return started
        before = list(sched.running)
        plan = launch(sched)
        started += [seq.request.request_id for seq in sched.running if seq not in before]
        finish(sched, plan)
    raise AssertionError("it does not end")


def test_case_114_a_request_of_many_prompts_does_not_keep_others_waiting() -> None:
    sched = scheduler(num_blocks=400, seqs=4, tokens=32)
    for choice in range(100):
        sched.add(sequence(f"many-{choice}", [choice] * 30, 0, prompt_top_k=20))
    step(sched)
    other = sequence("other-0", [1] * 9, 2)
    sched.add(other)
    steps = 0
    while len(other.token_ids) < 11:
        step(sched)
        steps += 1
    assert steps == 3, "the prompt that was begun, its own prompt with its first token, its second one"
    assert len(sched.waiting) > 90


def test_case_114_requests_take_turns_and_choices_keep_their_order() -> None:
    sched = scheduler(num_blocks=400, seqs=2, tokens=32)
    for choice in range(6):
        sched.add(sequence(f"a-{choice}", [1, 2, 3], 2))
    step(sched)
    for choice in range(3):
        sched.add(sequence(f"b-{choice}", [3, 2, 1], 2))
    sched.add(sequence("c-0", [1], 2))
    assert drain(sched) == ["a-0", "a-1", "b-0", "a-2", "c-0", "b-1", "a-3", "b-2", "a-4", "a-5"]


def test_a_preempted_sequence_goes_before_those_whose_turn_it_is() -> None:
    sched = scheduler(num_blocks=11, block_size=4, tokens=64)
    for name in "ab":
        sched.add(sequence(f"{name}-0", [1] * 12, 24))
    while sched.num_preemptions == 0:
        step(sched)
    sched.add(sequence("c-0", [1] * 12, 4))
    assert [seq.request.request_id for seq in sched.waiting] == ["b-0", "c-0"]
    assert drain(sched)[:2] == ["a-0", "b-0"]


def test_equal_prefixes_share_blocks_and_different_histories_do_not() -> None:
    blocks = BlockManager(20, 4)
    a = sequence("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks.grow(a, 9)
    blocks.commit(a, 9)
    b = sequence("b", [1, 2, 3, 4, 5, 6, 7, 8, 0])
    blocks.reuse_prefix(b)
    assert b.block_table == a.block_table[:2]
    assert b.num_computed_tokens == 8
    c = sequence("c", [9, 9, 9, 9, 5, 6, 7, 8, 9])  # the second block's tokens are equal, what went before is not
    blocks.reuse_prefix(c)
    assert c.block_table == []
    blocks.check([a, b, c])
    blocks.release(a)
    blocks.check([b, c])
    assert b.block_table[0] not in blocks._free
    blocks.release(b)
    blocks.check([c])
    d = sequence("d", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks.reuse_prefix(d)
    assert d.num_computed_tokens == 8  # freed, but not forgotten
    blocks.release(d)


def test_check_notices_a_leak() -> None:
    blocks = BlockManager(5, 4)
    a = sequence("a", [1] * 8)
    blocks.grow(a, 8)
    with pytest.raises(AssertionError, match="block"):
        blocks.check([])
