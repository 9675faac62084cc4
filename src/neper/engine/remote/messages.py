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
    request: Request


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

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
