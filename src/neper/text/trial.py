"""Trials of grammars in a process of their own: compiling a stranger's grammar can take minutes, or overflow the stack.

llguidance counts most of its work, but not all (intersections of patterns grow exponentially), and follows rules and
references recursively. So each grammar gets a child of that process, with limits of CPU time, memory and stack. There
it is compiled and its first masks are made, over the same vocabulary and with the same limits as for its use.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO

import msgspec

from neper.text.grammar_problems import problem_of
from neper.text.grammar_vocabulary import GrammarVocabulary
from neper.text.matcher import Compiler

WATCHDOG_SECONDS = 30.0
"""Wall time after which a trial counts as stopped, not as computing. Its own limit is CPU time."""

_NICENESS = 10
_STACK_BYTES = 4 * 2**20  # half of what threads usually have
_MEMORY_BYTES = 512 * 2**20  # in addition to the memory that the process has
_TOKENS = 3  # tokens that each of a trial's texts goes on by
_TOO_DEEP = "it is nested too deeply"
_TOO_LARGE = "it takes too much memory"


class Outcome(msgspec.Struct, frozen=True):
    """The end of a trial.

    Attributes:
        problem: the reason why the grammar cannot be used; None where it can.
        seconds: CPU time that it took.
        late: it exceeded its time, and was ended.
        stopped: nothing is known of the grammar, since the process was stopped or killed.
    """

    problem: str | None = None
    seconds: float = 0.0
    late: bool = False
    stopped: bool = False


class Trial:
    """A process that tries grammars one after the other. It is started when first needed, and again when it is gone.

    One thread uses it at a time.
    """

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def run(self, text: str, seconds: float) -> Outcome:
        """Try a serialised grammar for up to `seconds` of CPU time."""
        if self._process is not None and self._process.poll() is not None:
            self._stop()  # it was killed since
        if self._process is None:
            self._process = _start()
            self._finish = weakref.finalize(self, _kill, self._process)
            if self._ask(msgspec.json.encode(self._vocabulary())) is None:
                return Outcome(stopped=True)
        reply = self._ask(msgspec.json.encode((seconds, text)))
        return Outcome(stopped=True) if reply is None else msgspec.json.decode(reply, type=Outcome)

    def _ask(self, line: bytes) -> bytes | None:
        """Send a line and wait for one. None when the process is gone, or does not answer and is ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # nothing will be received
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            if _speaks(process.stdout):
                reply = process.stdout.readline()
                if reply.endswith(b"\n"):
                    return reply
        self._stop()
        return None

    def _stop(self) -> None:
        self._finish()
        self._process = None


def _speaks(pipe: IO[bytes]) -> bool:
    """Wait for a line or the end of a pipe. False when neither comes. (select() takes no descriptor above 1023.)"""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(WATCHDOG_SECONDS * 1000))


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "neper.text.trial"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that its child can be ended with it, and signals of a terminal reach neither
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _serve() -> None:
    """Answer lines of stdin with one line each: a vocabulary, then grammars to try."""
    _be_nice()
    lines = iter(sys.stdin.buffer)
    compiler = Compiler(msgspec.json.decode(next(lines), type=GrammarVocabulary))
    print(flush=True)
    for line in lines:
        seconds, text = msgspec.json.decode(line, type=tuple[float, str])
        sys.stdout.buffer.write(msgspec.json.encode(_try(compiler, text, seconds)) + b"\n")
        sys.stdout.buffer.flush()


def _be_nice() -> None:
    """Leave busy cores to the server. Linux may weigh sessions instead of processes, so both get the niceness."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "r+") as group:
        group.write(str(_NICENESS))


def _try(compiler: Compiler, text: str, seconds: float) -> Outcome:
    """Try a grammar in a child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            _limit(seconds)
            threading.stack_size(_STACK_BYTES)
            thread = threading.Thread(target=_report, args=(compiler, text, writing))
            thread.start()
            thread.join()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        report = pipe.read()
    _, status, usage = os.wait4(pid, 0)
    spent = usage.ru_utime + usage.ru_stime
    if report:
        return Outcome(msgspec.json.decode(report, type=str | None), spent)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return Outcome(f"it takes more than {seconds:g} seconds to compile", spent, late=True)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return Outcome(stopped=True)
    deep = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS)
    return Outcome(_TOO_DEEP if deep else _TOO_LARGE, spent)


def _limit(seconds: float) -> None:
    """Set the limits of this process. The timer counts CPU time of all its threads, and its signal ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
        limit = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _report(compiler: Compiler, text: str, writing: int) -> None:
    os.write(writing, msgspec.json.encode(_problem(compiler, text)))


def _problem(compiler: Compiler, text: str) -> str | None:
    """The reason why a grammar cannot be used, or None."""
    grammars = json.loads(text)["grammars"]
    schemas = [grammar for grammar in grammars if "json_schema" in grammar]
    problem = _first_problem(compiler, text, is_schema=len(schemas) == len(grammars) - 1)
    if problem is not None and len(grammars) > 2:
        for schema in schemas:  # which of several it is
            inner = _first_problem(compiler, json.dumps({"grammars": [schema]}), is_schema=True)
            if inner is not None:
                return f"{schema['name']}: {inner}"
    return problem


def _first_problem(compiler: Compiler, text: str, *, is_schema: bool) -> str | None:
    """The problem that the first tokens of some texts show."""
    start = compiler.start(text)
    if start.is_error():
        return problem_of(start.get_error(), is_schema=is_schema)
    for place in (0.0, 0.5, 1.0):
        matcher = compiler.matcher(start)
        for _ in range(_TOKENS):
            allowed = matcher.allowed()
            if matcher.error is not None:
                return problem_of(matcher.error, is_schema=is_schema)
            if not allowed or not matcher.accept(allowed[int(place * (len(allowed) - 1))]):
                break
    return None


if __name__ == "__main__":
    _serve()
