"""pydantic-ai: a tool's loop and typed answers, as a tool and by a schema, through responses and chat."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from tests.clients.conftest import SMOLLM2, Run
from tests.clients.test_structured import QUESTION, Verdict

MODELS = pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatModel])
STREAMED = pytest.mark.parametrize("stream", [False, True])
SETTINGS = ModelSettings(temperature=0, max_tokens=100)


@asynccontextmanager
async def served(url: str, kind: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield kind(SMOLLM2, provider=OpenAIProvider(openai_client=client))


async def ran(agent: Any, question: str, stream: bool, **options: Any) -> Any:
    if not stream:
        return (await agent.run(question, **options)).output
    async with agent.run_stream(question, **options) as result:
        return await result.get_output()


@MODELS
@STREAMED
@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
def test_a_typed_answer(smollm2_url: str, run: Run, kind: Any, form: Any, stream: bool) -> None:
    async def judge() -> None:
        async with served(smollm2_url, kind) as model:
            agent = Agent(model, output_type=form(Verdict), retries=0, model_settings=SETTINGS)
            assert isinstance(await ran(agent, QUESTION, stream), Verdict)

    run(judge())


WEATHER = ToolDefinition(
    name="get_weather",
    description="The weather of a city.",
    parameters_json_schema={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    | {"additionalProperties": False},
)


async def asked(model: Any, messages: list[ModelMessage], stream: bool, required: bool) -> ModelResponse:
    """One request; a call is required where text is not allowed."""
    parameters = ModelRequestParameters(function_tools=[WEATHER], allow_text_output=not required)
    settings = ModelSettings(temperature=0, max_tokens=64 if required else 8, parallel_tool_calls=False)
    options: Any = {"model_settings": settings, "model_request_parameters": parameters}
    if not stream:
        return await model_request(model, messages, **options)
    async with model_request_stream(model, messages, **options) as response:
        async for _ in response:
            pass
    return response.get()


async def conversed(model: Any, stream: bool) -> None:
    """A call, its result, and an answer to it."""
    messages: list[ModelMessage] = [ModelRequest.user_text_prompt("What is the weather in Paris?")]
    called = await asked(model, messages, stream, True)
    calls = [part for part in called.parts if isinstance(part, ToolCallPart)]
    assert {call.tool_name for call in calls} == {"get_weather"}
    assert calls[0].args_as_dict() == {"city": "Paris"}
    results = [ToolReturnPart("get_weather", "rain", tool_call_id=call.tool_call_id) for call in calls]
    messages += [called, ModelRequest(parts=results)]
    answered = await asked(model, messages, stream, False)
    assert answered.usage.input_tokens > called.usage.input_tokens > 0
    assert answered.usage.output_tokens > 0


@MODELS
@STREAMED
@pytest.mark.parametrize("count", [1, 8])
def test_a_tool_is_called_and_its_result_answered(
    smollm2_url: str, run: Run, kind: Any, stream: bool, count: int
) -> None:
    async def conversations() -> None:
        async with served(smollm2_url, kind) as model:
            await asyncio.gather(*(conversed(model, stream) for _ in range(count)))

    run(conversations())
