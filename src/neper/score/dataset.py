"""score_dataset: the scorer for Python, over any rows."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from neper.config import DEFAULT_MODEL, EngineConfig, ScoreConfig
from neper.engine.llm import LLM
from neper.errors import ConfigError
from neper.score.formats import open_reader
from neper.score.row import Row, ScoredRow
from neper.score.scorer import Scorer


def score_dataset(
    rows: Iterable[Mapping[str, Any]] | str | os.PathLike[str],
    mode: str = ScoreConfig.mode,
    *,
    llm: LLM | None = None,
    model: str = DEFAULT_MODEL,
    **settings: Any,
) -> Generator[ScoredRow, None, None]:
    """Scores of rows, in their order, as `neper score` computes them.

        for scored in neper.score_dataset([{"text": "The sky is blue."}], dtype="float32"):
            scored.scores["perplexity"] if scored.error is None else scored.error

    Rows are taken as they are needed, a window ahead of what is computed, so there may be any number of them.

    Args:
        rows: mappings from columns to values, or a .jsonl, .csv or .parquet file.
        mode: text, candidates or reply.
        llm: the model, where it is loaded already. It is in use until the iterator has ended or is closed.
        model: the model to load otherwise.
        **settings: fields of neper.config.ScoreConfig (top, stride, text_column, ...), and where no `llm` is given
            those of EngineConfig (dtype, max_model_len, ...).

    Raises:
        ConfigError: a setting is not known, or has a value that it cannot have.
        StartupError: the model or the file cannot be read.
    """
    names = {field.name for field in fields(ScoreConfig)}
    own = {name: value for name, value in settings.items() if name in names}
    engine = {name: value for name, value in settings.items() if name not in names}
    try:
        config = msgspec.convert({"mode": mode, **own}, ScoreConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    if llm is not None and engine:
        raise ConfigError(f"{', '.join(engine)}: with an `llm` the engine's settings are its own")
    source = open_reader(Path(rows)).rows() if isinstance(rows, (str, os.PathLike)) else _numbered(rows)
    if llm is None:
        engine.setdefault("max_logprobs", max(config.top or 0, EngineConfig.max_logprobs))
        llm = LLM(model, **engine)
    return _rows(Scorer(llm, config), source)


def _rows(scorer: Scorer, source: Iterable[Row]) -> Generator[ScoredRow, None, None]:
    for window in scorer.score(source):
        yield from window


def _numbered(rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for number, values in enumerate(rows, start=1):
        known = isinstance(values, Mapping)
        error = None if known else f"the row is of type {type(values).__name__}, not a mapping"
        yield Row(number, values if known else {}, error)
