"""Schemas made up of every keyword that is held, and texts of their grammars by a writer who looks for trouble."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from datetime import datetime
from fractions import Fraction
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.validators import extend

from neper.text.matcher import Matcher
from neper.text.tokenizer import Tokenizer

Json = Any

NAMES = ["a", "b", "ab", "é", 'q"', "a/b~c", "\n", "", "$ref", "😀"]
PATTERNS = ["^a", "b$", "^[a-c]{1,3}$", "^x-", "[0-9]+", "^(ab|c)*$", "^[a&&b]$", "a.c", "^[^a]$", r"^\w\d$", "^a|b$"]
KEY_PATTERNS = ["^a", "^b", "^x-", "^[0-9]+$", "^[^a-z]"]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "uuid4"]
NUMBERS: list[float] = [0, 1, -1, 3, 10, 99, 100, -7, 2**31, 2**53, 2**53 - 1, -(2**53), 2**53 + 1, 2**63, -(2**63)]
NUMBERS += [0.5, -0.5, 0.1, 1.5, 2.75, 1e-7, -1e-9, 99.99, 123456.789, 1e15, -0.0, 1e22, 0.30000000000000004]
STEPS: list[float] = [1, 2, 3, 7, 10, 0.5, 0.1, 0.01, 1.5, 0.25, 100, 1e-3]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


class SchemaMaker:
    """A schema from a seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._names: list[str] = []

    def make(self) -> Json:
        self._names = [f"d{place}" for place in range(self._draw.choice([0, 0, 1, 2]))]
        schema = self._schema(0)
        if self._names and isinstance(schema, dict):
            schema["$defs"] = {name: self._schema(1) for name in self._names}
        return schema

    def _chance(self, probability: float) -> bool:
        return self._draw.random() < probability

    def _schema(self, depth: int) -> Json:
        draw = self._draw
        if self._chance(0.04):
            return draw.choice([True, {}, {}, False])
        if self._names and self._chance(0.15):
            node: Json = {"$ref": f"#/$defs/{draw.choice(self._names)}"}
            return node if self._chance(0.7) else {**node, **self._typed(depth)}
        if depth < 3 and self._chance(0.25):
            keyword = draw.choice(["anyOf", "oneOf", "allOf"])
            node = {keyword: [self._schema(depth + 1) for _ in range(draw.randint(1, 3))]}
            return node if self._chance(0.6) else {**self._typed(depth), **node}
        if self._chance(0.15):
            return draw.choice([{"const": self._value(depth)}, {"enum": [self._value(depth) for _ in range(3)]}])
        return self._typed(depth)

    def _typed(self, depth: int) -> dict[str, Json]:
        draw = self._draw
        kinds = TYPES if depth < 3 else TYPES[:5]
        kind = draw.choice(kinds + (["object", "array", "number", "integer", "string"] if depth < 3 else ["string"]))
        node: dict[str, Json] = {"type": kind}
        if self._chance(0.15):
            node["type"] = draw.sample(kinds, 2)
        elif self._chance(0.1):
            del node["type"]
        for made in (kind, draw.choice(kinds)) if self._chance(0.15) else (kind,):
            if made in ("integer", "number"):
                self._number(node)
            elif made == "string":
                self._string(node)
            elif made == "array":
                self._array(node, depth)
            elif made == "object":
                self._object(node, depth)
        if self._chance(0.1):
            node |= {"title": "t", "default": 1, "x-order": 2, "$comment": "c"}
        items = list(node.items())
        draw.shuffle(items)
        return dict(items)

    def _number(self, node: dict[str, Json]) -> None:
        small = [value for value in NUMBERS if abs(value) <= 2**53] if self._chance(0.9) else NUMBERS
        low, high = sorted([self._draw.choice(small), self._draw.choice(small)])
        for keywords, value in ((("minimum", "exclusiveMinimum"), low), (("maximum", "exclusiveMaximum"), high)):
            if self._chance(0.5):
                node[self._draw.choice(keywords)] = value
        if self._chance(0.25):
            node["multipleOf"] = self._draw.choice(STEPS)

    def _string(self, node: dict[str, Json]) -> None:
        if self._chance(0.3):
            node["pattern"] = self._draw.choice(PATTERNS)
        elif self._chance(0.3):
            node["format"] = self._draw.choice([*FORMATS, "password"])
        if self._chance(0.3):
            node["minLength"] = self._draw.randint(0, 3)
        if self._chance(0.3):
            node["maxLength"] = self._draw.randint(1, 5)

    def _array(self, node: dict[str, Json], depth: int) -> None:
        if self._chance(0.3):
            node["prefixItems"] = [self._schema(depth + 1) for _ in range(self._draw.randint(1, 2))]
        if self._chance(0.6):
            node["items"] = self._schema(depth + 1)
        if self._chance(0.4):
            node["minItems"] = self._draw.randint(0, 3)
        if self._chance(0.4):
            node["maxItems"] = self._draw.randint(0, 4)

    def _object(self, node: dict[str, Json], depth: int) -> None:
        draw = self._draw
        names = draw.sample(NAMES, draw.randint(0, 3))
        if names and self._chance(0.9):
            node["properties"] = {name: self._schema(depth + 1) for name in names}
        if self._chance(0.5):
            node["required"] = [name for name in names if self._chance(0.6)]
            if self._chance(0.2):
                node["required"].append(draw.choice([name for name in NAMES if name not in names]))
        if self._chance(0.6):
            node["additionalProperties"] = draw.choice([False, self._schema(depth + 1), {"type": "integer"}])
        if self._chance(0.25):
            patterns = draw.sample(KEY_PATTERNS, draw.randint(1, 2))
            node["patternProperties"] = {pattern: self._schema(depth + 1) for pattern in patterns}
        if self._chance(0.15):
            node["minProperties"] = draw.randint(0, 3)
        if self._chance(0.15):
            node["maxProperties"] = draw.randint(0, 3)
        if self._chance(0.1):
            node["propertyNames"] = {"type": "string"}

    def _value(self, depth: int) -> Json:
        draw = self._draw
        kind = draw.choice(TYPES if depth < 3 else TYPES[:5])
        if kind == "array":
            return [self._value(depth + 1) for _ in range(draw.randint(0, 2))]
        if kind == "object":
            return {draw.choice(NAMES): self._value(depth + 1) for _ in range(draw.randint(0, 2))}
        if kind in ("integer", "number"):
            return draw.choice(NUMBERS[:12] + NUMBERS[15:] if self._chance(0.9) else NUMBERS)
        return draw.choice({"null": [None], "boolean": [True, False]}.get(kind, ["", "a", 'q"\\', "é\n", "😀"]))


