"""Makes the pictures of the explorer in this folder, from a server of the default model: `neper serve` on port 8000.

Run it as `python docs/explorer_pictures.py [URL]`. It needs playwright, and a Chromium or Chrome of the machine.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

FOLDER = Path(__file__).parent
QUESTION = "What is the capital of France? Tell me something about it."
STORY = "The old lighthouse keeper had not spoken to anyone in years. One night,"
expect.set_options(timeout=300_000)


def ended(page: Page, count: int = 1) -> None:
    for status in page.locator(".status:visible").all()[:count]:
        expect(status).to_have_text(re.compile("ended|cut at|whole text"))


def reply(page: Page) -> None:
    """A reply, one of its tokens, and a branch from it."""
    page.get_by_label("Message", exact=True).first.fill(QUESTION)
    page.get_by_label("Longest reply").first.fill("120")
    page.get_by_role("button", name="Generate").first.click()
    expect(page.locator(".status").first).to_contain_text("·")
    ended(page)
    tokens = page.get_by_role("listbox").first
    tokens.focus()
    for key in ("n", "n", "2"):
        page.keyboard.press(key)
    expect(page.get_by_role("navigation", name="Branches")).to_be_visible()
    ended(page)


def compare(page: Page) -> None:
    """Two prompts side by side."""
    page.get_by_role("radio", name="Continue a text").first.check()
    page.get_by_label("Text", exact=True).first.fill(STORY)
    page.get_by_label("Longest reply").first.fill("60")
    page.get_by_role("button", name="Side by side").click()
    second = page.get_by_role("region", name="Second prompt")
    second.get_by_label("Text", exact=True).fill(STORY.replace("lighthouse keeper", "programmer"))
    page.get_by_role("button", name="Run both").click()
    for status in page.locator(".status").all():
        expect(status).to_contain_text("·")
    ended(page, 2)


PICTURES = {
    "explorer": (reply, {"viewport": {"width": 1280, "height": 1000}}),
    "explorer-dark": (reply, {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "dark"}),
    "explorer-compare": (compare, {"viewport": {"width": 1280, "height": 900}}),
}


def main(url: str) -> None:
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (act, options) in PICTURES.items():
            context = browser.new_context(**options)
            page = context.new_page()
            page.goto(url)
            expect(page.locator("#model")).not_to_be_empty()
            act(page)
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=FOLDER / f"{name}.png")
            context.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/")
