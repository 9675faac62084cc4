"""The explorer in a browser, in short: a reply, a token of it, another one chosen, and back, by keyboard alone."""

from __future__ import annotations

import math

import pytest
from playwright.sync_api import expect

from tests.explorer.conftest import Visit, shown
from tests.helpers.scripted_engine import scores, top
from tests.server.conftest import END, VOCAB_SIZE, Client


def test_a_reply_a_branch_and_back_by_keyboard(scripted: Client, visit: Visit) -> None:
    ids = scripted.say("the quick brown fox")
    prompt = scripted.tokenizer.encode("Hello", add_special_tokens=False)
    words = [shown(scripted.tokenizer.token_text(token_id)) for token_id in ids]
    with visit(scripted.server.url) as explorer:
        keys = explorer.page.keyboard
        explorer.pane.get_by_label("Continue a text").press("Space")
        keys.press("Tab")
        keys.type("Hello")
        keys.press("Control+Enter")
        assert explorer.ended() == [*words, ""]  # the end token has no text

        explorer.tokens.focus()
        keys.press("ArrowRight")
        row = scores(len(prompt) + 1, ids[1], VOCAB_SIZE)
        best = top(row, 10)
        listed = [float(percent.split()[0]) / 100 for _, percent in explorer.alternatives()[:10]]
        assert listed == pytest.approx([math.exp(row[i]) for i in best], rel=0.05, abs=1e-6)
        assert explorer.facts()["Surprisal"] == f"{-row[ids[1]]:.2f} nats"

        other = next(place for place, token_id in enumerate(best) if token_id not in (ids[1], END))
        rest = [shown(scripted.tokenizer.token_text(token_id)) for token_id in scripted.say(" lazy dog")]
        keys.press(str(other + 1))
        expect(explorer.pane.get_by_role("navigation", name="Branches")).to_be_visible()
        assert explorer.ended() == [words[0], shown(scripted.tokenizer.token_text(best[other])), *rest, ""]
        assert scripted.engine.submitted[-1].prompt_token_ids == [*prompt, ids[0], best[other]]
        assert explorer.generations()[-1]["prompt"] == [*prompt, ids[0], best[other]]

        keys.press("Backspace")
        assert explorer.ended() == [*words, ""]
