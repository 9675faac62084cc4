"""The `neper` command. Defaults come from config.py. A command imports heavy modules itself, when it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import neper
from neper.bench.commands import bench
from neper.config import EngineConfig, LineEngineConfig, ScoreConfig, ServerConfig, WatchConfig
from neper.errors import StartupError
from neper.guarded import INTERRUPTED, PLAIN_HELP, drop_stdout, guarded
from neper.options import with_options

MAX_STDIN = 16 * 2**20

app = typer.Typer(name="neper", pretty_exceptions_enable=False, **PLAIN_HELP)
app.add_typer(bench)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"neper {neper.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM inference with exact, aligned token log-probabilities.

    \b
    neper serve                        an OpenAI-compatible server on http://127.0.0.1:8000
    neper chat "Name a colour."        one reply here, each token shaded by its probability
    neper score texts.jsonl            log-likelihoods of the texts in a file
    neper engine MODEL                 an engine for other programs, on standard input and output
    neper doctor                       what this machine offers and what neper would use

    \b
    Exit codes: 0 done, 1 an error (one line on stderr says which), 2 wrong usage, 3 some rows were not scored,
    130 interrupted with Ctrl-C, 141 the reader of a pipe went away.
    """


@app.command()
@guarded
@with_options(skip=frozenset({"model"}))
def serve(
    model: Annotated[
        str, typer.Argument(help="The embedded smollm2-135m, a directory, a .gguf file, or a hub id.")
    ] = EngineConfig.model,
    *,
    engine: EngineConfig,
    line: LineEngineConfig,
    watch: WatchConfig,
    server: ServerConfig,
) -> None:
    """Serve a model over HTTP, with the OpenAI API.

    \b
    Examples:
      neper serve
      neper serve ./my-model --port 9000 --max-model-len 4096
      neper serve model.gguf --host 0.0.0.0 --api-key-file key.txt --kv-cache-memory 2GiB
      neper serve --engine-command "./engine --serve model.bin" --tokenizer ./my-model

    With --engine-command another program computes. It speaks the T/LP line protocol on its standard input and output,
    and the options of neper's own engine have no effect.

    Ctrl-C, SIGTERM or SIGHUP stops the server. Running requests first get --drain-timeout seconds to finish. A second
    Ctrl-C ends at once.
    """
    from neper.server.run import serve as run

    if line.engine_command is not None and model != EngineConfig.model:
        raise StartupError(f"give a model ({model}) or --engine-command, not both")
    raise typer.Exit(run(dataclasses.replace(engine, model=model), line, server, watch))


@app.command()
@guarded
@with_options(only=frozenset({"model", "device", "dtype", "max_model_len", "kv_cache_memory", "num_threads"}))
def chat(
    text: Annotated[str, typer.Argument(help="Message to the model; - reads it from standard input.")],
    top: Annotated[int, typer.Option("--top", min=0, help="List this many alternatives of each token.")] = 0,
    system: Annotated[str | None, typer.Option("--system", help="System message before the text.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest reply in tokens.")] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes a reply at a temperature repeatable.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Numbers instead of shades, as in a pipe.")] = False,
    *,
    engine: EngineConfig,
) -> None:
    """Answer once, in this process, and show the probability of every token.

    \b
    Examples:
      neper chat "What is the capital of France?"
      neper chat "What is the capital of France?" --top 5
      git diff | neper chat - --system "Summarise this change." --plain

    On a terminal each token is shaded by its probability, and --top adds a table of alternatives. In a pipe, with
    NO_COLOR or with --plain, there is one line per token instead. Its columns are separated by tabs, and the first
    line names them: the token as a JSON string, its logprob (natural log), its probability, then each alternative
    with its probability. After an empty line comes the reply as text.
    """
    from neper.chat import chat as run
    from neper.engine.remote.openmp import wait_briefly
    from neper.types import SamplingParams

    wait_briefly()
    if not math.isfinite(temperature):
        raise typer.BadParameter(f"{temperature} is no temperature", param_hint="--temperature")
    run(
        dataclasses.replace(engine, max_num_seqs=1, max_logprobs=max(engine.max_logprobs, top)),
        _read_stdin() if text == "-" else _unicode(text),
        system=None if system is None else _unicode(system),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed),
        top=top,
        plain=plain,
    )


