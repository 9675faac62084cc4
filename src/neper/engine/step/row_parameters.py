"""The one table of what rows are drawn by: layout, filling and arguments of a draw follow from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from neper.engine.plan.scheduler import SampledRow
from neper.ops import noise_keys
from neper.ops.sampling.api import DrawRows
from neper.types import SamplingParams


class RowParameter(NamedTuple):
    """A column of the draw's arguments.

    Attributes:
        dtype: of its values, 32 bits each.
        off: the value of rows that are not drawn.
        value: gives a row's value, of the row and its request's parameters.
        width: values of a row.
    """

    dtype: type[np.generic]
    off: float
    value: Callable[[SampledRow, SamplingParams], Any]
    width: int = 1


_LAST_INT = 2**31 - 1

ROW_PARAMETERS = DrawRows(
    temperature=RowParameter(np.float32, 0.0, lambda _, sampling: sampling.temperature),
    top_p=RowParameter(np.float32, 1.0, lambda _, sampling: sampling.top_p),
    min_p=RowParameter(np.float32, 0.0, lambda _, sampling: sampling.min_p),
    top_n_sigma=RowParameter(np.float32, 0.0, lambda _, sampling: sampling.top_n_sigma),
    top_k=RowParameter(np.int32, 0, lambda _, sampling: min(sampling.top_k, _LAST_INT)),
    keys=RowParameter(np.uint32, 0, lambda row, _: noise_keys(row.seq.seed, row.num_output_tokens), width=2),
)
