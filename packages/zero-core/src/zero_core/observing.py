"""The seam through which a tool follows the engines of a script that does not know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from zero_partition import StepResult, UnitLimits

    from .engine import Engine


class Observer(Protocol):
    """What one engine reports, on every rank.

    Call order per micro-batch: `loss`; at the boundary of accumulation also `before_step`, when all gradients have been
    averaged, and `after_step`, when the weights are published. All may communicate.
    """

    def loss(self, loss: torch.Tensor) -> None: ...
    def before_step(self) -> None: ...
    def after_step(self, result: StepResult) -> None: ...


class Unobserved:
    """The observer of an engine that nobody follows."""

    def loss(self, loss: torch.Tensor) -> None:
        """Nothing to do."""

    def before_step(self) -> None:
        """Nothing to do."""

    def after_step(self, result: StepResult) -> None:
        """Nothing to do."""


class Supervisor(Protocol):
    """What `initialize` asks: which configuration and units to use instead of those given, and who observes.

    ``world_size``: the ranks that train the same part of the model.
    """

    def config(self, given: Any, world_size: int) -> Any: ...
    def limits(self, limits: UnitLimits) -> UnitLimits: ...
    def observer(self, engine: Engine) -> Observer: ...


class Unsupervised:
    """Everything as the script says."""

    def config(self, given: Any, world_size: int) -> Any:
        """What was given."""
        return given

    def limits(self, limits: UnitLimits) -> UnitLimits:
        """What was given."""
        return limits

    def observer(self, engine: Engine) -> Observer:
        """Nobody."""
        return Unobserved()


_SUPERVISOR: ContextVar[Supervisor] = ContextVar("zero_core_supervisor", default=Unsupervised())  # noqa: B039


def supervisor() -> Supervisor:
    """Who supervises this context."""
    return _SUPERVISOR.get()


@contextmanager
def supervised(by: Supervisor) -> Iterator[None]:
    """Have ``by`` asked for every engine that is made inside."""
    token = _SUPERVISOR.set(by)
    try:
        yield
    finally:
        _SUPERVISOR.reset(token)
