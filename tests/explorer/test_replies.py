"""Replies in the explorer: what is shown is what the API says, and branches go on from exact ids."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.cases.conftest import RealServer
from tests.explorer.conftest import Explorer, Visit, shown
from tests.helpers.scripted_engine import scores, top
from tests.server.conftest import VOCAB_SIZE, Client

pytestmark = pytest.mark.full

QUESTION = "What is the capital of France?"


def completed(server: RealServer, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return server.choice(
        "/v1/completions",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        logprobs=10,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )


def names(server: RealServer, ids: list[int]) -> list[str]:
    """The tokens of a reply as they are shown; control tokens have no text."""
    tokenizer = server.tokenizer
    return ["" if i in tokenizer.special_token_ids else shown(tokenizer.token_text(i)) for i in ids]


def open_with(explorer: Explorer, longest: int) -> None:
    explorer.set("Longest reply", str(longest))


def test_a_chat_is_the_chat_of_the_api(embedded: RealServer, visit: Visit) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    reply = embedded.full(
        "/v1/chat/completions", messages=messages, max_tokens=12, temperature=0, return_token_ids=True
    )
    with visit(embedded.url) as explorer:
        open_with(explorer, 12)
        assert explorer.run(QUESTION, kind="Chat") == names(embedded, reply["choices"][0]["token_ids"])
        assert explorer.generations()[-1]["prompt"] == reply["prompt_token_ids"]


def test_another_token_is_continued_by_its_id(embedded: RealServer, visit: Visit) -> None:
    with visit(embedded.url) as explorer:
        open_with(explorer, 10)
        explorer.run("One day, the", kind="Continue a text")
        prompt = explorer.generations()[-1]["prompt"]
        assert prompt == embedded.ids("One day, the")
        first = completed(embedded, prompt, 10)
        explorer.select(3)
        listed = first["logprobs"]["top_logprobs"][3]
        others = [int(name.removeprefix("token_id:")) for name in listed]
        values = [math.exp(value) for value in listed.values()]
        told = explorer.alternatives()
        assert [float(percent.split()[0]) / 100 for _, percent in told] == pytest.approx(values, rel=0.06, abs=1e-7)
        assert [text.lstrip("␣") for text, _ in told] == [shown(embedded.tokenizer.token_text(i)) for i in others]

        explorer.pane.locator(".alternatives button").nth(4).click()
        expect(explorer.pane.locator(".branches button")).to_have_count(2)
        texts = explorer.ended()
        ids = [*prompt, *first["token_ids"][:3], others[4]]
        assert explorer.generations()[-1]["prompt"] == ids
        after = completed(embedded, ids, 10)
        assert texts == names(embedded, [*first["token_ids"][:3], others[4], *after["token_ids"]])

        # Walk back, to a branch that is there already, and to the second one again: nothing is asked anew.
        asked = len(explorer.generations())
        explorer.pane.get_by_role("button", name="Back to the fork").click()
        assert explorer.ended() == names(embedded, first["token_ids"])
        expect(explorer.tokens.get_by_role("option").nth(3)).to_have_class(re.compile("fork"))
        explorer.page.keyboard.press("5")
        assert explorer.ended() == texts
        assert len(explorer.generations()) == asked

        # A branch of the branch hangs below it.
        explorer.select(6)
        explorer.pane.locator(".alternatives button").nth(2).click()
        expect(explorer.pane.locator(".branches ul ul ul button")).to_have_count(1)
        explorer.ended()
        explorer.pane.locator(".branches button").first.click()
        assert explorer.ended() == names(embedded, first["token_ids"])

        explorer.pane.get_by_role("button", name="Go on").click()
        expect(explorer.tokens.get_by_role("option")).to_have_count(20)
        explorer.ended()
        assert explorer.generations()[-1]["prompt"] == [*prompt, *first["token_ids"]]


def test_an_end_that_is_chosen_ends_the_reply(embedded: RealServer, visit: Visit) -> None:
    with visit(embedded.url) as explorer:
        explorer.set("Alternatives", "20")
        explorer.run(QUESTION, kind="Chat")
        explorer.tokens.focus()
        explorer.page.keyboard.press("End")
        asked = len(explorer.generations())
        end = explorer.pane.locator(".alternatives button", has_text="<|im_end|>")
        expect(end).to_have_attribute("aria-current", "true")
        # At the first place it is not among the likeliest: a request that allows nothing else would be needed there.
        explorer.page.keyboard.press("1")
        assert len(explorer.generations()) == asked


def test_the_text_of_a_scored_prompt(embedded: RealServer, visit: Visit) -> None:
    text = "The capital of France is Paris.\n日本 🎉 done"
    choice = embedded.choice(
        "/v1/completions", prompt=text, max_tokens=0, echo=True, prompt_logprobs=10, return_token_ids=True
    )
    ids = choice["prompt_token_ids"]
    with visit(embedded.url) as explorer:
        texts = explorer.run(text, kind="Score a text")
        assert len(texts) == len(ids)
        assert explorer.tokens.evaluate("list => [...list.children].map(line => line.textContent).join('')") == text
        surprisals = []
        for place in range(1, len(ids)):
            explorer.tokens.focus()
            explorer.page.keyboard.press("ArrowRight")
            entry = choice["prompt_logprobs"][place][str(ids[place])]
            facts = explorer.facts()
            assert facts["Rank"] == f"{entry['rank']:,}"
            assert float(facts["Surprisal"].removesuffix(" nats")) == pytest.approx(-entry["logprob"], abs=0.006)
            surprisals.append(-entry["logprob"])
        assert f"mean surprisal {sum(surprisals) / len(surprisals):.2f} nats" in explorer.status.inner_text()
        most = max(range(len(surprisals)), key=surprisals.__getitem__) + 1
        expect(explorer.pane.locator("figcaption")).to_contain_text(f"most at token {most + 1},")

        # The text goes on from another token of it, by ids.
        explorer.set("Longest reply", "3")
        place = next(i for i in range(2, len(ids)) if choice["prompt_logprobs"][i][str(ids[i])]["rank"] > 1)
        entries = choice["prompt_logprobs"][place]
        best = max(entries, key=lambda name: entries[name]["logprob"])
        explorer.select(place)
        explorer.pane.locator(".alternatives button").first.click()
        expect(explorer.pane.locator(".branches button")).to_have_count(2)
        explorer.ended()
        assert explorer.generations()[-1]["prompt"] == [*ids[:place], int(best)]


def test_markup_in_a_reply_is_text(scripted: Client, visit: Visit) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&amp;"
    scripted.say(evil)
    with visit(scripted.server.url) as explorer:
        explorer.run("<b>Hello</b>", kind="Continue a text")
        assert explorer.tokens.evaluate("list => list.textContent") == f"<b>Hello</b>{evil}"
        for place in range(3):
            explorer.select(place)
        assert explorer.page.locator("img, script:not([src]), b").count() == 0


def test_characters_in_several_tokens_and_lines(scripted: Client, visit: Visit) -> None:
    text = "Tür 🎉🎉\n\nx 日本\n"
    ids = scripted.say(text)
    with visit(scripted.server.url) as explorer:
        texts = explorer.run("Hello", kind="Continue a text")
        assert len(texts) == len(ids) + 1
        assert explorer.tokens.evaluate("list => list.textContent") == f"Hello{text}"
        assert explorer.tokens.locator(".line").count() == 4
        assert explorer.tokens.locator(".held").count() > 6


def test_a_token_beyond_the_alternatives(scripted: Client, visit: Visit) -> None:
    """A rank that is not known is not made up, and the bounds of the entropy hold."""
    ids = scripted.say("the quick brown fox")
    prompt = len(scripted.tokenizer.encode("Hello", add_special_tokens=False))
    with visit(scripted.server.url) as explorer:
        explorer.set("Alternatives", "1")
        explorer.run("Hello", kind="Continue a text")
        for place, token_id in enumerate(ids):
            row = scores(prompt + place, token_id, VOCAB_SIZE)
            explorer.select(place)
            facts = explorer.facts()
            rank = 1 + int((row > row[token_id]).sum())
            assert facts["Rank"] == ("1" if top(row, 1) == [token_id] else "2 or later") or rank == 1
            least, _, most = facts["Entropy"].removesuffix(" nats").partition("\u2013")
            entropy = -sum(math.exp(value) * float(value) for value in row)
            assert float(least) - 0.006 <= entropy <= float(most or least) + 0.006


def test_stopping_keeps_what_came(scripted: Client, visit: Visit) -> None:
    scripted.say("the quick brown fox jumps over the lazy dog")
    scripted.engine.hang_after = 4
    with visit(scripted.server.url) as explorer:
        explorer.write("Hello")
        explorer.page.keyboard.press("Control+Enter")
        expect(explorer.tokens.get_by_role("option")).to_have_count(4)
        explorer.page.keyboard.press("Escape")
        expect(explorer.status).to_contain_text("4 tokens")
        expect(explorer.status).to_contain_text("stopped")
        expect(explorer.pane.get_by_role("button", name="Stop")).to_be_hidden()
        expect(explorer.pane.get_by_role("alert")).to_be_hidden()


def test_two_prompts_side_by_side(scripted: Client, visit: Visit) -> None:
    scripted.engine.reply = lambda request: request.prompt_token_ids[::-1]
    tokens = scripted.tokenizer
    with visit(scripted.server.url) as explorer:
        explorer.write("Hello there")
        explorer.page.get_by_role("button", name="Side by side").click()
        second = explorer.page.get_by_role("region", name="Second prompt")
        expect(second.get_by_label("Text", exact=True)).to_have_value("Hello there")
        explorer.write("the lazy dog", pane=second)
        explorer.page.get_by_role("button", name="Run both").click()
        for pane, prompt in ((explorer.pane, "Hello there"), (second, "the lazy dog")):
            expect(pane.locator(".status")).to_contain_text("ended")
            ids = tokens.encode(prompt, add_special_tokens=False)[::-1]
            assert pane.get_by_role("option").all_text_contents() == [*(shown(tokens.token_text(i)) for i in ids), ""]
        boxes = [explorer.pane.bounding_box(), second.bounding_box()]
        assert boxes[0] is not None
        assert boxes[1] is not None
        assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


def test_a_conversation_goes_on(scripted: Client, visit: Visit) -> None:
    scripted.say("Hello there")
    with visit(scripted.server.url) as explorer:
        explorer.run("What is the answer?", kind="Chat")
        explorer.pane.get_by_role("button", name="Reply to it").click()
        explorer.page.keyboard.type("Go on")
        explorer.page.keyboard.press("Control+Enter")
        expect(explorer.pane.locator(".messages select")).to_have_count(3)
        explorer.ended()
        conversation = [body for path, body in explorer.asked if path == "/tokenize"][-1]["messages"]
        assert [(message["role"], message["content"]) for message in conversation] == [
            ("user", "What is the answer?"),
            ("assistant", "Hello there"),
            ("user", "Go on"),
        ]


def test_candidates_are_ranked(embedded: RealServer, visit: Visit) -> None:
    """The prompt ends with a space, which belongs to the tokens of the candidates."""
    given = ["Lyon", "Paris", "Marseille"]
    with visit(embedded.url) as explorer:
        explorer.page.get_by_role("tab", name="Candidates").click()
        pane = explorer.page.get_by_role("region", name="Candidates")
        explorer.write("The capital of France is ", pane=pane)
        pane.get_by_label("Candidates, one per line").fill("\n".join(given) + "\n")
        explorer.page.keyboard.press("Control+Enter")
        rows = pane.locator("tbody tr")
        expect(rows).to_have_count(3)
        asked = explorer.asked[-1][1]
        assert asked["candidates"] == given
        reply = embedded.http.post("/v1/candidates", json=asked).json()
        ranked = sorted(reply["candidates"], key=lambda candidate: int(candidate["rank"]))
        assert ranked[0]["text"].strip() == "Paris"
        for row, candidate in zip(rows.all(), ranked, strict=True):
            cells = [cell.strip() for cell in row.locator("td, th").all_inner_texts()]
            assert cells[0] == str(candidate["rank"])
            assert cells[1] == "".join(entry["token"] for entry in candidate["logprobs"]).replace(" ", "␣")
            values = [float(cells[2].removesuffix(" %")) / 100, float(cells[3]), float(cells[4])]
            expected = [candidate["probability"], candidate["logprob"], candidate["mean_logprob"]]
            assert values == pytest.approx(expected, rel=0.06, abs=0.006)
        assert reply["boundary"]["kind"] == "merged"
        expect(pane.locator("caption")).to_contain_text(f"after {reply['prompt_tokens']} prompt tokens; the end")
