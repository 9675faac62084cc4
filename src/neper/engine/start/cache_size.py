"""How many blocks the KV cache gets: a share of a CPU's memory, or what a measured worst step leaves of a GPU's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from neper import machine
from neper.engine import memory
from neper.engine.plan.scheduler import ScheduledChunk, StepPlan
from neper.engine.plan.sequence import Sequence
from neper.engine.settings import EngineSettings
from neper.errors import StartupError
from neper.machine import format_size
from neper.models.kv_cache import KVCache
from neper.models.model_config import ModelConfig
from neper.types import LogprobParams, Request, SamplingParams

logger = logging.getLogger("neper.engine")

_CPU_SHARE = 0.25
_CPU_BYTES = 2**30


def block_bytes(model: ModelConfig, settings: EngineSettings) -> int:
    """Bytes of one block over all layers."""
    return KVCache.bytes_per_block(
        num_layers=model.num_layers,
        block_size=settings.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=settings.dtype,
    )


def make_cache(model: ModelConfig, settings: EngineSettings, num_blocks: int) -> KVCache:
    return KVCache(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=settings.dtype,
        device=settings.device,
    )


def on_cpu() -> int:
    """Bytes for the cache where nobody said how many."""
    return int(min(_CPU_BYTES, machine.available_memory() * _CPU_SHARE))


def on_gpu(settings: EngineSettings, model: ModelConfig, worst_steps: Callable[[KVCache], None]) -> int:
    """Bytes that the engine may still take for the cache, when everything else of it exists.

    Args:
        worst_steps: runs the steps that take the most memory, over a cache of one block.

    Raises:
        StartupError: nothing is left.
    """
    device = settings.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with memory.needed(
        "a step of as many tokens and rows as allowed", "lower max_num_batched_tokens or max_num_seqs", device
    ):
        worst_steps(make_cache(model, settings, 1))
    torch.cuda.synchronize(device)
    needed = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * settings.gpu_memory_utilization)
    left = min(free, allowed - (total - free)) - needed
    logger.info(
        "%s: %s of %s in use, a step takes up to %s more, %s are left for the KV cache",
        device,
        format_size(total - free),
        format_size(total),
        format_size(needed),
        format_size(max(0, left)),
    )
    if left <= 0:
        raise StartupError(
            f"no memory for the KV cache: {format_size(-left)} are missing for a step of "
            f"{settings.max_num_batched_tokens} tokens alone; lower max_num_batched_tokens or max_num_seqs, or raise "
            "gpu_memory_utilization"
        )
    return left


def fit(
    settings: EngineSettings, model: ModelConfig, cache_bytes: int, *, lower_context: bool, beside: int = 0
) -> EngineSettings:
    """Settings with `num_blocks` for a cache of so many bytes; a context that does not fit is lowered, if that may be.

    Args:
        beside: bytes that each block takes in the cache of a draft model.

    Raises:
        StartupError: the cache cannot hold a request of the longest context.
    """
    each = block_bytes(model, settings) + beside
    # No more than all sequences at full length could use, and block 0 is nobody's.
    per_sequence = -(-settings.max_model_len // settings.block_size)
    num_blocks = min(cache_bytes // each, per_sequence * settings.max_num_seqs + 1)
    max_model_len = settings.max_model_len
    if num_blocks < per_sequence + 1:
        needed = (per_sequence + 1) * each
        if not lower_context or num_blocks < 2:
            raise StartupError(
                f"a KV cache of {format_size(cache_bytes)} cannot hold one request of {max_model_len} tokens, which "
                f"takes {format_size(needed)}: raise kv_cache_memory or lower max_model_len"
            )
        max_model_len = (num_blocks - 1) * settings.block_size
        logger.warning(
            "max_model_len lowered to %d: the KV cache of %s holds no more (the model's %d would take %s)",
            max_model_len,
            format_size(cache_bytes),
            settings.max_model_len,
            format_size(needed),
        )
    logger.info(
        "context %d, KV cache %d blocks of %d tokens (%s), prefix caching %s",
        max_model_len,
        num_blocks - 1,
        settings.block_size,
        format_size(num_blocks * each),
        "on" if settings.prefix_caching else "off",
    )
    return replace(settings, num_blocks=num_blocks, max_model_len=max_model_len)


def worst_plans(settings: EngineSettings) -> list[StepPlan]:
    """The steps that take the most memory; their blocks are all the null block.

    One has as many tokens as fit, all scored with the longest lists; the others as many rows as there can be, all of
    them edited, drawn and scored, from the model's own logits and from those that were drawn from.
    """
    longest = min(settings.max_num_batched_tokens, settings.max_model_len)
    prompts = min(settings.max_num_seqs, settings.max_num_batched_tokens // longest)
    rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    edited = SamplingParams(max_tokens=1, presence_penalty=1.0, top_p=0.9, bad_words=((0,),))
    processed = LogprobParams(top_k=settings.longest_list, mode="processed_logprobs")
    return [
        StepPlan(tuple(_chunk(settings, slot, longest, SamplingParams(max_tokens=1)) for slot in range(prompts))),
        StepPlan(tuple(_chunk(settings, slot, 1, edited) for slot in range(rows))),
        StepPlan(tuple(_chunk(settings, slot, 1, edited, processed) for slot in range(rows))),
    ]


def _chunk(
    settings: EngineSettings,
    slot: int,
    length: int,
    sampling: SamplingParams,
    logprobs: LogprobParams | None = None,
) -> ScheduledChunk:
    request = Request(
        request_id=str(slot),
        prompt_token_ids=[0] * length,
        sampling=sampling,
        logprobs=logprobs or LogprobParams(top_k=settings.longest_list, prompt_top_k=settings.longest_list),
    )
    seq = Sequence(request, settings.max_model_len)
    seq.block_table = [0] * -(-length // settings.block_size)
    return ScheduledChunk(
        seq=seq,
        start=0,
        length=length,
        samples=True,
        pending=False,
        score_start=1,
        score_end=length,
        slot=slot,
        num_preemptions=0,
    )
