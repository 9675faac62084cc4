"""field_logprobs: the tokens that spell each value of a reply's JSON, and the values that it could have had."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from neper.config import ServerConfig
from neper.errors import InvalidRequestError
from neper.text.grammar import json_schema
from neper.text.json_values import json_values
from neper.text.matcher import Grammars
from neper.text.tokenizer import Tokenizer
from tests.helpers.scripted_engine import scores
from tests.server.conftest import END, TAGS, VOCAB_SIZE, Client, byte_level_tokenizer, fresh, running
from tests.server.test_errors import CHAT, MESSAGES, check
from tests.text.random_schemas import SchemaMaker, Writer

# Tokens that stand across the ends of values, as those of real tokenizers do.
STRADDLING = [
    '{"',
    '":',
    '": "',
    '":"',
    '","',
    '", "',
    '"}',
    '"]',
    "},",
    "}]",
    ',{"',
    '[{"',
    ": true",
    " 1",
    '\\"',
    ": [",
]


@pytest.fixture(scope="module")
def shared_json() -> Iterator[Client]:
    tokenizer = byte_level_tokenizer(tags=[*TAGS, *STRADDLING])
    with running(tokenizer, ServerConfig(reasoning_parser="think")) as client:
        yield client


@pytest.fixture
def client(shared_json: Client) -> Iterator[Client]:
    with fresh(shared_json, 4096) as client:
        yield client


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def asked(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": form(schema), "logprobs": True, "field_logprobs": True, **fields}


def random_ids(tokenizer: Tokenizer, text: str, draw: random.Random) -> list[int]:
    """Ids that spell a text, any of the ways to spell it."""
    data, ids = text.encode(), []
    table = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    usable = [i for i, piece in enumerate(table) if piece and i not in tokenizer.special_token_ids]
    at = 0
    while at < len(data):
        ids.append(draw.choice([i for i in usable if data.startswith(table[i], at)]))
        at += len(table[ids[-1]])
    return ids


def members(text: str, at: int, pointer: str = "") -> Iterator[tuple[str, int, int]]:
    """Pointer, first and last place of the value that begins at `at`, and of those inside it; Python finds the ends."""
    decode = json.JSONDecoder(strict=False).raw_decode
    value, end = decode(text, at)
    yield pointer, at, end

    def space(at: int) -> int:
        return at + len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))

    if isinstance(value, dict | list):
        at = space(at + 1)
        for place in range(10**6):
            if text[at] in "}]":
                return
            at = space(at + (text[at] == ","))
            key: Any = place
            if isinstance(value, dict):
                key, at = decode(text, at)
                at = space(space(at) + 1)
                key = key.replace("~", "~0").replace("/", "~1")
            yield from members(text, at, f"{pointer}/{key}")
            at = space(decode(text, at)[1])


def expected(content: str, entries: list[dict[str, Any]]) -> dict[str, tuple[Any, list[int]]]:
    """Each pointer's value, and the places of the entries that have a byte of it."""
    found: dict[str, tuple[Any, list[int]]] = {}
    for pointer, start, end in members(content, len(content) - len(content.lstrip())):
        for other in [other for other in found if other == pointer or other.startswith(f"{pointer}/")]:
            del found[other]  # a name that comes again
        first, last = len(content[:start].encode()), len(content[:end].encode())
        places, at = [], 0
        for place, entry in enumerate(entries):
            if at < last and at + len(entry["bytes"]) > first and entry["bytes"]:
                places.append(place)
            at += len(entry["bytes"])
        found[pointer] = json.loads(content[start:end], strict=False), places
    return found


