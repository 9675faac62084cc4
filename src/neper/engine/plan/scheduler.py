"""Decides what each step computes: which sequences run, and how many tokens of each. Plain Python, no tensors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from neper.engine.plan.blocks import BlockManager
from neper.engine.plan.fair_queue import FairQueue
from neper.engine.plan.sequence import Sequence


@dataclass(frozen=True, eq=False)
class ScheduledChunk:
    """Tokens start .. start + length of one sequence, computed in one step.

    A sequence goes on, or ends, while a step that it is part of is still being launched. So a step takes what changes
    from here; of the sequence itself it reads what is fixed, and tokens up to `end`.

    A chunk with drafts is a window: the sequence's last token, then tokens that may follow it. Each of its rows gives
    the token after it, as if all before it were the sequence's.

    Attributes:
        length: tokens, drafts included.
        samples: the chunk reaches the sequence's last token, so that its last row gives the next one.
        pending: its token is one that was sampled by a launched step and is only known to the device.
        score_start, score_end: prompt positions scored in this chunk, each from the row before it. None when equal.
        slot: of the sequence when the chunk was planned.
        num_preemptions: of the sequence when the chunk was planned; another number later means other blocks.
    """

    seq: Sequence
    start: int
    length: int
    samples: bool
    pending: bool
    score_start: int
    score_end: int
    slot: int
    num_preemptions: int
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def end_of_own(self) -> int:
        """The end of the sequence's own tokens, where drafts begin."""
        return self.start + self.length - len(self.drafts)

    def rows(self) -> Iterator[SampledRow]:
        """The rows that get a next token, in order; none where the chunk does not sample."""
        return (SampledRow(self, place) for place in range(1 + len(self.drafts) if self.samples else 0))


class SampledRow(NamedTuple):
    """A row of a step that gets a next token.

    Attributes:
        place: how many drafts of the chunk come before that token.
    """

    chunk: ScheduledChunk
    place: int = 0

    @property
    def seq(self) -> Sequence:
        return self.chunk.seq

    @property
    def drafts(self) -> tuple[int, ...]:
        """The drafts before its token."""
        return self.chunk.drafts[: self.place]

    @property
    def num_output_tokens(self) -> int:
        """The number of generated tokens before the one that this row samples, drafts counted."""
        return self.chunk.end_of_own + self.place - self.chunk.seq.num_prompt_tokens

    @property
    def edited(self) -> bool:
        """True where its token is not chosen from the model's own logits."""
        sampling = self.seq.request.sampling
        return sampling.penalized or sampling.masked or len(self.seq.logit_edits(self.num_output_tokens).ids) > 0


