"""Runs the model for one step: the only launcher of device work."""

from __future__ import annotations

import torch
from torch import Tensor

from neper.engine.batch import BatchInputs, PromptScoreInputs, SampleInputs
from neper.engine.penalties import PenaltyTables
from neper.engine.readback import Segment, StepOutput
from neper.models.decoder import Decoder
from neper.models.kv_cache import KVCache
from neper.ops import linear_logprobs, sample, token_logprobs
from neper.ops.packing import pack_scores, pack_tokens


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
        logits = self.decoder.logits(hidden.index_select(0, inputs.hidden_rows))
        if logits.device.type == "cpu":
            # Once for sampling and scores: both read float32, and the CPU reduces bfloat16 at a fifth of the speed.
            logits = logits.float()
        chosen, plain = inputs.num_chosen, inputs.num_plain
        token_ids: Tensor | None = None
        valid: Tensor | None = None
        if chosen:
            token_ids, valid = self._choose(logits[:chosen], inputs)
            if plain:
                packed.append(pack_tokens(token_ids[:plain], valid[:plain]))
                segments.append(Segment(inputs.chunks[:plain], plain, None, False))
        if not inputs.scored:
            return
        listed = len(inputs.chunks) - chosen
        if token_ids is not None and valid is not None:
            token_ids = torch.nn.functional.pad(token_ids[plain:], (0, listed), value=-1)
            valid = torch.nn.functional.pad(valid[plain:], (0, listed), value=True)
        # One reduction for all rows that asked, at the largest k among them: a row's bits do not depend on k. A row
        # whose token is still to be found (-1) takes it from its list.
        largest_k = max(top_k for top_k, _ in inputs.scored)
        if listed:
            largest_k = max(1, largest_k)
        scores = token_logprobs(logits[plain:], token_ids, largest_k)
        if token_ids is None or valid is None:
            token_ids = scores.top_ids[:, 0].clamp(min=0)
        else:
            if listed:
                token_ids = torch.where(token_ids < 0, scores.top_ids[:, 0].clamp(min=0), token_ids)
            # A row can be finite and yet have nothing left to draw (bans): rank 0 marks it too.
            scores = scores._replace(rank=scores.rank.masked_fill(~valid, 0))
        start = 0
        for top_k, count in inputs.scored:
            part = slice(start, start + count)
            packed.append(pack_scores(token_ids[part], scores.take(part), top_k))
            segments.append(Segment(inputs.chunks[plain:][part], count, top_k, False))
            start += count

    def _choose(self, logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
        """Token ids [S] and their validity [S]."""
        penalties = None
        if inputs.penalized:
            penalties = self.penalties.gather(inputs.penalized, [inputs.chunks[row].seq for row in inputs.penalized])
        return sample(logits, penalties=penalties, bias=inputs.bias, draws=inputs.draws)

    def _score_prompt(
        self, hidden: Tensor, inputs: PromptScoreInputs, packed: list[Tensor], segments: list[Segment]
    ) -> None:
        rows = hidden.index_select(0, inputs.hidden_rows)
        scores = linear_logprobs(
            rows, self.decoder.logits, inputs.token_ids, inputs.top_k, vocab_size=self.decoder.config.vocab_size
        )
        packed.append(pack_scores(inputs.token_ids, scores, inputs.top_k))
        segments.append(Segment((inputs.chunk,), len(inputs.token_ids), inputs.top_k, True))
