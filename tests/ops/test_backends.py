"""The implementations that `backends` hands out, and that nobody else picks one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import neper
from neper.ops import backends
from neper.ops.attention import reference as attention
from neper.ops.fused import reference as fused
from neper.ops.linear import reference as linear
from neper.ops.logprobs import reference as scoring

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_cpu_is_served_by_the_references() -> None:
    assert backends.attention(CPU, 64) is attention
    assert backends.fused(CPU) is fused
    assert backends.linear(CPU) is linear
    assert backends.scoring(CPU) is scoring
    assert backends.steps(CPU, 1000, 64) is None
    assert {family: chosen.name for family, chosen in backends.chosen(CPU).items()} == {
        "attention": "reference",
        "scoring": "reference",
    }


def test_a_gpu_is_served_by_the_kernels_within_their_limits() -> None:
    pytest.importorskip("triton")
    from neper.ops.attention import launch as attention_launch
    from neper.ops.packing import launch as packing_launch
    from neper.ops.sampling import launch as sampling_launch

    assert backends.attention(CUDA, 256) is attention_launch
    assert backends.attention(CUDA, 257) is attention
    assert backends.steps(CUDA, 2**20, 256) == backends.StepKernels(sampling_launch, packing_launch)
    assert backends.steps(CUDA, 2**20 + 1, 256) is None
    assert backends.steps(CUDA, 2**20, 257) is None


def test_logits_that_kernels_do_not_take_are_the_references() -> None:
    pytest.importorskip("triton")
    from neper.ops.logprobs import launch

    logits = torch.empty(2, 100, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "scoring", lambda device: launch)
        assert backends.scoring_of(logits) is launch
        assert backends.scoring_of(logits[:, ::2]) is scoring
        assert backends.scoring_of(logits.double()) is scoring
        assert backends.scoring_of(torch.empty(1, 2**20 + 1, device="meta")) is scoring


def test_a_cpu_needs_no_triton() -> None:
    script = "import sys, neper.engine.core, neper.engine.llm; print('triton' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_kernels_are_imported_by_their_families_and_by_backends_alone() -> None:
    source = Path(neper.__file__).parent
    imports = re.compile(r"from neper\.ops\.\w+(\.(launch|\w*kernels) import| import (launch|\w*kernels)\b)")
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if imports.search(path.read_text(encoding="utf-8")) and path.parent.parent != source / "ops"
    }
    assert found == {"ops/backends.py"}
