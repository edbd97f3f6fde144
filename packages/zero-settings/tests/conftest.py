from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from zero_settings import Config, ConfigError


@pytest.fixture
def refused():
    """Load what must be refused, and return the error."""

    def load(source: Any, world_size: int = 2, **base: Any) -> ConfigError:
        if isinstance(source, dict):
            source = {"train_micro_batch_size_per_gpu": 1, **base, **source}
        with pytest.raises(ConfigError) as caught:
            Config.load(source, world_size=world_size)
        return caught.value

    return load


@pytest.fixture
def loaded():
    """Load a configuration with a batch size of 1 unless it has its own."""

    def load(source: dict[str, Any], world_size: int = 2, **options: Any) -> Config:
        sizes = {"train_batch_size", "train_micro_batch_size_per_gpu"}
        base = {} if sizes & set(source) else {"train_micro_batch_size_per_gpu": 1}
        return Config.load({**base, **source}, world_size=world_size, **options)

    return load
