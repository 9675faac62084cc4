"""The cases of `neper bench speculate`: texts for a real model, and drafts for one with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from neper.bench.engine_cases import Case, Plan
from neper.bench.engine_rig import Rig
from neper.engine.plan.sequence import Sequence
from neper.engine.step.runner import BegunStep
from neper.text.tokenizer import Tokenizer
from neper.types import LogprobParams, Request, SamplingParams

RIGHT, DRAFTS = 3, 4
"""Drafts of a step that are right, of those that OneWrong proposes."""
FORCED = Plan(concurrency=(1, 8), reply=257, prompt_lengths=(), memory_length=0)
TEXTS = replace(FORCED, concurrency=(1,), reply=97)
_FORCED_BOUNDS = {1: 2.6, 8: 2.4}

_CODE = """def area(width, height):
    return width * height


def perimeter(width, height):
    return 2 * (width + height)


class Rectangle:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def describe(self):
        size = area(self.width, self.height)
        border = perimeter(self.width, self.height)
        return f"{self.width} by {self.height}: area {size}, perimeter {border}"
"""
# Twice, and begun a third time.
_COPIED = f"{_CODE}\n\n{_CODE}\n\n{_CODE[: _CODE.index('return')]}"
_INVENTED = "The lighthouse stood at the end of the pier, and"


@dataclass(frozen=True)
class Group:
    """Requests that are computed with and without drafts.

    Attributes:
        count: requests at a time.
        requests: those of a round, by their number of alternatives; the seed is the rig's.
        bound: tokens per second with drafts over those without, at least.
        copies: their replies copy their prompts.
    """

    name: str
    count: int
    requests: Callable[[int | None], list[Request]]
    bound: float
    copies: bool = False


class OneWrong:
    """Drafts for a model that repeats its last token: that `RIGHT` times, then another. It is a `Drafter`."""

    writes = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def ready(self, seq: Sequence) -> bool:
        return True

    def observe(self, step: BegunStep) -> None:
        """Needs nothing: it looks at the last token alone."""

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        return {seq: self._tokens(seq.token_ids[-1])[:most] for seq, most in wanted.items()}

    def accepted(self, seq: Sequence, num_accepted: int) -> None:
        """Needs nothing: the next token is the last one in any case."""

    def forget(self, seq: Sequence) -> None:
        """Needs nothing: it keeps nothing."""

    def _tokens(self, last: int) -> list[int]:
        return [last] * RIGHT + [(last + 1) % self._vocab_size] * (DRAFTS - RIGHT)


def forced(rig: Rig) -> list[Group]:
    """Random prompts, for a model that is changed so that its output is the embedding of its input.

    With tied embeddings that token is then the best by far, in any rounding. Only the norms ahead of attention and MLP
    are scaled, so that layers add next to nothing: the matrices, and the time that they take, stay.
    """
    with torch.inference_mode():
        for layer in rig.decoder.layers:
            layer.input_layernorm.weight.mul_(2**-20)
            layer.post_attention_layernorm.weight.mul_(2**-20)

    def group(count: int) -> Group:
        name = f"{RIGHT} of {DRAFTS} right, {count} at a time"
        return Group(name, count, lambda top_k: rig.requests(Case(top_k), count, rig.plan.reply), _FORCED_BOUNDS[count])

    return [group(count) for count in rig.plan.concurrency]


def texts(rig: Rig) -> list[Group]:
    """A text that the model copies, and one that it draws at temperature 1, so that it falls into no loop."""
    tokenizer = Tokenizer.from_directory(rig.source.path)
    copied, invented = tokenizer.encode(_COPIED), tokenizer.encode(_INVENTED)
    rig.plan = replace(rig.plan, prompt=len(copied))

    def requests(prompt: list[int], temperature: float, top_k: int | None) -> list[Request]:
        sampling = SamplingParams(temperature=temperature, seed=rig.seed, max_tokens=rig.plan.reply, ignore_eos=True)
        return [
            Request(
                request_id=str(rig.seed),
                prompt_token_ids=prompt,
                sampling=sampling,
                logprobs=LogprobParams(top_k=top_k),
            )
        ]

    return [
        Group("copied text", 1, partial(requests, copied, 0.0), 2.0, copies=True),
        Group("nothing to copy", 1, partial(requests, invented, 1.0), 0.97),
    ]
