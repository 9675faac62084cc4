"""The service: the objects that all endpoints share, the work in flight, and shutting down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, TypeVar

import orjson
from starlette.types import Receive, Scope

from neper.config import ServerConfig
from neper.engine.interface import Engine
from neper.errors import (
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    QueueFullError,
    StartupError,
)
from neper.server.bodies.strict import Body, decode_body
from neper.server.entries.entries import Entries
from neper.server.entries.score_texts import ScoreBatch
from neper.server.generation import Generation
from neper.server.kept_items import KeptItems
from neper.server.lane import Lane
from neper.server.long_texts import INLINE_CHARACTERS, Encoding, LongTexts
from neper.server.memory import MemoryReturn
from neper.server.metrics import Metrics
from neper.server.transport.asgi import read_body, unless_left
from neper.server.transport.connections import Connections
from neper.server.transport.exchange import Exchange
from neper.text.plain_tools import shows_system_message
from neper.text.reasoning import reasoning_tags
from neper.text.tokenizer import Tokenizer
from neper.text.tools import PLAIN_FORM, tool_format
from neper.text.trials import Trials
from neper.types import JsonObject

# Larger bodies are decoded in a thread. These take 2 ms at worst, some of which lets the event loop run.
INLINE_BYTES = 32 * 1024
# All bodies held at once are at most this many times the largest one. Decoded, they take up to 8 times as much.
HELD_BODIES = 16
# The text that a template writes around a message. Even empty ones add up.
MESSAGE_CHARACTERS = 50

Result = TypeVar("Result")


class Service:
    """One engine, one tokenizer, and the requests and generations in flight. Lives on `app.state.service`.

    Raises StartupError when the configuration names an unknown parser or view.

    `drain()` makes new requests a 503 while the running ones go on. `close_all()` ends those with an error.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: ServerConfig,
        *,
        model_name: str,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        modes = engine.capabilities.logprobs_modes
        if config.logprobs_mode not in modes:
            raise StartupError(f"logprobs_mode {config.logprobs_mode!r} is none of this engine's: {', '.join(modes)}")
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.model_name = model_name
        self.eos_token_ids = eos_token_ids
        self.reasoning_tags = reasoning_tags(tokenizer, config.reasoning_parser)
        self.tool_format = tool_format(tokenizer, config.tool_call_parser)
        # The template shows no tools, or asks for calls in an unknown form: then words tell the model of its tools.
        self.plain_tools = self.tool_format is None and config.tool_call_parser != "none"
        if self.plain_tools:
            self.tool_format = PLAIN_FORM
        self.entries = Entries(tokenizer)
        self.kept_items = KeptItems(config.max_kept_bytes)
        self.scores = ScoreBatch()
        self.trials = Trials(tokenizer, engine.capabilities.vocab_size, eos_token_ids)
        self.connections = Connections(config)
        self.metrics = Metrics(engine, self, self.connections, model_name=model_name)
        self.created = int(time.time())
        self.draining = False
        self.num_choices = 0
        self._requests: set[Exchange] = set()
        self._body_bytes = 0
        self._arriving: dict[Exchange, None] = {}  # those whose body is on its way, the oldest first
        self._generations: set[Generation] = set()
        self._long_texts = LongTexts()
        self._memory = MemoryReturn()
        self._decoding = Lane("decoding")

    @cached_property
    def shows_system_message(self) -> bool:
        return shows_system_message(self.tokenizer)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ModelNotFoundError(f"no model {name!r} here, only {self.model_name!r}", param="model")

    @property
    def num_requests(self) -> int:
        """HTTP requests being answered."""
        return len(self._requests)

    @contextmanager
    def request(self, exchange: Exchange) -> Iterator[None]:
        """Count an HTTP request as being answered.

        If there are too many, the one whose body has been on its way for longest ends: a client that sends nothing must
        not keep out one that has sent everything. Raises OverloadedError if all bodies have arrived.
        """
        if self.num_requests >= self.config.max_requests:
            if not self._arriving:
                raise OverloadedError(
                    f"{self.num_requests} requests are being answered, as many as this server takes", retry_after=1
                )
            self._cut(next(iter(self._arriving)))
        self._requests.add(exchange)
        if not exchange.arrived:
            self._arriving[exchange] = None
        try:
            yield
        finally:
            self._forget(exchange)
            self._memory.ended(exchange.body_bytes + exchange.reply_bytes)

    def arrived(self, exchange: Exchange) -> None:
        """Note that the whole body of a request is there."""
        exchange.arrived = True
        self._arriving.pop(exchange, None)

    def hold_body(self, exchange: Exchange, size: int, total: int) -> None:
        """Count `size` bytes of a request's body as held until it ends; `total` is their least number in the end.

        Raises OverloadedError where whole bodies leave no room for it. Where only bodies on their way leave none, the
        oldest of those requests ends.
        """
        if exchange not in self._requests:
            return  # it was cut
        most = HELD_BODIES * self.config.max_body_bytes
        others = self._body_bytes - exchange.body_bytes
        if others + total > most:
            whole = others - sum(other.body_bytes for other in self._arriving if other is not exchange)
            if whole + total > most:
                raise OverloadedError(
                    f"the requests being answered have bodies of {whole} bytes, and this server holds no more than "
                    f"{most} at once",
                    retry_after=1,
                )
        while others + size > most:
            oldest = next(other for other in self._arriving if other.body_bytes or other is exchange)
            if oldest is exchange:
                raise _cut_error()
            others -= oldest.body_bytes
            self._cut(oldest)
        exchange.body_bytes = size
        self._body_bytes = others + size

    def _cut(self, exchange: Exchange) -> None:
        """End a request whose body is on its way, to make room for others."""
        self._forget(exchange)
        exchange.cut(_cut_error())

    def _forget(self, exchange: Exchange) -> None:
        """Count a request no longer: it has ended, or was cut before."""
        if exchange in self._requests:
            self._requests.remove(exchange)
            self._body_bytes -= exchange.body_bytes
            self._arriving.pop(exchange, None)

    def check_available(self) -> None:
        """Check that new requests can be taken. Raises OverloadedError otherwise."""
        if self.draining:
            raise OverloadedError("the server is shutting down", retry_after=10)
        if not self.engine.alive:
            raise OverloadedError("the engine is down and being started again", retry_after=5)

    def check_room(self, size: int = 1) -> None:
        """Check that `size` choices can be taken. Raises OverloadedError or QueueFullError otherwise.

        This costs nothing and comes first: refused requests must not slow down running ones.
        """
        self.check_available()
        limit = self.engine.capabilities.max_num_seqs + self.config.max_waiting
        if size > max(limit, 1):
            raise InvalidRequestError(
                f"the request has {size} choices (prompts x n), but this server never takes more than {limit} at once",
                param="n",
            )
        if self.num_choices + size > limit:
            raise QueueFullError(
                f"the queue is full: {self.num_choices} choices are in flight, and {size} more would exceed {limit}",
                retry_after=1,
            )

    def enter(self, generation: Generation) -> None:
        """Count a generation as in flight until `leave`. Raises the errors of `check_room`."""
        size = len(generation.choices)
        self.check_room(size)
        self.num_choices += size
        self._generations.add(generation)

    def leave(self, generation: Generation) -> None:
        if generation in self._generations:
            self._generations.remove(generation)
            for choice, timing in zip(generation.choices, generation.timings, strict=True):
                self.metrics.observe_choice(timing, len(choice.prompt.token_ids), choice.num_tokens)
            self.num_choices -= len(generation.choices)

    def drain(self) -> None:
        self.draining = True

    def close_all(self) -> None:
        """End every generation in flight with an error."""
        for generation in list(self._generations):
            generation.fail(EngineError("the server was stopped"))

    async def read_json(self, scope: Scope, receive: Receive, kind: type[Body]) -> Body:
        """The body of a request, decoded and checked."""
        hold = partial(self.hold_body, Exchange.of(scope))
        parts = await read_body(scope, receive, self.config.max_body_bytes, hold)
        if sum(map(len, parts)) <= INLINE_BYTES:
            return decode_body(b"".join(parts), kind)
        return await unless_left(self._decoding.run(lambda: decode_body(b"".join(parts), kind)), receive)

    async def encode(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """Ids of a text. Raises ContextLengthError where a long one has more than `limit` (default: the context)."""
        encoding = Encoding(limit or self.engine.capabilities.max_model_len)

        def encode() -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, progress=encoding.progress)

        return await self._long_texts.run(len(text), encode, encoding)

    async def encode_chat(
        self, messages: list[JsonObject], *, chat_template: str | None = None, **options: Any
    ) -> list[int]:
        """`chat_template`: Jinja source in place of the model's own."""
        size = MESSAGE_CHARACTERS * len(messages)
        if chat_template is not None:
            size = INLINE_CHARACTERS + 1  # a stranger's program
        if size <= INLINE_CHARACTERS:
            size = sum(map(_length, messages)) + len(orjson.dumps(options.get("template_kwargs")))
        options["special_tokens_in_messages"] = self.config.special_tokens_in_messages
        encoding = Encoding(self.engine.capabilities.max_model_len)

        def encode() -> list[int]:
            template = None if chat_template is None else self.tokenizer.compile_chat_template(chat_template)
            return self.tokenizer.apply_chat_template(
                messages, chat_template=template, progress=encoding.progress, **options
            )

        return await self._long_texts.run(size, encode, encoding)

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """Do work on a text of about `size` characters, in a thread if it is long."""
        return await self._long_texts.run(size, work)


def _cut_error() -> OverloadedError:
    return OverloadedError("the server is full, and the body of this request had not come", retry_after=1)


def _length(message: JsonObject) -> int:
    """The approximate number of characters that a template makes of a message."""
    others = [message["content"] or "", message.get("name", ""), message.get("reasoning_content", "")]
    others += [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return MESSAGE_CHARACTERS * len(others) + sum(map(len, others))
