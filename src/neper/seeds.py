"""The seeds of the choices that one request asks for."""

from __future__ import annotations

import hashlib
import struct


def choice_seed(seed: int | None, prompt: int, choice: int) -> int | None:
    """The seed of one choice, made from the request's `seed`; None stays None.

    The first choice of the first prompt has the request's seed, so that `n: 1` repeats it. Every other choice has a
    hash of all three numbers. With a sum of them, choice 1 of seed 5 would be a copy of choice 0 of seed 6.

    Args:
        seed: of the request, in 64 bits with a sign.
        prompt, choice: the place of the prompt, and of the choice among those of its prompt, both from 0.

    Returns:
        0 to 2^63 - 1 where it is a hash. Engines read such a number alike with a sign and without one.
    """
    if seed is None or prompt == choice == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<Qqq", seed % 2**64, prompt, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
