"""The openai SDK's responses: sync and async, whole and streamed, one and eight at a time, parsed, given back."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.clients.conftest import SMOLLM2, TINY, Run
from tests.clients.contract import Entries, check_spelling, plain, post
from tests.clients.reference import Reference
from tests.clients.test_structured import QUESTION, Verdict, check_verdict

CONTENT = "the quick brown fox"
KINDS = ["sync", "sync-stream", "async", "async-stream"]
Reply = tuple[str, Entries, str | None]


def options(content: str = CONTENT, top: int = 5, **others: Any) -> dict[str, Any]:
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": top}
    return {"model": TINY, "input": content, "temperature": 0, "max_output_tokens": 12, **wanted, **others}


def whole(response: Any) -> Reply:
    [item] = response.output
    [part] = item.content
    assert response.output_text == part.text
    return part.text, plain(part.logprobs), response.status


def folded(events: list[Any]) -> Reply:
    """A stream's deltas as the reply, which its last event must have too; each delta's entries spell it."""
    text, entries = "", []
    for event in events:
        if event.type == "response.output_text.delta":
            # The type has no bytes in a delta; the entries have.
            new = plain(event.to_dict()["logprobs"])
            assert "".join(entry["token"] for entry in new) == event.delta
            text, entries = text + event.delta, entries + new
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert (done.text, plain(done.to_dict()["logprobs"])) == (text, entries)
    assert whole(events[-1].response)[:2] == (text, entries)
    return text, entries, events[-1].response.status


async def async_replies(url: str, bodies: list[dict[str, Any]], *, stream: bool) -> list[Reply]:
    async def one(client: openai.AsyncOpenAI, body: dict[str, Any]) -> Reply:
        if not stream:
            return whole(await client.responses.create(**body))
        return folded([event async for event in await client.responses.create(**body, stream=True)])

    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        return list(await asyncio.gather(*(one(client, body) for body in bodies)))


def replies(client: openai.OpenAI, url: str, run: Run, kind: str, bodies: list[dict[str, Any]]) -> list[Reply]:
    """To all bodies, sent at the same time."""
    if kind.startswith("async"):
        return run(async_replies(url, bodies, stream=kind == "async-stream"))

    def one(body: dict[str, Any]) -> Reply:
        if kind == "sync":
            return whole(client.responses.create(**body))
        return folded(list(client.responses.create(**body, stream=True)))

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(one, bodies))


@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_a_response(client: openai.OpenAI, tiny_url: str, reference: Reference, run: Run, kind: str, top: int) -> None:
    body = options(top=top)
    [(text, entries, status)] = replies(client, tiny_url, run, kind, [body])
    check_spelling(text, entries, top)
    reference.check(reference.chat_ids(CONTENT), entries)
    raw = post(tiny_url, "/v1/responses", body)
    [part] = raw["output"][0]["content"]
    assert (text, entries, status) == (part["text"], part["logprobs"], raw["status"])


@pytest.mark.parametrize("kind", KINDS)
def test_eight_at_a_time(client: openai.OpenAI, tiny_url: str, reference: Reference, run: Run, kind: str) -> None:
    tops = [0, 1, 2, 5, 20, 0, 5, 3]
    contents = [f"{CONTENT} number {i} jumps" for i in range(8)]
    bodies = [options(content, top) for content, top in zip(contents, tops, strict=True)]
    found = replies(client, tiny_url, run, kind, bodies)
    for content, top, (text, entries, _) in zip(contents, tops, found, strict=True):
        check_spelling(text, entries, top)
        reference.check(reference.chat_ids(content), entries)


def test_replies_have_what_the_types_require(tiny_url: str) -> None:
    Response.model_validate(post(tiny_url, "/v1/responses", options()))  # the SDK itself does not validate
    event: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    response = httpx.post(tiny_url + "/v1/responses", json=options(stream=True), timeout=120)
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    kinds = [event.validate_json(line).type for line in lines]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [json.loads(line)["sequence_number"] for line in lines] == list(range(len(lines)))


def test_a_conversation_goes_on(client: openai.OpenAI, reference: Reference) -> None:
    """With the output of the response before, as the SDK sends it back."""
    user = {"role": "user", "content": CONTENT}
    first = client.responses.create(**options(input=[user]))
    assert first.usage is not None
    assert first.usage.input_tokens == len(reference.chat_ids(CONTENT))
    second: Any = client.responses.create(**options(input=[user, *first.output, user]))
    messages = [user, {"role": "assistant", "content": first.output_text}, user]
    chat = client.chat.completions.create(
        model=TINY, messages=messages, temperature=0, max_tokens=12, logprobs=True, top_logprobs=5
    )
    assert whole(second)[:2] == (chat.choices[0].message.content, plain(chat.choices[0].logprobs.content))
    assert second.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": []}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
    ],
)
def test_a_refusal_names_the_field(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**options() | change)
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_parse(smollm2_url: str, stream: bool) -> None:
    body = options(QUESTION, 2, model=SMOLLM2, max_output_tokens=64, text_format=Verdict)
    with openai.OpenAI(base_url=smollm2_url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        if stream:
            with client.responses.stream(**body) as events:
                response: Any = events.get_final_response()
        else:
            response = client.responses.parse(**body)
    text, entries, status = whole(response)
    assert status == "completed"
    check_verdict(text, response.output_parsed, entries)


def test_a_real_model_answers(smollm2_url: str) -> None:
    body = options("What is the capital of France?", model=SMOLLM2, max_output_tokens=24, instructions="Be brief.")
    with openai.OpenAI(base_url=smollm2_url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        text, entries, _ = whole(client.responses.create(**body))
        assert folded(list(client.responses.create(**body, stream=True)))[:2] == (text, entries)
    assert "Paris" in text
    check_spelling(text, entries, 5)
