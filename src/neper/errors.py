"""The exception tree: every error that a user can meet, each with its HTTP status and OpenAI code.

Wrong arguments of the library are ValueErrors as well.
"""

from __future__ import annotations


class NeperError(Exception):
    """Base of all errors that neper raises on purpose.

    Attributes:
        status: HTTP status of the reply.
        type: OpenAI error type.
        code: OpenAI error code, or None.
        param: name of the request field at fault, or None.
        retry_after: seconds for the Retry-After header, or None.
        retry_helps: False where the same request would fail again. Clients are then told not to retry.
    """

    status: int = 500
    type: str = "internal_error"
    code: str | None = None
    retry_helps = True

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class InternalError(NeperError):
    """A defect of neper; its log has the details under the request's id."""

    code = "internal_error"


class InvalidRequestError(NeperError, ValueError):
    """A field of the request is wrong; nothing was started."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class MalformedRequestError(InvalidRequestError):
    """The bytes that came are no HTTP/1.1 request."""

    code = "malformed_request"


class UnsupportedError(InvalidRequestError):
    """A field or value that this server (or the engine behind it) does not implement."""

    code = "unsupported"


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt with max_tokens, is longer than the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(NeperError):
    """The server has an API key, and the request does not carry it."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class HostNotAllowedError(NeperError):
    """The request names a host that is none of this server's (`--allowed-hosts`)."""

    status = 403
    type = "invalid_request_error"
    code = "host_not_allowed"


class ModelNotFoundError(NeperError):
    """The model that the request names is not served here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFoundError(NeperError):
    """No such route."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowedError(NeperError):
    """The route exists but does not take this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class NotAcceptableError(NeperError):
    """The request accepts a form of reply alone (Arrow) that this server cannot write."""

    status = 406
    type = "invalid_request_error"
    code = "not_acceptable"


class ReceiveTimeoutError(NeperError):
    """The request did not arrive: its headers took too long, or its body stopped on the way."""

    status = 408
    type = "invalid_request_error"
    code = "receive_timeout"


class RequestTooLargeError(NeperError):
    """The body is larger than the server accepts."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaTypeError(NeperError):
    """The body is encoded in a way that is not read here: compressed, for example."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class QueueFullError(NeperError):
    """The queue of choices is full; try again after `Retry-After` seconds."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class HeadersTooLargeError(NeperError):
    """The headers are larger than the server accepts."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class OverloadedError(NeperError):
    """Too many requests are being answered, the engine is being started again, or the server is stopping."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"


class EngineError(NeperError):
    """The engine failed this request; the engine itself lives on."""

    code = "engine_error"


class InvalidLogitsError(EngineError):
    """The model produced NaN, +inf, or nothing above -inf for a row of this request."""

    code = "invalid_logits"
    retry_helps = False


class EngineDeadError(EngineError):
    """The engine process died while it served this request; it is being started again."""

    code = "engine_dead"


class RequestTimeoutError(EngineError):
    """The request ran longer than the server allows."""

    code = "timeout"
    retry_helps = False


class StartupError(NeperError):
    """neper cannot start as configured. The message says what to change."""

    code = "startup"


class ConfigError(StartupError, ValueError):
    """A setting has a value that it cannot have."""


class ModelLoadError(StartupError):
    """The model cannot be loaded: missing files, missing or unknown weights, an architecture that is not supported."""

    code = "model_load"
