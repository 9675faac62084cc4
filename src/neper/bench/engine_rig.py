"""The engine under measurement: made for the needs of a plan, one at a time, and driven batch by batch."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from neper.bench import engine_cases
from neper.bench.engine_cases import OFF, Case, Lengths, Plan
from neper.bench.engine_drive import Batch, run_batch
from neper.bench.subject import Subject
from neper.config import DEFAULT_MODEL, EngineConfig
from neper.engine.core import EngineCore
from neper.errors import StartupError
from neper.models import registry, shapes, source
from neper.models.decoder import Decoder
from neper.models.model_config import ModelConfig
from neper.models.source import ModelSource
from neper.ops import backends
from neper.progress import ProgressLine
from neper.types import Request

_SPARE_BLOCKS = 8


class OutOfTime(Exception):
    """The time limit is over: nothing new is begun."""


@dataclass
class Rig:
    """A model on a device, the engine that runs it, and the time limit.

    Attributes:
        deadline: of time.perf_counter; None = no end.
        seed: of the next batch's prompts.
        backend_names: the implementation of each family of ops, for people.
    """

    subject: Subject
    source: ModelSource
    decoder: Decoder
    plan: Plan
    progress: ProgressLine
    deadline: float | None = None
    seed: int = 0
    backend_names: dict[str, str] = field(default_factory=dict)
    _core: EngineCore | None = None
    _kind: tuple[str, bool] = "", False

    def environment(self) -> dict[str, str]:
        """The model, the card and the backends, for people."""
        environment = {"model": self.subject.describe(self.source.name)}
        if self.subject.on_gpu:
            card = torch.cuda.get_device_properties(self.subject.device)
            environment["gpu"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB"
            environment["cuda"] = torch.version.cuda or f"HIP {torch.version.hip}"
        return environment | self.backend_names

    def check_time(self) -> None:
        """Raises OutOfTime after the deadline."""
        if self.deadline is not None and time.perf_counter() > self.deadline:
            raise OutOfTime

    def engine(self, scoring: str, *, long: bool = False) -> EngineCore:
        """The engine that scores on the `device` or on the `host`; another one is given up for it.

        Args:
            long: one with the cache that the plan's `lengths` need.
        """
        self.check_time()
        if self._core is None or self._kind != (scoring, long):
            self.drop_engine()
            self.progress(0, 1, f"starting an engine that scores on the {scoring}")
            config = self._long_config() if long else self.config(scoring)
            self._core, self._kind = EngineCore(config, self.source, decoder=self.decoder), (scoring, long)
            self.backend_names = {
                family: chosen.name for family, chosen in backends.chosen(self.subject.device).items()
            }
        return self._core

    def drop_engine(self) -> None:
        """Give back the engine's memory. After a failure this drops the requests that it still holds."""
        self._core = None
        gc.collect()
        if self.subject.on_gpu:
            torch.cuda.empty_cache()

    def requests(self, case: Case, count: int, reply: int) -> list[Request]:
        """A batch with the prompts of the seed."""
        vocab_size = self.source.config.vocab_size
        return engine_cases.requests(
            case, count, prompt=self.plan.prompt, reply=reply, vocab_size=vocab_size, seed=self.seed
        )

    def batch(self, core: EngineCore, case: Case, count: int, reply: int) -> Batch:
        """`count` requests with replies of `reply` tokens, and the prompts of the seed."""
        self.check_time()
        return run_batch(core, self.requests(case, count, reply))

    def lengths(self, core: EngineCore, lengths: Lengths) -> Batch:
        """Requests of these lengths, and the prompts of the seed."""
        self.check_time()
        prompts, reply = lengths.prompts, self.plan.lengths_reply
        vocab_size = self.source.config.vocab_size
        return run_batch(
            core,
            engine_cases.requests(
                OFF, len(prompts), prompt=prompts, reply=reply, vocab_size=vocab_size, seed=self.seed
            ),
        )

    def prompt(self, core: EngineCore, length: int, top_k: int | None) -> Batch:
        """One prompt, with or without its scores, and one token."""
        self.check_time()
        vocab_size = self.source.config.vocab_size
        return run_batch(core, [engine_cases.prompt_request(length, top_k, vocab_size=vocab_size, seed=self.seed)])

    def config(self, scoring: str, **more: Any) -> EngineConfig:
        """The config of an engine for the plan, with `more` fields."""
        plan = self.plan
        rows = max(plan.concurrency)
        prompts = (*plan.prompt_lengths, plan.memory_length if self.subject.on_gpu else 0)
        longest = max(plan.prompt + plan.reply, *(length + 1 for length in prompts))
        if longest > self.source.model_max_length:
            raise StartupError(
                f"the benchmark's prompt and reply take {longest} tokens, and {self.source.name} has a context of "
                f"{self.source.model_max_length}; --quick takes less"
            )
        values: dict[str, Any] = {
            "model": self.source.name,
            "device": str(self.subject.device),
            "dtype": self.subject.dtype_name,
            "max_model_len": longest,
            "max_num_seqs": rows,
            # The prompts of a batch must fit into one step: requests that start together decode together.
            "max_num_batched_tokens": max(rows * plan.prompt, plan.step_tokens if self.subject.on_gpu else 1),
            "kv_cache_memory": self._cache_bytes([plan.prompt + plan.reply] * rows, [longest]),
            "max_logprobs": max(*plan.top_ks, plan.prompt_top_k),
            "scoring": scoring,
            "prefix_caching": False,
        }
        return EngineConfig(**(values | more))

    def _long_config(self) -> EngineConfig:
        batches = [[length + self.plan.lengths_reply for length in case.prompts] for case in self.plan.lengths]
        return self.config(
            "device",
            max_model_len=max(map(max, batches)),
            max_num_seqs=max(map(len, batches)),
            max_num_batched_tokens=self.plan.step_tokens,
            kv_cache_memory=self._cache_bytes(*batches),
        )

    def _cache_bytes(self, *batches: list[int]) -> int:
        """Bytes of a cache for each of these batches of sequences, of so many tokens each."""
        size = EngineConfig.block_size
        # An engine that launches ahead may hold a block more than its tokens need.
        blocks = max(sum(-(-tokens // size) + 1 for tokens in batch) for batch in batches) + _SPARE_BLOCKS
        return blocks * size * kv_bytes_per_token(self.source.config, self.subject.dtype.itemsize)


def load(
    subject: Subject,
    plan: Plan,
    progress: ProgressLine,
    *,
    rounds: int | None = None,
    concurrency: tuple[int, ...] | None = None,
    deadline: float | None = None,
) -> Rig:
    """The rig of a subject, its weights loaded, and of a plan fitted to it (see Plan.fitted)."""
    found = shapes.source(subject.shape) if subject.shape else source.resolve(subject.model or DEFAULT_MODEL)
    plan = plan.fitted(max_model_len=found.model_max_length, rounds=rounds, concurrency=concurrency)
    if subject.on_gpu:
        torch.cuda.set_device(subject.device)
    progress(0, 1, "weights")
    if subject.shape:
        decoder = shapes.random_decoder(found.config, dtype=subject.dtype, device=subject.device)
    else:
        decoder = registry.load(found, dtype=subject.dtype, device=subject.device, progress=progress)
    return Rig(subject, found, decoder, plan, progress, deadline)


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def decode_bytes(config: ModelConfig, itemsize: int, *, tokens: float) -> float:
    """Bytes that a decode step must read: every weight once, and the keys and values of its contexts' `tokens`.

    Embeddings that are not the head as well do not count: only those of the rows are read.
    """
    weights = shapes.num_parameters(config)
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    return weights * itemsize + tokens * kv_bytes_per_token(config, itemsize)
