"""Small functions and classes that scripts import from DeepSpeed."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from zero_core import checkpointing

from .accelerator import get_accelerator
from .parameters import ZeroParameter

logger = logging.getLogger("DeepSpeed")

_CONSTRUCTORS = frozenset([torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.tensor])


class OnDevice(TorchFunctionMode):
    """Context manager: tensors created inside are on ``device`` (default: meta), floating ones in ``dtype``.

    That holds for torch's empty, zeros, ones, full, rand, randn and tensor; an explicit ``device=`` in a call stays.
    ``enabled``: false to do nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        super().__init__()
        self.dtype = dtype
        self.enabled = enabled
        self.device = torch.device(device)

    def __enter__(self) -> OnDevice:
        """Begin to act, if enabled; return this context."""
        if self.enabled:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop acting, if enabled."""
        if self.enabled:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the torch function ``func`` with its arguments and return the result; the constructors of tensors that
        the class names create them on the device and in the dtype of this context."""
        keywords = dict(kwargs or {})
        if func not in _CONSTRUCTORS:
            return func(*args, **keywords)
        if keywords.get("device") is None:
            keywords["device"] = self.device
        made = func(*args, **keywords)
        return made.to(self.dtype) if made.is_floating_point() else made


class DummyOptim:
    """One param group with ``params``, as a schedule reads it of an optimizer; it updates nothing."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def unchanged(function: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Callable[..., Any]:
    """Return ``function`` itself: the decorators of DeepSpeed that use this change nothing here."""
    return function


def is_zero_param(parameter: object) -> bool:
    """Return whether a parameter is sharded by stage 3 or `Init`."""
    return isinstance(parameter, ZeroParameter)


def is_zero_supported_optimizer(optimizer: object) -> bool:
    """Return whether ``optimizer`` is a torch optimizer: `initialize` accepts all of them and checks what they need."""
    return isinstance(optimizer, torch.optim.Optimizer)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of nested containers ``item`` with every tensor copied to memory of its own on ``device``,
    detached; parameters stay parameters."""
    return tree_map(lambda leaf: _copied(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, item)


def register_grad_hook(param: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> RemovableHandle:
    """Have ``hook`` called with the parameter, inside backward, whenever autograd has accumulated into its gradient;
    return the handle that removes it."""
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return a copy of nested containers ``item`` in which tensors are on ``device``: those for which
    ``criterion_func`` is true (None: all)."""

    def moved(leaf: Any) -> Any:
        """Return ``leaf`` moved to ``device`` if it is a tensor that ``criterion_func`` accepts; else ``leaf``
        itself."""
        chosen = isinstance(leaf, torch.Tensor) and (criterion_func is None or criterion_func(leaf))
        return leaf.to(device) if chosen else leaf

    return tree_map(moved, item)


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log ``message`` with the device memory in use and its peak, in GiB; do nothing without ``force``."""
    if force:
        device = get_accelerator()
        used, most = device.memory_allocated() / 2**30, device.max_memory_allocated() / 2**30
        logger.info("%s: %.2f GiB in use, at most %.2f GiB", message, used, most)


def _copied(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a detached copy of ``tensor`` on ``device``, which is a parameter if ``tensor`` is one."""
    copied = tensor.detach().to(device, copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def configure(mpu_: Any = None, deepspeed_config: Any = None, *options: Any, **named: Any) -> None:
    """Set how activation checkpointing stores the inputs of segments from now on, by
    `zero_core.checkpointing.configure`.

    ``mpu_``: an object with ``get_model_parallel_group()``, for partitioned activations. ``deepspeed_config``: a dict
    or the path of a JSON file, whose section `activation_checkpointing` is used; ``options`` and ``named`` replace its
    keys, as that function names them. Raises `ConfigError` or `UsageError`.
    """
    checkpointing.configure(mpu_, deepspeed_config, *options, **named)
