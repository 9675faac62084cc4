"""Builds what runs steps: weights, buffers, KV cache, compiled kernels, CUDA graphs. What fails says what to change."""

from __future__ import annotations

import functools
import logging
import time

import torch
from torch import Tensor

from neper.config import EngineConfig
from neper.engine import memory, settings
from neper.engine.draft.drafter import Drafter
from neper.engine.draft.drafting import Drafting
from neper.engine.draft.model import ModelDrafter
from neper.engine.draft.mtp import MtpDrafter
from neper.engine.draft.ngram import NgramDrafter
from neper.engine.settings import EngineSettings
from neper.engine.start import cache_size, draft_model
from neper.engine.start.allocator import keep_freed_memory
from neper.engine.step.batch import BatchBuilder, row_buckets
from neper.engine.step.host_scoring import HostScoring
from neper.engine.step.inputs import InputBuffers, Layout
from neper.engine.step.kernel_sampler import KernelSampler, SamplerBuffers
from neper.engine.step.penalties import PenaltyTables
from neper.engine.step.readback import Counters, Readback
from neper.engine.step.reference_sampler import ReferenceSampler
from neper.engine.step.runner import ModelRunner
from neper.models import registry
from neper.models.decoder import Decoder
from neper.models.kv_cache import KVCache
from neper.models.model_config import ModelConfig
from neper.models.source import ModelSource
from neper.ops import backends
from neper.ops.attention.api import QUERY_TILE
from neper.ops.common.variants import compile_all
from neper.types import Progress

logger = logging.getLogger("neper.engine")


def build(
    config: EngineConfig, source: ModelSource, decoder: Decoder | None = None, progress: Progress | None = None
) -> tuple[EngineSettings, ModelRunner, Drafting | None]:
    """A runner for `config`, the settings that it was built for, and what drafts where something does.

    Args:
        decoder: a loaded model to use; None = load the source's.

    Raises:
        StartupError: a setting that the machine or the model cannot meet, or too little memory.
    """
    chosen, model = settings.resolve(config, source.config), source.config
    if chosen.device.type == "cpu":
        torch.set_num_threads(chosen.num_threads)
        keep_freed_memory()
    else:
        torch.cuda.set_device(chosen.device)
    for family, backend in backends.chosen(chosen.device).items():
        logger.info("%s: %s (%s)", family, backend.name, backend.why)
    draft = None if config.draft_model is None else draft_model.find(config.draft_model, source, progress)
    if config.speculative == "mtp":
        draft_model.check_predictor(source)
    with memory.needed(
        "the model's weights", "free the device of other programs or take a smaller model", chosen.device
    ):
        if decoder is None:
            decoder = registry.load(source, dtype=chosen.dtype, device=chosen.device, progress=progress)
        # A config can promise any context; the table of its positions is made on the host, in three pieces.
        memory.reserve(
            "positions",
            "max_model_len",
            3 * 4 * model.head_dim * chosen.max_model_len,
            functools.partial(decoder.prepare, chosen.max_model_len),
            torch.device("cpu"),
        )
    decoders = {decoder: chosen}
    if config.speculative == "mtp":
        small: Decoder = draft_model.load_predictor(decoder, source, chosen)
        decoders[small] = draft_model.settings(chosen, small)
    elif draft is not None:
        small = draft_model.load(draft, chosen, progress)
        decoders[small] = draft_model.settings(chosen, small)
    if chosen.device.type != "cpu":
        started = time.monotonic()
        with memory.needed("compiling the kernels", "free the device of other programs", chosen.device):
            for model_of, its_settings in decoders.items():
                _compile(model_of, its_settings)
        logger.info("compiled the kernels in %.1f s; they are kept for the next start", time.monotonic() - started)
    last_tokens = memory.allocate(
        "tokens", "max_num_seqs", chosen.max_num_seqs, dtype=torch.int32, device=chosen.device
    )
    runner, *others = (_runner(model_of, its_settings, last_tokens) for model_of, its_settings in decoders.items())
    drafts_by = others[0] if others else None
    chosen = _with_caches(runner, drafts_by, config, chosen, model)
    if chosen.cuda_graphs:
        started = time.monotonic()
        with memory.needed("CUDA graphs", "lower gpu_memory_utilization or kv_cache_memory", chosen.device):
            alone = [(rows, 1) for rows in row_buckets(chosen.max_num_seqs)]
            runner.capture(alone + _window_buckets(chosen), progress)
            if drafts_by is not None:
                drafts_by.capture(alone, progress)
        logger.info("captured decode steps as CUDA graphs in %.1f s", time.monotonic() - started)
    return chosen, runner, _drafting(chosen, decoder, drafts_by)


def _window_buckets(chosen: EngineSettings) -> list[tuple[int, int]]:
    """Padded rows and window of the steps with drafts that are worth their time."""
    if not chosen.draft_tokens:
        return []
    return [(rows, 1 + chosen.draft_tokens) for rows in row_buckets(chosen.max_rows) if 1 < rows <= chosen.draft_rows]


