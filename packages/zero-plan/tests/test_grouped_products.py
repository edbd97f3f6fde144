"""Products of matrices in groups, by which Transformers runs its experts: shapes and FLOPs of every kind and dtype."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from zero_plan.dry_run.fakes import PlanMode
from zero_plan.dry_run.memory import LiveMemory
from zero_plan.dry_run.operations import Operations

ENDS = torch.tensor([4, 12, 16], dtype=torch.int32)
KINDS = {
    "rows in groups": ((16, 8), (3, 8, 24), ENDS),
    "columns in groups": ((3, 24, 8), (8, 16), ENDS),
    "sums in groups": ((24, 16), (16, 8), ENDS),
    "a batch": ((3, 16, 8), (3, 8, 24), None),
}


def apart(one: torch.Tensor, other: torch.Tensor, ends: torch.Tensor | None) -> None:
    """Multiply the groups one by one."""
    bounds = [] if ends is None else [0, *ends.tolist()]
    for group in range(3):
        rows = slice(*bounds[group : group + 2]) if bounds else slice(None)
        if one.dim() == other.dim() == 3:
            one[group] @ other[group]
        elif one.dim() == 3:
            one[group] @ other[:, rows]
        elif other.dim() == 3:
            one[rows] @ other[group]
        else:
            one[:, rows] @ other[rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_result_of_a_dry_run_is_that_of_torch_and_its_flops_are_those_of_the_groups(
    kind: str, dtype: torch.dtype
) -> None:
    one_shape, other_shape, ends = KINDS[kind]
    real = torch.ones(one_shape, dtype=dtype), torch.ones(other_shape, dtype=dtype)
    expected = torch._grouped_mm(*real, offs=ends)
    counter = FlopCounterMode(display=False)
    with counter:
        apart(*real, ends)
    operations = Operations()
    with PlanMode(LiveMemory(), operations):
        one, other = (torch.empty(shape, dtype=dtype) for shape in (one_shape, other_shape))
        found = torch._grouped_mm(one, other, offs=None if ends is None else ends.clone())
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert dict(operations.flops_by_dtype) == {str(dtype).removeprefix("torch."): counter.get_total_flops()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_result_has_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    one_shape, other_shape, ends = KINDS["rows in groups"]
    assert ends is not None
    real = torch.ones(one_shape, dtype=dtype), torch.ones(other_shape, dtype=dtype)
    for asked in (None, torch.float32, torch.bfloat16, torch.float16):
        try:
            expected = torch._grouped_mm(*real, offs=ends, out_dtype=asked).dtype
        except RuntimeError:
            continue  # torch's kernel does not write this dtype
        with PlanMode(LiveMemory(), Operations()):
            one, other = (torch.empty(shape, dtype=dtype) for shape in (one_shape, other_shape))
            assert torch._grouped_mm(one, other, offs=ends.clone(), out_dtype=asked).dtype == expected
