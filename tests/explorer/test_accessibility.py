"""The explorer for everybody: axe's rules, keys alone, narrow screens, and long replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page, expect

from tests.explorer.conftest import Explorer, Visit
from tests.server.conftest import Client

pytestmark = pytest.mark.full

# Counted before the page's own scripts run: elements that come and go, and bars that are drawn.
COUNTERS = """
window.counted = {made: 0, removed: 0, bars: 0, said: 0};
addEventListener("DOMContentLoaded", () => {
  new MutationObserver((records) => {
    for (const {target, addedNodes, removedNodes} of records) {
      if (target.id === "announcer") counted.said += addedNodes.length;
      if (!target.closest?.(".tokens")) continue;
      counted.removed += removedNodes.length;
    }
  }).observe(document, {subtree: true, childList: true});
});
const createElement = Document.prototype.createElement;
Document.prototype.createElement = function (...names) {
  counted.made += 1;
  return createElement.apply(this, names);
};
const fillRect = CanvasRenderingContext2D.prototype.fillRect;
CanvasRenderingContext2D.prototype.fillRect = function (...box) {
  counted.bars += 1;
  return fillRect.apply(this, box);
};
"""


def faults(page: Page) -> list[tuple[str, str]]:
    """The rules that axe finds broken, with the elements."""
    page.evaluate(AXE_SCRIPT + "\n;0")
    found: dict[str, Any] = page.evaluate("axe.run({resultTypes: ['violations']})")
    assert len(found["passes"]) > 15
    return [(rule["id"], node["html"]) for rule in found["violations"] for node in rule["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_finds_no_fault(scripted: Client, visit: Visit, scheme: str, width: int) -> None:
    scripted.say("the quick brown fox\n\njumps over 🎉")
    with visit(scripted.server.url, color_scheme=scheme, viewport={"width": width, "height": 800}) as explorer:
        page = explorer.page
        assert faults(page) == []
        explorer.run("Hello")
        explorer.tokens.focus()
        for key in ("ArrowRight", "ArrowRight", "1"):
            page.keyboard.press(key)
        expect(explorer.pane.locator(".branches button")).to_have_count(2)
        explorer.ended()
        page.get_by_role("button", name="Numbers").click()
        assert faults(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.get_by_role("button", name="Side by side").click()
        assert faults(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.get_by_role("button", name="Keys").click()
        assert faults(page) == []
        page.keyboard.press("Escape")
        page.get_by_role("tab", name="Candidates").click()
        assert faults(page) == []


def focused(explorer: Explorer) -> str:
    label = "document.activeElement.ariaLabel || document.activeElement.textContent"
    return str(explorer.page.evaluate(label)).strip()


def test_everything_by_keys(scripted: Client, visit: Visit) -> None:
    scripted.say("the quick brown fox jumps over the lazy dog")
    with visit(scripted.server.url, viewport={"width": 700, "height": 800}) as explorer:
        keys = explorer.page.keyboard

        def tab_to(name: str) -> None:
            for _ in range(60):
                keys.press("Tab")
                if focused(explorer).startswith(name):
                    return
            pytest.fail(f"no tab stop is {name}")

        tab_to("Explore")
        keys.press("ArrowRight")
        assert focused(explorer) == "Candidates"
        expect(explorer.page.get_by_role("region", name="Candidates")).to_be_visible()
        keys.press("ArrowLeft")
        tab_to("Message")
        keys.type("Hello")
        keys.press("Control+Enter")
        explorer.ended()
        tab_to("Tokens of the reply")
        selected = explorer.tokens.get_by_role("option", selected=True)
        places: list[str | None] = []
        for key in ("ArrowRight", "End", "ArrowLeft", "Home", "n", "n", "p", "PageDown", "PageUp"):
            keys.press(key)
            places.append(selected.get_attribute("data-place"))
        last = explorer.tokens.get_by_role("option").count() - 1
        unsure = [int(place) for place in places[4:7] if place is not None]
        assert places[:4] == ["1", str(last), str(last - 1), "0"]
        assert places[7:] == [str(min(unsure[2] + 50, last)), str(max(last - 50, 0))]
        assert 0 < unsure[0] < unsure[1]
        assert unsure[2] == unsure[0]
        assert explorer.tokens.get_attribute("aria-activedescendant") == selected.get_attribute("id")
        assert f"token 1 of {last + 1}" in (selected.get_attribute("aria-label") or "")

        keys.press("ArrowRight")
        keys.press("Enter")
        first = focused(explorer)
        keys.press("ArrowDown")
        assert focused(explorer) != first
        keys.press("Escape")
        assert focused(explorer).startswith("Tokens of the reply")
        keys.press("Enter")
        keys.press("Enter")
        expect(explorer.pane.locator(".branches button")).to_have_count(2)
        explorer.ended()
        assert focused(explorer).startswith("Tokens of the reply")
        tab_to("first")
        keys.press("Enter")
        expect(explorer.pane.locator(".branches [aria-current]")).to_contain_text("first")
        assert focused(explorer).startswith("first")


def test_lines_up_and_down(scripted: Client, visit: Visit) -> None:
    scripted.say("the dog\nthe fox\nthe sun")
    with visit(scripted.server.url) as explorer:
        explorer.run("Hello", kind="Chat")
        explorer.tokens.focus()
        top: Callable[[], float] = lambda: explorer.page.evaluate(  # noqa: E731
            "document.querySelector('[aria-selected=true].token').getBoundingClientRect().top"
        )
        tops = [top()]
        for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
            explorer.page.keyboard.press(key)
            tops.append(top())
        assert tops[0] < tops[1] < tops[2]
        assert tops[3] == tops[1]


def test_a_reply_of_4000_tokens_costs_what_its_tokens_cost(scripted: Client, visit: Visit) -> None:
    """Elements and bars are made once for each token, not again and again, and nothing is said in between."""
    ids = scripted.tokenizer.encode(" the lazy dog" * 2000, add_special_tokens=False)[:4000]
    scripted.say(ids)
    scripted.engine.tokens_per_chunk = 5
    with visit(scripted.server.url) as explorer:
        page = explorer.page
        page.add_init_script(COUNTERS)
        page.reload()
        expect(page.locator("#model")).not_to_be_empty()
        explorer.set("Longest reply", "4000")
        explorer.run("Hello")
        expect(explorer.status).to_contain_text("4,000 tokens")
        counted = page.evaluate("counted")
        assert explorer.tokens.get_by_role("option").count() == 4000
        assert counted["removed"] <= 1
        assert 4000 <= counted["made"] <= 1.5 * 4000
        # The width holds twice as many bars when it is full, and is fitted to them at the end.
        assert 4000 <= counted["bars"] <= 4 * 4000
        assert counted["said"] <= 2
        assert explorer.tokens.locator(".line").evaluate_all(
            "lines => Math.max(...lines.map(line => line.children.length)) < 450"
        )