def _drafting(chosen: EngineSettings, decoder: Decoder, small: ModelRunner | None) -> Drafting | None:
    """The drafting by lookup, or by the runner of a prediction layer or a small model; None where nothing drafts."""
    if chosen.speculative is None:
        return None
    drafter: Drafter = NgramDrafter()
    if chosen.speculative == "mtp":
        assert small is not None
        assert decoder.residual is not None
        drafter = MtpDrafter(
            small,
            decoder.residual,
            num_step_rows=chosen.max_step_tokens,
            window=1 + chosen.draft_tokens,
            max_model_len=chosen.max_model_len,
        )
    elif small is not None:
        drafter = ModelDrafter(
            small,
            block_size=chosen.block_size,
            max_model_len=min(chosen.max_model_len, small.decoder.config.max_position_embeddings),
            max_num_batched_tokens=draft_model.settings(chosen, small.decoder).max_num_batched_tokens,
        )
    return Drafting(drafter, most=chosen.draft_tokens, rows=chosen.draft_rows, vocab_size=decoder.config.vocab_size)


def _compile(decoder: Decoder, chosen: EngineSettings) -> None:
    """Compile what requests will need, so that none waits for it."""
    device, dtype, vocab_size = chosen.device, chosen.dtype, decoder.config.vocab_size
    needed = decoder.variants(chosen.block_size)
    if chosen.scoring == "device":
        # Float32 is what the processed view scores: logits that were edited.
        for scored in {dtype, torch.float32}:
            needed.append(backends.scoring(device).variants(vocab_size, scored, chosen.longest_list, device))
    kernels = backends.steps(device, vocab_size, decoder.config.head_dim)
    if kernels is not None:
        needed += kernels.variants(vocab_size, dtype, device)
    compile_all(needed, device)


def _runner(decoder: Decoder, chosen: EngineSettings, last_tokens: Tensor) -> ModelRunner:
    """A runner with all its buffers, but without a cache.

    Args:
        last_tokens: of the slots. What drafts has the model's: it reads tokens that only the device knows, and writes
            those of sequences whose tokens the host knows.
    """
    device, model = chosen.device, decoder.config
    on_host = chosen.scoring == "host"
    kernels = backends.steps(device, model.vocab_size, model.head_dim)
    buckets = row_buckets(chosen.max_rows) if kernels is not None else []
    attention = backends.attention(device, model.head_dim)
    max_rows = chosen.max_rows
    tokens = chosen.max_step_tokens
    window = 1 + chosen.draft_tokens
    scratch = attention.allocate_scratch(
        max_rows, model.num_heads, model.num_kv_heads, model.head_dim, device, queries=window
    )
    capacity = Layout(
        rows=max_rows,
        tokens=tokens,
        seqs=max_rows,
        items=0 if scratch is None else scratch.planner.most_items(max_rows),
        targets=chosen.max_num_batched_tokens,
        tiles=-(-tokens // QUERY_TILE) + max_rows,
        width=-(-chosen.max_model_len // chosen.block_size),
    )
    builder = BatchBuilder(
        InputBuffers(capacity, device),
        block_size=chosen.block_size,
        vocab_size=model.vocab_size,
        scores_on_device=not on_host,
        longest_list=chosen.longest_list,
        max_listed=chosen.max_listed(model.vocab_size),
        buckets=buckets,
        scratch=scratch,
        window=window,
    )
    max_words = chosen.max_packed_words(model.vocab_size)
    readback = Readback(device, max_words=max_words)
    penalties = PenaltyTables(chosen.max_num_seqs, model.vocab_size, device)
    on_buffers: KernelSampler | None = None
    if kernels is not None:
        buffers = SamplerBuffers.allocate(chosen, model.vocab_size, last_tokens, max_words, kernels)
        on_buffers = KernelSampler(decoder, penalties, buffers, readback, kernels, longest_list=chosen.longest_list)
    sampler = on_buffers or ReferenceSampler(decoder, penalties, last_tokens, keep_logits=on_host)
    return ModelRunner(
        decoder,
        builder,
        HostScoring(sampler, decoder, readback, max_rows=max_rows) if on_host else sampler,
        readback,
        last_tokens=last_tokens,
        kernels=on_buffers,
    )


def _with_caches(
    runner: ModelRunner, small: ModelRunner | None, config: EngineConfig, chosen: EngineSettings, model: ModelConfig
) -> EngineSettings:
    """Give the runner its cache, and a draft model's one of as many blocks; returns the settings with their size."""
    cache_bytes = config.kv_cache_memory
    if cache_bytes is None and chosen.device.type == "cpu":
        cache_bytes = cache_size.on_cpu()
    if cache_bytes is None:

        def worst_steps(cache: KVCache) -> None:
            runner.kv_cache = cache
            for plan in cache_size.worst_plans(chosen):
                runner.readback.read(runner.launch(plan))
            runner.kv_cache = None

        cache_bytes = cache_size.on_gpu(chosen, model, worst_steps)
        runner.readback.counters = Counters()
    beside = 0 if small is None else cache_size.block_bytes(small.decoder.config, chosen)
    chosen = cache_size.fit(chosen, model, cache_bytes, lower_context=config.max_model_len is None, beside=beside)
    for each in (runner, small):
        if each is not None:
            each.kv_cache = memory.reserve(
                "the KV cache",
                "kv_cache_memory" if config.kv_cache_memory else "gpu_memory_utilization",
                chosen.num_blocks * cache_size.block_bytes(each.decoder.config, chosen),
                functools.partial(cache_size.make_cache, each.decoder.config, chosen, chosen.num_blocks),
                chosen.device,
            )
    return chosen
