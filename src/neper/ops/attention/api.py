"""Paged attention as one op: what a step tells it, and what an implementation of it offers.

A cache tensor is `[num_slots, kv_heads, head_dim]`; a block is `block_size` consecutive slots; block 0 is the null
block: never owned, always zero, so that gathering its slots as padding can bring no NaN (0 * NaN is NaN) into a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from neper.ops.attention.parts import Planner
from neper.ops.common.variants import Variants

MAX_WINDOW = 16
"""Most tokens of a sequence in one step for the kernel of few rows: decodes, drafts, ends of prompts."""
QUERY_TILE = 128
"""Query rows of one row of `AttentionInputs.tiles`; programs of the prefill kernel take it whole or in equal parts."""


@dataclass(frozen=True)
class AttentionScratch:
    """Memory for the sums of parts of contexts, until the last part is finished. It is bounded.

    Attributes:
        planner: cuts no more contexts than there are records for. The others stay with one program each, which needs
            no records.
        sums: [rows, num_heads, head_dim] float32; the record of a part is one row for each query.
        maxima, weights: [rows, num_heads] float32.
        tickets: int32, zero between calls: the finished parts of each sequence and KV head.
    """

    planner: Planner
    sums: Tensor
    maxima: Tensor
    weights: Tensor
    tickets: Tensor


@dataclass(frozen=True)
class AttentionGroup:
    """Consecutive sequences of a step that have the same number of query tokens. Numbers of the host only.

    Attributes:
        start: first row of the group in the step's flat token order; its rows are contiguous.
        first_seq: index of its first sequence, a row of `context_lens` and `block_tables`.
        num_seqs: G.
        query_len: Q, tokens of each sequence in this step.
        context_len: L, the longest context among them; 0 where the host does not know (a captured graph). Only the
            reference reads it, and takes the width of the block tables for 0.
    """

    start: int
    first_seq: int
    num_seqs: int
    query_len: int
    context_len: int


@dataclass(frozen=True)
class AttentionInputs:
    """Where a step's T flat tokens of S sequences write their K/V and what they attend to.

    Attributes:
        positions: [T] int32, each token's position in its own sequence.
        slot_mapping: [T] int32, the cache slot that each token's K and V are written to; -1 = a padding row, whose
            K and V are written nowhere (kernels only).
        context_lens: [S] int32, tokens of each sequence up to and including its last one in this step; 0 = a padding
            row, whose output is 0.
        block_tables: [S, width] int32, contiguous: block i of a sequence holds its tokens from i * block_size on.
        table_stride: [1] int32, words from one row of `block_tables` to the next. Kernels load it: a captured graph
            is replayed over tables of other widths at the same address.
        block_size: tokens in a block.
        groups: they cover rows 0..T in order. Sequences of up to `MAX_WINDOW` tokens come first; neighbours of equal
            lengths are one group. Then follows one group for each longer chunk.
        tiles: [N, 3] int32, the longer chunks cut into pieces of at most `QUERY_TILE` rows: index of the sequence,
            first flat row, number of rows. None where there are no longer chunks. Only kernels read it.
        scratch: see `AttentionOps.allocate_scratch`; without it no context is cut.
        items: [N, ITEM_WORDS] int32, the work that `Planner.fill` made of the sequences of up to `MAX_WINDOW` tokens.
            A captured graph is replayed over other items at the same address, so kernels load their number. Only
            kernels read them.
        num_items: [1] int32.
        max_queries: most tokens of one of those sequences.
    """

    positions: Tensor
    slot_mapping: Tensor
    context_lens: Tensor
    block_tables: Tensor
    table_stride: Tensor
    block_size: int
    groups: tuple[AttentionGroup, ...]
    tiles: Tensor | None
    scratch: AttentionScratch | None
    items: Tensor | None = None
    num_items: Tensor | None = None
    max_queries: int = 1
    # What the reference makes once a step and all layers share.
    _memo: dict[object, tuple[Tensor, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def few_rows(self) -> int:
        """Rows of the sequences of up to `MAX_WINDOW` tokens."""
        return sum(group.num_seqs * group.query_len for group in self.groups if group.query_len <= MAX_WINDOW)

    def slots(self) -> Tensor:
        """`slot_mapping` as the int64 that torch's index operations ask for."""
        if "slots" not in self._memo:
            self._memo["slots"] = (self.slot_mapping.long(),)
        return self._memo["slots"][0]

    def rotation(self, rotary: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the step's tokens, [T, 1, head_dim] in `dtype`; the first half of sin is negated."""
        key = ("rotation", id(rotary), dtype)
        if key not in self._memo:
            cos, sin = rotary.index_select(0, self.positions).chunk(2, dim=1)
            cos = torch.cat((cos, cos), dim=1).to(dtype)[:, None]
            sin = torch.cat((-sin, sin), dim=1).to(dtype)[:, None]
            self._memo[key] = (cos, sin, rotary)  # `rotary` is kept, or its id could become another's
        return self._memo[key][0], self._memo[key][1]

    def context_slots(self, group: AttentionGroup) -> Tensor:
        """[G * L] int64, cache slots of each sequence's context from position 0, the null slot (0) beyond its end."""
        key = ("context", group.start)
        if key not in self._memo:
            seqs = slice(group.first_seq, group.first_seq + group.num_seqs)
            places = torch.arange(self._length(group), device=self.positions.device)
            blocks = self.block_tables[seqs].index_select(1, places // self.block_size).long()
            slots = blocks * self.block_size + places % self.block_size
            slots = slots.masked_fill_(places >= self.context_lens[seqs, None], 0)
            self._memo[key] = (slots.view(-1),)
        return self._memo[key][0]

    def mask(self, group: AttentionGroup, window: int | None, share: int, dtype: torch.dtype) -> Tensor:
        """Added to the scores: 0 for keys at or before a query's own position and inside the window, else -inf.

        [G, 1, share * Q, L] in `dtype` ([G, 1, 1, L] for Q = 1): the query heads that share a KV head are rows of one
        call. Made once a step, in the form that the attention kernel takes as it is: a bool mask costs each of the
        model's layers a conversion.
        """
        key = ("mask", group.start, window)
        if key not in self._memo:
            rows = group.num_seqs * group.query_len
            queries = self.positions[group.start : group.start + rows].view(group.num_seqs, 1, group.query_len, 1)
            keys = torch.arange(self._length(group), device=queries.device)
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            self._memo[key] = (mask.repeat(1, 1, share, 1) if group.query_len > 1 else mask,)
        return self._memo[key][0]

    def _length(self, group: AttentionGroup) -> int:
        return group.context_len or self.block_tables.shape[1] * self.block_size


class AttentionOps(Protocol):
    """An implementation of the op."""

    def attend(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: AttentionInputs,
        *,
        num_heads: int,
        rotary: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Norm and rotate a step's queries and keys, write K and V to the cache, and attend causally.

        Args:
            qkv: [T, (num_heads + 2 * kv_heads) * head_dim]: queries, keys, values. The row stride may exceed the width.
            k_cache, v_cache: [num_slots, kv_heads, head_dim], contiguous, of qkv's dtype; num_heads is a multiple of
                kv_heads (grouped-query attention). On a GPU the kernel launched just before must not be one that writes
                them: what they hold is loaded before that one is waited for.
            inputs: where the tokens are and what they see.
            rotary: [P, head_dim] float32: the cosines of the head_dim / 2 angles of each position, then their sines.
                The two halves x1, x2 of a head become x1 * cos - x2 * sin and x2 * cos + x1 * sin.
            q_norm, k_norm: [head_dim], weights of an RMSNorm of each head before it is rotated; both or none.
            eps: of those norms.
            scale: factor of the scores, usually head_dim ** -0.5.
            window: a token sees itself and the window - 1 tokens before it; None = all.

        Returns:
            [T, num_heads * head_dim] in qkv's dtype.
        """

    def allocate_scratch(
        self, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, queries: int = 1
    ) -> AttentionScratch | None:
        """Scratch for steps of up to `max_rows` sequences; None where none is needed.

        Args:
            queries: tokens of a sequence that it is sized for. With more, fewer contexts are cut.
        """

    def variants(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        normed: bool,
    ) -> Variants:
        """All that `attend` needs for a model of this shape, whatever its windows: few rows, and a longer chunk.

        Args:
            normed: queries and keys have norms.
        """
