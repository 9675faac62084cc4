"""The engine in one process: plan a step, launch it, read the one before, finish that."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from neper.config import EngineConfig
from neper.engine.checks import request_problem
from neper.engine.interface import Capabilities, EngineStats
from neper.engine.plan.blocks import BlockManager
from neper.engine.plan.candidates import CandidateRuns
from neper.engine.plan.grammars import NOT_ALLOWED, EngineGrammars
from neper.engine.plan.scheduler import ScheduledChunk, Scheduler
from neper.engine.plan.sequence import Sequence
from neper.engine.start import startup
from neper.engine.step.masks import MaskBuilder
from neper.engine.step.readback import StepOutput, StepResult
from neper.models.decoder import Decoder
from neper.models.source import ModelSource
from neper.ops import backends
from neper.types import (
    LOGPROBS_MODES,
    Fault,
    FinishReason,
    PackedRows,
    Progress,
    Request,
    SamplingParams,
    TokenChunk,
)

if TYPE_CHECKING:
    from neper.text.matcher import Matcher

logger = logging.getLogger("neper.engine")

_INVALID_LOGITS = "the model's logits are not numbers, or leave nothing above -inf, for a token of this request"


class EngineCore:
    """Model, scheduler and the step loop. Synchronous; one thread uses it.

    A request is added, advanced by `step` calls, and ends with a TokenChunk that has a finish_reason, unless it is
    aborted, after which nothing more is heard of it. An invalid row (NaN, +inf, nothing above -inf) ends its own
    request with finish_reason ERROR and no other.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        progress: Progress | None = None,
        *,
        decoder: Decoder | None = None,
    ) -> None:
        """Load the model, unless a loaded `decoder` is given, and prepare all that requests will need."""
        self.settings, self.runner, self._drafting = startup.build(config, source, decoder, progress)
        self.scheduler = Scheduler(
            BlockManager(
                self.settings.num_blocks, self.settings.block_size, prefix_caching=self.settings.prefix_caching
            ),
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            vocab_size=source.config.vocab_size,
            max_listed=self.settings.max_listed(source.config.vocab_size),
            max_drafts=self.settings.max_drafts,
        )
        self._grammars = EngineGrammars(source.path, source.config.vocab_size)
        self.capabilities = Capabilities(
            vocab_size=source.config.vocab_size,
            max_model_len=self.settings.max_model_len,
            max_logprobs=self.settings.max_logprobs,
            max_num_seqs=self.settings.max_num_seqs,
            logprobs_modes=LOGPROBS_MODES,
            sampling_fields=frozenset(SamplingParams.__struct_fields__),
            device=str(self.settings.device),
            dtype=str(self.settings.dtype).removeprefix("torch."),
            attention=backends.chosen(self.settings.device)["attention"].name,
            scoring=self.settings.scoring,
            speculative=self.settings.speculative or "",
        )
        self._sequences: dict[str, Sequence] = {}
        # Twice as many as run: the next ones are planned while a step is in flight.
        self._candidates = CandidateRuns(self._add_part, self._end_named, most_parts=2 * self.settings.max_num_seqs)
        self._ready: list[TokenChunk] = []
        self._launched: StepOutput | None = None
        self._idle = True
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._steps = 0

    @property
    def has_work(self) -> bool:
        # What is launched belongs to running sequences, or nobody.
        return self.scheduler.has_work or bool(self._ready) or self._grammars.busy

    def add(self, request: Request) -> None:
        """Queue a request. One that cannot run is answered by its first chunk, an ERROR; it never raises."""
        problem = self.problem(request)
        if problem is not None:
            self._ready.append(_failure(request.request_id, problem))
            return
        self._idle = False
        if request.candidates:
            self._prompt_tokens += len(request.prompt_token_ids) + sum(map(len, request.candidates))
            self._candidates.add(request)
            return
        seq = Sequence(request, self.settings.max_model_len)
        self._prompt_tokens += seq.num_prompt_tokens
        if seq.max_tokens == 0 and not seq.scores_left:
            self._ready.append(TokenChunk(request_id=request.request_id, finish_reason=FinishReason.LENGTH))
            return
        self._sequences[request.request_id] = seq
        if request.sampling.grammar is None:
            self.scheduler.add(seq)
        else:
            self._grammars.compile(seq)

    def abort(self, request_id: str) -> None:
        """End a request without a further chunk. Unknown and finished ids are ignored: an abort may cross the end."""
        ended = {request_id, *self._candidates.drop(request_id)}
        self._ready = [chunk for chunk in self._ready if chunk.request_id not in ended]
        self._end_named(request_id)

    def _add_part(self, request: Request, salt: bytes) -> None:
        """Queue a sequence of a request's candidates, which share blocks with prefix caching off too."""
        salt = b"" if self.settings.prefix_caching else salt
        seq = self._sequences[request.request_id] = Sequence(request, self.settings.max_model_len, cache_salt=salt)
        self.scheduler.add(seq)

    def _end_named(self, request_id: str) -> None:
        if (seq := self._sequences.get(request_id)) is not None:
            self._end(seq)

    def step(self) -> list[TokenChunk]:
        """Launch one step and return what a step brought, at most one chunk a request.

        With overlap it is the step before: while the host reads and finishes that, the device computes this one. A
        token that it needs and the host does not know yet is taken from the device's table of last tokens. Where the
        step before has drafts, or could be followed by some if it were known, it is read first.
        """
        self._take_grammars()
        if self._launched is not None and self._read_first(self._launched):
            self._ready += self._read_launched()
        launched = self._launch()
        if self.settings.overlap:
            launched, self._launched = self._launched, launched
        self._idle = launched is None and self._launched is None
        chunks = self._finish(self.runner.readback.read(launched)) if launched is not None else []
        # Taken only now: a step that raises leaves them to `fail_all`.
        ready, self._ready = self._ready, []
        return self._candidates.fold(ready + chunks)

    def _launch(self) -> StepOutput | None:
        """Plan a step and launch it; None when there is nothing to compute.

        Where a row may sample what the token before it allows, and that is not known yet, the step before is read in
        the middle, while the device computes the hidden states of this one.
        """
        drafts = None
        if self._drafting is not None:
            drafts = self._drafting.propose(self.scheduler.running, self.scheduler.reserve)
        plan = self.scheduler.plan(drafts)
        if not plan.chunks:
            return None
        self._steps += 1
        begun = self.runner.begin(plan)
        if self._drafting is not None:
            self._drafting.observe(begun)
        if self._launched is not None and any(chunk.pending and chunk.seq.waits_for_tokens for chunk in plan.chunks):
            self._ready += self._read_launched()
        return self.runner.finish(begun)

    def _read_first(self, launched: StepOutput) -> bool:
        """True where the step in flight must be read before the next one is planned."""
        if self._drafting is None:
            return False
        return launched.plan.drafted or self._drafting.ready(self.scheduler.running)

    def _read_launched(self) -> list[TokenChunk]:
        """Read and finish the step in flight."""
        launched, self._launched = self._launched, None
        assert launched is not None
        return self._finish(self.runner.readback.read(launched))

    def _take_grammars(self) -> None:
        """Queue the sequences whose grammar is compiled, let parked ones go on, and end those whose grammar cannot."""
        for seq, problem in self._grammars.take(wait=self._idle and not self._ready):
            parked, seq.parked = seq.parked, False
            if problem is None and not parked:
                self.scheduler.add(seq)
            elif problem is not None and parked:
                self._end(seq)
                self._ready.append(_failure(seq.request.request_id, problem))
            elif problem is not None:
                del self._sequences[seq.request.request_id]
                self._ready.append(_failure(seq.request.request_id, problem, Fault.REQUEST))

    def fail_all(self, message: str) -> list[TokenChunk]:
        """End every request with an ERROR chunk: what is left to do when a step itself raised."""
        chunks = [chunk for chunk in self._ready if chunk.request_id not in self._candidates]
        chunks += [_failure(request_id, message) for request_id in self._candidates.drop_all()]
        chunks += [_failure(request_id, message) for request_id in self._sequences]
        self._ready = []
        self._launched = None
        for seq in list(self._sequences.values()):
            self._end(seq)
        return chunks

    def device_usable(self) -> bool:
        """Whether the device still computes: after some faults a process can launch nothing any more."""
        if self.settings.device.type == "cpu":
            return True
        try:
            torch.cuda.synchronize(self.settings.device)
        except RuntimeError:
            logger.exception("device %s is lost", self.settings.device)
            return False
        return True

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            total_blocks=self.scheduler.blocks.num_usable_blocks,
            free_blocks=self.scheduler.blocks.num_free_blocks,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self.scheduler.num_preemptions,
            steps=self._steps,
            **({} if self._drafting is None else asdict(self._drafting.counters)),
            **asdict(self.runner.readback.counters),
        )

    def check(self) -> None:
        """Raise AssertionError if a block, a slot or a request is lost. For tests."""
        self.scheduler.check()
        known = set(self.scheduler.running) | set(self.scheduler.waiting) | set(self._grammars.compiling)
        assert set(self._sequences.values()) == known, "the engine and its scheduler know different requests"

    def problem(self, request: Request) -> str | None:
        """Why a request cannot be computed, or None. The server checks the same before; this guards the device."""
        if request.request_id in self._sequences or request.request_id in self._candidates:
            return f"request id {request.request_id!r} is in use"
        return request_problem(request, self.capabilities)

    def _finish(self, result: StepResult) -> list[TokenChunk]:
        """Apply a step's results to its sequences: advance, stop, publish blocks, make chunks."""
        chunks = []
        for scheduled in result.plan.chunks:
            if self._sequences.get(scheduled.seq.request.request_id) is not scheduled.seq:
                continue  # it has ended since it was planned
            chunk = self._finish_chunk(scheduled, result.tokens.get(scheduled), result.prompt.get(scheduled))
            if chunk is not None:
                chunks.append(chunk)
        return chunks

    def _finish_chunk(
        self, scheduled: ScheduledChunk, tokens: PackedRows | None, prompt: PackedRows | None
    ) -> TokenChunk | None:
        seq = scheduled.seq
        request_id = seq.request.request_id
        if tokens is not None and scheduled.drafts:
            tokens = tokens[: _num_verified(tokens, scheduled.drafts)]
        if not (_valid(tokens) and _valid(prompt)):
            own = self._own_problem(seq) if _valid(prompt) else None
            self._end(seq)
            return _failure(request_id, own or _INVALID_LOGITS, Fault.REQUEST if own else Fault.LOGITS)
        keeps_blocks = scheduled.num_preemptions == seq.num_preemptions
        if prompt is not None and keeps_blocks:
            self.scheduler.blocks.commit(seq, scheduled.score_end - 1)
        reason = None
        num_accepted = 0
        if tokens is not None:
            num_accepted = len(tokens) - 1
            count, reason = self._append(seq, tokens.token_ids.tolist())
            if reason is FinishReason.ERROR:
                self._end(seq)
                return _failure(request_id, NOT_ALLOWED)
            if count < len(tokens):
                tokens, num_accepted = tokens[:count], count
            computed = scheduled.end_of_own + count - 1
            if keeps_blocks:
                self.scheduler.blocks.commit(seq, computed)
            if scheduled.drafts:
                seq.num_computed_tokens = computed  # what was computed of drafts that were not accepted is overwritten
            if self._drafting is not None:
                self._drafting.follow(seq, len(scheduled.drafts), num_accepted)
        elif seq.max_tokens == 0 and scheduled.score_end == seq.num_prompt_tokens:
            reason = FinishReason.LENGTH
        if tokens is None and prompt is None and reason is None:
            return None
        if reason is not None:
            self._end(seq)
        return TokenChunk(
            request_id=request_id,
            tokens=tokens,
            prompt=prompt,
            finish_reason=reason,
            stop_token_id=seq.token_ids[-1] if reason is FinishReason.STOP else None,
            num_cached_tokens=seq.num_cached_tokens,
            queue_seconds=seq.queue_seconds,
            num_drafts=len(scheduled.drafts),
            num_accepted=num_accepted,
        )

    def _append(self, seq: Sequence, token_ids: list[int]) -> tuple[int, FinishReason | None]:
        """Add tokens to a sequence, up to one that ends it.

        Returns: how many were added, and the reason of the end: ERROR where the grammar does not allow one of them.
        """
        for count, token_id in enumerate(token_ids, start=1):
            reason = seq.append(token_id)
            self._generated_tokens += not seq.request.candidates  # which are scored, and nothing is generated
            if reason is not None:
                return count, reason
            if seq.matcher is None:
                continue
            fits = self._follow(seq, seq.matcher) if count == len(token_ids) else seq.matcher.accept(token_id)
            if not fits:
                return count, FinishReason.ERROR
        return len(token_ids), None

    def _follow(self, seq: Sequence, matcher: Matcher) -> bool:
        """Have a grammar go on by the token that was just read; False where it does not fit."""
        if not matcher.slow:
            return matcher.accept(seq.token_ids[-1])
        self._grammars.advance(seq, seq.token_ids[-1])
        return True

    def _own_problem(self, seq: Sequence) -> str | None:
        """The fault in the request itself that left its next token without choice; None where its fields leave one."""
        matcher = seq.matcher
        nothing_left = MaskBuilder(self.capabilities.vocab_size).leaves_nothing(seq)
        if matcher is not None and matcher.error is not None:
            return f"the grammar cannot be followed any further: {matcher.error}"
        if not nothing_left:
            return None
        return (
            "the fields of this request together leave no token to sample: what one of allowed_token_ids, bad_words, "
            "logit_bias, min_tokens and the reply's form allows here, another bans"
        )

    def _end(self, seq: Sequence) -> None:
        # The prompt of candidates counts once, with the sequence that is the prompt alone.
        if seq.request.candidates or seq.request.request_id not in self._candidates:
            self._cached_tokens += max(0, seq.num_cached_tokens)
        if not self._grammars.forget(seq):
            self.scheduler.remove(seq)
        if self._drafting is not None:
            self._drafting.forget(seq)
        del self._sequences[seq.request.request_id]


def _valid(rows: PackedRows | None) -> bool:
    """True where no row is invalid: column 1, its validity (without scores) or its rank (with), is 0 in such a row."""
    return rows is None or bool(rows.words[:, 1].all())


def _num_verified(rows: PackedRows, drafts: tuple[int, ...]) -> int:
    """The rows of a window, from the first on, whose tokens follow accepted drafts alone.

    A row after the first that is invalid counts as none: it is computed again, as the first of a step.
    """
    words = rows.words
    for count, draft in enumerate(drafts, start=1):
        if words[count - 1, 0] != draft or not words[count, 1]:
            return count
    return len(rows)


def _failure(request_id: str, message: str, fault: Fault = Fault.ENGINE) -> TokenChunk:
    return TokenChunk(request_id=request_id, finish_reason=FinishReason.ERROR, error=message, fault=fault)
