"""The Agents SDK: a tool's loop, a typed answer and a hand-off, by its default model (responses) and its chat model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from tests.clients.conftest import SMOLLM2, Run
from tests.clients.test_structured import QUESTION, Verdict

MODELS = pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
STREAMED = pytest.mark.parametrize("stream", [False, True])
CALLS = ModelSettings(
    tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=48, include_usage=True
)
ANSWERS = ModelSettings(temperature=0, max_tokens=64)


@pytest.fixture(autouse=True, scope="module")
def untraced() -> Iterator[None]:
    set_tracing_disabled(True)
    yield
    set_tracing_disabled(False)


@asynccontextmanager
async def served(url: str, kind: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield kind(SMOLLM2, client)


async def ran(agent: Agent, question: str, stream: bool) -> Any:
    if not stream:
        return await Runner.run(agent, question, max_turns=4)
    result = Runner.run_streamed(agent, question, max_turns=4)
    async for _ in result.stream_events():
        pass
    return result


def weather_agent(model: Model, cities: list[str]) -> Agent:
    @function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return f"rain in {city}"

    return Agent(name="weather", instructions="Use tools.", tools=[get_weather], model=model, model_settings=CALLS)


@MODELS
@STREAMED
def test_a_tool_is_called_and_its_result_answered(smollm2_url: str, run: Run, kind: Any, stream: bool) -> None:
    """The SDK asks for a call in the first turn alone (`reset_tool_choice`), so the second one is the answer."""

    async def loop() -> None:
        cities: list[str] = []
        async with served(smollm2_url, kind) as model:
            result = await ran(weather_agent(model, cities), "What is the weather in Paris?", stream)
        outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
        assert cities[0] == "Paris"
        assert outputs == [f"rain in {city}" for city in cities]
        assert result.final_output
        assert result.context_wrapper.usage.requests == len(cities) + 1
        assert result.context_wrapper.usage.output_tokens > 0

    run(loop())


@MODELS
def test_eight_loops_at_a_time(smollm2_url: str, run: Run, kind: Any) -> None:
    async def loops() -> None:
        cities: list[list[str]] = [[] for _ in range(8)]
        async with served(smollm2_url, kind) as model:
            agents = [weather_agent(model, seen) for seen in cities]
            results = await asyncio.gather(*(ran(agent, "What is the weather in Paris?", False) for agent in agents))
        assert [seen[0] for seen in cities] == ["Paris"] * 8
        assert all(result.final_output for result in results)

    run(loops())


@MODELS
@STREAMED
def test_a_typed_answer(smollm2_url: str, run: Run, kind: Any, stream: bool) -> None:
    async def judge() -> None:
        async with served(smollm2_url, kind) as model:
            agent = Agent(name="judge", instructions="Judge.", output_type=Verdict, model=model, model_settings=ANSWERS)
            assert isinstance((await ran(agent, QUESTION, stream)).final_output, Verdict)

    run(judge())


@MODELS
@STREAMED
def test_a_hand_off(smollm2_url: str, run: Run, kind: Any, stream: bool) -> None:
    async def hand_off() -> None:
        async with served(smollm2_url, kind) as model:
            second = Agent(name="second", instructions="Answer.", model=model, model_settings=ANSWERS)
            first = Agent(name="first", instructions="Hand off.", handoffs=[second], model=model, model_settings=CALLS)
            result = await ran(first, "Hello", stream)
        assert result.last_agent.name == "second"
        assert result.final_output

    run(hand_off())
