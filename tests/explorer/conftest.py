"""A real browser, and pages of the explorer in it. Nothing may go to another host, and no page may log an error."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, expect, sync_playwright

from neper.config import ServerConfig
from neper.models.source import ModelSource
from tests.cases.conftest import RealServer, serving
from tests.server.conftest import Client, byte_level_tokenizer, fresh, running


def shown(text: str) -> str:
    """A token as its element has it: the space before a word is outside."""
    return text[1:] if re.match(r" \S", text) else text


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 120
"""A limit for what comes soon. A test that passes does not wait for it."""

expect.set_options(timeout=SECONDS * 1000)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs a browser: {', '.join(BROWSERS)} (apt-get install chromium)")
    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers lack. The pages are ours.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Explorer:
    """The page in a tab of its own.

    Attributes:
        page: the tab. pane: the first prompt and its reply.
        asked: the requests of the page, with their bodies as JSON, but for its files.
        faults: what a test did on purpose and may be logged as an error, as a regex.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.asked: list[tuple[str, Any]] = []
        self.faults: str | None = None
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        page.set_default_timeout(SECONDS * 1000)
        page.on("console", self._logged)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._asked)
        self.pane = page.get_by_role("region", name="First prompt")
        self.tokens = self.pane.get_by_role("listbox")
        self.status = self.pane.locator(".status")

    def _logged(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)
        path = urlsplit(request.url).path
        if path != "/" and not path.startswith("/explorer/"):
            self.asked.append((path, json.loads(request.post_data) if request.post_data else None))

    def generations(self) -> list[dict[str, Any]]:
        return [body for path, body in self.asked if path == "/v1/completions"]

    def set(self, label: str, value: str) -> None:
        self.page.get_by_role("group", name="Settings").get_by_label(label).fill(value)

    def write(self, text: str, *, kind: str = "Continue a text", pane: Locator | None = None) -> None:
        """Choose what to do and write the prompt."""
        pane = pane or self.pane
        pane.get_by_role("radio", name=kind).check()
        pane.locator("textarea:visible").first.fill(text)

    def run(self, text: str, *, kind: str = "Continue a text") -> list[str]:
        """Write a prompt, run it, and wait for its end. Returns the tokens of the reply."""
        self.write(text, kind=kind)
        self.pane.locator("button.primary").click()
        return self.ended()

    def ended(self) -> list[str]:
        expect(self.status).to_have_text(re.compile("ended|cut at|stopped|broken|whole text"))
        return self.texts()

    def texts(self) -> list[str]:
        """The tokens that are shown, without the space before a word."""
        return self.tokens.get_by_role("option").all_text_contents()

    def select(self, place: int) -> None:
        self.tokens.get_by_role("option").nth(place).click()

    def facts(self) -> dict[str, str]:
        """What the details say of the selected token."""
        pairs = self.pane.locator(".facts > div")
        return {pair.locator("dt").inner_text(): pair.locator("dd").inner_text() for pair in pairs.all()}

    def alternatives(self) -> list[tuple[str, str]]:
        """Text and percentage of each."""
        rows = self.pane.locator(".alternatives button").all()
        return [(row.locator(".text").inner_text(), row.locator(".percent").inner_text()) for row in rows]


Visit = Callable[..., AbstractContextManager[Explorer]]


@pytest.fixture
def visit(browser: Browser) -> Visit:
    """`visit(url)`: an explorer, opened; afterwards it has logged no error and asked no other host.

    `ready`: the server tells the page its model. Other arguments are those of a browser's context.
    """

    @contextlib.contextmanager
    def visiting(url: str, *, ready: bool = True, **options: Any) -> Iterator[Explorer]:
        context = browser.new_context(**options)
        explorer = Explorer(context.new_page())
        try:
            explorer.page.goto(url)
            if ready:
                expect(explorer.page.locator("#model")).not_to_be_empty()
            yield explorer
            faults = explorer.faults
            assert [text for text in explorer.errors if faults is None or not re.search(faults, text)] == []
            assert explorer.hosts == {urlsplit(url).netloc}
        finally:
            context.close()

    return visiting


@pytest.fixture(scope="session")
def shared_scripted() -> Iterator[Client]:
    with running(byte_level_tokenizer(), ServerConfig()) as client:
        yield client


@pytest.fixture
def scripted(shared_scripted: Client) -> Iterator[Client]:
    """A server whose engine says what the test tells it to."""
    with fresh(shared_scripted, 8192) as client:
        yield client


@pytest.fixture(scope="session")
def embedded(smollm2: ModelSource) -> Iterator[RealServer]:
    """A server of the default model."""
    with serving(smollm2) as server:
        yield server
