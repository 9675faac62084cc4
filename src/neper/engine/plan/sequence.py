"""One request's progress: its tokens, what of them is computed, the blocks it holds, and when it is done."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from neper.types import FinishReason, Request

if TYPE_CHECKING:
    from neper.text.matcher import Matcher


class LogitEdits(NamedTuple):
    """Additions to the logits of `ids`, -inf among them."""

    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class Sequence:
    """A request in the engine. The scheduler and the step loop advance it; nothing else writes to it.

    Attributes:
        token_ids: the prompt, then the generated tokens.
        num_pending: sampled tokens that are still on the device: launched, but not read yet.
        num_computed_tokens: leading tokens whose K/V are in this sequence's blocks, or will be by the launched steps.
        next_score: first prompt position that no launched step scores (len(prompt) when all are, or none wanted).
        block_table: the blocks it holds, in order.
        num_hashed_blocks: leading blocks already offered to the prefix cache.
        slot: its row in per-sequence device tables while it runs, else -1.
        num_preemptions: how often it has lost its blocks and its slot.
        seed: of its draws; random where the request names none.
        num_cached_tokens: prompt tokens that were found in the prefix cache when it was first admitted; -1 before that.
        queue_seconds: from its arrival until it was first admitted.
        matcher: of its grammar, up to the last token that was read; None where it has none.
        cache_salt: of the hashes of its blocks: it shares them with sequences of the same salt alone, and with one,
            also where others share none.
        parked: its grammar goes on by that token beside the steps, and nothing else may look at its matcher meanwhile.
    """

    def __init__(self, request: Request, max_model_len: int, *, cache_salt: bytes = b"") -> None:
        self.request = request
        self.cache_salt = cache_salt
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_pending = 0
        self.num_computed_tokens = 0
        wants_prompt = request.logprobs.prompt_top_k is not None
        self.next_score = request.logprobs.prompt_start if wants_prompt else self.num_prompt_tokens
        self.block_table: list[int] = []
        self.num_hashed_blocks = 0
        self.slot = -1
        self.num_preemptions = 0
        self.num_cached_tokens = -1
        self.arrived = time.monotonic()
        self.queue_seconds = 0.0
        self.matcher: Matcher | None = None
        self.parked = False
        room = max_model_len - self.num_prompt_tokens
        limit = request.sampling.max_tokens
        self.max_tokens = room if limit is None else min(limit, room)
        self.seed = random.getrandbits(63) if request.sampling.seed is None else request.sampling.seed
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self._stop_ids |= frozenset(request.eos_token_ids)
        self._block_hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """All tokens, pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that are still to be computed; 0 when the last one of the reply is pending."""
        if self.num_tokens - self.num_prompt_tokens >= self.max_tokens > 0:
            return 0
        return self.num_tokens - self.num_computed_tokens

    @property
    def waits_for_mask(self) -> bool:
        """It sits out the next step: what may be sampled is not found yet, and too long to find in the step."""
        return self.parked or (self.num_pending > 0 and self.matcher is not None and self.matcher.slow)

    @property
    def scores_left(self) -> bool:
        return self.next_score < self.num_prompt_tokens

    @property
    def max_reusable_tokens(self) -> int:
        """Leading tokens whose cached K/V may stand in for computing them.

        The last token is always computed (its hidden state gives the next token), and so is the one before the first
        position still to be scored: K/V in the cache do not give a hidden state.
        """
        limit = self.num_tokens - 1
        return min(limit, self.next_score - 1) if self.scores_left else limit

    def logit_edits(self, num_output_tokens: int) -> LogitEdits:
        """What is added to single logits for the token after so many: the bias, and -inf for ids that end too early.

        Arrays, made once: a request may name every id of the vocabulary, and asks for them at every step.
        """
        if num_output_tokens < self.request.sampling.min_tokens:
            return self._bias_and_bans
        return self._bias

    @cached_property
    def _bias(self) -> LogitEdits:
        bias = self.request.sampling.logit_bias
        return LogitEdits(np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32))

    @cached_property
    def _bias_and_bans(self) -> LogitEdits:
        banned = np.array(sorted(self._stop_ids), dtype=np.int64)
        bans = np.full(len(banned), -np.inf, dtype=np.float32)
        return LogitEdits(np.concatenate([self._bias.ids, banned]), np.concatenate([self._bias.values, bans]))

    @cached_property
    def allowed_ids(self) -> npt.NDArray[np.int64]:
        """The only ids that may be sampled, ascending and each once; empty = all."""
        return np.unique(np.array(self.request.sampling.allowed_token_ids, dtype=np.int64))

    @cached_property
    def waits_for_tokens(self) -> bool:
        """Whether what may be sampled next depends on the tokens before it."""
        sampling = self.request.sampling
        return sampling.grammar is not None or any(len(word) > 1 for word in sampling.bad_words)

    def completed_bad_words(self, end: int, drafts: tuple[int, ...] = ()) -> Iterator[int]:
        """The ids that would complete a bad word of several tokens.

        What counts is what of the first `end` tokens was generated, followed by drafts.
        """
        for word in self.request.sampling.bad_words:
            begin = max(end - len(word) + 1, self.num_prompt_tokens)
            written = (*self.token_ids[begin:end], *drafts)
            if len(written) >= len(word) - 1 > 0 and written[1 - len(word) :] == word[:-1]:
                yield word[-1]

    @property
    def max_drafts(self) -> int:
        """Drafts with which the reply ends at the token after them, when all its tokens are known."""
        return max(0, self.max_tokens - (len(self.token_ids) - self.num_prompt_tokens) - 1)

    def useful_drafts(self, token_ids: Items[int]) -> tuple[int, ...]:
        """The first of these drafts, up to where the reply would end with the token after them."""
        ends = (place for place, token_id in enumerate(token_ids) if token_id in self._stop_ids)
        return tuple(token_ids[: min(self.max_drafts, next(ends, self.max_drafts))])

    def append(self, token_id: int) -> FinishReason | None:
        """Add a token that was read: the first pending one, or one that accepted drafts brought beside it.

        Returns: why the request ends with it, or None.
        """
        self.num_pending = max(0, self.num_pending - 1)
        self.token_ids.append(token_id)
        if token_id in self._stop_ids:
            return FinishReason.STOP
        if len(self.token_ids) - self.num_prompt_tokens >= self.max_tokens:
            return FinishReason.LENGTH
        return None

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Hash of the tokens 0 .. (index + 1) * block_size, which must be there: equal hashes mean equal K/V."""
        while len(self._block_hashes) <= index:
            start = len(self._block_hashes) * block_size
            tokens = np.array(self.token_ids[start : start + block_size], dtype=np.int32)
            parent = self._block_hashes[-1] if self._block_hashes else self.cache_salt
            self._block_hashes.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest())
        return self._block_hashes[index]
