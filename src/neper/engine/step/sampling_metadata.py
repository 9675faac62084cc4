"""The rows of a step that get a next token: what each asks for, and what choosing and scoring them needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from torch import Tensor

from neper.engine.plan.scheduler import SampledRow
from neper.engine.step.inputs import RowFields, to_device
from neper.engine.step.masks import MaskBuilder
from neper.engine.step.view_rows import ViewRows
from neper.ops import Bias, DrawInputs, Masks


class Scoring(IntEnum):
    """How a row that gets a next token is scored; rows stand in this order."""

    UNSCORED = 0
    VIEW = 1
    PROCESSED_VIEW = 2
    PLAIN = 3


class RowKind(NamedTuple):
    """What a row asks for, and stands by among the others.

    Attributes:
        takes_best: its token is the first of its list.
        listed: places of its list.
    """

    scoring: Scoring
    takes_best: bool
    listed: int


@dataclass(frozen=True)
class SamplingMetadata:
    """The S rows of a step that get a next token, in an order that leaves every part of them a slice.

    First the rows without scores, then those scored in a way of their own, then those that are scored and sampled (or
    edited), last those that are scored and take the model's own best token: the reduction that scores them finds it.

    Attributes:
        rows: [S].
        fields: device tensors of the (padded) rows.
        num_chosen: how many rows, from the first on, have their token chosen by `sample`.
        drawn: the rows that are not greedy.
        filtered: one of those has a top-k, top-p or min-p.
        bias: logit bias and bans; None when there is none.
        penalized: the rows that have penalties.
        masked: the rows that may sample some ids only.
        mask_builder: what makes their masks.
        views: groups of rows that are scored in a way of their own.
        scored: [(top_k, number of rows)], runs of the other rows that want logprobs, up to the last row.
    """

    rows: tuple[SampledRow, ...]
    fields: RowFields[Tensor]
    num_chosen: int
    drawn: tuple[int, ...]
    filtered: bool
    bias: Bias | None
    penalized: tuple[int, ...]
    masked: tuple[int, ...]
    mask_builder: MaskBuilder
    views: tuple[ViewRows, ...]
    scored: tuple[tuple[int, int], ...]

    @property
    def edited(self) -> bool:
        """Some rows are not chosen from the model's own logits."""
        return bool(self.penalized or self.masked) or self.bias is not None

    @property
    def num_scored(self) -> int:
        """How many rows, up to the last one, are scored together."""
        return sum(count for _, count in self.scored)

    @property
    def num_plain(self) -> int:
        """How many rows, from the first on, are not among those."""
        return len(self.rows) - self.num_scored

    @property
    def num_unscored(self) -> int:
        """How many rows, from the first on, have no scores at all."""
        return self.views[0].begin if self.views else self.num_plain

    @property
    def num_padded(self) -> int:
        """Rows of the fields: S and what pads it."""
        return len(self.fields.slots)

    def draws(self, part: slice | None = None) -> DrawInputs | None:
        """Parameters of the rows that are drawn, as the reference takes them; of some rows alone, counted from 0."""
        begin, end, _ = (part or slice(None)).indices(len(self.rows))
        drawn = [row for row in self.drawn if begin <= row < end]
        if not drawn:
            return None
        rows = to_device(np.array(drawn), self.fields.slots.device)
        columns = {name: column[rows] for name, column in self.fields.columns().items()}
        return DrawInputs(rows=rows - begin, filtered=self.filtered, **columns)

    def masks(self) -> Masks | None:
        """The masks of the masked rows; None when there are none. See `MaskBuilder.build`."""
        return self.mask_builder.build([self.rows[row] for row in self.masked], self.masked, self.fields.slots.device)

    def view_logits(self, view: ViewRows, logits: Tensor, edited: Tensor | None) -> Tensor:
        """The logits that a view's rows are scored by; see `ViewRows.source`."""
        return view.source(logits, edited, self.draws(view.rows) if view.processed else None)
