"""Views, named sets and masks through the engine, against float64 sums over transformers' logits of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from neper.engine.core import EngineCore
from neper.types import FinishReason, LogprobParams, PackedRows, Request, SamplingParams
from tests.helpers.engine import Result, assert_same_scores, make_core, prompts, request, run
from tests.helpers.oracle import Floats, order

V = 384
TOLERANCE = 1e-4
ALLOWED = (7, 300, 45, 7, 99, 383, 200)


@pytest.fixture(scope="module")
def llama(tiny_dir: Callable[..., Path]) -> Path:
    return tiny_dir("llama")


@pytest.fixture(scope="module", params=[{}, {"overlap": True}, {"scoring": "host"}], ids=["plain", "overlap", "host"])
def core(llama: Path, request: pytest.FixtureRequest) -> EngineCore:
    return make_core(llama, max_num_batched_tokens=32, max_num_seqs=16, max_logprobs=-1, **request.param)


def ask(name: str, prompt: list[int], sampling: dict[str, Any], logprobs: dict[str, Any] | None) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**({"max_tokens": 7, "seed": 3} | sampling)),
        logprobs=LogprobParams() if logprobs is None else LogprobParams(**({"top_k": 4} | logprobs)),
    )


FILTERED = {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02}
EDITED = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "logit_bias": {5: 4.0, 9: -3.0}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "off": ({"temperature": 1.0}, None),
    "off, masked": ({"temperature": 0.0, "allowed_token_ids": ALLOWED}, None),
    "raw": ({"temperature": 0.0}, {}),
    "raw, sampled": ({"temperature": 0.8} | EDITED, {"top_k": 20}),
    "tempered": ({"temperature": 0.6, "top_p": 0.5}, {"mode": "tempered_logprobs"}),
    "tempered, greedy": ({"temperature": 0.0}, {"mode": "tempered_logprobs"}),
    "processed": (FILTERED | EDITED, {"mode": "processed_logprobs", "top_k": 12}),
    "processed, filters": (FILTERED, {"mode": "processed_logprobs"}),
    "processed, greedy": ({"temperature": 0.0} | EDITED, {"mode": "processed_logprobs"}),
    "processed, temperature": ({"temperature": 2.0}, {"mode": "processed_logprobs", "top_k": 0}),
    "allowed": ({"temperature": 1.0, "allowed_token_ids": ALLOWED}, {"top_k": 0}),
    "allowed, processed": (FILTERED | EDITED | {"allowed_token_ids": ALLOWED}, {"mode": "processed_logprobs"}),
    "allowed, tempered": (
        {"temperature": 0.5, "allowed_token_ids": ALLOWED},
        {"mode": "tempered_logprobs"},
    ),
    "named": ({"temperature": 0.0}, {"token_ids": (3, 380, 3, 17)}),
    "named, processed": (FILTERED, {"token_ids": tuple(range(0, 384, 3)), "mode": "processed_logprobs"}),
    "all ids": ({"temperature": 1.0, "top_p": 0.9}, {"top_k": -1}),
}

QUIET: tuple[dict[str, Any], None] = ({"temperature": 0.0}, None)


def test_every_view_in_one_batch(core: EngineCore, llama: Path) -> None:
    texts = dict(zip(CASES, prompts(len(CASES), 11, seed=5), strict=True))
    results = run(core, [ask(name, texts[name], *CASES[name]) for name in CASES])
    for name, (sampling, logprobs) in CASES.items():
        item = ask(name, texts[name], sampling, logprobs)
        assert results[name].finish_reason is FinishReason.LENGTH
        assert len(results[name].token_ids) == 7
        check(item, results[name], llama)


def test_neighbours_do_not_change_bits(core: EngineCore) -> None:
    texts = dict(zip(CASES, prompts(len(CASES), 11, seed=5), strict=True))
    plain = ("off", "raw", "raw, sampled")
    mixed = run(core, [ask(name, texts[name], *CASES[name]) for name in CASES])
    # The same rows beside them, but for what they ask.
    quiet = run(core, [ask(name, texts[name], *(CASES[name] if name in plain else QUIET)) for name in CASES])
    for name in plain:
        a, b = mixed[name].tokens, quiet[name].tokens
        assert a.token_ids.tolist() == b.token_ids.tolist()
        if a.top_k is not None:
            # The order of a step's rows is another one, and products of matrices feel that in the last bit.
            assert_same_scores(a, b, tolerance=1e-6)


def check(item: Request, result: Result, directory: Path) -> None:
    """Every number of a result against the definition of its view."""
    if item.logprobs.top_k is None:
        assert result.tokens.top_k is None
        allowed = item.sampling.allowed_token_ids or range(V)
        assert set(result.token_ids) <= set(allowed)
        return
    rows = result.tokens
    places = rows.top_k
    assert places == item.num_listed(V)
    for place, view in enumerate(views(item, result.token_ids, directory)):
        token = result.token_ids[place]
        assert abs(rows.logprob[place] - view.logprobs[token]) <= TOLERANCE
        assert rows.rank[place] == 1 + (view.within > view.within[view.support == token][0]).sum()
        want = view.listed(item)
        got = [i for i in rows.top_ids[place].tolist() if i >= 0]
        assert len(got) == len(want) == len(set(got))
        values = rows.top_logprobs[place][: len(got)]
        exact = view.logprobs[want]
        finite = np.isfinite(exact)
        assert (np.isfinite(values) == finite).all()
        assert np.abs(values[finite] - exact[finite]).max(initial=0.0) <= TOLERANCE
        assert sorted(got) == sorted(want) or np.abs(view.logprobs[got] - exact)[finite].max() <= TOLERANCE
        if item.sampling.allowed_token_ids:
            assert abs(np.exp(values.astype(np.float64)).sum() - 1.0) <= 1e-6
            assert set(got) == set(ALLOWED)


class View:
    """One position: the distribution of a request's view over `support`, and what it was sampled from."""

    def __init__(self, logits: Floats, item: Request, output: list[int]) -> None:
        sampling, mode = item.sampling, item.logprobs.mode
        x = logits.copy()
        temperature = 1.0
        if mode == "processed_logprobs":
            x = edit(x, item, output)
        if mode != "raw_logprobs" and sampling.temperature >= 1e-5:
            temperature = sampling.temperature
        if mode == "processed_logprobs" and sampling.temperature >= 1e-5:
            x = keep(x, sampling)
        self.support = np.array(sorted(set(sampling.allowed_token_ids)) or range(V))
        self.within = x[self.support]
        tempered = self.within / temperature
        with np.errstate(divide="ignore"):
            total = np.log(np.exp(tempered - tempered.max()).sum())
        self.logprobs = np.full(V, -np.inf)
        self.logprobs[self.support] = tempered - tempered.max() - total
        self._x = x

    def listed(self, item: Request) -> list[int]:
        if item.logprobs.token_ids:
            named = sorted(set(item.logprobs.token_ids))
            return [named[i] for i in np.argsort(-self._x[named], kind="stable")]
        if item.sampling.allowed_token_ids:
            return self.support[np.argsort(-self.within, kind="stable")].tolist()
        top_k = item.logprobs.top_k
        assert top_k is not None
        return order(self._x)[: V if top_k < 0 else top_k]


