"""`DeepSpeedCPUAdam`, `DeepSpeedCPULion` and `DeepSpeedCPUAdagrad` stepped by themselves, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zero_deepspeed.cpu_optimizers import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion

KINDS = (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad)


def gradients(numel: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(numel, generator=generator).half() for _ in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_float16_parameters_are_updated_in_float32_and_rounded(kind: Any) -> None:
    torch.manual_seed(0)
    half = nn.Parameter(torch.randn(1000).half())
    other = nn.Parameter(torch.zeros(3))
    optimizer = kind([half, other], lr=1e-2)
    full = nn.Parameter(half.detach().float())
    reference = kind([full], lr=1e-2)
    for gradient in gradients(1000, 4):
        half.grad, full.grad = gradient, gradient.float()
        optimizer.step()
        reference.step()
        full.data.copy_(full.detach().half())
        assert torch.equal(half.detach().float(), full)
    assert optimizer.param_groups[0]["params"] == [half, other] and list(optimizer.state) == [half]
    assert all(state.dtype == torch.float32 for state in optimizer.state[half].values())


def test_states_of_float16_parameters_are_saved_and_loaded() -> None:
    first, second = (nn.Parameter(torch.ones(300).half()) for _ in range(2))
    one, two = DeepSpeedCPUAdam([first], lr=1e-2), DeepSpeedCPUAdam([second], lr=1e-2)
    before, after = gradients(300, 2)
    first.grad = before
    one.step()
    two.load_state_dict(one.state_dict())
    second.data.copy_(first.data)
    first.grad = second.grad = after
    one.step()
    two.step()
    assert torch.equal(first, second) and not torch.equal(first, torch.ones(300).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sparse_gradient_counts_as_the_dense_one(dtype: torch.dtype) -> None:
    table = nn.Embedding(10, 4, sparse=True).to(dtype)
    dense = nn.Parameter(table.weight.detach().clone())
    optimizer, reference = DeepSpeedCPUAdagrad(table.parameters(), lr=0.1), DeepSpeedCPUAdagrad([dense], lr=0.1)
    for rows in ([1, 1, 7], [7, 3]):
        optimizer.zero_grad()
        table(torch.tensor(rows)).float().square().sum().backward()
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        dense.grad = table.weight.grad.to_dense()
        optimizer.step()
        reference.step()
        assert table.weight.grad.is_sparse and torch.equal(table.weight, dense)


def test_hooks_and_closures_run_once() -> None:
    parameter = nn.Parameter(torch.ones(5).half())
    optimizer = DeepSpeedCPUAdam([parameter], lr=0.1)
    DeepSpeedCPUAdam.__mro__[1]([nn.Parameter(torch.ones(1))])  # torch wraps that class's step then, too
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> Any:
        loss = parameter.float().square().sum()
        loss.backward()
        seen.append("closure")
        return loss

    assert optimizer.step(closure) == 5.0
    assert seen == ["before", "closure", "after"] and parameter.max() < 1


def test_a_refused_step_leaves_groups_and_values() -> None:
    half, odd = nn.Parameter(torch.ones(4).half()), nn.Parameter(torch.ones(4, 4).t())
    optimizer = DeepSpeedCPUAdam([half, odd], lr=0.1)
    half.grad, odd.grad = torch.ones(4).half(), torch.ones(4, 4)
    with pytest.raises(ValueError, match="contiguous"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [half, odd] and torch.equal(half, torch.ones(4).half())
