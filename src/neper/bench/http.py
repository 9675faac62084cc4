"""`neper bench http`: what logprobs cost over HTTP, and what requests cost that are refused.

The server is `neper serve` in processes of its own; the load comes from this process. The cases take turns: each round
sends one batch of each, without logprobs first and last.
"""

from __future__ import annotations

import contextlib
import random
import string
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson
import torch

from neper.bench import http_load, http_model, http_report
from neper.bench.http_load import Batch
from neper.bench.http_report import FLOOD, WAYS, Findings, Way
from neper.bench.http_server import Server, serving
from neper.bench.kernel_report import slug
from neper.config import DEFAULT_MODEL, EngineConfig
from neper.engine import settings
from neper.errors import NeperError, StartupError

DEFAULT_SHAPE = "qwen3-0.6b"
"""Where there is a GPU and no model was named."""
REPLY_TOKENS = {"cpu": 128, "cuda": 1024}
PROMPT_LETTERS = 64
WAKING_TOKENS = 32


def run(
    out: str | None,
    *,
    model: str | None = None,
    shape: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    num_threads: int | None = None,
    streams: int = 64,
    reply: int | None = None,
    rounds: int = 5,
) -> None:
    """Measure, print the tables, and write `http-<card>[-<model>].json` and `.md` into the directory `out`.

    Args:
        out: None = print only.
        model, shape: one of both at most; None = the default model on a CPU, `DEFAULT_SHAPE` on a GPU.
        streams: requests at a time, which is also what the server takes. reply: tokens of each; None = REPLY_TOKENS.

    Raises:
        StartupError: arguments that do not go together, or the server did not start.
        NeperError: a reply is not what was asked for.
    """
    if model is not None and shape is not None:
        raise StartupError("bench http: give --model or --shape, not both")
    config = EngineConfig(device=device, dtype=dtype, num_threads=num_threads)
    target = settings.choose_device(config.device)
    kind = getattr(torch, config.dtype) if config.dtype else settings.choose_dtype(target)
    if model is None and shape is None and target.type == "cuda":
        shape = DEFAULT_SHAPE
    reply = reply or REPLY_TOKENS[target.type]
    card = torch.cuda.get_device_name(target) if target.type == "cuda" else "CPU"
    name = shape or model or DEFAULT_MODEL
    arguments = ["--device", str(target), "--dtype", str(kind).removeprefix("torch."), "--served-model-name", name]
    # No queue: as many requests as streams are computed, and what comes beyond them is refused.
    arguments += ["--max-num-seqs", str(streams), "--max-waiting", "0"]
    if num_threads is not None:
        arguments += ["--num-threads", str(num_threads)]
    # Greedy, random weights say one token again and again, with the same alternatives.
    temperature = 1.0 if shape else 0.0
    found = Findings(streams, reply)
    with _model(model or DEFAULT_MODEL, shape, kind) as directory:
        _say(f"starting the server with {name}")
        with serving([directory, *arguments]) as server:
            try:
                _measure(server, name, temperature, found, rounds)
            except NeperError as error:
                raise NeperError(f"{error}\n{server.last_lines()}".rstrip()) from error
    setup = {
        "model": f"{name}{', random weights' if shape else ''}, {str(kind).removeprefix('torch.')}",
        "device": card,
        "server": f"neper serve {' '.join(arguments)}",
        "requests": (
            f"{streams} streamed chat completions at once, {reply} tokens each, temperature {temperature:g}, each on a "
            f"connection of its own; prompts of {PROMPT_LETTERS} random letters, none of them twice"
        ),
        "rounds": f"{rounds}, cases taking turns, after one to warm up; / off: median of the rounds",
    }
    report = http_report.report(f"neper over HTTP on {card}, {name}", setup, found)
    if out is not None:
        suffix = "" if name == DEFAULT_MODEL else f"-{slug(name)}"
        report.save(Path(out), f"http-{slug(card)}{suffix}")
    print(report.markdown(), end="")


@contextlib.contextmanager
def _model(model: str, shape: str | None, dtype: torch.dtype) -> Iterator[str]:
    """What `neper serve` is to load; a shape lies in a directory that is gone afterwards."""
    if shape is None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="neper-") as directory:
        _say(f"writing random weights in the shape {shape}")
        http_model.write(shape, Path(directory), dtype=dtype)
        yield directory


def _measure(server: Server, name: str, temperature: float, found: Findings, rounds: int) -> None:
    letters = random.Random(0)

    def body(way: Way, tokens: int) -> bytes:
        prompt = "".join(letters.choices(string.ascii_lowercase, k=PROMPT_LETTERS))
        fields = {
            "model": name,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "skip_special_tokens": False,  # so that every token has an entry
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if way.top_k is not None:
            fields |= {"logprobs": True, "top_logprobs": way.top_k}
        return orjson.dumps(fields)

    for number in range(-1, rounds):  # round -1 warms up
        for way in WAYS:
            # Replies were checked since the last batch: whatever has slowed down in that pause is to be awake again.
            http_load.run(server.port, [body(way, WAKING_TOKENS) for _ in range(found.streams)])
            bodies = [body(way, found.reply) for _ in range(found.streams)]
            beyond = [body(way, 1) for _ in range(FLOOD if way.flooded else 0)]
            before = server.cpu_seconds()
            batch = http_load.run(server.port, bodies, beyond)
            after = server.cpu_seconds()
            _check(batch, way, found.reply)
            seconds = None if before is None or after is None else after - before
            note = "warm-up" if number < 0 else f"round {number + 1} of {rounds}"
            _say(f"{note}: {way.name}: {found.rate(batch):.1f} tok/s{_cpu(seconds)}")
            if number >= 0:
                found.add(way, batch, seconds)


def _check(batch: Batch, way: Way, tokens: int) -> None:
    for reply in batch.replies:
        http_load.check_stream(reply, tokens=tokens, top_k=way.top_k)


def _cpu(seconds: float | None) -> str:
    return "" if seconds is None else f", {seconds:.2f} s of CPU in the API process"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
