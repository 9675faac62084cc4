"""Contexts cut into parts, and parts handed out to programs: planned on the host, from lengths alone.

The parts of a context follow from its own length, and so do the bits of its result: each part is summed by itself, and
the sums are folded in the parts' order. One program takes all parts of a context, or several programs share them. That
choice follows from the whole step, so that programs fill the device. It changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ITEM_WORDS = 7
"""Words of an item: sequence, its first flat row, its tokens in this step, its context, the first part, the part behind
the last one (or a larger number), and the first row of the sequence's records."""
LEAST = 64
"""Fewest tokens of a part, where there are several; no less than a tile of the kernel."""
MOST = 128
"""Most parts of a context: one program joins them."""
# A context that is cut is longer than this fraction of a lane's share.
_GRAIN = 0.25
# The costs of an item beside its tokens, and of joining parts once per step. Both are in tokens.
_ITEM = 200
_JOIN = 100


@dataclass(frozen=True)
class Planner:
    """Hands out the parts of a step's contexts. An item is some parts of one sequence, a program for each KV head.

    Attributes:
        lanes: items whose programs run at the same time.
        most_parts: most parts of a context.
        record_rows: query rows with room for records, counted once for each part; 0 = no context is cut.
    """

    lanes: int
    most_parts: int
    record_rows: int

    def most_items(self, seqs: int) -> int:
        """Most items of a step of so many sequences."""
        # Each cut through the line of parts, of which there are fewer than lanes, makes one more.
        return seqs + (self.lanes - 1 if self.record_rows else 0)

    def fill(self, items: Array, first_rows: Array, query_lens: Array, context_lens: Array) -> int:
        """Write the items of S sequences into `items` [N, ITEM_WORDS] int32, the longest first; returns their number.

        Args:
            first_rows, query_lens, context_lens: [S]; see `AttentionInputs`.
        """
        older = np.maximum(context_lens - query_lens, 0)
        order = np.argsort(-older, kind="stable")
        lengths, zeros = older[order], np.zeros_like(order)
        seqs, first, behind, records = order, zeros, np.full_like(order, MOST), zeros
        if self.record_rows and lengths.max(initial=0) > LEAST:
            parts = np.clip(-(-lengths // LEAST), 1, self.most_parts)
            rows = np.cumsum(parts * query_lens[order])
            if cut := self._num_cut(lengths, parts, rows):
                pieces, first_of, behind_of, sizes = self._pieces(lengths[:cut], parts[:cut])
                longest = np.argsort(-np.append(sizes, lengths[cut:]), kind="stable")
                chosen = np.append(pieces, np.arange(cut, len(order)))[longest]
                first = np.append(first_of, zeros[cut:])[longest]
                behind = np.append(behind_of, behind[cut:])[longest]
                seqs, records = order[chosen], np.append(0, rows)[chosen]
        found = items[: len(seqs)]
        found[:, 0], found[:, 4], found[:, 5], found[:, 6] = seqs, first, behind, records
        found[:, 1], found[:, 2], found[:, 3] = first_rows[seqs], query_lens[seqs], context_lens[seqs]
        return len(seqs)

    def _num_cut(self, lengths: Array, parts: Array, rows: Array) -> int:
        """The number of the longest contexts that are cut. `lengths` descend; `rows` of records are counted up."""
        sums = np.cumsum(lengths)
        share = int(sums[-1]) / self.lanes
        most = min(int((parts > 1).sum()), int((rows <= self.record_rows).sum()), int((lengths > _GRAIN * share).sum()))
        best, least = 0, float((lengths[:: self.lanes] + _ITEM).sum())
        # The remainder of full rounds, all above a lane's share, and all that are not short beside it.
        for count in {len(lengths) % self.lanes, int((lengths > share).sum()), most}:
            if 0 < count <= most:
                takes = (int(sums[count - 1]) + count * _ITEM) / self.lanes + _ITEM + _JOIN
                takes += float((lengths[count :: self.lanes] + _ITEM).sum())
                if takes < least:
                    best, least = count, takes
        return best

    def _pieces(self, lengths: Array, parts: Array) -> tuple[Array, Array, Array, Array]:
        """For each item the number of its context, its first part, the part behind its last one, and its tokens.

        The parts of all these contexts stand in one line, and each lane gets an equal piece of it.
        """
        seqs = np.repeat(np.arange(len(parts)), parts)
        part = np.arange(len(seqs)) - np.repeat(np.cumsum(parts) - parts, parts)
        each = (lengths / parts)[seqs]
        middles = np.cumsum(each) - each / 2
        lanes = (middles * (self.lanes / int(lengths.sum()))).astype(np.intp)
        starts = np.flatnonzero(np.diff(seqs, prepend=-1) | np.diff(lanes, prepend=-1))
        behind = part[np.append(starts[1:], len(part)) - 1] + 1
        seqs, part = seqs[starts], part[starts]
        return seqs, part, behind, (behind - part) * each[starts]
