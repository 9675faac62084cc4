"""Runs the model for one step: the only launcher of device work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from neper.engine.plan.scheduler import StepPlan
from neper.engine.step.batch import BatchBuilder, BatchInputs
from neper.engine.step.graphs import DecodeGraphs
from neper.engine.step.host_scoring import HostScoring
from neper.engine.step.kernel_sampler import KernelSampler
from neper.engine.step.readback import Readback, StepOutput
from neper.engine.step.reference_sampler import ReferenceSampler
from neper.models.decoder import Decoder
from neper.models.kv_cache import KVCache
from neper.types import Progress


@dataclass(frozen=True)
class BegunStep:
    """A step whose tokens are not chosen yet: what it consists of, and its hidden states [T, D]."""

    inputs: BatchInputs
    hidden: Tensor


class ModelRunner:
    """Owns the model, its KV cache, and what turns a plan into launched work.

    Args:
        last_tokens: [slots] int32, the token last sampled in each slot.
        kernels: the sampler, where it is the one on fixed buffers: only the next sampling is in the way of its copies.

    Attributes:
        kv_cache: made when all other memory is taken; no step can be launched before.
        graphs: captured decode steps; None = every step is launched operation by operation.
    """

    def __init__(
        self,
        decoder: Decoder,
        builder: BatchBuilder,
        sampler: KernelSampler | ReferenceSampler | HostScoring,
        readback: Readback,
        *,
        last_tokens: Tensor,
        kernels: KernelSampler | None = None,
    ) -> None:
        self.decoder = decoder
        self.readback = readback
        self.kv_cache: KVCache | None = None
        self.graphs: DecodeGraphs | None = None
        self._builder = builder
        self._sampler = sampler
        self._last_tokens = last_tokens
        self._kernels = kernels
        self._decoded_rows = 0

    def launch(self, plan: StepPlan, fill: Callable[[BatchInputs], None] | None = None) -> StepOutput:
        """Start one step: hidden states of its tokens, next tokens and scores where they are wanted, their copies."""
        return self.finish(self.begin(plan, fill))

    @torch.inference_mode()
    def begin(self, plan: StepPlan, fill: Callable[[BatchInputs], None] | None = None) -> BegunStep:
        """Start the first half of a step: the hidden states of its tokens.

        Args:
            fill: called when the step is laid out, to give the model what it reads besides.
        """
        with self.on_device():
            return self._begin(plan, fill)

    @torch.inference_mode()
    def finish(self, step: BegunStep) -> StepOutput:
        """Start the second half: next tokens, scores where they are wanted, and their copies.

        What a row may sample is decided here, so by now every token must be known that this depends on.
        """
        with self.on_device():
            self.readback.hold()
            return self.readback.start(step.inputs.plan, self._sampler.run(step.hidden, step.inputs))

    def on_device(self) -> AbstractContextManager[object]:
        """What is current is a thread's own affair, and streams and events belong to the current device."""
        device = self.decoder.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _begin(self, plan: StepPlan, fill: Callable[[BatchInputs], None] | None) -> BegunStep:
        assert self.kv_cache is not None
        if self._kernels is None:
            self.readback.hold()  # what the copies read is the allocator's to hand out again
        inputs = self._builder.build(plan)
        if fill is not None:
            fill(inputs)
        self._decoded_rows = len(inputs.token_ids) if inputs.is_decode and inputs.window == 1 else 0
        rows = len(inputs.token_ids)
        if self.graphs is not None and inputs.is_decode and self.graphs.has(rows, inputs.window):
            hidden = self.graphs.forward(rows, inputs.window)
        else:
            hidden = self.decoder.forward(inputs.token_ids, self.kv_cache, inputs.attention, self._last_tokens)
        return BegunStep(inputs, hidden)

    def capture(self, buckets: Sequence[tuple[int, int]], progress: Progress | None = None) -> None:
        """Capture decode steps; see `DecodeGraphs` for `buckets`."""
        assert self._kernels is not None
        assert self.kv_cache is not None
        with torch.inference_mode():
            self.graphs = DecodeGraphs(
                self.decoder, self.kv_cache, self._builder, self._kernels, buckets=buckets, progress=progress
            )

    @property
    def logprob_bytes(self) -> int:
        """Device memory that exists for logprobs from the start."""
        return 0 if self._kernels is None else self._kernels.buffers.logprob_bytes

    def decode_replay(self, rows: int, top_k: int | None) -> Callable[[], None]:
        """Replays the graphs of a greedy decode step alone, on the inputs of the last step.

        Raises:
            ValueError: there are no graphs, or the last step was no decode step of so many rows, so its inputs lie
                elsewhere.
        """
        if self.graphs is None or self._decoded_rows != self._builder.padded(rows):
            raise ValueError(f"the last step was not a graph of {rows} rows")
        return self.graphs.replay_of(self._decoded_rows, top_k)
