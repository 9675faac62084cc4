"""Completions as Arrow streams: the same tokens and the same bits as in JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from neper import arrow
from neper.server.transport import asgi
from neper.server.transport.accept import ARROW, wants_arrow
from tests.server.conftest import Client
from tests.server.test_errors import CHAT, COMPLETIONS, check

MEDIA_TYPE = ARROW.decode()
PROMPTS = [[5, 40, 6, 7, 9], [8, 5, 6]]


def batches_of(client: Client, **body: Any) -> list[pa.RecordBatch]:
    response = client.http.post(COMPLETIONS, json=body, headers={"Accept": MEDIA_TYPE})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    with ipc.open_stream(response.content) as reader:
        return [reader.schema, *reader]


def table_of(client: Client, **body: Any) -> pa.Table:
    schema, *batches = batches_of(client, **body)
    table = pa.Table.from_batches(batches, schema)
    table.validate(full=True)
    return table


def entry_of(row: dict[str, Any]) -> dict[str, float]:
    """The dict of JSON's `top_logprobs` with ids as keys."""
    ids, values = row["top_ids"], row["top_logprobs"]
    assert len(ids) == len(values)
    return {f"token_id:{i}": value for i, value in zip([*ids, row["token_id"]], [*values, row["logprob"]], strict=True)}


def test_rows_have_the_numbers_of_json(client: Client) -> None:
    client.say(" answer")
    body: dict[str, Any] = {"prompt": PROMPTS, "n": 2, "logprobs": 3, "echo": True, "prompt_logprobs": 3}
    body |= {"return_tokens_as_token_ids": True, "return_token_ids": True}
    want = client.post(COMPLETIONS, **body).json()
    table = table_of(client, **body)
    assert table.schema.remove_metadata() == arrow.TOKENS
    reply = json.loads(table.schema.metadata[b"reply"])
    for choice, told in zip(want["choices"], reply["choices"], strict=True):
        number, prompt = choice["index"] // 2, choice["prompt_token_ids"]
        logprobs, entries = choice.pop("logprobs"), choice.pop("prompt_logprobs")
        assert told.pop("logprobs") is None
        assert told == choice
        rows = table.filter(pa.compute.equal(table["prompt"], number)).to_pylist()
        own = [row for row in rows if row["choice"] in (None, choice["index"])]
        assert [row["position"] for row in own] == list(range(len(own)))
        assert [row["token_id"] for row in own] == [*prompt, *choice["token_ids"]]
        assert [row["logprob"] for row in own] == [
            number and np.float32(number) for number in logprobs["token_logprobs"]
        ]
        for row, listed in zip(own, logprobs["top_logprobs"], strict=True):
            if listed is None:
                assert (row["position"], row["rank"], row["top_ids"], row["top_logprobs"]) == (0, None, None, None)
            else:
                assert entry_of(row) == {name: np.float32(value) for name, value in listed.items()}
        for row, entry in zip(own, entries, strict=False):
            assert row["rank"] == (entry and entry[str(row["token_id"])]["rank"])
    assert [row["choice"] for row in table.to_pylist()].count(None) == sum(map(len, PROMPTS))
    assert reply["usage"] == want["usage"]


def test_a_prompt_alone_from_a_position_on_with_named_ids(client: Client) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 0, "prompt_logprobs": 0}
    body |= {"prompt_logprobs_start": 3, "prompt_logprob_token_ids": [40, 7]}
    [choice] = client.post(COMPLETIONS, **body).json()["choices"]
    table = table_of(client, **body)
    assert table["token_id"].to_pylist() == PROMPTS[0]
    assert table["choice"].null_count == 5
    assert table["logprob"].is_null().to_pylist() == [True, True, True, False, False]
    for row, entry in zip(table.to_pylist()[3:], choice["prompt_logprobs"][3:], strict=True):
        assert {str(i): value for i, value in zip(row["top_ids"], row["top_logprobs"], strict=True)} == {
            i: np.float32(entry[i]["logprob"]) for i in ("40", "7")
        }


def test_tokens_without_scores_and_what_a_stop_string_cut_off(client: Client) -> None:
    ids = client.say("one STOP two")
    table = table_of(client, prompt=PROMPTS[0], stop="STOP")
    reply = json.loads(table.schema.metadata[b"reply"])
    assert reply["choices"][0]["text"] == "one "
    sampled = table["token_id"].to_pylist()[5:]
    assert sampled == ids[: len(sampled)]
    assert len(sampled) == reply["usage"]["completion_tokens"]
    assert all(table[name].null_count == len(table) for name in ("logprob", "rank", "top_ids", "top_logprobs"))


def test_what_is_masked_is_minus_infinity(client: Client) -> None:
    modes = ("raw_logprobs", "processed_logprobs")
    client.engine.capabilities = msgspec.structs.replace(client.engine.capabilities, logprobs_modes=modes)
    client.say([70])
    body: dict[str, Any] = {"prompt": [5] * 6, "max_tokens": 1, "top_k": 1, "logprobs_mode": "processed_logprobs"}
    row = table_of(client, **body, logprobs=0, logprob_token_ids=[40, 70]).to_pylist()[-1]
    assert (row["top_ids"], row["top_logprobs"]) == ([70, 40], [0.0, -np.inf])


