"""What the engine asks of a learning rate schedule."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Scheduler(Protocol):
    """A learning rate schedule: those of this package, and of torch.optim.lr_scheduler all that need no metric."""

    def step(self) -> None:
        """Move on by one optimizer step and write the learning rates into the optimizer's param groups."""

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each param group as last written: floats, or tensors where groups hold them."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on from here."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken; the optimizer's learning rates change at the next `step`."""
