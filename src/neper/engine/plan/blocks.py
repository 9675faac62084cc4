"""The blocks of the KV cache: which are free, who shares them, and which hold a known prefix."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from neper.engine.plan.sequence import Sequence

NULL_BLOCK = 0
"""Never handed out and always zero: padding is gathered from it."""


class BlockManager:
    """Owns every block id 1..num_blocks-1: free, or held by one or more sequences (reference counts).

    A full block whose content is known keeps its hash when it is freed, and can be revived by a later sequence until
    it is handed out for something else; the least recently freed goes first.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that `seq` still needs to hold its first num_tokens tokens."""
        return max(0, self.blocks_for(num_tokens) - len(seq.block_table))

    def can_grow(self, seq: Sequence, num_tokens: int) -> bool:
        return self.missing_blocks(seq, num_tokens) <= len(self._free)

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Give `seq` the blocks for its first num_tokens tokens. Ask `can_grow` first."""
        for _ in range(self.missing_blocks(seq, num_tokens)):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            seq.block_table.append(block)

    def reuse_prefix(self, seq: Sequence) -> None:
        """Let a sequence without blocks share the longest cached prefix that it may reuse."""
        assert not seq.block_table
        if not (self.prefix_caching or seq.cache_salt):
            return
        for index in range(seq.max_reusable_tokens // self.block_size):
            block = self._block_of.get(seq.block_hash(index, self.block_size))
            if block is None:
                break
            self._free.pop(block, None)
            self._references[block] += 1
            seq.block_table.append(block)
        seq.num_hashed_blocks = len(seq.block_table)
        seq.num_computed_tokens = len(seq.block_table) * self.block_size

    def commit(self, seq: Sequence, num_valid_tokens: int) -> None:
        """Offer the full blocks of the first num_valid_tokens tokens, computed and known to be finite, to others."""
        if not (self.prefix_caching or seq.cache_salt):
            return
        num_full = num_valid_tokens // self.block_size
        for index in range(seq.num_hashed_blocks, num_full):
            key, block = seq.block_hash(index, self.block_size), seq.block_table[index]
            if key not in self._block_of:  # else an equal block is known already; this one stays private
                self._block_of[key] = block
                self._hash_of[block] = key
        seq.num_hashed_blocks = max(seq.num_hashed_blocks, num_full)

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of `seq`. A shared prefix is evicted from its end, so the end is freed first."""
        for block in reversed(seq.block_table):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)  # worthless content: hand it out first
        seq.block_table = []
        seq.num_hashed_blocks = 0
        seq.num_computed_tokens = 0

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the books agree with the sequences that should hold blocks. For tests."""
        held = Counter(block for seq in sequences for block in seq.block_table)
        assert NULL_BLOCK not in held, "the null block is held"
        assert NULL_BLOCK not in self._free, "the null block is free"
        for block in range(1, self.num_blocks):
            assert self._references[block] == held[block], f"block {block}: {self._references[block]} != {held[block]}"
            assert (block in self._free) == (held[block] == 0), f"block {block} is leaked or free while held"
        assert {key: block for block, key in self._hash_of.items()} == self._block_of, "hash tables disagree"

    def _forget(self, block: int) -> None:
        key = self._hash_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
