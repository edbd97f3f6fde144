"""The interface through which a partition asks its training loop what backward passes are for."""

from __future__ import annotations

from typing import Protocol


class TrainingLoop(Protocol):
    """A loop of backward passes and steps that drives a partition; an engine has one."""

    def reduces_now(self) -> bool:
        """Return whether a backward pass that begins now reduces its gradients; the same on every rank."""

    def refuse_plain_backward(self) -> str | None:
        """Return, for an error message, why user code may not call ``loss.backward()`` now; None if it may."""

    def refuse_written_gradients(self) -> str | None:
        """Return, for an error message, why user code may not write ``.grad`` now; None if it may."""

    def position(self) -> tuple[int, int, int]:
        """Return (optimizer steps, micro-batches, samples): this rank's counts so far."""

    def go_back(self, micro_steps: int, samples: int) -> None:
        """Restart the current step: set the counts of micro-batches and samples to those at its beginning.

        Called after a failure, when all ranks have completed the step before. The arguments are the smallest counts of
        any rank.
        """


class EveryPassReduces:
    """The `TrainingLoop` of a partition without an engine: each backward pass reduces, and nothing is refused."""

    def reduces_now(self) -> bool:
        """Return True, as every pass reduces."""
        return True

    def refuse_plain_backward(self) -> str | None:
        """Return None, as nothing is refused."""
        return None

    def refuse_written_gradients(self) -> str | None:
        """Return None, as nothing is refused."""
        return None

    def position(self) -> tuple[int, int, int]:
        """Return (0, 0, 0) for steps, micro-batches and samples, as nothing is counted."""
        return 0, 0, 0

    def go_back(self, micro_steps: int, samples: int) -> None:
        """Do nothing, as nothing is counted."""


class FollowedLoop:
    """The `TrainingLoop` that forwards each call to another one, which drives a partition: `EveryPassReduces` until
    `follow` sets it."""

    def __init__(self) -> None:
        self._loop: TrainingLoop = EveryPassReduces()

    def follow(self, loop: TrainingLoop) -> None:
        """Forward calls to ``loop`` from now on."""
        self._loop = loop

    def reduces_now(self) -> bool:
        """Return, from the followed loop, whether a backward pass that begins now reduces its gradients."""
        return self._loop.reduces_now()

    def refuse_plain_backward(self) -> str | None:
        """Return, from the followed loop, why user code may not call ``loss.backward()`` now; None if it may."""
        return self._loop.refuse_plain_backward()

    def refuse_written_gradients(self) -> str | None:
        """Return, from the followed loop, why user code may not write ``.grad`` now; None if it may."""
        return self._loop.refuse_written_gradients()

    def position(self) -> tuple[int, int, int]:
        """Return the followed loop's counts so far: (optimizer steps, micro-batches, samples)."""
        return self._loop.position()

    def go_back(self, micro_steps: int, samples: int) -> None:
        """Have the followed loop restart its current step, with these counts at the step's beginning."""
        self._loop.go_back(micro_steps, samples)
