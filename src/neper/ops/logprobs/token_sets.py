"""Sets of token ids, one a row, as the reduction reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neper.errors import InvalidRequestError
from neper.types import LISTED_WHOLE


@dataclass(frozen=True)
class TokenSets:
    """R sets of distinct ids in ascending order, of any lengths. An empty set means: this row has none.

    Attributes:
        ids: [n] int32, the sets one after the other, on the device of the logits; of other rows too, in a part.
        offsets: [R + 1] int32 on the device: the set of row r is ids[offsets[r] : offsets[r + 1]].
        lengths: [R] int64 on the host, so that nothing must be read back.
        max_id: no id is larger; -1 where all sets are empty.
        begin: where the first row's set begins in ids, on the host: offsets[0].
    """

    ids: Tensor
    offsets: Tensor
    lengths: npt.NDArray[np.int64]
    max_id: int
    begin: int = 0

    @staticmethod
    def of(
        sets: Sequence[Iterable[int] | None],
        device: torch.device | str = "cpu",
        *,
        repeats: Sequence[int] | None = None,
    ) -> TokenSets:
        """The sets of these lists of ids; an id that is named twice counts once.

        Args:
            sets: for each row a list (or set, or array) of ids; empty or None where the row has none.
            repeats: how many rows in a row have each of the sets; None = one each.

        Raises:
            InvalidRequestError: on a negative id, and on anything but one list of integers per row.
        """
        rows = [_distinct(index, ids) for index, ids in enumerate(sets)]
        lengths = np.asarray([len(row) for row in rows], dtype=np.int64)
        if repeats is not None:
            rows = [np.tile(row, count) for row, count in zip(rows, repeats, strict=True)]
            lengths = np.repeat(lengths, repeats)
        flat = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        if len(flat) and flat.min() < 0:
            raise InvalidRequestError(f"token ids must not be negative, got {flat.min()}")
        if len(flat) and flat.max() >= 2**31:
            raise InvalidRequestError(f"token id {flat.max()} is beyond every vocabulary")
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return TokenSets(
            ids=torch.from_numpy(flat.astype(np.int32)).to(device, non_blocking=True),
            offsets=torch.from_numpy(offsets.astype(np.int32)).to(device, non_blocking=True),
            lengths=lengths,
            max_id=int(flat.max()) if len(flat) else -1,
        )

    @property
    def longest(self) -> int:
        """Ids of the largest set."""
        return int(self.lengths.max(initial=0))

    @property
    def longest_listed(self) -> int:
        """Ids of the largest set that is listed whole when it restricts (LISTED_WHOLE at most)."""
        return int(self.lengths[self.lengths <= LISTED_WHOLE].max(initial=0))

    def row(self, index: int) -> Tensor:
        """The ids of one row's set, [length] int32 on the device."""
        begin = self.begin + int(self.lengths[:index].sum())
        return self.ids[begin : begin + int(self.lengths[index])]

    def take(self, rows: slice) -> TokenSets:
        """The sets of some consecutive rows, as views."""
        start, stop, _ = rows.indices(len(self.lengths))
        return replace(
            self,
            offsets=self.offsets[start : stop + 1],
            lengths=self.lengths[start:stop],
            begin=self.begin + int(self.lengths[:start].sum()),
        )


def _distinct(index: int, ids: Iterable[int] | None) -> npt.NDArray[np.int64]:
    """The ids of one row, ascending, each once."""
    if ids is None:
        return np.empty(0, dtype=np.int64)
    try:
        values = ids if isinstance(ids, np.ndarray) else np.asarray(list(ids))
    except TypeError:
        raise InvalidRequestError(
            f"the set of row {index} is {ids!r}: give one list of ids per row, [[1, 2]] * rows for the same in all"
        ) from None
    if len(values) and (values.ndim != 1 or not np.issubdtype(values.dtype, np.integer)):
        raise InvalidRequestError(f"the set of row {index} must hold integers, got {ids!r:.80}")
    return np.unique(values.astype(np.int64))
