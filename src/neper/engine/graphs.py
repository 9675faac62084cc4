"""CUDA graphs of decode steps: for each number of padded rows one forward and, by what is asked for, score+sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from neper.engine.batch import BatchBuilder
from neper.engine.kernel_sampler import KernelSampler
from neper.models.decoder import Decoder
from neper.models.kv_cache import KVCache
from neper.ops.attention import AttentionInputs
from neper.types import Progress


class DecodeGraphs:
    """Captured decode steps over fixed memory: the builder's inputs, the KV cache, the sampler's buffers."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        builder: BatchBuilder,
        sampler: KernelSampler,
        *,
        buckets: Sequence[int],
        progress: Progress | None = None,
    ) -> None:
        self._forward: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._sampler = sampler
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(decoder.device)  # type: ignore[no-untyped-call]
        # The largest first: what the others need fits into the memory that it leaves in their common pool.
        for done, rows in enumerate(sorted(buckets, reverse=True), start=1):
            token_ids, attention, fields = builder.decode_inputs(rows)
            self._forward[rows] = self._capture(partial(_forward, decoder, kv_cache, sampler, token_ids, attention))
            for variant in sampler.variants(rows):
                sampler.graphs[variant], _ = self._capture(partial(sampler.launch, variant, fields))
            if progress is not None:
                progress(done, len(buckets), "capturing decode steps")

    def _capture(self, work: Callable[[], Tensor | None]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture what `work` launches; what it returns is kept in the graphs' memory."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # what a first launch sets up must not happen in a capture
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = work()
        return graph, result if result is not None else torch.empty(0)

    def forward(self, rows: int) -> Tensor:
        """Replay the forward of `rows` padded rows; returns their hidden states."""
        graph, hidden = self._forward[rows]
        graph.replay()
        return hidden

    def replay_of(self, rows: int, top_k: int | None) -> Callable[[], None]:
        """Replays a greedy decode step of `rows` padded rows with lists of `top_k`."""
        forward, _ = self._forward[rows]
        wanted = [v for v in self._sampler.variants(rows) if not v.drawn and (v.top_k is None) == (top_k is None)]
        variant = next(v for v in wanted if top_k is None or (v.top_k or 0) >= max(1, top_k))
        sample = self._sampler.graphs[variant]

        def replay() -> None:
            forward.replay()
            sample.replay()

        return replay


def _forward(
    decoder: Decoder, kv_cache: KVCache, sampler: KernelSampler, token_ids: Tensor, attention: AttentionInputs
) -> Tensor:
    hidden = decoder.forward(token_ids, kv_cache, attention, sampler.buffers.last_tokens)
    sampler.logits(hidden)
    return hidden
