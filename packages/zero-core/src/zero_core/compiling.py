"""`engine.compile`: what is allowed, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import UsageError
from .state import TrainingState

_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def compile_module(
    state: TrainingState,
    backend: str | Callable[..., Any],
    compile_kwargs: Mapping[str, Any] | None,
    schedule: Any,
    compiled_autograd_enabled: bool,
) -> None:
    """Compile the module as one graph, or unit by unit where parameters are released; note the names in ``state``."""
    state.check_open("compile")
    options = dict(compile_kwargs or {})
    if schedule is not None:
        raise UsageError("engine.compile(schedule=…): a schedule of DeepCompile's passes is not available; remove it")
    if compiled_autograd_enabled:
        raise UsageError(
            "engine.compile(compiled_autograd_enabled=True) would trace gathers and reductions into one backward graph "
            "and is not available; leave it false"
        )
    if options.get("mode") in _CUDA_GRAPH_MODES and any(unit.releasable for unit in state.partition.units):
        raise UsageError(
            f"engine.compile(compile_kwargs={{'mode': {options['mode']!r}}}): CUDA graphs need weights that stay in "
            "place, but stage 3 releases them; use mode 'default' or 'max-autotune-no-cudagraphs', or stage 2"
        )
    state.compiled[:] = state.partition.runtime.compile(state.module, backend=backend, **options)
