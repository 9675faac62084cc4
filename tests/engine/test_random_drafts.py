"""Random requests in engines that draft, each held bit by bit to what it does alone without drafts.

The requests are those of test_random_steps. Drafters look up n-grams, or know what each request will say and are right,
wrong, right for a while, or propose ends and ids that the request forbids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from neper.engine.core import EngineCore
from neper.engine.draft.depth import Depth
from neper.engine.draft.drafting import Drafting
from neper.engine.plan.sequence import Sequence
from neper.engine.settings import EngineSettings
from neper.engine.start import draft_model
from neper.engine.step.runner import BegunStep
from neper.types import SamplingParams
from tests.engine.test_random_steps import ASKED, BYTES_OF_A_BLOCK, END, ENGINES, QUICK, QUIET, Asked, Engines, same
from tests.helpers.engine import prompts, request, run
from tests.helpers.exact_decoder import POISON, ExactDecoder, ExactPredictor
from tests.helpers.tiny import VOCAB_SIZE

RIGHT = 100  # more tokens than any request has


@dataclass(frozen=True)
class Habit:
    """What a drafter proposes: so many right tokens, then others.

    Attributes:
        then: "" = nothing more, "wrong" = the next id to the right one, "end" = ids that end replies, "any" = others,
            "none" = some that are no ids.
    """

    right: int
    then: str

    def tokens(self, right: list[int], most: int) -> list[int]:
        rest = right[self.right :]
        others = {
            "": [],
            "wrong": [(token_id + 1) % VOCAB_SIZE for token_id in rest] or [7],
            "end": [END, *range(3, 12), *rest],
            "any": [VOCAB_SIZE - 1, 0, 5, 5, 6, *rest],
            "none": [-1, 5, VOCAB_SIZE],
        }
        return (right[: self.right] + others[self.then])[:most]


HABITS = st.sampled_from(
    [
        Habit(RIGHT, ""),
        Habit(RIGHT, ""),
        Habit(0, "wrong"),
        Habit(2, "wrong"),
        Habit(1, "end"),
        Habit(3, "any"),
        Habit(2, "none"),
    ]
)


class Knowing:
    """A drafter that knows the replies: by prompt, parameters and scores, since names are not kept."""

    writes = False

    def __init__(self, replies: Mapping[bytes, list[int]], habit: Habit) -> None:
        self._replies = replies
        self._habit = habit
        self.told: Counter[str] = Counter()

    def ready(self, seq: Sequence) -> bool:
        return True

    def observe(self, step: BegunStep) -> None:
        self.told["observed"] += 1

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        return {
            seq: self._habit.tokens(self._replies[key(seq.request)][len(seq.token_ids) - seq.num_prompt_tokens :], most)
            for seq, most in wanted.items()
        }

    def accepted(self, seq: Sequence, num_accepted: int) -> None:
        self.told["accepted"] += num_accepted

    def forget(self, seq: Sequence) -> None:
        self.told["forgotten"] += 1


def key(request: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(request, request_id="", prediction_token_ids=()))


@pytest.fixture(scope="module")
def engines(tiny_dir: Callable[..., Path]) -> Engines:
    return Engines(tiny_dir("llama"))


# Models that draft: the model itself, and one with other weights.
MODELS = {"draft:itself": 0, "draft:other": 1}


def load_predictor(target: ExactDecoder, _: Any, chosen: EngineSettings) -> ExactPredictor:
    target.keep_residual(chosen.max_step_tokens + chosen.max_num_seqs * (1 + chosen.draft_tokens))
    return ExactPredictor(target, draft_model.settings(chosen, target).max_step_tokens)


@pytest.fixture(autouse=True)
def draft_models(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = {name: ExactDecoder(engines._source.config, seed) for name, seed in MODELS.items()}
    monkeypatch.setattr(draft_model, "find", lambda name, *_: name)
    monkeypatch.setattr(draft_model, "load", lambda name, *_: decoders[f"draft:{name}"])
    monkeypatch.setattr(draft_model, "check_predictor", lambda _: None)
    monkeypatch.setattr(draft_model, "load_predictor", load_predictor)


def speculative(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """An engine's fields. A draft model has a cache of its own, of as many blocks; a prediction layer has one layer."""
    memory = fields["kv_cache_memory"] * {"ngram": 2, "mtp": 3}.get(name, 4) // 2
    return fields | {"speculative": name, "kv_cache_memory": memory}


