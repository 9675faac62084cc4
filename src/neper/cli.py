"""The `neper` command. Defaults come from config.py; whatever is heavy is imported by the command that needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

import neper
from neper.config import EngineConfig, LineEngineConfig, ServerConfig, WatchConfig
from neper.errors import NeperError, StartupError
from neper.options import with_options

INTERRUPTED = 130
MAX_STDIN = 16 * 2**20
READER_GONE = 141

# Plain help (rich_markup_mode None): it reads the same on a terminal, in a pipe and in docs/cli.md.
_SETTINGS: dict[str, Any] = {"rich_markup_mode": None, "no_args_is_help": True, "add_completion": False}
app = typer.Typer(name="neper", pretty_exceptions_enable=False, **_SETTINGS)
bench = typer.Typer(name="bench", help="Measure neper on this machine.", **_SETTINGS)
app.add_typer(bench)

# Options of more than one benchmark.
_Model = Annotated[
    str | None, typer.Option("--model", help="A model as `neper serve` takes it. On a CPU the default model.")
]
_Device = Annotated[str | None, typer.Option("--device", help="Device: cpu or cuda. Default: cuda where there is one.")]
_Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32 or bfloat16. Default: bfloat16 where the device is fast at it.")
]


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what can go wrong into one line on stderr and an exit code."""

    @functools.wraps(command)
    def guard(*args: Any, **kwargs: Any) -> None:
        try:
            if not _open_standard_streams() and command.__name__ != "serve":
                raise StartupError("standard output is closed: there is nowhere to write to")
            command(*args, **kwargs)
            sys.stdout.flush()
        except NeperError as error:
            _fail(str(error))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _drop_stdout()
            raise typer.Exit(READER_GONE) from None
        except OSError as error:
            _drop_stdout()
            _fail(f"cannot write: {error.strerror or error}" if error.filename is None else f"{error}")

    return guard


def _fail(message: str) -> NoReturn:
    """One line on stderr, and the exit code of errors."""
    with contextlib.suppress(OSError):  # stderr may be full as well
        line, mark, log = message.partition(":\n")  # the last lines of another program's log stay lines
        typer.echo(f"neper: error: {' '.join(line.split())}{mark}{log}", err=True)
    raise typer.Exit(1) from None


def _drop_stdout() -> None:
    """Drop buffered output: it would fail again, noisily, when the interpreter closes stdout."""
    if sys.stdout is sys.stderr:  # `neper engine` writes to a descriptor of its own
        return
    with contextlib.suppress(OSError, ValueError):  # a test's stdout has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> bool:
    """Give a process that was started without one of its standard streams an empty one. False = there is no stdout.

    The next file or socket would be opened in its place, and be written to by whoever prints.
    """
    had_stdout = sys.stdout is not None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the whole process)
    return had_stdout


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
    neper engine MODEL                 an engine for other programs, on standard input and output
    neper doctor                       what this machine offers and what neper would use

    \b
    Exit codes: 0 done, 1 an error (one line on stderr says which), 2 wrong usage,
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

    With --engine-command an engine of someone else's computes, which speaks the T/LP line protocol on its standard
    input and output; the options of neper's own engine then mean nothing.

    Ctrl-C, SIGTERM or SIGHUP stops it: running requests are finished first, for at most --drain-timeout seconds; a
    second Ctrl-C ends at once.
    """
    from neper.server.run import serve as run

    if line.engine_command is not None and model != EngineConfig.model:
        raise StartupError(f"give a model ({model}) or --engine-command, not both")
    raise typer.Exit(run(dataclasses.replace(engine, model=model), line, server, watch))


@app.command()
@guarded
@with_options(only=frozenset({"model", "device", "dtype", "max_model_len", "kv_cache_memory", "num_threads"}))
def chat(
    text: Annotated[str, typer.Argument(help="What to say to the model; - reads it from standard input.")],
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
    """Answer once, in this process, and show how sure the model was of every token.

    \b
    Examples:
      neper chat "What is the capital of France?"
      neper chat "What is the capital of France?" --top 5
      git diff | neper chat - --system "Summarise this change." --plain

    On a terminal each token is shaded by its probability; --top adds a table of alternatives. In a pipe, with
    NO_COLOR or with --plain, there is one line a token instead: the token as a JSON string, its logprob (natural
    log), its probability, then each alternative with its probability, separated by tabs; after an empty line
    comes the reply as text. The first line names the columns.
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

    What a session looks like; < is written to its standard input, > is read from its standard output:

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
    may come, and exactly those that LP lists). STOP a ends it early; DONE or ERR is its last line. PP tells how much of
    a long prompt was read. With --max-num-seqs 1 there are no names, and no #a: requests run one after the other.

    QUIT or the end of standard input ends the engine; what runs is dropped. Its log is on standard error.
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
    """Say what neper finds on this machine, what it would use, and why.

    Loads no model. The exit code is 1 if something that is needed is missing.
    """
    from neper.doctor import examine, render, render_json

    report = examine()
    typer.echo(render_json(report) if json else render(report))
    raise typer.Exit(0 if report.healthy else 1)


