"""Random candidates among the requests of test_random_steps: each is scored as its text is alone, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from neper.engine.draft.depth import Depth
from neper.types import Fault, FinishReason, LogprobParams, Request, SamplingParams
from tests.engine.test_random_drafts import MODELS, draft_models, speculative
from tests.engine.test_random_steps import (
    ASKED,
    ENGINES,
    ID,
    MAX_MODEL_LEN,
    PROMPTS,
    QUICK,
    QUIET,
    Asked,
    Engines,
    same,
    seldom,
)
from tests.helpers.engine import Result
from tests.helpers.exact_decoder import POISON

__all__ = ["draft_models"]  # a fixture that is used of itself

# Many that begin alike, so that some are the beginning of others.
CANDIDATES = st.lists(
    st.one_of(
        st.lists(ID, min_size=1, max_size=6).map(tuple),
        st.lists(st.sampled_from([5, 6]), min_size=1, max_size=9).map(tuple),
        seldom((5,), st.just((5, POISON, 6))),
    ),
    min_size=1,
    max_size=12,
)


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """Candidates of a prompt; one of them may end at the last place of the context."""
    prompt = draw(PROMPTS) + draw(seldom([], st.just([POISON])))
    candidates = draw(CANDIDATES)
    if draw(st.booleans()):
        candidates.append((candidates[0] * MAX_MODEL_LEN)[: MAX_MODEL_LEN - len(prompt)])
    return Asked(
        Request(request_id="", prompt_token_ids=prompt, candidates=tuple(candidates)),
        arrives=draw(st.integers(0, 6)),
        leaves=draw(seldom(None, st.integers(0, 12))),
        returns=draw(st.booleans()),
    )


def alone(engines: Engines, request: Request) -> list[bytes] | None:
    """The logprobs of each candidate; None where one has a token whose logits are NaN."""
    prompt = request.prompt_token_ids
    found = []
    for candidate in request.candidates:
        result = engines.alone(
            Request(
                request_id="",
                prompt_token_ids=[*prompt, *candidate],
                sampling=SamplingParams(max_tokens=0),
                logprobs=LogprobParams(prompt_top_k=0, prompt_start=len(prompt)),
            )
        )
        if result.finish_reason is FinishReason.ERROR:
            return None
        found.append(result.prompt.logprob.tobytes())
    return found


def scored_as(item: Asked, got: Result, want: list[bytes] | None) -> None:
    found = [scores for chunk in got.chunks for scores in chunk.candidates]
    assert len({scores.place for scores in found}) == len(found)
    left = item.leaves is not None and (not got.chunks or got.finish_reason is None)
    if want is None:
        assert left or (got.finish_reason, got.last.fault) == (FinishReason.ERROR, Fault.LOGITS)
        return
    assert all(bytes(scores.data) == want[scores.place] for scores in found)
    assert left or (got.finish_reason, len(found)) == (FinishReason.LENGTH, len(want))


@pytest.fixture(scope="module")
def engines(tiny_dir: Callable[..., Path]) -> Engines:
    return Engines(tiny_dir("llama"))


@pytest.mark.slow
@pytest.mark.rounds(QUICK)
def test_candidates_are_scored_among_others_as_alone(engines: Engines, rounds: int) -> None:
    @settings(max_examples=rounds, derandomize=rounds == QUICK, **QUIET)
    @given(
        scored=st.lists(asked(), min_size=1, max_size=4),
        others=ASKED,
        random=st.randoms(),
        fields=ENGINES,
        drafter=st.sampled_from(["", "ngram", "mtp", *MODELS]),
    )
    def check(scored: list[Asked], others: list[Asked], random: Any, fields: dict[str, Any], drafter: str) -> None:
        repeatable = [other for other in others if (drawn := other.request.sampling).greedy or drawn.seed is not None]
        items = [*scored, *repeatable]
        random.shuffle(items)
        note(f"engine: {fields}, drafter: {drafter}")
        for item in items:
            note(f"request: {item}")
        scores = {id(item.request): alone(engines, item.request) for item in scored}
        replies = {id(item.request): engines.alone(item.request) for item in repeatable}
        config = speculative(drafter, fields) | {"draft_tokens": 4} if drafter else fields
        for overlap in (False, True):
            note(f"overlap: {overlap}")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Depth, "wanted", 4)
                for item, got in engines.together(items, overlap=overlap, **config):
                    if item.request.candidates:
                        scored_as(item, got, scores[id(item.request)])
                    else:
                        same(item, got, replies[id(item.request)])

    check()
