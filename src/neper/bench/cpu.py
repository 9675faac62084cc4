"""`neper bench cpu`: tokens per second on the CPU against transformers `generate`, and what logprobs cost.

Everything runs in this process on the same weights, dtype and threads, and the cases take turns: each round measures
every case once, so that a slow moment of the machine falls on all of them. Prompts are fresh in every round, so no case
profits from the prefix cache.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from neper.bench import report
from neper.bench.report import Ratio, Series
from neper.config import DEFAULT_MODEL
from neper.engine.llm import LLM
from neper.errors import StartupError
from neper.types import LogprobParams, SamplingParams

PROMPT_TOKENS = 128
REPLY_TOKENS = 128


def run(out: str, *, model: str = DEFAULT_MODEL, rounds: int = 5) -> None:
    """Measure, print the table, and write `cpu-cpu.json` and `cpu-cpu.md` into the directory `out`."""
    llm = LLM(model, device="cpu")
    settings = llm.core.settings
    vocab = llm.tokenizer.vocab_size
    generator = random.Random(0)

    def prompts(count: int) -> list[list[int]]:
        return [[generator.randrange(vocab // 4, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]

    def neper(concurrency: int, top_k: int | None) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=REPLY_TOKENS, ignore_eos=True)
        batch = prompts(concurrency)
        start = time.perf_counter()
        replies = llm.generate([*batch], sampling, LogprobParams(top_k=top_k))
        seconds = time.perf_counter() - start
        assert all(len(reply.token_ids) == REPLY_TOKENS for reply in replies)
        return concurrency * REPLY_TOKENS / seconds

    baseline = _transformers(llm.source.path, settings.dtype, settings.num_threads)
    cases: dict[str, Callable[[], float]] = {
        "transformers generate, 1 request": lambda: baseline(prompts(1)[0]),
        "neper, 1 request": lambda: neper(1, None),
        "neper, 1 request, top_logprobs 20": lambda: neper(1, 20),
        "neper, 8 requests": lambda: neper(8, None),
        "neper, 8 requests, top_logprobs 20": lambda: neper(8, 20),
    }
    series = {name: Series(name, "tok/s") for name in cases}
    for round_number in range(-1, rounds):  # round -1 warms up
        for name, case in cases.items():
            value = case()
            note = "warm-up" if round_number < 0 else f"round {round_number + 1} of {rounds}"
            print(f"{note}: {name}: {value:.1f} tok/s", file=sys.stderr, flush=True)
            if round_number >= 0:
                series[name].samples.append(value)
    setup = {
        "model": llm.source.name,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "tokens": f"{PROMPT_TOKENS} in, {REPLY_TOKENS} out, greedy, time of the whole request",
        "rounds": f"{rounds}, cases taking turns, after one to warm up",
    }
    text = report.write(Path(out), "cpu-cpu", "neper on a CPU", setup, list(series.values()), _ratios(series))
    print(text, end="")


def _ratios(series: dict[str, Series]) -> list[Ratio]:
    base, one, one_k, eight, eight_k = series.values()
    ratios = [
        _at_least("neper 1 request / transformers 1 request", one, base, 1.3),
        _at_least("neper 8 requests / transformers 1 request", eight, base, 6.0),
        _at_least("neper 8 requests / neper 1 request", eight, one, 4.0),
    ]
    for name, off, on in (("1 request", one, one_k), ("8 requests", eight, eight_k)):
        # Pairs of neighbours in time: the machine's slow drift cancels.
        cost = statistics.median(a / b for a, b in zip(off.samples, on.samples, strict=True))
        bound = max(1.03, 1 + off.spread)
        ratios.append(
            Ratio(f"time with top_logprobs 20 / without, {name}", cost, "<= max(1.03, 1 + spread)", cost <= bound)
        )
    return ratios


def _at_least(name: str, a: Series, b: Series, bound: float) -> Ratio:
    value = statistics.median(x / y for x, y in zip(a.samples, b.samples, strict=True))
    return Ratio(name, value, f">= {bound}", value >= bound)


def _transformers(path: Path, dtype: torch.dtype, threads: int) -> Callable[[list[int]], float]:
    """Tokens per second of transformers `generate` for one prompt, on the same weights."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise StartupError("the comparison needs transformers: pip install 'neper[bench]'") from error
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)

    def measure(prompt: list[int]) -> float:
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        with torch.inference_mode():
            reply = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=REPLY_TOKENS,
                min_new_tokens=REPLY_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        assert reply.shape[1] == PROMPT_TOKENS + REPLY_TOKENS
        return REPLY_TOKENS / seconds

    return measure
