"""Turns a StepPlan into the tensors of one step, which reach the device in one copy."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import groupby
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from neper.engine.plan.scheduler import SampledRow, ScheduledChunk, StepPlan
from neper.engine.plan.sequence import Sequence
from neper.engine.step.inputs import Array, InputBuffers, Layout, StepFields, to_device
from neper.engine.step.masks import MaskBuilder
from neper.engine.step.prompt_scores import PromptScoreInputs, prompt_score_inputs, scored_chunks
from neper.engine.step.row_parameters import ROW_PARAMETERS
from neper.engine.step.sampling_metadata import RowKind, SamplingMetadata, Scoring
from neper.engine.step.view_rows import is_processed, is_view, view_rows
from neper.ops import Bias
from neper.ops.attention.api import MAX_WINDOW, QUERY_TILE, AttentionGroup, AttentionInputs, AttentionScratch
from neper.types import packed_width

_UNSCORED = RowKind(Scoring.UNSCORED, False, 0)
_PARAMETERS = ROW_PARAMETERS.columns()


@dataclass(frozen=True)
class BatchInputs:
    """All that the runner needs for one step of T (padded) tokens, on the device.

    Attributes:
        chunks: of the plan, in the order of their tokens.
        token_ids: [T] int32; -1 - slot stands for the token last sampled in that slot.
        is_decode: one token for each sequence, or its drafts too, padded to the rows of `sample`: it can be a graph.
        window: tokens of a sequence in it, at most; 1 where there are no drafts.
        sample: None when no row gets a next token.
    """

    plan: StepPlan
    chunks: tuple[ScheduledChunk, ...]
    token_ids: Tensor
    attention: AttentionInputs
    is_decode: bool
    window: int
    sample: SamplingMetadata | None
    prompt_scores: tuple[PromptScoreInputs, ...]


def row_buckets(max_rows: int) -> list[int]:
    """The numbers of rows that steps are padded to: doubling to 8, then in steps that stay below an eighth or so."""
    buckets = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 32, 32)]
    return [size for size in buckets if size < max_rows] + [max_rows]


class BatchBuilder:
    """Lays out steps in the input buffers.

    Args:
        scores_on_device: rows that want scores are packed with them; else only those of their own kind are.
        longest_list: longest list of the rows that are scored together.
        max_listed: most places of lists that are filled at once.
        buckets: row counts that are padded to, ascending; empty = nothing is padded.
        scratch: of the attention kernels.
        window: most tokens of a sequence with drafts.
    """

    def __init__(
        self,
        buffers: InputBuffers,
        *,
        block_size: int,
        vocab_size: int,
        scores_on_device: bool,
        longest_list: int,
        max_listed: int,
        buckets: Items[int] = (),
        scratch: AttentionScratch | None = None,
        window: int = 1,
    ) -> None:
        self._buffers = buffers
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._scores_on_device = scores_on_device
        self._longest_list = longest_list
        self._max_listed = max_listed
        self._buckets = buckets
        self._scratch = scratch
        self._window = window
        self._masks = MaskBuilder(vocab_size)
        # By slot: whose row was last there, if it must not end yet, and what that row asks for.
        self._kinds: dict[int, tuple[ref[Sequence], bool, RowKind]] = {}

    def padded(self, rows: int) -> int:
        """The smallest bucket for so many rows."""
        return next((size for size in self._buckets if size >= rows), rows)

    def build(self, plan: StepPlan) -> BatchInputs:
        """A plan's tokens, flat: sequences of a single token in the order of their rows, then longer ones by length."""
        kinds = {chunk: self._kind(SampledRow(chunk)) for chunk in plan.chunks if chunk.samples}
        singles = sorted(
            (chunk for chunk in plan.chunks if chunk.length == 1),
            key=lambda chunk: (chunk not in kinds, kinds.get(chunk, _UNSCORED)),  # those without a row last
        )
        longer = (chunk for chunk in plan.chunks if chunk.length > 1)
        chunks = (*singles, *sorted(longer, key=lambda chunk: min(chunk.length, MAX_WINDOW + 1)))
        sampled = sorted(_sampled_rows(chunks), key=lambda item: kinds[item[0].chunk])
        is_decode = all(chunk.length == 1 + len(chunk.drafts) <= MAX_WINDOW for chunk in chunks)
        window = self._window if plan.drafted and is_decode else 1
        num_tokens = num_own = sum(chunk.length for chunk in chunks)
        num_rows = self.padded(len(sampled))
        if is_decode:
            num_tokens = num_rows = self.padded(num_own)
        tiles = _tiles(chunks)
        scored = scored_chunks(chunks, self._vocab_size)
        targets = [token_id for chunk in scored for token_id in chunk.token_ids]
        num_padded = len(chunks) + num_tokens - num_own  # each padding row is a sequence
        num_seqs = num_tokens if is_decode else len(chunks)
        num_few = num_padded if is_decode else sum(chunk.length <= MAX_WINDOW for chunk in chunks)
        layout = Layout(
            rows=num_rows,
            tokens=num_tokens,
            seqs=num_seqs,
            items=self._most_items(num_tokens if is_decode else num_few),
            targets=len(targets),
            tiles=len(tiles),
            width=max(len(chunk.seq.block_table) for chunk in chunks),
        )
        places = layout.places()
        arrays = self._buffers.next_arrays(places)
        self._fill_tokens(arrays, chunks)
        self._fill_items(arrays, chunks, num_few)
        arrays.tiles[:] = tiles
        arrays.targets[:] = targets
        self._fill_rows(arrays, [(row, place, kinds[row.chunk]) for row, place in sampled])
        fields = self._buffers.send(places)
        # Of single tokens those with a row come first: row i of the hidden states is row i of the sampled ones.
        assert not is_decode or window > 1 or [place for _, place in sampled] == list(range(len(sampled)))
        return BatchInputs(
            plan=plan,
            chunks=chunks,
            token_ids=fields.token_ids,
            attention=self._attention(fields, _groups(chunks, num_padded), window),
            is_decode=is_decode,
            window=window,
            sample=self._sampling_metadata([row for row, _ in sampled], kinds, fields) if sampled else None,
            prompt_scores=tuple(prompt_score_inputs(scored, fields.targets, self._max_listed)),
        )

    def decode_inputs(self, rows: int, window: int = 1) -> tuple[Tensor, AttentionInputs, StepFields[Tensor]]:
        """The token ids, attention inputs and row fields of a decode step of `rows` rows that are all padding.

        Those of every later decode step of as many padded rows lie at the same places. `window` is the most tokens of a
        sequence in it.
        """
        places = Layout(rows=rows, tokens=rows, seqs=rows, items=self._most_items(rows)).places()
        arrays = self._buffers.next_arrays(places)
        self._fill_tokens(arrays, ())
        self._fill_items(arrays, (), rows)
        self._fill_rows(arrays, [])
        fields = self._buffers.send(places)
        group = AttentionGroup(start=0, first_seq=0, num_seqs=rows, query_len=1, context_len=0)
        return fields.token_ids, self._attention(fields, (group,), window), fields

    def _attention(
        self, fields: StepFields[Tensor], groups: tuple[AttentionGroup, ...], window: int = 1
    ) -> AttentionInputs:
        return AttentionInputs(
            positions=fields.positions,
            slot_mapping=fields.slot_mapping,
            context_lens=fields.context_lens,
            block_tables=fields.block_tables,
            table_stride=fields.table_stride,
            block_size=self._block_size,
            groups=groups,
            tiles=fields.tiles if len(fields.tiles) else None,
            scratch=self._scratch,
            items=fields.items,
            num_items=fields.num_items,
            max_queries=max(window, *(group.query_len for group in groups if group.query_len <= MAX_WINDOW), 1),
        )

    def _most_items(self, seqs: int) -> int:
        return 0 if self._scratch is None else self._scratch.planner.most_items(seqs)

    def _fill_items(self, arrays: StepFields[Array], chunks: Items[ScheduledChunk], num_few: int) -> None:
        """The attention items of the first `num_few` sequences, those behind the chunks being padding rows."""
        if self._scratch is None:
            return
        lengths = np.ones(num_few, dtype=np.int32)
        few = chunks[:num_few]
        lengths[: len(few)] = [chunk.length for chunk in few]
        firsts = np.cumsum(lengths) - lengths
        arrays.num_items[0] = self._scratch.planner.fill(arrays.items, firsts, lengths, arrays.context_lens[:num_few])

    def _fill_tokens(self, arrays: StepFields[Array], chunks: Items[ScheduledChunk]) -> None:
        ids, positions, slot_mapping = arrays.token_ids, arrays.positions, arrays.slot_mapping
        tables, size = arrays.block_tables, self._block_size
        arrays.table_stride[0] = tables.shape[1]
        arrays.context_lens[: len(chunks)] = [chunk.end for chunk in chunks]
        arrays.context_lens[len(chunks) :] = 0
        for table, chunk in zip(tables, chunks, strict=False):
            table[: len(chunk.seq.block_table)] = chunk.seq.block_table
        singles = [chunk for chunk in chunks if chunk.length == 1]
        row = len(singles)
        ids[:row] = [-1 - chunk.slot if chunk.pending else chunk.seq.token_ids[chunk.start] for chunk in singles]
        positions[:row] = [chunk.start for chunk in singles]
        slot_mapping[:row] = [
            chunk.seq.block_table[chunk.start // size] * size + chunk.start % size for chunk in singles
        ]
        for chunk in chunks[len(singles) :]:
            rows, at = slice(row, row + chunk.length), np.arange(chunk.start, chunk.end)
            ids[rows] = (*chunk.seq.token_ids[chunk.start : chunk.end_of_own], *chunk.drafts)
            positions[rows] = at
            slot_mapping[rows] = np.asarray(chunk.seq.block_table)[at // size] * size + at % size
            row = rows.stop
        ids[row:] = positions[row:] = 0
        slot_mapping[row:] = -1

    def _kind(self, row: SampledRow) -> RowKind:
        """The kind of a chunk's rows, by the first of them: later ones are edited only where it is."""
        seq, slot = row.seq, row.chunk.slot
        early = row.num_output_tokens < seq.request.sampling.min_tokens
        found = self._kinds.get(slot)
        if found is None or found[0]() is not seq or found[1] != early:
            found = self._kinds[slot] = ref(seq), early, self._find_kind(row)
        return found[2]

    def _find_kind(self, row: SampledRow) -> RowKind:
        request = row.seq.request
        listed = request.num_listed(self._vocab_size)
        if listed is None:
            return _UNSCORED
        if is_view(row, self._vocab_size, self._longest_list):
            kind = Scoring.PROCESSED_VIEW if is_processed(row, self._vocab_size) else Scoring.VIEW
            return RowKind(kind, False, listed)
        if not self._scores_on_device:
            return _UNSCORED
        return RowKind(Scoring.PLAIN, request.sampling.greedy and not row.edited, listed)

    def _fill_rows(self, arrays: StepFields[Array], sampled: list[tuple[SampledRow, int, RowKind]]) -> None:
        """Per-row fields. A row that pads has offset -1, so nothing of it is kept, and is greedy."""
        count = len(sampled)
        arrays.hidden_rows[count:] = arrays.slots[count:] = 0
        arrays.offsets[count:] = arrays.listed[count:] = -1
        widths = [packed_width(None if kind.scoring is Scoring.UNSCORED else kind.listed) for _, _, kind in sampled]
        arrays.hidden_rows[:count] = [place for _, place, _ in sampled]
        arrays.slots[:count] = [row.chunk.slot for row, _, _ in sampled]
        arrays.offsets[:count] = np.cumsum([0, *widths])[:count]
        # Rows with a way of their own are packed anew when they are scored.
        arrays.listed[:count] = [kind.listed if kind.scoring is Scoring.PLAIN else -1 for _, _, kind in sampled]
        drawn = {
            number: (row, sampling)
            for number, (row, _, _) in enumerate(sampled)
            if not (sampling := row.seq.request.sampling).greedy
        }
        rows = np.fromiter(drawn, dtype=np.intp)
        for name, parameter in _PARAMETERS.items():
            column, value = getattr(arrays, name), parameter.value
            column[:] = parameter.off
            if drawn:
                column[rows] = [value(row, sampling) for row, sampling in drawn.values()]

    def _sampling_metadata(
        self,
        rows: list[SampledRow],
        kinds: dict[ScheduledChunk, RowKind],
        fields: StepFields[Tensor],
    ) -> SamplingMetadata:
        params = [row.seq.request.sampling for row in rows]
        scoring = [kinds[row.chunk].scoring for row in rows]
        views = slice(scoring.count(Scoring.UNSCORED), len(scoring) - scoring.count(Scoring.PLAIN))
        scored = groupby(kinds[row.chunk].listed for row in rows if kinds[row.chunk].scoring is Scoring.PLAIN)
        device = fields.slots.device
        return SamplingMetadata(
            rows=tuple(rows),
            fields=fields,
            num_chosen=sum(not kinds[row.chunk].takes_best for row in rows),
            drawn=tuple(row for row, p in enumerate(params) if not p.greedy),
            filtered=any(not p.greedy and p.filters(self._vocab_size) for p in params),
            bias=_bias(rows, self._vocab_size, device),
            penalized=tuple(row for row, p in enumerate(params) if p.penalized),
            masked=tuple(row for row, p in enumerate(params) if p.masked),
            mask_builder=self._masks,
            views=tuple(view_rows(rows[views], views.start, self._vocab_size, self._max_listed, device)),
            scored=tuple((top_k, len(list(run))) for top_k, run in scored),
        )


def _sampled_rows(chunks: Items[ScheduledChunk]) -> Iterator[tuple[SampledRow, int]]:
    """The rows that get a next token, with the place of each in the step's flat tokens."""
    begin = 0
    for chunk in chunks:
        for row in chunk.rows():
            yield row, begin + chunk.end_of_own - 1 - chunk.start + row.place
        begin += chunk.length


def _groups(chunks: Items[ScheduledChunk], num_seqs: int) -> tuple[AttentionGroup, ...]:
    """One group for each run of chunks of the same length up to `MAX_WINDOW`, and one for each longer chunk.

    Of `num_seqs` sequences those behind the chunks are padding rows, which join the last run of single tokens.
    """
    groups, start, first = [], 0, 0
    runs = groupby(enumerate(chunks), key=lambda item: (item[1].length, item[0] * (item[1].length > MAX_WINDOW)))
    for (length, _), run in runs:
        ends = [chunk.end for _, chunk in run]
        count = num_seqs - first if length == 1 and first + len(ends) == len(chunks) else len(ends)
        groups.append(
            AttentionGroup(start=start, first_seq=first, num_seqs=count, query_len=length, context_len=max(ends))
        )
        first, start = first + count, start + count * length
    if first < num_seqs:
        groups.append(
            AttentionGroup(start=start, first_seq=first, num_seqs=num_seqs - first, query_len=1, context_len=1)
        )
    return tuple(groups)


def _tiles(chunks: Items[ScheduledChunk]) -> Array:
    """[N, 3] int32: what the prefill kernel works on; see AttentionInputs.tiles."""
    tiles, row = [], 0
    for index, chunk in enumerate(chunks):
        if chunk.length > MAX_WINDOW:
            tiles += [
                (index, row + begin, min(QUERY_TILE, chunk.length - begin))
                for begin in range(0, chunk.length, QUERY_TILE)
            ]
        row += chunk.length
    return np.array(tiles, dtype=np.int32).reshape(-1, 3)


def _bias(sampled: Items[SampledRow], vocab_size: int, device: torch.device) -> Bias | None:
    edits = {place: row.seq.logit_edits(row.num_output_tokens) for place, row in enumerate(sampled)}
    edits = {place: edit for place, edit in edits.items() if len(edit.ids)}
    if not edits:
        return None
    rows = np.repeat(list(edits), [len(edit.ids) for edit in edits.values()])
    ids = np.concatenate([edit.ids for edit in edits.values()])
    values = np.concatenate([edit.values for edit in edits.values()])
    # An end token can lie beyond the model's vocabulary (a tokenizer's own): what cannot come needs no ban.
    known = (ids >= 0) & (ids < vocab_size)
    if not known.any():
        return None
    return Bias(*(to_device(array[known], device) for array in (rows, ids, values)))
