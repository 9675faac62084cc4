"""A model that yields NaN for one token: only the requests that use it fail, and nothing of it is left behind."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from neper.engine.llm import LLM
from neper.errors import InvalidLogitsError, InvalidRequestError
from neper.types import Fault, FinishReason, Request, SamplingParams
from tests.helpers.engine import make_core, prompts, request, run

POISON = 383  # an id that prompts() never draws


@pytest.fixture(scope="module")
def clean_dir(tiny_dir: Callable[..., Path]) -> Path:
    return tiny_dir("llama")


@pytest.fixture(scope="module", params=[math.nan, math.inf])
def poisoned_dir(request: pytest.FixtureRequest, clean_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(clean_dir, directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = request.param
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is False
    return directory


@pytest.mark.parametrize("place", ["prompt", "candidate"])
def test_candidates_that_use_it_fail_together(poisoned_dir: Path, place: str) -> None:
    prompt, other = prompts(2, 20)
    if place == "prompt":
        prompt[3] = POISON
    bad = Request(request_id="bad", prompt_token_ids=prompt, candidates=((5,), (6, 7), (POISON, 8), (9, 10)))
    core = make_core(poisoned_dir)
    results = run(core, [bad, request("other", other)])
    assert results["bad"].finish_reason is FinishReason.ERROR
    assert results["bad"].last.fault is Fault.LOGITS
    assert len(results["other"].token_ids) == 8
    good = Request(request_id="good", prompt_token_ids=other, candidates=((5,), (6, 7), (POISON,)))
    assert run(core, [good])["good"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("place", [0, 20, 39])
def test_only_the_request_that_uses_it_fails(poisoned_dir: Path, clean_dir: Path, place: int, chunk: int) -> None:
    texts = prompts(4, 40)
    broken = list(texts[1])
    broken[place] = POISON
    sampling = SamplingParams(temperature=0, max_tokens=6)

    def batch(bad: list[int]) -> list:
        return [
            request("0", texts[0], sampling, top_k=5, prompt_top_k=2),
            request("bad", bad, SamplingParams(temperature=0, max_tokens=1), top_k=5),
            request("2", texts[2], sampling, top_k=20),
            request("3", texts[3], SamplingParams(temperature=1.0, seed=1, max_tokens=6)),
        ]

    poisoned = make_core(poisoned_dir, max_num_batched_tokens=chunk)
    results = run(poisoned, batch(broken))
    bad = results["bad"]
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.last.fault is Fault.LOGITS
    assert "not numbers" in (bad.last.error or "")
    assert bad.token_ids == []
    # The same steps with that row finite: the neighbours' bits are the same.
    want = run(make_core(clean_dir, max_num_batched_tokens=chunk), batch(broken))
    for name in ("0", "2", "3"):
        assert results[name].tokens.data == want[name].tokens.data
    assert results["0"].prompt.data == want["0"].prompt.data

    # Its blocks are used again by clean requests, and nothing of it was kept as a prefix.
    refill = [request(str(i), text, sampling, top_k=3) for i, text in enumerate(prompts(8, 60, seed=9))]
    after, fresh = run(poisoned, refill), run(make_core(clean_dir, max_num_batched_tokens=chunk), refill)
    for name, result in after.items():
        assert result.tokens.data == fresh[name].tokens.data
    again = run(poisoned, [request("bad", broken, sampling)])["bad"]
    assert again.finish_reason is FinishReason.ERROR
    assert again.last.num_cached_tokens == 0


def test_blocks_beside_stale_nan_are_right(poisoned_dir: Path, clean_dir: Path) -> None:
    """A cache so small that every clean request must reuse blocks full of NaN, part-filled."""
    block_bytes = 4 * 2 * 2 * 2 * 16 * 4
    small = {"block_size": 4, "max_model_len": 24, "kv_cache_memory": 7 * block_bytes}
    poisoned, clean = make_core(poisoned_dir, **small), make_core(clean_dir, **small)
    for length in (1, 3, 5, 13, 18):
        dirty = run(poisoned, [request("bad", [POISON] * 22)])["bad"]
        assert dirty.finish_reason is FinishReason.ERROR
        item = request("a", prompts(1, length)[0], SamplingParams(temperature=0, max_tokens=5), top_k=3, prompt_top_k=3)
        got, want = run(poisoned, [item])["a"], run(clean, [item])["a"]
        assert got.tokens.data == want.tokens.data
        if length > 1:
            assert got.prompt.data == want.prompt.data


def test_an_invalid_prompt_score_ends_the_request(poisoned_dir: Path) -> None:
    [text] = prompts(1, 30)
    text[10] = POISON
    core = make_core(poisoned_dir, max_num_batched_tokens=8)
    result = run(core, [request("a", text, SamplingParams(max_tokens=0), prompt_top_k=1)])["a"]
    assert result.finish_reason is FinishReason.ERROR
    assert sum(len(chunk.prompt) for chunk in result.chunks if chunk.prompt) == 8  # scores before it were sound


def test_the_library_raises_what_the_server_answers(poisoned_dir: Path) -> None:
    llm = LLM(str(poisoned_dir), device="cpu", num_threads=1)
    with pytest.raises(InvalidLogitsError, match="not numbers"):
        llm.generate([[POISON, 5]])
    with pytest.raises(InvalidRequestError, match="together leave no token"):
        llm.generate([[5]], SamplingParams(allowed_token_ids=(5,), bad_words=((5,),)))


def test_nothing_left_to_sample_is_an_error_not_a_forbidden_token(clean_dir: Path) -> None:
    core = make_core(clean_dir)
    [text] = prompts(1, 8)
    everything = SamplingParams(temperature=0, max_tokens=3, logit_bias=dict.fromkeys(range(384), -math.inf))
    results = run(core, [request("a", text, everything, top_k=2), request("b", text)])
    assert results["a"].finish_reason is FinishReason.ERROR
    assert results["a"].last.fault is Fault.REQUEST
    assert len(results["b"].token_ids) == 8
