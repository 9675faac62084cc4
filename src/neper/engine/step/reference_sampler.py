"""The second half of a step in plain torch: from hidden states to next tokens and scores, packed. What a CPU runs."""

from __future__ import annotations

import torch
from torch import Tensor

from neper.engine.step.batch import BatchInputs
from neper.engine.step.packed import Packed, prompt_segments, token_segments
from neper.engine.step.penalties import PenaltyTables
from neper.engine.step.prompt_scores import PromptScoreInputs
from neper.engine.step.sampling_metadata import SamplingMetadata
from neper.engine.step.view_rows import parts
from neper.models.decoder import Decoder
from neper.ops import TokenLogprobs, linear_logprobs, sample, token_logprobs
from neper.ops.packing.reference import pack_scores, pack_tokens
from neper.ops.sampling.reference import edit_logits


class ReferenceSampler:
    """Samples and scores with torch's operations, on any device.

    Args:
        last_tokens: [slots] int32, where sampled tokens are kept for the next step.
        keep_logits: leave the logits of a step's rows in `logits`.
    """

    def __init__(
        self, decoder: Decoder, penalties: PenaltyTables, last_tokens: Tensor, *, keep_logits: bool = False
    ) -> None:
        self.logits: Tensor | None = None
        self._decoder = decoder
        self._penalties = penalties
        self._last_tokens = last_tokens
        self._keep_logits = keep_logits

    def run(self, hidden: Tensor, inputs: BatchInputs) -> Packed:
        """Next tokens and scores of a step whose hidden states are [T, D]."""
        packed = Packed()
        words: list[Tensor] = []
        if inputs.sample is not None:
            self._sample(hidden, inputs.sample, words, packed)
        for prompts in inputs.prompt_scores:
            self._score_prompts(hidden, prompts, words, packed)
        packed.words = torch.cat(words) if words else None
        return packed

    def _sample(self, hidden: Tensor, inputs: SamplingMetadata, words: list[Tensor], packed: Packed) -> None:
        # A row that has no next token (one token of a longer prompt) stands behind these.
        count = len(inputs.rows)
        logits = self._decoder.logits(hidden.index_select(0, inputs.fields.hidden_rows[:count]))
        packed.segments += token_segments(inputs)
        self.logits = logits if self._keep_logits else None
        if logits.device.type == "cpu":
            # Once for sampling and scores: both read float32, and the CPU reduces bfloat16 at a fifth of the speed.
            logits = logits.float()
        chosen, plain = inputs.num_chosen, inputs.num_plain
        token_ids = torch.full((count,), -1, device=logits.device)
        valid = torch.ones(count, dtype=torch.bool, device=logits.device)
        edited = self._choose(logits[:chosen], inputs, token_ids, valid) if chosen else None
        if inputs.num_unscored:
            words.append(pack_tokens(token_ids[: inputs.num_unscored], valid[: inputs.num_unscored]))
        for view in inputs.views:
            source = inputs.view_logits(view, logits, edited)
            scores = view.score(source, token_ids[view.rows], valid[view.rows])
            words += [pack_scores(token_ids[view.rows][part], scores.take(part), k) for part, k in view.parts()]
        if plain < count:
            listed = chosen < count
            scores = self._score(logits[plain:], token_ids[plain:] if chosen > plain else None, inputs, listed)
            best = scores.top_ids[:, 0].clamp(min=0) if listed else token_ids[plain:]
            token_ids[plain:] = torch.where(token_ids[plain:] < 0, best, token_ids[plain:])
            # A row can be finite and yet have nothing left to draw (bans): rank 0 marks it too.
            scores = scores._replace(rank=scores.rank.masked_fill(~valid[plain:], 0))
            words += [pack_scores(token_ids[plain:][part], scores.take(part), k) for part, k in parts(inputs.scored)]
        self._last_tokens[inputs.fields.slots[:count].long()] = token_ids.int()

    def _choose(self, logits: Tensor, inputs: SamplingMetadata, token_ids: Tensor, valid: Tensor) -> Tensor | None:
        """Write the tokens of the first rows to `token_ids` and their validity to `valid`.

        Returns:
            the edited logits that they were chosen from; None where nobody edits.
        """
        edited = penalties = None
        rows = [inputs.rows[row] for row in inputs.penalized]
        if inputs.penalized:
            penalties = self._penalties.gather(inputs.penalized, rows)
        if inputs.edited:
            edited = edit_logits(logits, penalties, inputs.bias, inputs.masks())
        ids, finite = sample(logits, edited=edited, draws=inputs.draws())
        token_ids[: len(ids)] = ids
        valid[: len(ids)] = finite
        if penalties is not None:
            self._penalties.count(penalties, rows, token_ids)
        return edited

    @staticmethod
    def _score(logits: Tensor, token_ids: Tensor | None, inputs: SamplingMetadata, listed: bool) -> TokenLogprobs:
        """One reduction for all rows that asked, at the largest k among them: a row's bits do not depend on k.

        A row whose token is still to be found (-1) takes it from its list.
        """
        largest_k = max(top_k for top_k, _ in inputs.scored)
        return token_logprobs(logits, token_ids, max(1, largest_k) if listed else largest_k)

    def _score_prompts(self, hidden: Tensor, prompts: PromptScoreInputs, words: list[Tensor], packed: Packed) -> None:
        token_ids = prompts.token_ids
        scores = linear_logprobs(
            prompts.hidden(hidden),
            self._decoder.logits,
            token_ids,
            prompts.top_k,
            vocab_size=self._decoder.config.vocab_size,
            row_top_k=prompts.row_top_k(hidden.device),
            logprob_token_ids=prompts.named(hidden.device),
        )
        words += [pack_scores(token_ids[part], scores.take(part), k) for part, k in parts(prompts.listed)]
        packed.segments += prompt_segments(prompts)
