"""A model's chat template: messages in, the prompt's text out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from neper.errors import InvalidRequestError, ModelLoadError
from neper.files import one_line
from neper.text.history import in_terms, plain_messages
from neper.text.json_texts import num_characters
from neper.text.template_sandbox import Sandbox, TemplateLimitError
from neper.text.template_terms import PROBE_TOOLS, TemplateTerms, probe

RENDER_SECONDS = 10.0
"""CPU time that a template may take for a request."""

PROBE_SECONDS = 5.0
"""CPU time for all renders that find a template's terms. They need some milliseconds."""

# A template may write this many characters of its own, and this many times its input.
_OWN_CHARACTERS = 2**20
_TIMES = 16

_RESERVED = ("messages", "add_generation_prompt")
# Ends in a space, so that a template that trims its messages shows itself.
_CONTINUE_MARK = "\ue000neper continues here\ue000 "


class Conversation(NamedTuple):
    """The input of a template.

    Attributes:
        name: of the template.
        variables: all that comes from the request.
        final: content of the last message, where the text is to end with it.
    """

    name: str
    variables: dict[str, Any]
    final: str | None


class _Compiled:
    """One template, and its terms, which are found when they are first asked for."""

    def __init__(self, sandbox: Sandbox, source: str, special_tokens: Mapping[str, str]) -> None:
        self._sandbox = sandbox
        self._template = sandbox.from_string(source)
        self._special_tokens = special_tokens
        self._terms: TemplateTerms | None = None
        self._lock = threading.Lock()

    @property
    def terms(self) -> TemplateTerms:
        """The terms of the template. Raises TemplateLimitError when it does not end."""
        with self._lock:
            if self._terms is None:
                end = time.thread_time() + PROBE_SECONDS
                self._terms = probe(self._prober(end, None), self._prober(end, PROBE_TOOLS))
            return self._terms

    def render(self, variables: Mapping[str, Any], *, seconds: float, characters: int) -> str:
        variables = {"tools": None, "documents": None, **self._special_tokens, **variables}
        return self._sandbox.render(self._template, variables, seconds=seconds, characters=characters)

    def _prober(self, end: float, tools: Any) -> Callable[[Sequence[Mapping[str, Any]]], str | None]:
        """A function that renders small conversations until its thread's CPU time reaches `end`."""

        def render(messages: Sequence[Mapping[str, Any]]) -> str | None:
            variables = {"messages": list(messages), "tools": tools, "add_generation_prompt": False}
            try:
                return self.render(variables, seconds=end - time.thread_time(), characters=_OWN_CHARACTERS)
            except TemplateLimitError as error:
                if time.thread_time() >= end:
                    raise TemplateLimitError(f"it was stopped after {PROBE_SECONDS:g} seconds") from error
                raise
            except Exception:
                return None

        return render


class ChatTemplate:
    """Renders conversations, in the terms that the template takes.

    Args:
        source: the Jinja source, or several by name; of those, "tool_use" serves requests with tools where it exists,
            and "default" all others.
        special_tokens: names the template may use, as `bos_token`.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, _Compiled] = {}
        self._sandbox = Sandbox()

    def check(self) -> None:
        """Compile the templates that are used, and find their terms.

        Raises:
            ModelLoadError: one does not compile, or does not end.
        """
        for name in ("default", "tool_use"):
            if name in self._sources:
                try:
                    _ = self._compile(name).terms
                except _CompileError as error:
                    raise ModelLoadError(f"the chat template does not compile: {error}") from None
                except TemplateLimitError as error:
                    raise ModelLoadError(f"the chat template does not work: {error}") from None

    @property
    def terms(self) -> TemplateTerms:
        """The terms of the template that serves requests with tools."""
        return self._terms_of(self._name(has_tools=True))

    @property
    def end(self) -> str:
        """The text that the template writes after an assistant's last message."""
        return self._terms_of(self._name(has_tools=False)).end

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt's text: `conversation` and `write` in one."""
        return self.write(self.conversation(messages, **options))

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """The template's input. With `continue_final_message` the text ends where the last content ends.

        Raises:
            InvalidRequestError: the messages are malformed.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt: false", param="continue_final_message"
            )
        extra = dict(template_kwargs or {})
        for name in _RESERVED:
            if name in extra:
                raise InvalidRequestError(f"{name} cannot be set here", param="chat_template_kwargs")
        name = self._name(has_tools=bool(extra.get("tools")))
        plain = plain_messages(messages)
        final = None
        if continue_final_message:
            final = plain[-1].get("content") or ""
            plain[-1] = {**plain[-1], "content": final + _CONTINUE_MARK}
        conversation = self._in_terms(plain, name)
        return Conversation(
            name, {**extra, "messages": conversation, "add_generation_prompt": add_generation_prompt}, final
        )

    def write(self, conversation: Conversation) -> str:
        """The text of a conversation.

        Raises:
            InvalidRequestError: the template refuses it.
        """
        compiled = self._get(conversation.name)
        characters = _OWN_CHARACTERS + _TIMES * num_characters(conversation.variables)
        try:
            text = compiled.render(conversation.variables, seconds=RENDER_SECONDS, characters=characters)
        except Exception as error:
            # Templates run on the client's messages. So each failure in one is about those messages.
            raise InvalidRequestError(
                f"the model's chat template failed: {one_line(error)}", param="messages"
            ) from error
        return text if conversation.final is None else _cut_at_mark(text, conversation.final)

    def _in_terms(self, plain: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
        try:
            return in_terms(plain, self._get(name).terms)
        except TemplateLimitError as error:
            raise InvalidRequestError(f"the model's chat template failed: {error}", param="messages") from error

    def _name(self, *, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._sources else "default"

    def _terms_of(self, name: str) -> TemplateTerms:
        # A model may have named templates without a default. Then each conversation is refused, not the server's start.
        return self._get(name).terms if name in self._sources else TemplateTerms()

    def _get(self, name: str) -> _Compiled:
        try:
            return self._compile(name)
        except _CompileError as error:
            raise InvalidRequestError(
                f"the model's chat template does not compile: {error}", param="messages"
            ) from error

    def _compile(self, name: str) -> _Compiled:
        if name not in self._compiled:
            if name not in self._sources:
                raise InvalidRequestError(
                    "the model has no default chat template; give the server one with --chat-template", param="messages"
                )
            try:
                self._compiled[name] = _Compiled(self._sandbox, self._sources[name], self._special_tokens)
            except jinja2.TemplateSyntaxError as error:
                raise _CompileError(f"line {error.lineno}: {one_line(error.message)}") from error
            except Exception as error:  # filters run on constants while it compiles; nesting may be too deep
                raise _CompileError(f"{type(error).__name__}: {one_line(error)}") from error
        return self._compiled[name]


class _CompileError(Exception):
    pass


def _cut_at_mark(text: str, final: str) -> str:
    mark = _CONTINUE_MARK.rstrip()
    place = text.rfind(mark)
    if place < 0:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template does not show the last message", param="messages"
        )
    if text.startswith(_CONTINUE_MARK, place) or not final:
        return text[:place]
    # The template trims messages: the content that is continued must be trimmed too.
    return text[:place].rstrip()