def views(item: Request, output: list[int], directory: Path) -> Iterator[View]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    full = item.prompt_token_ids + output
    with torch.no_grad():
        logits = model(torch.tensor([full])).logits[0].double().numpy()
    for place in range(len(output)):
        yield View(logits[len(item.prompt_token_ids) + place - 1], item, output[:place])


def as_reply(prompt: list[int]) -> tuple[Request, list[int]]:
    """A prompt's tokens as the reply to its first one, in the raw view: what prompt scores are."""
    return ask("a", [prompt[0]], {}, {}), prompt[1:]


def edit(x: Floats, item: Request, output: list[int]) -> Floats:
    """Penalties, bias and masks by their definitions, an id at a time."""
    sampling = item.sampling
    for i in range(V):
        count = output.count(i)
        if count or i in item.prompt_token_ids:
            x[i] = x[i] / sampling.repetition_penalty if x[i] > 0 else x[i] * sampling.repetition_penalty
        x[i] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
        x[i] += sampling.logit_bias.get(i, 0.0)
        if sampling.allowed_token_ids and i not in sampling.allowed_token_ids:
            x[i] = -np.inf
    return x


def keep(x: Floats, sampling: SamplingParams) -> Floats:
    """top-k, then top-p of what it left, renormalised, then min-p."""
    ids = order(x)
    tempered = x / sampling.temperature
    probability = np.exp(tempered - tempered.max())
    probability /= probability.sum()
    if sampling.top_k > 0:
        ids = ids[: sampling.top_k]
    total = probability[ids].sum()
    kept, mass = [], 0.0
    for i in ids:
        if mass < sampling.top_p * total and probability[i] >= sampling.min_p * probability.max():
            kept.append(i)
        mass += probability[i]
    filtered = np.full(V, -np.inf)
    filtered[kept] = x[kept]
    return filtered


