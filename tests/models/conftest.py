"""Models that several tests share, made or converted once a session."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from neper.config import DEFAULT_MODEL
from neper.models.decoder import Decoder
from neper.models.registry import load
from neper.models.source import ModelSource, resolve
from tests.helpers.tiny import write_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the default tiny model."""
    directory = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    write_model(directory)
    return directory


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def smollm2(model_cache: Path) -> ModelSource:
    """The embedded model as the directory that the code under test converts it to, which transformers reads as well."""
    return dataclasses.replace(resolve(DEFAULT_MODEL, cache_dir=model_cache), gguf=None)


@pytest.fixture(scope="session")
def smollm2_bfloat16(smollm2: ModelSource) -> Decoder:
    return load(smollm2, dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.fixture(scope="session")
def smollm2_float32(smollm2: ModelSource) -> Decoder:
    return load(smollm2, dtype=torch.float32, device=torch.device("cpu"))
