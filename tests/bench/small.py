"""A shape that a test computes in a moment."""

from __future__ import annotations

import dataclasses

from neper.models.shapes import SHAPES

SMALL = dataclasses.replace(
    SHAPES["qwen3-0.6b"],
    vocab_size=384,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    sliding_windows=(None, None),
)
