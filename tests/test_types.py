"""Bounds of the sampling fields: one home, which docs and errors agree with."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from neper.types import SamplingParams

TABLE = (Path(__file__).resolve().parents[1] / "docs/api.md").read_text(encoding="utf-8")
RANGES = {
    name: bounds.of_api
    for name, bounds in SamplingParams.bounds().items()
    if bounds.of_api.le is not None and bounds.of_api.le <= 2**32
}


@pytest.mark.parametrize("name", RANGES)
def test_docs_name_the_range_of_the_api(name: str) -> None:
    [row] = re.findall(rf"^\| (?:`\w+`, )*`{name}`(?:, `\w+`)* \| ([^|;]*)", TABLE, flags=re.MULTILINE)
    bounds = RANGES[name]
    low = bounds.ge if bounds.gt is None else bounds.gt
    assert [float(number) for number in re.findall(r"-?[0-9.]+", row)] == [low, bounds.le]
    assert ("greater than" in row) == (bounds.gt is not None)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ({"max_tokens": -1}, "max_tokens must be at least 0, got -1"),
        ({"temperature": -0.5}, "temperature must be at least 0, and finite in float32, got -0.5"),
        ({"temperature": math.nan}, "temperature must be at least 0, and finite in float32, got nan"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_k": -2}, "top_k must be at least -1, got -2"),
        ({"presence_penalty": math.inf}, "presence_penalty must be a number that float32 holds, got inf"),
        ({"presence_penalty": 1e308}, "presence_penalty must be a number that float32 holds, got 1e+308"),
        ({"frequency_penalty": -1e39}, "frequency_penalty must be a number that float32 holds, got -1e+39"),
        ({"temperature": 1e39}, "temperature must be at least 0, and finite in float32, got 1e+39"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, and a normal number of float32, got 0.0"),
        (
            {"repetition_penalty": 1e-40},
            "repetition_penalty must be above 0, and a normal number of float32, got 1e-40",
        ),
        ({"repetition_penalty": 1e39}, "repetition_penalty must be above 0, and a normal number of float32, got 1e+39"),
        ({"seed": 2**64}, f"seed must be an integer of 64 bits, got {2**64}"),
        *(
            (
                {"logit_bias": {3: value}},
                f"logit_bias must be of numbers that float32 holds, or -inf to ban, got {{3: {value}}}",
            )
            for value in (math.inf, math.nan, 1e39, -1e39)
        ),
    ],
    ids=str,
)
def test_a_field_out_of_its_bounds_is_named(field: dict[str, Any], problem: str) -> None:
    assert SamplingParams(**field).problem() == problem


def test_what_engines_take_beyond_the_api_is_no_problem() -> None:
    edges = SamplingParams(presence_penalty=-(2.0**127), repetition_penalty=2.0**-126, temperature=1e-40)
    assert edges.problem() is None
    wide = SamplingParams(temperature=50.0, presence_penalty=9.0, repetition_penalty=1000.0, seed=2**64 - 1)
    assert wide.problem() is None
    assert SamplingParams(max_tokens=None, seed=None, top_k=2**70, logit_bias={3: -math.inf}).problem() is None


def test_a_plain_string_is_one_stop_string() -> None:
    assert SamplingParams(stop="you.").stop == ("you.",)
    assert SamplingParams(stop="you.") == SamplingParams(stop=("you.",))
