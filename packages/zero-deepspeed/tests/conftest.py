from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank without a launcher: nothing is initialised before, and nothing is left behind."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
