"""The forms of a reply that a request accepts, by its header Accept."""

from __future__ import annotations

import asyncio
import importlib

from starlette.types import Scope

from neper.errors import NotAcceptableError
from neper.server.transport.asgi import header

JSON = b"application/json"
ARROW = b"application/vnd.apache.arrow.stream"


async def takes_arrow(scope: Scope) -> bool:
    """`wants_arrow`, and pyarrow is loaded by then. Raises NotAcceptableError where it is not installed."""
    if not wants_arrow(scope):
        return False
    try:
        await asyncio.to_thread(importlib.import_module, "neper.arrow")
    except ImportError as error:
        raise NotAcceptableError(str(error)) from None
    return True


def wants_arrow(scope: Scope) -> bool:
    """True where the header names Arrow's stream, and JSON later, with less weight or not at all."""
    weights: dict[bytes, float] = {}
    for item in (header(scope, b"accept") or b"").lower().split(b","):
        name, *parameters = (part.strip() for part in item.split(b";"))
        weights.setdefault(name, _weight(parameters))
    order = list(weights)
    if not weights.get(ARROW):
        return False
    if JSON not in weights or weights[ARROW] > weights[JSON]:
        return True
    return weights[ARROW] == weights[JSON] and order.index(ARROW) < order.index(JSON)


def _weight(parameters: list[bytes]) -> float:
    """The parameter `q`, 0 to 1; 1 where it is absent or no number."""
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"q":
            try:
                return float(value)
            except ValueError:
                return 1.0
    return 1.0
