"""EngineCore against transformers: values, sampling rules, ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from neper.engine.core import EngineCore
from neper.engine.plan.sequence import Sequence
from neper.types import FinishReason, SamplingParams
from tests.helpers.engine import make_core, prompts, request, run


@pytest.fixture(scope="module")
def llama(tiny_dir: Callable[..., Path]) -> Path:
    return tiny_dir("llama")


@pytest.fixture(scope="module")
def core(llama: Path) -> EngineCore:
    return make_core(llama, max_num_batched_tokens=16)


def teacher_forced(directory: Path, tokens: list[int]) -> np.ndarray:
    """[n, V] float64: row i is log p(. | tokens[:i+1]) by transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double().log_softmax(-1).numpy()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_logprob_of_a_mixed_batch_is_the_models_own(architecture: str, tiny_dir: Callable[..., Path]) -> None:
    overrides = {"sliding_window": 16} if architecture == "mistral" else {}
    directory = tiny_dir(architecture, **overrides)
    core = make_core(directory, max_num_batched_tokens=16)
    lengths, ks = [3, 40, 17, 1, 29], [5, 0, 20, None, 1]
    texts = [prompts(1, n, seed=n)[0] for n in lengths]
    sampling = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=6 + i) for i in range(5)]
    results = run(
        core,
        [
            request(str(i), text, sampling[i], top_k=k, prompt_top_k=k)
            for i, (text, k) in enumerate(zip(texts, ks, strict=True))
        ],
    )
    for i, (text, k) in enumerate(zip(texts, ks, strict=True)):
        result = results[str(i)]
        assert len(result.token_ids) == 6 + i
        assert result.finish_reason is FinishReason.LENGTH
        if k is None:
            assert result.tokens.top_k is None
            continue
        full = text + result.token_ids
        exact = teacher_forced(directory, full)
        for rows, first in ((result.prompt, 1), (result.tokens, len(text))):
            for j in range(len(rows)):
                position = first + j
                row = exact[position - 1]
                assert rows.token_ids[j] == full[position]
                assert abs(rows.logprob[j] - row[full[position]]) <= 1e-4
                # The two models' roundings may swap neighbours, so a rank is right within what 1e-4 can move.
                own = row[full[position]]
                assert 1 + (row > own + 1e-4).sum() <= rows.rank[j] <= 1 + (row > own - 1e-4).sum()
                assert np.abs(rows.top_logprobs[j] - np.sort(row)[::-1][:k]).max(initial=0) <= 1e-4
                assert np.abs(rows.top_logprobs[j] - row[rows.top_ids[j]]).max(initial=0) <= 1e-4
        assert len(result.prompt) == len(text) - 1


def test_greedy_is_transformers_greedy(core: EngineCore, llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    texts = prompts(4, 21)
    results = run(core, [request(str(i), t, SamplingParams(temperature=0, max_tokens=25)) for i, t in enumerate(texts)])
    for i, text in enumerate(texts):
        want = model.generate(
            torch.tensor([text]),
            attention_mask=torch.ones(1, 21),
            max_new_tokens=25,
            do_sample=False,
            eos_token_id=None,
        )
        assert results[str(i)].token_ids == want[0, 21:].tolist()


def test_eos_stop_ids_and_ignore_eos(core: EngineCore) -> None:
    [text] = prompts(1, 10)
    free = run(core, [request("a", text)])["a"].token_ids
    end = free[3]
    first = free.index(end)
    by_eos = run(core, [request("a", text, eos=(end,))])["a"]
    assert by_eos.token_ids == free[: first + 1]
    assert by_eos.finish_reason is FinishReason.STOP
    assert by_eos.last.stop_token_id == end
    ignored = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert run(core, [request("a", text, ignored, eos=(end,))])["a"].token_ids == free
    by_id = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=(end,))
    assert run(core, [request("a", text, by_id)])["a"].token_ids == free[: first + 1]
    at_least = SamplingParams(temperature=0, max_tokens=8, min_tokens=6)
    later = run(core, [request("a", text, at_least, eos=(end,))])["a"].token_ids
    assert end not in later[:6]
    assert later[:first] == free[:first]


