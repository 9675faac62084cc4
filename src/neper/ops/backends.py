"""Hands out the implementations of the op families: which one serves a device is decided here and nowhere else.

Each is a module that satisfies its family's protocol. `reference` is plain torch; `launch` runs Triton kernels, and is
imported when a device takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from neper.ops.attention import reference as attention_reference
from neper.ops.attention.api import AttentionOps
from neper.ops.common.variants import Variants
from neper.ops.fused import reference as fused_reference
from neper.ops.fused.api import FusedOps
from neper.ops.linear import reference as linear_reference
from neper.ops.linear.api import LinearOps
from neper.ops.logprobs import reference as logprobs_reference
from neper.ops.logprobs.api import ScoringOps
from neper.ops.packing.api import PackingKernels
from neper.ops.sampling.api import SamplingKernels

MAX_KERNEL_VOCAB = 2**20
MAX_KERNEL_HEAD_DIM = 256


@dataclass(frozen=True)
class Backend:
    """A kind of implementation, "triton" or "reference", and why it was chosen: for people."""

    name: str
    why: str


@dataclass(frozen=True)
class StepKernels:
    """The kernels with which an engine's steps choose and pack, padded to fixed numbers of rows, on fixed buffers."""

    sampling: SamplingKernels
    packing: PackingKernels

    def variants(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> list[Variants]:
        """All that they need for logits of `dtype`."""
        return [self.sampling.variants(vocab_size, dtype, device), self.packing.variants(vocab_size, device)]


@cache  # asked for at every reduction
def scoring(device: torch.device | str) -> ScoringOps:
    """The reduction of logits on `device`; see `scoring_of` for logits that kernels do not take.

    The kernels are plain Triton: CUDA and ROCm (both "cuda" to torch) and XPU. They leave lists of more than 64 ids to
    the reference.
    """
    if _why_reference(device):
        return logprobs_reference
    from neper.ops.logprobs import launch

    return launch


def scoring_of(logits: Tensor) -> ScoringOps:
    """The reduction of these logits [N, V]: kernels take at most 2^20 ids, and contiguous columns."""
    if (
        0 < logits.shape[1] <= MAX_KERNEL_VOCAB
        and logits.stride(1) == 1
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    ):
        return scoring(logits.device)
    return logprobs_reference


def why_not_scored(device: torch.device, vocab_size: int) -> str:
    """Why an engine cannot score logits of so many ids on `device`; empty where it can, as always on a CPU."""
    if device.type != "cpu" and _why_reference(device):
        return "Triton is not installed"
    if device.type != "cpu" and vocab_size > MAX_KERNEL_VOCAB:
        return f"a vocabulary of {vocab_size} ids is beyond the kernels' 2^20"
    return ""


def steps(device: torch.device, vocab_size: int, head_dim: int) -> StepKernels | None:
    """The kernels that run an engine's steps on `device`; None where steps are plain torch operations."""
    if vocab_size > MAX_KERNEL_VOCAB or head_dim > MAX_KERNEL_HEAD_DIM or _why_reference(device):
        return None
    from neper.ops.packing import launch as packing
    from neper.ops.sampling import launch as sampling

    return StepKernels(sampling, packing)


def attention(device: torch.device, head_dim: int) -> AttentionOps:
    """Attention with heads of `head_dim` on `device`."""
    if head_dim > MAX_KERNEL_HEAD_DIM or _why_reference(device):
        return attention_reference
    from neper.ops.attention import launch

    return launch


def fused(device: torch.device) -> FusedOps:
    """The small operations between matrix products on `device`."""
    if _why_reference(device):
        return fused_reference
    from neper.ops.fused import launch

    return launch


def linear(device: torch.device) -> LinearOps:
    """Products with weights on `device`: kernels take up to 64 rows, where they are measured to be quicker."""
    if _why_reference(device):
        return linear_reference
    from neper.ops.linear import launch

    return launch


def chosen(device: torch.device | str) -> dict[str, Backend]:
    """The kind that serves a family on `device`, by the family's name."""
    kernels = {
        "attention": "kernels that norm, rotate, write and attend; heads wider than 256 take the reference",
        "scoring": "kernels that read each logit once; lists of more than 64 ids take the reference",
    }
    why = _why_reference(device)
    return {family: Backend("reference", why) if why else Backend("triton", kernels[family]) for family in kernels}


def _why_reference(device: torch.device | str) -> str:
    """Why there are no kernels for `device`; empty where there are."""
    if torch.device(device).type not in ("cuda", "xpu"):
        return "plain torch operations"
    if find_spec("triton") is None:
        return "plain torch operations, slower here: Triton is not installed"
    return ""
