"""The seam behind which the training loop says what its backward passes mean."""

from __future__ import annotations

from typing import Protocol


class TrainingLoop(Protocol):
    """Answers the partition's questions about the next backward pass; an engine has one."""

    def reduces_now(self) -> bool:
        """Return whether a backward pass that begins now reduces its gradients; the same on every rank."""

    def refuse_plain_backward(self) -> str | None:
        """Return why ``loss.backward()`` cannot be called now, None when it can."""

    def refuse_written_gradients(self) -> str | None:
        """Return why the user's own gradients cannot be taken now, None when they can."""

    def position(self) -> tuple[int, int, int]:
        """Return the optimizer steps, micro-batches and samples that were counted."""

    def go_back(self, micro_steps: int, samples: int) -> None:
        """Begin the step anew, after so many micro-batches and samples; the step before is done on every rank."""


class EveryPassReduces:
    """The loop of a partition that no engine drives: each backward pass reduces, and nothing is refused."""

    def reduces_now(self) -> bool:
        """It does."""
        return True

    def refuse_plain_backward(self) -> str | None:
        """Nothing is refused."""
        return None

    def refuse_written_gradients(self) -> str | None:
        """Nothing is refused."""
        return None

    def position(self) -> tuple[int, int, int]:
        """Nothing is counted."""
        return 0, 0, 0

    def go_back(self, micro_steps: int, samples: int) -> None:
        """Nothing was counted."""


class FollowedLoop:
    """Asks the loop that drives a partition: `EveryPassReduces` until `follow` names another."""

    def __init__(self) -> None:
        self._loop: TrainingLoop = EveryPassReduces()

    def follow(self, loop: TrainingLoop) -> None:
        """Ask ``loop`` from now on."""
        self._loop = loop

    def reduces_now(self) -> bool:
        """As the loop says."""
        return self._loop.reduces_now()

    def refuse_plain_backward(self) -> str | None:
        """As the loop says."""
        return self._loop.refuse_plain_backward()

    def refuse_written_gradients(self) -> str | None:
        """As the loop says."""
        return self._loop.refuse_written_gradients()

    def position(self) -> tuple[int, int, int]:
        """As the loop has counted."""
        return self._loop.position()

    def go_back(self, micro_steps: int, samples: int) -> None:
        """Have the loop begin its step anew."""
        self._loop.go_back(micro_steps, samples)
