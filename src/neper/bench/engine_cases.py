"""The cases of `neper bench engine`, the number of each, and the requests that they are made of."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from neper.types import LogprobParams, Request, SamplingParams

PARTS = ("matrix", "mixed", "floor", "lengths", "prompt", "host")
"""The parts, in the order of their runs."""
TEMPERATURE, TOP_P = 0.8, 0.95


@dataclass(frozen=True)
class Case:
    """The options of one batch's requests.

    Attributes:
        top_k: alternatives per token; 0 = the token alone, None = no scores.
        sampled: drawn at a temperature instead of greedy.
        asking: number of the batch's requests that want scores; None = all.
        again: a repetition of the case without it, which shows the spread of repetitions.
    """

    top_k: int | None
    sampled: bool = False
    asking: int | None = None
    again: bool = False

    def __str__(self) -> str:
        name = "off" if self.top_k is None else f"k={self.top_k}"
        if self.asking is not None:
            name += f" for {self.asking}"
        return name + ", sampled" * self.sampled + " again" * self.again


OFF = Case(None)
OFF_AGAIN = Case(None, again=True)
SAMPLED_OFF = Case(None, sampled=True)


@dataclass(frozen=True)
class Lengths:
    """A batch of decodes with long contexts.

    Attributes:
        prompts: tokens of each request's prompt.
        bound: of a step over its floor.
    """

    prompts: tuple[int, ...]
    bound: float

    def __str__(self) -> str:
        counts = Counter(self.prompts)
        return " + ".join(f"{count} x {length:,}" for length, count in counts.items())


@dataclass(frozen=True)
class Plan:
    """The extent of a run.

    Attributes:
        concurrency: requests of a batch.
        top_ks: of the matrix, besides no scores. Mixed and sampled batches ask for the last one.
        prompt, reply: tokens of each request.
        rounds: batches of each case.
        mixed: sizes of the batches in which one request asks.
        host_rounds, host_reply, host_seconds: for scoring on the host: rounds, the longest reply, and the most seconds
            of a batch, for which the reply is shortened.
        prompt_lengths, prompt_top_k: those of scored prompts. memory_length: the prompt whose memory is measured.
        lengths: batches with long contexts. lengths_reply: tokens of their replies, more than the steps of the prompts.
        copy_bytes: bytes of the copy that the floor comes from.
        step_tokens: most tokens of a step on a GPU; more where the prompts of a batch need it.
    """

    concurrency: tuple[int, ...] = (1, 8, 32, 64)
    top_ks: tuple[int, ...] = (0, 1, 5, 20)
    prompt: int = 128
    reply: int = 256
    rounds: int = 5
    mixed: tuple[int, ...] = (8, 32)
    host_rounds: int = 2
    host_reply: int = 64
    host_seconds: float = 2.5
    prompt_lengths: tuple[int, ...] = (1024, 8192)
    prompt_top_k: int = 5
    memory_length: int = 32_768
    lengths: tuple[Lengths, ...] = (
        Lengths((32_000,), 1.15),
        Lengths((16_000,) * 8, 1.2),
        Lengths((8_000,) * 32, 1.2),
        Lengths((38_000, *(200,) * 31), 1.35),
    )
    lengths_reply: int = 96
    copy_bytes: int = 2**32
    step_tokens: int = 8192

    @property
    def top_k(self) -> int:
        return self.top_ks[-1]

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases of the matrix, in the order in which they take turns. Those without scores come first and last."""
        scored = tuple(Case(top_k) for top_k in self.top_ks)
        return (OFF, *scored, SAMPLED_OFF, Case(self.top_k, sampled=True), OFF_AGAIN)

    def fitted(
        self, *, max_model_len: int, rounds: int | None = None, concurrency: tuple[int, ...] | None = None
    ) -> Plan:
        """This plan with other numbers of rounds and requests, and without prompts that exceed a model's context."""
        sizes = concurrency or self.concurrency
        return dataclasses.replace(
            self,
            concurrency=sizes,
            rounds=rounds or self.rounds,
            host_rounds=min(self.host_rounds, rounds or self.rounds),
            mixed=tuple(size for size in self.mixed if size <= max(sizes)),
            lengths=tuple(case for case in self.lengths if max(case.prompts) + self.lengths_reply <= max_model_len),
            prompt_lengths=tuple(n for n in self.prompt_lengths if n < max_model_len),
            memory_length=self.memory_length if self.memory_length < max_model_len else 0,
        )


FULL = Plan()
QUICK = Plan(
    concurrency=(1, 8),
    top_ks=(0, 20),
    prompt=32,
    reply=16,
    rounds=2,
    mixed=(8,),
    host_rounds=1,
    host_reply=8,
    prompt_lengths=(256,),
    memory_length=2048,
    lengths=(Lengths((1_000, *(200,) * 3), 1.35),),
    lengths_reply=16,
    copy_bytes=2**28,
)


def requests(
    case: Case, count: int, *, prompt: int | Sequence[int], reply: int, vocab_size: int, seed: int
) -> list[Request]:
    """A batch of `count` requests with random prompts; the same seed gives the same ones in every case.

    Args:
        prompt: tokens of every prompt, or of each one.
    """
    generator = random.Random(seed)
    asking = count if case.asking is None else case.asking
    lengths = [prompt] * count if isinstance(prompt, int) else prompt
    return [
        Request(
            request_id=f"{seed}-{number}",
            prompt_token_ids=generator.choices(range(vocab_size), k=length),
            sampling=SamplingParams(
                temperature=TEMPERATURE if case.sampled else 0.0,
                top_p=TOP_P if case.sampled else 1.0,
                seed=number,
                max_tokens=reply,
                ignore_eos=True,
            ),
            logprobs=LogprobParams(top_k=case.top_k if number < asking else None),
        )
        for number, length in enumerate(lengths)
    ]


def prompt_request(length: int, top_k: int | None, *, vocab_size: int, seed: int) -> Request:
    """A request that generates one token, with or without scores of its prompt."""
    return Request(
        request_id=f"prompt-{seed}",
        prompt_token_ids=random.Random(seed).choices(range(vocab_size), k=length),
        sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        logprobs=LogprobParams(prompt_top_k=top_k),
    )
