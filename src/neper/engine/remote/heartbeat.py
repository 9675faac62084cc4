"""The heartbeat of an engine process: a thread of it that says every second that the process lives, and how far it is.

What a hang is: no beat comes, where the process is stopped, starved or stuck in a call that holds the interpreter's
lock; or beats come, but the loop no longer turns. A long step is neither: torch's operations let go of the lock, so
that beats go on, and the time that one turn may take is long. A process that is still loading is not watched at all.
"""

from __future__ import annotations

import contextlib
import threading

import zmq

from neper.engine.remote.messages import Beat, encode

SECONDS = 1.0
"""Between two beats."""


class Heartbeat:
    """Beats from `start` to `stop`, over a socket of its own, since sockets belong to one thread.

    Attributes:
        turns: of the loop; counted up by it.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.turns = 0
        self._context = context
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self) -> None:
        with self._context.socket(zmq.PUSH) as socket:
            socket.set_hwm(1)  # what nobody has taken need not be said twice
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._address)
            while not self._stop.wait(SECONDS):
                with contextlib.suppress(zmq.Again):
                    socket.send(encode(Beat(self.turns)), zmq.NOBLOCK)


class Pulse:
    """The other side: what has been heard of a process that serves.

    Time is counted in `tick`s of about a second, not by a clock: where the listener itself was stopped or busy, no time
    has passed for it.

    Attributes:
        silent, stuck: ticks since anything was heard, and since its loop has turned.
    """

    def __init__(self) -> None:
        self.silent = 0
        self.stuck = 0
        self._turns = -1

    def heard(self) -> None:
        self.silent = 0

    def beat(self, turns: int) -> None:
        if turns != self._turns:
            self._turns = turns
            self.stuck = 0

    def tick(self) -> None:
        self.silent += 1
        self.stuck += 1
