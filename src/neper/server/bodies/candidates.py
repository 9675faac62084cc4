"""The body of a request to score candidates: a text or a conversation, and what may follow it."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from neper.candidates import Normalize
from neper.errors import InvalidRequestError
from neper.server.bodies.chat import ChatBody, Message, Tool
from neper.server.bodies.completion import NotNegative
from neper.server.bodies.strict import Only, RequestBody

Candidate = str | list[NotNegative]

_OF_A_CONVERSATION = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)


class CandidatesBody(RequestBody):
    """A prompt, or a conversation as chat renders it, and its candidates: texts, or ids."""

    candidates: Annotated[list[Candidate], Meta(min_length=1)]
    prompt: str | list[NotNegative] | None = None
    messages: list[Message] | None = None
    model: str | None = None
    normalize: Normalize | None = None
    return_tokens: bool | None = None
    stream: Annotated[bool | None, Only(False)] = None
    user: str | None = None
    logprobs_mode: Annotated[Any, Only("raw_logprobs")] = None
    # For a conversation.
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        self.check_unsupported()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("one of prompt and messages is needed, and only one", param="prompt")
        for place, candidate in enumerate(self.candidates):
            if not candidate:
                raise InvalidRequestError(f"candidates[{place}] is empty", param="candidates")
        if self.messages is not None:
            self.conversation().check()
        for name in _OF_A_CONVERSATION if self.messages is None else ():
            if getattr(self, name):
                raise InvalidRequestError(f"{name} is of messages, and the request has a prompt", param=name)

    def conversation(self) -> ChatBody:
        return ChatBody(
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )
