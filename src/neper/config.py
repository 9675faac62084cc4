"""Configuration: the only home of defaults.

A field that is None means "choose for me"; `neper.engine.settings.resolve` makes every such choice in one place and
logs it. The command line's flags are made from these dataclasses: a field's `help` metadata is its help text.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from neper.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
LOGPROBS_MODES = ("raw_logprobs", "tempered_logprobs", "processed_logprobs")
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "none")
REASONING_PARSERS = ("think", "mistral", "none")
DRAFTERS = ("ngram", "mtp", "draft:MODEL")
MAX_DRAFT_TOKENS = 16
SCORE_MODES = ("text", "candidates", "reply")
NORMALIZES = ("sum", "mean", "none")
BOS_RULES = ("auto", "always", "never")
MAX_CANDIDATES = 1000
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_TIME_FORMAT = "%H:%M:%S"

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_.-]+|\[?[0-9A-Fa-f:.]+\]?|\*")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_ORIGIN = re.compile(r"https?://[^/\s]+")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine loads and how much it may use."""

    model: str = _option(DEFAULT_MODEL, "Model: the embedded smollm2-135m, a directory, a .gguf file, or a hub id.")
    device: str | None = _option(None, "Device: cpu or cuda. Default: cuda where there is one.")
    dtype: str | None = _option(None, "float32 or bfloat16. Default: bfloat16 where the device is fast at it.")
    max_model_len: int | None = _option(None, "Longest prompt + reply in tokens. Default: the model's context.")
    max_num_seqs: int | None = _option(
        None, "Most requests computed at a time; the others wait. Default: 64, 256 on a GPU."
    )
    max_num_batched_tokens: int | None = _option(
        None, "Most tokens in a step; longer prompts are computed in chunks of this. Default: 512, 8192 on a GPU."
    )
    kv_cache_memory: int | None = _option(None, "Bytes for the KV cache. Default: a share of the free memory.")
    gpu_memory_utilization: float = _option(0.9, "Share of a GPU's memory that all of the engine may take.")
    block_size: int = _option(16, "Tokens in a block of the KV cache.")
    max_logprobs: int = _option(20, "Most alternatives a request may list per token; -1 = no cap, and all of them.")
    scoring: str | None = _option(
        None, "Where logprobs are computed: device, or host, which copies whole rows. Default: device where it can."
    )
    prefix_caching: bool = _option(True, "Reuse the KV cache of prompts that begin alike.")
    cuda_graphs: bool = _option(True, "Replay decode steps on a GPU as CUDA graphs.")
    overlap: bool | None = _option(None, "Launch a step before the last one's results are read. Default: on a GPU.")
    num_threads: int | None = _option(None, "CPU threads of the engine. Default: one for each core that it may use.")
    speculative: str | None = _option(
        None,
        "Draft tokens and verify several per step: ngram looks them up in prompt and reply, mtp asks the model's own "
        "prediction layer, draft:MODEL a small model of the same vocabulary. Default: off.",
    )
    draft_tokens: int | None = _option(
        None, "Most drafted tokens of a request per step, 1 to 16 (15 on a GPU). Default: 8."
    )

    def __post_init__(self) -> None:
        optional = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory", "num_threads")
        for name in ("block_size", *optional):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        # Beyond these no machine follows, and what it would say is hard to read.
        for name, limit in (("max_num_seqs", 2**16), ("max_num_batched_tokens", 2**20), ("block_size", 2**12)):
            value = getattr(self, name)
            if value is not None and value > limit:
                raise ConfigError(f"{name} must be at most {limit}, got {value}")
        if self.speculative not in (None, "ngram", "mtp") and not self.draft_model:
            known = f"{', '.join(DRAFTERS[:-1])} or {DRAFTERS[-1]}"
            raise ConfigError(f"speculative must be {known}, got {self.speculative!r}")
        if self.draft_tokens is not None and self.speculative is None:
            raise ConfigError("draft_tokens needs speculative: what proposes them, for example ngram")
        if self.draft_tokens is not None and not 1 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"draft_tokens must be 1 to {MAX_DRAFT_TOKENS}, got {self.draft_tokens}")
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs must be at least 0, or -1 for no cap, got {self.max_logprobs}")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ConfigError(f"dtype must be float32 or bfloat16, got {self.dtype!r}")
        if self.device is not None and not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device {self.device!r} is not known; use cpu or cuda")
        if self.scoring not in (None, "device", "host"):
            raise ConfigError(f"scoring must be device or host, got {self.scoring!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}"
            )

    @property
    def draft_model(self) -> str | None:
        """The small model that drafts; None where none does."""
        kind, _, model = (self.speculative or "").partition(":")
        return model if kind == "draft" else None

    def context(self, limit: int) -> int:
        """The longest prompt + reply with a model of that context; ConfigError where more was asked for."""
        if self.max_model_len is not None and self.max_model_len > limit:
            raise ConfigError(f"max_model_len {self.max_model_len} is beyond the model's context of {limit} tokens")
        return self.max_model_len or limit


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """The parts of a file's rows that are scored, and their columns."""

    mode: str = _option(
        "text",
        "text: each row's text. candidates: each of the answers to a prompt. reply: the tokens of a reply to messages.",
    )
    top: int | None = _option(
        None, "List each token, and this many alternatives of it; 0 = none. Default: no lists; 0 in mode reply."
    )
    stride: int | None = _option(
        None,
        "Mode text: texts beyond the model's context are scored by windows that begin every so many tokens. "
        "Default: they are failed rows.",
    )
    bos: str = _option(
        "auto",
        "Mode text: put BOS before a text, so that its first token is scored as well: auto (as the tokenizer does), "
        "always (the end-of-sequence token where there is no BOS), never.",
    )
    score_end: bool = _option(False, "Mode reply: score the token that ends the reply as well.")
    normalize: str = _option(
        "sum",
        "Mode candidates: probabilities are shares of the totals (sum), of the means per token (mean), or each "
        "candidate's own (none).",
    )
    text_column: str = _option("text", "Column of the text, in mode text.")
    prompt_column: str = _option("prompt", "Column of the prompt, in mode candidates: a text, token ids or messages.")
    candidates_column: str = _option("candidates", "Column of the list of candidates: texts or token ids.")
    messages_column: str = _option("messages", "Column of the messages, in mode reply.")
    reply_column: str = _option("reply", "Column of the reply: its text, or its token ids.")

    def __post_init__(self) -> None:
        for name, value, known in (
            ("mode", self.mode, SCORE_MODES),
            ("bos", self.bos, BOS_RULES),
            ("normalize", self.normalize, NORMALIZES),
        ):
            if value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}; got {value!r}")
        if self.top is not None and self.top < 0:
            raise ConfigError(f"top must be at least 0, got {self.top}")
        if self.stride is not None and self.stride < 1:
            raise ConfigError(f"stride must be at least 1, got {self.stride}")
        for mode, name, used in (
            ("text", "stride", self.stride is not None),
            ("text", "bos", self.bos != "auto"),
            ("candidates", "normalize", self.normalize != "sum"),
            ("reply", "score_end", self.score_end),
        ):
            if used and self.mode != mode:
                raise ConfigError(f"{name} belongs to mode {mode}, and the mode is {self.mode}")


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Time limits on signs of life from the engine's process."""

    engine_unhealthy_after: float = _option(
        5.0, "Seconds without a sign of life of neper's engine after which no requests are taken (503)."
    )
    engine_restart_after: float = _option(
        60.0, "Seconds without a sign of life after which it is killed and started again."
    )
    engine_step_timeout: float = _option(
        600.0, "Seconds in one step after which it is killed as well; raise it if a step takes minutes."
    )

    def __post_init__(self) -> None:
        for name in ("engine_unhealthy_after", "engine_restart_after", "engine_step_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class LineEngineConfig:
    """Another program as the engine, which speaks the line protocol. `neper serve` runs it in place of its own."""

    engine_command: str | None = _option(
        None, "Command line of an engine that speaks the T/LP line protocol, to serve instead. Needs --tokenizer."
    )
    tokenizer: str | None = _option(
        None, "Tokenizer and chat template of that engine's model: a directory, or a model as MODEL is."
    )
    engine_log: str | None = _option(
        None, "File to append the engine's stderr to. Default: a new one in the directory for temporary files."
    )
    engine_start_timeout: float = _option(
        600.0, "Seconds without a line after which an engine that is starting counts as hung."
    )
    engine_silence_timeout: float = _option(
        60.0, "Seconds without a line about a running request after which it is ended, or the engine started again."
    )

    def __post_init__(self) -> None:
        if self.engine_command is not None and self.tokenizer is None:
            raise ConfigError("--engine-command needs --tokenizer: where its model's tokenizer is")
        if self.engine_command is not None:
            try:
                words = shlex.split(self.engine_command)
            except ValueError as error:
                raise ConfigError(f"engine_command {self.engine_command!r} is no command line: {error}") from None
            if not words:
                raise ConfigError("engine_command is empty")
        if self.engine_command is None and self.tokenizer is not None:
            raise ConfigError("--tokenizer needs --engine-command: neper's own engine has its model's tokenizer")
        if self.engine_command is None and self.engine_log is not None:
            raise ConfigError("--engine-log needs --engine-command: neper's own engine logs with the server")
        for name in ("engine_start_timeout", "engine_silence_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The address and the limits of the HTTP server."""

    host: str = _option("127.0.0.1", "Address to listen on.")
    port: int = _option(8000, "Port to listen on.")
    api_key: str | None = _option(
        None,
        "Bearer token that requests must carry, but for /health and /metrics. "
        "The list of processes shows it; the next two options hide it.",
    )
    api_key_file: str | None = _option(None, "File that holds the API key alone.")
    api_key_env: str | None = _option(None, "Name of the environment variable that holds the API key.")
    allowed_hosts: tuple[str, ...] = _option(
        (),
        "Hosts that requests may name in their Host header, with commas; * = all, *.example.com = all below it. "
        "Default: all; on a loopback address without a key only localhost, loopback addresses and --host.",
    )
    served_model_name: str | None = _option(None, "Name of the model in the API. Default: from the model itself.")
    allowed_origins: tuple[str, ...] = _option(
        (), "Origins whose pages may call the API (CORS), with commas; * = all. Default: none."
    )
    explorer: bool = _option(True, "Serve the explorer, a page about tokens and their probabilities, at /.")
    logprobs_mode: str = _option(
        "raw_logprobs", "View of logprobs where a request names none: raw_, tempered_ or processed_logprobs."
    )
    chat_template: str | None = _option(
        None, "File with a chat template (Jinja) in place of the model's own, or for a base model that has none."
    )
    trust_request_chat_template: bool = _option(
        False, "Render a request's own chat_template. It runs in a sandbox, with limits of time and size."
    )
    special_tokens_in_messages: bool = _option(
        False, "Let control tokens spelled in messages become tokens. Default: there they are text."
    )
    tool_call_parser: str | None = _option(
        None, "Form of the model's tool calls: hermes, llama3_json, mistral, none. Default: read from its template."
    )
    reasoning_parser: str | None = _option(
        None, "Tags around the model's reasoning: think, mistral, none. Default: read from its template."
    )
    max_body_bytes: int = _option(8 * 2**20, "Largest request body; a larger one is a 413.")
    max_kept_bytes: int = _option(
        16 * 2**20,
        "Most bytes of items of recent responses, which a request may name by their ids (item_reference); 0 = none.",
    )
    max_header_bytes: int = _option(64 * 2**10, "Largest headers of a request; larger ones are a 431.")
    max_connections: int | None = _option(
        None,
        "Most connections at a time; beyond them the one whose client has been silent for longest is cut. "
        "Default: 4096, or what the limit of open files leaves.",
    )
    max_connections_per_client: int | None = _option(
        None, "Most connections per address (per network of 64 bits with IPv6). Default: half of --max-connections."
    )
    max_choices: int = _option(128, "Most choices (prompts x n) of one request; more are a 400.")
    max_candidates: int = _option(MAX_CANDIDATES, "Most candidates of one request; more are a 400.")
    max_listed: int = _option(
        2**20,
        "Most alternatives that one request may list, of prompts and in lists longer than 128, and most tokens of all "
        "its candidates; more are a 400.",
    )
    max_requests: int = _option(2048, "Most requests being answered at once; beyond them the answer is a 503.")
    max_waiting: int = _option(
        1024, "Most choices that wait while the engine computes others; beyond them the answer is a 429."
    )
    request_timeout: float = _option(600.0, "Seconds after which a request is ended with an error (500, timeout).")
    receive_timeout: float = _option(
        30.0, "Seconds for a request's headers, and without a byte of its body, after which the answer is a 408."
    )
    keep_alive_timeout: float = _option(65.0, "Seconds after which a connection without a request is closed.")
    stream_ping_interval: float = _option(
        5.0, "Seconds of silence after which a stream sends a comment line to show that it is alive; 0 = never."
    )
    drain_timeout: float = _option(30.0, "Seconds that running requests get to finish when the server is stopped.")
    log_level: str = _option("info", "debug, info, warning or error.")

    def __post_init__(self) -> None:
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(
                f"log_level must be {', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}, got {self.log_level!r}"
            )
        if self.api_key == "":
            raise ConfigError("api_key is empty: give one, or leave the option out to need none")
        if sum(key is not None for key in (self.api_key, self.api_key_file, self.api_key_env)) > 1:
            raise ConfigError("give one of --api-key, --api-key-file and --api-key-env")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("served_model_name is empty: give a name, or leave the option out")
        for name, value, known in (
            ("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES),
            ("tool_call_parser", self.tool_call_parser, (None, *TOOL_CALL_PARSERS)),
            ("reasoning_parser", self.reasoning_parser, (None, *REASONING_PARSERS)),
        ):
            if value not in known:
                listed = ", ".join(choice for choice in known if choice is not None)
                raise ConfigError(f"{name} must be one of {listed}; got {value!r}")
        for name, least in (
            ("max_body_bytes", 1),
            ("max_kept_bytes", 0),
            ("max_header_bytes", 256),
            ("max_connections", 1),
            ("max_connections_per_client", 1),
            ("max_choices", 1),
            ("max_candidates", 1),
            ("max_listed", 1),
            ("max_requests", 1),
            ("max_waiting", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.max_candidates > MAX_CANDIDATES:
            raise ConfigError(f"max_candidates must be at most {MAX_CANDIDATES}, got {self.max_candidates}")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: {origin!r} is no origin; write for example https://example.com or *"
                )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"allowed_hosts: {host!r} is no host name; write for example llm.example.com, *.example.com or *"
                )
        if not self.receive_timeout > 0:
            raise ConfigError(f"receive_timeout must be above 0, got {self.receive_timeout}")
        for name in ("request_timeout", "keep_alive_timeout", "stream_ping_interval", "drain_timeout"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
