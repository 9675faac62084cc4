"""Candidates of a prompt: their scores, what is computed for them, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from neper.engine.core import EngineCore
from neper.types import FinishReason, Request, SamplingParams
from tests.helpers.engine import Result, make_core, prompts, request, run

Candidates = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def directory(tiny_dir: Callable[..., Path]) -> Path:
    return tiny_dir("llama")


@pytest.fixture(scope="module")
def exact(directory: Path) -> Callable[[list[int], Candidates], list[np.ndarray]]:
    """The logprobs of each candidate's tokens by transformers, of prompt and candidate computed whole."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def logprobs(prompt: list[int], candidates: Candidates) -> list[np.ndarray]:
        found = []
        for candidate in candidates:
            ids = torch.tensor([[*prompt, *candidate]])
            with torch.no_grad():
                rows = model(ids).logits[0].double().log_softmax(-1)
            found.append(rows[:-1].gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0].numpy())
        return found

    return logprobs


def asked(name: str, prompt: list[int], candidates: Candidates) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, candidates=tuple(candidates))


def logprobs_of(result: Any, count: int) -> list[np.ndarray]:
    """The scores of a joined result, by candidate: each once."""
    found = {scores.place: scores.logprobs for chunk in result.chunks for scores in chunk.candidates}
    assert sorted(found) == list(range(count))
    assert sum(len(chunk.candidates) for chunk in result.chunks) == count
    return [found[place] for place in range(count)]


def candidates(count: int, *, seed: int = 0, longest: int = 5) -> Candidates:
    generator = np.random.default_rng(seed)
    return [tuple(generator.integers(3, 330, size=1 + n % longest).tolist()) for n in range(count)]


