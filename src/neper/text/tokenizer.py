"""The tokenizer of a model: text and conversations to ids, ids to their exact bytes.

It needs only the `tokenizers` library. transformers would bring torch into the API process, and its import takes two
seconds. So it is used only for directories without a `tokenizer.json`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from neper.errors import InvalidRequestError, ModelLoadError
from neper.files import MAX_TOKENIZER, read_bytes, read_json, read_text, reading
from neper.text.chat_template import ChatTemplate
from neper.text.control_texts import ControlTexts
from neper.text.history import new_call_id
from neper.text.pieces import PIECE, PieceEncoder, Progress
from neper.text.template_terms import TemplateTerms
from neper.text.vocabulary import read_vocabulary

_OLDER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenPiece(NamedTuple):
    """A token's bytes, and the text that they release if no character is unfinished before it.

    Attributes:
        data: the raw bytes.
        text: the characters that they complete.
        rest: the bytes after those: the beginning of an unfinished character.
    """

    data: bytes
    text: str
    rest: bytes


def split_text(data: bytes) -> tuple[str, bytes]:
    """The text that an incremental UTF-8 decoder (errors="replace") releases for `data`, and the rest of the bytes."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    return text, data[used:]


def spell_bytes(data: bytes) -> str:
    """Bytes that are not whole characters, for people and as keys: `bytes:\\xf0\\x9f`."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_name(data: bytes) -> str:
    """A token's bytes for people: its text, or the bytes spelled out where they are not whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return spell_bytes(data)


