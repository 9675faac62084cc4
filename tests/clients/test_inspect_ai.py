"""inspect-ai: text with its logprobs and a tool's loop, through responses and chat, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from inspect_ai.model import ChatMessageTool, ChatMessageUser, GenerateConfig, get_model
from inspect_ai.tool import ToolFunction, ToolInfo, ToolParams
from inspect_ai.util import JSONSchema

from tests.clients.conftest import SMOLLM2, Run
from tests.clients.contract import check_spelling, plain

WEATHER = ToolInfo(
    name="get_weather",
    description="The weather of a city.",
    parameters=ToolParams(properties={"city": JSONSchema(type="string", description="The city.")}, required=["city"]),
)
COMPATIBLE = "openai-api/neper"  # inspect's provider for servers of the API
KINDS = pytest.mark.parametrize(
    ("provider", "options"),
    [
        ("openai", {"responses_api": True}),
        (COMPATIBLE, {"responses_api": True}),
        (COMPATIBLE, {"responses_api": True, "stream": True}),
        (COMPATIBLE, {}),
        (COMPATIBLE, {"stream": True}),
    ],
)


def served(url: str, provider: str, options: dict[str, Any]) -> Any:
    config = GenerateConfig(max_retries=0, temperature=0, max_tokens=8, parallel_tool_calls=False)
    return get_model(
        f"{provider}/{SMOLLM2}", base_url=url + "/v1", api_key="none", memoize=False, config=config, **options
    )


@KINDS
def test_texts_have_their_logprobs(smollm2_url: str, run: Run, provider: str, options: dict[str, Any]) -> None:
    async def eight() -> list[Any]:
        async with served(smollm2_url, provider, options) as model:
            config = GenerateConfig(logprobs=True, top_logprobs=2)
            return await asyncio.gather(*(model.generate(f"Say {i}", config=config) for i in range(8)))

    for output in run(eight()):
        [choice] = output.choices
        check_spelling(output.completion, plain(choice.logprobs.content), 2)
        assert output.usage.output_tokens >= len(choice.logprobs.content)


@KINDS
@pytest.mark.parametrize("choice", ["any", ToolFunction("get_weather")], ids=["any", "named"])
def test_a_tool_is_called_and_its_result_answered(
    smollm2_url: str, run: Run, provider: str, options: dict[str, Any], choice: Any
) -> None:
    async def conversation() -> None:
        messages: list[Any] = [ChatMessageUser(content="What is the weather in Paris?")]
        async with served(smollm2_url, provider, options) as model:
            config = GenerateConfig(max_tokens=64)
            called = await model.generate(messages, tools=[WEATHER], tool_choice=choice, config=config)
            [call] = called.message.tool_calls
            assert (call.function, call.arguments, call.parse_error) == ("get_weather", {"city": "Paris"}, None)
            assert called.stop_reason == "tool_calls"
            result = ChatMessageTool(content="rain", tool_call_id=call.id, function=call.function)
            answered = await model.generate([*messages, called.message, result], tools=[WEATHER])
        assert answered.usage.input_tokens > called.usage.input_tokens

    run(conversation())
