"""An honest client in a process of its own, so that nothing an attacker does in the tests' process slows it.

python -m tests.attacks.honest HOST PORT: asks /health and for a small completion in turn until its standard input is
closed, then writes {path: [seconds, …]}. Each must be answered with 200.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from urllib.parse import urlsplit

PAUSE_SECONDS = 0.01
HEALTH, COMPLETIONS = "/health", "/v1/completions"
BODY = json.dumps({"prompt": "Hello there", "max_tokens": 2, "logprobs": 3})


class Honest:
    """The client at work; leaving the context stops it, and `seconds` has how long each of its requests took."""

    def __init__(self, url: str) -> None:
        self.seconds: dict[str, list[float]] = {}
        address = urlsplit(url)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.honest", str(address.hostname), str(address.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Honest:
        return self

    def __exit__(self, *error: object) -> None:
        output, _ = self._process.communicate(timeout=120)
        assert self._process.returncode == 0, "an honest request was not answered with 200"
        self.seconds = json.loads(output)


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[max(0, -(-99 * len(seconds) // 100) - 1)]


def ask(host: str, port: int, path: str) -> float:
    """Seconds until a whole reply, over a connection of its own."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection(host, port, timeout=100)
    try:
        if path == HEALTH:
            connection.request("GET", path)
        else:
            connection.request("POST", path, BODY, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        assert response.status == 200, (path, response.status)
    finally:
        connection.close()
    return time.perf_counter() - start


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    seconds: dict[str, list[float]] = {HEALTH: [], COMPLETIONS: []}
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        for path, taken in seconds.items():
            taken.append(ask(host, port, path))
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
