"""Scoring on the host: whole rows of logits are copied there and reduced by the reference.

For what the device's reduction cannot do (`scoring: host`), and as the measure of what it saves.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from neper.engine import memory
from neper.engine.plan.scheduler import SampledRow
from neper.engine.step.batch import BatchInputs
from neper.engine.step.inputs import to_device
from neper.engine.step.kernel_sampler import KernelSampler
from neper.engine.step.packed import Packed, PromptRows, TokenRows
from neper.engine.step.prompt_scores import PromptScoreInputs
from neper.engine.step.readback import Readback
from neper.engine.step.reference_sampler import ReferenceSampler
from neper.engine.step.sampling_metadata import SamplingMetadata
from neper.models.decoder import Decoder
from neper.ops import linear_logprobs, token_logprobs
from neper.ops.packing.reference import pack_scores
from neper.types import PackedRows


class HostScoring:
    """Has another sampler choose the tokens, and scores their rows and those of prompts on the host.

    Rows of their own kind are the other sampler's to score.

    Args:
        sampler: gets steps in which no other row wants scores.
        max_rows: most rows of a step.
    """

    def __init__(
        self, sampler: KernelSampler | ReferenceSampler, decoder: Decoder, readback: Readback, *, max_rows: int
    ) -> None:
        self._sampler = sampler
        self._decoder = decoder
        self._readback = readback
        self._turn = 0
        # Two: a step's rows are still being read when the next one's are on their way. The third is the prompts'.
        self._pinned: list[Tensor] = []
        if decoder.device.type == "cuda":
            shape = max_rows, decoder.config.vocab_size
            for _ in range(3):
                self._pinned.append(
                    memory.allocate("logits on the host", "max_num_seqs", *shape, dtype=decoder.dtype, pinned=True)
                )

    def run(self, hidden: Tensor, inputs: BatchInputs) -> Packed:
        """Next tokens of a step whose hidden states are [T, D], and scores once the copies have arrived."""
        prompts: PromptRows = {}
        for group in inputs.prompt_scores:
            prompts |= self._score_prompts(hidden, group)
        packed = self._sampler.run(hidden, replace(inputs, prompt_scores=()))
        scored = [] if inputs.sample is None else self._scored(inputs.sample)
        self._readback.counters.scored_rows += len(scored) + sum(map(len, prompts.values()))
        if not scored and not prompts:
            return packed
        logits = self._copy([place for place, _, _ in scored]) if scored else None

        def complete(tokens: TokenRows, scores: PromptRows) -> None:
            scores.update(prompts)
            if logits is not None:
                _score_rows(logits, [row for _, row, _ in scored], [top_k for _, _, top_k in scored], tokens)

        packed.complete = complete
        return packed

    def _scored(self, sample: SamplingMetadata) -> list[tuple[int, SampledRow, int]]:
        """The rows that are scored here, with their places and numbers of alternatives."""
        vocab_size = self._decoder.config.vocab_size
        unscored = enumerate(sample.rows[: sample.num_unscored])
        rows = ((place, row, row.seq.request.num_listed(vocab_size)) for place, row in unscored)
        return [(place, row, top_k) for place, row, top_k in rows if top_k is not None]

    def _copy(self, rows: list[int]) -> Tensor:
        """Start to copy these rows of the step's logits to the host; they are there when the step's results are."""
        logits = self._sampler.logits
        assert logits is not None
        index = to_device(np.array(rows), logits.device)
        if not self._pinned:
            return logits.index_select(0, index)
        self._turn = 1 - self._turn
        with self._readback.beside():
            return self._readback.copy(logits.index_select(0, index), self._pinned[self._turn])

    def _score_prompts(self, hidden: Tensor, prompts: PromptScoreInputs) -> PromptRows:
        """Scores of prompt positions; waits for the logits, a piece at a time."""
        rows, host = prompts.hidden(hidden), torch.device("cpu")
        token_ids = torch.tensor([token_id for scored in prompts.chunks for token_id in scored.token_ids])

        def logits_of(numbers: Tensor) -> Tensor:
            """Logits of the rows with these numbers [n, 1], which stand for hidden states on the device."""
            logits = self._decoder.logits(rows[int(numbers[0]) : int(numbers[-1]) + 1])
            return (self._readback.fetch(logits, self._pinned[2]) if self._pinned else logits).float()

        vocab_size = self._decoder.config.vocab_size
        scores = linear_logprobs(
            torch.arange(len(rows), dtype=torch.float32).unsqueeze(1),
            logits_of,
            token_ids,
            prompts.top_k,
            vocab_size=vocab_size,
            row_top_k=prompts.row_top_k(host),
            logprob_token_ids=prompts.named(host),
            max_logits_bytes=4 * vocab_size * (len(self._pinned[2]) if self._pinned else len(rows)),
        )
        packed: PromptRows = {}
        for scored, part in prompts.parts():
            words = pack_scores(token_ids[part], scores.take(part), scored.places)
            packed[scored.chunk] = PackedRows(scored.places, words.numpy().tobytes())
        return packed


def _score_rows(logits: Tensor, rows: Items[SampledRow], top_k: Items[int], tokens: TokenRows) -> None:
    """Put scores beside the sampled tokens of these rows, which are in `tokens` without them."""
    words = [tokens[row].words[0] for row in rows]
    token_ids = torch.tensor([int(word[0]) for word in words])
    valid = torch.tensor([bool(word[1]) for word in words])
    tokens.update(zip(rows, _score(logits, token_ids, top_k, valid), strict=True))


def _score(logits: Tensor, token_ids: Tensor, top_k: Items[int], valid: Tensor | None = None) -> list[PackedRows]:
    """Scores of rows of logits [n, V] on the host, of the tokens [n], each with its own number of alternatives.

    A row that `valid` [n] bool rules out is marked as invalid whatever its logits.
    """
    scores = token_logprobs(logits.float(), token_ids, max(top_k))
    if valid is not None:
        scores = scores._replace(rank=scores.rank.masked_fill(~valid, 0))
    packed = []
    for i, k in enumerate(top_k):
        row = slice(i, i + 1)
        packed.append(PackedRows(k, pack_scores(token_ids[row], scores.take(row), k).numpy().tobytes()))
    return packed
