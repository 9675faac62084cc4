"""Requests made from the OpenAPI document, valid and not: never a 5xx, never a response that it does not describe."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from neper.config import ServerConfig
from neper.server.openapi import ApiDocument
from neper.text.tokenizer import Tokenizer
from tests.server.conftest import Client, running

KEY = "sesam"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
    ignored_auth,
]
schema = schemathesis.openapi.from_dict(ApiDocument(needs_key=True).document())


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Client]:
    with running(tokenizer, ServerConfig(api_key=KEY)) as client:
        client.say("the quick brown fox")
        before = calls(client)
        yield client
        assert calls(client) - before > 2000


def calls(client: Client) -> float:
    """Requests that the server has answered, by its own count, those for its health and its metrics aside."""
    lines = client.http.get("/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("neper_http_request_duration_seconds_count{")]
    return sum(float(line.split()[1]) for line in counts if '"/health"' not in line and '"/metrics"' not in line)


# Five operations take bodies, so these are more than 2,000 calls: some minutes, most of them for making the requests.
@pytest.mark.full
@pytest.mark.timeout(1800)
@schema.parametrize()
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_all_that_is_described(case: schemathesis.Case, served: Client) -> None:
    case.call_and_validate(
        base_url=served.server.url, checks=CHECKS, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert served.http.get("/health").status_code == 200
