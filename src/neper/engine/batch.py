"""Turns a StepPlan into the tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neper.engine.scheduler import ScheduledChunk, StepPlan
from neper.ops import DrawInputs, noise_keys
from neper.ops.attention import AttentionGroup, AttentionInputs
from neper.ops.sampling import Bias


@dataclass(frozen=True)
class SampleInputs:
    """The S rows of a step that get a next token, in an order that leaves every part of them a slice.

    First the rows without scores, then those that are scored and sampled (or edited), last those that are scored and
    take the model's own best token: the reduction that scores them finds it.

    Attributes:
        chunks: [S], the chunk of each row.
        hidden_rows: [S] int64, the row of each in the step's hidden states.
        num_chosen: how many rows, from the first on, have their token chosen by `sample`.
        draws: parameters of those that are not greedy; None when all are.
        bias: logit bias and bans; None when there is none.
        penalized: the rows that have penalties.
        scored: [(top_k, number of rows)], runs of rows that want logprobs, up to the last row; empty when nobody asked.
    """

    chunks: tuple[ScheduledChunk, ...]
    hidden_rows: Tensor
    num_chosen: int
    draws: DrawInputs | None
    bias: Bias | None
    penalized: tuple[int, ...]
    scored: tuple[tuple[int, int], ...]

    @property
    def num_plain(self) -> int:
        """How many rows, from the first on, have no scores."""
        return len(self.chunks) - sum(count for _, count in self.scored)


@dataclass(frozen=True)
class PromptScoreInputs:
    """The prompt positions of one chunk that are scored.

    Attributes:
        hidden_rows: [P] int64, for position p the row of p - 1 in the step's hidden states.
        token_ids: [P] int64, the prompt tokens at those positions.
        top_k: alternatives to list for each.
    """

    chunk: ScheduledChunk
    hidden_rows: Tensor
    token_ids: Tensor
    top_k: int


@dataclass(frozen=True)
class BatchInputs:
    """All that the runner needs for one step of T tokens, on the device."""

    plan: StepPlan
    input_ids: Tensor
    positions: Tensor
    attention: AttentionInputs
    sample: SampleInputs | None
    prompt_scores: tuple[PromptScoreInputs, ...]


def build(plan: StepPlan, *, block_size: int, vocab_size: int, device: torch.device) -> BatchInputs:
    """Lay out a plan's tokens flat, in the order of its chunks."""
    ids: list[int] = []
    positions, slots, starts = [], [], []
    row = 0
    for chunk in plan.chunks:
        seq, end = chunk.seq, chunk.start + chunk.length
        ids.extend(seq.token_ids[chunk.start : end])
        chunk_positions = np.arange(chunk.start, end)
        positions.append(chunk_positions)
        slots.append(_slots(seq.block_table, chunk_positions, block_size))
        starts.append(row)
        row += chunk.length

    def to_device(values: npt.ArrayLike) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device, non_blocking=True)

    sampled = [
        (chunk, start + chunk.length - 1) for chunk, start in zip(plan.chunks, starts, strict=True) if chunk.samples
    ]
    return BatchInputs(
        plan=plan,
        input_ids=to_device(ids),
        positions=to_device(np.concatenate(positions)),
        attention=AttentionInputs(to_device(np.concatenate(slots)), _groups(plan, starts, block_size, device)),
        sample=_sample_inputs(sampled, vocab_size, device) if sampled else None,
        prompt_scores=tuple(
            PromptScoreInputs(
                chunk=chunk,
                hidden_rows=to_device(np.arange(chunk.score_start, chunk.score_end) - 1 - chunk.start + start),
                token_ids=to_device(chunk.seq.token_ids[chunk.score_start : chunk.score_end]),
                top_k=chunk.seq.request.logprobs.prompt_top_k or 0,
            )
            for chunk, start in zip(plan.chunks, starts, strict=True)
            if chunk.score_end > chunk.score_start
        ),
    )


