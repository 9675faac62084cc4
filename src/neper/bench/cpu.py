"""`neper bench cpu`: tokens per second on the CPU against transformers `generate`, and the cost of logprobs.

Everything runs in this process on the same weights, dtype and threads. Prompts are fresh in every round, so no case
profits from the prefix cache.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from neper.bench import report
from neper.bench.report import Column, Figure, Report, Series, Table, at_least, pairs
from neper.config import DEFAULT_MODEL
from neper.engine.llm import LLM
from neper.errors import StartupError
from neper.types import LogprobParams, SamplingParams

PROMPT_TOKENS = 128
REPLY_TOKENS = 128
COLUMNS = [
    Column("case"),
    Column("median", "tok/s", "{:.1f} tok/s"),
    Column("spread", "", "±{:.1%}"),
    Column("samples"),
]


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
        "neper, 1 request": partial(neper, 1, None),
        "neper, 1 request, top_logprobs 20": partial(neper, 1, 20),
        "neper, 8 requests": partial(neper, 8, None),
        "neper, 8 requests, top_logprobs 20": partial(neper, 8, 20),
    }
    series = {name: Series(name, "tok/s") for name in cases}
    for name, counts, number in report.turns(cases, rounds):
        value = cases[name]()
        print(f"{number}: {name}: {value:.1f} tok/s", file=sys.stderr, flush=True)
        if counts:
            series[name].samples.append(value)
    environment = {
        "model": llm.source.name,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "tokens": f"{PROMPT_TOKENS} in, {REPLY_TOKENS} out, greedy, time of the whole request",
        "rounds": f"{rounds}, cases taking turns, after one to warm up",
    } | report.conditions()
    found = list(series.values())
    table = Table("", COLUMNS, [[s.name, s.median, s.spread, len(s.samples)] for s in found])
    report.publish(Report("neper on a CPU", environment, [table], figures(*found), [], found), out, "cpu-cpu")


def figures(base: Series, one: Series, one_k: Series, eight: Series, eight_k: Series) -> list[Figure]:
    """The ratios of the five cases, with their bounds."""
    ratios = [
        at_least(name, pairs(a.samples, b.samples).median, bound)
        for name, a, b, bound in (
            ("neper 1 request / transformers 1 request", one, base, 1.3),
            ("neper 8 requests / transformers 1 request", eight, base, 6.0),
            ("neper 8 requests / neper 1 request", eight, one, 4.0),
        )
    ]
    for name, off, on in (("1 request", one, one_k), ("8 requests", eight, eight_k)):
        cost, bound = pairs(off.samples, on.samples).median, max(1.03, 1 + off.spread)
        name = f"time with top_logprobs 20 / without, {name}"
        ratios.append(Figure(name, cost, "<= max(1.03, 1 + spread)", cost <= bound))
    return ratios


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
