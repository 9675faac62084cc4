"""Rows that are scored in a way of their own: in another view, over a named set, or with lists longer than others'.

The rest of a step's rows is scored by one launch in buffers sized for it. These are few, and take what they need:
their own temperature, their own sets, and in the processed view the very logits that they were sampled from.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from neper.engine.plan.scheduler import SampledRow
from neper.engine.step.inputs import to_device
from neper.ops import DrawInputs, LogprobBuffers, TokenLogprobs, TokenSets, token_logprobs
from neper.ops.sampling.reference import filter_logits_
from neper.types import LISTED_WHOLE, listed_places


@dataclass(frozen=True)
class ViewRows:
    """Consecutive rows of a step that are scored together.

    Attributes:
        begin: the first of them among the step's rows.
        listed: [(places, number of rows)], runs of rows with lists of the same length.
        top_k: alternatives to list where a row has no set that is listed whole.
        row_top_k: [n] int32, the same for each row.
        temperature: [n] float32, of the views that have one; 0 in the raw view.
        allowed, named: sets of ids a row.
        processed: what is scored are the logits that were sampled from, not the model's own.
    """

    begin: int
    listed: tuple[tuple[int, int], ...]
    top_k: int
    row_top_k: Tensor
    temperature: Tensor
    allowed: TokenSets | None
    named: TokenSets | None
    processed: bool

    @property
    def rows(self) -> slice:
        """Their places among the step's rows."""
        return slice(self.begin, self.begin + sum(count for _, count in self.listed))

    def parts(self) -> Iterator[tuple[slice, int]]:
        """Runs of rows with lists of the same length: their places among these rows, and that length."""
        return parts(self.listed)

    def source(self, logits: Tensor, edited: Tensor | None, draws: DrawInputs | None) -> Tensor:
        """The logits that these rows are scored by, [n, V].

        Args:
            logits: [S or more, V], the model's own of all the step's rows.
            edited: [S or more, V] float32, what those were chosen from; None where nobody edits.
            draws: parameters of those of these rows that are drawn; read in the processed view alone.
        """
        if not self.processed:
            return logits[self.rows]
        chosen = logits[self.rows].float() if edited is None else edited[self.rows]
        return chosen if draws is None else filter_logits_(chosen.clone(), draws)

    def score(
        self, logits: Tensor, token_ids: Tensor, valid: Tensor, out: LogprobBuffers | None = None
    ) -> TokenLogprobs:
        """Scores of these rows' logits [n, V] and tokens [n]; rank 0 where `valid` [n] rules a row out."""
        scores = token_logprobs(
            logits,
            token_ids,
            self.top_k,
            row_top_k=self.row_top_k,
            temperature=self.temperature,
            allowed=self.allowed,
            logprob_token_ids=self.named,
            out=out,
        )
        return scores._replace(rank=scores.rank.masked_fill(~valid, 0))


def parts(runs: Items[tuple[int, int]]) -> Iterator[tuple[slice, int]]:
    """The places of each run of rows, and the length of its lists, of [(length, number of rows)]."""
    begin = 0
    for listed, count in runs:
        yield slice(begin, begin + count), listed
        begin += count


def is_view(row: SampledRow, vocab_size: int, longest_list: int) -> bool:
    """Whether a row that is scored has a way of its own, other than lists of up to `longest_list` of raw scores."""
    request = row.seq.request
    listed = request.num_listed(vocab_size) or 0
    named = request.logprobs.token_ids or request.sampling.allowed_token_ids
    return bool(named) or listed > longest_list or is_processed(row, vocab_size) or _temperature(row) > 0


def is_processed(row: SampledRow, vocab_size: int) -> bool:
    """Whether a row's scores are of other logits than the model's own: edited, or without what filters drop."""
    sampling = row.seq.request.sampling
    if row.seq.request.logprobs.mode != "processed_logprobs":
        return False
    return row.edited or (not sampling.greedy and sampling.filters(vocab_size))


def view_rows(
    sampled: Items[SampledRow], begin: int, vocab_size: int, max_listed: int, device: torch.device
) -> Iterator[ViewRows]:
    """The groups of these rows, of which the first is row `begin` of the step: processed ones and others apart.

    A group's lists have up to `max_listed` places.
    """
    for processed, run in groupby(sampled, key=lambda row: is_processed(row, vocab_size)):
        rest = list(run)
        while rest:
            # Sorted by length, so the longest list is the last one's: few rows of long lists make a group.
            count = 1
            while count < len(rest) and (count + 1) * _listed(rest[count], vocab_size) <= max_listed:
                count += 1
            yield _group(rest[:count], begin, vocab_size, device, processed)
            begin += count
            rest = rest[count:]


def _group(sampled: Items[SampledRow], begin: int, vocab_size: int, device: torch.device, processed: bool) -> ViewRows:
    requests = [row.seq.request for row in sampled]
    top_k = np.array([_row_top_k(row, vocab_size) for row in sampled], dtype=np.int32)
    allowed = [row.seq.allowed_ids for row in sampled]
    named = [request.logprobs.token_ids for request in requests]
    return ViewRows(
        begin=begin,
        listed=tuple((listed, len(list(run))) for listed, run in groupby(_listed(row, vocab_size) for row in sampled)),
        top_k=int(top_k.max()),
        row_top_k=to_device(top_k, device),
        temperature=to_device(np.array([_temperature(row) for row in sampled], dtype=np.float32), device),
        allowed=TokenSets.of(allowed, device) if any(map(len, allowed)) else None,
        named=TokenSets.of(named, device) if any(named) else None,
        processed=processed,
    )


def _row_top_k(row: SampledRow, vocab_size: int) -> int:
    """How many of the best ids a row lists; 0 where a set is listed whole."""
    if row.seq.request.logprobs.token_ids or 0 < len(row.seq.allowed_ids) <= LISTED_WHOLE:
        return 0
    return listed_places(row.seq.request.logprobs.top_k or 0, vocab_size)


def _listed(row: SampledRow, vocab_size: int) -> int:
    return row.seq.request.num_listed(vocab_size) or 0


def _temperature(row: SampledRow) -> float:
    """Of a row's view; 0 where it is the raw one, or greedy, which is the same."""
    sampling = row.seq.request.sampling
    if row.seq.request.logprobs.mode == "raw_logprobs" or sampling.greedy:
        return 0.0
    return sampling.temperature