def test_seeded_draws_do_not_depend_on_company_chunking_or_order(llama: Path) -> None:
    texts = prompts(6, 30)
    sampling = [SamplingParams(temperature=0.9, top_p=0.9, seed=100 + i, max_tokens=12) for i in range(6)]
    requests = [request(str(i), t, s) for i, (t, s) in enumerate(zip(texts, sampling, strict=True))]
    together = run(make_core(llama), requests)
    reverse = run(make_core(llama, max_num_batched_tokens=13), requests[::-1])
    for i, item in enumerate(requests):
        alone = run(make_core(llama), [item])
        assert alone[str(i)].token_ids == together[str(i)].token_ids == reverse[str(i)].token_ids
    other = run(make_core(llama), [request("x", texts[0], SamplingParams(temperature=0.9, seed=7, max_tokens=12))])
    assert other["x"].token_ids != together["0"].token_ids


def test_without_a_seed_two_replies_differ(core: EngineCore) -> None:
    [text] = prompts(1, 5)
    sampling = SamplingParams(temperature=1.5, max_tokens=20)
    results = run(core, [request(name, text, sampling) for name in "ab"])
    assert results["a"].token_ids != results["b"].token_ids


def test_bias_and_penalties_change_the_choice_but_not_raw_logprobs(core: EngineCore, llama: Path) -> None:
    [text] = prompts(1, 12)
    plain = run(core, [request("a", text, top_k=3)])["a"]
    banned = plain.token_ids[0]
    sampling = SamplingParams(temperature=0, max_tokens=8, logit_bias={banned: -100.0, 7: 3.0}, frequency_penalty=1.5)
    result = run(core, [request("a", text, sampling, top_k=3)])["a"]
    assert banned not in result.token_ids
    exact = teacher_forced(llama, text + result.token_ids)
    counts = np.zeros(exact.shape[1])
    for j, token in enumerate(result.token_ids):
        row = exact[len(text) - 1 + j]
        edited = row - 1.5 * counts
        edited[banned] -= 100
        edited[7] += 3
        assert token == edited.argmax()
        assert abs(result.tokens.logprob[j] - row[token]) <= 1e-4
        counts[token] += 1


def test_bias_and_bans_are_made_once_and_not_at_every_step() -> None:
    sampling = SamplingParams(min_tokens=1, logit_bias={5: 2.0, 7: -1.0}, stop_token_ids=(9,))
    seq = Sequence(request("a", [1, 2], sampling, eos=(4,)), 100)
    early = seq.logit_edits(0)
    assert seq.logit_edits(0) is early
    assert (early.ids.tolist(), early.values.tolist()) == ([5, 7, 4, 9], [2.0, -1.0, -np.inf, -np.inf])
    late = seq.logit_edits(1)
    assert seq.logit_edits(1) is late
    assert (late.ids.tolist(), late.values.tolist()) == ([5, 7], [2.0, -1.0])


def test_penalty_tables_follow_a_sequence_through_other_slots(llama: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=20, presence_penalty=2.0, repetition_penalty=1.3)
    texts = prompts(5, 24)
    requests = [request(str(i), t, sampling) for i, t in enumerate(texts)]
    alone = [run(make_core(llama), [item])[item.request_id].token_ids for item in requests]
    tight = make_core(
        llama, max_num_seqs=3, block_size=4, max_model_len=48, kv_cache_memory=20 * 4 * 2 * 2 * 2 * 16 * 4
    )
    together = run(tight, requests)
    assert tight.stats().preemptions > 0
    assert [together[str(i)].token_ids for i in range(5)] == alone


def test_max_tokens_0_gives_prompt_scores_alone(core: EngineCore) -> None:
    [text] = prompts(1, 37)
    none = SamplingParams(temperature=0, max_tokens=0)
    requests = [
        request("a", text, none, prompt_top_k=2),
        request("b", text, none),
        request("c", text[:1], none, prompt_top_k=1),
    ]
    results = run(core, requests)
    assert len(results["a"].prompt) == 36
    assert all(result.token_ids == [] for result in results.values())
    assert {result.finish_reason for result in results.values()} == {FinishReason.LENGTH}


def test_the_context_ends_a_reply(llama: Path) -> None:
    core = make_core(llama, max_model_len=32)
    [text] = prompts(1, 20)
    result = run(core, [request("a", text, SamplingParams(temperature=0, max_tokens=None))])["a"]
    assert len(result.token_ids) == 12
    assert result.finish_reason is FinishReason.LENGTH