@pytest.mark.slow
@pytest.mark.rounds(QUICK)
def test_drafts_change_nothing(engines: Engines, rounds: int) -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=rounds, derandomize=rounds == QUICK, **QUIET)
    @given(
        items=ASKED,
        fields=ENGINES,
        drafter=st.one_of(st.sampled_from(["ngram", "mtp", *MODELS]), HABITS),
        most=st.sampled_from([1, 2, 4, 16]),
        eager=st.booleans(),
        predicted=st.sampled_from([0, 3, 50]),
    )
    def check(
        items: list[Asked], fields: dict[str, Any], drafter: str | Habit, most: int, eager: bool, predicted: int
    ) -> None:
        note(f"engine: {fields}, drafter: {drafter}, most: {most}, eager: {eager}, predicted: {predicted}")
        for item in items:
            note(f"request: {item}")
        alone = {id(item.request): engines.alone(item.request) for item in items}
        replies = {key(item.request): alone[id(item.request)].token_ids for item in items}

        def prepare(core: EngineCore) -> None:
            if isinstance(drafter, Habit):
                knowing = Knowing(replies, drafter)
                core._drafting = Drafting(knowing, most=most, rows=core.settings.draft_rows, vocab_size=VOCAB_SIZE)
            cores.append(core)

        asked = [item for item in items if item.request.sampling.seed is not None or item.request.sampling.greedy]
        wants = {id(item): alone[id(item.request)] for item in asked}
        if predicted:  # a part of the reply, with an id between that is not in it
            for number, item in enumerate(asked):
                want = wants[id(item)]
                ids = (*want.token_ids[:predicted], 9, *want.token_ids[predicted:])
                request = msgspec.structs.replace(item.request, prediction_token_ids=ids)
                asked[number] = replace(item, request=request)
                wants[id(asked[number])] = want
        for overlap in (False, True):
            note(f"overlap: {overlap}")
            cores: list[EngineCore] = []
            with pytest.MonkeyPatch.context() as patch:
                if eager:
                    patch.setattr(Depth, "wanted", most)
                config = speculative(drafter if isinstance(drafter, str) else "ngram", fields)
                done = engines.together(asked, prepare=prepare, overlap=overlap, draft_tokens=most, **config)
                for item, got in done:
                    want = wants[id(item)] if id(item) in wants else alone_of(item, asked, wants)
                    same(item, got, want)
            counts.update(asdict(cores[0]._drafting.counters))

    check()
    # It could not fail without drafts of both kinds.
    assert counts["accepted_tokens"] > rounds
    assert counts["draft_tokens"] > counts["accepted_tokens"] + rounds / 4


def alone_of(item: Asked, asked: list[Asked], wants: Mapping[int, Any]) -> Any:
    """What the request of one that came back does alone."""
    return next(wants[id(other)] for other in asked if other.request is item.request)


def test_what_was_computed_of_rejected_drafts_is_never_reused(engines: Engines) -> None:
    """Replies that end in every place of a block, beside rejected drafts; then prompts that find those blocks."""
    core = engines.make(speculative="ngram", draft_tokens=4)
    for seed in range(3):
        prompt = prompts(1, 6, seed=seed)[0]
        whole = engines.alone(request("whole", prompt, SamplingParams(temperature=0.0, max_tokens=24))).token_ids
        for last in range(1, 14):
            stopped = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(whole[last],))
            asked = request("first", prompt, stopped)
            reply = engines.alone(asked).token_ids
            wrong = {key(asked): [(token_id + 1) % VOCAB_SIZE for token_id in whole]}
            core._drafting = Drafting(Knowing(wrong, Habit(RIGHT, "")), most=4, rows=16, vocab_size=VOCAB_SIZE)
            assert run(core, [asked])["first"].token_ids == reply
            core._drafting = None
            later = request("later", [*prompt, *reply, 11, 12])
            assert run(core, [later])["later"].token_ids == engines.alone(later).token_ids
    assert core.stats().cached_tokens > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("drafter", "prefix_caching"), [("draft:itself", True), ("mtp", False)])
def test_what_drafts_as_the_model_does_is_always_right(
    engines: Engines, drafter: str, prefix_caching: bool, overlap: bool
) -> None:
    """Its cache must hold what it read: prompts in pieces, drafts that were accepted, blocks that it finds again.

    A prediction layer may be wrong after a block that it finds again, whose last position was another token's.
    """
    fields = {"kv_cache_memory": 16 * BYTES_OF_A_BLOCK, "max_num_batched_tokens": 16, "overlap": overlap}
    core = engines.make(**speculative(drafter, fields), draft_tokens=4, prefix_caching=prefix_caching)
    stem = prompts(1, 9, seed=5)[0]
    asked = [
        request(
            f"{number}-",
            stem[: 9 - number % 6] + prompts(1, 5, seed=number)[0],
            SamplingParams(temperature=number % 2, seed=number, top_p=0.9, max_tokens=17),
            top_k=2,
        )
        for number in range(12)
    ]
    alone = {item.request_id: engines.alone(item).tokens for item in asked}
    # Nothing follows a token that poisons its context, so drafts after it are wrong.
    asked = [item for item in asked if POISON not in alone[item.request_id].token_ids]
    for _ in range(2):
        assert {name: got.tokens for name, got in run(core, asked).items()} == {
            item.request_id: alone[item.request_id] for item in asked
        }
    stats = core.stats()
    assert stats.preemptions > 0
    assert (stats.cached_tokens > 0) is prefix_caching
    assert stats.accepted_tokens == stats.draft_tokens > 100
