"""Grammars tried in a process of their own: compiling what strangers wrote can take minutes, or overflow the stack.

llguidance counts what it does, but not all of it (intersections of patterns grow exponentially), and goes through rules
and references recursively. What a trial survives is compiled again where it is used, on a larger stack.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping

import msgspec

SECONDS = 2.0
"""How long a grammar may take to compile."""

_LATE = 3  # exit status
_STACK_BYTES = 4 * 2**20  # half of what threads usually have


class Trial:
    """A process that compiles grammars, started when first needed and again after one that it did not survive.

    Args:
        vocab_size: width of the logits.
        control_tokens: id -> text of the tokens that grammars may name.
    """

    def __init__(self, vocab_size: int, control_tokens: Mapping[int, str]) -> None:
        self._vocabulary = (vocab_size, dict(control_tokens))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, text: str) -> str | None:
        """Compile a serialised grammar: why that must not be done elsewhere, or None (it may be invalid even so)."""
        with self._lock:
            process = self._process
            if process is None:
                process = self._process = _start()
                self._end = weakref.finalize(self, _end, process)
                _send(process, self._vocabulary)
                _receive(process)
            _send(process, text)
            if _receive(process):
                return None
            self._process = None
            self._end()
            late = process.returncode == _LATE
            return f"it takes more than {SECONDS:g} seconds" if late else "it is nested too deeply"


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "neper.text.trial"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _send(process: subprocess.Popen[bytes], message: object) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died: nothing will be received
        process.stdin.write(msgspec.json.encode(message) + b"\n")
        process.stdin.flush()


def _receive(process: subprocess.Popen[bytes]) -> bool:
    """Wait until it has done what it was sent; False when it died of that."""
    assert process.stdout is not None
    return process.stdout.readline() != b""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.communicate()  # closes its input, and so it ends; at the latest when its time is over


def _serve() -> None:
    """A vocabulary, then grammars, a line each; a line says that one is done."""
    from llguidance import LLMatcher

    from neper.text.matcher import LIMITS, bytes_tokenizer

    lines = iter(sys.stdin.buffer)
    tokenizer = bytes_tokenizer(*msgspec.json.decode(next(lines), type=tuple[int, dict[int, str]]))
    print(flush=True)
    for line in lines:
        late = threading.Timer(SECONDS, os._exit, (_LATE,))  # llguidance lets other threads run
        late.start()
        matcher = LLMatcher(tokenizer, msgspec.json.decode(line, type=str), log_level=0, limits=LIMITS)
        matcher.compute_bitmask()
        late.cancel()
        print(flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a server that is interrupted drains first
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
