"""Steps of attention built by hand, and what they must give: softmax, norm and rotation in float64, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neper.ops.attention import reference
from neper.ops.attention.api import (
    MAX_WINDOW,
    QUERY_TILE,
    AttentionGroup,
    AttentionInputs,
    AttentionOps,
    AttentionScratch,
)
from neper.ops.attention.parts import ITEM_WORDS, Planner

EPS = 1e-6


def attention_inputs(
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    block_size: int,
    device: str | torch.device = "cpu",
    scratch: AttentionScratch | None = None,
    width: int | None = None,
) -> AttentionInputs:
    """The inputs of a step; sequences of few query tokens come first. A context of 0 is a padding row.

    `width` is that of the block tables, by default the longest one's.
    """
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    width = max(1, *(len(table) for table in block_tables)) if width is None else width
    positions, slots, tiles, firsts = [], [], [], []
    groups: list[AttentionGroup] = []
    row = 0
    few = [length for length in query_lens if length <= MAX_WINDOW]
    assert list(query_lens[: len(few)]) == few
    for seq, (table, length, context) in enumerate(zip(block_tables, query_lens, context_lens, strict=True)):
        firsts.append(row)
        for place in range(context - length, context):
            positions.append(max(place, 0))
            slots.append(table[place // block_size] * block_size + place % block_size if place >= 0 else -1)
        if groups and groups[-1].query_len == length <= MAX_WINDOW:
            last = groups.pop()
            groups.append(
                AttentionGroup(last.start, last.first_seq, last.num_seqs + 1, length, max(last.context_len, context))
            )
        else:
            groups.append(AttentionGroup(row, seq, 1, length, context))
        if length > MAX_WINDOW:
            tiles += [(seq, row + i, min(QUERY_TILE, length - i)) for i in range(0, length, QUERY_TILE)]
        row += length
    planner = scratch.planner if scratch is not None else Planner(1, 1, 0)
    items = np.full((max(1, planner.most_items(len(few))), ITEM_WORDS), 10**6, dtype=np.int32)
    lens = (np.array(values[: len(few)], dtype=np.int32) for values in (firsts, query_lens, context_lens))
    count = planner.fill(items, *lens)
    return AttentionInputs(
        positions=torch.tensor(positions, **ints),
        slot_mapping=torch.tensor(slots, **ints),
        context_lens=torch.tensor(list(context_lens), **ints),
        block_tables=torch.tensor([[*table, *[0] * (width - len(table))] for table in block_tables], **ints),
        table_stride=torch.tensor([width], **ints),
        block_size=block_size,
        groups=tuple(groups),
        tiles=torch.tensor(tiles, **ints) if tiles else None,
        scratch=scratch,
        items=torch.tensor(items, device=device),
        num_items=torch.tensor([count], **ints),
        max_queries=max(few, default=1),
    )


def rotary_table(length: int, head_dim: int) -> Tensor:
    """[length, head_dim] float32, cosines and sines of quick and slow angles."""
    frequencies = 100.0 ** -(torch.arange(head_dim // 2, dtype=torch.float64) / max(1, head_dim // 2))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


@dataclass(frozen=True)
class Case:
    """A step to be: each sequence has so many query tokens, at the end of a context of so many (0 = a padding row)."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 4
    window: int | None = None
    normed: bool = True
    dtype: torch.dtype = torch.float32
    seed: int = 0


