"""CUDA graphs of decode steps: by padded rows and window a forward, and by what is asked for a choice and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from neper.engine.step.batch import BatchBuilder
from neper.engine.step.kernel_sampler import Choice, KernelSampler
from neper.models.decoder import Decoder
from neper.models.kv_cache import KVCache
from neper.types import Progress


class DecodeGraphs:
    """Captured decode steps over fixed memory: the builder's inputs, the KV cache, the sampler's buffers.

    Args:
        buckets: padded rows, and the most tokens of a sequence among them, of each step.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        builder: BatchBuilder,
        sampler: KernelSampler,
        *,
        buckets: Sequence[tuple[int, int]],
        progress: Progress | None = None,
    ) -> None:
        self._forward: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._sampler = sampler
        self._pool = torch.cuda.graph_pool_handle()
        # The largest first: what the others need fits into the memory that it leaves in their common pool.
        for done, (rows, window) in enumerate(sorted(buckets, reverse=True), start=1):
            token_ids, attention, fields = builder.decode_inputs(rows, window)
            last_tokens = sampler.buffers.last_tokens
            forward = partial(decoder.forward, token_ids, kv_cache, attention, last_tokens)
            self._forward[rows, window] = self._capture(forward)
            hidden = self._forward[rows, window][1]
            choices, scores = sampler.launches(rows, gathered=window > 1)
            for choice in choices:
                sampler.choices[choice], _ = self._capture(partial(sampler.choose, hidden, choice, fields))
            for score in scores:
                if score not in sampler.scores:
                    sampler.scores[score], _ = self._capture(partial(sampler.score, score))
            if progress is not None:
                progress(done, len(buckets), "capturing decode steps")

    def _capture(self, work: Callable[[], Tensor | None]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture what `work` launches; what it returns is kept in the graphs' memory."""
        work()  # what a first launch sets up must not happen in a capture
        graph = torch.cuda.CUDAGraph()
        # On torch's own stream for captures: cuBLAS keeps a workspace for every stream that it was ever called on.
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        return graph, result if result is not None else torch.empty(0)

    def has(self, rows: int, window: int) -> bool:
        """True where there is a graph of so many padded rows, of sequences of up to `window` tokens."""
        return (rows, window) in self._forward

    def forward(self, rows: int, window: int) -> Tensor:
        """Replay the forward of `rows` padded rows; returns their hidden states."""
        graph, hidden = self._forward[rows, window]
        graph.replay()
        return hidden

    def replay_of(self, rows: int, top_k: int | None) -> Callable[[], None]:
        """Replays a greedy decode step of `rows` padded rows with lists of `top_k`, one graph after the other."""
        graphs = [self._forward[rows, 1][0], self._sampler.choices[Choice(rows, False, top_k is not None)]]
        if top_k is not None:
            _, scores = self._sampler.launches(rows)
            graphs.append(self._sampler.scores[next(score for score in scores if score.top_k >= max(1, top_k))])

        def replay() -> None:
            for graph in graphs:
                graph.replay()

        return replay
