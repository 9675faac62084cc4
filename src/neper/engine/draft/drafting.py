"""Drafts of a step: which sequences get some, how many, and what of them can be of use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from neper.engine.draft.depth import Depth
from neper.engine.draft.drafter import Drafter
from neper.engine.plan.sequence import Sequence
from neper.engine.step.runner import BegunStep


@dataclass
class DraftCounters:
    """Counts of drafts since start. See EngineStats."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Drafting:
    """Asks a drafter for the running sequences, and keeps how far each one's drafts are accepted.

    Args:
        most: drafts of a sequence at most.
        rows: rows of a step beyond which drafts are not worth their time.
        vocab_size: ids of the model.
    """

    def __init__(self, drafter: Drafter, *, most: int, rows: int, vocab_size: int) -> None:
        self.counters = DraftCounters()
        self._drafter = drafter
        self._most = most
        self._rows = rows
        self._vocab_size = vocab_size
        self._depths: dict[Sequence, Depth] = {}

    def ready(self, running: Iterable[Sequence]) -> bool:
        """True where reading the step in flight first would bring drafts."""
        return any(seq.num_pending and self._wanted(seq) and self._drafter.ready(seq) for seq in running)

    def observe(self, step: BegunStep) -> None:
        """Have the drafter see a step that was begun."""
        self._drafter.observe(step)

    def propose(
        self, running: list[Sequence], reserve: Callable[[Sequence, int], int]
    ) -> dict[Sequence, tuple[int, ...]]:
        """Drafts for the running sequences of which the next token is to be computed, and all before it are known.

        Args:
            reserve: gives a sequence blocks for up to so many drafts, and returns how many have room.
        """
        room = self._rows - len(running)
        wanted = {}
        for seq in running:
            most = min(self._wanted(seq), room, seq.max_drafts)
            if most > 0 and not seq.num_pending and seq.num_uncomputed_tokens == 1:
                if self._drafter.writes:
                    most = reserve(seq, most)
                if most > 0:
                    wanted[seq] = most
                    room -= most
        drafts = {}
        for seq, token_ids in self._drafter.propose(wanted).items() if wanted else ():
            known = takewhile(lambda token_id: 0 <= token_id < self._vocab_size, token_ids[: wanted[seq]])
            useful = seq.useful_drafts(list(known))
            if useful and seq.matcher is not None:
                useful = useful[: seq.matcher.num_fitting(useful)]
            if useful:
                drafts[seq] = useful
            elif token_ids:  # what can never be accepted is a miss as well
                self._depth(seq).follow(len(token_ids), 0)
        return drafts

    def follow(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Hear what became of a sequence's drafts, of which there may have been none, and that it has a token more."""
        self._depth(seq).follow(num_drafts, num_accepted)
        if num_drafts:
            self.counters.drafts += 1
            self.counters.draft_tokens += num_drafts
            self.counters.accepted_tokens += num_accepted
            self._drafter.accepted(seq, num_accepted)

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._depths.pop(seq, None)
        self._drafter.forget(seq)

    def _wanted(self, seq: Sequence) -> int:
        if seq.parked or seq.max_tokens == 0 or (seq.matcher is not None and seq.matcher.slow):
            return 0
        return self._depth(seq).wanted

    def _depth(self, seq: Sequence) -> Depth:
        depth = self._depths.get(seq)
        if depth is None:
            depth = self._depths[seq] = Depth(self._most)
        return depth
