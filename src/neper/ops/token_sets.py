"""Sets of token ids, one a row, as the reduction reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neper.errors import InvalidRequestError

LISTED_WHOLE = 1024
"""An allowed set of up to this many ids is listed whole; a larger one lists its top k."""


@dataclass(frozen=True)
class TokenSets:
    """R sets of distinct ids in ascending order, of any lengths. An empty set means: this row has none.

    Attributes:
        ids: [n] int32, the sets one after the other, on the device of the logits.
        offsets: [R + 1] int32 on the device: the set of row r is ids[offsets[r] : offsets[r + 1]].
        lengths: [R] int64 on the host, so that nothing must be read back.
        max_id: no id is larger; -1 where all sets are empty.
    """

    ids: Tensor
    offsets: Tensor
    lengths: npt.NDArray[np.int64]
    max_id: int

    @staticmethod
    def of(sets: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> TokenSets:
        """The sets of these lists of ids; an id that is named twice counts once.

        Raises:
            InvalidRequestError: on a negative id.
        """
        rows = [np.unique(np.asarray(ids, dtype=np.int64)) for ids in sets]
        lengths = np.asarray([len(row) for row in rows], dtype=np.int64)
        flat = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        if len(flat) and flat.min() < 0:
            raise InvalidRequestError(f"token ids must not be negative, got {flat.min()}")
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
        end = int(self.lengths[: index + 1].sum())
        return self.ids[end - int(self.lengths[index]) : end]

    def take(self, rows: slice) -> TokenSets:
        """The sets of some consecutive rows."""
        start, stop, _ = rows.indices(len(self.lengths))
        first, end = int(self.lengths[:start].sum()), int(self.lengths[:stop].sum())
        return TokenSets(
            ids=self.ids[first:end],
            offsets=self.offsets[start : stop + 1] - first,
            lengths=self.lengths[start:stop],
            max_id=self.max_id,
        )