@dataclass(frozen=True)
class StepPlan:
    """The chunks of one step: those of a single token first, so that they can be attended together."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def drafted(self) -> bool:
        """True where some chunks have drafts: until the step is read, nobody knows where they end."""
        return any(chunk.drafts for chunk in self.chunks)


@dataclass
class _Budget:
    """What is left of something that a step may take."""

    left: int


class Scheduler:
    """Owns the waiting and running sequences and, through them, the blocks.

    The choices of one HTTP request start in their order, and HTTP requests take turns, so that one of many prompts does
    not keep others waiting for all of them. Every running sequence that needs one token gets it before longer chunks
    take the rest of the step. When blocks run out, the youngest running sequence is preempted: it gives all its blocks
    back and is computed again later, before all that wait, from its prompt and what it has generated.

    A plan counts as computed from then on, so that the next one can be made before this one's results are read: where
    a step samples, its token is pending until then. A sequence is admitted only while it has none: it is planned for
    again no sooner than a step after it was preempted. One that waits for a mask sits out: it keeps its slot and
    blocks, unless it is preempted, and nobody waits for it.

    Args:
        max_num_seqs: most sequences that run. max_num_batched_tokens: most tokens of a step.
        max_listed: most places of lists of prompt scores in a step, of `vocab_size` ids each at most, but for one
            position of each sequence.
        max_drafts: most drafts of a step.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int = 2**20,
        max_listed: int = 2**62,
        max_drafts: int = 0,
    ) -> None:
        self.blocks = blocks
        self._vocab_size = vocab_size
        self._max_listed = max_listed
        self._max_drafts = max_drafts
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._preempted: deque[Sequence] = deque()
        self._queue: FairQueue[Sequence] = FairQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.num_waiting)

    @property
    def waiting(self) -> list[Sequence]:
        return [*self._preempted, *self._queue]

    @property
    def num_waiting(self) -> int:
        return len(self._preempted) + len(self._queue)

    def add(self, seq: Sequence) -> None:
        self._queue.add(seq.request.group, seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, finished or aborted, wherever it is."""
        if seq.slot >= 0:
            self.running.remove(seq)
            self._stop_running(seq)
        elif seq in self._preempted:
            self._preempted.remove(seq)
        else:
            self._queue.drop(seq.request.group, seq)

    def plan(self, drafts: Mapping[Sequence, tuple[int, ...]] | None = None) -> StepPlan:
        """Choose the next step's chunks and give each the blocks it needs. Empty when there is nothing to launch.

        Args:
            drafts: tokens that may follow the last one of running sequences, all of whose tokens are known. They take
                what the step's tokens and the free blocks leave to them.
        """
        lengths: dict[Sequence, int] = {}
        budget = self.max_num_batched_tokens
        lists = _Budget(self._max_listed)
        by_need = sorted(self.running, key=lambda seq: seq.num_uncomputed_tokens > 1)  # stable
        preempted = False
        for seq in by_need:
            if seq.slot < 0 or seq.waits_for_mask:  # the first: preempted for an earlier one just now
                continue
            length = min(seq.num_uncomputed_tokens, budget, self._longest(seq, lists))
            if length == 0:
                continue
            while not self.blocks.can_grow(seq, seq.num_computed_tokens + length):
                victim = self.running[-1]
                budget += lengths.pop(victim, 0)
                self._preempt(victim)
                preempted = True
                if victim is seq:
                    break
            if seq.slot >= 0:
                self.blocks.grow(seq, seq.num_computed_tokens + length)
                lengths[seq] = length
                budget -= length
        drafted = self._add_drafts(drafts or {}, lengths, budget)
        budget -= sum(map(len, drafted.values()))
        if not preempted:
            self._admit(lengths, budget, lists)
        chunks = [self._chunk(seq, length, drafted.get(seq, ())) for seq, length in lengths.items()]
        chunks.sort(key=lambda chunk: chunk.length > 1)
        return StepPlan(tuple(chunks))

    def reserve(self, seq: Sequence, count: int) -> int:
        """Give a sequence blocks for up to `count` drafts after its next token; returns how many have room.

        A block stays free for each running sequence, so that no draft makes one of them give up its own.
        """
        end = seq.num_computed_tokens + 1
        while count and self.blocks.missing_blocks(seq, end + count) > self.blocks.num_free_blocks - len(self.running):
            count -= 1
        if count:
            self.blocks.grow(seq, end + count)
        return count

    def _add_drafts(
        self, drafts: Mapping[Sequence, tuple[int, ...]], lengths: dict[Sequence, int], budget: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """The drafts that have room beside these chunks, with blocks for them."""
        drafted: dict[Sequence, tuple[int, ...]] = {}
        budget = min(budget, self._max_drafts)
        for seq, ids in drafts.items():
            if lengths.get(seq) != 1 or seq.num_uncomputed_tokens != 1 or seq.num_pending:
                continue
            count = min(len(ids), budget)
            end = seq.num_computed_tokens + 1
            while count and not self.blocks.can_grow(seq, end + count):
                count -= 1
            if count:
                self.blocks.grow(seq, end + count)
                drafted[seq] = ids[:count]
                budget -= count
        return drafted

    def _admit(self, lengths: dict[Sequence, int], budget: int, lists: _Budget) -> None:
        """Start waiting sequences, in order, while the step has tokens and the cache has room for all of each."""
        while self.num_waiting and budget > 0 and self._free_slots:
            preempted = next((seq for seq in self._preempted if not seq.waits_for_mask), None)
            if preempted is None and not len(self._queue):
                break
            seq = preempted or self._queue.peek()
            self.blocks.reuse_prefix(seq)
            if not self.blocks.can_grow(seq, seq.num_tokens):
                self.blocks.release(seq)
                break
            if preempted is not None:
                self._preempted.remove(preempted)
            else:
                self._queue.take()
            self.running.append(seq)
            seq.slot = self._free_slots.pop()
            if seq.num_cached_tokens < 0:
                seq.num_cached_tokens = seq.num_computed_tokens
                seq.queue_seconds = time.monotonic() - seq.arrived
            length = min(seq.num_tokens - seq.num_computed_tokens, budget, self._longest(seq, lists))
            self.blocks.grow(seq, seq.num_computed_tokens + length)
            lengths[seq] = length
            budget -= length

    def _longest(self, seq: Sequence, lists: _Budget) -> int:
        """Most tokens of the next chunk: lists of a prompt's scores must fit into the memory that there is for them."""
        places = seq.request.num_prompt_listed(self._vocab_size) if seq.scores_left else None
        if not places:
            return self.max_num_batched_tokens
        length = max(1, min(lists.left // places, seq.num_uncomputed_tokens))
        lists.left -= length * places
        return length

    def _preempt(self, seq: Sequence) -> None:
        seq.num_preemptions += 1
        self.running.remove(seq)
        self._stop_running(seq)
        self._preempted.appendleft(seq)
        self.num_preemptions += 1

    def _stop_running(self, seq: Sequence) -> None:
        self.blocks.release(seq)
        self._free_slots.append(seq.slot)
        seq.slot = -1

    @staticmethod
    def _chunk(seq: Sequence, length: int, drafts: tuple[int, ...]) -> ScheduledChunk:
        """The chunk of the next `length` tokens and of drafts, which all count as computed from now on."""
        start = seq.num_computed_tokens
        end = start + length
        score_start = max(start + 1, seq.next_score)
        score_end = max(score_start, min(end + 1, seq.num_prompt_tokens))
        samples = end == seq.num_tokens and seq.max_tokens > 0
        chunk = ScheduledChunk(
            seq=seq,
            start=start,
            length=length + len(drafts),
            samples=samples,
            pending=end > len(seq.token_ids),
            score_start=score_start,
            score_end=score_end,
            slot=seq.slot,
            num_preemptions=seq.num_preemptions,
            drafts=drafts,
        )
        seq.num_computed_tokens = chunk.end
        if score_end > score_start:
            seq.next_score = score_end
        if samples:
            seq.num_pending += 1
        return chunk

    def check(self) -> None:
        """Raise AssertionError unless queues, slots and blocks agree. For tests, after every step."""
        self.blocks.check(self.running)
        slots = [seq.slot for seq in self.running]
        assert all(slot >= 0 for slot in slots), "a running sequence has no slot"
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs)), "slots leaked"
        assert all(seq.slot < 0 and not seq.block_table for seq in self.waiting), "a waiting sequence holds something"
        for seq in self.running:
            assert seq.num_computed_tokens <= len(seq.block_table) * self.blocks.block_size, (
                "computed beyond its blocks"
            )
