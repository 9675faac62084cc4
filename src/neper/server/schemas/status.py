"""Schemas of replies about the server itself."""

from __future__ import annotations

from typing import Literal

from neper.server.schemas.common import Schema


class Version(Schema):
    version: str


class Health(Schema):
    status: Literal["ok"]
