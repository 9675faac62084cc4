"""Cases 24 to 32: prompts, echoed and scored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from neper.ops.linear_logprobs import linear_logprobs
from neper.types import SamplingParams
from tests.cases.conftest import CHAT, COMPLETIONS, RealServer
from tests.helpers.engine import make_core, prompts, run
from tests.helpers.engine import request as engine_request
from tests.helpers.invariants import Json, check_reply
from tests.helpers.live_memory import LiveMemory
from tests.helpers.tiny import VOCAB_SIZE
from tests.server.test_errors import check

TEXT = "Hello there. What is the answer? 日本 😀"


def rows_of(arrays: Json) -> list[dict[int, float] | None]:
    """The top dicts of `return_tokens_as_token_ids`, by id."""
    return [
        None if best is None else {int(key.removeprefix("token_id:")): value for key, value in best.items()}
        for best in arrays["top_logprobs"]
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_case_24_and_27_an_echo_scores_every_token_of_the_prompt(tiny: RealServer, as_ids: bool, stream: bool) -> None:
    """Entry i is log p(t_i | t_<i), by transformers; as an evaluation harness asks."""
    prompt = tiny.ids(TEXT)
    for k, max_tokens in ((1, 1), (5, 4)):
        body: Json = {
            "prompt": [prompt] if as_ids else TEXT,
            "temperature": 0,
            "max_tokens": max_tokens,
            "logprobs": k,
            "seed": 1234,
            "echo": True,
            "stream": stream,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        reply = tiny.full(COMPLETIONS, **body)
        check_reply("completions", body, reply)
        [choice] = reply["choices"]
        ids = [*prompt, *choice["token_ids"]]
        assert choice["prompt_token_ids"] == prompt
        assert choice["text"].startswith(TEXT)
        arrays = choice["logprobs"]
        assert arrays["tokens"] == [f"token_id:{token_id}" for token_id in ids]
        assert arrays["token_logprobs"][0] is None
        assert arrays["top_logprobs"][0] is None
        logprobs = tiny.logprobs(ids)
        for place, best in list(enumerate(rows_of(arrays)))[1:]:
            row = logprobs[place - 1]
            assert arrays["token_logprobs"][place] == pytest.approx(float(row[ids[place]]), abs=1e-4)
            expected = {int(i): float(row[i]) for i in row.topk(k).indices} | {ids[place]: float(row[ids[place]])}
            assert best == pytest.approx(expected, abs=1e-4)


def test_case_24_no_echo_in_chat(tiny: RealServer) -> None:
    check(tiny.post(CHAT, echo=True), 400, "echo")
    assert tiny.choice(CHAT, echo=False, max_tokens=1)["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_case_25_the_prompt_alone(tiny: RealServer, stream: bool) -> None:
    options: Json = {"stream_options": {"include_usage": True}} if stream else {}
    for logprobs in (None, 0, 3):
        for prompt in (TEXT, "a", [5], [TEXT, "Hello"]):
            body: Json = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": logprobs, "stream": stream}
            reply = tiny.full(COMPLETIONS, **body, **options)
            check_reply("completions", body, reply)
            assert reply["usage"]["completion_tokens"] == 0
            texts = prompt if isinstance(prompt, list) else [prompt]
            for choice, text in zip(reply["choices"], texts, strict=True):
                assert choice["finish_reason"] == "length"
                expected = tiny.tokenizer.token_text(text) if isinstance(text, int) else text
                assert choice["text"] == expected
                if logprobs is not None:
                    assert choice["logprobs"]["token_logprobs"][0] is None
                    count = 1 if isinstance(text, int) else len(tiny.ids(text))
                    assert {len(value) for value in choice["logprobs"].values() if value is not None} == {count}
    silent = tiny.full(COMPLETIONS, prompt=TEXT, max_tokens=0, logprobs=1, stream=stream)
    assert silent["choices"][0]["text"] == ""
    check(tiny.post(CHAT, max_tokens=0), 400, "max_tokens")


def test_case_28_the_same_prompt_again_when_it_is_cached(tiny: RealServer) -> None:
    """33 tokens are two blocks of the cache and one token; the others end on a block's edge and beside it."""
    for length in (33, 32, 31, 48, 17):
        [prompt] = prompts(1, length, seed=length)
        scored: Json = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 3}
        first = tiny.full(COMPLETIONS, **scored)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = [tiny.full(COMPLETIONS, **scored) for _ in range(2)]
        assert again[0]["choices"] == again[1]["choices"] == first["choices"]
        # Without scores, what is cached is used, and after that scores are still whole.
        plain = tiny.full(COMPLETIONS, prompt=prompt, max_tokens=2, temperature=0)
        assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == (length - 1) // 16 * 16
        assert plain["choices"][0]["text"] == first["choices"][0]["text"]
        assert tiny.full(COMPLETIONS, **scored)["choices"] == first["choices"]
        echoed = tiny.choice(COMPLETIONS, prompt=prompt, max_tokens=0, echo=True, logprobs=3)
        values = [next(iter(entry.values()))["logprob"] for entry in first["choices"][0]["prompt_logprobs"][1:]]
        assert echoed["logprobs"]["token_logprobs"][1:] == values
        logprobs = tiny.logprobs(prompt)
        assert values == pytest.approx([float(logprobs[i - 1, prompt[i]]) for i in range(1, length)], abs=1e-4)


