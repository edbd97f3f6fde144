"""`deepspeed.zero`: sharded construction of models, and access to full parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zero_comm import EngineGroups, Group
from zero_core.construction import shards_in
from zero_core.model_parallel import model_parallel
from zero_core.supervision import supervisor
from zero_partition import Init as PartitionInit
from zero_partition import gathered_anywhere, sharded_record
from zero_partition import register_external_parameter as register_use

from .communication import init_distributed
from .errors import UnsupportedError
from .parameters import add_names, count_gathers, mark_external
from .settings import load_for_construction, raw_config

_ACTIVE: ContextVar[tuple[Init, ...]] = ContextVar("zero_deepspeed_init", default=())


class Init:
    """Context manager: modules built inside are sharded over the ranks (see `zero_core.Init`). Named as DeepSpeed's.
    Collective.

    ``module``: an existing model, which is sharded at once. ``config_dict_or_path`` (or ``config``): the configuration,
    in which frameworks may have left values "auto"; stage 3 without one. ``mpu``: as for `initialize`. ``enabled``:
    false to do nothing. Initial values are those that a single process draws. At the end parameters are cast to
    ``dtype``, by default the configuration's: bf16, fp16 or float32, and get DeepSpeed's attributes (`ZeroParameter`).
    Below stage 3 the context does nothing. Inside another `Init`, which shards, it only gives what was built until its
    end DeepSpeed's attributes.

    ``data_parallel_group`` and ``sequence_data_parallel_group`` must contain all ranks. Shards are on the device on
    which the model's code creates its parameters, or in the files of ``offload_param``; ``remote_device`` and
    ``pin_memory`` have no effect, as `initialize` reads the configuration. ``mem_efficient_linear`` and
    ``tensor_overrides`` have no effect either, as nothing in torch is replaced.

    Raises `UnsupportedError` for a group of fewer ranks, and for the other arguments, which the configuration decides;
    `ConfigError` for a wrong configuration.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        _refuse_configured_elsewhere(
            zero_param_parallel_group=zero_param_parallel_group is not None,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            param_swapper=param_swapper is not None,
        )
        self._groups = {
            "data_parallel_group": data_parallel_group,
            "sequence_data_parallel_group": sequence_data_parallel_group,
        }
        self._config = config_dict_or_path if config_dict_or_path is not None else config
        self._mpu = mpu
        self._enabled = enabled
        self._dtype = dtype
        self._inner: PartitionInit | None = None
        self._shards: Group | None = None
        self._handle: Any = None
        self._built: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Parameter]]] = []
        if module is not None and enabled:
            inner = self._new_partition_init()
            if inner is not None:
                inner.shard(module)
                self._cast_and_name(module.parameters())

    def __enter__(self) -> Init:
        """Begin to shard what is built, unless an outer `Init` does so already or this one is not enabled; return this
        context. Collective where it begins."""
        if self._enabled and _sharding_context() is None:
            self._open()
        _ACTIVE.set((*_ACTIVE.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shard what was built and is not sharded yet and, without an ``error``, cast it and give it DeepSpeed's
        attributes. Inside another `Init`, which shards, only give the attributes. Collective."""
        _ACTIVE.set(_ACTIVE.get()[:-1])
        self._close(kind, error, trace)
        outer = _sharding_context()
        if outer is not None:
            outer._name_built()

    def _open(self) -> None:
        """Begin to shard modules that are built, and to record their parameters for `_close`; below stage 3 do neither.
        Collective.
        """
        self._inner = self._new_partition_init()
        if self._inner is not None:
            self._inner.__enter__()
            self._handle = register_module_parameter_registration_hook(self._record_parameter)

    def _new_partition_init(self) -> PartitionInit | None:
        """Return a new context of zero-partition that shards modules as the configuration says; None below stage 3.
        Collective.

        At stage 3 it sets ``_dtype`` to the configuration's if none was given, and opens process groups. Raises as the
        class says.
        """
        init_distributed()
        for name, group in self._groups.items():
            if group is not None and len(dist.get_process_group_ranks(group)) < dist.get_world_size():
                raise UnsupportedError(f"zero.Init({name}=…) does not hold all ranks: say who trains what with mpu=…")
        raw = {"zero_optimization": {"stage": 3}} if self._config is None else raw_config(self._config)
        place = model_parallel(self._mpu)
        ranks = place.ranks
        resolved = load_for_construction(supervisor().config(raw, ranks), ranks)
        if resolved.zero_optimization.stage < 3:
            return None
        if self._dtype is None:
            half = torch.float16 if resolved.fp16.enabled else torch.float32
            self._dtype = torch.bfloat16 if resolved.bf16.enabled else half
        groups = EngineGroups.open(place.data_rows)
        self._shards = groups.gather
        return PartitionInit(groups.gather, groups.control, new_shard=shards_in(resolved))

    def _close(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End what `_open` began: shard what was built and, without an ``error``, cast its parameters and give them
        DeepSpeed's attributes. Do nothing if nothing was begun. The arguments are those of `__exit__`."""
        if self._inner is None:
            return
        self._handle.remove()
        self._inner.__exit__(kind, error, trace)
        self._inner = None
        found = self._existing_parameters()
        self._built.clear()
        if error is None:
            self._cast_and_name(found)

    def _existing_parameters(self) -> list[nn.Parameter]:
        """Return the recorded parameters that still exist, and those that replaced recorded ones in their modules, as
        `nn.Module.to_empty` does."""
        found = {id(parameter): parameter for _, recorded in self._built if (parameter := recorded()) is not None}
        for owner, _ in self._built:
            module = owner()
            for parameter in () if module is None else module.parameters(recurse=False):
                found.setdefault(id(parameter), parameter)
        return list(found.values())

    def _name_built(self) -> None:
        """Give DeepSpeed's attributes to what was built so far; values and dtypes stay as they are until `_close`."""
        add_names(self._existing_parameters(), self._shards)

    def _cast_and_name(self, parameters: Iterable[nn.Parameter]) -> None:
        """Cast floating ``parameters`` to the context's dtype in place, of a sharded one this rank's shard, and give
        DeepSpeed's attributes to those of class `nn.Parameter`, whose class becomes `ZeroParameter`.
        """
        for parameter in parameters:
            if self._dtype is not None and parameter.is_floating_point() and parameter.dtype != self._dtype:
                record = sharded_record(parameter)
                if record is not None:
                    record.convert(self._dtype)
                else:
                    parameter.data = parameter.data.to(self._dtype)
            add_names([parameter], self._shards)

    def _record_parameter(self, module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        """Remember, by weak references, a parameter that a module registers, and the module; torch calls it while the
        context is open.
        """
        if parameter is not None:
            self._built.append((weakref.ref(module), weakref.ref(parameter)))


def _refuse_configured_elsewhere(**given: bool) -> None:
    """Raise `UnsupportedError` for an argument of `Init` that the configuration sets instead, if the user passed one;
    the message has the configuration's key. ``given``: name of each such argument -> whether it was passed.
    """
    keys = {
        "zero_param_parallel_group": "zero_hpz_partition_size",
        "zero_quantized_weights": "zero_quantized_weights",
        "zero_quantized_nontrainable_weights": "zero_quantized_nontrainable_weights",
        "param_swapper": "offload_param",
    }
    for name, is_given in given.items():
        if is_given:
            raise UnsupportedError(
                f"zero.Init({name}=…) is not available: set zero_optimization.{keys[name]} in the configuration"
            )


@contextmanager
def init_suspended() -> Iterator[None]:
    """Context manager, used by `initialize`: suspend an open `Init` inside, so that what is built there is not sharded.
    What the `Init` has built before is sharded at the start. Does nothing without an open `Init`. Collective.
    """
    opened = _sharding_context()
    if opened is not None:
        opened._close(None, None, None)
    try:
        yield
    finally:
        if opened is not None:
            opened._open()


def _sharding_context() -> Init | None:
    """Return the `Init`, of those whose ``with`` block this code runs in, that shards what is built; None without
    one."""
    return next((context for context in _ACTIVE.get() if context._inner is not None), None)


class GatheredParameters(AbstractContextManager[None]):
    """Context manager: ``params`` (one, or an iterable; None and plain tensors are ignored) are gathered inside.

    With ``modifier_rank`` the changes of that rank are broadcast at the end. Without it an engine keeps changes that
    are the same on all ranks, and refuses others. ``fwd_module``: gather the parameters also whenever this module runs,
    from now on. ``enabled``: false to gather nothing. Contexts may overlap. Collective.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        single = isinstance(params, torch.Tensor)
        self._parameters: list[Any] = [params] if single else list(params) if isinstance(params, Iterable) else []
        self._context: AbstractContextManager[None] | None = None
        self._modifier_rank = modifier_rank
        self._enabled = enabled
        if fwd_module is not None:
            for parameter in self._parameters:
                if isinstance(parameter, nn.Parameter):
                    register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> None:
        """Gather the parameters, if enabled. Collective."""
        if self._enabled:
            self._context = gathered_anywhere(self._parameters, self._modifier_rank)
            self._context.__enter__()
            count_gathers(self._parameters, 1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take over the changes to the parameters, as the class says, and release them. Collective."""
        if self._context is not None:
            count_gathers(self._parameters, -1)
            context, self._context = self._context, None
            context.__exit__(kind, error, trace)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Register ``parameter``, which another module owns, to be gathered whenever ``module`` runs from now on; a second
    call does nothing. Every rank must make the same call."""
    register_use(module, parameter)
    mark_external(parameter)


def unwrap_model_for_generation(model: Any, **_options: Any) -> AbstractContextManager[Any]:
    """Return a context manager that yields the user's module, with full parameters and without the engine's hooks.

    ``model``: a `DeepSpeedEngine`. ``options`` have no effect. Inside, ranks may call the module a different number of
    times, as generation does. Below stage 3 parameters are full anyway. Collective at stage 3.
    """
    return _full_without_hooks(model)


@contextmanager
def _full_without_hooks(engine: Any) -> Iterator[nn.Module]:
    """Yield the module of ``engine``, at stage 3 with full parameters and with the engine's hooks paused. Collective at
    stage 3.
    """
    if engine.zero_optimization_stage() < 3:
        yield engine.module
        return
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)  # without an optimizer it is that
    with GatheredParameters(engine.module.parameters()):
        offload.remove()
        offload.forward_hooks = []
        try:
            yield engine.module
        finally:
            offload.setup_zero_stage3_hooks()
