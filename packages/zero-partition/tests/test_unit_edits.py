"""Edits of a unit's parameters are found also where torch does not see the write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_partition.unit_edits import UnitEdits

BYTES_AS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_writes_to_memory_are_found_once_values_were_recorded(dtype: torch.dtype) -> None:
    flat = torch.arange(1, 14).to(dtype)
    views = [flat[:6], flat[6:6], flat[6:9], flat[9:]]
    parameters = [nn.Parameter(view) for view in views]
    edits = UnitEdits(["a", "b", "c", "d"], parameters, dtype)
    memory = flat.view(BYTES_AS[dtype.itemsize]).numpy()
    memory[0] += 1
    assert edits.find_changed(views) == []
    edits.record_checksums(views)
    assert edits.find_changed(views) == []
    memory[12] += 1
    assert edits.find_changed(views) == [3]
    memory[[7, 8]] = memory[[8, 7]]
    memory[1] += 1
    assert edits.find_changed(views) == [0, 2]
    assert edits.find_changed(views) == [] and edits.writes_unseen
    edits.forget_checksums()
    memory[1] += 1
    assert edits.find_changed(views) == []
