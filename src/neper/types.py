"""Plain frozen data that travels between layers and, unchanged, between processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

LogprobsMode = Literal["raw_logprobs", "tempered_logprobs", "processed_logprobs"]
"""Which distribution logprobs are of; ops/views says what each is."""

LOGPROBS_MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_TINY = float(np.finfo(np.float32).tiny)
"""The smallest normal number: smaller ones may count as 0."""

LISTED_WHOLE = 1024
"""An allowed set of up to this many ids is listed whole; a larger one lists its top k."""


MAX_CANDIDATES = 1000
"""Most candidates of a request. The ids that they begin with are one set that is listed whole."""


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Fault(str, Enum):
    """The cause of a request's failure: the engine, the request itself (it would fail again), or the model's logits."""

    ENGINE = "engine"
    REQUEST = "request"
    LOGITS = "logits"


class Bounds(NamedTuple):
    """The numbers that a sampling field takes; engines hold those with a fraction in float32, where they are finite.

    Attributes:
        own: the bounds within which a request is sure to end.
        api: those of the HTTP API, where they are narrower.
        name: the numbers in words; None = the words of `own`.
        least: the smallest size of a number.
    """

    own: Meta = Meta()
    api: Meta | None = None
    name: str | None = None
    least: float = 0.0

    @property
    def of_api(self) -> Meta:
        return self.api or self.own

    def hold(self, value: float) -> bool:
        ge, gt, le = self.own.ge, self.own.gt, self.own.le
        above = (ge is None or value >= ge) and (gt is None or value > gt)
        in_float32 = isinstance(value, int) or self.least <= abs(value) <= FLOAT32_MAX
        return above and (le is None or value <= le) and in_float32

    @property
    def text(self) -> str:
        """The bounds in words, to stand after "must be"."""
        if self.name is not None:
            return self.name
        ends = {"at least": self.own.ge, "above": self.own.gt, "at most": self.own.le}
        return (
            " and ".join(f"{word} {end:g}" for word, end in ends.items() if end is not None)
            or "a number that float32 holds"
        )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when generation ends.

    A temperature below 1e-5 is greedy. `top_k` 0 (or -1), `top_p` 1.0, `min_p` 0 and `top_n_sigma` 0 switch those
    filters off. `max_tokens` None means the rest of the context. `stop` strings act on text, so the text layer applies
    them; all else is the engine's.
    Bounds are those within which a request is sure to end. The API's narrower ones are OpenAI's, but for the repetition
    penalty: logits are divided by it in float32, and far outside they would overflow. Its integers have 64 bits.

    Attributes:
        allowed_token_ids: the only ids that may be sampled; empty = all.
        bad_words: sequences of ids that must not be sampled one after the other.
        grammar: what the text must follow, in llguidance's serialised form (see `neper.text.grammar`).
        stop: strings that end the reply. A plain string is one, and becomes a tuple of it.
    """

    max_tokens: Annotated[int | None, Bounds(Meta(ge=0))] = None
    min_tokens: Annotated[int, Bounds(Meta(ge=0))] = 0
    temperature: Annotated[
        float, Bounds(Meta(ge=0), api=Meta(ge=0.0, le=2.0), name="at least 0, and finite in float32")
    ] = 1.0
    top_p: Annotated[float, Bounds(Meta(gt=0, le=1))] = 1.0
    top_k: Annotated[int, Bounds(Meta(ge=-1), api=Meta(ge=-1, le=2**63 - 1))] = 0
    min_p: Annotated[float, Bounds(Meta(ge=0, le=1))] = 0.0
    top_n_sigma: Annotated[float, Bounds(Meta(ge=0, le=100))] = 0.0
    presence_penalty: Annotated[float, Bounds(api=Meta(ge=-2.0, le=2.0))] = 0.0
    frequency_penalty: Annotated[float, Bounds(api=Meta(ge=-2.0, le=2.0))] = 0.0
    repetition_penalty: Annotated[
        float,
        Bounds(Meta(gt=0), Meta(ge=0.01, le=100.0), name="above 0, and a normal number of float32", least=FLOAT32_TINY),
    ] = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    seed: Annotated[
        int | None,
        Bounds(Meta(ge=-(2**63), le=2**64 - 1), Meta(ge=-(2**63), le=2**63 - 1), name="an integer of 64 bits"),
    ] = None
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    def filters(self, vocab_size: int) -> bool:
        """Whether a draw leaves out some of `vocab_size` ids: top-n-sigma, top-k, top-p or min-p."""
        return 0 < self.top_k < vocab_size or self.top_p < 1.0 or self.min_p > 0.0 or self.top_n_sigma > 0.0

    @property
    def masked(self) -> bool:
        """Whether some ids must not be sampled, by a set, words or a grammar."""
        return bool(self.allowed_token_ids or self.bad_words) or self.grammar is not None

    @property
    def penalized(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @staticmethod
    @cache
    def bounds() -> dict[str, Bounds]:
        """The bounds of the fields that have some."""
        hints = get_type_hints(SamplingParams, include_extras=True)
        return {
            name: bounds
            for name, hint in hints.items()
            for bounds in getattr(hint, "__metadata__", ())
            if isinstance(bounds, Bounds)
        }

    def problem(self) -> str | None:
        """The field that is out of its bounds, in words; None when all are within."""
        for name, bounds in self.bounds().items():
            value = getattr(self, name)
            if value is not None and not bounds.hold(value):
                return f"{name} must be {bounds.text}, got {value}"
        if not all(value == -math.inf or abs(value) <= FLOAT32_MAX for value in self.logit_bias.values()):
            return f"logit_bias must be of numbers that float32 holds, or -inf to ban, got {self.logit_bias}"
        return None


class LogprobParams(msgspec.Struct, frozen=True, kw_only=True):
    """Which scores a request wants.

    Attributes:
        top_k: alternatives per generated token; 0 = the sampled token alone, -1 = all ids, None = no scores.
        mode: the view of generated tokens' scores. Prompt scores are raw: the model's own distribution.
        token_ids: ids to list for each generated token in place of its top k, at full-vocabulary values.
        prompt_top_k: alternatives per prompt token; 0 = the prompt token alone, -1 = all ids, None = no scores.
        prompt_start: first prompt position to score, >= 1 (position 0 has no context to be scored in). Those before it
            are not scored, and their K/V may come from the cache.
        prompt_logprob_token_ids: ids to list for each prompt token in place of its top k, at full-vocabulary values.
    """

    top_k: int | None = None
    mode: LogprobsMode = "raw_logprobs"
    token_ids: tuple[int, ...] = ()
    prompt_top_k: int | None = None
    prompt_start: int = 1
    prompt_logprob_token_ids: tuple[int, ...] = ()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to compute. `sampling.max_tokens` 0 asks for prompt scores alone.

    Attributes:
        eos_token_ids: end-of-sequence ids of the model; sampling one ends the request unless `sampling.ignore_eos`.
        prediction_token_ids: what much of the reply may be, to draft from; it changes no token.
        candidates: 1 to MAX_CANDIDATES continuations of the prompt, of one or more tokens, to score in place of
            generating: `sampling` and `logprobs` then do not count, and scores are raw. Empty = generate.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    logprobs: LogprobParams = LogprobParams()
    eos_token_ids: tuple[int, ...] = ()
    prediction_token_ids: tuple[int, ...] = ()
    candidates: tuple[tuple[int, ...], ...] = ()

    @property
    def group(self) -> str:
        """The unit that takes turns: the choices of one HTTP request, whose ids begin alike up to the last dash."""
        return self.request_id.rpartition("-")[0]

    def num_listed(self, vocab_size: int) -> int | None:
        """Places of the lists of generated tokens, of `vocab_size` ids at most; None = no scores.

        A named set is listed whole, whatever `top_k` says: the ids to list, or those that are allowed, up to
        LISTED_WHOLE of them.
        """
        if self.logprobs.top_k is None:
            return None
        allowed = len(set(self.sampling.allowed_token_ids))
        if self.logprobs.token_ids:
            return len(set(self.logprobs.token_ids))
        if 0 < allowed <= LISTED_WHOLE:
            return allowed
        return listed_places(self.logprobs.top_k, vocab_size)

    def num_prompt_listed(self, vocab_size: int) -> int | None:
        """Places of the lists of prompt tokens; None = no scores."""
        top_k, named = self.logprobs.prompt_top_k, self.logprobs.prompt_logprob_token_ids
        if top_k is not None and named:
            return len(set(named))
        return None if top_k is None else listed_places(top_k, vocab_size)


def listed_places(top_k: int, vocab_size: int) -> int:
    """Places of a list of `top_k` alternatives: -1 means all ids, and more than there are means those."""
    return vocab_size if top_k < 0 else min(top_k, vocab_size)


def packed_width(top_k: int | None) -> int:
    """Words of a row of PackedRows."""
    return 2 if top_k is None else 3 + 2 * top_k


class PackedRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Results of consecutive tokens of one sequence, as the device packed them: rows of int32 words.

    Without scores (`top_k` None) a row is `[id, valid]`. With scores it is `[id, rank, logprob bits]`, then the `top_k`
    listed ids, then their `top_k` logprobs' bits; rank 0 marks an invalid row. Unused places of a list hold id -1 and
    logprob -inf. Every array property is a view of `data`: nothing is made per token or per alternative.
    """

    top_k: int | None
    data: bytes

    @property
    def width(self) -> int:
        """Words per row."""
        return packed_width(self.top_k)

    @property
    def words(self) -> Int32Array:
        """[n, width] int32."""
        return np.frombuffer(self.data, dtype=np.int32).reshape(-1, self.width)

    def __len__(self) -> int:
        return len(self.data) // (4 * self.width)

    def __getitem__(self, rows: slice) -> PackedRows:
        return PackedRows(self.top_k, self.words[rows].tobytes())

    @property
    def token_ids(self) -> Int32Array:
        """[n] int32: the sampled (or prompt) token of each row."""
        return self.words[:, 0]

    @property
    def rank(self) -> Int32Array:
        """[n] int32: 1 + the number of tokens with a strictly greater logit. Needs scores."""
        self._need_scores()
        return self.words[:, 1]

    @property
    def logprob(self) -> Float32Array:
        """[n] float32, natural log. Needs scores."""
        self._need_scores()
        return self.words[:, 2].view(np.float32)

    @property
    def top_ids(self) -> Int32Array:
        """[n, top_k] int32, best first, -1 where the list is shorter. Needs scores."""
        k = self._need_scores()
        return self.words[:, 3 : 3 + k]

    @property
    def top_logprobs(self) -> Float32Array:
        """[n, top_k] float32, -inf where the list is shorter. Needs scores."""
        k = self._need_scores()
        return self.words[:, 3 + k : 3 + 2 * k].view(np.float32)

    def _need_scores(self) -> int:
        if self.top_k is None:
            raise ValueError("these rows carry no scores")
        return self.top_k

    @staticmethod
    def pack(
        token_ids: npt.ArrayLike,
        logprob: npt.ArrayLike | None = None,
        rank: npt.ArrayLike | None = None,
        top_ids: npt.ArrayLike | None = None,
        top_logprobs: npt.ArrayLike | None = None,
    ) -> PackedRows:
        """Rows from separate host arrays ([n], [n], [n], [n, k], [n, k]): for engines that do not pack on a device."""
        ids = np.asarray(token_ids, dtype=np.int32).reshape(-1, 1)
        n = len(ids)
        if logprob is None:
            return PackedRows(None, np.hstack([ids, np.ones_like(ids)]).tobytes())
        rank_ = np.ones(n, np.int32) if rank is None else np.asarray(rank, dtype=np.int32)
        listed = np.zeros((n, 0), np.int32) if top_ids is None else np.asarray(top_ids, dtype=np.int32).reshape(n, -1)
        values = np.zeros((n, 0)) if top_logprobs is None else np.asarray(top_logprobs).reshape(n, -1)
        scores = np.hstack([np.asarray(logprob).reshape(n, 1), values]).astype(np.float32).view(np.int32)
        words = np.hstack([ids, rank_.reshape(n, 1), scores[:, :1], listed, scores[:, 1:]])
        return PackedRows(listed.shape[1], np.ascontiguousarray(words, dtype=np.int32).tobytes())


class CandidateScores(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Scores of a candidate: its place in the request, and a float32 logprob (natural log) of each of its tokens."""

    place: int
    data: bytes

    @property
    def logprobs(self) -> Float32Array:
        """[n] float32."""
        return np.frombuffer(self.data, dtype=np.float32)


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one step brought for one request: 0..W tokens, perhaps scores of prompt positions, perhaps the end.

    Attributes:
        tokens: rows of newly sampled tokens, a sampled end token included; None when there are none.
        prompt: rows of scored prompt positions, in order: chunks of one request join to positions
            `prompt_start .. len(prompt)`; None when there are none.
        finish_reason: set on the last chunk of a request, and only there.
        stop_token_id: the token that ended the request, when one did.
        error: message of the failure when `finish_reason` is ERROR.
        fault: of that failure.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        queue_seconds: from the request's arrival in the engine until it was first computed; 0 where the engine does
            not tell.
        num_drafts, num_accepted: tokens that were drafted for this step, and how many of them are among `tokens`.
        candidates: those of the request's candidates that are scored now, in any order.
    """

    request_id: str
    tokens: PackedRows | None = None
    prompt: PackedRows | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    fault: Fault = Fault.ENGINE
    num_drafts: int = 0
    num_accepted: int = 0
    candidates: tuple[CandidateScores, ...] = ()


JsonObject = dict[str, Any]

Progress = Callable[[int, int, str], None]
"""progress(done, total, what): called as work goes on; `done` reaches `total`."""
