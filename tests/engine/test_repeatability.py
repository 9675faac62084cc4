"""The same request under other chunkings, cache states and preemptions: what must agree, and how closely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from neper.types import SamplingParams
from tests.helpers.engine import Result, assert_same_scores, make_core, prompts, request, run

BYTES_PER_BLOCK_OF_4 = 4 * 2 * 2 * 2 * 16 * 4  # tokens, K and V, layers, KV heads, head size, float32


@pytest.fixture(scope="module")
def directory(tiny_dir: Callable[..., Path]) -> Path:
    return tiny_dir("llama")


def agree(a: Result, b: Result) -> None:
    """float32 values within 1e-4, and equal tokens as long as the top two differ by more than 1e-3."""
    rows_a, rows_b = a.tokens, b.tokens
    margins = rows_a.top_logprobs[:, 0] - rows_a.top_logprobs[:, 1]
    close = np.flatnonzero(margins <= 1e-3)
    length = int(close[0]) if len(close) else len(rows_a)
    assert length > 0
    assert_same_scores(rows_a[:length], rows_b[:length], tolerance=1e-4)
    if a.last.prompt is not None or any(chunk.prompt for chunk in a.chunks):
        assert_same_scores(a.prompt, b.prompt, tolerance=1e-4)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_chunk_sizes_agree(directory: Path, length: int, prefix_caching: bool) -> None:
    [text] = prompts(1, length, seed=100 + length)
    item = request("a", text, SamplingParams(temperature=0, max_tokens=10), top_k=5, prompt_top_k=3)
    whole = run(make_core(directory, prefix_caching=prefix_caching), [item])["a"]
    assert len(whole.prompt) == length - 1
    for chunk in (1, 7, length - 1, length, length + 1):
        core = make_core(directory, prefix_caching=prefix_caching, max_num_batched_tokens=chunk)
        agree(whole, run(core, [item])["a"])
        agree(whole, run(core, [item])["a"])


def test_the_same_request_twice_alone_is_bit_equal(directory: Path) -> None:
    [text] = prompts(1, 45)
    item = request("a", text, SamplingParams(temperature=0.8, seed=3, max_tokens=10), top_k=5)
    cold = [run(make_core(directory), [item])["a"].tokens.data for _ in range(2)]
    assert cold[0] == cold[1]
    core = make_core(directory)
    run(core, [item])
    warm = [run(core, [item])["a"] for _ in range(2)]
    assert warm[0].tokens.data == warm[1].tokens.data
    assert warm[0].last.num_cached_tokens == warm[1].last.num_cached_tokens == 32


def test_a_fully_cached_prompt_still_computes_its_last_token(directory: Path) -> None:
    [text] = prompts(1, 48)  # three whole blocks
    core = make_core(directory)
    item = request("a", text, top_k=5)
    first, second = run(core, [item])["a"], run(core, [item])["a"]
    assert first.last.num_cached_tokens == 0
    assert second.last.num_cached_tokens == 32  # not 48: the last token gives the next one
    agree(first, second)


def test_prompt_scores_reuse_only_what_they_do_not_need(directory: Path) -> None:
    [text] = prompts(1, 70)
    core = make_core(directory)
    whole = run(core, [request("a", text, top_k=2, prompt_top_k=2)])["a"]
    again = run(core, [request("a", text, top_k=2, prompt_top_k=2)])["a"]
    assert again.last.num_cached_tokens == 0
    agree(whole, again)
    for start, reused in ((33, 32), (32, 16), (69, 64), (65, 64), (64, 48), (1, 0)):
        part = run(core, [request("a", text, top_k=2, prompt_top_k=2, prompt_start=start)])["a"]
        assert part.last.num_cached_tokens == reused
        assert len(part.prompt) == 70 - start
        assert_same_scores(part.prompt, whole.prompt[start - 1 :], tolerance=1e-4)


def test_shared_prefixes_are_found_while_running_and_after(directory: Path) -> None:
    [base] = prompts(1, 64)
    tails = prompts(4, 9, seed=1)
    cached, plain = make_core(directory), make_core(directory, prefix_caching=False)
    run(cached, [request("warm", base)])
    requests = [request(str(i), base + tail, top_k=3) for i, tail in enumerate(tails)]
    with_cache, without = run(cached, requests), run(plain, requests)
    for i in range(4):
        assert with_cache[str(i)].last.num_cached_tokens == 64
        assert without[str(i)].last.num_cached_tokens == 0
        agree(with_cache[str(i)], without[str(i)])


def test_eviction_keeps_answers_right(directory: Path) -> None:
    core = make_core(directory, block_size=4, max_model_len=48, kv_cache_memory=16 * BYTES_PER_BLOCK_OF_4)
    plain = make_core(directory, prefix_caching=False)
    for seed in (0, 1, 2, 0, 1, 2, 0):
        [text] = prompts(1, 30, seed=seed)
        item = request("a", text, top_k=3)
        agree(run(plain, [item])["a"], run(core, [item])["a"])


@pytest.mark.parametrize("chunk", [8, 512])
def test_preemption_neither_repeats_nor_changes_anything(directory: Path, chunk: int) -> None:
    texts = [prompts(1, n, seed=n)[0] for n in (21, 30, 9, 26, 14)]
    requests = [
        request(str(i), text, SamplingParams(temperature=0, max_tokens=16), top_k=3, prompt_top_k=2)
        for i, text in enumerate(texts)
    ]
    roomy = run(make_core(directory), requests)
    tight = make_core(
        directory,
        block_size=4,
        max_model_len=48,
        kv_cache_memory=17 * BYTES_PER_BLOCK_OF_4,
        max_num_batched_tokens=chunk,
    )
    squeezed = run(tight, requests)
    assert tight.stats().preemptions >= 2
    for i, text in enumerate(texts):
        assert len(squeezed[str(i)].token_ids) == 16
        assert len(squeezed[str(i)].prompt) == len(text) - 1
        agree(roomy[str(i)], squeezed[str(i)])


def test_sampled_replies_survive_preemption(directory: Path) -> None:
    texts = prompts(5, 20)
    requests = [
        request(str(i), t, SamplingParams(temperature=1.0, top_k=50, seed=i, max_tokens=20))
        for i, t in enumerate(texts)
    ]
    roomy = run(make_core(directory), requests)
    tight = make_core(directory, block_size=4, max_model_len=48, kv_cache_memory=21 * BYTES_PER_BLOCK_OF_4)
    squeezed = run(tight, requests)
    assert tight.stats().preemptions >= 2
    assert [roomy[str(i)].token_ids for i in range(5)] == [squeezed[str(i)].token_ids for i in range(5)]


@pytest.mark.parametrize("chunk", [8, 512])
def test_overlapped_steps_give_the_same_bits(directory: Path, chunk: int) -> None:
    """Every kind of request, with preemption: a step is launched before the tokens of the last one are known."""
    texts = [prompts(1, n, seed=n)[0] for n in (21, 30, 9, 26, 14, 1)]
    sampling = [
        SamplingParams(temperature=0, max_tokens=16),
        SamplingParams(temperature=0.9, top_p=0.9, seed=1, max_tokens=12, presence_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.2),
        SamplingParams(temperature=1.2, top_k=20, seed=3, max_tokens=9, logit_bias={7: 2.0}),
        SamplingParams(temperature=0.7, seed=4, max_tokens=14, min_tokens=5, stop_token_ids=tuple(range(0, 384, 9))),
        SamplingParams(temperature=0, max_tokens=0),
    ]
    ks = [(3, 2), (None, None), (0, 1), (5, None), (20, 20), (None, 4)]
    requests = [
        request(str(i), text, sampling[i], top_k=k, prompt_top_k=prompt_k)
        for i, (text, (k, prompt_k)) in enumerate(zip(texts, ks, strict=True))
    ]

    def compute(overlap: bool, memory: dict[str, int]) -> dict[str, tuple[bytes, bytes, str]]:
        core = make_core(directory, overlap=overlap, max_num_batched_tokens=chunk, **memory)
        results = run(core, requests)
        assert (core.stats().preemptions > 0) == bool(memory)
        return {
            name: (
                b"".join(part.tokens.data for part in result.chunks if part.tokens),
                b"".join(part.prompt.data for part in result.chunks if part.prompt),
                str(result.finish_reason),
            )
            for name, result in results.items()
        }

    assert compute(True, {}) == compute(False, {})
    tight = {"block_size": 4, "max_model_len": 48, "kv_cache_memory": 17 * BYTES_PER_BLOCK_OF_4}
    plain, overlapped = compute(False, tight), compute(True, tight)
    # Preempted at other moments, so in other company: tokens and lengths are the same, values within rounding.
    assert {name: (len(a), len(b), end) for name, (a, b, end) in plain.items()} == {
        name: (len(a), len(b), end) for name, (a, b, end) in overlapped.items()
    }


def test_an_aborted_request_leaves_no_step_that_harms_the_next(directory: Path) -> None:
    text, other = prompts(2, 20)
    want = run(make_core(directory), [request("b", other, top_k=2)])["b"].tokens.data
    core = make_core(directory, overlap=True)
    core.add(request("a", text, SamplingParams(temperature=0, max_tokens=30)))
    for _ in range(4):
        core.step()
    core.abort("a")
    assert not core.has_work
    assert run(core, [request("b", other, top_k=2)])["b"].tokens.data == want


@pytest.mark.parametrize("top_k", [None, 0, 3])
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_single_tokens_of_a_prompt_stand_beside_decodes(directory: Path, budget: int, top_k: int | None) -> None:
    """A budget that leaves a prompt one token a step: it samples nothing, and may be scored, among rows that do."""
    texts = prompts(3, 12)
    sampling = SamplingParams(temperature=0, max_tokens=6)
    requests = [request(str(i), text, sampling, top_k=top_k, prompt_top_k=2 * (i == 2)) for i, text in enumerate(texts)]
    roomy = run(make_core(directory), requests)
    for overlap in (False, True):
        tight = run(make_core(directory, max_num_batched_tokens=budget, overlap=overlap), requests)
        for name, want in roomy.items():
            if top_k is None:
                assert tight[name].token_ids == want.token_ids
            else:
                assert_same_scores(tight[name].tokens, want.tokens, tolerance=1e-4)
            assert_same_scores(tight[name].prompt, want.prompt, tolerance=1e-4)