def check_fields(choice: dict[str, Any]) -> None:
    """Each field equals the sum over the tokens that spell its value."""
    fields, entries = choice["logprobs"]["fields"], choice["logprobs"]["content"]
    found = expected(choice["message"]["content"], entries)
    assert sorted(fields) == sorted(found)
    for pointer, (_, places) in found.items():
        field = fields[pointer]
        assert list(range(field["start"], field["end"])) == places
        assert field["logprob"] == pytest.approx(math.fsum(entries[place]["logprob"] for place in places), rel=1e-14)
        weakest = min(places, key=lambda place: entries[place]["logprob"])
        assert field["weakest"] == {
            "token": entries[weakest]["token"],
            "logprob": entries[weakest]["logprob"],
            "index": weakest,
        }
        assert field["complete"] is True


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.rounds(10)
def test_fields_are_sums_over_the_tokens_that_spell_them(client: Client, rounds: int) -> None:
    tokenizer = client.tokenizer
    grammars = Grammars(tokenizer, VOCAB_SIZE, (END,))
    writer = Writer(tokenizer, END, VOCAB_SIZE)
    count = seed = 0
    while count < rounds:
        seed += 1
        schema = {"type": "object", "properties": {"x": SchemaMaker(seed).make()}, "required": ["x"]}
        try:
            reply = writer.write(grammars.matcher(json_schema(schema).text()), schema, seed)
        except InvalidRequestError:
            continue
        if reply is None:
            continue
        client.say(random_ids(tokenizer, reply, random.Random(seed)))
        choice = only_choice(client, schema)
        assert choice["message"]["content"] == reply
        check_fields(choice)
        for pointer, (value, _) in expected(reply, choice["logprobs"]["content"]).items():
            choices = choice["logprobs"]["fields"][pointer].get("choices")
            if choices is not None:
                told = [(type(one["value"]) is bool, one["value"]) for one in choices]  # 1 is not true
                assert told.count((type(value) is bool, value)) == 1
                assert math.fsum(one["probability"] for one in choices) == pytest.approx(1)
        count += 1


