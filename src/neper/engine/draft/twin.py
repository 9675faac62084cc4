"""Sequences as what drafts sees them, and the steps of one token after the other that give their drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from neper.engine.plan.scheduler import ScheduledChunk, StepPlan
from neper.engine.plan.sequence import Sequence
from neper.engine.step.batch import BatchInputs
from neper.engine.step.readback import StepOutput
from neper.engine.step.runner import ModelRunner
from neper.types import Request, SamplingParams

_DRAWN_BY = ("temperature", "top_p", "top_k", "min_p", "top_n_sigma")


class Twin:
    """A sequence without scores, edits and masks: the same tokens, from `first` on, in the same blocks.

    Attributes:
        computed: leading tokens of it whose K/V are in the cache of what drafts.
    """

    def __init__(self, seq: Sequence, max_model_len: int, *, first: int = 0) -> None:
        asked = seq.request
        self.seq = Sequence(
            Request(
                request_id=asked.request_id,
                prompt_token_ids=asked.prompt_token_ids[first:],
                sampling=SamplingParams(**{name: getattr(asked.sampling, name) for name in _DRAWN_BY}),
            ),
            max_model_len,
        )
        self.seq.seed = seq.seed
        self.num_preemptions = seq.num_preemptions
        self.computed = 0
        self._first = first
        self.follow(seq)

    def follow(self, seq: Sequence) -> None:
        """Take the tokens and blocks that the sequence has got since."""
        self.seq.token_ids += seq.token_ids[len(self.seq.token_ids) + self._first :]
        self.seq.block_table = seq.block_table

    @property
    def num_tokens(self) -> int:
        return len(self.seq.token_ids)

    @property
    def backlog(self) -> int:
        """Its tokens that are still to be computed."""
        return self.num_tokens - self.computed

    def chunk(
        self, slot: int, start: int, length: int, *, samples: bool = True, pending: bool = False
    ) -> ScheduledChunk:
        return ScheduledChunk(
            seq=self.seq,
            start=start,
            length=length,
            samples=samples,
            pending=pending,
            score_start=0,
            score_end=0,
            slot=slot,
            num_preemptions=self.num_preemptions,
        )


def plan_of(chunks: Iterable[ScheduledChunk]) -> StepPlan:
    return StepPlan(tuple(sorted(chunks, key=lambda chunk: chunk.length > 1)))


def draft(
    runner: ModelRunner,
    twins: Mapping[Sequence, Twin],
    wanted: Mapping[Sequence, int],
    fill: Callable[[int, BatchInputs], None] | None = None,
) -> dict[Sequence, list[int]]:
    """So many tokens to follow each sequence, each but the first drawn over those before it.

    Its twin's backlog is computed with the first. What was drawn stays on the device until all steps are launched.

    Args:
        fill: called with the number of drafts before a step's, when that step is laid out; see `ModelRunner.begin`.
    """
    drafts: dict[Sequence, list[int]] = {seq: [] for seq in wanted}
    launched: tuple[StepOutput, dict[Sequence, ScheduledChunk]] | None = None
    for depth in range(max(wanted.values(), default=0)):
        chunks = {seq: _next(seq, twins[seq], depth) for seq, most in wanted.items() if most > depth}
        # There is room for two results: each is read after the next one was launched.
        output = runner.launch(plan_of(chunks.values()), None if fill is None else partial(fill, depth))
        if launched is not None:
            _read(runner, *launched, drafts)
        launched = output, chunks
    if launched is not None:
        _read(runner, *launched, drafts)
    for seq in wanted:
        twins[seq].computed = twins[seq].num_tokens
    return drafts


def _next(seq: Sequence, twin: Twin, depth: int) -> ScheduledChunk:
    """The chunk that gives the draft after so many others. The one before it is known to the device alone."""
    if depth == 0:
        return twin.chunk(seq.slot, twin.computed, twin.backlog)
    return twin.chunk(seq.slot, twin.num_tokens + depth - 1, 1, pending=True)


def _read(
    runner: ModelRunner,
    output: StepOutput,
    chunks: Mapping[Sequence, ScheduledChunk],
    drafts: Mapping[Sequence, list[int]],
) -> None:
    """Add the drafts of a step."""
    result = runner.readback.read(output)
    for seq, chunk in chunks.items():
        drafts[seq].append(int(result.tokens[chunk].token_ids[0]))
