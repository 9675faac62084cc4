"""Grammars that take long or are refused late, and a client beside them that wants JSON and ids.

python -m tests.attacks.grammars HOST PORT: the honest client, in a process of its own. It asks for a small JSON object
and for the ids of a text in turn until its standard input is closed, then writes {path: [seconds, …]}.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from urllib.parse import urlsplit

COMPLETIONS, TOKENIZE = "/v1/completions", "/tokenize"
PAUSE_SECONDS = 0.01
HONEST = {
    COMPLETIONS: {"prompt": "A", "max_tokens": 4, "response_format": {"type": "json_object"}},
    TOKENIZE: {"prompt": "Hello there " * 2000},
}


def doubling(depth: int, end: str) -> str:
    rules = [f"R{n}: R{n + 1} R{n + 1}" for n in range(depth)]
    return "\n".join(["start: R0", *rules, f'R{depth}: "{end}"'])


def intersection(end: str) -> str:
    return f"start: A\nA: /{end}/ | " + " & ".join(f"/.*a.{{{n}}}/" for n in range(100))


def wide(end: str) -> str:
    rules = [f'r{n}: "{end}{n:x}"' for n in range(9000)]
    return "\n".join(["start: (r0 | all)*", "all: " + " | ".join(f"r{n}" for n in range(9000)), *rules])


def optional(end: str) -> str:
    return "\n".join(["start: " + " ".join(f"r{n}?" for n in range(4000)), *(f'r{n}: "{end}{n}"' for n in range(4000))])


HOSTILE: list[Callable[[str], str]] = [
    lambda end: doubling(30, end),
    lambda end: doubling(21, end),
    intersection,
    wide,
    optional,
]


def hostile_body(kind: int, number: int) -> bytes:
    grammar = HOSTILE[kind](f"x{number}")
    return json.dumps({"prompt": "A", "max_tokens": 8, "structured_outputs": {"grammar": grammar}}).encode()


class Client:
    """The honest client at work; leaving the context stops it, and `seconds` has how long each request took."""

    def __init__(self, url: str) -> None:
        self.seconds: dict[str, list[float]] = {}
        address = urlsplit(url)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.grammars", str(address.hostname), str(address.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        output, _ = self._process.communicate(timeout=200)
        assert self._process.returncode == 0, "an honest request was not answered with 200"
        self.seconds = json.loads(output)


def main() -> None:
    seconds: dict[str, list[float]] = {path: [] for path in HONEST}
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        for path, body in HONEST.items():
            start = time.perf_counter()
            connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=100)
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            response.read()
            assert response.status == 200, (path, response.status)
            connection.close()
            seconds[path].append(time.perf_counter() - start)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
