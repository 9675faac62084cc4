"""From chat bodies to a generation: messages to a prompt, fields to engine requests, the reading of the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from neper.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from neper.server.bodies.chat import ChatBody, Function, Message, NamedTool
from neper.server.bodies.structured import constraint_of, schema_of
from neper.server.choice import Prompt
from neper.server.fields import ReplyFields
from neper.server.generation import Generation
from neper.server.requests.generation import check_messages, json_form, logprob_params, new_generation
from neper.server.service import MESSAGE_CHARACTERS, Service
from neper.text.grammar import Constraint, after_reasoning, tool_calls
from neper.text.json_form import JsonForm
from neper.text.message import MessageParser
from neper.text.plain_tools import with_plain_tools
from neper.text.reasoning import ReasoningTags
from neper.text.schema_choices import SchemaChoices
from neper.text.tools import ToolFormat
from neper.text.validated_json import JsonParser
from neper.types import JsonObject, LogprobParams

# Tokens at a prompt's end that hold a reasoning tag and the newlines after it, even where each character is one.
PROMPT_END = 16


class _Thinking(NamedTuple):
    """What the prompt leaves open: reasoning between `tags` may come, or has begun with it (`opened`)."""

    tags: ReasoningTags
    opened: bool


async def chat_generation(service: Service, body: ChatBody, reply_id: str) -> Generation:
    logprobs = logprob_params(service, body, body.num_top_logprobs(), param="top_logprobs")
    fields = _fields(service, body, logprobs)
    token_ids = await chat_prompt(service, body)
    if not token_ids:
        raise InvalidRequestError("the chat template makes no prompt of these messages", param="messages")
    prediction = await _prediction(service, body)
    thinking = _thinking(service, body, token_ids)
    constraint = None
    if body.response_format is not None or body.structured_outputs is not None or body.functions_callable():
        constraint = await asyncio.to_thread(_constraint, service, body, thinking)  # schemas can be large
    form = None
    if constraint is not None and _is_checked_after(service, body):
        form, constraint = await json_form(service, body, constraint), None
    return await new_generation(
        service,
        body,
        reply_id,
        [Prompt(token_ids)],
        logprobs,
        body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        default=None,
        begins_text=not body.continue_final_message,
        constraint=constraint,
        parser=_parser(service, body, thinking, form),
        fields=fields,
        prediction=prediction,
    )


async def _prediction(service: Service, body: ChatBody) -> list[int]:
    """Ids of the predicted text."""
    if body.prediction is None:
        return []
    if not service.engine.capabilities.speculative:
        raise UnsupportedError(
            "prediction: this server drafts no tokens; start it with --speculative ngram", param="prediction"
        )
    try:
        return await service.encode(body.prediction.text, add_special_tokens=False)
    except ContextLengthError as error:
        raise ContextLengthError(f"prediction: {error.message}", param="prediction") from None


async def chat_prompt(service: Service, body: ChatBody) -> list[int]:
    """Ids of the conversation, as the chat template writes it."""
    if body.chat_template is not None and not service.config.trust_request_chat_template:
        raise UnsupportedError(
            "chat_template: this server renders the model's own alone; start it with --trust-request-chat-template",
            param="chat_template",
        )
    continues = bool(body.continue_final_message)
    generates = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
    messages = body.messages or ()
    check_messages(service, len(messages))
    size = MESSAGE_CHARACTERS * len(messages)
    return await service.encode_chat(
        await service.run(size, lambda: _conversation(service, body)),
        chat_template=body.chat_template,
        add_generation_prompt=generates,
        continue_final_message=continues,
        template_kwargs=_template_kwargs(service, body),
    )


def _conversation(service: Service, body: ChatBody) -> list[JsonObject]:
    """The messages as the template gets them."""
    messages = [_message(message) for message in body.messages or ()]
    if not service.plain_tools:
        return messages
    functions = [_function(function) for function in body.functions_shown()]
    return with_plain_tools(messages, functions, system=service.shows_system_message)


def _template_kwargs(service: Service, body: ChatBody) -> JsonObject:
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        kwargs["enable_thinking"] = False
    elif body.reasoning_effort is not None and service.reasoning_tags is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
    functions = body.functions_shown()
    if functions:
        if service.tool_format is None and body.functions_callable():
            raise UnsupportedError("tools: this server was started with --tool-call-parser none", param="tools")
        if not service.plain_tools:
            kwargs["tools"] = [{"type": "function", "function": _function(function)} for function in functions]
    return kwargs


def _thinking(service: Service, body: ChatBody, token_ids: list[int]) -> _Thinking | None:
    """None where no reasoning comes: the model has none, or the prompt has ended it."""
    tags = service.reasoning_tags
    if tags is None:
        return None
    if body.continue_final_message and body.messages:
        text = body.messages[-1].text or ""
        return _Thinking(tags, True) if text.rfind(tags.open) > text.rfind(tags.close) else None
    end = service.tokenizer.decode_bytes(token_ids[-PROMPT_END:]).decode("utf-8", "replace")
    return None if tags.closed_by(end) else _Thinking(tags, tags.opened_by(end))


def _constraint(service: Service, body: ChatBody, thinking: _Thinking | None) -> Constraint | None:
    """What the reply must follow after its reasoning."""
    constraint = constraint_of(body.response_format, body.structured_outputs)
    if service.tool_format is not None and body.functions_callable():
        constraint = _calls(service, body, service.tool_format, constraint)
    if constraint is None or thinking is None:
        return constraint
    return after_reasoning(constraint, *thinking.tags, service.tokenizer, opened=thinking.opened)


def _is_checked_after(service: Service, body: ChatBody) -> bool:
    """The reply's form is checked once it is there: its engine cannot be held to it."""
    if "grammar" in service.engine.capabilities.sampling_fields or body.constrained_by != "response_format":
        return False
    if any(function.strict for function in body.functions_callable()):
        raise UnsupportedError(
            "tools: this engine cannot constrain what it samples, so no function can be strict", param="tools"
        )
    return True


