"""The short ways of a dry run give what torch's fake tensors give, and run no more than once what they can know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from zero_plan.dry_run.fakes import PlanMode
from zero_plan.dry_run.memory import LiveMemory
from zero_plan.dry_run.operations import Operations

CASES: dict[str, Callable[[], Any]] = {
    "views": lambda: [
        torch.empty(6, 4).t(),
        torch.empty(24)[4:12].view(2, 4),
        torch.empty(24).split_with_sizes([4, 20]),
        torch.empty(2, 3, 4).transpose(0, 2)[1],
        torch.empty(2, 3, 4).permute(2, 0, 1).unsqueeze(1).expand(4, 5, 2, 3),
        torch.empty(2, 3).unbind(1),
        torch.empty(8, dtype=torch.float32).view(torch.uint8),
        torch.empty(8).as_strided((2, 2), (4, 1), 1).detach(),
    ],
    "writes": lambda: [torch.empty(3).zero_(), torch.empty(3, 4).t().uniform_(), torch.empty(2).fill_(1.0)],
    "dtypes of numbers": lambda: [torch.empty(3, dtype=torch.int64) * x for x in (1, 1.0, True)],
    "strides": lambda: [torch.empty(3, 4) + 1, torch.empty(4, 3).t() + 1, torch.empty_like(torch.empty(4, 3).t())],
    "several results": lambda: [
        torch.native_layer_norm(torch.empty(2, 8, dtype=d), [8], None, None, 1e-5) for d in (torch.float32, torch.half)
    ],
    "lists of tensors": lambda: [torch.cat([torch.empty(n), torch.empty(2)]) for n in (1, 2, 1)],
    "results that are arguments": lambda: [x := torch.empty(4), x.contiguous(), x.to(torch.float32), x.reshape(2, 2)],
    "convolutions": lambda: F.conv2d(torch.empty(1, 3, 8, 8), torch.empty(4, 3, 3, 3)),
    "values": lambda: [torch.tensor(3), torch.tensor([1.0, 2.0]) + 1, torch.full((2,), 3)],
    "no elements": lambda: [torch.empty(0, 4) + 1, torch.empty(4, 0).t() * 2],
}


def described(mode: FakeTensorMode, case: Callable[[], Any]) -> list[Any]:
    """Return all that shows of the tensors of ``case``, made twice: memory by the number of its first appearance."""
    with mode:
        tensors = [leaf for _ in range(2) for leaf in tree_leaves(case()) if isinstance(leaf, torch.Tensor)]
    memory: dict[int, int] = {}
    found = []
    for one in tensors:
        assert isinstance(one, FakeTensor)
        place = memory.setdefault(one.untyped_storage()._cdata, len(memory))
        sizes = one.shape, one.stride(), one.storage_offset(), one.untyped_storage().nbytes()
        found.append((sizes, one.dtype, one.device, place, one.requires_grad))
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_a_short_way_gives_is_what_torch_gives(case: str) -> None:
    found = described(PlanMode(LiveMemory(), Operations()), CASES[case])
    assert found == described(FakeTensorMode(), CASES[case])


def test_torch_works_out_the_same_operation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()
    dispatch = PlanMode.dispatch

    def counted(self: PlanMode, func: Any, *arguments: Any) -> Any:
        asked[str(func)] += 1
        return dispatch(self, func, *arguments)

    monkeypatch.setattr(PlanMode, "dispatch", counted)
    with PlanMode(LiveMemory(), Operations()):
        for _ in range(5):
            (torch.empty(4, 4) @ torch.empty(4, 4))[1:].view(12).relu()
        torch.empty(4, 4, dtype=torch.float64) @ torch.empty(4, 4, dtype=torch.float64)
    assert asked["aten.mm.default"] == 2 and asked["aten.relu.default"] == 1
    assert not asked["aten.slice.Tensor"] and not asked["aten.view.default"]
