"""Case 72: what repeats under one seed, and that nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from neper import LLM, SamplingParams
from tests.cases.conftest import CHAT, COMPLETIONS, RealServer
from tests.helpers.invariants import Json

FIXED: Json = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}


def replies(server: RealServer, path: str, **body: object) -> list[tuple[int, ...]]:
    choices = server.full(path, **FIXED, **body)["choices"]
    return [tuple(choice["token_ids"]) for choice in choices]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_72_choices_over_seeds_are_samples_of_their_own(tiny: RealServer, path: str) -> None:
    found = {seed: replies(tiny, path, seed=seed, n=3) for seed in (5, 6, 7, -1, 2**63 - 1)}
    every = [reply for choices in found.values() for reply in choices]
    assert len(set(every)) == len(every) == 15
    # The first choice is what n: 1 gives, and each is repeated.
    for seed in (5, 6):
        assert replies(tiny, path, seed=seed) == found[seed][:1]
        assert replies(tiny, path, seed=seed, n=2) == found[seed][:2]
        assert replies(tiny, path, seed=seed, n=3) == found[seed]


def test_case_72_prompts_of_a_batch_draw_for_themselves(tiny: RealServer) -> None:
    prompts = ["Hello", "Hello", "Hello"]
    found = {seed: replies(tiny, COMPLETIONS, prompt=prompts, seed=seed, n=2) for seed in (5, 6)}
    every = [reply for choices in found.values() for reply in choices]
    assert len(set(every)) == len(every) == 12
    # A prompt's choices stay as they are when there are more of them.
    assert replies(tiny, COMPLETIONS, prompt=prompts, seed=5) == found[5][::2]
    assert replies(tiny, COMPLETIONS, prompt="Hello", seed=5, n=2) == found[5][:2]


def test_case_72_prompts_of_a_call_draw_for_themselves(tiny_dir: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_dir("llama")), device="cpu", dtype="float32", num_threads=1)

    def ids(count: int, seed: int) -> list[tuple[int, ...]]:
        sampling = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, seed=seed)
        return [tuple(reply.token_ids) for reply in llm.generate(["Hello"] * count, sampling)]

    found = ids(3, 5) + ids(3, 6)
    assert len(set(found)) == 6
    assert ids(3, 5) == found[:3]
    assert ids(1, 5) == found[:1]
    # Seeds that are named for each prompt are those prompts' own.
    each = [SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, seed=seed) for seed in (5, 6, 5)]
    replied = [tuple(reply.token_ids) for reply in llm.generate(["Hello"] * 3, each)]
    assert replied == [found[0], found[3], found[0]]
