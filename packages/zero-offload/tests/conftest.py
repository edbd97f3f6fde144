from __future__ import annotations

import os
import sys
from pathlib import Path

# Threads that wait for each other on a busy machine cost more than these small tensors do.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(7)