@bench.callback()
def bench_root() -> None:
    """Measure neper on this machine."""


@bench.command()
@guarded
def cpu(
    out: Annotated[str, typer.Option("--out", help="Directory for the JSON and Markdown results.")] = "bench/results",
) -> None:
    """Tokens per second on the CPU with and without logprobs, interleaved in one run.

    \b
    Example:
      neper bench cpu --out results
    """
    from neper.bench.cpu import run

    run(out)


@bench.command()
@guarded
def kernels(
    out: Annotated[
        str | None, typer.Option("--out", help="Directory for kernels-<card>.json and .md; without it, print only.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="The GPU: cuda or cuda:N.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test: fewer cases, fewer rounds.")] = False,
) -> None:
    """Device time of logprobs on this GPU, beside torch's.

    \b
    Examples:
      neper bench kernels
      neper bench kernels --out results
      neper bench kernels --quick

    Scores random logits (R rows of V ids; logprob and rank of a token, and the k best ids) with neper's kernels, with
    log_softmax + topk, and with logsumexp + topk. First neper's results are checked against plain torch on the CPU:
    a wrong one ends the run with an error. Then a CUDA graph of about 50 calls is replayed, the implementations taking
    turns; a time is that of one call, with the logits in the L2 (warm) and not (cold). The spread is how far
    repetitions of the same thing lie apart.

    "of copy" is the speed at which the logits are read, as a fraction of what a copy on the device moves. Further
    tables: rows with sets of ids, and scoring on the host after copying whole rows there. The bounds are those of an
    H200.

    Takes some minutes. Progress is on stderr.
    """
    from neper.bench.kernels import run

    run(out, device=device, quick=quick)


@bench.command("engine")
@guarded
def bench_engine(
    model: _Model = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", help="Random weights in a real model's shape: qwen3-4b (default on a GPU), qwen3-0.6b."
        ),
    ] = None,
    device: _Device = None,
    dtype: _Dtype = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", help="Directory for engine-<card>-<model>.json, .md, .png, .svg; without it, print only."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Batches of each case. Default: 5; 2 with --quick.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", help="Requests at a time. Default: 1,8,32,64; 1,8 with --quick.")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option("--parts", help="Some of matrix,mixed,floor,prompt,host. Default: all of them."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", min=0, help="Seconds after which nothing new is begun; the rest is left out."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test: few cases, short replies.")] = False,
) -> None:
    """What logprobs cost a whole engine, and how fast its decode steps are.

    \b
    Examples:
      neper bench engine --out results
      neper bench engine --parts matrix,floor --concurrency 1,32
      neper bench engine --device cpu --quick
      neper bench engine --model ./my-model --time-limit 300 --out results

    Batches of requests with 128 random tokens in and 256 out, whose cases take turns, a batch each a round. A figure is
    a ratio within this run, and its bound holds when it is at most the bound or what repetitions of one case differ by
    (A / A). TPOT is the time from one decode step's results to the next one's, without the prefill.

    \b
    matrix  no scores, 0, 1, 5 and 20 alternatives at each concurrency
    mixed   one of 8, and of 32, asks for 20: what the others notice
    floor   a decode step beside reading what it must at a copy's speed
    prompt  scored prompts beside plain ones, and their memory
    host    the matrix where whole rows are copied and scanned; it is slow

    In the matrix, two rows are sampled. Floor: all weights, and the keys and values of the contexts. Replies of the
    host's matrix are as short as they must be.

    Takes about seven minutes on a large GPU. Progress is on stderr. What was measured is written after each part, and
    on Ctrl-C as well.
    """
    from neper.bench.engine import run
    from neper.bench.engine_cases import PARTS

    run(
        out,
        model=model,
        shape=shape,
        device=device,
        dtype=dtype,
        rounds=rounds,
        concurrency=_sizes(concurrency) if concurrency is not None else None,
        parts=tuple(part.strip() for part in parts.split(",")) if parts is not None else PARTS,
        quick=quick,
        time_limit=time_limit,
    )


