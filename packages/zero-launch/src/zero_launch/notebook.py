"""Run a function on several ranks from a notebook cell or a script, and return its results."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from zero_launch.job import run_job
from zero_launch.spec import LaunchSpec

Result = TypeVar("Result")


@overload
def notebook_launch(
    fn: Callable[..., Result],
    nproc: int = ...,
    *,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    every_rank: Literal[False] = ...,
) -> Result: ...
@overload
def notebook_launch(
    fn: Callable[..., Result],
    nproc: int = ...,
    *,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    every_rank: Literal[True],
) -> list[Result]: ...
def notebook_launch(
    fn: Callable[..., Result],
    nproc: int = 1,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    every_rank: bool = False,
) -> Result | list[Result]:
    """Call ``fn(*args, **kwargs)`` on ``nproc`` ranks and return rank 0's result, or all in rank order.

    Each rank is a new process, for ``nproc=1`` too, so the caller's CUDA context and threads do not matter. ``fn`` may
    be a function of a cell, a lambda or a closure; it, its arguments and its results are copied between the processes
    (cloudpickle). ``every_rank``: return a list with the results of all ranks. Raises LaunchError with the rank's
    traceback if one fails; signals act as in `launch`.
    """
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="zero-launch-call-") as folder:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((sys.path, cloudpickle.dumps((fn, tuple(args), dict(kwargs or {}))))))
        run_job(LaunchSpec(str(call), nproc=nproc, quiet=True), kind="call")
        results = [pickle.loads(_result_path(call, rank).read_bytes()) for rank in range(nproc if every_rank else 1)]
    return results if every_rank else results[0]


def run_call(path: str) -> None:
    """Run, in a rank, the call that `notebook_launch` wrote to ``path``, and write its result to a file beside it.

    Replaces this process's import path by the caller's. Raises what the call raises.
    """
    import cloudpickle

    # The caller's import path comes first: the function's own module may be found there only.
    sys.path, payload = pickle.loads(Path(path).read_bytes())
    fn, args, kwargs = pickle.loads(payload)
    result = cloudpickle.dumps(fn(*args, **kwargs))
    _result_path(Path(path), int(os.environ["RANK"])).write_bytes(result)


def _result_path(call: Path, rank: int) -> Path:
    """Return the file for the result of ``rank``, beside the file of the call."""
    return call.with_name(f"result-{rank}")
