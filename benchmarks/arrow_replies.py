"""Scores of a long prompt as JSON and as Arrow: bytes of the reply, and CPU time of the API process.

python -m benchmarks.arrow_replies --out bench/results
"""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from pyarrow import ipc

from neper.bench.http_server import Server, serving
from neper.bench.report import Column, Report, Series, Table, at_least, conditions, pairs, publish, turns
from neper.config import DEFAULT_MODEL
from neper.errors import NeperError
from neper.guarded import guarded
from neper.progress import ProgressLine
from neper.server.transport.accept import ARROW, JSON

BOUND = 10.0
IDLE_SECONDS = 5.0
FORMS = {"JSON": JSON, "Arrow": ARROW}
# Of natural text, whose lists look like those of users.
TEXTS = ("README.md", "ARCHITECTURE.md", "docs/api.md", "docs/library.md", "docs/deploying.md")


class Cost(NamedTuple):
    """A reply's bytes, and CPU seconds of the API process beyond what it takes when idle."""

    size: float
    seconds: float


def post(server: Server, path: str, body: Any, accept: bytes = JSON) -> bytes:
    headers = {"Content-Type": "application/json", "Accept": accept.decode()}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request("POST", path, msgspec.json.encode(body), headers)
        response = connection.getresponse()
        data = response.read()
    if response.status != 200:
        raise NeperError(f"arrow_replies: {path} was answered with {response.status}: {data[:500].decode()}")
    return data


def cpu_seconds(pid: int) -> float:
    """CPU time of the threads of a process, in nanoseconds' steps: a reply takes few ticks."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return 1e-9 * sum(int(task.read_text(encoding="utf-8").split()[0]) for task in tasks)


def busy(server: Server, work: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds of the API process, and wall seconds, of some work."""
    start, before = time.monotonic(), cpu_seconds(server.pid)
    work()
    return cpu_seconds(server.pid) - before, time.monotonic() - start


def measure(server: Server, prompt: list[int], top_k: int, accept: bytes) -> Cost:
    """The cost of one reply, which must have all entries."""
    replies: list[bytes] = []
    body = {"prompt": prompt, "max_tokens": 0, "prompt_logprobs": top_k}
    idle, pause = busy(server, lambda: time.sleep(IDLE_SECONDS))
    cpu, seconds = busy(server, lambda: replies.append(post(server, "/v1/completions", body, accept)))
    [data] = replies
    if accept == ARROW:
        listed = ipc.open_stream(data).read_all()["top_ids"].combine_chunks().value_lengths().to_pylist()
    else:
        entries = msgspec.json.decode(data)["choices"][0]["prompt_logprobs"]
        # A token that is one of its own alternatives has one entry.
        listed = [entry and min(top_k, len(entry)) for entry in entries]
    if listed != [None, *[top_k] * (len(prompt) - 1)]:
        raise NeperError("arrow_replies: a reply lacks entries")
    return Cost(len(data), cpu - idle * seconds / pause)


def run(out: str | None, model: str, tokens: int, top_k: int, rounds: int) -> None:
    """Measure, print the tables, and write `arrow-cpu.json` and `.md` into the directory `out`."""
    root = Path(__file__).parent.parent
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in TEXTS)
    costs = {name: (Series(f"{name}: bytes", "B"), Series(f"{name}: CPU", "ms")) for name in FORMS}
    arguments = [model, "--max-logprobs", str(top_k), "--max-model-len", str(tokens + 16), "--max-num-seqs", "2"]
    with ProgressLine(sys.stderr) as progress, serving([*arguments, "--no-prefix-caching"]) as server:
        prompt = msgspec.json.decode(post(server, "/tokenize", {"prompt": text}))["tokens"][:tokens]
        for done, (name, counts, turn) in enumerate(turns(FORMS, rounds)):
            progress(done, 2 * (rounds + 1), f"{name}, {turn}")
            cost = measure(server, prompt, top_k, FORMS[name])
            if counts:
                costs[name][0].samples.append(cost.size)
                costs[name][1].samples.append(1e3 * cost.seconds)
    rows = [[name, size.median, cpu.median] for name, (size, cpu) in costs.items()]
    sizes = pairs(*(costs[name][0].samples for name in FORMS)).median
    seconds = pairs(*(costs[name][1].samples for name in FORMS)).median
    report = Report(
        title=f"Scores of a prompt of {len(prompt)} tokens with {top_k} alternatives, as JSON and as Arrow",
        environment={"model": model, "rounds": rounds} | conditions(),
        tables=[Table("", [Column("form"), Column("bytes", "B", "{:,.0f}"), Column("CPU, ms", "ms", "{:.1f}")], rows)],
        figures=[
            at_least("bytes, JSON / Arrow", sizes, BOUND),
            at_least("CPU of the API process, JSON / Arrow", seconds, BOUND),
        ],
        notes=[],
        series=[series for pair in costs.values() for series in pair],
    )
    publish(report, out, "arrow-cpu")


@guarded
def main(
    model: Annotated[str, typer.Option("--model", help="A model as `neper serve` takes it.")] = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of the prompt.")] = 4096,
    top_k: Annotated[int, typer.Option("--top-k", help="Alternatives per token.")] = 100,
    rounds: Annotated[int, typer.Option("--rounds", help="Replies of each form.")] = 5,
    out: Annotated[str | None, typer.Option("--out", help="Directory for the JSON and Markdown results.")] = None,
) -> None:
    """The cost of the scores of a long prompt in the API process, as JSON and as Arrow."""
    run(out, model, tokens, top_k, rounds)


if __name__ == "__main__":
    typer.run(main)
