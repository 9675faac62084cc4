"""The body of a request to score candidates: a text or a conversation, and what may follow it."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from neper.candidates import Normalize
from neper.errors import InvalidRequestError
from neper.server.bodies.completion import NotNegative
from neper.server.bodies.conversation import ConversationBody
from neper.server.bodies.strict import Only

Candidate = str | list[NotNegative]


class CandidatesBody(ConversationBody, kw_only=True):
    """A prompt or a conversation, and its candidates: texts, or ids."""

    candidates: Annotated[list[Candidate], Meta(min_length=1)]
    prompt: str | list[NotNegative] | None = None
    model: str | None = None
    normalize: Normalize | None = None
    return_tokens: bool | None = None
    stream: Annotated[bool | None, Only(False)] = None
    user: str | None = None
    logprobs_mode: Annotated[Any, Only("raw_logprobs")] = None

    def check(self) -> None:
        self.check_unsupported()
        self.check_source(self.prompt)
        for place, candidate in enumerate(self.candidates):
            if not candidate:
                raise InvalidRequestError(f"candidates[{place}] is empty", param="candidates")