def test_case_30_the_prompts_own_token_comes_first(tiny: RealServer) -> None:
    prompt = tiny.ids(TEXT)
    for k in (0, 1, 5):
        [of_completion] = tiny.full(COMPLETIONS, prompt=TEXT, max_tokens=1, prompt_logprobs=k)["choices"]
        chat = tiny.full(CHAT, max_tokens=1, prompt_logprobs=k, return_token_ids=True)
        for ids, entries in (
            (prompt, of_completion["prompt_logprobs"]),
            (chat["prompt_token_ids"], chat["prompt_logprobs"]),
        ):
            assert len(entries) == len(ids)
            assert entries[0] is None
            logprobs = tiny.logprobs(ids)
            for place, entry in enumerate(entries[1:], 1):
                own, *others = entry
                assert int(own) == ids[place]
                best = [str(int(i)) for i in logprobs[place - 1].topk(k).indices]
                assert others == [other for other in best if other != own]
                for token, item in entry.items():
                    assert item.keys() == {"logprob", "rank", "decoded_token"}
                    assert item["logprob"] == pytest.approx(float(logprobs[place - 1, int(token)]), abs=1e-4)
    check(tiny.post(COMPLETIONS, prompt_logprobs=1, stream=True), 400, "prompt_logprobs")


def test_case_31_memory_does_not_grow_with_the_prompt(
    tiny_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8,192 x 152k logits what exists at a time is a tile of 256 MiB; here of 400 x 384, one of 32 rows."""
    tile = 32 * VOCAB_SIZE * 4
    small = partial(linear_logprobs, max_logits_bytes=tile)
    monkeypatch.setattr("neper.engine.step.reference_sampler.linear_logprobs", small)
    core = make_core(tiny_dir("llama"))
    peaks = []
    for length in (100, 400):
        [ids] = prompts(1, length, seed=1)
        item = engine_request("a", ids, SamplingParams(max_tokens=0), prompt_top_k=20)
        with LiveMemory(columns=VOCAB_SIZE) as logits:
            result = run(core, [item])["a"]
        assert len(result.prompt) == length - 1
        peaks.append(logits.peak)
    # The product, and a few temporaries of the reduction over it.
    assert tile <= peaks[0] == peaks[1] < 6 * tile < 400 * VOCAB_SIZE * 4


def test_case_31_whole_vocabularies_of_a_long_prompt_come_in_parts(tiny: RealServer) -> None:
    check(tiny.post(COMPLETIONS, prompt=TEXT, prompt_logprobs=-1), 400, "prompt_logprobs")
    [ids] = prompts(1, 480, seed=3)
    choice = tiny.choice(COMPLETIONS, prompt=ids, prompt_logprobs=20, max_tokens=1)
    assert len(choice["prompt_logprobs"]) == 480
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {20, 21}


@pytest.mark.parametrize("stream", [False, True])
def test_case_32_choices_are_prompt_major(tiny: RealServer, stream: bool) -> None:
    texts = [TEXT, "Hello", "日本語 naïve"]
    for n in (1, 2):
        for given in (texts, [tiny.ids(text) for text in texts]):
            options: Json = {"max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True, "return_token_ids": True}
            body: Json = {**options, "prompt": given, "n": n, "stream": stream}
            reply = tiny.full(COMPLETIONS, **body)
            check_reply("completions", body, reply)
            assert [choice["index"] for choice in reply["choices"]] == list(range(3 * n))
            for choice in reply["choices"]:
                text = texts[choice["index"] // n]
                assert choice["text"].startswith(text)
                assert choice["prompt_token_ids"] == tiny.ids(text)
                alone = tiny.choice(COMPLETIONS, **options, prompt=text)
                assert choice["text"] == alone["text"]
                own, single = choice["logprobs"], alone["logprobs"]
                assert own["tokens"] == single["tokens"]
                assert own["text_offset"] == single["text_offset"]
                assert own["token_logprobs"][1:] == pytest.approx(single["token_logprobs"][1:], abs=1e-4)
    for count in (4, 1):
        check(tiny.post(COMPLETIONS, prompt=["a", [5]] * count), 400, "prompt")


def is_greedy(arrays: Json, place: int) -> bool:
    """As lm-evaluation-harness decides it: the very same float."""
    value: float = arrays["token_logprobs"][place]
    return value == max(arrays["top_logprobs"][place].values())


@pytest.mark.parametrize("server_name", ["tiny", pytest.param("embedded", marks=pytest.mark.model)])
@pytest.mark.parametrize("k", [1, 5])
def test_the_greedy_continuation_is_greedy_when_it_is_scored(server_name: str, k: int, request: Any) -> None:
    server: RealServer = request.getfixturevalue(server_name)
    for text in ("The capital of France is", "Once upon a time, there was a", "1, 2, 3, 4,"):
        prompt = server.ids(text)
        options: Json = {"temperature": 0, "logprobs": 20, "return_token_ids": True, "ignore_eos": True}
        grown = server.choice(COMPLETIONS, prompt=prompt, max_tokens=24, **options)
        # Where the first two are as near as this, a prompt's sums and a token's may disagree on the order.
        sure = [near(best) > 1e-3 for best in grown["logprobs"]["top_logprobs"]]
        whole = [*prompt, *grown["token_ids"]]
        for max_tokens in (0, 1):
            scored = server.choice(
                COMPLETIONS, prompt=whole, max_tokens=max_tokens, echo=True, logprobs=k, temperature=0
            )
            arrays = scored["logprobs"]
            assert len(arrays["tokens"]) == len(whole) + max_tokens
            found = [is_greedy(arrays, place) for place in range(len(prompt), len(whole))]
            assert all(greedy for greedy, certain in zip(found, sure, strict=True) if certain)
            assert sum(sure) > 20
            assert all(is_greedy(arrays, place) for place in range(len(whole), len(arrays["tokens"])))


def near(best: dict[str, float]) -> float:
    first, second, *_ = sorted(best.values(), reverse=True)
    return first - second


@pytest.mark.parametrize("server_name", ["tiny", pytest.param("embedded", marks=pytest.mark.model)])
def test_random_text_is_greedy_exactly_where_it_is_the_best(server_name: str, request: Any) -> None:
    server: RealServer = request.getfixturevalue(server_name)
    text = "The cat sat on the mat and it was a very good day. Paris is the capital of France, 日本 😀."
    body: Json = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    choice = server.choice(COMPLETIONS, **body, return_tokens_as_token_ids=True)
    arrays = choice["logprobs"]
    hits = 0
    for place, best in enumerate(rows_of(arrays)[1:], 1):
        assert best is not None
        # Ranks are counted apart from values: 1 is the best, ties included.
        own = next(iter(choice["prompt_logprobs"][place].values()))
        assert is_greedy(arrays, place) == (own["rank"] == 1) == (len(best) == 1 or len(set(best.values())) == 1)
        hits += own["rank"] == 1
    count = len(arrays["tokens"])
    if server_name == "embedded":
        assert 3 < hits < count - 3
    else:
        logprobs = server.logprobs(server.ids(text))
        best_ids = logprobs.argmax(-1).tolist()
        expected = [best_ids[i - 1] == token_id for i, token_id in enumerate(server.ids(text)) if i]
        assert [is_greedy(arrays, place) for place in range(1, count)] == expected
