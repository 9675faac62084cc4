"""`neper bench http`: its client, its report, and real runs of a server with tiny models."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from tokenizers import Tokenizer as Backend
from typer.testing import CliRunner

from neper.bench import http, http_load, http_model, http_report
from neper.bench.http_load import Batch, Reply, check_stream
from neper.bench.http_report import FLOOD, FLOODED, OFF, OFF_AGAIN, SCORED, WAYS, Findings
from neper.bench.http_server import Server, serving
from neper.bench.report import markdown
from neper.bench.subject import choose
from neper.cli import app
from neper.errors import ModelLoadError, NeperError, StartupError
from neper.models import registry, shapes
from neper.models.shapes import SHAPES
from neper.models.source import resolve
from neper.text.tokenizer import Tokenizer
from tests.bench.small import SMALL
from tests.bench.test_engine_report import rows_of

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
CPU = torch.device("cpu")


@contextmanager
def answering(*answers: list[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """A server that gives each connection the next answer, in these pieces; yields its port and what it was sent."""
    waiting, received = list(answers), []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            pieces, head = waiting.pop(0), b""
            while not head.endswith(b"\r\n\r\n"):
                head += self.rfile.readline()
            length = re.search(rb"Content-Length: (\d+)", head)
            assert length is not None
            received.append(head + self.rfile.read(int(length[1])))
            for piece in pieces:
                self.wfile.write(piece)
                time.sleep(0.02)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1], received
        finally:
            server.shutdown()
            thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Id: a:b\r\n\r\n"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\ncontent-length: 2\r\n\r\n{}"


def test_replies_are_put_together_from_whatever_pieces_come() -> None:
    whole = HEAD + b"5\r\ndata:\r\nb\r\n one\r\n\ndata\r\n0\r\n\r\n"
    for size in (1, 7, len(whole)):
        with answering([whole[place : place + size] for place in range(0, len(whole), size)]) as (port, received):
            (reply,) = http_load.run(port, [b'{"a":1}']).replies
        assert reply == Reply(200, {b"transfer-encoding": b"chunked", b"x-id": b"a:b"}, b"data: one\r\n\ndata")
        (request,) = received
        assert request.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert request.endswith(b'Content-Length: 7\r\nConnection: close\r\n\r\n{"a":1}')


def test_a_flood_comes_when_all_streams_have_begun() -> None:
    stream = [HEAD, *[b"1\r\nx\r\n"] * 20, b"0\r\n\r\n"]
    with answering(stream, stream, [BUSY], [BUSY], [BUSY]) as (port, received):
        batch = http_load.run(port, [b"1", b"2"], [b"3", b"4", b"5"])
    assert {request[-1:] for request in received[:2]} == {b"1", b"2"}
    assert [reply.body for reply in batch.replies] == [b"x" * 20] * 2
    assert [(reply.status, reply.body) for reply in batch.flood] == [(429, b"{}")] * 3
    assert 0.02 <= batch.flood_seconds < batch.seconds
    assert batch.seconds >= 22 * 0.02
    assert batch.client_seconds > 0


def test_a_connection_without_an_answer_is_an_error() -> None:
    with answering([b""]) as (port, _), pytest.raises(NeperError, match="closed a connection without an answer"):
        http_load.run(port, [b"1"])


def test_refused_is_who_is_told_when_to_come_again() -> None:
    assert http_load.refused(Reply(429, {b"retry-after": b"1"}, b""))
    assert http_load.refused(Reply(503, {b"retry-after": b"10"}, b""))
    assert not http_load.refused(Reply(429, {}, b""))
    assert not http_load.refused(Reply(200, {b"retry-after": b"1"}, b""))
    assert not http_load.refused(Reply(500, {b"retry-after": b"1"}, b""))


def stream_of(*entries: int | None, tokens: int, extra: tuple[dict[str, Any], ...] = ()) -> Reply:
    """A streamed reply with a chunk for each entry, which has so many alternatives (None: no logprobs)."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"logprobs": None if k is None else {"content": [{"top_logprobs": [{}] * k}]}}]} for k in entries
    ]
    chunks += [*extra, {"choices": [], "usage": {"completion_tokens": tokens}}]
    return Reply(200, {}, b"".join([b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks]) + b"data: [DONE]\n\n")


