"""The backend of the server: an engine, its model's tokenizer, and the model's name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from neper.config import EngineConfig, LineEngineConfig, WatchConfig
from neper.engine.remote.client import EngineClient
from neper.errors import ModelLoadError, StartupError
from neper.models import source
from neper.progress import ProgressLine
from neper.text.ends import describe_ends, reply_ends
from neper.text.tokenizer import Tokenizer
from neper.text.tools import tool_format
from neper.wire.drive import LineEngine

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class OwnBackend:
    """Our own engine. Making one finds the model, which can take long: it may have to be downloaded or converted.

    Attributes:
        name: that of the model.
        tokenizer, eos_token_ids: known once it was started.
    """

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]

    def __init__(
        self,
        config: EngineConfig,
        watch: WatchConfig,
        *,
        log_level: str,
        chat_template: str | None = None,
        tool_call_parser: str | None = None,
    ) -> None:
        with ProgressLine(sys.stderr) as progress:
            model = source.resolve(config.model, progress=progress)
        config.context(model.model_max_length)  # before the engine's process takes seconds to find out
        self._progress = ProgressLine(sys.stderr)
        self.name = model.name
        self._path = model.path
        self._read_tokenizer = partial(_tokenizer, self._path, chat_template, tool_call_parser)
        self.engine = EngineClient(config, model, log_level=log_level, progress=self._progress, watch=watch)

    async def start(self) -> None:
        """Start the engine. Raises StartupError. To end a start under way, cancel it."""
        # The engine takes seconds to start, in its own process. Meanwhile the tokenizer is read. The first failure of
        # both ends the start.
        reading = asyncio.create_task(_in_thread(self._read_tokenizer))
        starting = asyncio.create_task(self.engine.start())
        try:
            with self._progress:
                self.tokenizer, _ = await asyncio.gather(reading, starting)
        finally:
            starting.cancel()
            await asyncio.wait((starting,))
        self.eos_token_ids = _ends(self.tokenizer, self._path)

    async def close(self) -> None:
        """End the engine. Safe before it was started."""
        await self.engine.close()


class LineBackend:
    """The engine of a command that speaks lines, with the tokenizer of a directory or of a model."""

    def __init__(
        self, config: LineEngineConfig, *, chat_template: str | None = None, tool_call_parser: str | None = None
    ) -> None:
        assert config.tokenizer is not None
        self._path = Path(config.tokenizer).expanduser()
        self.name = self._path.resolve().name
        if not self._path.is_dir():
            try:
                self._path = source.resolve(config.tokenizer).path
            except ModelLoadError as error:
                raise StartupError(f"--tokenizer: {error}") from None
        self.tokenizer = _tokenizer(self._path, chat_template, tool_call_parser)
        self.eos_token_ids = _ends(self.tokenizer, self._path)
        # A model's logits are often wider than its tokenizer.
        vocab_size = max(self.tokenizer.vocab_size, source.vocab_size(self._path) or 0)
        self.engine = LineEngine(config, vocab_size=vocab_size)

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        await self.engine.close()


Backend = OwnBackend | LineBackend


def _tokenizer(path: Path, chat_template: str | None, tool_call_parser: str | None) -> Tokenizer:
    """A model's tokenizer. Its chat template was checked, and fits the parser."""
    tokenizer = Tokenizer.from_directory(path, chat_template=chat_template)
    try:
        tokenizer.check_chat_template()
    except ModelLoadError as error:
        raise StartupError(f"{error}; give another with --chat-template") from None
    tool_format(tokenizer, tool_call_parser)
    return tokenizer


def _ends(tokenizer: Tokenizer, path: Path) -> tuple[int, ...]:
    ends = reply_ends(tokenizer, source.named_ends(path))
    logger.info("%s", describe_ends(tokenizer, ends))
    return tuple(ends)


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Run work in a thread that ends with the process, so that an early exit does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        told: tuple[Callable[[Any], None], Any]
        try:
            told = (future.set_result, work())
        except BaseException as error:
            told = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(finish, *told)

    threading.Thread(target=run, name="tokenizer", daemon=True).start()
    return await future
