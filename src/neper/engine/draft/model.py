"""Drafts of a small model: it reads the same tokens over a cache of its own, and draws with the same noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

from neper.engine.draft.twin import Twin, draft, plan_of
from neper.engine.plan.sequence import Sequence
from neper.engine.step.runner import BegunStep, ModelRunner


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
        self._twins: dict[Sequence, Twin] = {}
        self._ahead: dict[Sequence, int] = {}  # drafts after its own tokens whose K/V are there as well
        self._content: dict[int, bytes] = {}  # by block: the hash of the tokens up to its end

    def ready(self, seq: Sequence) -> bool:
        return seq.num_tokens < self._max_model_len

    def observe(self, step: BegunStep) -> None:
        """It reads tokens, no hidden states."""

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Items[int]]:
        wanted = {seq: min(most, self._max_model_len - len(seq.token_ids)) for seq, most in wanted.items()}
        wanted = {seq: most for seq, most in wanted.items() if most > 0}
        twins = {seq: self._twin(seq) for seq in wanted}
        self._catch_up(twins.values())
        drafts = draft(self.runner, twins, wanted)
        for seq, twin in twins.items():
            self._ahead[seq] = wanted[seq] - 1
            self._note(seq, twin)
        return drafts

    def accepted(self, seq: Sequence, num_accepted: int) -> None:
        self._twins[seq].computed += min(num_accepted, self._ahead[seq])

    def forget(self, seq: Sequence) -> None:
        self._twins.pop(seq, None)
        self._ahead.pop(seq, None)

    def _twin(self, seq: Sequence) -> Twin:
        """The twin of a sequence, with the blocks that it holds now; those in which something will be written are
        unknown from here on.
        """
        twin = self._twins.get(seq)
        if twin is None or twin.num_preemptions != seq.num_preemptions:
            twin = self._twins[seq] = Twin(seq, self._max_model_len)
            for block in seq.block_table[: (len(seq.token_ids) - 1) // self._block_size]:
                if self._content.get(block) != seq.block_hash(twin.computed // self._block_size, self._block_size):
                    break
                twin.computed += self._block_size
        twin.follow(seq)
        for block in seq.block_table[twin.computed // self._block_size :]:
            self._content.pop(block, None)
        return twin

    def _note(self, seq: Sequence, twin: Twin) -> None:
        """Note the content of blocks that the sequence's own tokens fill."""
        for index in range(twin.computed // self._block_size - 1, -1, -1):
            key = seq.block_hash(index, self._block_size)
            if self._content.get(seq.block_table[index]) == key:
                break
            self._content[seq.block_table[index]] = key

    def _catch_up(self, twins: Iterable[Twin]) -> None:
        """Compute all but what one step takes of the tokens that are still to be computed."""
        by_backlog = sorted(twins, key=lambda twin: -twin.backlog)
        while sum(twin.backlog for twin in by_backlog) > self._max_tokens:
            chunks, room = [], self._max_tokens
            for twin in by_backlog:
                length = min(twin.backlog - 1, room)
                if length > 0:
                    chunks.append(twin.chunk(-1, twin.computed, length, samples=False))
                    twin.computed += length
                    room -= length
            self.runner.readback.read(self.runner.launch(plan_of(chunks)))
