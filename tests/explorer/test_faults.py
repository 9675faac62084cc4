"""What goes wrong is told: servers that are gone, keys, refusals, streams that are cut."""

from __future__ import annotations

import pytest
from playwright.sync_api import Route, expect

from neper.config import ServerConfig
from neper.text.tokenizer import Tokenizer
from tests.explorer.conftest import Visit, shown
from tests.server.conftest import Client, byte_level_tokenizer, running

pytestmark = pytest.mark.full


def test_a_refusal_in_the_server_s_words(scripted: Client, visit: Visit) -> None:
    body = {"prompt": "Hello", "max_tokens": 4, "logprobs": 21}
    message = scripted.http.post("/v1/completions", json=body).json()["error"]["message"]
    with visit(scripted.server.url) as explorer:
        explorer.faults = "status of 400"
        explorer.set("Alternatives", "21")
        explorer.write("Hello")
        explorer.page.keyboard.press("Control+Enter")
        problem = explorer.pane.get_by_role("alert")
        expect(problem).to_contain_text(message)
        expect(problem).to_contain_text("status 400")
        scripted.say("the")
        explorer.set("Alternatives", "20")
        problem.get_by_role("button", name="Try again").click()
        assert explorer.ended() == ["the", ""]
        expect(problem).to_be_hidden()


def test_a_server_that_is_gone(scripted: Client, visit: Visit) -> None:
    with visit(scripted.server.url) as explorer:
        explorer.faults = "ERR_FAILED"
        explorer.page.route("**/tokenize", lambda route: route.abort())
        explorer.write("Hello")
        explorer.page.keyboard.press("Control+Enter")
        problem = explorer.pane.get_by_role("alert")
        expect(problem).to_contain_text("cannot be reached")
        scripted.say("the")
        explorer.page.unroute("**/tokenize")
        problem.get_by_role("button", name="Try again").click()
        assert explorer.ended() == ["the", ""]


def test_a_stream_that_is_cut_goes_on_from_there(scripted: Client, visit: Visit) -> None:
    ids = scripted.say("the quick brown fox jumps")

    def cut(route: Route) -> None:
        text = route.fetch().text()
        route.fulfill(body="\n\n".join(text.split("\n\n")[:3]) + '\n\ndata: {"id"', content_type="text/event-stream")

    with visit(scripted.server.url) as explorer:
        explorer.page.route("**/v1/completions", cut)
        texts = explorer.run("Hello", kind="Continue a text")
        assert texts == [shown(scripted.tokenizer.token_text(i)) for i in ids[:3]]
        problem = explorer.pane.get_by_role("alert")
        expect(problem).to_contain_text("broke off")
        explorer.page.unroute("**/v1/completions")
        scripted.say("the lazy dog")
        problem.get_by_role("button", name="Go on from here").click()
        expect(explorer.status).to_contain_text("ended")
        prompt = explorer.generations()[0]["prompt"]
        assert explorer.generations()[-1]["prompt"] == [*prompt, *ids[:3]]


def test_an_engine_that_fails(scripted: Client, visit: Visit) -> None:
    scripted.say("the quick brown fox jumps")
    scripted.engine.fail_after = 2
    with visit(scripted.server.url) as explorer:
        assert len(explorer.run("Hello", kind="Continue a text")) == 2
        expect(explorer.pane.get_by_role("alert")).to_contain_text("a row was NaN")
        expect(explorer.status).to_contain_text("broken off")


def test_a_key_is_asked_for_and_kept_in_the_tab(tokenizer: Tokenizer, visit: Visit) -> None:
    with running(tokenizer, ServerConfig(api_key="sesam")) as client:
        client.say("the")

        def enter(key: str) -> None:
            dialog = explorer.page.get_by_role("dialog")
            dialog.get_by_label("API key").fill(key)
            explorer.page.keyboard.press("Enter")

        with visit(client.server.url, ready=False) as explorer:
            explorer.faults = "status of 401"
            enter("wrong")
            expect(explorer.page.get_by_role("dialog").get_by_role("alert")).to_contain_text("does not accept")
            enter("sesam")
            expect(explorer.page.locator("#model")).not_to_be_empty()
            explorer.set("Longest reply", "4")
            assert explorer.run("Hello") == ["the", ""]
            explorer.page.reload()
            expect(explorer.page.locator("#model")).not_to_be_empty()
            assert explorer.page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


def test_a_server_without_candidates_says_so(scripted: Client, visit: Visit) -> None:
    missing = {"error": {"message": "there is no /v1/candidates here", "type": "", "param": None, "code": "not_found"}}
    with visit(scripted.server.url) as explorer:
        explorer.faults = "status of 404"
        explorer.page.route("**/v1/candidates", lambda route: route.fulfill(status=404, json=missing))
        explorer.page.get_by_role("tab", name="Candidates").click()
        pane = explorer.page.get_by_role("region", name="Candidates")
        explorer.write("Hello", pane=pane)
        pane.get_by_label("Candidates, one per line").fill("a")
        pane.get_by_role("button", name="Rank").click()
        expect(pane.get_by_role("alert")).to_contain_text("does not rank candidates")
