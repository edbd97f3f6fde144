"""Methods of `Engine` that copy it shallowly, or refuse deep copies and pickles: it is tied to its process and other
ranks."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from .errors import UsageError

T = TypeVar("T")


def share(engine: T) -> T:
    """Return a shallow copy of ``engine``, which shares every attribute with it (`copy.copy`)."""
    other = type(engine).__new__(type(engine))
    other.__dict__.update(engine.__dict__)
    return other


def refuse_copy(_engine: object, _memo: dict[int, Any]) -> NoReturn:
    """Raise `UsageError` for `copy.deepcopy`, naming the model as what to copy instead."""
    raise _refusal("copied", "Copy the model, on every rank: copy.deepcopy(engine.module), which has the full values.")


def refuse_pickle(_engine: object, _protocol: Any) -> NoReturn:
    """Raise `UsageError` for `pickle`, naming the calls that write a checkpoint or the weights instead."""
    raise _refusal(
        "pickled",
        "Write what training continues from by engine.save_checkpoint(folder), the full weights by "
        "engine.save_16bit_model(folder), or take them from engine.consolidated_state_dict(); all on every rank.",
    )


def _refusal(what: str, instead: str) -> UsageError:
    """Return the error for ``what`` cannot be done with an engine ("copied", "pickled"); ``instead``: advice, in
    sentences."""
    return UsageError(
        f"an engine cannot be {what}: its shards, process groups and hooks belong to this process. {instead}"
    )
