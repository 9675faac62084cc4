"""The Engine protocol: all that the server knows of what computes tokens.

Our own engine (in its own process) and engines of others, over the line protocol, stand behind it. The server asks
`capabilities` before it accepts a field, submits requests and reads TokenChunks; it never sees a model or a tensor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from neper.errors import EngineError, InvalidLogitsError, InvalidRequestError, NeperError
from neper.types import Fault, Request, TokenChunk

_ERRORS: dict[Fault, type[NeperError]] = {
    Fault.ENGINE: EngineError,
    Fault.REQUEST: InvalidRequestError,
    Fault.LOGITS: InvalidLogitsError,
}


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine can do. It is known once the engine is ready; `logprobs` may turn out later.

    Attributes:
        vocab_size: width V of the logits: every id in a request must be below it.
        max_model_len: longest prompt + generation, in tokens.
        max_logprobs: largest top_k it lists; -1 = any.
        max_num_seqs: requests it computes at a time, the others wait; 0 = not known.
        logprobs: it scores the tokens that it generates. None = that is not known yet: all rows of a request may come
            without the scores that were asked for.
        logprobs_modes: views it can give.
        logprob_token_ids: it lists ids that are named (LogprobParams.token_ids).
        prompt_logprobs: it scores prompt positions (echo with logprobs, prompt_logprobs).
        candidates: it scores candidates (Request.candidates).
        sampling_fields: names of SamplingParams fields it honours.
        device, dtype, attention, scoring: for people: where it runs and which implementations it picked.
        speculative: what proposes drafts; empty = nothing does.
    """

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_num_seqs: int = 0
    logprobs: bool | None = True
    logprobs_modes: tuple[str, ...] = ("raw_logprobs",)
    logprob_token_ids: bool = True
    prompt_logprobs: bool = True
    candidates: bool = True
    sampling_fields: frozenset[str] = frozenset()
    device: str = ""
    dtype: str = ""
    attention: str = ""
    scoring: str = ""
    speculative: str = ""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine's load; counters count since start.

    Attributes:
        d2h_copies, d2h_bytes: copies from the device to the host, and their bytes; none on a CPU.
        d2h_waits: how often the host waited for one.
        scored_rows: rows whose logprobs were reduced, generated and prompt tokens together.
        drafts: how often tokens were drafted for a sequence.
        draft_tokens, accepted_tokens: those tokens, and those of them that became the sequence's.
    """

    running: int = 0
    waiting: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    restarts: int = 0
    d2h_copies: int = 0
    d2h_bytes: int = 0
    d2h_waits: int = 0
    scored_rows: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class TokenStream(Protocol):
    """The chunks of one request, ending after the one with a finish_reason.

    A request that fails ends with a chunk whose finish_reason is ERROR. An engine that dies raises EngineDeadError.
    `close()` is safe at any time and more than once: if the request has not ended, the engine stops its work. It must
    be called even when the stream was never iterated (a generator that never started runs no `finally`).
    """

    def __aiter__(self) -> AsyncIterator[TokenChunk]: ...

    async def __anext__(self) -> TokenChunk: ...

    def close(self) -> None: ...


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def alive(self) -> bool:
        """False while the engine is down (being started again after it died)."""
        ...

    def submit(self, request: Request) -> TokenStream:
        """Queue a request. Raises OverloadedError while the engine cannot take any (it is being started again)."""
        ...

    def stats(self) -> EngineStats: ...


def failure(chunk: TokenChunk) -> NeperError:
    """The error that a request ended with, of its last chunk."""
    return _ERRORS[chunk.fault](chunk.error or "the engine ended this request")
