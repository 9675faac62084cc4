"""Tiny random models in Hugging Face form, made on the spot: real files for the real loaders, small enough to grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun",
    "Hello, world! Hello there. What is the answer? The answer is forty-two.",
    "日本語のテキスト、中文文本、한국어 텍스트. Ünïcödé naïve café. 😀🚀👩‍👩‍👧",
]
VOCAB_SIZE = 384  # wider than the tokenizer, as real heads are: ids beyond it have no token


def write_tokenizer(directory: Path, *, vocab_size: int = 330) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML specials (ids 0, 1, 2) and template, saved to `directory`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(directory)
    return fast


def write_model(directory: Path, architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny random float32 model with tokenizer, saved to `directory`; returns the transformers model (the oracle).

    Weights are drawn wide enough that distributions are peaked and greedy choices have margins.
    """
    config_class, model_class = ARCHITECTURES[architecture]
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if architecture == "mistral":
        values["sliding_window"] = None
    torch.manual_seed(seed)
    model = model_class(config_class(**(values | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    model = model.to(torch.float32).eval()
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model
