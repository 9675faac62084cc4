"""The server under attack, and the figures of an attack on it."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.attacks.honest import COMPLETIONS, HEALTH, Honest, p99
from tests.attacks.watched import Watch
from tests.cli.serving import ServerProcess

MEBI = 2**20
QUIET_SECONDS = 4.0  # of the honest client alone, and of memory to be given back
ATTACK_SECONDS = 4.0  # an attack is repeated for so long: a p99 needs a hundred requests
LONGEST_HOLD = 0.050
MOST_MEMORY = 8  # times the bytes of the bodies in flight
SPARE_MEMORY = 16 * MEBI  # what a process grows by all the same: modules, arenas, tables of tokens that were met
MOST_SLOWER = 3.0
# Below this a ratio says more about the machine than about the server: two processes on one core wait as long.
LEAST_P99 = 0.020


@dataclass
class Figures:
    """What an attack did. Sizes are bytes of the API process, times are seconds.

    Attributes:
        sent: bytes of the bodies that were in flight at once.
        before, peak, after: resident memory.
        held, computing: the longest hold of the event loop, and how much of it the process was computing.
        quiet, attacked: p99 by path of the honest client, without the attack and with it.
        asked: how many requests of each path the honest client made during the attack.
        times: how often the attack was made.
        seconds: how long all of them took.
    """

    name: str
    sent: int
    before: int
    peak: int
    after: int
    held: float
    computing: float
    quiet: dict[str, float]
    attacked: dict[str, float]
    asked: int
    times: int
    seconds: float

    def __str__(self) -> str:
        times = ", ".join(
            f"{path} p99 {1e3 * self.quiet[path]:.0f} -> {1e3 * self.attacked[path]:.0f} ms" for path in self.quiet
        )
        return (
            f"{self.name}: {self.sent / MEBI:.1f} MiB at once, {self.times} times, {self.seconds:.1f} s; "
            f"memory {self.before / MEBI:.0f}, "
            f"peak {self.peak / MEBI:.0f}, after {self.after / MEBI:.0f} MiB; loop held {1e3 * self.held:.0f} ms "
            f"(computing {1e3 * self.computing:.0f}); {times} ({self.asked} each)"
        )

    def check(self, paths: Sequence[str] = (HEALTH, COMPLETIONS)) -> None:
        """The bounds that no attack may move; `paths` are those whose p99 is held to them."""
        assert self.computing <= LONGEST_HOLD, self
        assert self.peak - self.before <= MOST_MEMORY * self.sent + SPARE_MEMORY, self
        assert self.after - self.before <= self.sent + SPARE_MEMORY, self
        for path in paths:
            assert self.attacked[path] <= MOST_SLOWER * max(self.quiet[path], LEAST_P99), (path, self)


class Target(ServerProcess):
    """A `neper serve` whose event loop is watched.

    Attributes:
        figures: of all attacks so far.
    """

    def __init__(self, watch_file: Path, *arguments: str | Path) -> None:
        self._watch = Watch(watch_file)
        self.figures: list[Figures] = []
        super().__init__(*arguments, program=("tests.attacks.watched", str(watch_file)))

    def attack(self, name: str, attack: Callable[[], object], *, sent: int, seconds: float = ATTACK_SECONDS) -> Figures:
        """Make an attack, again and again, beside the honest client.

        Args:
            sent: how many bytes of bodies are in flight at once.
            seconds: how long; a p99 needs more than a hundred honest requests, or it is their maximum.
        """
        with Honest(self.url) as honest:
            time.sleep(QUIET_SECONDS)
        quiet = {path: p99(seconds) for path, seconds in honest.seconds.items()}
        before = self.memory()
        self._proc("clear_refs").write_text("5")  # forgets the peak
        with Honest(self.url) as honest:
            time.sleep(0.5)
            self._watch.reset()
            start = time.perf_counter()
            times, taken = 0, 0.0
            while taken < seconds:
                attack()
                times += 1
                taken = time.perf_counter() - start
            held, computing = self._watch.read()
        attacked = {path: p99(times) for path, times in honest.seconds.items()}
        peak = self.memory("VmHWM")
        time.sleep(QUIET_SECONDS)
        asked = len(honest.seconds[HEALTH])
        after = self.memory()
        figures = Figures(name, sent, before, peak, after, held, computing, quiet, attacked, asked, times, taken)
        self.figures.append(figures)
        return figures

    def memory(self, field: str = "VmRSS") -> int:
        """Bytes of the API process: resident now, or with "VmHWM" at most since the peak was last forgotten."""
        line = next(line for line in self._proc("status").read_text().splitlines() if line.startswith(field))
        return 1024 * int(line.split()[1])

    def cpu_seconds(self) -> float:
        """What the API process has computed since it started."""
        fields = self._proc("stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the reply."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=100)
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def leave(self, path: str, body: bytes) -> None:
        """Send a request and close the connection at once."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=100)
        with suppress(OSError):  # refused unread
            connection.request("POST", path, body, {"content-type": "application/json"})
        connection.close()

    def _proc(self, name: str) -> Path:
        return Path(f"/proc/{self.process.pid}/{name}")


def at_once(functions: Sequence[Callable[[], object]]) -> list[object]:
    """Run functions in a thread each; what they return."""
    results: list[object] = [None] * len(functions)

    def run(place: int) -> None:
        try:
            results[place] = functions[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    return results
