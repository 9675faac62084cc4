"""The bodies of requests for ids of a text or a conversation, and for the text of ids."""

from __future__ import annotations

from neper.errors import InvalidRequestError
from neper.server.bodies.completion import NotNegative
from neper.server.bodies.conversation import ConversationBody
from neper.server.bodies.strict import RequestBody


class TokenizeBody(ConversationBody):
    """A text, or a conversation. `add_special_tokens` is for a text."""

    prompt: str | None = None
    model: str | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        self.check_source(self.prompt)
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens is of a prompt: a chat template writes its own", param="add_special_tokens"
            )


class DetokenizeBody(RequestBody):
    tokens: list[NotNegative]
    model: str | None = None
    return_token_strs: bool | None = None