def _calls(service: Service, body: ChatBody, form: ToolFormat, instead: Constraint | None) -> Constraint | None:
    """What a reply with calls must follow; `instead` is what one without calls must. None where all is free."""
    required = body.functions_required()
    if required and body.structured_outputs is None:
        instead = None  # a reply of calls alone has no text that the form could be of
    if instead is not None:
        param = "response_format" if body.structured_outputs is None else "structured_outputs"
        reason = None
        if required:
            reason = "a call is required"
        elif body.structured_outputs is not None:
            reason = "calls do not follow it"
        elif form.bare:
            reason = "this model writes calls as JSON without a tag"
        if reason is not None:
            raise InvalidRequestError(
                f"{param} and tools exclude each other here, unless tool_choice is 'none': {reason}", param=param
            )
    shown = required or body.functions_callable()
    free = not required and instead is None
    if free and not any(function.strict for function in shown):
        return None
    # Without a call that is required, only the arguments of strict functions are held to their schema.
    functions = [_function(function) for function in shown]
    for function, description in zip(shown, functions, strict=True):
        if function.strict:
            description["strict"] = True
        elif not required:
            description.pop("parameters", None)
    return tool_calls(form.name, functions, service.tokenizer, parallel=_parallel(body), text=free, instead=instead)


def _parser(
    service: Service, body: ChatBody, thinking: _Thinking | None, form: JsonForm | None
) -> Callable[[], MessageParser | JsonParser] | None:
    """Makes the parser of each choice; None where all of its text is content."""
    tools = service.tool_format if body.functions_shown() else None
    if thinking is None and tools is None and form is None:
        return None
    tags, opened = (None, False) if thinking is None else thinking
    parallel, reads_calls = _parallel(body), bool(body.functions_callable())

    def new_parser() -> MessageParser | JsonParser:
        parser = MessageParser(reasoning=tags, opened=opened, tools=tools, parallel=parallel, reads_calls=reads_calls)
        return parser if form is None else JsonParser(parser, form)

    return new_parser


def _fields(service: Service, body: ChatBody, logprobs: LogprobParams) -> Callable[[], ReplyFields] | None:
    """Makes what finds the fields of a choice's JSON; None where they are not wanted."""
    if not body.field_logprobs:
        return None
    schema = schema_of(body.response_format, body.structured_outputs)
    if schema is None:
        raise InvalidRequestError(
            "field_logprobs needs a reply of JSON: response_format of type json_schema or json_object",
            param="field_logprobs",
        )
    if logprobs.top_k is None:
        raise InvalidRequestError("field_logprobs needs logprobs: true", param="field_logprobs")
    choices = SchemaChoices(schema) if service.engine.capabilities.candidates else None
    ids_as_text = bool(body.return_tokens_as_token_ids)
    return lambda: ReplyFields(service.tokenizer, choices, ids_as_text=ids_as_text)


def _parallel(body: ChatBody) -> bool:
    return body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)


def _function(function: Function) -> JsonObject:
    """The function as templates show it and grammars take it. `strict` is added for grammars alone."""
    shown: JsonObject = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    if function.parameters is not None:
        shown["parameters"] = function.parameters
    if function.return_ is not None:
        shown["return"] = function.return_
    return shown


def _message(message: Message) -> JsonObject:
    # OpenAI's newer name for the system role, which templates do not know.
    plain: JsonObject = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if (reasoning := message.told_reasoning) is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return plain