def test_bad_words_never_come(core: EngineCore) -> None:
    [prompt] = prompts(1, 9, seed=2)
    free = run(core, [request("a", prompt, SamplingParams(temperature=0.0, max_tokens=12))])["a"].token_ids
    # The first token that is wanted, and later a pair: banned, both must go, and the rest may stay.
    words = ((free[0],),)
    once = run(core, [request("a", prompt, SamplingParams(temperature=0.0, max_tokens=12, bad_words=words))])[
        "a"
    ].token_ids
    assert free[0] not in once
    pair = (once[3], once[4])
    words = (*words, pair)
    twice = run(core, [request("a", prompt, SamplingParams(temperature=0.0, max_tokens=12, bad_words=words))])[
        "a"
    ].token_ids
    assert twice[:4] == once[:4]
    assert pair not in set(pairwise(twice))
    assert twice[4] != once[4]


def test_bad_words_of_a_prompts_end_may_follow_it(core: EngineCore) -> None:
    """A bad word counts where all of it is generated."""
    [prompt] = prompts(1, 9, seed=2)
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    [token] = run(core, [request("a", prompt, greedy)])["a"].token_ids
    banned = SamplingParams(temperature=0.0, max_tokens=1, bad_words=((prompt[-1], token),))
    assert run(core, [request("a", prompt, banned)])["a"].token_ids == [token]


def test_a_set_that_bans_empty_ends_that_request_alone(core: EngineCore) -> None:
    [prompt] = prompts(1, 9, seed=2)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, allowed_token_ids=(5, 6), bad_words=((5,), (6, 6)))
    # 6 must come, and then 6 must not: nothing is left.
    results = run(core, [request("a", prompt, sampling, top_k=2), request("b", prompt)])
    assert results["a"].token_ids == [6]
    assert results["a"].finish_reason is FinishReason.ERROR
    assert results["b"].finish_reason is FinishReason.LENGTH


def test_prompt_scores_do_not_depend_on_sampling_fields(core: EngineCore) -> None:
    [prompt] = prompts(1, 40, seed=2)
    logprobs: dict[str, Any] = {"prompt_top_k": 3}
    plain = run(core, [ask("a", prompt, {}, logprobs)])["a"].prompt
    logprobs |= {"mode": "processed_logprobs"}
    assert run(core, [ask("a", prompt, FILTERED | EDITED, logprobs)])["a"].prompt == plain
    assert run(core, [ask("a", prompt, {"allowed_token_ids": ALLOWED}, logprobs)])["a"].prompt == plain