def test_streams_are_held_against_what_was_asked_for() -> None:
    check_stream(stream_of(None, None, tokens=3), tokens=3, top_k=None)
    check_stream(stream_of(None, 20, 20, None, tokens=2), tokens=2, top_k=20)
    check_stream(stream_of(0, 0, tokens=2), tokens=2, top_k=0)
    cut = stream_of(20, tokens=1)
    for reply, top_k, says in (
        (stream_of(None, tokens=2), None, "a stream has 2 tokens"),
        (stream_of(None, tokens=1), 20, "0 entries"),
        (stream_of(20, tokens=1), None, "1 entries with [20] alternatives"),
        (stream_of(19, tokens=1), 20, "with [19] alternatives"),
        (cut._replace(body=cut.body[:-9]), 20, "cut off"),
        (Reply(429, {}, b"full"), None, "answered with 429: full"),
        (stream_of(20, tokens=1, extra=({"error": {"message": "broke"}},)), 20, "ended with an error: broke"),
    ):
        with pytest.raises(NeperError, match=re.escape(says)):
            check_stream(reply, tokens=1, top_k=top_k)


def findings(rates: dict[http_report.Way, list[float]], *, api: bool = True, refused: int = FLOOD) -> Findings:
    """Findings of batches with 100 tokens; the API process takes 1 ms of each second."""
    found = Findings(streams=10, reply=10)
    answers = [Reply(429, {b"retry-after": b"1"}, b"")] * refused + [Reply(200, {}, b"")] * (FLOOD - refused)
    for way, values in rates.items():
        for value in values:
            seconds = 100 / value
            flood = answers if way.flooded else []
            found.add(way, Batch(seconds, 5e-4, [], flood, 0.25 if flood else 0.0), seconds / 1000 if api else None)
    return found


def test_the_report_is_made_of_its_samples() -> None:
    found = findings({way: [100.0, 200.0, 400.0] for way in WAYS} | {SCORED: [96.0, 194.0, 396.0]})
    report = http_report.report("t", {"model": "m"}, found)
    text = markdown(report)
    # CPU of 1 ms a second: 10 us a token at 100 tok/s, 1e3 / 194 at the middle one.
    assert rows_of(text, "top_logprobs 20") == [["top_logprobs 20", "194.0", "±77.3%", "0.970", "5.2", "5.0", "3"]]
    bounds = {figure.name: figure for figure in report.figures}
    assert len(bounds) == 5
    assert bounds["tok/s: top_logprobs 20 / off"].value == pytest.approx(0.97)
    assert bounds["API process, CPU us a token, top_logprobs 20"].value == pytest.approx(1e3 / 194)
    assert bounds["refused with Retry-After, in the worst round"].value == FLOOD
    assert all(figure.met for figure in report.figures)
    assert "refused after 250 ms" in text


def test_bounds_give_way_to_the_spread_alone() -> None:
    rates = {way: [100.0, 100.0] for way in WAYS} | {SCORED: [94.0, 94.0], FLOODED: [94.5, 94.5]}
    met = [figure.met for figure in http_report.report("t", {}, findings(rates)).figures]
    assert met == [False, True, False, True, True]
    # A again over A: 0.95 and 1.05, so half the range over the median is 5 %; the mean of both is drift-free.
    rates |= {OFF: [100.0, 100.0], OFF_AGAIN: [95.0, 105.0], SCORED: [93.0, 98.0]}
    found = findings(rates)
    assert found.spread == pytest.approx(0.05)
    assert found.over_off(SCORED).samples == pytest.approx([93 / 97.5, 98 / 102.5])
    figure = http_report.report("t", {}, found).figures[0]
    assert (figure.met, figure.bound) == (True, ">= 0.95 (A against A; else 0.97)")
    assert http_report.report("t", {}, found).notes[-1] == "A against A (off again / off): ±5.0%"
    busy = http_report.report("t", {}, findings(rates | {OFF_AGAIN: [80.0, 120.0]}))
    assert busy.notes[-1].startswith("A against A (off again / off): ±20.0%; this machine was busy")


def test_who_was_not_refused_and_what_was_not_measured_is_told() -> None:
    rates = {way: [100.0] for way in WAYS}
    report = http_report.report("t", {}, findings(rates, api=False, refused=FLOOD - 1))
    assert (report.figures[-1].value, report.figures[-1].met) == (FLOOD - 1, False)
    assert "API process" not in " ".join(figure.name for figure in report.figures)
    assert "not measured" in markdown(report)
    assert "this system has no /proc" in report.notes[-1]