class Step:
    """A case laid out in memory: contexts in scattered blocks, slots that no sequence owns full of NaN."""

    def __init__(
        self,
        case: Case,
        device: str | torch.device = "cpu",
        scratch: AttentionScratch | None = None,
        ops: AttentionOps = reference,
    ) -> None:
        self.case = case
        self.ops = ops
        generator = torch.Generator().manual_seed(case.seed)

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(case.dtype)

        size, heads = case.block_size, case.heads + 2 * case.kv_heads
        counts = [-(-context // size) for context in case.context_lens]
        order = (torch.randperm(sum(counts) + 3, generator=generator) + 1).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.qkv = randn(sum(case.query_lens), heads * case.dim).to(device)
        self.q_norm: Tensor | None = None
        self.k_norm: Tensor | None = None
        if case.normed:
            self.q_norm, self.k_norm = (1 + randn(2, case.dim, scale=0.2)).to(device)
        self.rotary = rotary_table(max(1, *case.context_lens), case.dim).to(device)
        self.inputs = attention_inputs(
            self.tables, case.query_lens, case.context_lens, block_size=size, device=device, scratch=scratch
        )
        cache = torch.full((2, (sum(counts) + 4) * size, case.kv_heads, case.dim), torch.nan).to(case.dtype)
        cache[:, :size] = 0
        for table, length, context in zip(self.tables, case.query_lens, case.context_lens, strict=True):
            old = self.slots(table)[: max(0, context - length)]
            cache[:, old] = randn(2, len(old), case.kv_heads, case.dim)
        self.before = cache.to(device)
        self.cache = self.before.clone()

    def slots(self, table: Sequence[int]) -> Tensor:
        """Cache slots of a sequence, from position 0 on."""
        size = self.case.block_size
        return torch.tensor([block * size + i for block in table for i in range(size)], dtype=torch.int64)

    def run(self, qkv: Tensor | None = None) -> Tensor:
        """`attend` over a new copy of the cache, which is in `cache` afterwards."""
        case = self.case
        self.cache = self.before.clone()
        # The kernel just before must not be one that writes the cache.
        torch.zeros(1, device=self.qkv.device)
        return self.ops.attend(
            self.qkv if qkv is None else qkv,
            self.cache[0],
            self.cache[1],
            self.inputs,
            num_heads=case.heads,
            rotary=self.rotary,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=EPS,
            scale=case.dim**-0.5,
            window=case.window,
        )

    def check(self, *, atol: float) -> Tensor:
        """Run, and hold the outputs and the whole cache to float64."""
        got = self.run()
        want, cache = self.expected()
        assert got.dtype == self.case.dtype
        assert got.shape == want.shape
        torch.testing.assert_close(got.cpu().double(), want, atol=atol, rtol=atol)
        torch.testing.assert_close(self.cache.cpu().double(), cache, atol=atol, rtol=atol, equal_nan=True)
        written = self.inputs.slot_mapping[self.inputs.slot_mapping >= 0].long()
        for now, then in zip(self.cache, self.before, strict=True):
            now, then = now.index_fill(0, written, 0), then.index_fill(0, written, 0)
            assert torch.equal(now.nan_to_num(-7), then.nan_to_num(-7))
        return got

    def expected(self) -> tuple[Tensor, Tensor]:
        """Outputs [T, heads * dim] and both caches [2, slots, kv_heads, dim], float64."""
        case = self.case
        qkv = self.qkv.cpu().double().view(-1, case.heads + 2 * case.kv_heads, case.dim)
        q, k, v = qkv.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
        q, k = self._rotated(_normed(q, self.q_norm)), self._rotated(_normed(k, self.k_norm))
        cache = self.before.cpu().double()
        mapping = self.inputs.slot_mapping.cpu().long()
        rows = (mapping >= 0).nonzero().flatten()
        cache[0, mapping[rows]], cache[1, mapping[rows]] = k[rows], v[rows]
        out = torch.zeros(len(q), case.heads, case.dim, dtype=torch.float64)
        row = 0
        for table, length, context in zip(self.tables, case.query_lens, case.context_lens, strict=True):
            keys, values = cache[:, self.slots(table)[:context]].repeat_interleave(case.heads // case.kv_heads, 2)
            for i in range(length if context else 0):
                end = context - length + i + 1
                seen = slice(0 if case.window is None else max(0, end - case.window), end)
                scores = torch.einsum("hd,lhd->hl", q[row + i], keys[seen]) * case.dim**-0.5
                out[row + i] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values[seen])
            row += length
        return out.flatten(1), cache

    def _rotated(self, x: Tensor) -> Tensor:
        cos, sin = self.rotary.cpu().double()[self.inputs.positions.cpu().long()][:, None].chunk(2, -1)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _normed(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return x
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.cpu().double()