SENTIMENT = {
    "type": "object",
    "properties": {
        "label": {"enum": ["good", "bad", "né/~"]},
        "sure": {"type": "boolean"},
        "stars": {"enum": [1, 10, None]},
        "note": {"type": "string"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    },
    "$defs": {"tag": {"anyOf": [{"const": "a"}, {"type": "null"}, {"type": "boolean"}]}},
}
REPLY = '{"label":"good", "sure": true, "stars": 1,"note":"é\\"日", "tags": [null, false]}'
CHOICES = {
    "/label": ["good", "bad", "né/~"],
    "/sure": [True, False],
    "/stars": [1, 10, None],
    "/tags/0": ["a", None, True, False],
    "/tags/1": ["a", None, True, False],
}


def only_choice(client: Client, schema: Any = SENTIMENT, **body: Any) -> dict[str, Any]:
    [choice] = client.chat(**asked(schema, **body))["choices"]
    return choice


def test_choices_are_scored_in_the_place_of_the_value(client: Client) -> None:
    ids = client.say(REPLY)
    choice = only_choice(client)
    check_fields(choice)
    fields, data = choice["logprobs"]["fields"], [client.tokenizer.token_bytes(i) for i in ids]
    assert {
        name: [one["value"] for one in field["choices"]] for name, field in fields.items() if "choices" in field
    } == (CHOICES)
    first, *scorings = client.engine.submitted
    prompt, asked_ids = first.prompt_token_ids, iter(scorings)
    for pointer, start, end in members(REPLY, 0):
        if pointer not in CHOICES:
            continue
        field = fields[pointer]
        until = b"".join(data[: field["end"]])
        totals = []
        scoring = next(asked_ids)
        assert scoring.prompt_token_ids == [*prompt, *ids[: field["start"]]]
        candidates = iter(scoring.candidates)
        for value, shown in zip(CHOICES[pointer], field["choices"], strict=True):
            spelled = REPLY[:start].encode() + json.dumps(value, ensure_ascii=False).encode()
            spelled += until[len(REPLY[:end].encode()) :] + (b"," if pointer == "/stars" else b"")
            given = [*scoring.prompt_token_ids[len(prompt) :], *next(candidates)]
            assert client.tokenizer.decode_bytes(given).startswith(spelled)
            places = range(len(scoring.prompt_token_ids), len(prompt) + len(given))
            rows = [scores(at, given[at - len(prompt)], VOCAB_SIZE)[given[at - len(prompt)]] for at in places]
            totals.append(math.fsum(float(str(number)) for number in rows))
            assert shown["logprob"] == pytest.approx(totals[-1], rel=1e-12)
        shares = [math.exp(total) / math.fsum(map(math.exp, totals)) for total in totals]
        assert [one["probability"] for one in field["choices"]] == pytest.approx(shares, rel=1e-9)
        if pointer != "/stars":  # the token after a number tells 1 from 10
            own = CHOICES[pointer].index(json.loads(REPLY[start:end]))
            assert field["choices"][own]["logprob"] == pytest.approx(field["logprob"], rel=1e-12)
    assert next(asked_ids, None) is None


def folded_fields(events: list[dict[str, Any]], index: int) -> Any:
    """The fields of a choice of a stream: in a chunk of their own, the last before that of the finish."""
    chunks = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    assert [("fields" in (chunk["logprobs"] or {})) for chunk in chunks] == [False] * (len(chunks) - 2) + [True, False]
    assert chunks[-2]["delta"] == {}
    assert chunks[-2]["logprobs"]["content"] == []
    return chunks[-2]["logprobs"]["fields"]


def test_streams_bring_them_before_the_finish(client: Client) -> None:
    client.say(REPLY)
    reply = client.chat(**asked(SENTIMENT, n=2, seed=1))
    events = client.events(CHAT, **asked(SENTIMENT, n=2, seed=1))
    for choice in reply["choices"]:
        check_fields(choice)
        assert folded_fields(events, choice["index"]) == choice["logprobs"]["fields"]


@pytest.mark.parametrize("length", range(1, len(REPLY) + 1, 5))
def test_a_reply_that_was_cut_says_what_is_not_complete(client: Client, length: int) -> None:
    full = json_values(REPLY.encode(), whole=True)
    client.say(bytewise(client, REPLY))
    fields = only_choice(client, max_tokens=length)["logprobs"]["fields"]
    begun = [value for value in full if value.start < length]
    assert list(fields) == [value.pointer for value in begun]
    whole = length == len(REPLY.encode())
    for value in begun:
        field = fields[value.pointer]
        plain_end = REPLY.encode()[value.end - 1 : value.end].isdigit()  # more digits could come
        assert field["complete"] is (value.end + plain_end <= length), value.pointer
        assert (field["start"], field["end"]) == (value.start, min(value.end, length))
        assert "choices" not in field or field["complete"]
    assert whole or not fields[""]["complete"]


def bytewise(client: Client, text: str) -> list[int]:
    table = {client.tokenizer.token_bytes(i): i for i in range(client.tokenizer.vocab_size)}
    return [table[bytes([byte])] for byte in text.encode()]


def test_only_the_content_counts(client: Client) -> None:
    client.say('<think>\n{"sure": 1}</think>\n\n' + REPLY)
    choice = only_choice(client)
    assert choice["message"]["content"] == REPLY
    check_fields(choice)
    first, scoring, *_ = client.engine.submitted
    reasoned = client.tokenizer.decode_bytes(scoring.prompt_token_ids[len(first.prompt_token_ids) :])
    assert reasoned.startswith(b'<think>\n{"sure": 1}</think>\n\n{"label')


def test_tokens_are_shown_as_ids(client: Client) -> None:
    client.say(REPLY)
    choice = only_choice(client, return_tokens_as_token_ids=True)
    check_fields(choice)
    assert choice["logprobs"]["fields"]["/sure"]["weakest"]["token"].startswith("token_id:")


@pytest.mark.parametrize(
    ("reply", "schema", "values"),
    [
        ("true", {"type": "boolean"}, [True, False]),
        (' "é"', {"enum": ["é", ""]}, ["é", ""]),
        ("10", {"enum": [10, 1]}, [10, 1]),
        ("1", {"type": ["integer", "null"], "enum": [1, "1", 1.5, None, True]}, [1, None]),
        ("null", {"anyOf": [{"type": "null"}, {"const": True}, {"enum": [None, 2]}]}, [None, True, 2]),
        ("2", {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, "a"]}]}, [2, 3]),
        ("1", {"const": 1}, None),
        ('"x"', {"type": "string"}, None),
        ("[]", {"enum": [[], [1]]}, None),
        ("null", {"type": ["null", "string"]}, None),
        ("5", {"enum": list(range(300))}, None),
    ],
)
def test_choices_are_the_plain_values_that_a_schema_allows(
    client: Client, reply: str, schema: Any, values: list[Any] | None
) -> None:
    client.say(reply)
    field = only_choice(client, schema)["logprobs"]["fields"][""]
    assert field["complete"]
    found = [one["value"] for one in field["choices"]] if "choices" in field else None
    assert json.dumps(found) == json.dumps(values)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"logprobs": True}, "needs a reply of JSON"),
        ({"logprobs": True, "response_format": {"type": "text"}}, "needs a reply of JSON"),
        ({"logprobs": True, "structured_outputs": {"regex": "a"}}, "needs a reply of JSON"),
        ({"response_format": form(SENTIMENT)}, "needs logprobs"),
    ],
)
def test_what_they_need(client: Client, body: dict[str, Any], problem: str) -> None:
    response = client.post(CHAT, messages=MESSAGES, field_logprobs=True, **body)
    assert problem in check(response, 400, "field_logprobs")
    assert client.engine.submitted == []


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"json": json.dumps(SENTIMENT)}},
    ],
)
def test_other_replies_of_json_have_fields_too(client: Client, body: dict[str, Any]) -> None:
    client.say(REPLY)
    [choice] = client.chat(logprobs=True, field_logprobs=True, **body)["choices"]
    check_fields(choice)
    assert ("choices" in choice["logprobs"]["fields"]["/sure"]) is ("json" in body.get("structured_outputs", {}))


