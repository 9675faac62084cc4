"""Scorer: rows in, scored rows out in their order, a window of rows at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from neper.config import ScoreConfig
from neper.errors import InvalidRequestError, NeperError
from neper.score.candidates import CandidatesMode
from neper.score.mode import Mode, check_top, rough_length
from neper.score.passages import STEPS
from neper.score.replies import ReplyMode
from neper.score.row import Row, ScoredRow
from neper.score.texts import TextMode

if TYPE_CHECKING:
    from neper.engine.llm import LLM

MAX_ROWS = 4096
MAX_BYTES = 64 * 2**20
"""Bounds of a window: rows, and bytes of them. A third is the characters that a few steps of the engine compute."""

MODES: dict[str, type[Mode]] = {"text": TextMode, "candidates": CandidatesMode, "reply": ReplyMode}

_CHARACTERS_PER_TOKEN = 4
_Prepared = list[tuple[Row, Any]]


class Scorer:
    """Scores rows with a model.

    A window is rows that are computed together. It depends on the rows from its beginning on alone. So the same windows
    are made when a run is continued after one of them.
    """

    def __init__(self, llm: LLM, config: ScoreConfig) -> None:
        check_top(llm, config.top or 0)
        mode = MODES[config.mode]
        self._mode: Mode = mode(llm, config)
        self._columns = mode.columns(config)
        self._characters = _CHARACTERS_PER_TOKEN * STEPS * llm.core.settings.max_num_batched_tokens

    def score(self, rows: Iterable[Row]) -> Iterator[list[ScoredRow]]:
        """The rows in windows, scored or failed. While one window is computed, a thread prepares the next one."""
        with ThreadPoolExecutor(1, thread_name_prefix="neper-score") as pool:
            ahead: deque[Future[_Prepared]] = deque()
            for window in self._windows(rows):
                ahead.append(pool.submit(self._prepare, window))
                if len(ahead) > 1:
                    yield self._compute(ahead.popleft().result())
            while ahead:
                yield self._compute(ahead.popleft().result())

    def _windows(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        window: list[Row] = []
        size = characters = 0
        for row in rows:
            window.append(row)
            size += row.size
            characters += sum(rough_length(row.values.get(column)) for column in self._columns)
            if len(window) >= MAX_ROWS or size >= MAX_BYTES or characters >= self._characters:
                yield window
                window, size, characters = [], 0, 0
        if window:
            yield window

    def _prepare(self, window: list[Row]) -> _Prepared:
        """Each row with what its mode makes of it, or the error that says why it cannot."""
        return [(row, self._prepared(row)) for row in window]

    def _prepared(self, row: Row) -> Any:
        if row.error is not None:
            return InvalidRequestError(row.error)
        try:
            return self._mode.prepare(row.values)
        except NeperError as error:
            return error

    def _compute(self, prepared: _Prepared) -> list[ScoredRow]:
        results = iter(self._mode.compute([item for _, item in prepared if not isinstance(item, NeperError)]))
        return [_scored(row, item if isinstance(item, NeperError) else next(results)) for row, item in prepared]


def _scored(row: Row, result: dict[str, Any] | NeperError) -> ScoredRow:
    return ScoredRow(row, None, result.message) if isinstance(result, NeperError) else ScoredRow(row, result)
