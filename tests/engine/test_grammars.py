"""Grammars in the engine: what they let through, what the scores are of, and that nobody else notices."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from neper.engine.core import EngineCore
from neper.text import grammar
from neper.text.matcher import Grammars, Matcher
from neper.text.tokenizer import Tokenizer
from neper.types import Fault, FinishReason, LogprobParams, Request, SamplingParams
from tests.engine.test_view_rows import TOLERANCE, V, views
from tests.helpers.engine import Result, make_core, prompts, request, run

END = 2
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "dog", "über"]}, "ok": {"type": "boolean"}, "n": {"enum": [1, 20, 300]}},
    "required": ["name", "ok", "n"],
    "additionalProperties": False,
}
JSON = grammar.json_schema(SCHEMA).text()
CHOICES = ["positive", "pos", "negative", "日本"]
CHOICE = grammar.choice(CHOICES).text()
ONLY_P = grammar.choice(["p"]).text()


@pytest.fixture(scope="module")
def llama(tiny_dir: Callable[..., Path]) -> Path:
    return tiny_dir("llama")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def core(llama: Path, request: pytest.FixtureRequest) -> EngineCore:
    return make_core(llama, overlap=request.param, max_num_batched_tokens=32, max_num_seqs=16)


@pytest.fixture(scope="module")
def tokenizer(llama: Path) -> Tokenizer:
    return Tokenizer.from_directory(llama)


def guided(
    name: str, prompt: list[int], text: str | None = None, logprobs: LogprobParams | None = None, **sampling: Any
) -> Request:
    values = {"temperature": 1.0, "seed": 1, "max_tokens": 120, "grammar": text} | sampling
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**values),
        logprobs=logprobs or LogprobParams(),
        eos_token_ids=(END,),
    )


def text_of(tokenizer: Tokenizer, result: Result) -> str:
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids[-1] == END
    return b"".join(map(tokenizer.token_bytes, result.token_ids[:-1])).decode()


def test_texts_follow_their_grammars(core: EngineCore, tokenizer: Tokenizer) -> None:
    texts = prompts(10, 12, seed=1)
    items = [guided(f"json {i}", text, JSON, seed=i) for i, text in enumerate(texts[:4])]
    items += [guided(f"choice {i}", text, CHOICE, temperature=float(i % 2)) for i, text in enumerate(texts[4:7])]
    items += [request(f"free {i}", text, top_k=3) for i, text in enumerate(texts[7:])]
    results = run(core, items)
    for name, result in results.items():
        if name.startswith("json"):
            jsonschema.validate(json.loads(text_of(tokenizer, result)), SCHEMA)
        elif name.startswith("choice"):
            assert text_of(tokenizer, result) in CHOICES
        else:
            assert result.finish_reason is FinishReason.LENGTH
    # A neighbour's tokens are those that it has alone.
    for i, text in enumerate(texts[7:]):
        assert run(core, [request("alone", text)])["alone"].token_ids == results[f"free {i}"].token_ids


def test_overlap_changes_nothing(llama: Path) -> None:
    texts = prompts(6, 12, seed=1)

    def results(overlap: bool) -> dict[str, Result]:
        core = make_core(llama, overlap=overlap, max_num_batched_tokens=32)
        pair = ((5, 6),)
        items = [guided(f"{i}", text, JSON, LogprobParams(top_k=4), seed=i) for i, text in enumerate(texts[:3])]
        items += [request("free", texts[3], SamplingParams(temperature=0.0, max_tokens=30))]
        items += [request("words", texts[4], SamplingParams(temperature=0.0, max_tokens=30, bad_words=pair))]
        items += [request("short", texts[5], SamplingParams(temperature=0.0, max_tokens=3), top_k=2)]
        return run(core, items)

    plain, overlapped = results(False), results(True)
    for name, result in plain.items():
        assert result.token_ids == overlapped[name].token_ids
        assert result.finish_reason == overlapped[name].finish_reason
        if result.tokens.top_k is not None:
            assert np.abs(result.tokens.logprob - overlapped[name].tokens.logprob).max() <= TOLERANCE


def test_raw_scores_are_the_models_own_and_processed_ones_of_the_legal_tokens(core: EngineCore, llama: Path) -> None:
    [prompt] = prompts(1, 12, seed=3)
    raw, processed = LogprobParams(top_k=5), LogprobParams(top_k=8, mode="processed_logprobs")
    results = run(core, [guided("raw", prompt, CHOICE, raw), guided("processed", prompt, CHOICE, processed)])
    assert results["raw"].token_ids == results["processed"].token_ids
    output = results["raw"].token_ids
    free = Request(request_id="", prompt_token_ids=prompt, logprobs=raw)
    for place, view in enumerate(views(free, output, llama)):
        row = results["raw"].tokens
        assert abs(row.logprob[place] - view.logprobs[output[place]]) <= TOLERANCE
        assert row.top_ids[place].tolist() == view.listed(free)
        legal = [i for i in results["processed"].tokens.top_ids[place].tolist() if i >= 0]
        exact = view.logprobs[legal] - np.log(np.exp(view.logprobs[legal]).sum())
        got = results["processed"].tokens.top_logprobs[place][: len(legal)]
        assert len(legal) < 8, "all that is legal should be listed"
        assert output[place] in legal
        assert np.abs(got - exact).max() <= TOLERANCE
        assert np.isfinite(got).all()


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(core: EngineCore) -> None:
    [prompt, other] = prompts(2, 12, seed=3)
    bad = json.dumps({"grammars": [{"lark_grammar": "start: nothing"}]})
    results = run(core, [guided("bad", prompt, bad), guided("good", other, CHOICE)])
    assert results["bad"].finish_reason is FinishReason.ERROR
    assert "nothing" in (results["bad"].last.error or "")
    assert results["good"].finish_reason is FinishReason.STOP


def test_a_request_can_leave_while_its_grammar_is_compiled(core: EngineCore) -> None:
    [prompt] = prompts(1, 12, seed=3)
    core.add(guided("a", prompt, JSON))
    assert core.has_work
    core.abort("a")
    assert not core.has_work
    core.check()
    core.add(guided("b", prompt, JSON))
    assert [chunk.request_id for chunk in core.fail_all("it broke")] == ["b"]
    assert not core.has_work


def test_a_preempted_sequence_goes_on_where_its_grammar_is(llama: Path, tokenizer: Tokenizer) -> None:
    texts = prompts(4, 30, seed=1)
    items = [guided(f"{i}", text, JSON, seed=i) for i, text in enumerate(texts)]
    room = run(make_core(llama), items)
    core = make_core(llama, kv_cache_memory=9 * 16 * 2 * 2 * 2 * 16 * 4, max_model_len=128)
    tight = run(core, items)
    assert core.stats().preemptions > 0
    for name, result in tight.items():
        jsonschema.validate(json.loads(text_of(tokenizer, result)), SCHEMA)
        assert result.token_ids == room[name].token_ids


def test_what_is_allowed_and_fits_the_grammar(core: EngineCore, tokenizer: Tokenizer) -> None:
    """Both bind: what neither bans may come."""
    [prompt] = prompts(1, 12, seed=3)
    allowed = tuple(i for i in range(V) if i == END or b"n" not in tokenizer.token_bytes(i))
    result = run(core, [guided("a", prompt, CHOICE, allowed_token_ids=allowed)])["a"]
    assert text_of(tokenizer, result) in ("positive", "pos", "日本")


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({"grammar": ONLY_P, "allowed_token_ids": (40, 41)}, 0),  # neither spells it
        ({"grammar": ONLY_P, "min_tokens": 100}, 1),  # it is there, and must not end
        ({"grammar": ONLY_P, "logit_bias": {END: -math.inf}}, 1),
        ({"min_tokens": 3, "allowed_token_ids": (END,)}, 0),
        ({"allowed_token_ids": (5, 6), "logit_bias": {5: -math.inf, 6: -math.inf}}, 0),
        ({"allowed_token_ids": (5,), "bad_words": ((5, 5),)}, 1),
    ],
    ids=str,
)
def test_fields_that_leave_no_token_end_their_request_alone(
    core: EngineCore, fields: dict[str, Any], made: int
) -> None:
    """Known from the fields, so the request is at fault and not the model."""
    texts = prompts(3, 12, seed=5)
    neighbours = [guided("good", texts[0], JSON, LogprobParams(top_k=3)), request("free", texts[1], top_k=2)]
    alone = run(core, neighbours)
    for logprobs in (LogprobParams(), LogprobParams(top_k=2), LogprobParams(top_k=2, mode="processed_logprobs")):
        bad = guided("bad", texts[2], logprobs=logprobs, **fields)
        results = run(core, [bad, *neighbours])
        last = results["bad"].last
        assert last.finish_reason is FinishReason.ERROR
        assert last.fault is Fault.REQUEST
        assert "together leave no token" in (last.error or "")
        assert len(results["bad"].token_ids) == made
        for name, result in alone.items():
            assert results[name].token_ids == result.token_ids


def test_case_112_a_grammar_that_takes_too_long_ends_its_request_alone(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = prompts(3, 12, seed=5)
    slow = grammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 50}).text()
    alone = run(core, [guided("good", texts[0], JSON), request("free", texts[1])])
    real = Matcher._charge

    def charge(self: Matcher, seconds: float) -> None:
        if self is by_text.get(slow):
            self._spare -= 0.4
        real(self, 0.0)

    by_text: dict[str, Matcher] = {}
    make = Grammars.matcher

    def remember(self: Grammars, text: str) -> Matcher:
        by_text[text] = make(self, text)
        return by_text[text]

    monkeypatch.setattr(Matcher, "_charge", charge)
    monkeypatch.setattr(Grammars, "matcher", remember)
    results = run(core, [guided("slow", texts[2], slow), guided("good", texts[0], JSON), request("free", texts[1])])
    last = results["slow"].last
    assert last.finish_reason is FinishReason.ERROR
    assert last.fault is Fault.REQUEST
    assert "the grammar cannot be followed any further: it takes more than" in (last.error or "")
    for name, result in alone.items():
        assert results[name].token_ids == result.token_ids
        assert results[name].finish_reason == result.finish_reason
