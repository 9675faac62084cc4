"""Runs decoders over a real cache, with attention inputs built by hand: what the engine does, in its simplest form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neper.models.decoder import Decoder
from neper.models.kv_cache import KVCache
from neper.ops.attention.api import MAX_WINDOW
from tests.helpers.attention import attention_inputs

BLOCK = 4


@dataclass
class Run:
    """One sequence in a cache: its blocks (scattered on purpose) and how much of it is computed."""

    token_ids: list[int]
    blocks: list[int]
    done: int = 0
    hidden: list[Tensor] = field(default_factory=list)


class Stepper:
    """Sequences over one decoder and one cache; `step` computes the next tokens of some of them together."""

    def __init__(self, decoder: Decoder, sequences: Sequence[Sequence[int]], *, seed: int = 0) -> None:
        config = decoder.config
        counts = [-(-len(ids) // BLOCK) for ids in sequences]
        # Blocks in random order: contiguous ones would hide a wrong slot. Block 0 is the null block.
        order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
        decoder.prepare(max(len(ids) for ids in sequences))
        self.decoder = decoder
        self.runs = [Run(list(ids), [order.pop() for _ in range(n)]) for ids, n in zip(sequences, counts, strict=True)]
        self.cache = KVCache(
            num_layers=config.num_layers,
            num_blocks=sum(counts) + 1,
            block_size=BLOCK,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )

    def step(self, lengths: dict[int, int]) -> None:
        """Compute the next `lengths[sequence]` tokens of some sequences, those of few tokens first."""
        order = sorted(lengths, key=lambda number: min(lengths[number], MAX_WINDOW + 1))
        runs = [self.runs[number] for number in order]
        counts = [lengths[number] for number in order]
        spans = [range(run.done, run.done + count) for run, count in zip(runs, counts, strict=True)]
        attention = attention_inputs(
            [run.blocks[: -(-span.stop // BLOCK)] for run, span in zip(runs, spans, strict=True)],
            counts,
            [span.stop for span in spans],
            block_size=BLOCK,
        )
        hidden = self.decoder.forward(
            torch.tensor(
                [run.token_ids[p] for run, span in zip(runs, spans, strict=True) for p in span], dtype=torch.int32
            ),
            self.cache,
            attention,
        )
        for run, span, rows in zip(runs, spans, hidden.split(counts), strict=True):
            run.hidden.append(rows)
            run.done = span.stop

    def finish(self, chunk: int) -> list[Tensor]:
        """Compute all sequences to their ends, `chunk` tokens a step; the [n, hidden_size] states of each."""
        while any(run.done < len(run.token_ids) for run in self.runs):
            left = {number: len(run.token_ids) - run.done for number, run in enumerate(self.runs)}
            self.step({number: min(chunk, n) for number, n in left.items() if n > 0})
        return self.hidden()

    def hidden(self) -> list[Tensor]:
        return [torch.cat(run.hidden) for run in self.runs]


@torch.inference_mode()
def logprobs(decoder: Decoder, sequences: Sequence[Sequence[int]], chunk: int = 10**9) -> list[Tensor]:
    """[n, vocab_size] float64 log-probabilities of each sequence, computed together `chunk` tokens a step."""
    hidden = Stepper(decoder, sequences).finish(chunk)
    return [torch.log_softmax(decoder.logits(rows).double(), dim=-1) for rows in hidden]
