"""Random requests of every kind that can meet in a step, each held to what it does alone, bit by bit.

The model is an exact one (`tests/helpers/exact_decoder`), so a difference of one bit is a fault: of a row that took
another's fields, of a cache slot, of a step that was planned before the end of a sequence was known. Failures shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from neper.config import EngineConfig
from neper.engine.core import EngineCore
from neper.models.source import ModelSource, resolve
from neper.text import grammar
from neper.text import matcher as at_work
from neper.types import LOGPROBS_MODES, FinishReason, LogprobParams, PackedRows, Request, SamplingParams
from tests.helpers.engine import Result, prompts, wait_for_grammars
from tests.helpers.exact_decoder import POISON, ExactDecoder
from tests.helpers.tiny import VOCAB_SIZE

END = 2
MAX_MODEL_LEN = 40
BLOCK = 4
BYTES_OF_A_BLOCK = 2 * 2 * BLOCK * 2 * 16 * 4
GRAMMARS = [
    grammar.choice(["one answer", "another answer", "日本"]).text(),
    grammar.regex("[a-z ]{2,6}[0-9]").text(),
    grammar.json_schema({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}).text(),
]
STEM = list(range(11, 23))
FEW = (5, 6, 8, 9, 10)  # few ids to sample from: bad words are met
QUICK = 40  # examples that are the same in every run
QUIET: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": list(HealthCheck),
    "phases": [phase for phase in Phase if phase is not Phase.explain],
}

ID = st.integers(3, VOCAB_SIZE - 1)


def often(off: Any, on: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(off), on)


def seldom(off: Any, on: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(off), st.just(off), st.just(off), on)


# Some begin alike, and share blocks.
PROMPTS = st.builds(
    lambda shared, own, seed: STEM[:shared] + prompts(1, own, seed=seed)[0],
    st.sampled_from([0, 5, 9, 12]),
    st.integers(1, 8),
    st.integers(0, 9),
)
PENALTIES = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.7, -1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
    }
)
DRAWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.4, 1.0, 1.7]),
        "seed": st.integers(0, 3),
        "top_k": st.sampled_from([0, 0, 1, 9, 70]),
        "top_p": st.sampled_from([1.0, 1.0, 0.8]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05]),
        "top_n_sigma": st.sampled_from([0.0, 0.0, 1.5]),
    }
)
GRAMMAR = st.fixed_dictionaries({"grammar": st.sampled_from(GRAMMARS)})
MASKS = st.one_of(
    GRAMMAR,
    st.fixed_dictionaries({"allowed_token_ids": st.lists(ID, min_size=1, max_size=30).map(tuple)}),
    st.fixed_dictionaries({"bad_words": st.lists(ID.map(lambda i: (i,)), min_size=1, max_size=9).map(tuple)}),
    st.fixed_dictionaries(
        {
            "allowed_token_ids": st.just(FEW),
            "bad_words": st.lists(
                st.lists(st.sampled_from(FEW), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
            ).map(tuple),
        }
    ),
)
# Every fourth or second id ends a reply, so that many end while others go on.
STOPS = st.sampled_from([(), tuple(range(3, VOCAB_SIZE, 4)), tuple(range(4, VOCAB_SIZE, 2)), (5,)])
BIAS = st.dictionaries(st.one_of(st.just(END), ID), st.sampled_from([8.0, -4.0, float("-inf")]), max_size=3)
LOGPROBS = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([0, 1, 3, 20, 70, -1]),
        "mode": st.sampled_from(LOGPROBS_MODES),
        "token_ids": often((), st.lists(ID, min_size=1, max_size=9).map(tuple)),
    }
)
PROMPT_SCORES = st.fixed_dictionaries(
    {
        "prompt_top_k": st.sampled_from([0, 2, 70, -1]),
        "prompt_start": st.sampled_from([1, 4, 8, 11]),
        "prompt_logprob_token_ids": seldom((), st.lists(ID, min_size=1, max_size=9).map(tuple)),
    }
)


@dataclass(frozen=True)
class Asked:
    """A request without its name, and what happens to it.

    Attributes:
        arrives: the step before which it is added.
        leaves: after how many steps more it is aborted; None = never.
        returns: it is added once more, under the same id, when it was aborted.
    """

    request: Request
    arrives: int
    leaves: int | None
    returns: bool


@st.composite
def asked(draw: st.DrawFn, masks: st.SearchStrategy[dict[str, Any]]) -> list[Asked]:
    """Some choices of one prompt."""
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": draw(st.integers(1, 20))}
    fields |= draw(often({}, DRAWS)) | draw(often({}, PENALTIES)) | draw(masks)
    fields["logit_bias"] = draw(seldom({}, BIAS))
    fields["stop_token_ids"] = draw(STOPS)
    fields["min_tokens"] = draw(seldom(0, st.integers(1, 4)))
    fields["ignore_eos"] = draw(seldom(False, st.just(True)))
    logprobs = draw(often({}, LOGPROBS)) | draw(often({}, PROMPT_SCORES))
    if fields.get("allowed_token_ids"):
        logprobs["token_ids"] = ()
    if "prompt_top_k" in logprobs and draw(st.booleans()):
        fields["max_tokens"] = 0
    prompt = draw(PROMPTS)
    if draw(st.integers(0, 15)) == 15:
        prompt.append(POISON)
    if fields["max_tokens"] and draw(seldom(False, st.just(True))):
        fields["max_tokens"] = None  # to the end of the context
    copies = []
    for copy in range(draw(st.sampled_from([1, 1, 1, 1, 3]))):
        sampling = SamplingParams(**fields | ({"seed": fields["seed"] + copy} if "seed" in fields else {}))
        copies.append(
            Asked(
                Request(
                    request_id="",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    logprobs=LogprobParams(**logprobs),
                    eos_token_ids=(END,),
                ),
                arrives=draw(st.integers(0, 6)),
                leaves=draw(seldom(None, st.integers(0, 5))),
                returns=draw(st.booleans()),
            )
        )
    return copies


def requests(masks: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[Asked]]:
    return (
        st.integers(1, 6)
        .flatmap(lambda count: st.lists(asked(masks), min_size=count, max_size=count))
        .map(lambda groups: [item for group in groups for item in group])
    )


ASKED = requests(often({}, MASKS))
GUIDED = requests(st.one_of(GRAMMAR, GRAMMAR, MASKS, st.just({})))
# At least a whole context fits: 10 blocks and the null block.
ENGINES = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([64, 16, 5, 2, 1]),
        "max_num_seqs": st.sampled_from([8, 8, 3, 2]),
        "kv_cache_memory": st.sampled_from([11, 12, 16, 80]).map(lambda blocks: blocks * BYTES_OF_A_BLOCK),
        "prefix_caching": st.sampled_from([True, True, False]),
        "scoring": st.sampled_from(["device", "host"]),
    }
)


@dataclass
class Running:
    """A request in the engine.

    Attributes:
        steps: how many steps it has been there.
    """

    asked: Asked
    result: Result = field(default_factory=Result)
    steps: int = 0


class Engines:
    """Makes engines that share a decoder and compiled vocabularies; one of them computes requests alone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._source: ModelSource = resolve(str(directory))
        self._decoder = ExactDecoder(self._source.config)
        self._grammars: dict[Any, Any] = {}
        self._calm = self.make(overlap=False, max_num_batched_tokens=512, max_num_seqs=2, prefix_caching=False)

    def make(self, **fields: Any) -> EngineCore:
        values = {
            "device": "cpu",
            "dtype": "float32",
            "num_threads": 1,
            "max_model_len": MAX_MODEL_LEN,
            "block_size": BLOCK,
            "max_logprobs": -1,
            "kv_cache_memory": 80 * BYTES_OF_A_BLOCK,
        } | fields
        # One that a prediction layer reads keeps hidden states from then on, for that engine's steps.
        decoder = ExactDecoder(self._source.config) if fields.get("speculative") == "mtp" else self._decoder
        core = EngineCore(EngineConfig(model=str(self._directory), **values), self._source, decoder=decoder)
        core._grammars._grammars = self._grammars
        return core

    def alone(self, request: Request) -> Result:
        """What a request does in an engine of its own, step after step."""
        result = Result()
        self._calm.add(msgspec.structs.replace(request, request_id="alone"))
        wait_for_grammars(self._calm)
        while self._calm.has_work:
            result.chunks += self._calm.step()
        return result

    def together(
        self, items: list[Asked], *, prepare: Callable[[EngineCore], None] | None = None, **fields: Any
    ) -> Iterator[tuple[Asked, Result]]:
        """What each did, an aborted one up to there. `prepare` may change the engine first."""
        core = self.make(**fields)
        if prepare is not None:
            prepare(core)
        waiting, running, step = dict(enumerate(items)), dict[str, Running](), 0
        while waiting or core.has_work:
            for number, item in list(waiting.items()):
                if item.arrives <= step:
                    del waiting[number]
                    name = f"{number % 3}-{number}"  # some are choices of one HTTP request
                    running[name] = Running(item)
                    core.add(msgspec.structs.replace(item.request, request_id=name))
            for name, entry in list(running.items()):
                ended = entry.result.chunks and entry.result.finish_reason is not None
                if entry.steps == entry.asked.leaves and not ended:
                    core.abort(name)
                    yield entry.asked, entry.result
                    del running[name]
                    if entry.asked.returns:
                        again = Asked(entry.asked.request, step, None, False)
                        running[name] = Running(again)
                        core.add(msgspec.structs.replace(again.request, request_id=name))
            wait_for_grammars(core)
            chunks = core.step()
            core.check()
            assert len({chunk.request_id for chunk in chunks}) == len(chunks), "two chunks of a request in a step"
            for chunk in chunks:
                result = running[chunk.request_id].result
                assert not result.chunks or result.finish_reason is None, "a chunk after the last"
                result.chunks.append(chunk)
            for entry in running.values():
                entry.steps += 1
            step += 1
            assert step < 5000, "it does not end"
        assert core.stats().free_blocks == core.stats().total_blocks, "a block leaked"
        for entry in running.values():
            yield entry.asked, entry.result