@bench.command("http")
@guarded
def bench_http(
    model: _Model = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", help="Random weights in a real model's shape: qwen3-0.6b (default on a GPU), qwen3-4b."
        ),
    ] = None,
    device: _Device = None,
    dtype: _Dtype = None,
    num_threads: Annotated[
        int | None, typer.Option("--num-threads", min=1, help="CPU threads of the engine. Default: one a core.")
    ] = None,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Requests at a time.")] = 64,
    reply: Annotated[
        int | None, typer.Option("--reply", min=1, help="Tokens of each reply. Default: 128 on a CPU, 1024 on a GPU.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Batches of each case.")] = 5,
    out: Annotated[
        str | None,
        typer.Option("--out", help="Directory for http-<card>[-<model>].json and .md; without it, print only."),
    ] = None,
) -> None:
    """What logprobs cost over HTTP, and what requests cost that are refused.

    \b
    Examples:
      neper bench http --out results
      neper bench http --streams 8 --reply 32 --rounds 1
      neper bench http --shape qwen3-0.6b --device cuda --out results

    Starts `neper serve` and sends it batches of streamed chat completions whose cases take turns, a batch each a round:
    without logprobs, with 0 and with 20 alternatives, without logprobs while 200 more requests arrive that the server
    has no room for, and without logprobs again. Every reply is checked. A figure is a ratio within this run, and its
    bound holds when it is at least the bound or what repetitions of one case differ by (A / A). The CPU time of the
    API process, without its engine, is told a token.

    Takes about ten minutes on a small CPU. Progress is on stderr.
    """
    from neper.bench.http import run

    run(
        out,
        model=model,
        shape=shape,
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        streams=streams,
        reply=reply,
        rounds=rounds,
    )


def _read_stdin() -> str:
    """All of standard input; bytes that are no text in its encoding become U+FFFD."""
    data = sys.stdin.buffer.read(MAX_STDIN + 1)
    if len(data) > MAX_STDIN:
        raise StartupError(f"standard input has more than {MAX_STDIN} bytes, which no model reads at once")
    return data.decode(sys.stdin.encoding or "utf-8", "replace").replace("\r\n", "\n")


def _unicode(argument: str) -> str:
    """An argument of the command line; its bytes that are no text become U+FFFD."""
    return os.fsencode(argument).decode("utf-8", "replace")


def _sizes(text: str) -> tuple[int, ...]:
    """Ascending numbers from 1, from a list with commas."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise typer.BadParameter(
            f"{text!r} is no list of numbers from 1; write for example 1,8,32", param_hint="--concurrency"
        )
    return tuple(sizes)


def main() -> None:
    """Entry point of the `neper` command."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:  # a text of help that could not be written; commands are `guarded`
        _drop_stdout()
        with contextlib.suppress(OSError):
            print(f"neper: error: cannot write: {error.strerror}", file=sys.stderr)
        sys.exit(1)
