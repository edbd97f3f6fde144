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
