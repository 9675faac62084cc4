"""From the body of a request for a response to a generation: it is a conversation, so its body becomes chat's."""

from __future__ import annotations

from neper.errors import ContextLengthError, InvalidRequestError
from neper.server.chat_protocol import ChatBody, Message
from neper.server.chat_requests import chat_generation
from neper.server.generation import Generation
from neper.server.protocol import GenerationBody
from neper.server.responses_protocol import InputItem, ResponsesBody
from neper.server.service import Service

# What errors about a conversation name, and what that is here.
_PARAMS = {"messages": "input", "response_format": "text", "reasoning_effort": "reasoning", "logprobs": "include"}
_PATHS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


async def response_generation(service: Service, body: ResponsesBody, reply_id: str) -> Generation:
    try:
        return await chat_generation(service, _chat_body(body), reply_id)
    except InvalidRequestError as error:
        message, param = error.message, error.param
        for theirs, ours in _PATHS.items():
            # Once, and no other: the rest may be the client's own words.
            if theirs in message:
                message = message.replace(theirs, ours, 1)
                break
        if isinstance(error, ContextLengthError):
            message = message.replace("max_tokens", "max_output_tokens")
        raise type(error)(message, param=_PARAMS.get(param or "", param)) from error


def _chat_body(body: ResponsesBody) -> ChatBody:
    chat = ChatBody(
        **{name: getattr(body, name) for name in GenerationBody.__struct_fields__},
        messages=_messages(body),
        max_tokens=body.max_output_tokens,
        logprobs=body.includes_logprobs,
        top_logprobs=body.top_logprobs,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )
    if body.text is not None and body.text.format is not None:
        chat.response_format = body.text.format.response_format()
    return chat


def _messages(body: ResponsesBody) -> list[Message]:
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    items = body.input or []
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    reasoning: str | None = None
    for item in items:
        if reasoning is not None and item.role != "assistant":
            # A reply that was cut in its reasoning has no message.
            messages.append(Message(role="assistant", content="", reasoning_content=reasoning))
            reasoning = None
        if item.role is None:
            reasoning = item.text or None
        else:
            messages.append(Message(role=item.role, content=item.text, reasoning_content=reasoning))
            reasoning = None
    if reasoning is not None:
        messages.append(Message(role="assistant", content="", reasoning_content=reasoning))
    return messages
