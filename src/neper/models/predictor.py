"""A model's own multi-token-prediction layer: what follows a token, from the model's hidden state before that token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neper.errors import ModelLoadError
from neper.models.checkpoint import few
from neper.models.decoder import Decoder
from neper.models.kv_cache import KVCache
from neper.models.layers import Linear, RMSNorm
from neper.models.model_config import ModelConfig
from neper.ops import backends
from neper.ops.attention.api import AttentionInputs
from neper.ops.common.variants import Variants


@dataclass(frozen=True)
class PredictorNames:
    """The names of its parts in a checkpoint, each without `.weight`; `layer` is what its layer's names begin with."""

    fc: str
    embedding_norm: str
    hidden_norm: str
    layer: str
    norm: str


def predictor_names(config: ModelConfig, stored: Collection[str]) -> PredictorNames:
    """The names that a checkpoint has for the parts of its prediction layer.

    Qwen3-Next and Qwen3.5 call them `mtp.*`. DeepSeek and GLM count the layer as one behind the model's ("nextn").

    Args:
        stored: the names of its weights.

    Raises:
        ModelLoadError: it has no such layer, or several.
    """
    behind = f"model.layers.{config.num_layers}"
    qwen = PredictorNames(
        "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", layer="mtp.layers.0", norm="mtp.norm"
    )
    nextn = PredictorNames(
        f"{behind}.eh_proj", f"{behind}.enorm", f"{behind}.hnorm", layer=behind, norm=f"{behind}.shared_head.norm"
    )
    found = next((names for names in (qwen, nextn) if f"{names.fc}.weight" in stored), None)
    if found is None:
        raise ModelLoadError(
            f"the model has no multi-token-prediction layer (no weight {qwen.fc}.weight or {nextn.fc}.weight); "
            "use --speculative ngram or draft:MODEL"
        )
    second = "mtp.layers.1." if found is qwen else f"model.layers.{config.num_layers + 1}."
    if any(name.startswith(second) for name in stored):
        raise ModelLoadError(f"the model has several multi-token-prediction layers ({second}*); supported is one")
    return found


class MultiTokenPredictor(Decoder):
    """Predicts the token after the next one. It satisfies what steps ask of a decoder, with one layer and its K/V.

    For a token t at position i + 1 and the hidden state h at position i, before the final norm of the decoder that it
    belongs to, its layer reads `fc([norm(embedding of t); norm(h)])` at position i. What leaves that layer, before its
    final norm, stands for h at position i + 1 when it is applied again. Embedding and head are the decoder's.

    Attributes:
        residual: [rows, hidden_size]. Its first T rows are the hidden states that a `forward` of T tokens reads, and
            after it what left the layer.
    """

    def __init__(self, target: Decoder, names: PredictorNames, rows: int) -> None:
        config = replace(target.config, num_layers=1, sliding_windows=target.config.sliding_windows[-1:])
        size, dtype, device = config.hidden_size, target.dtype, target.device
        super().__init__(config, dtype=dtype, device=device, shares=target)
        self.keep_residual(rows)
        self._names = names
        self.fc = Linear(2 * size, {"fc": size}, bias=False, dtype=dtype, device=device)
        self.embedding_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(
        self, token_ids: Tensor, kv_cache: KVCache, attention: AttentionInputs, last_tokens: Tensor | None = None
    ) -> Tensor:
        """Do what `Decoder.forward` does, for tokens whose positions are one less than in the model."""
        assert self.residual is not None
        embedding = self._fused.embed(token_ids, self.embed_tokens, last_tokens)
        before = self.residual[: len(token_ids)]
        joined = torch.cat((self.embedding_norm(embedding), self.hidden_norm(before)), dim=-1)
        return self._through_layers(self.fc(joined), kv_cache, attention)

    def variants(self, block_size: int) -> list[Variants]:
        fc = [(self.fc.weight, self.fc.bias, False)]
        return [*super().variants(block_size), backends.linear(self.device).variants(fc, self.device)]

    def check_names(self, stored: Collection[str]) -> None:
        """Check that the weights of a checkpoint fit the layer by name.

        Raises:
            ModelLoadError: they do not: it is a layer of experts, for example.
        """
        slots = self.weight_slots().keys()
        prefix = self._names.fc.removesuffix("fc").removesuffix("eh_proj")
        copies = {f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"}  # of the model's own
        unknown = {name for name in stored if name.startswith(prefix)} - slots - copies
        problems = [
            f"{kind}: {few(names)}" for kind, names in (("missing", slots - set(stored)), ("unknown", unknown)) if names
        ]
        if problems:
            raise ModelLoadError(f"the multi-token-prediction layer is not one of this model; {'; '.join(problems)}")

    def weight_slots(self) -> dict[str, Tensor]:
        names, [layer] = self._names, self.layers
        return {
            f"{names.fc}.weight": self.fc.weight,
            **dict(self.embedding_norm.slots(names.embedding_norm)),
            **dict(self.hidden_norm.slots(names.hidden_norm)),
            **dict(layer.slots(names.layer)),
            **dict(self.norm.slots(names.norm)),
        }

    def _linears(self) -> list[Linear]:
        return [self.fc, *super()._linears()]