def test_without_the_field_nothing_is_added(client: Client) -> None:
    client.say(REPLY)
    assert "fields" not in only_choice(client, field_logprobs=False)["logprobs"]
    assert len(client.engine.submitted) == 1


def test_an_engine_that_scores_no_candidates_gives_values_alone(client: Client) -> None:
    client.engine.capabilities = msgspec.structs.replace(client.engine.capabilities, candidates=False)
    client.say(REPLY)
    choice = only_choice(client)
    check_fields(choice)
    assert all("choices" not in field for field in choice["logprobs"]["fields"].values())


def test_a_scoring_that_fails_fails_the_request(client: Client) -> None:
    client.say(REPLY)
    client.engine.fail_after = 0
    client.engine.affects = lambda request: bool(request.candidates)
    response = client.post(CHAT, messages=MESSAGES, **asked(SENTIMENT))
    assert check(response, 500, code="engine_error") == "a row was NaN"


def test_a_response_has_them_on_its_text(client: Client) -> None:
    client.say(REPLY)
    fields = only_choice(client)["logprobs"]["fields"]
    wanted = {
        "input": "Hello",
        "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": SENTIMENT}},
        "field_logprobs": True,
    }
    response = client.post("/v1/responses", **wanted)
    assert response.status_code == 200, response.text
    assert response.json()["output"][0]["content"][0]["field_logprobs"] == fields
    stream = client.post("/v1/responses", stream=True, **wanted).text
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]
    parts = {event["type"]: event["part"] for event in events if "part" in event}
    assert "field_logprobs" not in parts["response.content_part.added"]
    assert parts["response.content_part.done"]["field_logprobs"] == fields
    del wanted["include"]
    assert "needs include" in check(client.post("/v1/responses", **wanted), 400, "field_logprobs")
