"""A step that is begun before the one before it is read: what ends in between changes nothing that was planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neper.engine import core as core_module
from neper.engine.plan.sequence import Sequence
from neper.engine.step.readback import StepOutput
from neper.engine.step.runner import BegunStep
from neper.text import grammar
from neper.types import FinishReason, SamplingParams
from tests.helpers.engine import Result, assert_same_scores, make_core, prompts, request, run

CHOICE = grammar.choice(["one answer", "another answer", "日本"]).text()
# Each makes a step read the one before it in the middle, as long as the request runs.
WAITS: dict[str, dict[str, Any]] = {"grammar": {"grammar": CHOICE}, "bad word": {"bad_words": ((5, 6),)}}
PENALTY = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2}


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 9} | fields))


@pytest.mark.parametrize("wait", WAITS)
def test_case_70_a_penalised_request_ends_while_its_next_step_is_begun(
    tiny_dir: Callable[..., Path], wait: str
) -> None:
    directory = tiny_dir("llama")
    texts = prompts(4, 12, seed=7)
    free = run(make_core(directory), [request("a", texts[1], sampling(**PENALTY))])["a"].token_ids
    items = [
        request("waits", texts[0], sampling(**WAITS[wait]), top_k=3, eos=(2,)),
        request("ends", texts[1], sampling(**PENALTY, stop_token_ids=(free[3],)), top_k=3),
        request("both", texts[2], sampling(**WAITS[wait] | PENALTY | {"max_tokens": 4}), top_k=3, eos=(2,)),
        request("lives on", texts[3], sampling(**PENALTY), top_k=3),
    ]
    together = run(make_core(directory, overlap=True), items)
    for item in items:
        same(together[item.request_id], run(make_core(directory, overlap=False), [item])[item.request_id])
    assert together["ends"].finish_reason is FinishReason.STOP


def test_case_70_counts_of_another_slot_stay_when_a_sequence_ends(tiny_dir: Callable[..., Path]) -> None:
    """No slot is named by -1: with as many requests as slots, the last slot's counts are those of its own request."""
    directory = tiny_dir("llama")
    texts = prompts(3, 12, seed=9)
    free = run(make_core(directory), [request("a", texts[1], sampling(**PENALTY))])["a"].token_ids
    fields = [WAITS["bad word"], PENALTY | {"stop_token_ids": (free[3],)}, PENALTY | {"max_tokens": 12}]
    items = [
        request(str(i), text, sampling(**field), top_k=2)
        for i, (text, field) in enumerate(zip(texts, fields, strict=True))
    ]
    together = run(make_core(directory, overlap=True, max_num_seqs=3), items)
    for item in items:
        same(together[item.request_id], run(make_core(directory), [item])[item.request_id])


def same(got: Result, want: Result) -> None:
    assert got.finish_reason is want.finish_reason, got.last.error
    assert_same_scores(got.tokens, want.tokens, tolerance=1e-4)


class Watched(Sequence):
    """A sequence whose progress must not be looked at while `closed`: only its tokens and its matcher are awaited."""

    closed = False
    PROGRESS = frozenset(
        {
            "slot",
            "block_table",
            "num_pending",
            "num_tokens",
            "num_computed_tokens",
            "num_uncomputed_tokens",
            "num_preemptions",
            "num_hashed_blocks",
            "num_cached_tokens",
            "next_score",
            "scores_left",
        }
    )

    def __getattribute__(self, name: str) -> Any:
        if Watched.closed and name in Watched.PROGRESS:
            raise AssertionError(f"{name} of a live sequence is read in the second half of a step")
        return super().__getattribute__(name)


@pytest.mark.parametrize("scoring", ["device", "host"])
def test_case_70_the_second_half_of_a_step_reads_no_sequences_progress(
    tiny_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, scoring: str
) -> None:
    monkeypatch.setattr(core_module, "Sequence", Watched)
    core = make_core(tiny_dir("llama"), overlap=True, max_num_batched_tokens=16, scoring=scoring, max_logprobs=-1)
    plain_finish = core.runner.finish

    def finish(step: BegunStep) -> StepOutput:
        monkeypatch.setattr(Watched, "closed", True)
        try:
            return plain_finish(step)
        finally:
            monkeypatch.setattr(Watched, "closed", False)

    monkeypatch.setattr(core.runner, "finish", finish)
    drawn = {"temperature": 1.0, "seed": 1, "top_p": 0.9, "top_k": 30}
    fields: list[dict[str, Any]] = [
        WAITS["grammar"] | {"max_tokens": 30},
        WAITS["bad word"] | PENALTY,
        PENALTY | drawn | {"max_tokens": 3},
        {"logit_bias": {5: 1.0}, "min_tokens": 2, "allowed_token_ids": (3, 4, 5, 6)},
        drawn,
    ]
    items = [
        request(str(i), text, sampling(**field), top_k=(3, 100, None, 0, 3)[i], prompt_top_k=(None, 2)[i % 2], eos=(2,))
        for i, (text, field) in enumerate(zip(prompts(5, 20), fields, strict=True))
    ]
    results = run(core, items)
    assert all(result.finish_reason is not FinishReason.ERROR for result in results.values())
