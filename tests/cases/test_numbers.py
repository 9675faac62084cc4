"""Cases 1 to 9: numbers that broke servers, at the socket of a real one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.cases.conftest import CHAT, COMPLETIONS, LEVELS, POISON, RealServer
from tests.helpers.invariants import Json, check_reply
from tests.helpers.tiny import VOCAB_SIZE

VIEWS = ("raw_logprobs", "tempered_logprobs", "processed_logprobs")
PASSPHRASE = "correct horse battery staple"


def numbers(value: Any, key: str = "") -> Iterator[float]:
    """Every number of a reply that is a logprob."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from numbers(item, "logprob" if "logprob" in key + name else "")
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item, key)
    elif isinstance(value, float) and key:
        yield value


def listed(choice: Json, path: str) -> list[list[float]]:
    """The values of each generated token's list."""
    if path == CHAT:
        return [[item["logprob"] for item in entry["top_logprobs"]] for entry in choice["logprobs"]["content"]]
    return [list(top.values()) for top in choice["logprobs"]["top_logprobs"]]


def wanted(path: str, k: int) -> Json:
    return {"logprobs": True, "top_logprobs": k} if path == CHAT else {"logprobs": k}


@pytest.mark.model
@pytest.mark.parametrize("mode", VIEWS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_01_a_guided_choice_has_finite_numbers_alone(embedded: RealServer, path: str, mode: str) -> None:
    options = ["positive", "negative"]
    for stream in (False, True):
        body: Json = {
            **wanted(path, 20 if mode == "processed_logprobs" else 2),
            "structured_outputs": {"choice": options},
            "logprobs_mode": mode,
            "temperature": 0,
            "stream": stream,
            "prompt": "A review: what a great film! Its mood is",
        }
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        reply = embedded.full(path, **body)
        check_reply("chat" if path == CHAT else "completions", body, reply)
        [choice] = reply["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert text in options
        found = list(numbers(reply))
        assert found
        assert all(math.isfinite(value) for value in found)
        if mode == "processed_logprobs":
            # The ways to spell what is left of the two words are all there is, and fewer than 20.
            for values in listed(choice, path):
                assert 1 <= len(values) < 20
                assert sum(map(math.exp, values)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.model
def test_case_02_prompt_scores_do_not_depend_on_top_k(embedded: RealServer) -> None:
    body: Json = {"prompt": PASSPHRASE, "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 5}
    count = len(embedded.ids(PASSPHRASE))
    plain = embedded.choice(COMPLETIONS, **body)["logprobs"]
    assert all(math.isfinite(value) for value in plain["token_logprobs"][1:])
    for sampling in ({"top_k": 1}, {"top_k": 3, "temperature": 0.1}, {"top_p": 0.1}, {"min_p": 0.9}, {"top_k": -1}):
        for stream in (False, True):
            found = embedded.choice(COMPLETIONS, **body, **sampling, stream=stream)["logprobs"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert found[name][:count] == plain[name][:count]
            assert len(found["tokens"]) == count + 1


@pytest.mark.model
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_03_alternatives_without_probability(embedded: RealServer, path: str) -> None:
    sampling: Json = {"top_p": 0.3, "temperature": 0.01, "seed": 1, "max_tokens": 6, **wanted(path, 5)}
    for stream in (False, True):
        for mode in VIEWS:
            body = {**sampling, "stream": stream, "logprobs_mode": mode}
            reply = embedded.full(path, **body)
            check_reply("chat" if path == CHAT else "completions", body, reply)
            found = listed(reply["choices"][0], path)
            if mode == "processed_logprobs":
                assert found == [[0.0]] * len(found)
            else:
                assert {len(values) for values in found} == {5}


@pytest.mark.slow
def test_case_04_a_row_of_nan_fails_alone(odd: RealServer, together: Callable[..., list[Any]]) -> None:
    """That neighbours keep their bits is tests/engine/test_invalid_rows: a socket cannot say what shares a step."""
    if odd.engine.capabilities.dtype != "float32":
        pytest.skip("bfloat16 promises no equal numbers in other company")

    def neighbour(**body: Any) -> Json:
        fixed = {"prompt": odd.ids("the answer is"), "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        return odd.full(COMPLETIONS, **fixed, logprobs=3, return_token_ids=True, **body)["choices"][0]

    def broken(path: str, **body: Any) -> None:
        for place in (0, 5, 9):
            prompt = [*range(10, 20)]
            prompt[place] = POISON
            response = odd.post(path, prompt=prompt, max_tokens=4, logprobs=2, **body)
            if body.get("stream") and response.status_code == 200:
                events = response.text.split("\n\n")
                assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "invalid_logits"
            else:
                assert response.status_code == 500
                assert response.json()["error"]["code"] == "invalid_logits"
                assert response.headers["x-should-retry"] == "false"
            assert "not numbers" in response.text
            assert not any(value <= -9999 for value in numbers(response.text))

    alone = neighbour()
    beside = together(
        [
            lambda: neighbour(),
            lambda: neighbour(stream=True),
            lambda: broken(COMPLETIONS),
            lambda: broken(COMPLETIONS, echo=True),
            lambda: broken(COMPLETIONS, stream=True),
        ]
    )
    for found in beside[:2]:
        assert found["token_ids"] == alone["token_ids"]
        # This model's logits are some hundred times as large as others', and so is float32's rounding in other company.
        assert found["token_logprobs"] == pytest.approx(alone["token_logprobs"], abs=1e-2)
    assert odd.service.num_choices == 0


def top_of(row: torch.Tensor) -> list[int]:
    """The ids that share the best logit."""
    return [int(i) for i in (row == row.max()).nonzero().flatten()]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_06_equal_logits_go_to_the_lowest_id(odd: RealServer, path: str) -> None:
    fixed: Json = {"max_tokens": 5, "return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
    fixed["skip_special_tokens"] = False  # id 0 is one, and chat lists what is in its text
    samplings: list[Json] = [{"temperature": 0}, *[{"top_k": 1, "temperature": 1.5, "seed": seed} for seed in range(8)]]
    samplings.append({"top_k": 1, "n": 4})
    for sampling in samplings:
        for choice in odd.full(path, **fixed, **sampling, **wanted(path, 20))["choices"]:
            for place, token_id in enumerate(choice["token_ids"]):
                # Levels rise or fall with ids, by the sign of a position's one number.
                assert token_id in (0, LEVELS - 1)
                step = 1 if token_id == 0 else -1
                order = [i for level in range(2) for i in range(token_id + step * level, VOCAB_SIZE, LEVELS)]
                if path == CHAT:
                    names = [item["token"] for item in choice["logprobs"]["content"][place]["top_logprobs"]]
                else:
                    names = list(choice["logprobs"]["top_logprobs"][place])
                assert names == [f"token_id:{i}" for i in order if i != POISON][:20]


def test_case_07_never_above_zero(odd: RealServer, tiny: RealServer) -> None:
    """The reduction by itself in every dtype: tests/ops/test_token_logprobs."""
    for server in (odd, tiny):
        for path in (CHAT, COMPLETIONS):
            for mode in VIEWS:
                for temperature in (0, 0.01, 1):
                    body: Json = {"max_tokens": 8, "temperature": temperature, "seed": 3, "logprobs_mode": mode}
                    if mode == "raw_logprobs":
                        body["prompt_logprobs"] = 20  # other views of a prompt are refused
                    reply = server.full(path, **body, **wanted(path, 20))
                    found = list(numbers(reply))
                    assert len(found) > 100
                    assert max(found) <= 0
    # One id that is left of all, and one that leaves the others no probability: exactly 0.
    only = tiny.choice(COMPLETIONS, allowed_token_ids=[7], logprobs=0, max_tokens=3, ignore_eos=True)
    assert only["logprobs"]["token_logprobs"] == [0.0] * 3
    biased = tiny.choice(
        COMPLETIONS, logit_bias={"7": 100}, logprobs=1, max_tokens=3, logprobs_mode="processed_logprobs"
    )
    assert biased["logprobs"]["token_logprobs"] == [0.0] * 3


def test_case_08_gaps_beyond_float32s_exp_are_finite(odd: RealServer) -> None:
    prompt = list(range(40, 70))
    rows = odd.logprobs(prompt)
    expected = [float(rows[place - 1, prompt[place]]) for place in range(1, len(prompt))]
    assert min(expected) < -150
    body: Json = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 20, "prompt_logprobs": 20}
    choice = odd.choice(COMPLETIONS, **body)
    found = choice["logprobs"]["token_logprobs"][1:]
    # bfloat16 has 8 bits of a number, here of the logits, which go as far as the largest gap.
    error = 1e-3 if odd.engine.capabilities.dtype == "float32" else 0.04 * -min(expected)
    assert found == pytest.approx(expected, abs=error)
    assert found == [next(iter(row.values()))["logprob"] for row in choice["prompt_logprobs"][1:]]
    assert [token for token in found if token < -104]
    # The same gap between generated alternatives, which are named: one is -24 * 23 times that number away.
    named = odd.choice(COMPLETIONS, prompt=prompt, logprobs=0, max_tokens=1, logprob_token_ids=[24, 47, 383])
    assert all(-9999 < value <= 0 for value in numbers(named))


def test_case_09_ranks_count_strictly_greater_logits(odd: RealServer, tiny: RealServer) -> None:
    for server in (odd, tiny):
        prompt = list(range(40, 70))
        body: Json = {"prompt": prompt, "max_tokens": 0, "prompt_logprobs": 20}
        rows = server.rows(prompt)
        found = server.choice(COMPLETIONS, **body)["prompt_logprobs"]
        assert found[0] is None
        tied = 0
        for place, entry in enumerate(found[1:], 1):
            row = rows[place - 1]
            for token, item in entry.items():
                assert item["rank"] == 1 + int((row > row[int(token)]).sum())
            ranks = [item["rank"] for item in entry.values()]
            tied += len(ranks) - len(set(ranks))
        assert (tied > 0) == (server is odd)
    # A best token that ties, greedily continued and then scored as a prompt.
    reply = odd.choice(COMPLETIONS, prompt=[40, 41], max_tokens=4, temperature=0, return_token_ids=True)
    scored = odd.choice(COMPLETIONS, prompt=[40, 41, *reply["token_ids"]], max_tokens=0, prompt_logprobs=3)
    assert [next(iter(entry.values()))["rank"] for entry in scored["prompt_logprobs"][2:]] == [1, 1, 1, 1]
