"""Schemas of the list of models, and of a model in it."""

from __future__ import annotations

from typing import Literal

from neper.server.schemas.common import Count, Schema


class Model(Schema):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count


class ModelList(Schema):
    object: Literal["list"]
    data: list[Model]
