"""Device memory is read in `readback` and nowhere else: no op of a step asks the device for a number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from neper.engine.step.readback import StepOutput, StepResult
from neper.text.grammar import json_object
from neper.types import SamplingParams
from tests.helpers.engine import make_core, prompts, request, run

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select"}


class NoReads(TorchDispatchMode):
    """Rejects ops whose result the host must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.open = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        name = func._schema.name
        if name in READS and not self.open:
            raise AssertionError(f"{name} outside readback")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_reads_nothing_outside_readback(
    tiny_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    core = make_core(tiny_dir("llama"), max_num_batched_tokens=16, overlap=overlap)
    mode = NoReads()
    plain_read = core.runner.readback.read
    reads = []

    def read(output: StepOutput) -> StepResult:
        mode.open = True
        try:
            reads.append(output)
            return plain_read(output)
        finally:
            mode.open = False

    monkeypatch.setattr(core.runner.readback, "read", read)
    texts = prompts(9, 30)
    drawn = {"temperature": 1, "top_p": 0.9, "max_tokens": 5}
    named: dict[str, Any] = {"token_ids": (3, 4), "prompt_top_k": 0, "prompt_logprob_token_ids": (5, 6, 7)}
    form = json_object().text()
    everything = [
        request("0", texts[0], SamplingParams(temperature=0, max_tokens=5), top_k=20, prompt_top_k=5),
        request("1", texts[1], SamplingParams(temperature=1, top_p=0.9, max_tokens=5), top_k=0),
        request("2", texts[2], SamplingParams(temperature=1, max_tokens=5, logit_bias={5: -5.0}), top_k=3),
        request("3", texts[3], SamplingParams(temperature=0, max_tokens=5, presence_penalty=1, repetition_penalty=2)),
        request("4", texts[4], SamplingParams(temperature=1, top_k=5, min_p=0.1, min_tokens=3, max_tokens=5)),
        request("5", texts[5], SamplingParams(**drawn, allowed_token_ids=(1, 2, 9)), top_k=2),
        request("6", texts[6], SamplingParams(**drawn, bad_words=((7,), (8, 9))), top_k=4, mode="processed_logprobs"),
        request("7", texts[7], SamplingParams(**drawn, grammar=form), top_k=4, mode="tempered_logprobs"),
        request("8", texts[8], SamplingParams(**drawn), top_k=1, **named),
    ]
    with mode:
        run(core, everything)
    assert mode.calls > 100
    assert len(reads) == core.stats().steps


def test_the_wall_test_can_fail() -> None:
    with NoReads(), pytest.raises(AssertionError, match="outside readback"):
        torch.ones(3).sum().item()
