"""LLM: the engine in this process, for scripts and notebooks."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy.typing as npt

from neper.candidates import Normalize
from neper.config import DEFAULT_MODEL
from neper.engine.arguments import engine_config, one_each, plain
from neper.engine.candidates import ScoredCandidate, cut_candidates, score_candidates
from neper.engine.completion import Completion
from neper.engine.core import EngineCore
from neper.engine.interface import failure
from neper.errors import ContextLengthError, InvalidRequestError, NeperError
from neper.models import source
from neper.seeds import choice_seed
from neper.text.detokenizer import Detokenizer, TextToken
from neper.text.ends import reply_ends
from neper.text.tokenizer import Tokenizer
from neper.types import (
    FinishReason,
    Float32Array,
    JsonObject,
    LogprobParams,
    PackedRows,
    Progress,
    Request,
    SamplingParams,
    TokenChunk,
)

Prompt = str | list[int]
Prompts = Prompt | Sequence[Prompt] | npt.NDArray[Any]


@dataclass(frozen=True)
class TextDelta:
    """What one step added to a reply.

    Attributes:
        text: the texts of `tokens`, joined.
        tokens: tokens released by this step, with their text and bytes.
        rows: their scores, one row a token in the same order; None when none were asked for.
        finish_reason: set on the last delta.
    """

    text: str
    tokens: list[TextToken]
    rows: PackedRows | None
    finish_reason: FinishReason | None


@dataclass
class _Reply:
    """A request in progress: its raw rows so far and the text made of them."""

    request: Request
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    vocab_size: int
    token_ids: list[int] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)  # one a token
    prompt_rows: list[bytes] = field(default_factory=list)
    tokens: list[TextToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def take(self, chunk: TokenChunk) -> TextDelta:
        """Add a chunk. When a stop string ends the reply, `finish_reason` is set though the engine has not ended."""
        if chunk.finish_reason is FinishReason.ERROR:
            raise failure(chunk)
        if chunk.prompt is not None:
            self.prompt_rows.append(chunk.prompt.data)
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_token_id
        released: list[TextToken] = []
        if chunk.tokens is not None:
            ids = chunk.tokens.token_ids.tolist()
            self.token_ids += ids
            width = 4 * chunk.tokens.width
            self.rows += [chunk.tokens.data[i : i + width] for i in range(0, len(chunk.tokens.data), width)]
            released = self.detokenizer.step(ids, ended=chunk.stop_token_id is not None)
        if self.finish_reason is not None and self.detokenizer.stopped is None:
            released += self.detokenizer.flush()
        if self.detokenizer.stopped is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, self.detokenizer.stopped
            del self.token_ids[self.detokenizer.num_tokens :]
        self.tokens += released
        text = "".join(token.text for token in released)
        return TextDelta(text, released, self._rows_of(released), self.finish_reason)

    def logprobs(self) -> PackedRows | None:
        """Scores of all token ids."""
        top_k = self.request.num_listed(self.vocab_size)
        return None if top_k is None else PackedRows(top_k, b"".join(self.rows[: len(self.token_ids)]))

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        prompt_top_k = self.request.num_prompt_listed(self.vocab_size)
        return Completion(
            text="".join(token.text for token in self.tokens),
            token_ids=self.token_ids,
            logprobs=self.logprobs(),
            tokens=[token for token in self.tokens if token.visible],
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=None if prompt_top_k is None else PackedRows(prompt_top_k, b"".join(self.prompt_rows)),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            tokenizer=self.tokenizer,
        )

    def _rows_of(self, tokens: list[TextToken]) -> PackedRows | None:
        top_k = self.request.num_listed(self.vocab_size)
        if top_k is None or not tokens:
            return None
        # Tokens are released without gaps, so the rows of a delta are one slice.
        return PackedRows(top_k, b"".join(self.rows[tokens[0].index : tokens[-1].index + 1]))


class LLM:
    """A model in this process.

        llm = LLM("smollm2-135m")
        [reply] = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8),
                               LogprobParams(top_k=5))
        reply.text, reply.logprobs.logprob, reply.logprobs.top_ids

    Not thread-safe: one call at a time.

    Args:
        model: the embedded smollm2-135m, a directory, a .gguf file, or a hub id.
        progress: called as progress(done, total, what) while the model is converted and loaded.
        **config: fields of neper.config.EngineConfig (dtype, max_model_len, max_num_seqs, ...).

    Raises:
        ConfigError: a setting is not known, or has a value that it cannot have.
        StartupError: the model cannot be loaded, or a setting does not fit this machine.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        progress: Progress | None = None,
        **config: Any,
    ) -> None:
        settings = engine_config(model, config)
        self.source = source.resolve(model, progress=progress)
        self.tokenizer = Tokenizer.from_directory(self.source.path)
        self.eos_token_ids = tuple(reply_ends(self.tokenizer, source.named_ends(self.source.path)))
        self.core = EngineCore(settings, self.source, progress)
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        logprobs: LogprobParams | list[LogprobParams] | None = None,
    ) -> list[Completion]:
        """Replies to prompts, computed together, in their order.

        Args:
            prompts: one or a list; each a text (special tokens spelled in it count), or a list or array of token ids.
            sampling_params: for all prompts, or one each; default SamplingParams(). Where one with a seed is for all,
                the first prompt draws from that and the others from hashes of it, as the choices of an HTTP request
                do; in a list each seed is its prompt's own.
            logprobs: which scores to return, for all prompts or one each; default none.

        Raises:
            InvalidRequestError: a prompt or a parameter is of a wrong type or out of bounds: nothing was computed. Or a
                grammar cannot be used, or no token is left to sample: the other prompts are dropped too.
            InvalidLogitsError: the model gave no numbers for one of the prompts; the others are dropped too.
        """
        token_ids = self._token_ids(prompts)
        sampling = one_each(sampling_params, SamplingParams, len(token_ids), "sampling_params")
        if not isinstance(sampling_params, list):
            sampling = [msgspec.structs.replace(s, seed=choice_seed(s.seed, i, 0)) for i, s in enumerate(sampling)]
        scores = one_each(logprobs, LogprobParams, len(token_ids), "logprobs")
        replies = [self._reply(ids, s, p) for ids, s, p in zip(token_ids, sampling, scores, strict=True)]
        for _ in self._run(replies):
            pass
        return [reply.completion() for reply in replies]

    def score(self, prompts: Prompts) -> list[Float32Array]:
        """The model's logprob of each prompt's tokens: for n tokens [n - 1] float32, from the second on."""
        replies = [
            self._reply(ids, SamplingParams(max_tokens=0), LogprobParams(prompt_top_k=0))
            for ids in self._token_ids(prompts)
        ]
        for _ in self._run(replies):
            pass
        return [PackedRows(0, b"".join(reply.prompt_rows)).logprob for reply in replies]

    def score_candidates(
        self,
        prompt: Prompt | list[JsonObject],
        candidates: Sequence[Prompt],
        *,
        normalize: Normalize = "sum",
    ) -> list[ScoredCandidate]:
        """Score what may follow a prompt. The prompt is computed once, and only the candidates' tokens are scored.

        Args:
            prompt: a text, token ids, or a conversation (a list of messages), which is rendered with a generation
                prompt.
            candidates: 1 to 1,000, each a text or token ids. A text is cut into tokens with the prompt's end, as the
                model would have written it.
            normalize: probabilities are shares of the totals ("sum") or of the means ("mean") among the candidates, or
                each candidate's own ("none").

        Raises:
            InvalidRequestError: an argument is of a wrong type or out of bounds: nothing was computed.
            InvalidLogitsError: the model gave no numbers for one of the candidates.
        """
        self._check_idle()
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        if is_chat:
            prompt_ids = self.tokenizer.apply_chat_template(cast("list[JsonObject]", prompt))
        else:
            prompt_ids, *others = self._token_ids(cast("Prompt", prompt)) or [[]]
            if others:
                raise InvalidRequestError("candidates are scored after one prompt", param="prompt")
        name = str(next(self._numbers))
        asked = cut_candidates(self.core, self.tokenizer, name, prompt_ids, candidates, special_tokens=not is_chat)
        [found] = score_candidates(self.core, self.tokenizer, [asked], normalize)
        if isinstance(found, NeperError):
            raise found
        return found

    def _check_idle(self) -> None:
        if self.core.has_work:  # its chunks would come to us
            raise InvalidRequestError("a stream of this LLM is still open: finish it or close it first")

    def stream_chat(
        self,
        messages: list[JsonObject],
        sampling_params: SamplingParams | None = None,
        logprobs: LogprobParams | None = None,
    ) -> Iterator[TextDelta]:
        """The reply to a conversation, step by step. Closing the iterator ends the work."""
        [sampling] = one_each(sampling_params, SamplingParams, 1, "sampling_params")
        [scores] = one_each(logprobs, LogprobParams, 1, "logprobs")
        prompt = self.tokenizer.apply_chat_template(messages)
        reply = self._reply(prompt, sampling, scores, begins_text=True)
        with closing(self._run([reply])) as steps:  # a generator left to itself is closed at no certain time
            for _, delta in steps:
                yield delta

    def _token_ids(self, prompts: Prompts) -> list[list[int]]:
        try:
            given = plain(prompts)
            single = isinstance(given, str) or (given and all(isinstance(item, int) for item in given))
            listed = msgspec.convert([given] if single else given, list[Prompt])
        except (TypeError, msgspec.ValidationError) as error:
            raise InvalidRequestError(f"prompts must be texts or token ids: {error}", param="prompts") from None
        return [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in listed]

    def _reply(
        self, prompt: list[int], sampling: SamplingParams, logprobs: LogprobParams, *, begins_text: bool = False
    ) -> _Reply:
        capabilities = self.core.capabilities
        limit = capabilities.max_model_len
        if len(prompt) > limit or (len(prompt) == limit and sampling.max_tokens != 0):
            raise ContextLengthError(f"the prompt has {len(prompt)} tokens, the model's context {limit}")
        request = Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=prompt,
            sampling=sampling,
            logprobs=logprobs,
            eos_token_ids=self.eos_token_ids,
        )
        problem = self.core.problem(request)
        if not all(sampling.stop):
            problem = "a stop string must not be empty"
        if problem is not None:
            raise InvalidRequestError(problem)
        detokenizer = Detokenizer.for_reply(self.tokenizer, sampling, begins_text=begins_text)
        return _Reply(request, self.tokenizer, detokenizer, capabilities.vocab_size)

    def _run(self, replies: list[_Reply]) -> Generator[tuple[_Reply, TextDelta], None, None]:
        """Advance replies to their ends; whatever happens, none is left in the engine."""
        self._check_idle()
        open_replies = {reply.request.request_id: reply for reply in replies}
        for reply in replies:
            self.core.add(reply.request)
        try:
            while open_replies:
                for chunk in self.core.step():
                    reply = open_replies[chunk.request_id]
                    delta = reply.take(chunk)
                    if delta.finish_reason is not None:
                        del open_replies[chunk.request_id]
                        self.core.abort(chunk.request_id)  # a stop string ends what the engine would go on with
                    yield reply, delta
        finally:
            for request_id in open_replies:
                self.core.abort(request_id)
