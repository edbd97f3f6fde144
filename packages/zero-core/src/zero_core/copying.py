"""Refuse copies and pickles of an engine, which is tied to its process and to the other ranks: methods of it."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from .errors import UsageError

T = TypeVar("T")


def share(engine: T) -> T:
    """Return a shallow copy, which shares everything with the engine."""
    other = type(engine).__new__(type(engine))
    other.__dict__.update(engine.__dict__)
    return other


def refuse_copy(_engine: object, _memo: dict[int, Any]) -> NoReturn:
    """Raise `UsageError`: the model can be copied instead."""
    raise _refusal("copied", "Copy the model, on every rank: copy.deepcopy(engine.module), which has the full values.")


def refuse_pickle(_engine: object, _protocol: Any) -> NoReturn:
    """Raise `UsageError`: checkpoints and weights can be written instead."""
    raise _refusal(
        "pickled",
        "Write what training goes on from by engine.save_checkpoint(folder), the full weights by "
        "engine.save_16bit_model(folder), or take them from engine.consolidated_state_dict(); all on every rank.",
    )


def _refusal(what: str, instead: str) -> UsageError:
    return UsageError(
        f"an engine cannot be {what}: its shards, process groups and hooks belong to this process. {instead}"
    )
