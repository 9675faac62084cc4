"""The body of a chat request: the messages, tools and choices in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from neper.errors import InvalidRequestError, UnsupportedError
from neper.server.bodies.completion import GenerationBody, Positive, TextPart
from neper.server.bodies.strict import Name, Only, Refused, Strict

TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ContentPart(TextPart):
    image_url: Refused = None
    input_audio: Refused = None
    file: Refused = None
    cache_control: Any = None


class FunctionCall(Strict):
    """A call that was made: `arguments` is the JSON text that the model wrote."""

    name: str
    arguments: str


class ToolCall(Strict):
    """`index` is what a stream numbers it with."""

    id: str
    function: FunctionCall
    type: Literal["function"] | None = None
    index: int | None = None


class Message(Strict):
    """`reasoning` is another name of `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: Refused = None
    annotations: Annotated[Any, Only([])] = None
    function_call: Refused = None
    cache_control: Any = None

    @property
    def told_reasoning(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def text(self) -> str | None:
        """All that templates are shown of its content: parts joined, and the assistant's refusal."""
        told = [self.content] if isinstance(self.content, str) else [part.told for part in self.content or ()]
        told += [] if self.refusal is None else [self.refusal]
        return None if self.content is None and not told else "".join(text or "" for text in told)

    def check(self, where: str) -> None:
        self.check_unsupported("messages")
        types = ("text", "refusal") if self.role == "assistant" else ("text",)
        for part in self.content if isinstance(self.content, list) else ():
            part.check(f"{where}.content", "messages", types)
        if self.role == "function":
            raise UnsupportedError(f"{where}: role 'function' is not supported, only 'tool'", param="messages")
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
                if getattr(self, name):
                    raise InvalidRequestError(f"{where}: only the assistant has {name}", param="messages")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise InvalidRequestError(
                f"{where}: messages of role 'tool', and no others, have a tool_call_id", param="messages"
            )


class Function(Strict):
    """A function that the model may call; `parameters` is the JSON schema of its arguments, absent = any object.

    `return` is a schema of what it returns: transformers' `get_json_schema` writes it, for templates to show.
    """

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    return_: dict[str, Any] | None = msgspec.field(default=None, name="return")
    strict: bool | None = None


class Tool(Strict):
    type: str
    function: Function | None = None
    custom: Any = None
    cache_control: Any = None


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class Prediction(Strict):
    """What much of the reply may be, so that it comes sooner where it is."""

    type: Literal["content"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.told or "" for part in self.content)

    def check(self) -> None:
        for part in self.content if isinstance(self.content, list) else ():
            part.check("prediction.content", "prediction", ("text",))


class ChatBody(GenerationBody):
    messages: list[Message] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | int | None = None
    top_logprobs: TopLogprobs | None = None
    field_logprobs: bool | None = None
    echo: Annotated[Any, Only(False)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    modalities: Annotated[Any, Only(["text"])] = None
    verbosity: Any = None  # a hint
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none")] = None
    add_special_tokens: Annotated[Any, Only(False)] = None
    audio: Refused = None
    prediction: Prediction | None = None
    web_search_options: Refused = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise InvalidRequestError("messages must be a list of at least one message", param="messages")
        for place, message in enumerate(self.messages):
            message.check(f"messages[{place}]")
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        self.num_top_logprobs()
        if self.prediction is not None:
            self.prediction.check()
        self._check_tools()
        self._check_template_kwargs()

    def num_top_logprobs(self) -> int | None:
        """Alternatives per token, or None when no logprobs are wanted. The integer form N means true + N."""
        if self.logprobs is None or self.logprobs is False:
            if self.top_logprobs is not None:
                raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        if self.logprobs is True:
            return self.top_logprobs or 0
        if not 0 <= self.logprobs <= 20:
            raise InvalidRequestError(f"logprobs must be between 0 and 20, got {self.logprobs}", param="logprobs")
        if self.top_logprobs is not None and self.top_logprobs != self.logprobs:
            raise InvalidRequestError(
                f"logprobs {self.logprobs} and top_logprobs {self.top_logprobs} differ; give one", param="top_logprobs"
            )
        return self.logprobs

    @property
    def constrained_by(self) -> str:
        if self.functions_required():
            return "tool_choice"
        form = self.response_format
        if self.functions_callable() and (form is None or form.type == "text"):
            return "tools"
        return super().constrained_by

    def functions_shown(self) -> list[Function]:
        """The functions that the model is told of, with tool_choice "none" as well."""
        return [tool.function for tool in self.tools or () if tool.function is not None]

    def functions_callable(self) -> list[Function]:
        """Those of which the reply may hold calls."""
        return [] if self.tool_choice == "none" else self.functions_shown()

    def functions_required(self) -> list[Function]:
        """Those of which one must be called; none where the model may answer without a call."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [function for function in self.functions_shown() if function.name == choice.function.name]
        return self.functions_shown() if choice == "required" else []

    def _check_tools(self) -> None:
        choice = self.tool_choice
        if not self.tools:
            if choice not in (None, "none", "auto"):
                raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
            return
        names = set()
        for place, tool in enumerate(self.tools):
            where = f"tools[{place}]"
            if tool.type != "function":
                raise UnsupportedError(f"{where}: type {tool.type!r} is not supported, only 'function'", param="tools")
            if tool.function is None:
                raise InvalidRequestError(f"{where} has no function", param="tools")
            if tool.custom is not None:
                raise InvalidRequestError(f"{where}: a function has no custom", param="tools")
            if tool.function.name in names:
                raise InvalidRequestError(f"{where}: there is another {tool.function.name!r}", param="tools")
            names.add(tool.function.name)
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise InvalidRequestError(
                f"tool_choice: there is no function {choice.function.name!r} in tools", param="tool_choice"
            )

    def _check_template_kwargs(self) -> None:
        given = self.chat_template_kwargs or {}
        for name in ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"):
            if name in given:
                raise InvalidRequestError(
                    f"chat_template_kwargs: {name} cannot be set here", param="chat_template_kwargs"
                )
        effort, thinking = self.reasoning_effort, given.get("enable_thinking")
        if thinking is not None and not isinstance(thinking, bool):
            raise InvalidRequestError(
                "chat_template_kwargs: enable_thinking must be true or false", param="chat_template_kwargs"
            )
        if effort == "none" and thinking:
            raise InvalidRequestError(
                "reasoning_effort 'none' and enable_thinking: true contradict each other", param="reasoning_effort"
            )
        if effort is not None and given.get("reasoning_effort", effort) != effort:
            raise InvalidRequestError(
                "reasoning_effort and that of chat_template_kwargs differ; give one", param="reasoning_effort"
            )
