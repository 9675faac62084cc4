"""From the body of a request for a response to a generation: it is a conversation, so its body becomes chat's."""

from __future__ import annotations

from neper.errors import ContextLengthError, InvalidRequestError
from neper.server.bodies.chat import ChatBody, Function, FunctionCall, Message, NamedFunction, NamedTool, Tool, ToolCall
from neper.server.bodies.completion import GenerationBody
from neper.server.bodies.response_items import (
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    InputReference,
)
from neper.server.bodies.response_tools import AllowedTools, FunctionChoice
from neper.server.bodies.responses import ResponsesBody
from neper.server.generation import Generation
from neper.server.requests.chat import chat_generation
from neper.server.requests.generation import check_messages
from neper.server.service import Service

# What errors about a conversation name, and what that is here.
_PARAMS = {"messages": "input", "response_format": "text", "reasoning_effort": "reasoning", "logprobs": "include"}
_PATHS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


async def response_generation(service: Service, body: ResponsesBody, reply_id: str) -> Generation:
    check_messages(service, len(body.input or ()) if isinstance(body.input, list) else 1)
    try:
        return await chat_generation(service, _chat_body(body, _items(service, body)), reply_id)
    except InvalidRequestError as error:
        message, param = error.message, error.param
        for theirs, ours in _PATHS.items():
            # Once, and no other: the rest may be the client's own words.
            if theirs in message:
                message = message.replace(theirs, ours, 1)
                break
        if isinstance(error, ContextLengthError):
            message = message.replace("max_tokens", "max_output_tokens")
            if body.truncation == "auto":
                message += " (truncation 'auto' is taken where all of the input fits; nothing is cut here)"
        raise type(error)(message, param=_PARAMS.get(param or "", param)) from error


def _items(service: Service, body: ResponsesBody) -> list[InputItem]:
    """The conversation, with items that are named by their ids as they were kept."""
    items = []
    for place, item in enumerate(body.items):
        found: InputItem | None = item
        if isinstance(item, InputReference):
            found = service.kept_items.get(item.id)
        if found is None:
            raise InvalidRequestError(
                f"input[{place}]: no item {item.id!r} is kept here (any more); send the item itself, as clients do "
                "with store: false",
                param="input",
            )
        items.append(found)
    return items


def _chat_body(body: ResponsesBody, items: list[InputItem]) -> ChatBody:
    chat = ChatBody(
        **{name: getattr(body, name) for name in GenerationBody.__struct_fields__},
        messages=_messages(body.instructions, items),
        max_tokens=body.max_output_tokens,
        logprobs=body.includes_logprobs,
        top_logprobs=body.top_logprobs,
        field_logprobs=body.field_logprobs,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )
    if body.text is not None and body.text.format is not None:
        chat.response_format = body.text.format.response_format()
    _set_tools(chat, body)
    return chat


def _set_tools(chat: ChatBody, body: ResponsesBody) -> None:
    functions, choice = body.functions, body.choice
    if isinstance(choice, AllowedTools):
        allowed = {function.name for function in choice.tools}
        functions = [function for function in functions if function.name in allowed]
    if not functions:
        return
    chat.tools = [
        Tool(
            type="function",
            function=Function(
                name=function.name,
                description=function.description,
                parameters=function.parameters,
                strict=function.strict,
            ),
        )
        for function in functions
    ]
    if isinstance(choice, FunctionChoice):
        chat.tool_choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
    else:
        chat.tool_choice = choice.mode if isinstance(choice, AllowedTools) else choice
    chat.parallel_tool_calls = body.parallel_tool_calls


class _Turn:
    """One turn of the assistant: reasoning, text and calls, which are one message in chat."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def takes(self, item: InputItem) -> bool:
        """A call always belongs to it. Text and reasoning begin another one, unless they stand between calls, whose
        results are still to come.
        """
        return isinstance(item, InputCall) or not self._texts or bool(self._calls)

    def add(self, item: InputItem) -> None:
        if isinstance(item, InputCall):
            call = FunctionCall(name=item.name, arguments=item.arguments)
            self._calls.append(ToolCall(id=item.call_id, type="function", function=call))
        elif isinstance(item, InputReasoning):
            self._reasoning.append(item.text)
        elif isinstance(item, InputMessage):
            self._texts.append(item.text)

    def message(self) -> Message:
        # A reply that was cut in its reasoning has no text, one of calls needs none.
        content = "".join(self._texts) if self._texts or not self._calls else None
        return Message(
            role="assistant",
            content=content,
            reasoning_content="".join(self._reasoning) or None,
            tool_calls=self._calls or None,
        )


def _messages(instructions: str | None, items: list[InputItem]) -> list[Message]:
    messages = [] if instructions is None else [Message(role="system", content=instructions)]
    turn: _Turn | None = None
    for item in items:
        own = not isinstance(item, InputCallOutput) and getattr(item, "role", "assistant") == "assistant"
        if turn is not None and not (own and turn.takes(item)):
            messages.append(turn.message())
            turn = None
        if own:
            turn = turn or _Turn()
            turn.add(item)
        elif isinstance(item, InputCallOutput):
            messages.append(Message(role="tool", content=item.text, name=item.name, tool_call_id=item.call_id))
        elif isinstance(item, InputMessage):
            messages.append(Message(role=item.role, content=item.text))
    if turn is not None:
        messages.append(turn.message())
    return messages
