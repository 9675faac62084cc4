"""Runs the model for one step: the only launcher of device work."""

from __future__ import annotations

import torch
from torch import Tensor

from neper.engine.batch import BatchInputs, PromptScoreInputs, SampleInputs
from neper.engine.penalties import PenaltyTables
from neper.engine.readback import Segment, StepOutput
from neper.models.decoder import Decoder
from neper.models.kv_cache import KVCache
from neper.ops import sample, token_logprobs
from neper.ops.packing import pack_scores, pack_tokens

# Prompt logits exist for this many bytes (as float32) at a time, whatever the prompt's length.
_PROMPT_LOGITS_BYTES = 64 * 2**20


class ModelRunner:
    """Owns the model, its KV cache and the per-slot tables."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache, penalties: PenaltyTables) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        self.penalties = penalties

    @torch.inference_mode()
    def run(self, inputs: BatchInputs) -> StepOutput:
        """One step: hidden states of all its tokens, then next tokens and scores where they are wanted."""
        hidden = self.decoder.forward(inputs.input_ids, inputs.positions, self.kv_cache, inputs.attention)
        packed: list[Tensor] = []
        segments: list[Segment] = []
        if inputs.sample is not None:
            self._sample(hidden, inputs.sample, packed, segments)
        for prompt in inputs.prompt_scores:
            self._score_prompt(hidden, prompt, packed, segments)
        return StepOutput(inputs.plan, torch.cat(packed) if packed else None, tuple(segments))

    def _sample(self, hidden: Tensor, inputs: SampleInputs, packed: list[Tensor], segments: list[Segment]) -> None:
        # float32 once for sampling and scores: both read it so, and the CPU reduces bfloat16 at a fifth of the speed.
        logits = self.decoder.logits(hidden.index_select(0, inputs.hidden_rows)).float()
        # One reduction for all rows that asked, at the largest k among them; a row's bits do not depend on k.
        scored_rows = inputs.scored_rows
        index = None
        if scored_rows != list(range(len(inputs.chunks))):
            index = torch.tensor(scored_rows, dtype=torch.int64, device=logits.device)
        largest_k = max((top_k for top_k, _ in inputs.scored), default=0)
        if inputs.greedy_is_listed:
            scores = token_logprobs(logits, None, max(1, largest_k), rows=index)
            token_ids = scores.top_ids[:, 0].clamp(min=0)
        else:
            token_ids, valid = self._choose(logits, inputs)
            plain_rows = [row for row in range(len(inputs.chunks)) if row not in scored_rows]
            if plain_rows:
                plain = torch.tensor(plain_rows, device=logits.device)
                packed.append(pack_tokens(token_ids[plain], valid[plain]))
                segments.append(Segment(tuple(inputs.chunks[row] for row in plain_rows), len(plain_rows), None, False))
            if not scored_rows:
                return
            if index is not None:
                token_ids, valid = token_ids[index], valid[index]
            scores = token_logprobs(logits, token_ids, largest_k, rows=index)
            # A row can be finite and yet have nothing left to draw (bans): rank 0 marks it too.
            scores = scores._replace(rank=scores.rank.masked_fill(~valid, 0))
        start = 0
        for top_k, rows in inputs.scored:
            part = slice(start, start + len(rows))
            packed.append(pack_scores(token_ids[part], scores.take(part), top_k))
            segments.append(Segment(tuple(inputs.chunks[row] for row in rows), len(rows), top_k, False))
            start += len(rows)

    def _choose(self, logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
        """Token ids [S] and their validity [S]."""
        penalties = None
        if inputs.penalized:
            penalties = self.penalties.gather(inputs.penalized, [inputs.chunks[row].seq for row in inputs.penalized])
        return sample(logits, penalties=penalties, bias=inputs.bias, draws=inputs.draws)

    def _score_prompt(
        self, hidden: Tensor, inputs: PromptScoreInputs, packed: list[Tensor], segments: list[Segment]
    ) -> None:
        tile = max(1, _PROMPT_LOGITS_BYTES // (4 * self.decoder.config.vocab_size))
        count = len(inputs.token_ids)
        for begin in range(0, count, tile):
            ids = inputs.token_ids[begin : begin + tile]
            logits = self.decoder.logits(hidden.index_select(0, inputs.hidden_rows[begin : begin + tile]))
            packed.append(pack_scores(ids, token_logprobs(logits, ids, inputs.top_k), inputs.top_k))
        segments.append(Segment((inputs.chunk,), count, inputs.top_k, True))