def _slots(block_table: list[int], positions: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
    """Cache slots of a sequence's positions."""
    blocks = np.asarray(block_table, dtype=np.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


def _groups(plan: StepPlan, starts: list[int], block_size: int, device: torch.device) -> tuple[AttentionGroup, ...]:
    """One group for all chunks of a single token (they come first), then one for each longer chunk."""
    singles = sum(chunk.length == 1 for chunk in plan.chunks)
    members = [plan.chunks[:singles]] if singles else []
    members += [(chunk,) for chunk in plan.chunks[singles:]]
    groups, first = [], 0
    for chunks in members:
        contexts = [chunk.start + chunk.length for chunk in chunks]
        longest = max(contexts)
        slots = np.zeros((len(chunks), longest), dtype=np.int64)  # 0 = the null slot
        for i, (chunk, context) in enumerate(zip(chunks, contexts, strict=True)):
            slots[i, :context] = _slots(chunk.seq.block_table, np.arange(context), block_size)
        positions = np.stack([np.arange(chunk.start, chunk.start + chunk.length) for chunk in chunks])
        groups.append(
            AttentionGroup(
                start=starts[first],
                num_seqs=len(chunks),
                query_len=chunks[0].length,
                slots=torch.from_numpy(slots.reshape(-1)).to(device, non_blocking=True),
                positions=torch.from_numpy(positions).to(device, non_blocking=True),
                context_len=longest,
            )
        )
        first += len(chunks)
    return tuple(groups)


def _sample_inputs(sampled: list[tuple[ScheduledChunk, int]], vocab_size: int, device: torch.device) -> SampleInputs:
    in_order = sorted((_place(chunk), index) for index, (chunk, _) in enumerate(sampled))
    places = [place for place, _ in in_order]
    sampled = [sampled[index] for _, index in in_order]
    num_chosen = sum(not listed for _, listed, _ in places)
    scored = groupby(place for place in places if place[0])
    return SampleInputs(
        chunks=tuple(chunk for chunk, _ in sampled),
        hidden_rows=torch.tensor([row for _, row in sampled], device=device),
        num_chosen=num_chosen,
        draws=_draw_inputs(sampled, vocab_size, device),
        bias=_bias([chunk for chunk, _ in sampled], vocab_size, device),
        penalized=tuple(row for row, (chunk, _) in enumerate(sampled) if chunk.seq.request.sampling.penalized),
        scored=tuple((top_k, len(list(run))) for (_, _, top_k), run in scored),
    )


def _place(chunk: ScheduledChunk) -> tuple[bool, bool, int]:
    """What a row's place in SampleInputs follows from: scored, its token is the first of its list, top_k."""
    request = chunk.seq.request
    top_k = request.logprobs.top_k
    if top_k is None:
        return False, False, 0
    sampling = request.sampling
    return True, sampling.greedy and not sampling.penalized and not len(chunk.seq.logit_edits.ids), top_k


def _bias(chunks: list[ScheduledChunk], vocab_size: int, device: torch.device) -> Bias | None:
    edits = {row: chunk.seq.logit_edits for row, chunk in enumerate(chunks)}
    edits = {row: edit for row, edit in edits.items() if len(edit.ids)}
    if not edits:
        return None
    rows = np.repeat(list(edits), [len(edit.ids) for edit in edits.values()])
    ids = np.concatenate([edit.ids for edit in edits.values()])
    values = np.concatenate([edit.values for edit in edits.values()])
    # An end token can lie beyond the model's vocabulary (a tokenizer's own): what cannot come needs no ban.
    known = (ids >= 0) & (ids < vocab_size)
    if not known.any():
        return None
    return Bias(*(torch.from_numpy(array[known]).to(device) for array in (rows, ids, values)))


def _draw_inputs(sampled: list[tuple[ScheduledChunk, int]], vocab_size: int, device: torch.device) -> DrawInputs | None:
    rows = [row for row, (chunk, _) in enumerate(sampled) if not chunk.seq.request.sampling.greedy]
    if not rows:
        return None
    sequences = [sampled[row][0].seq for row in rows]
    params = [seq.request.sampling for seq in sequences]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return DrawInputs(
        rows=torch.tensor(rows, device=device),
        temperature=floats([p.temperature for p in params]),
        top_k=torch.tensor(top_k, device=device),
        top_p=floats([p.top_p for p in params]),
        min_p=floats([p.min_p for p in params]),
        keys=torch.tensor([noise_keys(seq.seed, seq.num_output_tokens) for seq in sequences], device=device),
        filtered=any(k < vocab_size or p.top_p < 1.0 or p.min_p > 0.0 for k, p in zip(top_k, params, strict=True)),
    )
