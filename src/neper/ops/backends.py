"""Which implementation serves each op family on a device: the one place where that is decided."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

MAX_KERNEL_VOCAB = 2**20
MAX_KERNEL_HEAD_DIM = 256


@dataclass(frozen=True)
class Backend:
    """An implementation, "triton" or "reference", and why it was chosen."""

    name: str
    why: str


@cache  # asked for at every operation
def scoring(device: torch.device | str) -> Backend:
    """What reduces logits on `device`.

    The kernels are plain Triton: CUDA and ROCm (both "cuda" to torch) and XPU. Vocabularies beyond 2^20 and logits
    whose columns are not contiguous take the reference on the same device, as do lists of more than 64 ids.
    """
    return _backend(device, "kernels that read each logit once; lists of more than 64 ids take the reference")


def steps(device: torch.device | str, vocab_size: int, head_dim: int) -> Backend:
    """What runs an engine's steps on `device`, padded to fixed numbers of rows and on fixed buffers, or not."""
    if vocab_size > MAX_KERNEL_VOCAB or head_dim > MAX_KERNEL_HEAD_DIM:
        return Backend(
            "reference", f"plain torch operations: {vocab_size} ids or heads of {head_dim} are beyond the kernels"
        )
    return _backend(device, "kernels on buffers that exist from the start")


@cache
def attention(device: torch.device | str) -> Backend:
    """What computes attention on `device`. Heads wider than 256 take the reference everywhere."""
    return _backend(device, "kernels that norm, rotate, write and attend; heads wider than 256 take the reference")


@cache
def fused(device: torch.device | str) -> Backend:
    """What computes the small operations between matrix products on `device`; see `neper.ops.fused.reference`."""
    return _backend(device, "one kernel an operation")


@cache
def linear(device: torch.device | str) -> Backend:
    """What multiplies few rows with weights on `device`; see `neper.ops.linear.reference`."""
    return _backend(device, "kernels for up to 64 rows where they are measured to be quicker, else torch")


def _backend(device: torch.device | str, kernels: str) -> Backend:
    if torch.device(device).type not in ("cuda", "xpu"):
        return Backend("reference", "plain torch operations")
    if find_spec("triton") is None:
        return Backend("reference", "plain torch operations, slower here: Triton is not installed")
    return Backend("triton", kernels)


def chosen(device: torch.device | str) -> dict[str, Backend]:
    """What serves each op family on `device`, by the family's name."""
    return {"attention": attention(device), "scoring": scoring(device)}


def scores_with_kernels(logits: Tensor) -> bool:
    """Whether this reduction runs as Triton kernels."""
    return (
        0 < logits.shape[1] <= MAX_KERNEL_VOCAB
        and logits.stride(1) == 1
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and scoring(logits.device).name == "triton"
    )


def scratch_words(rows: int, vocab_size: int, device: torch.device | str) -> int:
    """How many int32 words the kernels need between them for a reduction of `rows` rows; 0 without kernels."""
    if scoring(device).name != "triton":
        return 0
    from neper.ops.logprobs import launch as logprobs_triton

    return logprobs_triton.scratch_words(rows, vocab_size)
