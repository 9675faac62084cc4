"""The server's own OpenAPI document as an oracle: whether a response is one that it describes."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from neper.server.openapi import ApiDocument


class ApiSchema:
    def __init__(self, document: dict[str, Any]) -> None:
        Draft202012Validator.check_schema({"$defs": document["components"]["schemas"]})
        self.document = document
        self._paths = {
            path: re.compile(re.sub(r"\\\{\w+\\\}", ".+", re.escape(path)) + r"\Z") for path in document["paths"]
        }

    def check(self, response: httpx.Response) -> None:
        """Raises AssertionError or ValidationError for a status, type, header or body that the document does not have.

        What is no route of ours, or not its method, must be an error in our form.
        """
        response.read()
        described = self._described(response.request)
        status = str(response.status_code)
        if described is None:
            assert status in ("401", "404", "405"), f"{response.request.url} is not described"
            if response.request.method != "HEAD":
                self._validate(response.json(), {"$ref": "#/components/schemas/ErrorReply"})
            return
        assert status in described["responses"], f"{response.request.url} does not describe {status}: {response.text}"
        answer = described["responses"][status]
        for name, header in answer["headers"].items():
            assert not header["required"] or name in response.headers, f"{name} is missing"
        kind = response.headers["content-type"].partition(";")[0]
        assert kind in answer["content"], f"{kind} is not described"
        content = answer["content"][kind]
        if kind == "application/json":
            self._validate(response.json(), content["schema"])
        elif kind == "text/event-stream":
            *events, rest = response.text.split("\n\n")
            assert rest == ""
            described = content["itemSchema"]["properties"]
            # Draft 2020-12 does not look into JSON in strings.
            embedded = described["data"].get("contentSchema") or described["data"]["anyOf"][1]["contentSchema"]
            if "anyOf" in described["data"]:
                assert events.pop() == "data: [DONE]"
            for event in events:
                fields = dict(line.split(": ", 1) for line in event.split("\n"))
                self._validate(fields, content["itemSchema"])
                data = json.loads(fields["data"])
                assert fields.get("event", data.get("type")) == data.get("type")
                self._validate(data, embedded)

    def _described(self, request: httpx.Request) -> dict[str, Any] | None:
        for path, pattern in self._paths.items():
            if pattern.match(request.url.path):
                found: dict[str, Any] | None = self.document["paths"][path].get(request.method.lower())
                return found
        return None

    def _validate(self, value: Any, schema: dict[str, Any]) -> None:
        Draft202012Validator({**schema, "components": self.document["components"]}).validate(value)


def api_schema(*, needs_key: bool = False) -> ApiSchema:
    return ApiSchema(ApiDocument(needs_key=needs_key).document("3.2"))
