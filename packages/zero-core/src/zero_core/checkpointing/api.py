"""Functions for code that has no `Checkpointing` object. They use the first that exists of: the object that `configure`
made in this context (thread or task), the running engine's, one that only recomputes."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from zero_core.model_parallel import model_parallel_group
from zero_settings import Config, read

from .segments import Checkpointing, running

_CONFIGURED: ContextVar[Checkpointing | None] = ContextVar("zero_core_checkpointing_configured", default=None)
_PLAIN = Checkpointing()


def configure(
    mpu_: Any = None,
    config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how `checkpoint` stores inputs, from now on in this context and in contexts copied from it. ``mpu_``: an
    object with ``get_model_parallel_group()`` (or ``get_tensor_model_parallel_group()``), for
    ``partition_activations``. ``config``: a dict or a JSON file whose section `activation_checkpointing` is used; the
    other arguments, where not None, replace its keys. Raises `ConfigError` or `UsageError`."""
    section = dict(read(config).get("activation_checkpointing", {})) if config is not None else {}
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section.update({key: value for key, value in given.items() if value is not None})
    source = {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": section}
    resolved = Config.load(source, world_size=1).activation_checkpointing
    _CONFIGURED.set(Checkpointing(resolved, model_parallel_group(mpu_)))


def is_configured() -> bool:
    """Return whether `configure` has been called in this context, or in one from which it was copied."""
    return _CONFIGURED.get() is not None


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, whose activations backward computes again. ``use_reentrant``: torch's older
    variant."""
    return _current().checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `checkpoint` of the same arguments with ``use_reentrant=False``."""
    return _current().checkpoint(function, *args, use_reentrant=False, **kwargs)


def reset() -> None:
    """Free the contiguous buffers, as is needed after forward passes without backward. `configure`'s settings stay in
    force."""
    _current().reset()


def _current() -> Checkpointing:
    """Return the `Checkpointing` object that the functions of this file use."""
    return _CONFIGURED.get() or running() or _PLAIN
