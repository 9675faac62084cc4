"""Layers against transformers' own, bit for bit where the arithmetic is the same; prepacked weights against plain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from neper.models import layers
from neper.models.layers import Linear, RMSNorm, rotary_table
from neper.models.model_config import ModelConfig
from neper.models.registry import load
from neper.models.source import resolve
from tests.models.steps import logprobs

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = RMSNorm(96, 1e-5, dtype=dtype, device=CPU), LlamaRMSNorm(96, 1e-5).to(dtype)
    weight = torch.randn(96).to(dtype)
    ours.weight.copy_(weight)
    theirs.weight.data.copy_(weight)
    x = (torch.randn(50, 96) * torch.logspace(-3, 3, 50)[:, None]).to(dtype)
    expected = theirs(x)
    # bfloat16: the same two roundings, so the same bits.
    tolerance = 0.0 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(ours(x), expected, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("scaled", [False, True])
def test_rotary_angles_are_transformers(scaled: bool) -> None:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": 500_000.0}
    if scaled:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope, hidden_act="silu"
    )
    positions = torch.tensor([0, 1, 77, 4095, 8192, 131071])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])  # each angle stands there twice
    ours = rotary_table(ModelConfig.from_dict(config.to_dict()), 131072, CPU)[positions]
    # Scaled frequencies may differ in their last bit; a position of 131071 makes that 131071 * 2^-24 of a turn.
    tolerance = 0.02 if scaled else 0.0
    torch.testing.assert_close(ours[:, :64], cos[0, :, :64], rtol=0.0, atol=tolerance)
    torch.testing.assert_close(ours[:, 64:], sin[0, :, :64], rtol=0.0, atol=tolerance)


def test_stacked_linear_equals_its_parts() -> None:
    torch.manual_seed(0)
    linear = Linear(8, {"a": 3, "b": 5}, bias=True, dtype=torch.float32, device=CPU)
    slots = dict(linear.slots("x"))
    assert {name: tuple(slot.shape) for name, slot in slots.items()} == {
        "x.a.weight": (3, 8),
        "x.a.bias": (3,),
        "x.b.weight": (5, 8),
        "x.b.bias": (5,),
    }
    for slot in slots.values():
        slot.normal_()
    x = torch.randn(4, 8)
    expected = torch.cat([x @ slots[f"x.{part}.weight"].T + slots[f"x.{part}.bias"] for part in "ab"], dim=1)
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize("rows", [1, 3, 8, 70])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.skipif(not layers.can_prepack(), reason="this torch has no oneDNN prepacked linear")
def test_prepacked_linear_is_accurate(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = Linear(96, {"a": 80}, bias=bias, dtype=torch.bfloat16, device=CPU)
    for _, slot in linear.slots(""):
        slot.normal_()
    weight = linear.weight.double()
    x = torch.randn(rows, 96).bfloat16()
    expected = x.double() @ weight.T + (linear.bias.double() if linear.bias is not None else 0.0)
    linear.prepack()
    assert linear.prepacked
    # One rounding to bfloat16 (2^-9 of the value), and float32 sums.
    torch.testing.assert_close(linear(x).double(), expected, rtol=2**-8, atol=1e-4)


def test_float32_linear_stays_plain() -> None:
    linear = Linear(16, {"a": 16}, bias=False, dtype=torch.float32, device=CPU)
    linear.prepack()
    assert not linear.prepacked


def test_model_without_prepacking_agrees(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve(str(tiny_llama))
    packed = load(source, dtype=torch.bfloat16, device=CPU)
    with monkeypatch.context() as patch:
        patch.setattr(layers, "can_prepack", lambda: False)
        plain = load(source, dtype=torch.bfloat16, device=CPU)
    assert not plain.lm_head.prepacked
    ids = [list(range(40))]
    delta = (logprobs(packed, ids)[0] - logprobs(plain, ids)[0]).abs()
    assert float(delta.mean()) <= 0.06
    assert float(delta.quantile(0.99)) <= 0.20


def test_can_prepack_is_false_where_the_op_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such op")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", broken)
    layers.can_prepack.cache_clear()
    try:
        assert layers.can_prepack() is False
    finally:
        layers.can_prepack.cache_clear()
