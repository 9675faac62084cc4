"""GEN from requests and requests from GEN: what is sent, what our engine takes, and what it says that it cannot do."""

from __future__ import annotations

from typing import Any

import pytest

from neper.types import LogprobParams, Request, SamplingParams
from neper.wire.lines import Gen, format_request, parse_request
from neper.wire.requests import gen_of, request_of


def request(sampling: SamplingParams, top_k: int | None = None) -> Request:
    return Request(
        request_id="7",
        prompt_token_ids=[5, 6],
        sampling=sampling,
        logprobs=LogprobParams(top_k=top_k),
        eos_token_ids=(2,),
    )


def back(line: bytes, **options: Any) -> Request:
    gen = parse_request(line, tagged=False)
    assert isinstance(gen, Gen)
    return request_of(gen, "7", **({"eos_token_ids": (2,), "max_model_len": 512, "max_logprobs": 20} | options))


GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SENT: list[tuple[Request, str]] = [
    (request(GREEDY), "GEN 8 temperature=0.0 5,6"),
    (request(SamplingParams(max_tokens=8)), "GEN 8 temperature=1.0 5,6"),
    (request(GREEDY, 0), "GEN 8 temperature=0.0 logprobs=0 5,6"),
    (request(GREEDY, 5), "GEN 8 temperature=0.0 logprobs=5 5,6"),
    (
        request(SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=-3)),
        "GEN 8 temperature=0.7 top_p=0.9 top_k=40 min_p=0.05 seed=-3 5,6",
    ),
    (
        request(SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.3)),
        "GEN 8 temperature=0.0 penalty_repeat=1.3 penalty_last_n=-1 5,6",
    ),
    (
        request(SamplingParams(max_tokens=8, temperature=0.0, frequency_penalty=-0.5)),
        "GEN 8 temperature=0.0 penalty_freq=-0.5 penalty_last_n=-1 5,6",
    ),
    (
        request(SamplingParams(max_tokens=8, temperature=0.0, presence_penalty=0.25)),
        "GEN 8 temperature=0.0 penalty_present=0.25 penalty_last_n=-1 5,6",
    ),
    (
        request(SamplingParams(max_tokens=8, temperature=0.0, allowed_token_ids=(9, 4))),
        "GEN 8 temperature=0.0 allowed=9,4 5,6",
    ),
]


@pytest.mark.parametrize(("asked", "line"), SENT, ids=[line for _, line in SENT])
def test_what_is_neutral_is_not_sent_and_the_rest_comes_back(asked: Request, line: str) -> None:
    written = format_request(gen_of(asked, None, 384))
    assert written == f"{line}\n".encode()
    assert back(written) == asked


def test_lines_have_the_tag_and_lists_of_all_ids_their_number() -> None:
    gen = gen_of(request(GREEDY, -1), "a7", 384)
    assert (gen.tag, gen.logprobs) == ("a7", 384)
    assert gen_of(request(GREEDY, 400), None, 384).logprobs == 384


def test_a_temperature_that_is_greedy_is_sent_as_0() -> None:
    assert gen_of(request(SamplingParams(max_tokens=8, temperature=9e-6)), None, 384).temperature == 0.0


def test_the_rest_of_a_context_that_is_not_known_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        gen_of(request(SamplingParams(temperature=0.0)), None, 384)


@pytest.mark.parametrize("keys", ["", "temperature=0", "top_k=-1", "top_k=0", "penalty_last_n=64", "unknown=1"])
def test_what_says_nothing_is_greedy_without_filters(keys: str) -> None:
    found = back(f"GEN 8 {keys} 5,6".encode()).sampling
    assert found.greedy
    assert not found.penalized
    assert not found.filters(384)


@pytest.mark.parametrize(
    ("seed", "signed"), [(0, 0), (-1, -1), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)]
)
def test_seeds_without_a_sign_are_the_same_bits(seed: int, signed: int) -> None:
    assert back(b"GEN 8 seed=%d 5" % seed).sampling.seed == signed


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ("top_p=0", "top_p must be above 0"),
        ("penalty_repeat=0", "penalty_repeat must be above 0"),
        ("penalty_repeat=1.1 penalty_last_n=64", "penalty_last_n must be -1, or the context of 512"),
        ("penalty_freq=1 penalty_last_n=0", "penalty_last_n must be -1"),
        ("penalty_present=1 penalty_last_n=511", "penalty_last_n must be -1"),
        ("logprobs=21", "21 alternatives were asked for; 0 to 20 can be listed"),
    ],
)
def test_what_our_engine_cannot_do_is_said(keys: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        back(f"GEN 8 {keys} 5,6".encode())


@pytest.mark.parametrize("last", ["penalty_last_n=-1", "penalty_last_n=512", "penalty_last_n=9999", ""])
def test_penalties_of_all_tokens_are_taken(last: str) -> None:
    assert back(f"GEN 8 penalty_repeat=1.1 {last} 5,6".encode()).sampling.repetition_penalty == 1.1


def test_without_a_cap_any_number_may_be_listed() -> None:
    assert back(b"GEN 8 logprobs=300 5", max_logprobs=-1).logprobs.top_k == 300


@pytest.mark.parametrize(("count", "places"), [(3, 3), (1024, 1024), (1025, 1025), (1500, 1500)])
@pytest.mark.parametrize("asked", [0, 2, 5000])
def test_an_allowed_set_is_listed_whole_whatever_is_asked_for(count: int, places: int, asked: int) -> None:
    ids = ",".join(str(i) for i in [*range(count), 0])  # one of them twice
    assert back(f"GEN 8 logprobs={asked} allowed={ids} 5".encode()).num_listed(2000) == places
    assert back(f"GEN 8 allowed={ids} 5".encode()).num_listed(2000) is None
