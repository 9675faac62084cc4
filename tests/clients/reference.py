"""What transformers says about the tiny model: the oracle of the values that clients are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

TOLERANCE = 1e-4  # float32 on both sides; the order of sums differs


def byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable Latin-1 stands for itself, the other bytes come after 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Reference:
    """A model directory as transformers loads it.

    Attributes:
        id_of: token bytes → id; every id of the model has bytes of its own.
    """

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        alphabet, special = byte_of_character(), self.tokenizer.all_special_tokens
        self.id_of = {
            piece.encode() if piece in special else bytes(alphabet[character] for character in piece): token_id
            for piece, token_id in self.tokenizer.get_vocab().items()
        }
        assert len(self.id_of) == self.model.config.vocab_size

    def chat_ids(self, content: str) -> list[int]:
        messages = [{"role": "user", "content": content}]
        ids: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return ids

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """[len(ids), V] float64; row i is about the token after ids[i]."""
        logits: Tensor = self.model(torch.tensor([list(ids)])).logits[0]
        return logits.double().log_softmax(-1)

    def check(self, prompt_ids: Sequence[int], entries: Sequence[dict[str, Any]], *, greedy: bool = True) -> None:
        """Chat entries (as JSON) after this prompt have the values, and list the tokens, that the model gives."""
        ids = [self.id_of[bytes(entry["bytes"])] for entry in entries]
        rows = self.logprobs([*prompt_ids, *ids])[len(prompt_ids) - 1 : -1]
        assert entries
        for entry, token_id, row in zip(entries, ids, rows, strict=True):
            assert abs(entry["logprob"] - row[token_id].item()) < TOLERANCE
            listed = [self.id_of[bytes(alternative["bytes"])] for alternative in entry["top_logprobs"]]
            best = row.topk(max(1, len(listed)))
            assert listed == best.indices.tolist()[: len(listed)]
            for alternative, value in zip(entry["top_logprobs"], best.values.tolist(), strict=False):
                assert abs(alternative["logprob"] - value) < TOLERANCE
            if greedy:
                assert token_id == best.indices[0].item()
