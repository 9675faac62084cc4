"""The commands of `neper bench`: their options and help. Each imports its benchmark when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from neper.guarded import PLAIN_HELP, guarded

bench = typer.Typer(name="bench", help="Measure neper on this machine.", **PLAIN_HELP)

# Options of more than one benchmark.
_Model = Annotated[
    str | None, typer.Option("--model", help="A model as `neper serve` takes it. On a CPU the default model.")
]
_Device = Annotated[str | None, typer.Option("--device", help="Device: cpu or cuda. Default: cuda where there is one.")]
_Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32 or bfloat16. Default: bfloat16 where the device is fast at it.")
]
_Out = Annotated[str | None, typer.Option("--out", help="Directory for the files of results; without it, print only.")]
_Shape = Annotated[
    str | None,
    typer.Option("--shape", help="Random weights in a real model's shape: qwen3-4b (default on a GPU), qwen3-0.6b."),
]
_Rounds = Annotated[
    int | None, typer.Option("--rounds", min=1, help="Batches of each case. Default: 5; 2 with --quick.")
]
_Quick = Annotated[bool, typer.Option("--quick", help="A smoke test: fewer cases and rounds.")]


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
    out: _Out = None,
    device: Annotated[str, typer.Option("--device", help="The GPU: cuda or cuda:N.")] = "cuda",
    quick: _Quick = False,
) -> None:
    """Device time of logprobs on this GPU, beside torch's.

    \b
    Examples:
      neper bench kernels
      neper bench kernels --out results
      neper bench kernels --quick

    Scores random logits (R rows of V ids; logprob and rank of a token, and the k best ids) with neper's kernels, with
    log_softmax + topk, and with logsumexp + topk. First neper's results are checked against plain torch on the CPU:
    a wrong one ends the run with an error. Then a CUDA graph of about 50 calls is replayed, and the implementations
    take turns. A time is that of one call, with the logits in the L2 (warm) or not (cold). The spread is the distance
    between repetitions of the same measurement.

    "of copy" is the speed of reading the logits, as a fraction of the speed of a copy on the device. Further tables:
    rows with sets of ids, and scoring on the host after copying whole rows there. The bounds are those of an H200.

    Takes some minutes. Progress is on stderr.
    """
    from neper.bench.kernels import run

    run(out, device=device, quick=quick)


@bench.command("engine")
@guarded
def bench_engine(
    model: _Model = None,
    shape: _Shape = None,
    device: _Device = None,
    dtype: _Dtype = None,
    out: _Out = None,
    rounds: _Rounds = None,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", help="Requests at a time. Default: 1,8,32,64; 1,8 with --quick.")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option("--parts", help="Some of matrix,mixed,floor,lengths,prompt,host. Default: all of them."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", min=0, help="Seconds after which nothing new is begun; the rest is left out."),
    ] = None,
    quick: _Quick = False,
) -> None:
    """Measure the cost of logprobs in a whole engine, and the speed of its decode steps.

    \b
    Examples:
      neper bench engine --out results
      neper bench engine --parts matrix,floor --concurrency 1,32
      neper bench engine --device cpu --quick
      neper bench engine --model ./my-model --time-limit 300 --out results

    Computes batches of requests with 128 random tokens in and 256 out. The cases take turns: one batch of each per
    round. A figure is a ratio within this run. It must be at most its bound, or 1 plus the difference between
    repetitions of one case (A / A). TPOT is the time from the results of one decode step to those of the next, without
    the prefill.

    \b
    matrix  no scores, 0, 1, 5 and 20 alternatives at each concurrency
    mixed   one request of 8, and of 32, asks for 20: the cost for the others
    floor   a decode step against the time to read its weights and cache
    lengths decode steps with long contexts, and with one long among short ones
    prompt  scored prompts against plain ones, and their memory
    host    the matrix with whole rows copied and scanned; it is slow

    In the matrix, two rows are sampled. The floor counts all weights, and the keys and values of the contexts, at the
    speed of a copy. The host's matrix has shorter replies.

    Takes about seven minutes on a large GPU. Progress is on stderr. The results are written after each part, and on
    Ctrl-C as well.
    """
    from neper.bench.engine import run
    from neper.bench.engine_cases import PARTS
    from neper.bench.subject import choose

    run(
        choose("bench engine", model=model, shape=shape, device=device, dtype=dtype),
        out,
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
        int | None, typer.Option("--num-threads", min=1, help="CPU threads of the engine. Default: one per core.")
    ] = None,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Requests at a time.")] = 64,
    reply: Annotated[
        int | None, typer.Option("--reply", min=1, help="Tokens of each reply. Default: 128 on a CPU, 1024 on a GPU.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Batches of each case.")] = 5,
    out: _Out = None,
) -> None:
    """Measure the cost of logprobs over HTTP, and that of refused requests.

    \b
    Examples:
      neper bench http --out results
      neper bench http --streams 8 --reply 32 --rounds 1
      neper bench http --shape qwen3-0.6b --device cuda --out results

    Starts `neper serve` and sends it batches of streamed chat completions. The cases take turns, one batch of each per
    round: without logprobs, with 0 and with 20 alternatives, without logprobs while 200 more requests arrive for which
    the server has no room, and without logprobs again. Every reply is checked. A figure is a ratio within this run. It
    must be at least its bound, or 1 less the difference between repetitions of one case (A / A). The CPU time of the
    API process, without its engine, is given per token.

    Takes about ten minutes on a small CPU. Progress is on stderr.
    """
    from neper.bench.http import DEFAULT_SHAPE, run
    from neper.bench.subject import choose

    subject = choose("bench http", model=model, shape=shape, device=device, dtype=dtype, default_shape=DEFAULT_SHAPE)
    run(subject, out, num_threads=num_threads, streams=streams, reply=reply, rounds=rounds)


@bench.command()
@guarded
def speculate(
    model: _Model = None,
    shape: _Shape = None,
    device: _Device = None,
    dtype: _Dtype = None,
    out: _Out = None,
    rounds: _Rounds = None,
    quick: _Quick = False,
) -> None:
    """Measure the speed of speculative decoding beside the same without drafts.

    \b
    Examples:
      neper bench speculate --out results
      neper bench speculate --shape qwen3-4b --device cuda --out results
      neper bench speculate --device cpu --quick

    A model computes one request at a time, with drafts by n-gram lookup: a reply that copies its prompt, and one with
    nothing to copy. At least 60 % of a copy must be accepted drafts. The bounds are those of the default model
    on a CPU.

    The replies of random weights cannot be looked up. So a shape is made to repeat its last token, and each step drafts
    three tokens that are right and a wrong one, for 1 and for 8 requests at a time. The model verifies them, so
    that each step brings four tokens. The bounds are those of qwen3-4b in bfloat16 on an H200.

    The cases take turns: one batch of each per round, without drafts, with drafts, and with drafts and 20 alternatives.
    A figure is a ratio within this run.

    Takes some minutes. Progress is on stderr.
    """
    from neper.bench.speculate import run
    from neper.bench.subject import choose

    subject = choose("bench speculate", model=model, shape=shape, device=device, dtype=dtype)
    run(subject, out, rounds=rounds, quick=quick)


def _sizes(text: str) -> tuple[int, ...]:
    """Ascending numbers from 1, read from a list with commas."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise typer.BadParameter(
            f"{text!r} is no list of numbers from 1; write for example 1,8,32", param_hint="--concurrency"
        )
    return tuple(sizes)
