"""Makes every "choose for me" of EngineConfig, in one place, and says in the log what was chosen and why."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from neper import machine
from neper.config import EngineConfig
from neper.errors import StartupError
from neper.models.kv_cache import KVCache
from neper.models.source import ModelSource

logger = logging.getLogger("neper.engine")

_DEFAULT_CACHE_SHARE = 0.25
_DEFAULT_CACHE_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """An EngineConfig with nothing left to choose."""

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    max_logprobs: int
    prefix_caching: bool
    num_threads: int


def resolve(config: EngineConfig, source: ModelSource) -> EngineSettings:
    """Choose what `config` left open.

    Raises:
        StartupError: a setting that the machine or the model cannot meet; the message names it and what to change.
    """
    device = choose_device(config.device)
    dtype = getattr(torch, config.dtype) if config.dtype else choose_dtype(device)
    model_limit = source.config.max_position_embeddings
    max_model_len = config.max_model_len or model_limit
    if max_model_len > model_limit:
        raise StartupError(f"max_model_len {max_model_len} is beyond the model's context of {model_limit} tokens")
    num_threads = choose_threads(config.num_threads)
    block_bytes = KVCache.bytes_per_block(
        num_layers=source.config.num_layers,
        block_size=config.block_size,
        num_kv_heads=source.config.num_kv_heads,
        head_dim=source.config.head_dim,
        dtype=dtype,
    )
    cache_bytes = config.kv_cache_memory
    if cache_bytes is None:
        cache_bytes = int(min(_DEFAULT_CACHE_BYTES, machine.available_memory() * _DEFAULT_CACHE_SHARE))
    # No more than all sequences at full length could use, and block 0 is nobody's.
    per_sequence = -(-max_model_len // config.block_size)
    num_blocks = min(cache_bytes // block_bytes, per_sequence * config.max_num_seqs + 1)
    if num_blocks < per_sequence + 1:
        needed = (per_sequence + 1) * block_bytes
        if config.max_model_len is not None or num_blocks < 2:
            raise StartupError(
                f"a KV cache of {cache_bytes / 2**20:.0f} MiB cannot hold one request of {max_model_len} tokens, which "
                f"takes {needed / 2**20:.0f} MiB: raise kv_cache_memory or lower max_model_len"
            )
        max_model_len = (num_blocks - 1) * config.block_size
        logger.warning(
            "max_model_len lowered to %d: the KV cache of %.0f MiB holds no more (the model's %d would take %.0f MiB)",
            max_model_len,
            cache_bytes / 2**20,
            model_limit,
            needed / 2**20,
        )
    settings = EngineSettings(
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_logprobs=config.max_logprobs,
        prefix_caching=config.prefix_caching,
        num_threads=num_threads,
    )
    logger.info(
        "device %s, %s, %d threads, context %d, KV cache %d blocks of %d tokens (%.0f MiB), prefix caching %s",
        device,
        str(dtype).removeprefix("torch."),
        num_threads,
        max_model_len,
        num_blocks - 1,
        config.block_size,
        num_blocks * block_bytes / 2**20,
        "on" if config.prefix_caching else "off",
    )
    return settings


def choose_device(name: str | None) -> torch.device:
    """The device by that name, or the best there is; StartupError where it is not known or not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"device {name!r} is not known; use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"device {name!r} is not supported; use cpu or cuda")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise StartupError(
            f"device {name} was asked for, but torch sees {count or 'no'} CUDA devices; use --device cpu"
        )
    return device


def choose_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it natively, else float32."""
    if device.type == "cuda" or machine.cpu_flags() & {"avx512_bf16", "amx_bf16"}:
        return torch.bfloat16
    return torch.float32


def choose_threads(asked: int | None) -> int:
    """CPU threads of the engine: as many as asked for, or one a core."""
    return asked or os.cpu_count() or 1