def test_the_whole_vocabulary_of_a_prompt(core: EngineCore, llama: Path) -> None:
    [prompt] = prompts(1, 40, seed=2)
    result = run(core, [ask("a", prompt, {"max_tokens": 0}, {"prompt_top_k": -1})])["a"].prompt
    assert len(result) == 39
    assert result.top_k == V
    for place, view in enumerate(views(*as_reply(prompt), llama)):
        assert np.abs(result.top_logprobs[place] - view.logprobs[result.top_ids[place]]).max() <= TOLERANCE
        assert sorted(result.top_ids[place]) == list(range(V))


def test_ids_named_for_a_prompt(core: EngineCore, llama: Path) -> None:
    """Their values are of the full vocabulary, in every chunk, and also where the K/V of the prompt is cached."""
    [prompt] = prompts(1, 40, seed=2)
    named = (300, 7, 383, 7, 45)
    logprobs: dict[str, Any] = {"prompt_top_k": 3, "prompt_logprob_token_ids": named}
    result = run(core, [ask("a", prompt, {"max_tokens": 0}, logprobs)])["a"].prompt
    for place, view in enumerate(views(*as_reply(prompt), llama)):
        assert sorted(result.top_ids[place]) == [7, 45, 300, 383]
        assert (np.diff(result.top_logprobs[place]) <= 0).all()
        assert np.abs(result.top_logprobs[place] - view.logprobs[result.top_ids[place]]).max() <= TOLERANCE
        assert abs(result.logprob[place] - view.logprobs[prompt[place + 1]]) <= TOLERANCE
    small = make_core(llama, max_num_batched_tokens=7)
    for _ in range(2):
        again = run(small, [ask("a", prompt, {"max_tokens": 0}, logprobs | {"prompt_start": 20})])["a"].prompt
        same(again, result[19:])
    assert small.stats().cached_tokens > 0


def test_a_long_prompts_whole_vocabulary_is_scored_in_small_chunks(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = prompts(3, 40, seed=4)
    items = [ask(f"{i}", text, {"max_tokens": 2}, {"top_k": -1, "prompt_top_k": -1}) for i, text in enumerate(texts)]
    whole = run(make_core(llama, max_logprobs=-1), items)
    monkeypatch.setattr("neper.engine.settings.MAX_LISTED", 5 * V)
    cut = run(make_core(llama, max_logprobs=-1, max_num_seqs=3, max_num_batched_tokens=20), items)
    for name, result in cut.items():
        largest = max(len(chunk.prompt) for chunk in result.chunks if chunk.prompt)
        assert largest <= 5
        same(result.prompt, whole[name].prompt)
        same(result.tokens, whole[name].tokens)


def same(a: PackedRows, b: PackedRows) -> None:
    assert a.token_ids.tolist() == b.token_ids.tolist()
    assert np.abs(a.logprob - b.logprob).max() <= TOLERANCE
    assert np.abs(np.sort(a.top_logprobs) - np.sort(b.top_logprobs)).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("sampling", "logprobs", "message"),
    [
        ({"allowed_token_ids": (V,)}, {}, "vocabulary"),
        ({"allowed_token_ids": (-1,)}, {}, "vocabulary"),
        ({"bad_words": ((3, V),)}, {}, "vocabulary"),
        ({"bad_words": ((),)}, {}, "bad word"),
        ({}, {"token_ids": (V,)}, "vocabulary"),
        ({}, {"prompt_top_k": 0, "prompt_logprob_token_ids": (V,)}, "vocabulary"),
        ({}, {"prompt_logprob_token_ids": (5,)}, "needs prompt_top_k"),
        ({"allowed_token_ids": (1,)}, {"token_ids": (1,)}, "exclude"),
        ({}, {"top_k": -2}, "-2 alternatives"),
    ],
)
def test_what_cannot_be_computed_is_said(
    core: EngineCore, sampling: dict[str, Any], logprobs: dict[str, Any], message: str
) -> None:
    result = run(core, [ask("a", [3, 4, 5], sampling, logprobs)])["a"]
    assert result.finish_reason is FinishReason.ERROR
    assert message in (result.last.error or "")
