"""What the server's process and the engine's process say to each other: msgpack over two one-way sockets."""

from __future__ import annotations

import msgspec

from neper.config import EngineConfig
from neper.engine.interface import Capabilities, EngineStats
from neper.types import Request, TokenChunk


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message to the engine: load this.

    Attributes:
        config: its `model` is a local directory.
        gguf: the file that the directory was converted from, if it was.
    """

    config: EngineConfig
    log_level: str
    gguf: str | None = None


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Compute a request. With `same_prompt` its prompt and prediction are left out: those of the one before count."""

    request: Request
    same_prompt: bool = False


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit now; running requests are dropped."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of loading the model."""

    done: int
    total: int
    what: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    capabilities: Capabilities
    stats: EngineStats


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start as configured; the process exits after this."""

    message: str


class EngineOutputs(msgspec.Struct, frozen=True, tag=True):
    """What a step brought: at most one chunk a request, and the load after it."""

    chunks: list[TokenChunk]
    stats: EngineStats


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The process lives; `turns` of its loop were made."""

    turns: int


ToEngine = Start | Submit | Abort | Shutdown
FromEngine = Loading | Ready | StartFailed | EngineOutputs | Beat

_SENT_ONCE = ("prompt_token_ids", "prediction_token_ids")

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


class Prompts:
    """The last prompt that went over a connection, kept at either end: the choices of one prompt send it once."""

    def __init__(self) -> None:
        self._last: Request | None = None

    def encoded(self, request: Request) -> bytes:
        """The Submit of a request, at the end that sends. It knows a prompt again by being the same object."""
        last = self._last
        same = last is not None and all(getattr(request, name) is getattr(last, name) for name in _SENT_ONCE)
        sent = msgspec.structs.replace(request, prompt_token_ids=[], prediction_token_ids=()) if same else request
        data = encode(Submit(sent, same))
        self._last = request  # only now: what cannot be encoded was not sent
        return data

    def request(self, submit: Submit) -> Request:
        """The request of a Submit, whole, at the end that receives."""
        if submit.same_prompt:
            assert self._last is not None
            return msgspec.structs.replace(submit.request, **{name: getattr(self._last, name) for name in _SENT_ONCE})
        self._last = submit.request
        return submit.request
