"""Tokens per second of `neper score`, from file to file, beside those of the engine given the same tokens at once.

python -m benchmarks.score --model smollm2-135m --rows 300 --rounds 3
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from neper.config import DEFAULT_MODEL, EngineConfig, ScoreConfig
from neper.engine.remote.openmp import wait_briefly
from neper.guarded import guarded
from neper.score.run import run
from neper.types import LogprobParams, SamplingParams

BOUND = 0.9
WORDS = [
    "time",
    "person",
    "year",
    "way",
    "day",
    "thing",
    "man",
    "world",
    "life",
    "hand",
    "part",
    "child",
    "eye",
    "work",
]


def write_texts(path: Path, rows: int) -> list[str]:
    """A file of texts of 10 to 40 words, and the texts."""
    chosen = random.Random(rows)
    texts = [" ".join(chosen.choices(WORDS, k=chosen.randint(10, 40))) for _ in range(rows)]
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))
    return texts


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """The time that it takes, by the clock and of all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


@guarded
def main(
    model: Annotated[str, typer.Option("--model")] = DEFAULT_MODEL,
    device: Annotated[str | None, typer.Option("--device")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype")] = None,
    num_threads: Annotated[int | None, typer.Option("--num-threads", min=1)] = None,
    rows: Annotated[int, typer.Option("--rows", min=1)] = 300,
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 3,
    top: Annotated[int | None, typer.Option("--top", min=0)] = None,
) -> None:
    """Take turns: the engine alone, then the command's run without the loading of the model."""
    wait_briefly()
    from neper.engine.llm import LLM

    engine = EngineConfig(model=model, device=device, dtype=dtype, num_threads=num_threads)
    llm = LLM(**dataclasses.asdict(engine))
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "texts.jsonl", Path(folder) / "out.jsonl"
        ids = [llm.tokenizer.encode(text) for text in write_texts(source, rows)]
        params = SamplingParams(max_tokens=0), LogprobParams(prompt_top_k=top or 0)

        def score() -> None:
            run(source, out, None, "", ScoreConfig(top=top), engine, lambda engine: llm)
            out.unlink()

        llm.generate(ids[:8], *params)
        samples = [(*seconds(lambda: llm.generate(ids, *params)), *seconds(score)) for _ in range(rounds)]
    tokens = sum(map(len, ids))
    alone, alone_cpu, scored, scored_cpu = (statistics.median(column) for column in zip(*samples, strict=True))
    print(f"{rows} rows, {tokens} tokens: engine {tokens / alone:.0f} tokens/s, neper score {tokens / scored:.0f}")
    ratios = [sample[0] / sample[2] for sample in samples]
    print(f"ratio {statistics.median(ratios):.3f} (bound {BOUND}), of CPU times {alone_cpu / scored_cpu:.3f}")
    print("ratio of each round " + ", ".join(f"{ratio:.3f}" for ratio in ratios))


if __name__ == "__main__":
    typer.run(main)
