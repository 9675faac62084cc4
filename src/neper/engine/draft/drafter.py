"""The Drafter protocol: all that the step loop knows of what proposes tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Protocol

from neper.engine.plan.sequence import Sequence
from neper.engine.step.runner import BegunStep


class Drafter(Protocol):
    """Proposes tokens that may follow those of running sequences.

    A draft changes when tokens come, never which: the model verifies each. So a drafter may be wrong at any time.

    Attributes:
        writes: it has a cache of its own, in the places of the sequences' blocks, and needs blocks for its drafts.
    """

    writes: bool

    def ready(self, seq: Sequence) -> bool:
        """True where it would propose something if the sequence's pending token were known to the host.

        Asked with overlap, before each step: the step in flight is read first where this is true.
        """

    def observe(self, step: BegunStep) -> None:
        """See a step of the model whose hidden states are being computed, before the next one is launched."""

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Items[int]]:
        """Tokens to follow each sequence, all of whose tokens are known: ids of the model's vocabulary.

        Args:
            wanted: the sequences, with the most tokens of each. Those for which it knows none may be left out.
        """

    def accepted(self, seq: Sequence, num_accepted: int) -> None:
        """Hear how many of the last proposed tokens became the sequence's, which then ends with one token more."""

    def forget(self, seq: Sequence) -> None:
        """Drop what it keeps of a sequence that has ended."""
