"""The second half of a step as kernels on buffers that exist from the start, so that a CUDA graph can replay it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from neper.engine import memory
from neper.engine.batch import BatchInputs, PromptScoreInputs, SampleInputs
from neper.engine.packed import Packed, Segment, host_rows, token_segments
from neper.engine.penalties import PenaltyTables
from neper.engine.readback import Readback
from neper.engine.settings import EngineSettings
from neper.models.decoder import Decoder
from neper.ops import LogprobBuffers, TokenLogprobs, backends, greedy_tokens, linear_logprobs, token_logprobs
from neper.ops.packing import pack_scores
from neper.ops.packing_triton import PackRows, pack_best, pack_chosen
from neper.ops.sampling import edit_logits
from neper.ops.sampling_triton import DrawRows, best, choose, scratch_words
from neper.types import PackedRows

_PROMPT_LOGITS_BYTES = 256 * 2**20
TOP_K_BUCKETS = (8, 32, 64)
"""List lengths that graphs are captured for; a row lists what it asked for."""


class Variant(NamedTuple):
    """What a launch of score+sample is compiled and captured for.

    Attributes:
        rows: padded rows.
        top_k: length of the lists; None = nobody asked for scores, and nothing is scored.
        drawn: some rows are drawn; else all take their best token.
    """

    rows: int
    top_k: int | None
    drawn: bool


@dataclass(frozen=True)
class SamplerBuffers:
    """Device memory of score+sample, all that it ever needs.

    Attributes:
        logits: [rows, V] in the model's dtype: those of a step's rows, and of prompt positions a tile at a time.
        words: flat int32, packed results.
        last_tokens: [slots] int32.
        token_ids, valid: [rows] int32 and bool, what was chosen.
        scratch: int32, of the kernels that choose.
        scores: of the reduction; None where scores are not computed on the device.
    """

    logits: Tensor
    words: Tensor
    last_tokens: Tensor
    token_ids: Tensor
    valid: Tensor
    scratch: Tensor
    scores: LogprobBuffers | None

    @property
    def logprob_bytes(self) -> int:
        """Bytes of what exists for logprobs alone: scores, their packed words, logits beyond those of a step's rows."""
        if self.scores is None:
            return 0
        rows = len(self.logits) - len(self.token_ids)
        return self.scores.nbytes + self.words.nbytes + rows * self.logits[0].nbytes

    @staticmethod
    def allocate(settings: EngineSettings, vocab_size: int, last_tokens: Tensor, max_words: int) -> SamplerBuffers:
        """Buffers for steps of up to `max_num_seqs` padded rows; StartupError where memory is lacking."""
        device, dtype, max_rows = settings.device, settings.dtype, settings.max_num_seqs
        on_device = settings.scoring == "device"
        tile = max(1, min(settings.max_num_batched_tokens, _PROMPT_LOGITS_BYTES // (vocab_size * dtype.itemsize)))
        scores = None
        if on_device:
            scores = _score_buffers(settings, vocab_size, scratch_rows=max(max_rows, tile))
        return SamplerBuffers(
            logits=memory.allocate(
                "logits", "max_num_seqs", max(max_rows, tile), vocab_size, dtype=dtype, device=device
            ),
            words=memory.allocate("results", "max_logprobs", max_words, dtype=torch.int32, device=device),
            last_tokens=last_tokens,
            token_ids=memory.allocate("tokens", "max_num_seqs", max_rows, dtype=torch.int32, device=device),
            valid=memory.allocate("tokens", "max_num_seqs", max_rows, dtype=torch.bool, device=device),
            scratch=memory.allocate(
                "sampling", "max_num_seqs", scratch_words(max_rows, vocab_size), dtype=torch.int32, device=device
            ),
            scores=scores,
        )


def _score_buffers(settings: EngineSettings, vocab_size: int, scratch_rows: int) -> LogprobBuffers:
    rows, width = max(settings.max_num_batched_tokens, scratch_rows), max(1, *_buckets(settings.max_logprobs))
    device = settings.device
    words = backends.scratch_words(scratch_rows, vocab_size, device)
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
    lower = (0, *TOP_K_BUCKETS)
    buckets = [size for size, smaller in zip(TOP_K_BUCKETS, lower, strict=False) if smaller < max(1, max_top_k)]
    return [*buckets, max_top_k] if max_top_k > TOP_K_BUCKETS[-1] else buckets


class KernelSampler:
    """Chooses, scores and packs with Triton kernels.

    A step whose logits nobody edits is one fixed sequence of launches, by Variant: `launch` makes it, `graphs` replays
    it. Penalties and bias make an edited copy of the logits first, in plain torch, which the same kernels choose from.
    """

    def __init__(
        self,
        decoder: Decoder,
        penalties: PenaltyTables,
        buffers: SamplerBuffers,
        readback: Readback,
        *,
        max_logprobs: int,
    ) -> None:
        self.buffers = buffers
        self.graphs: dict[Variant, torch.cuda.CUDAGraph] = {}
        self._decoder = decoder
        self._penalties = penalties
        self._readback = readback
        self._buckets = _buckets(max_logprobs)

    def variants(self, rows: int) -> list[Variant]:
        """All that steps of `rows` padded rows need."""
        lists = [None, *(size for size in self._buckets if size <= TOP_K_BUCKETS[-1])]
        if self.buffers.scores is None:
            lists = [None]
        return [Variant(rows, top_k, drawn) for top_k in lists for drawn in (False, True)]

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of hidden [n, D], in the buffer."""
        return self._decoder.logits(hidden, out=self.buffers.logits[: len(hidden)])

    def run(self, hidden: Tensor, inputs: BatchInputs, *, logits_made: bool = False) -> Packed:
        """Next tokens and scores of a step whose hidden states are [T, D].

        `logits_made`: the logits of its rows are in the buffer already.
        """
        packed = Packed(words=self.buffers.words)
        if inputs.sample is not None:
            if not logits_made:
                self.logits(hidden.index_select(0, inputs.sample.fields["hidden_rows"]))
            self._sample(inputs.sample, packed)
            if packed.host_rows is not None and inputs.prompt_scores:
                packed.host_rows = packed.host_rows.copied()  # the prompt's logits take their place in the buffer
        for prompt in inputs.prompt_scores:
            self._score_prompt(hidden, prompt, packed)
        return packed

    def _sample(self, inputs: SampleInputs, packed: Packed) -> None:
        on_host = self.buffers.scores is None
        packed.segments += token_segments(inputs, scored=not on_host)
        if on_host:
            packed.host_rows = host_rows(inputs, self.buffers.logits)
        variant = self.variant(inputs)
        if inputs.penalized or inputs.bias is not None:
            self._launch_edited(variant, inputs)
        elif variant in self.graphs:
            self.graphs[variant].replay()
        else:
            self.launch(variant, inputs.fields)

    def variant(self, inputs: SampleInputs) -> Variant:
        """What a step's rows need."""
        top_k = None
        if inputs.scored and self.buffers.scores is not None:
            largest = max(1, *(top_k for top_k, _ in inputs.scored))
            top_k = next(size for size in self._buckets if size >= largest)
        return Variant(inputs.num_padded, top_k, bool(inputs.drawn))

    def launch(self, variant: Variant, fields: dict[str, Tensor]) -> None:
        """Choose, score and pack the rows whose logits are in the buffer."""
        logits = self.buffers.logits[: variant.rows]
        if variant.drawn:
            self._finish(variant, fields, *self._choose(logits, fields))
        elif variant.top_k is None:
            best(logits, self.buffers.scratch)
            pack_best(
                _pack_rows(fields), self.buffers.words, self.buffers.last_tokens, self.buffers.scratch, logits.shape[1]
            )
        else:
            self._finish(variant, fields, None, None)

    def _launch_edited(self, variant: Variant, inputs: SampleInputs) -> None:
        logits, penalties = self.buffers.logits[: variant.rows], None
        chunks = [inputs.chunks[row] for row in inputs.penalized]
        if inputs.penalized:
            penalties = self._penalties.gather(inputs.penalized, chunks)
        token_ids, valid = self._choose(edit_logits(logits, penalties, inputs.bias), inputs.fields)
        valid &= greedy_tokens(logits)[1]  # decided on the model's own logits too
        if penalties is not None:
            self._penalties.count(penalties, chunks, token_ids)
        self._finish(variant, inputs.fields, token_ids, valid)

    def _choose(self, logits: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        draws = DrawRows(
            temperature=fields["temperature"],
            top_p=fields["top_p"],
            min_p=fields["min_p"],
            top_k=fields["top_k"],
            keys=fields["keys"],
        )
        token_ids, valid = self.buffers.token_ids[: len(logits)], self.buffers.valid[: len(logits)]
        choose(logits, draws, self.buffers.scratch, token_ids, valid)
        return token_ids, valid

    def _finish(
        self, variant: Variant, fields: dict[str, Tensor], token_ids: Tensor | None, valid: Tensor | None
    ) -> None:
        """Score and pack; without `token_ids` every row takes the first of its list."""
        scores = None
        if variant.top_k is not None:
            scores = token_logprobs(
                self.buffers.logits[: variant.rows],
                token_ids,
                variant.top_k,
                row_top_k=fields["row_top_k"],
                out=self.buffers.scores,
            )
        pack_chosen(_pack_rows(fields), self.buffers.words, self.buffers.last_tokens, token_ids, valid, scores)

    def _score_prompt(self, hidden: Tensor, inputs: PromptScoreInputs, packed: Packed) -> None:
        rows, chunk, tile = hidden[inputs.hidden_rows], inputs.chunk, self.buffers.logits
        if self.buffers.scores is None:
            token_ids = chunk.seq.token_ids[chunk.score_start : chunk.score_end]
            data = []
            for begin in range(0, len(rows), len(tile)):
                logits = self.logits(rows[begin : begin + len(tile)])
                data.append(self._readback.score_on_host(logits, token_ids[begin:], inputs.top_k))
            packed.prompt[chunk] = PackedRows(inputs.top_k, b"".join(data))
            return
        scores = linear_logprobs(
            rows,
            self.logits,
            inputs.token_ids,
            inputs.top_k,
            vocab_size=self._decoder.config.vocab_size,
            max_logits_bytes=tile.nbytes,
            out=self.buffers.scores,
        )
        begin = packed.num_words
        packed.segments.append(Segment((chunk,), len(inputs.token_ids), inputs.top_k, True))
        pack_scores(inputs.token_ids, scores, inputs.top_k, self.buffers.words[begin : packed.num_words])


def _pack_rows(fields: dict[str, Tensor]) -> PackRows:
    return PackRows(offsets=fields["offsets"], listed=fields["listed"], slots=fields["slots"])
