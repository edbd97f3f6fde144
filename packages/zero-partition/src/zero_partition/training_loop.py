"""The interface through which a partition asks its training loop what backward passes are for."""

from __future__ import annotations

from typing import Protocol


class TrainingLoop(Protocol):
    """A loop of backward passes and steps that drives a partition; an engine has one."""

    def reduces_now(self) -> bool:
        """Return whether a backward pass that begins now reduces its gradients; the same on every rank."""

    def refuse_plain_backward(self) -> str | None:
        """Return why ``loss.backward()`` cannot be called now, for an error; None if it can."""

    def refuse_written_gradients(self) -> str | None:
        """Return why user code may not write ``.grad`` now, for an error; None if it may."""

    def position(self) -> tuple[int, int, int]:
        """Return the numbers of optimizer steps, of micro-batches and of samples so far, on this rank."""

    def go_back(self, micro_steps: int, samples: int) -> None:
        """Restart the current step: set the counts to those at its beginning.

        Called after a failure, when all ranks have completed the step before. The arguments are the smallest counts of
        any rank.
        """


class EveryPassReduces:
    """The `TrainingLoop` of a partition without an engine: each backward pass reduces, and nothing is refused."""

    def reduces_now(self) -> bool:
        """Return True."""
        return True

    def refuse_plain_backward(self) -> str | None:
        """Return None, as nothing is refused."""
        return None

    def refuse_written_gradients(self) -> str | None:
        """Return None, as nothing is refused."""
        return None

    def position(self) -> tuple[int, int, int]:
        """Return zeros, as nothing is counted: (steps, micro-batches, samples)."""
        return 0, 0, 0

    def go_back(self, micro_steps: int, samples: int) -> None:
        """Do nothing, as nothing is counted."""


class FollowedLoop:
    """The `TrainingLoop` that forwards to the one that drives a partition: `EveryPassReduces` until `follow` sets
    another."""

    def __init__(self) -> None:
        self._loop: TrainingLoop = EveryPassReduces()

    def follow(self, loop: TrainingLoop) -> None:
        """Forward to ``loop`` from now on, instead of the former one."""
        self._loop = loop

    def reduces_now(self) -> bool:
        """Return whether a backward pass that begins now reduces its gradients, by the followed loop."""
        return self._loop.reduces_now()

    def refuse_plain_backward(self) -> str | None:
        """Return why ``loss.backward()`` cannot be called now, by the followed loop; None if it can."""
        return self._loop.refuse_plain_backward()

    def refuse_written_gradients(self) -> str | None:
        """Return why user code may not write ``.grad`` now, by the followed loop; None if it may."""
        return self._loop.refuse_written_gradients()

    def position(self) -> tuple[int, int, int]:
        """Return the followed loop's numbers of steps, micro-batches and samples."""
        return self._loop.position()

    def go_back(self, micro_steps: int, samples: int) -> None:
        """Have the followed loop restart its current step, with the counts given."""
        self._loop.go_back(micro_steps, samples)
