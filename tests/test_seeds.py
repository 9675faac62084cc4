"""Seeds of choices: each its own, over requests that differ by one in everything."""

from __future__ import annotations

from itertools import product

from neper.seeds import choice_seed


def test_case_72_no_two_choices_share_a_seed() -> None:
    seeds = [*range(-40, 40), 2**63 - 1, -(2**63)]
    found = [choice_seed(seed, prompt, choice) for seed, prompt, choice in product(seeds, range(12), range(12))]
    assert len(set(found)) == len(found)
    hashed = [seed for seed in found if seed not in seeds]
    assert len(hashed) == len(found) - len(seeds)
    assert all(0 <= seed < 2**63 for seed in hashed if seed is not None)


def test_the_first_choice_has_the_requests_own_and_none_stays_none() -> None:
    assert [choice_seed(seed, 0, 0) for seed in (5, -1, 2**63 - 1)] == [5, -1, 2**63 - 1]
    assert choice_seed(None, 0, 0) is choice_seed(None, 3, 2) is None
    # Fixed for good: replies are repeated by later versions.
    assert choice_seed(5, 0, 1) == 1_808_899_111_304_528_707