_STATIC = r"""
    \u0061 \u0041 \u00e9 \ud83d\ude00 \ud800 \n \t \/ \\ \" \u000a \u007f 1e5 1E-400 1e400 1.0 -0 -0.0 0.0000000001
    0.99999999999999999999 1.00000000000000000001 99999999999999999999 9007199254740993 9007199254740993.0 2023-02-29
    2000-02-29T23:59:60Z 0000-01-01 ::1 a.b true null {} [] "":1, "a":1, "a":"x", "a":null, "\u0061":1, "b":[], ,
"""
STATIC = _STATIC.split()


class Writer:
    """Writes texts of a grammar token by token: legal all of them, and as awkward as may be."""

    def __init__(self, tokenizer: Tokenizer, end: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._end = end
        self._words = np.empty(-(-vocab_size // 32), dtype=np.int32)
        data = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._data = data
        self._bytes = {text[0]: token_id for token_id, text in enumerate(data) if len(text) == 1}

    def write(self, matcher: Matcher, schema: Json, seed: int, *, longest: int = 250) -> str | None:
        """A whole text, or None where it did not come to an end."""
        draw = random.Random(seed)
        near = list(snippets_of(schema)) or STATIC
        text = b""
        for place in range(longest):
            rushed = place > longest // 3
            if not rushed and draw.random() < 0.4:
                for snippet in draw.choices(near, k=8) + draw.choices(STATIC, k=4):
                    ids = [
                        self._bytes[byte] for byte in snippet.encode("utf-8", "surrogatepass") if byte in self._bytes
                    ]
                    if ids and matcher._matcher.validate_tokens(ids) == len(ids):
                        assert all(map(matcher.accept, ids))
                        text += b"".join(self._data[token_id] for token_id in ids)
                        break
            matcher.fill(self._words)
            bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            if not allowed:
                return None
            if self._end in allowed and (rushed or draw.random() < 0.3 or len(allowed) == 1):
                return text.decode()
            allowed = [token_id for token_id in allowed if token_id != self._end]
            closing = [token_id for token_id in allowed if self._data[token_id][:1] in (b'"', b"}", b"]")]
            awkward = [token_id for token_id in allowed if self._data[token_id][:1] in b'\\",:eE.-+0189u']
            if closing and draw.random() < (0.8 if rushed else 0.25):
                chosen = draw.choice(closing)
            elif awkward and draw.random() < 0.5:
                chosen = draw.choice(awkward)
            else:
                chosen = draw.choice(allowed)
            assert matcher.accept(chosen)
            text += self._data[chosen]
        return None


def snippets_of(schema: Json) -> Iterator[str]:
    """What is near to what a schema says: its names spelled otherwise and again, numbers beside its own."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            pending += node.values()
            for name in node.get("properties") or ():
                written = json.dumps(name, ensure_ascii=False)
                escaped = "".join(f"\\u{ord(letter):04x}" for letter in name if ord(letter) < 0x10000)
                yield from (f"{written}:", f",{written}:", f'"{escaped}":', f',"{escaped}":', f'{written}:"x",')
        elif isinstance(node, list):
            pending += node
        elif isinstance(node, bool) or node is None:
            pass
        elif isinstance(node, int | float):
            yield from (str(node), str(node + 1), str(node - 1), f"{node}.0", f"{node}e0", f"{node}.{'0' * 350}1")
            yield from map(_plain, (math.nextafter(node, math.inf), math.nextafter(node, -math.inf)))
            yield _plain(node - 1 / 3) + "9" * 20
            yield f"{int(node) - 1}.{'9' * 25}"
        elif isinstance(node, str):
            yield json.dumps(node, ensure_ascii=False)


def _plain(value: float) -> str:
    return f"{value:.17f}".rstrip("0").rstrip(".")


def _multiple_of(validator: Any, step: float, instance: Json, schema: Json) -> Iterator[ValidationError]:
    """jsonschema's own divides floats, for which 0.3 is no multiple of 0.1."""
    if validator.is_type(instance, "number") and (
        not math.isfinite(instance) or Fraction(repr(instance)) % Fraction(repr(step))
    ):
        yield ValidationError(f"{instance!r} is not a multiple of {step}")


def validator_of(schema: Json) -> Any:
    checker = FormatChecker(())
    checker.checkers = {
        **{
            name: Draft202012Validator.FORMAT_CHECKER.checkers[name]
            for name in ("date", "email", "ipv4", "ipv6", "uuid")
        },
        "time": (lambda text: _time(f"2000-01-01T{text}" if isinstance(text, str) else text), ValueError),
        "date-time": (_time, ValueError),
    }
    return extend(Draft202012Validator, {"multipleOf": _multiple_of})(schema, format_checker=checker)


def _time(text: Json) -> bool:
    """Python 3.10 reads neither Z nor fractions of any length."""
    if isinstance(text, str):
        parts = re.fullmatch(r"(.{19})(?:\.\d+)?([zZ]|[+-].....)", text, re.DOTALL)
        if parts is None:
            return False
        datetime.fromisoformat(parts[1] + parts[2].upper().replace("Z", "+00:00"))
    return True


def objects_in(value: Json) -> Iterator[dict[str, Json]]:
    if isinstance(value, dict):
        yield value
        yield from itertools.chain.from_iterable(map(objects_in, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(objects_in, value))
