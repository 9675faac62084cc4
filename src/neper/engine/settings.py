"""Makes every "choose for me" of EngineConfig, in one place, and says in the log what was chosen and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from neper import machine
from neper.config import EngineConfig
from neper.errors import ConfigError, StartupError
from neper.models.model_config import ModelConfig
from neper.ops import backends
from neper.ops.attention.api import MAX_WINDOW
from neper.types import LISTED_WHOLE, packed_width

LONGEST_LIST = 64
"""Where requests may list any number of ids: the longest list of the rows that are scored together."""

MAX_LISTED = 2**22
"""There the most places of longer lists that are filled at once; so many ids and values are 32 MiB."""

DRAFT_TOKENS = 8
"""Most drafts of a request per step where nobody says how many."""

DRAFT_ROWS = {"cpu": 16, "cuda": 64}
"""Rows of a step beyond which drafts do not pay, by device. Products of more rows are bound by arithmetic."""

logger = logging.getLogger("neper.engine")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """An EngineConfig with nothing left to choose, but for `num_blocks`: 0 until `cache_size` has found it."""

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    gpu_memory_utilization: float
    max_logprobs: int
    scoring: str
    prefix_caching: bool
    cuda_graphs: bool
    overlap: bool
    num_threads: int
    speculative: str | None = None
    draft_tokens: int = 0

    @property
    def max_drafts(self) -> int:
        """Most drafts of a step; 0 where nothing drafts."""
        return min(self.max_num_seqs * self.draft_tokens, self.draft_rows)

    @property
    def draft_rows(self) -> int:
        """Rows of a step beyond which a draft costs more than it may save: products are bound by arithmetic there."""
        return DRAFT_ROWS[self.device.type]

    @property
    def max_rows(self) -> int:
        """Most rows of a step that get a next token."""
        return self.max_num_seqs + self.max_drafts

    @property
    def max_step_tokens(self) -> int:
        """Most tokens of a step, padding included."""
        return max(self.max_num_batched_tokens, self.max_rows)

    @property
    def longest_list(self) -> int:
        """Longest list of the rows that are scored together; longer ones are made a few rows at a time."""
        return self.max_logprobs if self.max_logprobs >= 0 else LONGEST_LIST

    def max_listed(self, vocab_size: int) -> int:
        """Most places of lists that are filled at once: those of a step's prompt positions, but for one position of
        each sequence, or those of a group of rows with a way of their own.
        """
        places = max(self.max_num_batched_tokens * self.longest_list, self.max_rows * min(LISTED_WHOLE, vocab_size))
        return max(places, MAX_LISTED, vocab_size) if self.max_logprobs < 0 else places

    def max_packed_words(self, vocab_size: int) -> int:
        """Most words that a step packs: every row with the longest list, and every prompt position."""
        row = vocab_size if self.max_logprobs < 0 else max(self.longest_list, min(LISTED_WHOLE, vocab_size))
        words = self.max_num_batched_tokens * packed_width(0)
        words += 2 * (self.max_listed(vocab_size) + self.max_rows * row)
        return words + self.max_rows * packed_width(row)


def resolve(config: EngineConfig, model: ModelConfig) -> EngineSettings:
    """Choose what `config` left open.

    Raises:
        StartupError: a setting that the machine or the model cannot meet; the message names it and what to change.
    """
    device = choose_device(config.device)
    dtype = getattr(torch, config.dtype) if config.dtype else choose_dtype(device)
    max_model_len = config.context(model.max_position_embeddings)
    num_threads = choose_threads(config.num_threads)
    on_gpu = device.type == "cuda"
    kernels = backends.steps(device, model.vocab_size, model.head_dim) is not None
    settings = EngineSettings(
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs or (256 if on_gpu else 64),
        max_num_batched_tokens=config.max_num_batched_tokens or (8192 if on_gpu else 512),
        num_blocks=0,
        block_size=config.block_size,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_logprobs=config.max_logprobs,
        scoring=choose_scoring(config.scoring, device, model.vocab_size),
        prefix_caching=config.prefix_caching,
        cuda_graphs=config.cuda_graphs and on_gpu and kernels,
        overlap=on_gpu if config.overlap is None else config.overlap,
        num_threads=num_threads,
        speculative=config.speculative,
        draft_tokens=choose_draft_tokens(config, on_gpu),
    )
    logger.info(
        "device %s, %s, %d threads, scoring on the %s, CUDA graphs %s, overlap %s",
        device,
        str(dtype).removeprefix("torch."),
        num_threads,
        settings.scoring,
        "on" if settings.cuda_graphs else "off",
        "on" if settings.overlap else "off",
    )
    if settings.speculative is not None:
        logger.info(
            "drafts by %s: up to %d per request, in steps of up to %d rows",
            settings.speculative,
            settings.draft_tokens,
            settings.draft_rows,
        )
    return settings


def choose_draft_tokens(config: EngineConfig, on_gpu: bool) -> int:
    """Most drafts of a request per step: as asked for, and on a GPU no more than the kernel of few rows attends."""
    if config.speculative is None:
        return 0
    asked = config.draft_tokens or DRAFT_TOKENS
    return min(asked, MAX_WINDOW - 1) if on_gpu else asked


def choose_scoring(asked: str | None, device: torch.device, vocab_size: int) -> str:
    """Where logprobs are computed, "device" or "host": the host where a GPU's kernels cannot, else as asked for."""
    why = backends.why_not_scored(device, vocab_size)
    if asked == "device" and why:
        raise StartupError(f"logprobs cannot be computed on {device}: {why}; use scoring host")
    if asked is None and why:
        logger.warning("logprobs are computed on the host, from whole rows of logits: %s", why)
    return asked or ("host" if why else "device")


def choose_device(name: str | None) -> torch.device:
    """The device by that name, or the best there is.

    Raises ConfigError where it is not known, StartupError where it is not there.
    """
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known; use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use cpu or cuda")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise StartupError(
            f"device {name} was asked for, but torch sees {count or 'no'} CUDA devices; use --device cpu"
        )
    # An index, always: what is current is a thread's own affair.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it natively, else float32."""
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def multiplies_bfloat16(device: torch.device) -> bool:
    """True where a CPU has instructions for it, or a GPU matrix units: NVIDIA's from compute capability 8.0 on."""
    if device.type != "cuda":
        return bool(machine.cpu_flags() & {"avx512_bf16", "amx_bf16"})
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def choose_threads(asked: int | None) -> int:
    """CPU threads of the engine: as many as asked for, or one for each core that this process may use."""
    return asked or machine.cpus().usable
