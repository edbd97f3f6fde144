"""`deepspeed.zero`: models that are built in parts, and parameters that are full for a while."""

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
from .parameters import adopt, note_external, note_gather
from .settings import load_for_construction, raw_config

_ACTIVE: ContextVar[tuple[Init, ...]] = ContextVar("zero_deepspeed_init", default=())


class Init:
    """Context manager: modules built inside are sharded over the ranks (see `zero_core.Init`). Named as DeepSpeed's.
    Collective.

    ``module``: a model that is there already is sharded at once. ``config_dict_or_path`` (or ``config``): values that
    frameworks have left "auto" are tolerated; ``mpu``: as for `initialize`. Initial values are those that one process
    draws; at the end parameters get ``dtype``, by default the configuration's: bf16, fp16 or float32. Inside another
    `Init`, and without stage 3, it does nothing.

    ``data_parallel_group`` and ``sequence_data_parallel_group`` may name all ranks. Shards are where the model's code
    puts its parameters, or in the files of ``offload_param``: ``remote_device`` and ``pin_memory`` have no effect until
    `initialize`, which reads the configuration. Nothing in torch is replaced, so ``mem_efficient_linear`` and
    ``tensor_overrides`` have nothing to choose.
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
        _refuse_elsewhere(
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
        self._built: list[weakref.ref[nn.Parameter]] = []
        if module is not None and enabled:
            inner = self._prepared()
            if inner is not None:
                inner.shard(module)
                self._finish(module.parameters())

    def __enter__(self) -> Init:
        active = _ACTIVE.get()
        if self._enabled and not active:
            self._open()
        _ACTIVE.set((*active, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ACTIVE.set(_ACTIVE.get()[:-1])
        self._close(kind, error, trace)

    def _open(self) -> None:
        self._inner = self._prepared()
        if self._inner is not None:
            self._inner.__enter__()
            self._handle = register_module_parameter_registration_hook(self._registered)

    def _prepared(self) -> PartitionInit | None:
        """Return what shards; None below stage 3. Collective."""
        init_distributed()
        for name, group in self._groups.items():
            if group is not None and len(dist.get_process_group_ranks(group)) < dist.get_world_size():
                raise UnsupportedError(f"zero.Init({name}=…) does not hold all ranks: say who trains what with mpu=…")
        raw = {"zero_optimization": {"stage": 3}} if self._config is None else raw_config(self._config)
        place = model_parallel(self._mpu)
        ranks = place.data_parallel_size
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
        if self._inner is None:
            return
        self._handle.remove()
        self._inner.__exit__(kind, error, trace)
        self._inner = None
        found = [parameter for reference in self._built if (parameter := reference()) is not None]
        self._built.clear()
        if error is None:
            self._finish(found)

    def _finish(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if self._dtype is not None and parameter.is_floating_point() and parameter.dtype != self._dtype:
                record = sharded_record(parameter)
                if record is not None:
                    record.convert(self._dtype)
                else:
                    parameter.data = parameter.data.to(self._dtype)
            adopt([parameter], self._shards)

    def _registered(self, _module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._built.append(weakref.ref(parameter))


def _refuse_elsewhere(**given: bool) -> None:
    """Arguments for what the configuration decides when the engine is made."""
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
def suspended() -> Iterator[None]:
    """An open `Init` does nothing inside."""
    active = _ACTIVE.get()
    if active:
        active[0]._close(None, None, None)
    try:
        yield
    finally:
        if active and active[0]._enabled:
            active[0]._open()


class GatheredParameters(AbstractContextManager[None]):
    """Context manager: ``params`` (one, or an iterable; None and plain tensors are ignored) are gathered inside.

    With ``modifier_rank`` that rank's changes become every rank's at the end; without it an engine keeps those that are
    the same on all ranks, and refuses others. ``fwd_module``: also have them gathered whenever that module runs.
    Contexts may overlap. Collective.
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
        if self._enabled:
            self._context = gathered_anywhere(self._parameters, self._modifier_rank)
            self._context.__enter__()
            note_gather(self._parameters, 1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._context is not None:
            note_gather(self._parameters, -1)
            context, self._context = self._context, None
            context.__exit__(kind, error, trace)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Have ``parameter``, which another module owns, gathered whenever ``module`` runs."""
    register_use(module, parameter)
    note_external(parameter)


def unwrap_model_for_generation(model: Any, **_options: Any) -> AbstractContextManager[Any]:
    """Context manager: the plain module behind an engine, its parameters full and its hooks off, so that ranks may
    generate as much as each likes. Collective."""
    return _unwrapped(model)


@contextmanager
def _unwrapped(engine: Any) -> Iterator[nn.Module]:
    if engine.zero_optimization_stage() < 3:
        yield engine.module
        return
    with GatheredParameters(engine.module.parameters()):
        engine.partition.runtime.pause()
        try:
            yield engine.module
        finally:
            engine.partition.runtime.resume()
