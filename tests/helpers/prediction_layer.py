"""A multi-token-prediction layer of transformers' classes, and its weights beside a tiny model's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.tiny import write_model

QWEN = {
    "fc": "mtp.fc",
    "embedding": "mtp.pre_fc_norm_embedding",
    "hidden": "mtp.pre_fc_norm_hidden",
    "layer": "mtp.layers.0",
    "norm": "mtp.norm",
}
NEXTN = {
    "fc": "model.layers.2.eh_proj",
    "embedding": "model.layers.2.enorm",
    "hidden": "model.layers.2.hnorm",
    "layer": "model.layers.2",
    "norm": "model.layers.2.shared_head.norm",
}


class PredictionLayer:
    """A prediction layer of transformers' classes, its weights in a model's files."""

    def __init__(self, directory: Path, architecture: str, names: Mapping[str, str], *, tied: bool = False) -> None:
        fields = {"num_nextn_predict_layers": 1} if names is NEXTN else {}
        write_model(directory, architecture, tie_word_embeddings=tied, **fields)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config = copy.deepcopy(self.model.config)
        config.num_hidden_layers = 1
        torch.manual_seed(7)
        self.layer: Any = type(self.model.model)(config)
        size = config.hidden_size
        self.fc = torch.randn(size, 2 * size) / size**0.5
        self.embedding_norm, self.hidden_norm = (1 + torch.randn(2, size) / 4).unbind()
        for parameter in self.layer.parameters():
            parameter.data += torch.randn_like(parameter) / 5
        weights = {
            f"{names['fc']}.weight": self.fc,
            f"{names['embedding']}.weight": self.embedding_norm,
            f"{names['hidden']}.weight": self.hidden_norm,
            f"{names['norm']}.weight": self.layer.norm.weight,
        }
        for name, weight in self.layer.layers[0].named_parameters():
            weights[f"{names['layer']}.{name}"] = weight
        if names is NEXTN:
            weights["model.layers.2.embed_tokens.weight"] = self.model.model.embed_tokens.weight
            weights["model.layers.2.shared_head.head.weight"] = self.model.lm_head.weight
        self.path = directory / "model.safetensors"
        stored = load_file(self.path) | {name: weight.detach().clone() for name, weight in weights.items()}
        save_file(stored, self.path)

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], most: int) -> list[int]:
        """The best tokens after these and one more, each after the ones before it."""
        ids = torch.tensor([token_ids])
        before: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        self.model(ids)
        hook.remove()
        hidden = before[0][:, :-1]
        embedded = self.model.model.embed_tokens(ids[:, 1:])
        drafts: list[int] = []
        for _ in range(most):
            joined = torch.cat((self._norm(embedded, self.embedding_norm), self._norm(hidden, self.hidden_norm)), -1)
            left: list[Tensor] = []
            hook = self.layer.norm.register_forward_pre_hook(lambda _, args, left=left: left.append(args[0]))
            normed = self.layer(inputs_embeds=joined @ self.fc.T).last_hidden_state
            hook.remove()
            drafts.append(int(self.model.lm_head(normed[0, -1]).argmax()))
            hidden = torch.cat((hidden, left[0][:, -1:]), 1)
            embedded = torch.cat((embedded, self.model.model.embed_tokens(torch.tensor([[drafts[-1]]]))), 1)
        return drafts

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.layer.norm.variance_epsilon) * weight
