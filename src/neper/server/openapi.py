"""The OpenAPI document: bodies and replies from the structs of their JSON, errors from errors."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import orjson

import neper
from neper import errors
from neper.server.bodies.candidates import CandidatesBody
from neper.server.bodies.chat import ChatBody
from neper.server.bodies.completion import CompletionBody
from neper.server.bodies.responses import PARTS, ResponsesBody
from neper.server.bodies.strict import Strict, only_values
from neper.server.bodies.tokenization import DetokenizeBody, TokenizeBody
from neper.server.schemas import candidates, chat, completions, models, responses, status, tokenization
from neper.server.transport.accept import ARROW
from neper.server.transport.asgi import ErrorReply
from neper.types import JsonObject

_REFERENCE = "#/components/schemas/{name}"
Version = Literal["3.1", "3.2"]

_NEUTRAL = "Another server's. This value asks for what happens here anyway; any other is refused."
_REFUSED = "Known, but not supported by this server: anything but null is refused."


class Operation(NamedTuple):
    """One endpoint.

    Attributes:
        name: its name in generated clients.
        reply: the struct of its JSON; None = not JSON.
        chunk: the struct of an event, if it can stream.
        event: the struct of a named event, if its stream has named events.
        raises: errors besides those that any request can meet.
        arrow: what a row of its reply in Arrow's form is, where it has that form.
        parts: structs in the body that are decoded by their type.
        required: fields that the body must have. Its struct has them optional, since null equals absent.
    """

    method: str
    path: str
    name: str
    summary: str
    reply: type[msgspec.Struct] | None
    body: type[Strict] | None = None
    chunk: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    arrow: str | None = None
    raises: tuple[type[errors.NeperError], ...] = ()
    parts: tuple[type[Strict], ...] = ()
    required: tuple[str, ...] = ()
    open: bool = False


_BODY = (
    errors.InvalidRequestError,
    errors.ModelNotFoundError,
    errors.ReceiveTimeoutError,
    errors.RequestTooLargeError,
    errors.UnsupportedMediaTypeError,
)
_GENERATES = (*_BODY, errors.QueueFullError)
_ALWAYS = (errors.OverloadedError, errors.InternalError)

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "createChatCompletion",
        "The reply to a conversation",
        chat.ChatCompletion,
        ChatBody,
        chat.ChatChunk,
        raises=_GENERATES,
        required=("messages",),
    ),
    Operation(
        "post",
        "/v1/completions",
        "createCompletion",
        "The continuation of a text",
        completions.Completion,
        CompletionBody,
        completions.CompletionChunk,
        arrow="a token of a prompt or a choice",
        raises=(*_GENERATES, errors.NotAcceptableError),
        required=("prompt",),
    ),
    Operation(
        "post",
        "/v1/responses",
        "createResponse",
        "The response to a text or a conversation",
        responses.Response,
        ResponsesBody,
        event=responses.ResponseEvent,
        raises=_GENERATES,
        parts=PARTS,
        required=("input",),
    ),
    Operation(
        "post",
        "/v1/candidates",
        "scoreCandidates",
        "Candidates of a prompt, scored and compared",
        candidates.Candidates,
        CandidatesBody,
        arrow="a candidate",
        raises=(*_GENERATES, errors.NotAcceptableError),
    ),
    Operation("get", "/v1/models", "listModels", "The model that is served, as a list", models.ModelList),
    Operation(
        "get",
        "/v1/models/{name}",
        "retrieveModel",
        "The model of that name",
        models.Model,
        raises=(errors.ModelNotFoundError,),
    ),
    Operation("post", "/tokenize", "tokenize", "Ids of a text", tokenization.Tokens, TokenizeBody, raises=_BODY),
    Operation("post", "/detokenize", "detokenize", "Text of ids", tokenization.Text, DetokenizeBody, raises=_BODY),
    Operation("get", "/tokenizer_info", "tokenizerInfo", "Facts about the tokenizer", tokenization.TokenizerInfo),
    Operation(
        "get",
        "/health",
        "health",
        "200 while requests are taken",
        status.Health,
        raises=(errors.OverloadedError,),
        open=True,
    ),
    Operation("get", "/ping", "ping", "Alias of /health", status.Health, raises=(errors.OverloadedError,), open=True),
    Operation("get", "/version", "version", "neper's version", status.Version),
    Operation("get", "/metrics", "metrics", "Metrics for Prometheus", None, open=True),
    Operation(
        "get", "/openapi.json", "openapi", "This document", None, raises=(errors.InvalidRequestError,), open=True
    ),
)


class ApiDocument:
    """The document of a server; made when first asked for.

    Generators of clients read OpenAPI 3.1. Version 3.2 is the first that describes the events of a stream.
    """

    def __init__(self, *, needs_key: bool) -> None:
        self._needs_key = needs_key
        self._made: dict[Version, bytes] = {}

    def json(self, version: Version) -> bytes:
        if version not in self._made:
            self._made[version] = orjson.dumps(self.document(version))
        return self._made[version]

    def document(self, version: Version = "3.1") -> JsonObject:
        structs: set[type[msgspec.Struct] | None] = {ErrorReply}
        for operation in OPERATIONS:
            structs |= {operation.body, operation.reply, operation.chunk, operation.event, *operation.parts}
        ordered = sorted(filter(None, structs), key=lambda struct: struct.__name__)
        _, schemas = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
        for kind in _strict_structs():
            if kind.__name__ in schemas:
                _tell_refused(schemas[kind.__name__], kind)
        _complete(schemas)
        for operation in OPERATIONS:
            if operation.body is not None:
                _demand(schemas[operation.body.__name__], operation.required)
        paths: dict[str, JsonObject] = {}
        for operation in OPERATIONS:
            paths.setdefault(operation.path, {})[operation.method] = self._operation(operation, version)
        components: JsonObject = {"schemas": schemas}
        if self._needs_key:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return {
            "openapi": f"{version}.0",
            "info": {
                "title": "neper",
                "version": neper.__version__,
                "summary": "Exact token logprobs, aligned with text",
                "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
            },
            "servers": [{"url": "/"}],
            "security": [{"key": []}] if self._needs_key else [],
            "paths": paths,
            "components": components,
        }

    def _operation(self, operation: Operation, version: Version) -> JsonObject:
        raises = operation.raises
        if not operation.open:
            raises = (*raises, *_ALWAYS, *((errors.AuthenticationError,) if self._needs_key else ()))
        made: JsonObject = {
            "operationId": operation.name,
            "summary": operation.summary,
            "responses": {"200": _success(operation, version)},
        }
        for code in sorted({error.status for error in raises}):
            made["responses"][str(code)] = _failure(code)
        if operation.body is not None:
            made["requestBody"] = {"required": True, "content": _json(operation.body)}
        if operation.path == "/openapi.json":
            versions = {"type": "string", "enum": list(get_args(Version)), "default": "3.1"}
            made["parameters"] = [{"name": "version", "in": "query", "schema": versions}]
        if "{name}" in operation.path:
            made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        if operation.open:
            made["security"] = []
        return made


def _success(operation: Operation, version: Version) -> JsonObject:
    if operation.path == "/metrics":
        content: JsonObject = {"text/plain": {"schema": {"type": "string"}}}
    elif operation.reply is None:
        content = {"application/json": {"schema": {"type": "object"}}}
    else:
        content = _json(operation.reply)
    if operation.arrow is not None:
        description = f"Where Accept asks for it: an Arrow IPC stream. A row is {operation.arrow}."
        content[ARROW.decode()] = {"schema": {"type": "string", "format": "binary", "description": description}}
    if operation.chunk is not None:
        chunk = _embedded({"anyOf": [_reference(operation.chunk), _reference(ErrorReply)]})
        content["text/event-stream"] = _stream(
            # An event without a name is of the type "message".
            {"data": {"anyOf": [{"const": "[DONE]"}, chunk]}, "event": {"const": "message"}},
            "With `stream: true`. Each event's data is a chunk, or an error; the last one's is [DONE].",
            version,
        )
    if operation.event is not None:
        content["text/event-stream"] = _stream(
            {"data": _embedded(_reference(operation.event)), "event": {"type": "string"}},
            "With `stream: true`. Events are named as the `type` in their data. After response.failed comes an event "
            "`error`.",
            version,
        )
    return {"description": operation.summary, "content": content, "headers": _headers()}


def _stream(event: JsonObject, description: str, version: Version) -> JsonObject:
    """A stream of server-sent events with only these fields, and always data."""
    if version == "3.1":
        return {"schema": {"type": "string", "description": description}}
    properties = {"properties": event, "required": ["data"], "additionalProperties": False}
    return {"itemSchema": {"type": "object", "description": description, **properties}}


def _embedded(schema: JsonObject) -> JsonObject:
    """A value of a schema, as JSON in a string."""
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}


def _failure(status: int) -> JsonObject:
    waits = status in (errors.QueueFullError.status, errors.OverloadedError.status)
    return {
        "description": HTTPStatus(status).phrase,
        "content": _json(ErrorReply),
        "headers": _headers(**({"Retry-After": "integer"} if waits else {})),
    }


def _headers(**others: str) -> JsonObject:
    types = {"X-Request-Id": "string", **others}
    return {name: {"required": True, "schema": {"type": type}} for name, type in types.items()}


def _json(kind: type[msgspec.Struct]) -> JsonObject:
    return {"application/json": {"schema": _reference(kind)}}


def _reference(kind: type[msgspec.Struct]) -> JsonObject:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def _strict_structs() -> list[type[Strict]]:
    """All structs of bodies, and of objects in them."""
    found: list[type[Strict]] = []
    queue: list[type[Any]] = [Strict]
    while queue:
        kind = queue.pop()
        found.append(kind)
        queue += kind.__subclasses__()
    return found


def _tell_refused(schema: JsonObject, kind: type[Strict]) -> None:
    names = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
    for name, value in only_values(kind).items():
        if value is None:
            schema["properties"][names[name]] = {"type": "null", "description": _REFUSED}
        else:
            schema["properties"][names[name]] = {"anyOf": [_only(value), {"type": "null"}], "description": _NEUTRAL}


def _only(value: Any) -> JsonObject:
    """The schema of one value with its type, which generators need."""
    if isinstance(value, list):
        items = _only(value[0]) if value else {}
        return {"type": "array", "items": items, "minItems": len(value), "maxItems": len(value)}
    types = {bool: "boolean", int: "number", str: "string"}
    return {"type": types[type(value)], "const": value}


def _complete(schema: Any) -> None:
    """Add to all schemas in one the parts that generators need: items of arrays, types beside enums."""
    if isinstance(schema, list):
        for inner in schema:
            _complete(inner)
    elif isinstance(schema, dict):
        if schema.get("type") == "array":
            schema.setdefault("items", {})
        if schema.get("enum") == [False]:
            del schema["enum"]
            schema |= {"type": "boolean", "const": False}
        for inner in schema.values():
            _complete(inner)


def _demand(schema: JsonObject, names: tuple[str, ...]) -> None:
    for name in names:
        field = schema["properties"][name]
        field.pop("default", None)
        field["anyOf"] = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
        schema.setdefault("required", []).append(name)
