"""An engine's half of the T/LP protocol that does what a script says: a program of its own, and what it makes up.

    python line_engine.py SCRIPT.json

A script is an object; all of it is optional but `record`:

    record      file that gets every line received, as it came, and notes of the engine's own that begin with `#`:
                `#start [pid, args]`, `#spawned pid`, `#overlap` (a GEN while an untagged request runs)
    starts      steps that print the first lines, for each process in turn; the last one is for all that follow
    gens        steps of each GEN in turn, counted over all processes; null and beyond the end: made-up tokens
    form        how made-up scores are written: "plain", "raw-v1", "raw-v1 alone" (no T lines), "none"
    cancels     made-up requests honour STOP; default: whether READY said so
    pause       seconds between made-up tokens
    cut         bytes of a write at most: longer ones are parted
    quits       it ends at QUIT, and when stdin closes; default: true

Steps are objects with one of

    print: [line, …]    whole lines in one write; lines of a request get its tag (with `of: n`, that of the n-th GEN)
    raw: text           as it is, but for `{tag}`; with `ends: true` it ends the request
    sleep: seconds
    wait: what          "STOP": until this request is stopped; "GEN n": until n of them have come to this process;
                        "file PATH": until it is there
    stderr: bytes
    spawn: true         a child of the engine's own, which holds its stdout open
    deaf: true          SIGTERM, SIGINT and SIGHUP are ignored from here on (at the start alone)
    freeze: true        nothing that comes later is read
    exit: status

The scores that it makes up are exact in float32: a test computes them with `made_up` and compares with ==.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

SPECIAL = 7
"""The last ids of a vocabulary, which are never made up."""

_OF_REQUEST = ("T", "LP", "PP", "DONE", "ERR")
_POLL = 0.002


def made_up(
    prompt: Sequence[int], place: int, vocab_size: int, allowed: Sequence[int] = ()
) -> tuple[int, list[tuple[int, float]]]:
    """The token at a place of the reply to a prompt, and all ids (or the allowed set) with logprobs, best first."""
    ids = sorted(set(allowed)) or range(vocab_size - SPECIAL)
    seed = zlib.crc32(f"{place}:{list(prompt)}".encode())
    first = seed % len(ids)
    order = [*ids[first:], *ids[:first]]
    best = -(1 + seed % 8) / 16
    pairs = [(token_id, best - place / 8) for place, token_id in enumerate(order)]
    return order[(seed >> 8) % min(3, len(order))], pairs


def made_up_lines(form: str, gen: dict[str, Any], place: int, vocab_size: int) -> list[str]:
    """T, and LP where the request asks for it, without the tag."""
    token_id, pairs = made_up(gen["prompt"], place, vocab_size, gen["allowed"])
    token, asked = f"T {token_id}", gen["logprobs"]
    if asked is None or form == "none":
        return [token]
    listed = pairs if gen["allowed"] else pairs[:asked]
    own, texts = dict(pairs)[token_id], [f"{listed_id}:{value}" for listed_id, value in listed]
    if form == "plain":
        return [token, " ".join(["LP", str(own), *texts])]
    raw = " ".join(["LP", str(place), "raw", str(token_id), str(own), str(len(texts)), *texts])
    return [raw] if form == "raw-v1 alone" else [token, raw]


def number(words: Sequence[str], name: str, default: int) -> int:
    """The number of the last word that begins so."""
    found = [word.removeprefix(name) for word in words if word.startswith(name)]
    return int(found[-1]) if found and found[-1].isdigit() else default


class LineEngine:
    def __init__(self, script: dict[str, Any]) -> None:
        self.script = script
        self.record = os.open(script["record"], os.O_RDWR | os.O_APPEND | os.O_CREAT)
        with open(self.record, closefd=False) as record:
            before = record.read().splitlines()
        self.starts = sum(line.startswith("#start") for line in before)
        self.gens = sum(line.startswith("GEN") for line in before)
        self.write_lock = threading.Lock()
        self.tagged = False
        self.stops = False
        self.vocab_size = 97
        self.tags: list[str | None] = []
        self.running: dict[str | None, threading.Event] = {}
        self.frozen = False
        self.cut = script.get("cut")

    def note(self, text: str) -> None:
        os.write(self.record, text.encode() + b"\n")

    def write(self, text: str) -> None:
        data = memoryview(text.encode())
        with self.write_lock:
            while data:
                data = data[os.write(1, data[: self.cut]) :]

    def print(self, lines: Sequence[str], tag: str | None) -> None:
        ending = f" #{tag}\n" if self.tagged else "\n"
        self.write("".join([line + (ending if line.split(" ")[0] in _OF_REQUEST else "\n") for line in lines]))

    def run(self) -> None:
        self.note(f"#start {json.dumps([os.getpid(), sys.argv[1:]])}")
        starts = self.script.get("starts", [[{"print": ["READY 512 stop"]}]])
        for step in starts[min(self.starts, len(starts) - 1)]:
            for line in step.get("print", ()):
                words = line.split()
                if words[0] == "READY":
                    self.stops = "stop" in words
                    self.tagged = number(words, "slots=", 0) >= 2
                self.vocab_size = number(words, "vocab_size=", self.vocab_size)
            self.step(step, None)
        quits = self.script.get("quits", True)
        for line in sys.stdin:
            self.note(line.rstrip("\n"))
            if self.frozen:
                threading.Event().wait()
            words = line.split()
            if words[0] == "QUIT":
                if quits:
                    os._exit(0)
            elif words[0] == "STOP":
                running = self.running.get(words[1] if self.tagged else None)
                if running is not None:
                    running.set()
            elif words[0] == "GEN":
                self.begin(words)
        if not quits:
            threading.Event().wait()

    def begin(self, words: list[str]) -> None:
        tag = words.pop(1) if self.tagged else None
        if tag in self.running:
            self.note("#overlap")
        keys = dict(word.split("=") for word in words[2:-1])
        gen = {
            "max_new": int(words[1]),
            "prompt": [int(word) for word in words[-1].split(",")],
            "logprobs": int(keys["logprobs"]) if "logprobs" in keys else None,
            "allowed": [int(word) for word in keys["allowed"].split(",")] if "allowed" in keys else [],
        }
        number, self.gens = self.gens, self.gens + 1
        scripted = self.script.get("gens", [])
        steps = scripted[number] if number < len(scripted) else None
        self.running[tag] = threading.Event()
        self.tags.append(tag)
        threading.Thread(target=self.answer, args=(tag, gen, steps), daemon=True).start()

    def answer(self, tag: str | None, gen: dict[str, Any], steps: list[dict[str, Any]] | None) -> None:
        for step in self.made_up_steps(tag, gen) if steps is None else steps:
            self.step(step, tag)

    def made_up_steps(self, tag: str | None, gen: dict[str, Any]) -> Iterator[dict[str, Any]]:
        form, pause = self.script.get("form", "plain"), self.script.get("pause", 0)
        cancels, stopped = self.script.get("cancels", self.stops), self.running[tag]
        done, finish = 0, "length"
        while done < gen["max_new"]:
            if stopped.wait(pause) and cancels:
                finish = "cancel"
                break
            yield {"print": made_up_lines(form, gen, done, self.vocab_size)}
            done += 1
        yield {"print": [f"DONE {done} {len(gen['prompt'])} 1.5 {done}.25 {finish}"]}

    def step(self, step: dict[str, Any], tag: str | None) -> None:
        if "print" in step:
            of = self.tags[step["of"]] if "of" in step else tag
            if any(line.startswith(("DONE", "ERR")) for line in step["print"]):
                self.running.pop(of, None)
            self.print(step["print"], of)
        elif "raw" in step:
            if step.get("ends"):
                self.running.pop(tag, None)
            self.write(step["raw"].replace("{tag}", str(tag)))
        elif "sleep" in step:
            time.sleep(step["sleep"])
        elif "wait" in step:
            self.wait(step["wait"], tag)
        elif "stderr" in step:
            os.write(2, b"a line of the engine's log\n" * (step["stderr"] // 27 + 1))
        elif "spawn" in step:
            self.note(f"#spawned {os.posix_spawn('/bin/sleep', ['sleep', '600'], os.environ)}")
        elif "deaf" in step:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        elif "freeze" in step:
            self.frozen = True
        elif "exit" in step:
            os._exit(step["exit"])
        else:
            raise ValueError(f"no such step: {step}")

    def wait(self, what: str, tag: str | None) -> None:
        word, _, rest = what.partition(" ")
        if word == "STOP":
            self.running[tag].wait()
            return
        while len(self.tags) < int(rest) if word == "GEN" else not os.path.exists(rest):
            time.sleep(_POLL)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        script = json.load(file)
    LineEngine(script).run()