@pytest.fixture(scope="module")
def engines(tiny_dir: Callable[..., Path]) -> Engines:
    return Engines(tiny_dir("llama"))


def data(parts: Iterator[PackedRows | None]) -> bytes:
    return b"".join(part.data for part in parts if part is not None)


def hold_to_alone(engines: Engines, items: list[Asked], fields: dict[str, Any], *, slow: bool = False) -> None:
    note(f"engine: {fields}")
    for item in items:
        note(f"request: {item}")
    alone = {id(item.request): engines.alone(item.request) for item in items}
    for overlap in (False, True):
        note(f"overlap: {overlap}")
        with pytest.MonkeyPatch.context() as patch:
            if slow:
                patch.setattr(at_work, "QUICK_SECONDS", -1.0)
            for item, got in engines.together(items, overlap=overlap, **fields):
                same(item, got, alone[id(item.request)])


def same(item: Asked, got: Result, want: Result) -> None:
    tokens, prompt = data(c.tokens for c in got.chunks), data(c.prompt for c in got.chunks)
    want_tokens, want_prompt = data(c.tokens for c in want.chunks), data(c.prompt for c in want.chunks)
    left = item.leaves is not None and (not got.chunks or got.finish_reason is None)
    if left or want.finish_reason is FinishReason.ERROR:
        # How a prompt is cut into chunks decides how many of its rows come before the one that fails.
        fails = want.finish_reason is FinishReason.ERROR
        assert want_prompt.startswith(prompt) or (fails and prompt.startswith(want_prompt))
    else:
        assert prompt == want_prompt
    if left:
        assert want_tokens.startswith(tokens)
        return
    assert got.finish_reason is want.finish_reason, (got.last.error, want.last.error)
    assert got.last.error == want.last.error
    assert got.token_ids == want.token_ids
    assert got.last.stop_token_id == want.last.stop_token_id
    assert tokens == want_tokens


@pytest.mark.slow
@pytest.mark.rounds(QUICK)
def test_requests_do_together_what_they_do_alone(engines: Engines, rounds: int) -> None:
    @settings(max_examples=rounds, derandomize=rounds == QUICK, **QUIET)
    @given(items=ASKED, fields=ENGINES)
    def check(items: list[Asked], fields: dict[str, Any]) -> None:
        hold_to_alone(engines, items, fields)

    check()


@pytest.mark.slow
@pytest.mark.rounds(QUICK)
def test_slow_grammars_change_nothing(engines: Engines, rounds: int) -> None:
    """As above, but that every grammar is advanced beside the steps: sequences are parked after each token."""

    @settings(max_examples=rounds, derandomize=rounds == QUICK, **QUIET)
    @given(items=GUIDED, fields=ENGINES)
    def check(items: list[Asked], fields: dict[str, Any]) -> None:
        hold_to_alone(engines, items, fields, slow=True)

    check()
