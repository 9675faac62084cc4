"""The fields of a conversation, in bodies that have a prompt in its place."""

from __future__ import annotations

from typing import Any

from neper.errors import InvalidRequestError
from neper.server.bodies.chat import ChatBody, Message, Tool
from neper.server.bodies.strict import RequestBody

_OF_A_CONVERSATION = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)


class ConversationBody(RequestBody):
    """A conversation as chat renders it. Without `messages` the other fields have no meaning."""

    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_source(self, prompt: object) -> None:
        """Refuse a body with both a prompt and a conversation, with none, or with fields of the one that is absent."""
        if (prompt is None) == (self.messages is None):
            raise InvalidRequestError("one of prompt and messages is needed, and only one", param="prompt")
        if self.messages is not None:
            self.conversation().check()
            return
        for name in _OF_A_CONVERSATION:
            if getattr(self, name):
                raise InvalidRequestError(f"{name} is of messages, and the request has a prompt", param=name)

    def conversation(self) -> ChatBody:
        return ChatBody(messages=self.messages, **{name: getattr(self, name) for name in _OF_A_CONVERSATION})