def tokens_computed(core: EngineCore, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tokens the steps of these requests had."""
    sizes: list[int] = []
    begin = core.runner.begin
    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "begin", lambda plan: (sizes.append(plan.num_tokens), begin(plan))[1])
        run(core, requests)
    return sum(sizes)


@pytest.mark.parametrize("config", [{}, {"prefix_caching": False}, {"max_num_batched_tokens": 8}], ids=str)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_values_are_those_of_the_whole_text(
    config: dict[str, Any], length: int, directory: Path, exact: Callable[..., list[np.ndarray]]
) -> None:
    [prompt] = prompts(1, length, seed=length)
    given = candidates(12, longest=20)
    given += [given[3], (*given[3], 7), given[0]]  # twice, and one that begins with another
    core = make_core(directory, max_num_seqs=4, **config)
    result = run(core, [asked("a", prompt, given)])["a"]
    assert result.finish_reason is FinishReason.LENGTH
    for got, want in zip(logprobs_of(result, len(given)), exact(prompt, given), strict=True):
        assert np.abs(got - want).max() < 1e-4


def test_the_prompt_is_computed_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [prompt] = prompts(1, 200)
    many = candidates(40, longest=4)
    for caching in (True, False):
        core = make_core(directory, prefix_caching=caching)
        count = tokens_computed(core, [asked("a", prompt, many)], monkeypatch)
        rest = 200 % 16  # of the prompt's last block, which each sequence has anew
        assert count == 200 + sum(rest + len(candidate) for candidate in many if len(candidate) > 1)
        alone = [candidate for candidate in many if len(candidate) == 1]
        [other] = prompts(1, 201, seed=1)
        assert tokens_computed(core, [asked("a", other, alone)], monkeypatch) == 201
        stats = core.stats()
        assert stats.prompt_tokens == 401 + sum(map(len, many)) + len(alone)
        assert stats.generated_tokens == stats.cached_tokens == 0
        again = run(core, [asked("a", prompt, many)])["a"]
        assert again.last.num_cached_tokens == core.stats().cached_tokens == (192 if caching else 0)


def test_requests_of_the_same_prompt_do_not_share_without_caching(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [prompt] = prompts(1, 64)
    core = make_core(directory, prefix_caching=False)
    counts = [tokens_computed(core, [asked("a", prompt, [(5, 6)])], monkeypatch) for _ in range(2)]
    assert counts == [66, 66]


def test_more_than_the_slots_and_the_cache_hold(directory: Path, exact: Callable[..., list[np.ndarray]]) -> None:
    [prompt] = prompts(1, 37)
    given = candidates(60, longest=9)
    bytes_per_block = 2 * 2 * 2 * 16 * 4 * 4  # K and V, layers, heads, dimensions, bytes, tokens
    for caching in (True, False):
        small = make_core(
            directory,
            block_size=4,
            max_model_len=48,
            kv_cache_memory=16 * bytes_per_block,
            max_num_seqs=3,
            prefix_caching=caching,
        )
        assert small.stats().total_blocks < 16
        small.add(asked("a", prompt, given))
        result = Result()
        while small.has_work:
            result.chunks += small.step()
            small.check()
            assert len(small._sequences) <= 6
        for got, want in zip(logprobs_of(result, 60), exact(prompt, given), strict=True):
            assert np.abs(got - want).max() < 1e-4


def test_neighbours_decode_at_every_step(directory: Path) -> None:
    [prompt, other] = prompts(2, 40)
    core = make_core(directory, max_num_seqs=4, max_num_batched_tokens=32)
    core.add(request("n", other, SamplingParams(temperature=0.0, max_tokens=30)))
    core.step()
    core.add(asked("a", prompt, candidates(1000, longest=3)))
    tokens = [sum(len(chunk.tokens or ()) for chunk in core.step() if chunk.request_id == "n") for _ in range(29)]
    assert tokens == [1] * 29
    core.add(request("late", other))
    steps = 0
    while not any(chunk.request_id == "late" for chunk in core.step()):
        steps += 1
    assert steps <= 3
    core.abort("a")
    core.abort("late")
    core.check()


def test_an_abort_at_any_time_leaves_nothing(directory: Path) -> None:
    [prompt] = prompts(1, 40)
    core = make_core(directory, max_num_batched_tokens=32, max_num_seqs=4)
    for steps in range(8):
        core.add(asked("a", prompt, candidates(30)))
        for _ in range(steps):
            assert all(chunk.finish_reason is None for chunk in core.step())
            core.check()
        core.abort("a")
        core.check()
        assert not core.has_work
        assert core.stats().free_blocks == core.stats().total_blocks
        assert core.step() == []


def test_a_step_that_raises_ends_the_request_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [prompt] = prompts(1, 40)
    core = make_core(directory, max_num_seqs=4)
    for steps in (0, 2):
        core.add(asked("a", prompt, candidates(30)))
        core.add(request("b", prompt))
        for _ in range(steps):
            core.step()
        chunks = core.fail_all("broken")
        assert sorted((chunk.request_id, chunk.error) for chunk in chunks) == [("a", "broken"), ("b", "broken")]
        assert not core.has_work
        core.check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([(5,), ()], "candidate 1 has no tokens"),
        ([(5,), (384,)], "outside the vocabulary"),
        ([(5,) * 473, (5,) * 472], "candidate 0 have 513 tokens"),
        ([(5,)] * 1001, "1001 candidates"),
    ],
    ids=["empty", "id", "long", "many"],
)
def test_what_cannot_be_scored(given: Candidates, message: str, directory: Path) -> None:
    core = make_core(directory)
    [prompt] = prompts(1, 40)
    result = run(core, [asked("a", prompt, given)])["a"]
    assert result.finish_reason is FinishReason.ERROR
    assert message in (result.last.error or "")


def test_no_request_has_the_name_of_a_sequence(directory: Path) -> None:
    """Sequences of candidates have names of their own beside requests that are named like choices."""
    [prompt] = prompts(1, 20)
    core = make_core(directory)
    names = [f"a-{number}" for number in range(4)]
    wanted = [request(name, prompt, SamplingParams(temperature=0.0, max_tokens=5)) for name in names]
    done = run(core, [*wanted, asked("a", prompt, [(5, 6), (7, 8, 9)])])
    assert len(logprobs_of(done["a"], 2)) == 2
    assert [len(done[name].token_ids) for name in names] == [5] * 4
    core.check()


def test_an_id_in_use_is_refused(directory: Path) -> None:
    [prompt] = prompts(1, 20)
    core = make_core(directory)
    core.add(asked("a", prompt, [(5, 6), (7,)]))
    for _ in range(2):
        core.add(asked("a", prompt, [(5,)]))
        [chunk] = [chunk for chunk in core.step() if chunk.error is not None]
        assert "in use" in (chunk.error or "")
