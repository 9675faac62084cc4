"""LLM: the in-process facade on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import neper
from neper import LLM, FinishReason, LogprobParams, SamplingParams
from neper.errors import ConfigError, ContextLengthError, InvalidRequestError, StartupError

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny_dir: Callable[..., Path]) -> LLM:
    return LLM(str(tiny_dir("llama")), device="cpu", dtype="float32", num_threads=1)


def test_text_ids_and_scores_belong_together(llm: LLM) -> None:
    text = "Hello there. 日本語 😀"
    by_text, by_ids = llm.generate([text, llm.tokenizer.encode(text)], GREEDY, LogprobParams(top_k=3, prompt_top_k=0))
    assert by_text.token_ids == by_ids.token_ids
    assert len(by_text.token_ids) == 12
    assert by_text.finish_reason is FinishReason.LENGTH
    assert "".join(token.text for token in by_text.tokens) == by_text.text
    data = b"".join(llm.tokenizer.token_bytes(i) for i in by_text.token_ids if i not in llm.tokenizer.special_token_ids)
    assert data.decode("utf-8", "replace") == by_text.text
    assert by_text.logprobs is not None
    assert by_text.logprobs.token_ids.tolist() == by_text.token_ids
    assert by_text.logprobs.top_ids[:, 0].tolist() == by_text.token_ids  # greedy
    assert by_text.prompt_logprobs is not None
    assert by_text.prompt_logprobs.token_ids.tolist() == by_text.prompt_token_ids[1:]


def test_score_is_the_prompt_logprobs(llm: LLM) -> None:
    texts = ["the quick brown fox", "x", "Hello, world!"]
    scores = llm.score(texts)
    for text, got in zip(texts, scores, strict=True):
        ids = llm.tokenizer.encode(text)
        assert len(got) == len(ids) - 1
        if len(ids) > 1:
            [whole] = llm.generate(text, SamplingParams(max_tokens=0), LogprobParams(prompt_top_k=2))
            assert whole.prompt_logprobs is not None
            assert np.array_equal(whole.prompt_logprobs.logprob, got)


def test_a_reply_as_an_arrow_table_has_a_row_per_token(llm: LLM) -> None:
    scored = LogprobParams(top_k=2, prompt_top_k=0, prompt_start=2, prompt_logprob_token_ids=(9, 5, 300))
    [reply] = llm.generate("Hello, world!", GREEDY, scored)
    assert reply.logprobs is not None
    assert reply.prompt_logprobs is not None
    table, begin = reply.to_arrow(prompt=3), len(reply.prompt_token_ids)
    assert table["token_id"].to_pylist() == reply.prompt_token_ids + reply.token_ids
    assert table["position"].to_pylist() == list(range(len(table)))
    assert table["choice"].to_pylist() == [None] * begin + [3] * 12
    assert table["logprob"].to_pylist() == [
        None, None, *reply.prompt_logprobs.logprob.tolist(), *reply.logprobs.logprob.tolist()
    ]  # fmt: skip
    assert table["rank"].to_pylist()[2:] == reply.prompt_logprobs.rank.tolist() + reply.logprobs.rank.tolist()
    for name in ("top_ids", "top_logprobs"):
        assert table[name].to_pylist()[2:begin] == getattr(reply.prompt_logprobs, name).tolist()
        assert table[name].to_pylist()[begin:] == getattr(reply.logprobs, name).tolist()
    assert sorted(table["top_ids"][begin - 1].as_py()) == [5, 9, 300]
    [plain] = llm.generate("Hello, world!", GREEDY)
    assert plain.to_arrow()["token_id"].to_pylist() == table["token_id"].to_pylist()
    assert plain.to_arrow()["top_ids"].null_count == len(table)


def test_a_stop_string_cuts_the_text_and_frees_the_engine(llm: LLM) -> None:
    [free] = llm.generate("the quick", SamplingParams(temperature=0, max_tokens=40))
    middle = free.text[len(free.text) // 2 :][:3]
    [cut] = llm.generate(
        "the quick", SamplingParams(temperature=0, max_tokens=40, stop=(middle,)), LogprobParams(top_k=0)
    )
    assert cut.text == free.text[: free.text.index(middle)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.stop_reason == middle
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert cut.logprobs is not None
    assert len(cut.logprobs) == len(cut.token_ids)
    assert not llm.core.has_work
    llm.core.check()


def test_a_stream_joins_to_the_reply(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=30, skip_special_tokens=False)
    prompt = llm.tokenizer.apply_chat_template(messages)
    llm.generate([prompt], sampling)  # bits are equal where the cache is equally warm
    deltas = list(llm.stream_chat(messages, sampling, LogprobParams(top_k=2)))
    [whole] = llm.generate([prompt], sampling, LogprobParams(top_k=2))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [t for delta in deltas for t in delta.tokens if t.visible] == whole.tokens
    rows = [delta.rows for delta in deltas if delta.rows is not None]
    assert whole.logprobs is not None
    assert b"".join(part.data for part in rows) == whole.logprobs.data
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is whole.finish_reason


def test_a_stream_that_is_closed_leaves_nothing(llm: LLM) -> None:
    stream = llm.stream_chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=100))
    next(stream)
    stream.close()
    assert not llm.core.has_work
    llm.core.check()


def test_a_call_beside_an_open_stream_is_refused_and_harms_it_not(llm: LLM) -> None:
    stream = llm.stream_chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0, max_tokens=5))
    tokens = next(stream).tokens
    with pytest.raises(InvalidRequestError, match="still open"):
        llm.generate("a", GREEDY)
    for delta in stream:
        tokens += delta.tokens
    assert len(tokens) == 5
    assert len(llm.generate("a", GREEDY)[0].token_ids) == 12


def test_bad_input_computes_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        llm.generate([[5, 384]])
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate([[5], []])
    with pytest.raises(ContextLengthError):
        llm.generate([[5] * 512])
    with pytest.raises(InvalidRequestError, match="alternatives"):
        llm.generate("a", GREEDY, LogprobParams(top_k=21))
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        llm.generate("a", SamplingParams(max_tokens=-1))
    with pytest.raises(InvalidRequestError, match="mode must be one of"):
        llm.generate("a", GREEDY, LogprobParams(top_k=0, mode="other"))  # type: ignore[arg-type]
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(InvalidRequestError, match="seed must be an integer of 64 bits"):
            llm.generate(["a", "b"], SamplingParams(seed=seed))
    with pytest.raises(InvalidRequestError, match="stop string"):
        llm.generate("a", SamplingParams(stop=("a", "")))
    with pytest.raises(InvalidRequestError, match="0 entries for 1"):
        llm.generate("a", [])
    with pytest.raises(InvalidRequestError, match="2 entries for 1"):
        llm.generate("a", [GREEDY, GREEDY])
    assert not llm.core.has_work
    assert len(llm.generate("a", GREEDY)[0].token_ids) == 12


@pytest.mark.parametrize(
    "field",
    [
        {"top_k": 1.5},
        {"max_tokens": 2.5},
        {"ignore_eos": "no"},
        {"allowed_token_ids": (1.5,)},
        {"logit_bias": {1.5: 1.0}},
        {"logit_bias": [5]},
        {"logit_bias": None},
        {"logit_bias": {5: 1e39}},
        {"bad_words": ((1.5,),)},
        {"seed": 1.5},
        {"top_n_sigma": "1"},
        {"top_n_sigma": None},
        {"stop": 5},
        {"top_k": [1]},
    ],
    ids=str,
)
def test_a_sampling_field_of_a_wrong_type_is_named(llm: LLM, field: dict[str, Any]) -> None:
    [name] = field
    for sampling in (SamplingParams(**field), [SamplingParams(**field)]):
        with pytest.raises(InvalidRequestError, match=f"^{name}"):
            llm.generate(["a"], sampling)
        assert not llm.core.has_work
    with pytest.raises(InvalidRequestError, match=f"^{name}"):
        next(iter(llm.stream_chat([{"role": "user", "content": "Hi"}], SamplingParams(**field))))


def test_wrong_types_of_arguments_are_named(llm: LLM) -> None:
    for prompts in ([[1.5]], [1.5], None, b"hi", [b"hi"], [True], 5, {"a": 1}, object(), np.array([1.5])):
        for call in (llm.generate, llm.score):
            with pytest.raises(InvalidRequestError, match="prompts must be texts or token ids"):
                call(prompts)  # type: ignore[operator]
    with pytest.raises(InvalidRequestError, match="logprobs must be LogprobParams, got int"):
        llm.generate("a", GREEDY, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams, got dict"):
        llm.generate("a", {"top_k": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="prompt_start"):
        llm.generate("a", GREEDY, LogprobParams(prompt_top_k=0, prompt_start="1"))  # type: ignore[arg-type]


def test_numbers_and_arrays_of_numpy_are_taken(llm: LLM) -> None:
    [plain] = llm.generate([5, 6], SamplingParams(max_tokens=4, top_k=3, seed=7))
    five, six = np.array([5, 6])
    sampling = SamplingParams(max_tokens=np.int32(4), top_k=np.int64(3), seed=np.uint8(7))  # type: ignore[arg-type]
    for prompts in (np.array([5, 6]), [five, six], [np.array([5, 6])], np.array([[5, 6]]), (5, 6), [(5, 6)]):
        [reply] = llm.generate(prompts, sampling)  # type: ignore[arg-type]
        assert (reply.prompt_token_ids, reply.token_ids) == ([5, 6], plain.token_ids)
    banned = SamplingParams(max_tokens=4, temperature=0, allowed_token_ids=np.array([8, 9]), logit_bias={8: -np.inf})  # type: ignore[arg-type]
    assert llm.generate("a", banned)[0].token_ids == [9] * 4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"foo": 1}, "foo is no setting; there are model, device, dtype, .*"),
        ({"max_model_len": "x"}, r"max_model_len must be int \| None, got 'x'"),
        ({"kv_cache_memory": "1XB"}, r"kv_cache_memory must be int \| None, got '1XB'"),
    ],
)
def test_a_setting_that_is_wrong_is_named(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        LLM("no/such/model/anywhere", **setting)


def test_a_grammar_that_cannot_be_used_is_the_request_s_fault(llm: LLM) -> None:
    for grammar in ("no grammar", '{"grammars": [{"lark_grammar": "start: x"}]}'):
        with pytest.raises(InvalidRequestError):
            llm.generate(["a", "b"], [GREEDY, SamplingParams(max_tokens=4, grammar=grammar)])
        assert not llm.core.has_work


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(StartupError, match="no model"):
        LLM("no/such/model/anywhere")


def test_wrong_arguments_are_value_errors(llm: LLM, tiny_dir: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="sampling_params holds 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="tokens, the model's context"):
        llm.generate([[0] * 10_000])
    with pytest.raises(ValueError, match="device 'tpu' is not known"):
        LLM(str(tiny_dir("llama")), device="tpu")


def test_public_names_resolve() -> None:
    for name in neper.__all__:
        assert getattr(neper, name) is not None
    with pytest.raises(AttributeError):
        neper.nothing  # noqa: B018


def test_no_prompts_give_no_replies(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.score([]) == []
