"""What an optimizer has to see of the parameters to be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from zero_optim_kernels.torch import CPUAdamW
from zero_partition import PartitionError
from zero_partition.needs import Need, need_of, refuse_on_tier, refuse_unusable

MUON = [] if torch.__version__ < (2, 9) else [torch.optim.Muon]  # came with torch 2.9


class SignDescent(Optimizer):
    """Elementwise, and unknown to anybody."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["age"] = state.get("age", 0) + 1
                    p.sub_(p.grad.sign(), alpha=group["lr"] / state["age"])


class NormedDescent(SignDescent):
    """Divides by the norm of the whole gradient of a parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class RowDescent(SignDescent):
    """Works on rows and fails on anything that has none."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                rows, _ = p.shape
                p.sub_(p.grad / rows, alpha=group["lr"])


class ModelNormDescent(SignDescent):
    """Divides by the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.square().sum()) for p in trained) ** 0.5
        for p in trained:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


class SometimesRows(SignDescent):
    """Elementwise in groups without the flag ``rows``."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.shape[1] if group["rows"] else 1), alpha=group["lr"])


class SameSizes(SignDescent):
    """Takes parameters of one size only, for a reason of its own."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        if len({p.numel() for group in self.param_groups for p in group["params"]}) > 1:
            raise ValueError("all layers must be alike")
        super().step()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 4))]


@pytest.mark.parametrize(
    "kind", ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
def test_torchs_elementwise_optimizers_run_on_fragments(kind: str) -> None:
    assert need_of(getattr(torch.optim, kind)(parameters(), lr=1e-3)) is Need.ELEMENTS


class DeclaredDescent(SignDescent):
    """Says that it is elementwise; its arithmetic is the parent's."""

    elementwise = True


class DerivedDescent(DeclaredDescent):
    """Has arithmetic of its own, of which its parent says nothing."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step(closure)


class FalselyDeclared(NormedDescent):
    """Says that it is elementwise and is not."""

    elementwise = True


class InheritedDescent(DeclaredDescent):
    """Has nothing of its own."""


def test_a_declaration_holds_for_classes_without_arithmetic_of_their_own() -> None:
    assert need_of(InheritedDescent(parameters())) is Need.ELEMENTS
    assert need_of(CPUAdamW(parameters())) is Need.ELEMENTS


def test_the_probe_accepts_a_declared_elementwise_optimizer_and_leaves_no_trace() -> None:
    given = parameters()
    before = given[0].detach().clone()
    optimizer = DeclaredDescent(given)
    assert need_of(optimizer) is Need.ELEMENTS
    assert torch.equal(given[0], before) and not optimizer.state and optimizer.param_groups[0]["params"] == given


@pytest.mark.parametrize(
    "make", [NormedDescent, RowDescent, SignDescent, DerivedDescent, FalselyDeclared, torch.optim.Adafactor, *MUON]
)
def test_what_looks_at_whole_matrices_needs_whole_parameters(make: Callable[[Any], Optimizer]) -> None:
    assert need_of(make(parameters())) is Need.PARAMETERS


def test_what_looks_at_the_whole_model_needs_it() -> None:
    assert need_of(ModelNormDescent(parameters())) is Need.MODEL


def test_every_group_is_probed() -> None:
    optimizer = SometimesRows(parameters())
    optimizer.param_groups[0]["rows"] = False
    assert need_of(optimizer) is Need.ELEMENTS
    optimizer.add_param_group({"params": parameters(), "rows": True})
    assert need_of(optimizer) is Need.PARAMETERS


class DerivedLBFGS(torch.optim.LBFGS):
    """Another name for LBFGS."""


class LineSearch(SignDescent):
    """Evaluates the loss again inside a step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()
        super().step()


@pytest.mark.parametrize("refuse", [refuse_unusable, refuse_on_tier])
@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam, DerivedLBFGS, LineSearch])
def test_what_no_engine_can_run_is_refused_by_name(
    make: Callable[[Any], Optimizer], refuse: Callable[[Optimizer], None]
) -> None:
    with pytest.raises(PartitionError, match=f"{make.__name__} cannot run in an engine"):  # type: ignore[attr-defined]
        refuse(make(parameters()))


class LBFGS(DeclaredDescent):
    """Has the name of torch's LBFGS alone."""


def test_what_only_has_the_name_of_such_an_optimizer_is_not_refused() -> None:
    optimizer = LBFGS(parameters())
    optimizer.register_step_pre_hook(lambda *_: None)  # torch wraps the step
    refuse_unusable(optimizer)


def test_a_failing_probe_says_so() -> None:
    optimizer = SometimesRows(parameters())
    with pytest.raises(PartitionError, match="SometimesRows failed on a small probe, matrices of 6 x 4: 'rows'"):
        need_of(optimizer)


def test_a_failure_on_fragments_that_is_not_about_their_shape_is_shown() -> None:
    with pytest.raises(
        PartitionError, match="SameSizes failed on a small probe, two tensors.*: all layers must be alike"
    ):
        need_of(SameSizes(parameters()))