@app.command()
@guarded
@with_options(skip=frozenset({"max_logprobs", "speculative", "draft_tokens"}))
def score(
    file: Annotated[Path, typer.Argument(help="Rows to score: a .jsonl, .csv or .parquet file.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File of the scores; its ending says its form. Default: FILE with .scored in it."),
    ] = None,
    errors: Annotated[
        Path | None, typer.Option("--errors", help="File of the rows that failed. Default: OUT with .errors in it.")
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", help="Text before the names of the columns that are added.")] = "",
    *,
    config: ScoreConfig,
    engine: EngineConfig,
) -> None:
    """Score the rows of a file with a model, and write them with their scores.

    \b
    Examples:
      neper score texts.jsonl
      neper score texts.parquet --stride 512 --dtype float32 --out scores.parquet
      neper score questions.jsonl --mode candidates --normalize mean
      neper score rollouts.jsonl --mode reply --top 20 --model ./teacher

    \b
    $ cat texts.jsonl
    {"id": 1, "text": "The sky is blue."}
    $ neper score texts.jsonl
    1 rows scored: texts.scored.jsonl
    $ cat texts.scored.jsonl
    {"id": 1, "text": "The sky is blue.", "logprob": ..., "num_tokens": 4, "perplexity": ..., "bits_per_byte": ...}

    Columns that are added, by mode:

    \b
    text        logprob (of all scored tokens, natural log), num_tokens (those), perplexity, bits_per_byte
    candidates  best (its place, from 0), and lists with an entry per candidate: logprobs, num_tokens, probabilities
    reply       logprob, num_tokens, and the lists of --top
    --top K     token_ids, token_logprobs, and with K > 0 top_ids, top_logprobs: an entry per scored token

    A killed or interrupted run (Ctrl-C) goes on when the same command is run again: no row is lost or computed twice,
    but for those that were being computed. Until all rows are done, they are in OUT.part. OUT itself is never
    overwritten. Rows that cannot be scored are in the file of errors, by number and reason; the exit code is then 3.

    docs/scoring.md says how texts become tokens, and which of them are scored.
    """
    from neper.engine.remote.openmp import wait_briefly

    wait_briefly()
    from neper.score.run import run

    raise typer.Exit(run(file, out, errors, prefix, config, engine))


@app.command("engine")
@guarded
@with_options(skip=frozenset({"model"}))
def line_engine(
    model: Annotated[str, typer.Argument(help="smollm2-135m (embedded), a directory, a .gguf file, or a hub id.")],
    serve: Annotated[
        bool, typer.Option("--serve", help="Changes nothing; callers of other engines end their commands with it.")
    ] = False,
    *,
    engine: EngineConfig,
) -> None:
    """Run a model for another program, over lines of text on standard input and output (the T/LP protocol).

    \b
    Examples:
      neper engine ./my-model --max-num-seqs 1
      neper serve --engine-command "neper engine ./my-model" --tokenizer ./my-model

    Example of a session; < is written to its standard input, > is read from its standard output:

    \b
      > INFO engine=neper version=0.1.0 model=smollm2-135m
      > INFO vocab_size=49152 max_logprobs=20
      > READY 8192 stop slots=64
      < GEN a 2 temperature=0 logprobs=2 504,3575,282,4649,314
      > T 7042 #a
      > LP -0.2606183 7042:-0.2606183 260:-2.7453976 #a
      > T 30 #a
      > LP -0.38799384 30:-0.38799384 28:-1.6441145 #a
      > DONE 2 5 52.31 38.025 length 0 0 0 0 0 #a
      < QUIT

    A request is a name, the most tokens to generate, key=value options and the ids of the prompt. Options:
    temperature (0 or none: greedy), top_p, top_k, min_p, seed, penalty_repeat, penalty_freq, penalty_present,
    logprobs=K (an LP line after each T: the token's own logprob, then the K best), allowed=1,2,3 (the only ids that
    may come, and exactly those that LP lists). STOP a ends it early; DONE or ERR is its last line. PP tells the
    progress in a long prompt. With --max-num-seqs 1 there are no names, and no #a: requests run one after the other.

    QUIT or the end of standard input ends the engine, and drops running requests. Its log is on standard error.
    """
    from neper.engine.remote.openmp import wait_briefly

    wait_briefly()
    from neper.wire.speak import run

    raise typer.Exit(run(dataclasses.replace(engine, model=model)))


@app.command()
@guarded
def doctor(
    json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
) -> None:
    """Report what neper finds on this machine, what it would use, and why.

    Loads no model. The exit code is 1 if something necessary is missing.
    """
    from neper.doctor import examine, render, render_json

    report = examine()
    typer.echo(render_json(report) if json else render(report))
    raise typer.Exit(0 if report.healthy else 1)


def _read_stdin() -> str:
    """All of standard input. Bytes that are not text in its encoding become U+FFFD."""
    data = sys.stdin.buffer.read(MAX_STDIN + 1)
    if len(data) > MAX_STDIN:
        raise StartupError(f"standard input has more than {MAX_STDIN} bytes, which no model reads at once")
    return data.decode(sys.stdin.encoding or "utf-8", "replace").replace("\r\n", "\n")


def _unicode(argument: str) -> str:
    """An argument of the command line. Bytes that are not text become U+FFFD."""
    return os.fsencode(argument).decode("utf-8", "replace")


def main() -> None:
    """Entry point of the `neper` command."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:  # a text of help that could not be written; commands are `guarded`
        drop_stdout()
        with contextlib.suppress(OSError):
            print(f"neper: error: cannot write: {error.strerror}", file=sys.stderr)
        sys.exit(1)
