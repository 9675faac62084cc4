"""Drafts of a small model: it reads the same tokens over a cache of its own, and draws with the same noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

from neper.engine.plan.scheduler import ScheduledChunk, StepPlan
from neper.engine.plan.sequence import Sequence
from neper.engine.step.readback import StepOutput
from neper.engine.step.runner import ModelRunner
from neper.types import Request, SamplingParams

_DRAWN_BY = ("temperature", "top_p", "top_k", "min_p", "top_n_sigma")


class _Twin:
    """A sequence as the small model sees it: the same tokens in the same blocks, without scores, edits and masks.

    Attributes:
        computed: leading tokens whose K/V are in the small model's cache.
        ahead: drafts after the sequence's own tokens whose K/V are there as well.
    """

    def __init__(self, seq: Sequence, max_model_len: int) -> None:
        asked = seq.request
        self.seq = Sequence(
            Request(
                request_id=asked.request_id,
                prompt_token_ids=asked.prompt_token_ids,
                sampling=SamplingParams(**{name: getattr(asked.sampling, name) for name in _DRAWN_BY}),
            ),
            max_model_len,
        )
        self.seq.token_ids = seq.token_ids  # which grows with the sequence
        self.seq.seed = seq.seed
        self.num_preemptions = seq.num_preemptions
        self.computed = 0
        self.ahead = 0

    @property
    def backlog(self) -> int:
        """The sequence's own tokens that are still to be computed."""
        return len(self.seq.token_ids) - self.computed


class ModelDrafter:
    """Runs a small model of the same vocabulary. It satisfies `neper.engine.draft.drafter.Drafter`.

    Its cache has a place for each block of the model's, so that a sequence's block table serves both. What the model
    finds in its prefix cache this one may never have read: `_content` tells what its cache holds.

    Args:
        runner: of the small model.
        block_size: tokens of a block.
        max_model_len: longest sequence that it can read.
        max_num_batched_tokens: most tokens of a step of it.
    """

    writes = True

    def __init__(
        self, runner: ModelRunner, *, block_size: int, max_model_len: int, max_num_batched_tokens: int
    ) -> None:
        self.runner = runner
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_tokens = max_num_batched_tokens
        self._twins: dict[Sequence, _Twin] = {}
        self._content: dict[int, bytes] = {}  # by block: the hash of the tokens up to its end

    def ready(self, seq: Sequence) -> bool:
        return seq.num_tokens < self._max_model_len

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Items[int]]:
        wanted = {seq: min(most, self._max_model_len - len(seq.token_ids)) for seq, most in wanted.items()}
        wanted = {seq: most for seq, most in wanted.items() if most > 0}
        drafts: dict[Sequence, list[int]] = {seq: [] for seq in wanted}
        if not wanted:
            return drafts
        twins = {seq: self._twin(seq) for seq in wanted}
        self._catch_up(twins.values())
        launched: tuple[StepOutput, dict[Sequence, ScheduledChunk]] | None = None
        for depth in range(max(wanted.values())):
            chunks = {seq: self._next(seq, twins[seq], depth) for seq, most in wanted.items() if most > depth}
            # There is room for two results: each is read after the next one was launched.
            output = self.runner.launch(_plan(chunks.values()))
            if launched is not None:
                self._read(*launched, drafts)
            launched = output, chunks
        assert launched is not None
        self._read(*launched, drafts)
        for seq, twin in twins.items():
            twin.computed, twin.ahead = len(seq.token_ids), wanted[seq] - 1
            self._note(seq, twin)
        return drafts

    def accepted(self, seq: Sequence, num_accepted: int) -> None:
        twin = self._twins[seq]
        twin.computed += min(num_accepted, twin.ahead)

    def forget(self, seq: Sequence) -> None:
        self._twins.pop(seq, None)

    def _twin(self, seq: Sequence) -> _Twin:
        """The twin of a sequence, with the blocks that it holds now; those in which something will be written are
        unknown from here on.
        """
        twin = self._twins.get(seq)
        if twin is None or twin.num_preemptions != seq.num_preemptions:
            twin = self._twins[seq] = _Twin(seq, self._max_model_len)
            for block in seq.block_table[: (len(seq.token_ids) - 1) // self._block_size]:
                if self._content.get(block) != seq.block_hash(twin.computed // self._block_size, self._block_size):
                    break
                twin.computed += self._block_size
        twin.seq.block_table = seq.block_table
        for block in seq.block_table[twin.computed // self._block_size :]:
            self._content.pop(block, None)
        return twin

    def _note(self, seq: Sequence, twin: _Twin) -> None:
        """Note the content of blocks that the sequence's own tokens fill."""
        for index in range(twin.computed // self._block_size - 1, -1, -1):
            key = seq.block_hash(index, self._block_size)
            if self._content.get(seq.block_table[index]) == key:
                break
            self._content[seq.block_table[index]] = key

    def _catch_up(self, twins: Iterable[_Twin]) -> None:
        """Compute all but what one step takes of the tokens that are still to be computed."""
        by_backlog = sorted(twins, key=lambda twin: -twin.backlog)
        while sum(twin.backlog for twin in by_backlog) > self._max_tokens:
            chunks, room = [], self._max_tokens
            for twin in by_backlog:
                length = min(twin.backlog - 1, room)
                if length > 0:
                    chunks.append(_chunk(twin, -1, twin.computed, length, samples=False))
                    twin.computed += length
                    room -= length
            self.runner.readback.read(self.runner.launch(_plan(chunks)))

    @staticmethod
    def _next(seq: Sequence, twin: _Twin, depth: int) -> ScheduledChunk:
        """The chunk that gives the draft after so many others. The one before it is known to the device alone."""
        if depth == 0:
            return _chunk(twin, seq.slot, twin.computed, twin.backlog)
        return _chunk(twin, seq.slot, len(seq.token_ids) + depth - 1, 1, pending=True)

    def _read(
        self, output: StepOutput, chunks: Mapping[Sequence, ScheduledChunk], drafts: Mapping[Sequence, list[int]]
    ) -> None:
        """Add the drafts of a step."""
        result = self.runner.readback.read(output)
        for seq, chunk in chunks.items():
            drafts[seq].append(int(result.tokens[chunk].token_ids[0]))


def _chunk(
    twin: _Twin, slot: int, start: int, length: int, *, samples: bool = True, pending: bool = False
) -> ScheduledChunk:
    return ScheduledChunk(
        seq=twin.seq,
        start=start,
        length=length,
        samples=samples,
        pending=pending,
        score_start=0,
        score_end=0,
        slot=slot,
        num_preemptions=twin.num_preemptions,
    )


def _plan(chunks: Iterable[ScheduledChunk]) -> StepPlan:
    return StepPlan(tuple(sorted(chunks, key=lambda chunk: chunk.length > 1)))
