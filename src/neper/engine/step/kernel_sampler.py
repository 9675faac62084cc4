"""The second half of a step as kernels on buffers that exist from the start, so that a CUDA graph can replay it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from neper.engine import memory
from neper.engine.settings import EngineSettings
from neper.engine.step.batch import BatchInputs
from neper.engine.step.inputs import RowFields
from neper.engine.step.packed import Packed, prompt_segments, token_segments
from neper.engine.step.penalties import PenaltyTables
from neper.engine.step.prompt_scores import PromptScoreInputs
from neper.engine.step.readback import Readback
from neper.engine.step.sampling_metadata import SamplingMetadata
from neper.engine.step.view_rows import ViewRows, parts
from neper.models.decoder import Decoder
from neper.ops import LogprobBuffers, TokenLogprobs, backends, greedy_tokens, linear_logprobs, token_logprobs
from neper.ops.backends import StepKernels
from neper.ops.logprobs.api import LIST_SIZES, list_sizes
from neper.ops.packing.api import PackRows
from neper.ops.packing.reference import pack_scores
from neper.ops.sampling.reference import edit_logits
from neper.types import packed_width

_PROMPT_LOGITS_BYTES = 256 * 2**20


class Choice(NamedTuple):
    """A launch that makes the logits of a step's rows and chooses their tokens.

    Attributes:
        rows: padded rows.
        drawn: some rows are drawn; else all take their best token.
        scored: some rows want scores, so their tokens are kept for a `Score`; else they are packed at once.
        gathered: the rows stand in another order than their hidden states, as those of drafts do.
    """

    rows: int
    drawn: bool
    scored: bool
    gathered: bool = False


class Score(NamedTuple):
    """A launch that scores and packs the rows of a Choice.

    Attributes:
        rows: padded rows.
        top_k: length of the lists.
    """

    rows: int
    top_k: int


@dataclass(frozen=True)
class SamplerBuffers:
    """Device memory of score+sample, all that it ever needs.

    Attributes:
        logits: [rows, V] in the model's dtype: those of a step's rows, and of prompt positions a tile at a time.
        words: flat int32, packed results.
        last_tokens: [slots] int32.
        token_ids, valid: [rows] int32 and bool, what was chosen.
        kept: the fields of rows that are scored, [rows] int32 each: their own are the next step's by then.
        scratch: int32, of the kernels that choose.
        scores: of the reduction of all rows together; None where those scores are not computed on the device.
        long_lists: of rows with a way of their own and of prompts, where their lists do not fit there. The places of
            its lists are shared out anew by each call.
    """

    logits: Tensor
    words: Tensor
    last_tokens: Tensor
    token_ids: Tensor
    valid: Tensor
    kept: PackRows
    scratch: Tensor
    scores: LogprobBuffers | None
    long_lists: LogprobBuffers

    def lists(self, rows: int, places: int) -> LogprobBuffers:
        """Memory for `rows` rows with lists of `places`, up to `max_listed` in all."""
        if self.scores is not None and places <= self.scores.scores.top_ids.shape[1]:
            return self.scores
        scores = self.long_lists.scores
        ids, logprobs = (
            flat.view(-1)[: rows * places].view(rows, places) for flat in (scores.top_ids, scores.top_logprobs)
        )
        return replace(self.long_lists, scores=scores._replace(top_ids=ids, top_logprobs=logprobs))

    @property
    def logprob_bytes(self) -> int:
        """Bytes of what exists for logprobs alone: scores, their packed words, logits beyond those of a step's rows."""
        rows = len(self.logits) - len(self.token_ids)
        scores = self.long_lists.nbytes + (0 if self.scores is None else self.scores.nbytes)
        return scores + self.words.nbytes + rows * self.logits[0].nbytes

    @staticmethod
    def allocate(
        settings: EngineSettings, vocab_size: int, last_tokens: Tensor, max_words: int, kernels: StepKernels
    ) -> SamplerBuffers:
        """Buffers for steps of up to `max_num_seqs` padded rows; StartupError where memory is lacking."""
        device, dtype, max_rows = settings.device, settings.dtype, settings.max_rows
        on_device = settings.scoring == "device"
        tile = max(1, min(settings.max_num_batched_tokens, _PROMPT_LOGITS_BYTES // (vocab_size * dtype.itemsize)))
        rows, scratch_rows = max(settings.max_num_batched_tokens, max_rows), max(max_rows, tile)
        together = None
        if on_device:
            width = max(1, *_buckets(settings.longest_list))
            together = _score_buffers(settings, vocab_size, rows, width, scratch_rows=scratch_rows)
        width = -(-settings.max_listed(vocab_size) // rows)
        long_lists = _score_buffers(settings, vocab_size, rows, width, scratch_rows=scratch_rows)
        words = kernels.sampling.scratch_words(max_rows, vocab_size)
        kept = memory.allocate("tokens", "max_num_seqs", 3, max_rows, dtype=torch.int32, device=device)
        return SamplerBuffers(
            logits=memory.allocate(
                "logits", "max_num_seqs", max(max_rows, tile), vocab_size, dtype=dtype, device=device
            ),
            words=memory.allocate("results", "max_logprobs", max_words, dtype=torch.int32, device=device),
            last_tokens=last_tokens,
            token_ids=memory.allocate("tokens", "max_num_seqs", max_rows, dtype=torch.int32, device=device),
            valid=memory.allocate("tokens", "max_num_seqs", max_rows, dtype=torch.bool, device=device),
            kept=PackRows(*kept.unbind()),
            scratch=memory.allocate("sampling", "max_num_seqs", words, dtype=torch.int32, device=device),
            scores=together,
            long_lists=long_lists,
        )


def _score_buffers(
    settings: EngineSettings, vocab_size: int, rows: int, width: int, *, scratch_rows: int
) -> LogprobBuffers:
    device = settings.device
    words = backends.scoring(device).scratch_words(scratch_rows, vocab_size)
    return LogprobBuffers(
        scores=memory.reserve(
            "logprobs",
            "max_logprobs or max_num_batched_tokens",
            rows * (9 + 8 * width),
            lambda: TokenLogprobs.empty(rows, width, device),
            device,
        ),
        scratch=memory.allocate("logprobs", "max_num_seqs", words, dtype=torch.int32, device=device),
        vocab_size=vocab_size,
    )


def _buckets(max_top_k: int) -> list[int]:
    """The list lengths that requests of up to `max_top_k` alternatives need."""
    return [*list_sizes(max_top_k), *([max_top_k] if max_top_k > LIST_SIZES[-1] else [])]


class KernelSampler:
    """Chooses, scores and packs with Triton kernels.

    A step whose logits nobody edits is a fixed sequence of launches: `choose`, and where somebody asked, `score`.
    Graphs replay both. Penalties and bias make an edited copy of the logits first, in plain torch, which the same
    kernels choose from. The next step needs the tokens, not the scores: those are made beside it, where copies are.
    """

    def __init__(
        self,
        decoder: Decoder,
        penalties: PenaltyTables,
        buffers: SamplerBuffers,
        readback: Readback,
        kernels: StepKernels,
        *,
        longest_list: int,
    ) -> None:
        self.buffers = buffers
        self.logits = buffers.logits
        self.choices: dict[Choice, torch.cuda.CUDAGraph] = {}
        self.scores: dict[Score, torch.cuda.CUDAGraph] = {}
        self._decoder = decoder
        self._penalties = penalties
        self._readback = readback
        self._sampling = kernels.sampling
        self._packing = kernels.packing
        self._buckets = _buckets(longest_list)

    def launches(self, rows: int, *, gathered: bool = False) -> tuple[list[Choice], list[Score]]:
        """All that steps of `rows` padded rows need; see `Choice` for `gathered`."""
        scores = []
        if self.buffers.scores is not None:
            scores = [Score(rows, size) for size in self._buckets if size <= LIST_SIZES[-1]]
        wants = (False, True) if scores else (False,)
        return [Choice(rows, drawn, scored, gathered) for drawn in (False, True) for scored in wants], scores

    def run(self, hidden: Tensor, inputs: BatchInputs) -> Packed:
        """Next tokens and scores of a step whose hidden states are [T, D]."""
        packed = Packed(words=self.buffers.words)
        if inputs.sample is not None:
            self._sample(hidden, inputs, inputs.sample, packed)
        for prompts in inputs.prompt_scores:
            self._score_prompts(hidden, prompts, packed)
        return packed

    def _sample(self, hidden: Tensor, inputs: BatchInputs, sample: SamplingMetadata, packed: Packed) -> None:
        gathered = not inputs.is_decode or inputs.window > 1
        choice = Choice(sample.num_padded, bool(sample.drawn), bool(sample.scored or sample.views), gathered)
        edited = None
        packed.segments += token_segments(sample)
        if inputs.is_decode and not sample.edited and choice in self.choices:
            self.choices[choice].replay()
        else:
            edited = self._choose(hidden, choice, sample)
        if sample.scored:
            largest = max(1, *(top_k for top_k, _ in sample.scored))
            score = Score(choice.rows, next(size for size in self._buckets if size >= largest))
            # The logits of a prompt that is scored take these logits' place, so they must wait.
            inline = bool(inputs.prompt_scores or sample.views)
            with nullcontext() if inline else self._readback.beside():
                if score in self.scores:
                    self.scores[score].replay()
                else:
                    self.score(score)
        elif sample.views:
            rows, token_ids, valid = self._kept(choice.rows)
            self._packing.pack_chosen(rows, self.buffers.words, self.buffers.last_tokens, token_ids, valid, None)
        begin = 2 * sample.num_unscored
        for view in sample.views:
            begin = self._score_view(view, sample, edited, begin)

    def _score_view(self, view: ViewRows, sample: SamplingMetadata, edited: Tensor | None, begin: int) -> int:
        """Score rows with a way of their own and pack them from word `begin` on; returns the word after them."""
        _, token_ids, valid = self._kept(sample.num_padded)
        token_ids, valid = token_ids[view.rows], valid[view.rows]
        source = sample.view_logits(view, self.buffers.logits[: sample.num_padded], edited)
        out = self.buffers.lists(len(token_ids), max(places for places, _ in view.listed))
        return self._pack(begin, token_ids, view.score(source, token_ids, valid, out), view.listed)

    def choose(self, hidden: Tensor, choice: Choice, fields: RowFields[Tensor]) -> None:
        """Make the logits of a step's rows from its hidden states, choose their tokens, and pack or keep them."""
        logits = self._row_logits(hidden, choice, fields)
        if choice.drawn:
            self._draw(logits, fields)
        else:
            self._sampling.best(logits, self.buffers.scratch)
        if choice.drawn or choice.scored:
            self._keep(choice, fields, chosen=choice.drawn)
        else:
            self._packing.pack_best(
                _pack_rows(fields), self.buffers.words, self.buffers.last_tokens, self.buffers.scratch, logits.shape[1]
            )

    def score(self, score: Score) -> None:
        """Score and pack the rows that were kept, whose logits are in the buffer."""
        rows, token_ids, valid = self._kept(score.rows)
        scores = token_logprobs(
            self.buffers.logits[: score.rows],
            token_ids,
            score.top_k,
            row_top_k=rows.listed,  # -1, a row without scores, lists nothing
            out=self.buffers.scores,
        )
        self._packing.pack_chosen(rows, self.buffers.words, self.buffers.last_tokens, token_ids, valid, scores)

    def _choose(self, hidden: Tensor, choice: Choice, sample: SamplingMetadata) -> Tensor | None:
        """`choose`, from edited logits where a row has penalties, a bias or a mask; returns those."""
        if not sample.edited:
            self.choose(hidden, choice, sample.fields)
            return None
        logits, penalties = self._row_logits(hidden, choice, sample.fields), None
        rows = [sample.rows[row] for row in sample.penalized]
        if sample.penalized:
            penalties = self._penalties.gather(sample.penalized, rows)
        edited = edit_logits(logits, penalties, sample.bias, sample.masks())
        self._draw(edited, sample.fields)
        _, token_ids, valid = self._kept(choice.rows)
        valid &= greedy_tokens(logits)[1]  # decided on the model's own logits too
        if penalties is not None:
            self._penalties.count(penalties, rows, token_ids)
        self._keep(choice, sample.fields, chosen=True)
        return edited

    def _draw(self, logits: Tensor, fields: RowFields[Tensor]) -> None:
        """Choose the tokens of all rows; greedy ones take their best."""
        _, token_ids, valid = self._kept(len(logits))
        self._sampling.choose(logits, fields, self.buffers.scratch, token_ids, valid)

    def _keep(self, choice: Choice, fields: RowFields[Tensor], *, chosen: bool) -> None:
        """Leave chosen tokens for `score`, or pack them if nobody wants scores; `chosen`: `_draw` has made them."""
        rows, (kept, token_ids, valid) = _pack_rows(fields), self._kept(choice.rows)
        if choice.scored:
            vocab_size = self._decoder.config.vocab_size
            self._packing.keep(
                rows, kept, self.buffers.last_tokens, token_ids, valid, self.buffers.scratch, vocab_size, chosen=chosen
            )
        else:
            self._packing.pack_chosen(rows, self.buffers.words, self.buffers.last_tokens, token_ids, valid, None)

    def _kept(self, rows: int) -> tuple[PackRows, Tensor, Tensor]:
        """Fields, tokens and validity of that many rows, in the buffers."""
        kept = self.buffers.kept
        fields = PackRows(offsets=kept.offsets[:rows], listed=kept.listed[:rows], slots=kept.slots[:rows])
        return fields, self.buffers.token_ids[:rows], self.buffers.valid[:rows]

    def _row_logits(self, hidden: Tensor, choice: Choice, fields: RowFields[Tensor]) -> Tensor:
        """The logits of a step's rows, in the buffer."""
        return self._logits(hidden.index_select(0, fields.hidden_rows) if choice.gathered else hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states [n, D], in the buffer."""
        return self._decoder.logits(hidden, out=self.buffers.logits[: len(hidden)])

    def _score_prompts(self, hidden: Tensor, prompts: PromptScoreInputs, packed: Packed) -> None:
        token_ids = prompts.token_ids
        scores = linear_logprobs(
            prompts.hidden(hidden),
            self._logits,
            token_ids,
            prompts.top_k,
            vocab_size=self._decoder.config.vocab_size,
            row_top_k=prompts.row_top_k(hidden.device),
            logprob_token_ids=prompts.named(hidden.device),
            max_logits_bytes=self.buffers.logits.nbytes,
            out=self.buffers.lists(len(token_ids), prompts.chunks[-1].places),
        )
        begin = packed.num_words
        packed.segments += prompt_segments(prompts)
        self._pack(begin, token_ids, scores, prompts.listed)

    def _pack(self, begin: int, token_ids: Tensor, scores: TokenLogprobs, listed: Items[tuple[int, int]]) -> int:
        """Pack runs of scored rows from word `begin` on; returns the word after them."""
        for part, top_k in parts(listed):
            end = begin + (part.stop - part.start) * packed_width(top_k)
            pack_scores(token_ids[part], scores.take(part), top_k, self.buffers.words[begin:end])
            begin = end
        return begin


def _pack_rows(fields: RowFields[Tensor]) -> PackRows:
    return PackRows(offsets=fields.offsets, listed=fields.listed, slots=fields.slots)
