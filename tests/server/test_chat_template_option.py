"""`--chat-template`, and a start that a template cannot hold."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from neper.errors import StartupError
from neper.server.backend import _in_thread
from neper.server.run import read_chat_template


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{% for m in messages %}", "does not compile: line 1"),
        (b"\xff", "cannot read"),
        (None, "has no"),
    ],
)
def test_case_100_a_file_that_is_none_is_one_line(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartupError, match=reason) as caught:
        read_chat_template(str(file))
    assert str(file) in caught.value.message
    assert "\n" not in caught.value.message


def test_case_100_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("é{{ messages[0].content }}", encoding="utf-8")
    assert read_chat_template(str(tmp_path / "template.jinja")) == "é{{ messages[0].content }}"
    assert read_chat_template(None) is None


def test_case_119_nobody_waits_for_work_that_was_left() -> None:
    going, end = threading.Event(), threading.Event()

    async def leave() -> None:
        def work() -> None:
            going.set()
            end.wait(60)

        task = asyncio.create_task(_in_thread(work))
        await asyncio.to_thread(going.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tokenizer")

    asyncio.run(leave())  # which joins the threads of its executor, and returns
    assert not end.is_set()
    end.set()


def test_an_error_in_the_thread_is_raised() -> None:
    def work() -> None:
        raise StartupError("no")

    with pytest.raises(StartupError, match="no"):
        asyncio.run(_in_thread(work))
