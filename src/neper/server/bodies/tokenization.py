"""The bodies of requests for ids of a text or a conversation, and for the text of ids."""

from __future__ import annotations

from typing import Any

from neper.errors import InvalidRequestError
from neper.server.bodies.chat import ChatBody, Message, Tool
from neper.server.bodies.completion import NotNegative
from neper.server.bodies.strict import RequestBody


class TokenizeBody(RequestBody):
    """A text, or a conversation as chat renders it."""

    prompt: str | None = None
    messages: list[Message] | None = None
    model: str | None = None
    return_token_strs: bool | None = None
    # For a text.
    add_special_tokens: bool | None = None
    # For a conversation.
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("one of prompt and messages is needed, and only one", param="prompt")
        if self.messages is not None:
            if self.add_special_tokens:
                raise InvalidRequestError(
                    "add_special_tokens is of a prompt: a chat template writes its own", param="add_special_tokens"
                )
            self.conversation().check()

    def conversation(self) -> ChatBody:
        return ChatBody(
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeBody(RequestBody):
    tokens: list[NotNegative]
    model: str | None = None
    return_token_strs: bool | None = None
