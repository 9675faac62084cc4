"""The seeds of the choices that one request asks for."""

from __future__ import annotations

import hashlib
import struct


def choice_seed(seed: int | None, prompt: int, choice: int) -> int | None:
    """The seed that one choice draws from, of a request's own `seed`; None stays None.

    The first choice of the first prompt has the request's seed, so that `n: 1` repeats it. Every other has a hash of
    all three numbers: a sum of them would make choice 1 of seed 5 a copy of choice 0 of seed 6.

    Args:
        seed: of the request, in 64 bits with a sign.
        prompt, choice: the place of the prompt, and of the choice among those of its prompt, both from 0.

    Returns:
        0 to 2^63 - 1, where it is a hash: engines of others read it as a number with a sign or without.
    """
    if seed is None or prompt == choice == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<Qqq", seed % 2**64, prompt, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
