"""`neper bench http`: the cost of logprobs over HTTP, and of requests that are refused.

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

from neper.bench import http_load, http_model, http_report
from neper.bench.http_report import FLOOD, WAYS, Findings, Way
from neper.bench.http_server import Server, serving
from neper.bench.report import publish, slug, turns
from neper.bench.subject import Subject
from neper.config import DEFAULT_MODEL
from neper.errors import NeperError

DEFAULT_SHAPE = "qwen3-0.6b"
REPLY_TOKENS = {"cpu": 128, "cuda": 1024}
PROMPT_LETTERS = 64
WAKING_TOKENS = 32


def run(
    chosen: Subject,
    out: str | None,
    *,
    num_threads: int | None = None,
    streams: int = 64,
    reply: int | None = None,
    rounds: int = 5,
) -> None:
    """Measure, print the tables, and write `http-<card>[-<model>].json` and `.md` into the directory `out`.

    Args:
        out: None = print only.
        streams: requests at a time; the server takes no more. reply: tokens of each; None = REPLY_TOKENS.

    Raises:
        StartupError: arguments that do not go together, or the server did not start.
        NeperError: a reply does not fit its request.
    """
    reply = reply or REPLY_TOKENS[chosen.device.type]
    name = chosen.shape or chosen.model or DEFAULT_MODEL
    arguments = ["--device", str(chosen.device), "--dtype", chosen.dtype_name, "--served-model-name", name]
    # No queue: the server computes as many requests as there are streams, and refuses more.
    arguments += ["--max-num-seqs", str(streams), "--max-waiting", "0"]
    if num_threads is not None:
        arguments += ["--num-threads", str(num_threads)]
    # Greedy, random weights say one token again and again, with the same alternatives.
    temperature = 1.0 if chosen.shape else 0.0
    found = Findings(streams, reply)
    with _model(chosen) as directory:
        _say(f"starting the server with {name}")
        with serving([directory, *arguments]) as server:
            try:
                _measure(server, name, temperature, found, rounds)
            except NeperError as error:
                raise NeperError(f"{error}\n{server.last_lines()}".rstrip()) from error
    environment = {
        "model": chosen.describe(name),
        "device": chosen.card,
        "server": f"neper serve {' '.join(arguments)}",
        "requests": (
            f"{streams} streamed chat completions at once, {reply} tokens each, temperature {temperature:g}, each on a "
            f"connection of its own; prompts of {PROMPT_LETTERS} random letters, none of them twice"
        ),
        "rounds": f"{rounds}, cases taking turns, after one to warm up; / off: median of the rounds",
    }
    report = http_report.report(f"neper over HTTP on {chosen.card}, {name}", environment, found)
    publish(report, out, f"http-{slug(chosen.card)}" + ("" if name == DEFAULT_MODEL else f"-{slug(name)}"))


@contextlib.contextmanager
def _model(chosen: Subject) -> Iterator[str]:
    """The model for `neper serve`. A shape lies in a directory that is gone afterwards."""
    if chosen.shape is None:
        yield chosen.model or DEFAULT_MODEL
        return
    with tempfile.TemporaryDirectory(prefix="neper-") as directory:
        _say(f"writing random weights in the shape {chosen.shape}")
        http_model.write(chosen.shape, Path(directory), dtype=chosen.dtype)
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

    for way, counts, turn in turns(WAYS, rounds):
        # Checking the last batch's replies was a pause, in which the processor may have slowed down: wake it up.
        http_load.run(server.port, [body(way, WAKING_TOKENS) for _ in range(found.streams)])
        bodies = [body(way, found.reply) for _ in range(found.streams)]
        beyond = [body(way, 1) for _ in range(FLOOD if way.flooded else 0)]
        before = server.cpu_seconds()
        batch = http_load.run(server.port, bodies, beyond)
        after = server.cpu_seconds()
        for reply in batch.replies:
            http_load.check_stream(reply, tokens=found.reply, top_k=way.top_k)
        seconds = None if before is None or after is None else after - before
        used = "" if seconds is None else f", {seconds:.2f} s of CPU in the API process"
        _say(f"{turn}: {way.name}: {found.rate(batch):.1f} tok/s{used}")
        if counts:
            found.add(way, batch, seconds)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