class _Pieces(dict[int, TokenPiece]):
    """Pieces by id, made when first asked for. A lookup is one dict access."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table

    def __missing__(self, token_id: int) -> TokenPiece:
        if not 0 <= token_id < len(self._table):
            return TokenPiece(b"", "", b"")
        data = self._table[token_id]
        piece = self[token_id] = TokenPiece(data, *split_text(data))
        return piece


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: the tokenizer proper, which is changed and not copied.
        config: the contents of `tokenizer_config.json`: the special tokens' names, `add_bos_token`.
        chat_template: Jinja source, or several by name; None where the model has none.

    Attributes:
        vocab_size: number of ids that have a token, added ones included. Logits may be wider.
        kind: the algorithm: BPE, Unigram, WordPiece or WordLevel.
        named_tokens: `bos_token` and its like, as text.
        bos_token_id, eos_token_id, pad_token_id: None where the tokenizer names none.
        chat_template: as given.
        special_token_ids: control tokens, which `skip_special_tokens` leaves out of texts.
        added_tokens: texts of the tokens that stand beside the vocabulary proper, special or not.
        adds_bos: `encode` puts the BOS token first.
        strips_leading_space: the tokenizer puts a space before a text, which is not part of the text (SentencePiece).
        pieces: id -> TokenPiece; an id without token has an empty one.
    """

    def __init__(
        self,
        backend: Backend,
        config: Mapping[str, Any] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        config = config or {}
        named = _named_tokens(config)
        _complete(backend, config, named)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.kind = type(backend.model).__name__
        self.named_tokens: Mapping[str, str] = named
        vocabulary = read_vocabulary(backend)
        self.vocab_size = vocabulary.size
        self.strips_leading_space = vocabulary.strips_leading_space
        self.pieces: Mapping[int, TokenPiece] = _Pieces(vocabulary.table)
        self._table = vocabulary.table
        self.bos_token_id = _token_id(backend, named.get("bos_token"))
        self.eos_token_id = _token_id(backend, named.get("eos_token"))
        self.pad_token_id = _token_id(backend, named.get("pad_token"))
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = frozenset(token.content for token in added.values())
        self.adds_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]
        self.chat_template = chat_template
        self._template = None if chat_template is None else ChatTemplate(chat_template, named)
        self._control_texts = ControlTexts(backend)

    @classmethod
    def from_directory(cls, path: Path, *, chat_template: str | None = None) -> Tokenizer:
        """The tokenizer of a Hugging Face model directory. Code from the directory is never run.

        Args:
            chat_template: Jinja source in place of the model's own.

        Raises:
            ModelLoadError: there is no tokenizer in it, or one of a kind that neper cannot take bytes from.
        """
        with reading(f"the tokenizer in {path}"):
            return cls._read(path, chat_template)

    @classmethod
    def _read(cls, path: Path, chat_template: str | None) -> Tokenizer:
        config = _read_json(path / "tokenizer_config.json")
        config = {**_read_json(path / "special_tokens_map.json"), **config}
        file = path / "tokenizer.json"
        if file.exists():
            data = read_bytes(file, MAX_TOKENIZER)
            with reading(file):
                backend = Backend.from_buffer(data)
        else:
            backend = _converted(path)
        return cls(backend, config, _read_chat_template(path, config) if chat_template is None else chat_template)

    @property
    def chat_template_source(self) -> str:
        """Jinja source of the template, of several templates all; "" where there is none."""
        source = self.chat_template or ""
        return source if isinstance(source, str) else "\n".join(source.values())

    def encode(self, text: str, *, add_special_tokens: bool = True, progress: Progress | None = None) -> list[int]:
        """Ids of a text; special tokens spelled out in it become their ids.

        Args:
            progress: called repeatedly for a long text with the least number of ids so far. An error from it ends this.

        Raises:
            InvalidRequestError: the text holds a lone surrogate, which no UTF-8 spells.
        """
        try:
            if progress is not None and len(text) > 2 * PIECE:
                ids = self._pieces.encode(text, progress).tolist()
                first, last = self._around if add_special_tokens else ([], [])
                return [*first, *ids, *last]
            # Unlike `encode`, the batch call lets other threads run meanwhile: the event loop, when a text is long.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise _not_unicode() from None

    def encode_after(self, text: str, endings: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Ids of a text with each of several endings, without special tokens around it.

        Args:
            special_tokens: special tokens spelled in an ending become their ids; otherwise they are text there.
        """
        try:
            if special_tokens or not self._control_texts.occur_in(list(endings)):
                whole = [text + ending for ending in endings]
                return [found.ids for found in self._backend.encode_batch_fast(whole, add_special_tokens=False)]
            marked, mark = self._control_texts.marked([text, *endings])
            return [self._control_texts.encode(text + ending, mark) for ending in marked[1:]]
        except TypeError:
            raise _not_unicode() from None

    def check_chat_template(self) -> None:
        """Compile the chat template and find its terms, which otherwise the first conversation does.

        Raises:
            ModelLoadError: it does not compile, or does not end.
        """
        if self._template is not None:
            self._template.check()

    def chat_end(self) -> int | None:
        """The control token that the chat template writes after an assistant's message; None where it writes none."""
        if self._template is None:
            return None
        ids = self.encode(self._template.end, add_special_tokens=False)
        return next((token_id for token_id in ids if token_id in self.special_token_ids), None)

    def new_call_id(self) -> str:
        """An id for a tool call, in a form that the chat template accepts in a later conversation."""
        return new_call_id(TemplateTerms() if self._template is None else self._template.terms)

    def compile_chat_template(self, source: str) -> ChatTemplate:
        """A template for this tokenizer's tokens.

        Raises:
            InvalidRequestError: it does not compile, or does not end.
        """
        template = ChatTemplate(source, self.named_tokens)
        try:
            template.check()
        except ModelLoadError as error:
            raise InvalidRequestError(error.message, param="chat_template") from None
        return template

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        chat_template: ChatTemplate | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        progress: Progress | None = None,
        special_tokens_in_messages: bool = False,
    ) -> list[int]:
        """Ids of a conversation in the form of the model's template, which adds BOS itself.

        Args:
            chat_template: in place of the model's own.
            special_tokens_in_messages: control tokens spelled in messages, tools or `template_kwargs` become tokens.
                Otherwise they are text there, and only the template writes tokens.

        Raises:
            InvalidRequestError: the model has no template, the messages are malformed, or the template refuses them.
        """
        template = self._template if chat_template is None else chat_template
        if template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        conversation = template.conversation(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        if special_tokens_in_messages or not self._control_texts.occur_in(conversation.variables):
            return self.encode(template.write(conversation), add_special_tokens=False, progress=progress)
        variables, mark = self._control_texts.marked(conversation.variables)
        text = template.write(conversation._replace(variables=variables))
        try:
            return self._control_texts.encode(text, mark, progress)
        except TypeError:
            raise _not_unicode() from None

    @cached_property
    def _pieces(self) -> PieceEncoder:
        return PieceEncoder(self._backend, max(map(len, self._table)))

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        alone, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        before = next(place for place in range(len(whole)) if whole[place : place + len(alone)] == alone)
        return whole[:before], whole[before + len(alone) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes; b"" for an id without token."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def token_text(self, token_id: int) -> str:
        """The token's own bytes decoded alone, with U+FFFD for incomplete characters."""
        return self.spelled((token_id,))

    def spelled(self, token_ids: Iterable[int]) -> str:
        """Text of tokens inside a text, special ones spelled out, with U+FFFD for incomplete characters."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """Bytes of a text of its own (a prompt, say): the tokens' bytes joined, special ones spelled out."""
        data = b"".join(map(self.token_bytes, token_ids))
        return data.removeprefix(b" ") if self.strips_leading_space else data


def _not_unicode() -> InvalidRequestError:
    return InvalidRequestError("the text is not valid Unicode (a lone surrogate)")


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, as text; each is a string or an object that holds one."""
    named = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _complete(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Apply the facts that only `tokenizer_config.json` has to the backend, as transformers does."""
    known = backend.get_added_tokens_decoder()
    listed = {int(token_id): token for token_id, token in config.get("added_tokens_decoder", {}).items()}
    for token_id in sorted(listed.keys() - known.keys()):
        token = dict(listed[token_id])
        backend.add_tokens([AddedToken(token.pop("content"), **token)])
        known = backend.get_added_tokens_decoder()
    special = {token.content for token in known.values() if token.special}
    for text in _special_texts(config, named):
        if text not in special and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    adds = {name: config.get(f"add_{name}") for name in ("bos_token", "eos_token")}
    if any(isinstance(value, bool) for value in adds.values()):
        names = {name: named[name] for name, value in adds.items() if value and name in named}
        pairs = [(text, backend.token_to_id(text)) for text in names.values()]
        single = [*([names["bos_token"]] if "bos_token" in names else []), "$A"]
        single += [names["eos_token"]] if "eos_token" in names else []
        backend.post_processor = TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=pairs)


def _special_texts(config: Mapping[str, Any], named: Mapping[str, str]) -> list[str]:
    texts = list(named.values())
    for name in ("additional_special_tokens", "extra_special_tokens"):
        values: Any = config.get(name) or []
        for value in values.values() if isinstance(values, Mapping) else values:
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                texts.append(text)
    return texts


def _token_id(backend: Backend, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _read_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _read_chat_template(path: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, from the newer files, else from the configuration, which has one or a list of named ones."""
    file = path / "chat_template.jinja"
    folder = path / "additional_chat_templates"
    more = {one.stem: read_text(one) for one in sorted(folder.glob("*.jinja"))}
    source: Any
    if file.exists():
        source = read_text(file)
    else:
        source = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(source, Sequence) and not isinstance(source, str):
        try:
            source = {str(template["name"]): str(template["template"]) for template in source}
        except (TypeError, KeyError):
            raise ModelLoadError(
                f"the chat_template of {path} is neither a text nor a list of objects with name and template"
            ) from None
    if more:
        return {**more, **(source if isinstance(source, dict) else {} if source is None else {"default": source})}
    return source if isinstance(source, (str, dict)) else None


def _converted(path: Path) -> Backend:
    """A tokenizer in an older form (vocabulary and merges, a SentencePiece model), converted by transformers."""
    if not path.is_dir():
        raise ModelLoadError(f"{path} is not a directory")
    # Without files, transformers makes an empty tokenizer, and every prompt would be empty.
    if not any((path / name).exists() for name in _OLDER_FILES):
        raise ModelLoadError(
            f"{path} has no tokenizer: neither tokenizer.json nor an older form ({', '.join(_OLDER_FILES)}); "
            "copy those files there from the model"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelLoadError(
            f"{path} has no tokenizer.json; converting an older tokenizer needs transformers: pip install transformers"
        ) from error

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(f"no tokenizer can be loaded from {path}: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelLoadError(f"the tokenizer in {path} is of a kind that neper cannot take bytes from")
    return backend