def test_abort_at_every_stage_leaves_nothing(llama: Path) -> None:
    texts = prompts(4, 40)
    alone = run(make_core(llama), [request("keep", texts[0])])["keep"].token_ids
    for moment in range(6):
        core = make_core(llama, max_num_batched_tokens=16, max_num_seqs=2)
        for i in range(1, 4):
            core.add(request(str(i), texts[i]))

        def abort(step: int, moment: int = moment, core: EngineCore = core) -> None:
            if step == moment:
                for i in range(1, 4):
                    core.abort(str(i))
                    core.abort(str(i))

        core.add(request("keep", texts[0]))
        tokens: list[int] = []
        step = 0
        while core.has_work:
            abort(step)
            core.check()
            for chunk in core.step():
                if chunk.request_id == "keep" and chunk.tokens:
                    tokens += chunk.tokens.token_ids.tolist()
            core.check()
            step += 1
        assert tokens == alone
        assert core.stats().free_blocks == core.stats().total_blocks


@pytest.mark.parametrize(
    "bad",
    [
        request("x", []),
        request("x", [5, 384]),
        request("x", [5, -1]),
        request("x", [5] * 513),
        request("x", [5], top_k=21),
        request("x", [5], prompt_top_k=-1),
        request("x", [5], SamplingParams(logit_bias={400: 1.0})),
        request("x", [5], SamplingParams(stop_token_ids=(384,))),
        request("x", [5], prompt_top_k=1, prompt_start=0),
        request("x", [5], SamplingParams(max_tokens=-1)),
        request("x", [5], SamplingParams(min_tokens=-1)),
        request("x", [5], SamplingParams(temperature=-0.5)),
        request("x", [5], SamplingParams(temperature=math.nan)),
        request("x", [5], SamplingParams(top_p=0.0)),
        request("x", [5], SamplingParams(top_k=-2)),
        request("x", [5], SamplingParams(min_p=1.5)),
        request("x", [5], SamplingParams(top_n_sigma=-1.0)),
        request("x", [5], SamplingParams(presence_penalty=math.inf)),
        request("x", [5], SamplingParams(frequency_penalty=math.nan)),
        request("x", [5], SamplingParams(repetition_penalty=0.0)),
        request("x", [5], SamplingParams(logit_bias={3: math.nan})),
    ],
    ids=str,
)
def test_a_bad_request_is_an_error_chunk_and_harms_nobody(core: EngineCore, bad: object) -> None:
    [text] = prompts(1, 10)
    want = run(core, [request("good", text)])["good"].token_ids
    results = run(core, [request("good", text), bad])  # type: ignore[list-item]
    assert results["x"].finish_reason is FinishReason.ERROR
    assert results["x"].last.error
    assert results["good"].token_ids == want


def test_a_request_id_in_use_is_refused(core: EngineCore) -> None:
    [text] = prompts(1, 10)
    core.add(request("a", text))
    core.add(request("a", text))
    chunks = core.step()
    assert [chunk.finish_reason for chunk in chunks].count(FinishReason.ERROR) == 1
    core.abort("a")
    core.check()
    assert not core.has_work


def test_an_end_token_beyond_the_vocabulary_needs_no_ban(core: EngineCore) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=4, min_tokens=2)
    result = run(core, [request("a", prompts(1, 10)[0], sampling, eos=(2, 999, -1))])["a"]
    assert len(result.token_ids) >= 2
    assert result.finish_reason is not FinishReason.ERROR


def test_an_aborted_request_is_not_heard_of_even_when_its_answer_was_ready(core: EngineCore) -> None:
    core.add(request("bad", []))
    core.abort("bad")
    assert not core.has_work
    assert core.step() == []


def test_cached_tokens_of_aborted_requests_are_counted(llama: Path) -> None:
    core = make_core(llama)
    [text] = prompts(1, 40)
    run(core, [request("a", text)])
    core.add(request("b", text))
    core.step()
    core.abort("b")
    assert core.stats().cached_tokens == 32


def test_a_step_that_raises_can_be_cleaned_up(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = prompts(2, 10)
    want = run(core, [request("n", texts[0])])["n"].token_ids
    core.add(request("a", texts[0]))
    core.add(request("b", texts[1]))
    core.add(request("c", []))  # answered already

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "finish", broken)
        with pytest.raises(RuntimeError):
            core.step()
    chunks = core.fail_all("it broke")
    assert {chunk.request_id: chunk.error for chunk in chunks} == {
        "a": "it broke",
        "b": "it broke",
        "c": "the prompt is empty",
    }
    core.check()
    assert run(core, [request("n", texts[0])])["n"].token_ids == want