def test_a_written_shape_is_the_random_decoder(tmp_path: Path) -> None:
    shapes.write(SMALL, tmp_path, dtype=torch.bfloat16)
    source = resolve(str(tmp_path))
    assert (source.config, source.eos_token_ids) == (SMALL, ())
    written = registry.load(source, dtype=torch.float32, device=CPU)
    drawn = shapes.random_decoder(SMALL, dtype=torch.bfloat16, device=CPU)
    assert torch.equal(written.embed_tokens, drawn.embed_tokens.float())
    assert float(written.embed_tokens.std()) == pytest.approx(0.02, rel=0.05)
    with pytest.raises(ModelLoadError, match="can be written"):
        shapes.write(dataclasses.replace(SMALL, qkv_bias=True), tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("size", [256, 384, 151_936])
def test_every_id_of_the_synthetic_tokenizer_has_bytes_of_its_own(size: int) -> None:
    tokenizer = Tokenizer(Backend.from_str(http_model.tokenizer(size).to_str()))
    texts = {tokenizer.token_bytes(token_id) for token_id in range(size)}
    assert (tokenizer.vocab_size, len(texts), b"" in texts) == (size, size, False)
    ids = tokenizer.encode("so be it: ü")
    assert len(ids) == 12
    assert tokenizer.decode_bytes(ids) == "so be it: ü".encode()


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "http", "--device", "cpu", "--num-threads", "1", *arguments])


@pytest.mark.slow
@needs_proc
def test_a_run_with_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", SMALL)
    # Long enough for the flood to end while the streams go on.
    result = bench("--shape", "qwen3-0.6b", "--streams", "3", "--reply", "700", "--rounds", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    written = tmp_path / "http-cpu-qwen3-0-6b.json"
    assert sorted(tmp_path.iterdir()) == [written, written.with_suffix(".md")]
    assert result.stdout == written.with_suffix(".md").read_text(encoding="utf-8")
    data = json.loads(written.read_bytes())
    series = {s["name"]: s["samples"] for s in data["series"]}
    assert len(series) == 3 * len(WAYS) + 2
    assert all(len(samples) == 1 for samples in series.values())
    assert series["refused"] == [FLOOD]
    rates, api = ([series[f"{way.name}: {what}"][0] for way in WAYS] for what in ("tok/s", "API process, CPU a token"))
    # A process has no more CPU than one second a second and thread, here.
    assert all(0 < cpu * rate < 2e6 for cpu, rate in zip(api, rates, strict=True))
    ratios = {figure["name"]: figure["value"] for figure in data["figures"]}
    base = (rates[0] + rates[-1]) / 2
    assert ratios["tok/s: top_logprobs 0 / off"] == pytest.approx(rates[1] / base)
    assert ratios["tok/s: top_logprobs 20 / off"] == pytest.approx(rates[2] / base)
    assert ratios[f"tok/s: {FLOODED.name} / off"] == pytest.approx(rates[3] / base)
    assert ratios["API process, CPU us a token, top_logprobs 20"] == pytest.approx(api[2])
    assert ratios["refused with Retry-After, in the worst round"] == FLOOD
    assert "- model: qwen3-0.6b, random weights, " in result.stdout
    for way, rate in zip(WAYS, rates, strict=True):
        assert f"round 1 of 1: {way.name}: {rate:.1f} tok/s, " in result.stderr


@needs_proc
def test_cpu_seconds_are_those_of_the_process() -> None:
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seconds = Server(process.pid, 0, io.BytesIO()).cpu_seconds()
        process.communicate(b"\n")
    assert seconds == pytest.approx(0.5, abs=0.1)


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why() -> None:
    result = bench("--model", "no-such-model")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "neper: error: bench http: the server did not start; its last lines:\n" in result.stderr
    assert "no model 'no-such-model'" in result.stderr
    with pytest.raises(StartupError, match="did not start"), serving(["no-such-model"]):
        pass


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": "m", "shape": "qwen3-4b"}, "give --model or --shape, not both"),
        ({"shape": "qwen9", "device": "cpu"}, "no shape 'qwen9'"),
        ({"device": "cuda:99"}, "cuda:99 was asked for"),
        ({"dtype": "int8"}, "dtype must be float32 or bfloat16"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(NeperError, match=re.escape(says)):
        http.run(choose("bench http", **arguments), None)


@pytest.mark.slow
def test_a_reply_that_the_server_refuses_ends_the_run(tiny_dir: Callable[..., Path]) -> None:
    result = bench("--model", str(tiny_dir("llama")), "--streams", "1", "--reply", "100000", "--rounds", "1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "neper: error: bench http: a stream was answered with 400: " in result.stderr
    assert "context_length_exceeded" in result.stderr


@pytest.mark.slow
@needs_proc
def test_ctrl_c_ends_the_server_too(tiny_dir: Callable[..., Path]) -> None:
    command = [sys.executable, "-m", "neper", "bench", "http", "--model", str(tiny_dir("llama")), "--device", "cpu"]
    command += ["--num-threads", "1", "--streams", "2", "--reply", "400", "--rounds", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("warm-up: off"):
            assert process.poll() is None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr
    assert len(children) == 1
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{children[0]}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_help_imports_no_torch() -> None:
    code = (
        "import sys, neper.cli\n"
        "try: neper.cli.app(['bench', 'http', '--help'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"