def test_batches_are_bounded_and_sent_as_they_are_made(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.say([6] * 9)
    body: dict[str, Any] = {"prompt": [5] * 20, "prompt_logprobs": 4, "logprobs": 2, "max_tokens": 9}
    whole = table_of(client, **body)
    monkeypatch.setattr(arrow, "PIECE_PLACES", 12)
    monkeypatch.setattr(asgi, "LARGE_REPLY", 100)
    schema, *batches = batches_of(client, **body)
    assert [len(batch) for batch in batches] == [1, 3, 3, 3, 3, 3, 3, 1, 6, 3]
    assert pa.Table.from_batches(batches, schema).to_pylist() == whole.to_pylist()


def test_scores_of_tables_do_not_wait_to_be_written_as_text(client: Client) -> None:
    client.say(" answer")
    table_of(client, prompt=PROMPTS[0], logprobs=3)
    assert client.server.service.scores._pending == {}


def test_candidates_have_the_numbers_of_json(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_PIECE_CANDIDATES", 2)
    given = [" fox", " dog sleeps", [70, 71, 72], " fox", "s"]
    body: dict[str, Any] = {
        "prompt": "the quick brown",
        "candidates": given,
        "normalize": "mean",
        "return_tokens": True,
    }
    want = client.post("/v1/candidates", **body).json()
    response = client.http.post("/v1/candidates", json=body, headers={"Accept": MEDIA_TYPE})
    assert response.headers["content-type"] == MEDIA_TYPE
    with ipc.open_stream(response.content) as reader:
        assert reader.schema.remove_metadata() == arrow.CANDIDATES
        rest = json.loads(reader.schema.metadata[b"reply"])
        batches = list(reader)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    rows = [row for batch in batches for row in batch.to_pylist()]
    for place, (row, candidate) in enumerate(zip(rows, want["candidates"], strict=True)):
        entries = candidate.pop("logprobs")
        assert row.pop("candidate") == place
        assert row.pop("logprobs") == [np.float32(entry["logprob"]) for entry in entries]
        assert row == candidate
    assert rest["candidates"] == []
    names = ("model", "object", "prompt_tokens", "boundary", "usage", "normalized_over")
    assert {name: rest[name] for name in names} == {name: want[name] for name in names}
    check(
        client.http.post("/v1/candidates", json={**body, "candidates": []}, headers={"Accept": MEDIA_TYPE}),
        400,
        "candidates",
    )


@pytest.mark.parametrize(
    ("accept", "arrow"),
    [
        ("", False),
        ("*/*", False),
        ("text/csv", False),
        ("application/*", False),
        (MEDIA_TYPE, True),
        (f"{MEDIA_TYPE.upper()} ; q=1.0", True),
        (f"text/csv, {MEDIA_TYPE}", True),
        (f"application/json, {MEDIA_TYPE}", False),
        (f"{MEDIA_TYPE}, application/json", True),
        (f"application/json;q=0.5, {MEDIA_TYPE};q=0.8", True),
        (f"{MEDIA_TYPE};q=0.2, application/json", False),
        (f"{MEDIA_TYPE};q=0", False),
        (f"{MEDIA_TYPE};q=x", True),
    ],
)
def test_accept(accept: str, arrow: bool) -> None:
    assert wants_arrow({"headers": [(b"accept", accept.encode())] if accept else []}) is arrow


def test_another_media_type_is_answered_in_json(client: Client) -> None:
    response = client.http.post(COMPLETIONS, json={"prompt": "Hello"}, headers={"Accept": "text/csv"})
    assert response.headers["content-type"] == "application/json"
    response = client.http.post(
        CHAT, json={"messages": [{"role": "user", "content": "x"}]}, headers={"Accept": MEDIA_TYPE}
    )
    assert response.headers["content-type"] == "application/json"


def test_errors_are_json(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def post(**body: Any) -> Any:
        return client.http.post(COMPLETIONS, json=body, headers={"Accept": MEDIA_TYPE})

    check(post(prompt="Hello", stream=True), 400, "stream")
    check(post(prompt="Hello", prompt_logprobs=21), 400, "prompt_logprobs")
    client.engine.fail_after = 1
    check(post(prompt=PROMPTS[0], prompt_logprobs=1), 500, None, "engine_error")
    monkeypatch.setitem(sys.modules, "neper.arrow", None)
    check(post(prompt="Hello"), 406, None, "not_acceptable")
    assert client.engine.submitted[1:] == []


def test_without_pyarrow_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['pyarrow'] = None\ntry: import neper.arrow\nexcept ImportError as e: print(e)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'neper[arrow]'" in result.stdout


def test_the_server_starts_without_loading_pyarrow() -> None:
    code = "import sys, neper.server.run; print(sorted({'pyarrow', 'torch'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
