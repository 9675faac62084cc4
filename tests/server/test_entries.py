"""Entries against a plain definition: one json object per alternative, made one at a time."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from neper.server.entries.entries import Entries, LegacyArrays
from neper.server.entries.score_texts import read_scores
from neper.server.replies.completions import legacy_json
from neper.text.detokenizer import Detokenizer, TextToken
from neper.text.tokenizer import Tokenizer
from neper.types import PackedRows
from tests.server.conftest import END


def sample(tokenizer: Tokenizer, seed: int, k: int) -> tuple[list[int], PackedRows]:
    """Random tokens, many of them parts of characters, with alternatives of which some lists are short."""
    rng = np.random.default_rng(seed)
    text = [*tokenizer.encode("a 日😀 naïve"), END, *rng.integers(0, 384, 20).tolist(), *tokenizer.encode("語")]
    n = len(text)
    ids = np.stack([rng.permutation(384)[:k] for _ in range(n)]).reshape(n, k)
    values = -np.sort(rng.integers(0, 40, (n, k)) / 8)
    for row in range(0, n, 5):
        ids[row, k // 2 :] = -1
        values[row, k // 2 :] = -np.inf
    return text, PackedRows.pack(text, -rng.random(n) * 9, rng.integers(1, 50, n), ids, values)


def alternative(tokenizer: Tokenizer, token_id: int, held: bytes) -> str:
    if token_id in tokenizer.special_token_ids:
        return tokenizer.token_text(token_id)
    decoder = Detokenizer(tokenizer, skip_special_tokens=False)
    return decoder.alternative_text(token_id, held)


@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ids_as_text", [False, True])
def test_chat_entries(tokenizer: Tokenizer, seed: int, k: int, ids_as_text: bool) -> None:
    ids, rows = sample(tokenizer, seed, k)
    detokenizer = Detokenizer(tokenizer)
    tokens = detokenizer.step(ids) + detokenizer.flush()
    entries = Entries(tokenizer)
    written = entries.chat(tokens, read_scores(rows, k), k, ids_as_text=ids_as_text)

    def entry(text: str, token_id: int, data: bytes, value: np.float32) -> dict[str, Any]:
        return {
            "token": f"token_id:{token_id}" if ids_as_text else text,
            "bytes": list(data),
            "logprob": float(str(value)),
        }

    expected = []
    for token, token_id, value, top_ids, top_values in zip(
        tokens, ids, rows.logprob, rows.top_ids, rows.top_logprobs, strict=True
    ):
        if token.visible:
            tops = [
                entry(alternative(tokenizer, i, token.held), i, tokenizer.token_bytes(i), v)
                for i, v in zip(top_ids.tolist(), top_values, strict=True)
                if i >= 0
            ]
            expected.append(entry(token.text, token_id, token.data, value) | {"top_logprobs": tops})
    assert json.loads(b"[" + written + b"]") == expected
    # The same again, one by one: what streams are made of. The tables are warm now.
    scored = read_scores(rows, k)
    pieces = [entries.chat([t], [s], k, ids_as_text=ids_as_text) for t, s in zip(tokens, scored, strict=True)]
    assert b",".join(piece for piece in pieces if piece) == written


@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.parametrize("seed", range(4))
def test_legacy_arrays(tokenizer: Tokenizer, seed: int, k: int) -> None:
    ids, rows = sample(tokenizer, seed, k)
    detokenizer = Detokenizer(tokenizer)
    tokens = detokenizer.step(ids) + detokenizer.flush()
    entries = Entries(tokenizer)
    written = entries.legacy(tokens, ids, read_scores(rows, k), k, offset=5)
    arrays = json.loads(legacy_json(written))

    def label(text: str, data: bytes, held: bytes) -> str:
        if "\ufffd" not in (held + data).decode("utf-8", "replace"):
            return text
        alone = data.decode("utf-8", "replace")
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if "\ufffd" in alone else alone

    offset = 5
    for place, (token, token_id, value) in enumerate(zip(tokens, ids, rows.logprob, strict=True)):
        own = label(token.text, token.data, token.held) if token.visible else tokenizer.token_text(token_id)
        assert arrays["tokens"][place] == own
        assert arrays["text_offset"][place] == offset
        offset += len(token.text)
        assert arrays["token_logprobs"][place] == float(str(value))
        best: dict[str, float] = {}
        for i, v in zip(rows.top_ids[place].tolist(), rows.top_logprobs[place], strict=True):
            if i >= 0:
                text = alternative(tokenizer, i, token.held)
                best.setdefault(label(text, tokenizer.token_bytes(i), token.held), float(str(v)))
        if token_id not in rows.top_ids[place]:
            best.setdefault(own, float(str(value)))
        assert arrays["top_logprobs"][place] == best
    assert len(arrays["top_logprobs"]) == len(ids)


def test_legacy_arrays_join(tokenizer: Tokenizer) -> None:
    ids, rows = sample(tokenizer, 0, 3)
    tokens = Detokenizer(tokenizer).step(ids)
    entries = Entries(tokenizer)
    scored = read_scores(rows, 3)
    whole = entries.legacy(tokens, ids[: len(tokens)], scored[: len(tokens)], 3, offset=0)
    half = len(tokens) // 2
    first = entries.legacy(tokens[:half], ids[:half], scored[:half], 3, offset=0)
    offset = sum(len(token.text) for token in tokens[:half])
    second = entries.legacy(tokens[half:], ids[half : len(tokens)], scored[half : len(tokens)], 3, offset=offset)
    assert LegacyArrays.join([first, second]) == whole
    assert json.loads(legacy_json(LegacyArrays.join([])))["top_logprobs"] == []


def test_a_legacy_token_is_a_key_of_its_own_dict(tokenizer: Tokenizer) -> None:
    word = next(i for i in range(330) if re.fullmatch(" [a-z]+", tokenizer.token_text(i)))
    [space], [other] = tokenizer.encode(" "), tokenizer.encode("H")
    rows = PackedRows.pack([word], [-1.0], [1], [[word, other, space]], [[-1.0, -2.0, -3.0]])
    # A stop string left only the space, which is another token's text as well.
    cut = [TextToken(0, " ", b" ", b"", True)]
    arrays = json.loads(legacy_json(Entries(tokenizer).legacy(cut, [word], read_scores(rows), 3, offset=0)))
    assert arrays["tokens"] == [" "]
    assert arrays["top_logprobs"] == [{" ": -1.0, "H": -2.0}]
    # A stop token is in no text, and this one is no whole character.
    part = next(i for i in range(330) if tokenizer.token_bytes(i) == b"\xf0")
    rows = PackedRows.pack([part], [-1.0], [1], [[part, other]], [[-1.0, -2.0]])
    hidden = [TextToken(0, "", b"\xf0", b"", False)]
    arrays = json.loads(legacy_json(Entries(tokenizer).legacy(hidden, [part], read_scores(rows), 2, offset=0)))
    assert arrays["tokens"] == ["bytes:\\xf0"]
    assert arrays["top_logprobs"] == [{"bytes:\\xf0": -1.0, "H": -2.0}]


def test_prompt_entries(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a日")
    n = len(ids) - 1
    top_ids = [[ids[place + 1], 300, 301] for place in range(n)]
    rows = PackedRows.pack(ids[1:], [-1.0] * n, [1] * n, top_ids, [[-1.0, -1.0, -2.5]] * n)
    tokens = Detokenizer(tokenizer).step(ids)
    written = json.loads(b"[" + Entries(tokenizer).prompt(tokens, read_scores(rows, 3), 3) + b"]")
    assert written[0] is None
    for token, token_id, entry in zip(tokens[1:], ids[1:], written[1:], strict=True):
        assert list(entry) == [str(token_id), "300", "301"]
        assert [shown["rank"] for shown in entry.values()] == [1, 1, 3]
        assert [shown["logprob"] for shown in entry.values()] == [-1.0, -1.0, -2.5]
        assert entry[str(token_id)]["decoded_token"] == token.text
        assert entry["300"]["decoded_token"] == alternative(tokenizer, 300, token.held)
