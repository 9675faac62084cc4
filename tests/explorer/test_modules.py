"""The explorer's modules, called in the browser with values that are known."""

from __future__ import annotations

import math
import random
import shlex
from typing import Any

import httpx
import msgspec
import pytest
from playwright.sync_api import expect

from tests.explorer.conftest import Explorer, Visit
from tests.server.conftest import Client

pytestmark = pytest.mark.full


def call(explorer: Explorer, module: str, code: str, *values: Any) -> Any:
    """What an expression is with a module's names as `m` and the values as `v`."""
    script = f"async (v) => {{ const m = await import('/explorer/{module}.js'); return ({code}); }}"
    return explorer.page.evaluate(script, list(values))


def test_bounds_of_the_entropy_hold_and_meet(scripted: Client, visit: Visit) -> None:
    draws = random.Random(7)
    with visit(scripted.server.url) as explorer:
        for _ in range(20):
            size = draws.randint(2, 60)
            weights = sorted((draws.expovariate(1.0) ** 4 for _ in range(size)), reverse=True)
            logprobs = [math.log(weight / sum(weights)) for weight in weights]
            entropy = -sum(math.exp(value) * value for value in logprobs)
            sampled = draws.randrange(size)
            gaps = []
            for count in (0, 1, size // 2, size):
                token = {
                    "id": sampled,
                    "logprob": logprobs[sampled],
                    "alternatives": [{"id": i, "logprob": logprobs[i]} for i in range(count)],
                }
                bounds = call(explorer, "scores", "m.entropy(v[0], v[1])", token, size)
                assert bounds["least"] - 1e-5 <= entropy <= bounds["most"] + 1e-5
                assert bounds["listed"] == count + (sampled >= count)
                gaps.append(bounds["most"] - bounds["least"])
            assert gaps[0] >= gaps[3]
            assert gaps[3] == pytest.approx(0, abs=1e-9)


def test_bands_are_those_of_the_command_line(scripted: Client, visit: Visit) -> None:
    from neper.terminal import SHADES

    with visit(scripted.server.url) as explorer:
        assert call(explorer, "scores", "m.BANDS") == [least for least, _ in SHADES]
        for place, (least, _) in enumerate(SHADES[:-1]):
            assert call(explorer, "scores", "m.band(Math.log(v[0]))", least + 1e-6) == place
            assert call(explorer, "scores", "m.band(Math.log(v[0]))", least - 1e-6) == place + 1
        assert call(explorer, "scores", "m.band(-9999)") == len(SHADES) - 1


def test_numbers_and_texts(scripted: Client, visit: Visit) -> None:
    texts = {" the": "␣the", "\n": "↵", "a b": "a b", "": "∅", "\t\x1b": "⇥␛", "日": "日"}
    shares = {
        1.0: "100 %",
        0.99952: "99.952 %",
        0.123: "12.3 %",
        0.0123: "1.23 %",
        0.000123: "0.012 %",
        1.23e-6: "1.2e-4 %",
    }
    with visit(scripted.server.url) as explorer:
        for text, told in texts.items():
            assert call(explorer, "numbers", "m.spelled(v[0])", text) == told
        for share, told in shares.items():
            assert call(explorer, "numbers", "m.percent(Math.log(v[0]))", share) == told


def test_events_are_read_however_they_are_cut(scripted: Client, visit: Visit) -> None:
    stream = ': waiting\n\ndata: {"a": "ü🎉"}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'.encode()
    code = """await (async () => {
      const parts = v[0];
      const body = new ReadableStream({start(controller) {
        for (const part of parts) controller.enqueue(new Uint8Array(part));
        controller.close();
      }});
      const found = [];
      for await (const list of m.events(body)) found.push(...list);
      return found;
    })()"""
    draws = random.Random(3)
    with visit(scripted.server.url) as explorer:
        for _ in range(20):
            cuts = sorted(draws.sample(range(len(stream)), 6))
            parts = [list(stream[a:b]) for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
            assert call(explorer, "events", code, parts) == ['{"a": "ü🎉"}', '{"b": 2}', "[DONE]"]


def test_a_copied_command_repeats_the_reply(scripted: Client, visit: Visit) -> None:
    scripted.say("it's the quick brown fox")
    with visit(scripted.server.url, permissions=["clipboard-read", "clipboard-write"]) as explorer:

        def copied(name: str) -> str:
            explorer.pane.get_by_role("button", name=f"Copy {name}").click()
            expect(explorer.page.locator("#announcer")).to_have_text(f"{'Text' if name == 'text' else name} copied")
            return str(explorer.page.evaluate("navigator.clipboard.readText()"))

        for kind, path in (("Chat", "/v1/chat/completions"), ("Continue a text", "/v1/completions")):
            explorer.run("it's 'Hello'", kind=kind)
            prompt = explorer.generations()[-1]["prompt"]
            words = shlex.split(copied("curl"))
            assert words[:3] == ["curl", "-s", f"{scripted.server.url}{path}"]
            headers = {"Content-Type": "application/json"}
            reply = httpx.post(words[2], headers=headers, content=words[words.index("-d") + 1].encode(), timeout=60)
            assert reply.status_code == 200
            assert scripted.engine.submitted[-1].prompt_token_ids == prompt
            shown, repeated = (request.sampling for request in scripted.engine.submitted[-2:])
            assert msgspec.structs.replace(shown, skip_special_tokens=True) == repeated
            assert copied("text") == "it's the quick brown fox"
            told = call(explorer, "numbers", "JSON.parse(v[0])", copied("JSON"))
            assert told["prompt_token_ids"] == prompt
            assert [token["id"] for token in told["tokens"]][:-1] == scripted.engine.reply(
                scripted.engine.submitted[-1]
            )
            assert "".join(token["text"] for token in told["tokens"]) == told["text"] == "it's the quick brown fox"
