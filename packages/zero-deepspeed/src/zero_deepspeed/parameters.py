"""DeepSpeed's attributes of parameters that stage 3 or `Init` shards."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_comm import Group
from zero_partition import (
    Partition,
    Unit,
    UnitState,
    change_class,
    gathered_anywhere,
    owner_of,
    present_class,
    sharded_record,
)

from .communication import get_world_group

_NUMBERS = itertools.count()
_FACTS = "_ds_facts"


class ZeroParamType(enum.Enum):
    """The kind of a parameter; here those of `Init` and of stage 3 are PARTITIONED, all others NORMAL."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """The presence of a parameter's full values: gathered (AVAILABLE), released, or being gathered (INFLIGHT)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _Facts:
    """The data of a `ZeroParameter` besides its tensor; copies and pickles of the parameter do not contain it.

    ``group``: the ranks that hold the shards until an engine owns the parameter; None for all. ``number``: `ds_id`.
    ``gathers``: number of open gathers of the user's. ``external``: `is_external_param`. ``active``:
    `ds_active_sub_modules`. ``held``: the context of `ZeroParameter.all_gather`, None outside of one.
    """

    def __init__(self, group: Group | None) -> None:
        self.number = next(_NUMBERS)
        self.group = group
        self.gathers = 0
        self.external = False
        self.active: set[Any] = set()
        self.held: Any = None

    def __deepcopy__(self, _memo: dict[int, object]) -> None:
        """Return None: a copied parameter is plain."""
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: an unpickled parameter is plain."""
        return type(None), ()


class FinishedGather:
    """The handle of a gather, which is finished when it is returned."""

    def wait(self, *_options: Any, **_named: Any) -> None:
        """Return at once: the parameters are there. Arguments have no effect."""


class ZeroParameter(nn.Parameter):
    """The class of parameters that stage 3 or `Init` shards; its attributes, named as DeepSpeed's, are computed when
    they are read.

    With one rank a parameter is always full. ``ds_status`` is NOT_AVAILABLE outside of `GatheredParameters` all the
    same, so that scripts behave as they do with several ranks.
    """

    @property
    def ds_id(self) -> int:
        """Return the parameter's unique number, in order of creation: the same on all ranks."""
        return _facts(self).number

    @property
    def ds_shape(self) -> torch.Size:
        """Return the shape of the full parameter."""
        return self.shape

    @property
    def ds_numel(self) -> int:
        """Return the number of elements of the full parameter."""
        return self.shape.numel()

    @property
    def ds_param_type(self) -> ZeroParamType:
        """Return PARTITIONED: only sharded parameters are of this class."""
        return ZeroParamType.PARTITIONED

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Return AVAILABLE if ``data`` has the full values now, NOT_AVAILABLE if they are released, INFLIGHT while they
        are gathered. With one rank it is as the class says.
        """
        place = _find_unit(self)
        if place is not None:
            unit = place[0]
            if unit.releasable and unit.state is not UnitState.GATHERED:
                inflight = unit.state is UnitState.GATHERING
                return ZeroParamStatus.INFLIGHT if inflight else ZeroParamStatus.NOT_AVAILABLE
            if unit.releasable or unit.plan.persistent:
                return ZeroParamStatus.AVAILABLE
        record = sharded_record(self)
        if record is not None and record.is_full:
            return ZeroParamStatus.AVAILABLE
        return ZeroParamStatus.AVAILABLE if _facts(self).gathers else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self) -> torch.Tensor:
        """Return this rank's elements of the parameter, 1-D.

        In an engine's unit, persistent ones included: a copy of this rank's fragment on the compute device, empty if
        it owns none, read from its tier after an update that still writes it; writing to the copy changes nothing.
        Before an engine, for a parameter that `Init` sharded: the shard, padded with zeros to ``ds_numel`` divided by
        the number of ranks, rounded up; it is the stored shard while released, a new tensor while gathered. Any other
        parameter: all elements, sharing its memory if that is contiguous.
        """
        place = _find_unit(self)
        if place is None:
            record = sharded_record(self)
            return self.data.flatten() if record is None else record.shard
        partition, (unit, index) = owner_of(self), place
        if partition is None:
            return self.data.flatten()
        entry = unit.layout.entries[index]
        shard = unit.acquire_shard()
        fragment = unit.layout.fragment_of(entry, partition.rank)
        start, length = (0, 0) if fragment is None else (fragment.shard_offset, fragment.length)
        part = shard[start : start + length].detach().clone()
        partition.residency.release(unit.name, dirty=False)
        return part

    @property
    def ds_persist(self) -> bool:
        """Return whether the parameter is persistent: always gathered, as small parameters are."""
        place = _find_unit(self)
        return place is not None and place[0].plan.persistent

    @property
    def ds_active_sub_modules(self) -> set[Any]:
        """Return a set that scripts may clear; nothing here depends on it."""
        return _facts(self).active

    @property
    def is_external_param(self) -> bool:
        """Return whether `register_external_parameter` was ever called for the parameter; unregistering does not change
        that."""
        return _facts(self).external

    @property
    def ds_process_group(self) -> dist.ProcessGroup:
        """Return the group whose ranks hold the shards: a replica's under MiCS, the data-parallel one under an mpu."""
        group = _shard_group(self)
        return get_world_group() if group is None else group.torch_group()

    @property
    def ds_zero_partition_rank(self) -> int:
        """Return this rank's index in `ds_process_group`."""
        group = _shard_group(self)
        return dist.get_rank() if group is None else group.rank

    @property
    def ds_zero_partition_world_size(self) -> int:
        """Return the number of ranks in `ds_process_group`."""
        group = _shard_group(self)
        return dist.get_world_size() if group is None else group.world_size

    @property
    def ds_secondary_tensor(self) -> torch.Tensor | None:
        """Return a copy of the parameter's elements in this rank's secondary shard (hpZ), 1-D, as of the last gather;
        may be empty.

        None without secondary shards, and before the first gather.
        """
        place = _find_unit(self)
        secondary = None if place is None else place[0].route.secondary
        if place is None or secondary is None or secondary.part is None:
            return None
        unit, index = place
        entry = unit.layout.entries[index]
        begin, end = entry.offset - secondary.start, entry.offset + entry.numel - secondary.start
        return secondary.part[max(begin, 0) : max(end, 0)].clone()

    @property
    def ds_zero_param_process_group(self) -> dist.ProcessGroup | None:
        """Return the group whose ranks hold the secondary shards (hpZ); None without them."""
        owner = owner_of(self)
        return None if owner is None or owner.groups.secondary is None else owner.groups.secondary.torch_group()

    @property
    def nvme_swapper(self) -> None:
        """Return None, as for a parameter that is not swapped: the engine owns the store of its shards."""
        return

    def all_gather(self, param_list: Iterable[nn.Parameter] | None = None, **_options: Any) -> None:
        """Gather this parameter (or those of ``param_list``) until `partition`. Collective.

        Parameters that an `all_gather` holds already, and plain ones, are left as they are; other arguments have no
        effect.
        """
        for parameter in [self] if param_list is None else list(param_list):
            if isinstance(parameter, ZeroParameter) and _facts(parameter).held is None:
                _facts(parameter).held = gathered_anywhere(parameter)
                _facts(parameter).held.__enter__()
                count_gathers([parameter], 1)

    def all_gather_coalesced(self, params: Iterable[nn.Parameter], **_options: Any) -> FinishedGather:
        """Gather ``params`` as `all_gather` does; return the handle that scripts wait for. ``options`` have no effect.
        Collective."""
        self.all_gather(params)
        return FinishedGather()

    def partition(self, param_list: Iterable[nn.Parameter] | None = None, **_options: Any) -> None:
        """Release this parameter (or those of ``param_list``) after `all_gather`. Collective.

        Parameters that no `all_gather` holds are left as they are; other arguments have no effect.
        """
        for parameter in [self] if param_list is None else list(param_list):
            if isinstance(parameter, ZeroParameter) and _facts(parameter).held is not None:
                held, _facts(parameter).held = _facts(parameter).held, None
                held.__exit__(None, None, None)
                count_gathers([parameter], -1)

    def partition_numel(self) -> int:
        """Return the number of elements per rank in DeepSpeed's layout, padding included; shards here have other
        sizes."""
        return math.ceil(self.ds_numel / self.ds_zero_partition_world_size)

    def aligned_size(self) -> int:
        """Return the number of elements over all ranks in DeepSpeed's layout (see `partition_numel`), padding
        included."""
        return self.partition_numel() * self.ds_zero_partition_world_size

    def padding_size(self) -> int:
        """Return the number of padding elements in DeepSpeed's layout (see `partition_numel`)."""
        return self.aligned_size() - self.ds_numel

    def ds_summary(self, **_options: Any) -> dict[str, Any]:
        """Return facts about this parameter by name: `id`, `status`, `numel`, `shape`, `requires_grad`,
        `persist` and others. ``options`` have no effect."""
        return {
            "id": self.ds_id,
            "status": self.ds_status.name,
            "numel": self.ds_numel,
            "ds_numel": self.ds_numel,
            "shape": tuple(self.shape),
            "ds_shape": tuple(self.ds_shape),
            "requires_grad": self.requires_grad,
            "persist": self.ds_persist,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with the full values, the same one at each call with this
        ``memo``. Collective where they are not gathered."""
        if id(self) not in memo:
            with nullcontext() if _is_full(self) else gathered_anywhere(self):
                memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the parameter as a plain one with the present ``data``, which is a placeholder of NaN while the
        parameter is released."""
        with torch._C.DisableTorchFunctionSubclass():
            data = self.data
        return nn.Parameter(data, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def add_names(parameters: Iterable[nn.Parameter], group: Group | None = None) -> None:
    """Make plain parameters `ZeroParameter`s, which have DeepSpeed's attributes (``ds_id``, ``ds_shape``, …);
    parameters of other classes stay as they are.

    ``group``: the ranks that hold their shards until an engine owns them.
    """
    for parameter in parameters:
        if present_class(parameter) is nn.Parameter:
            change_class(parameter, ZeroParameter)
            setattr(parameter, _FACTS, _Facts(group))


def remove_names(parameters: Iterable[nn.Parameter]) -> None:
    """Make `ZeroParameter`s plain `nn.Parameter`s again, in place; parameters of other classes stay as they are."""
    for parameter in parameters:
        if present_class(parameter) is ZeroParameter:
            change_class(parameter, nn.Parameter)
            delattr(parameter, _FACTS)


def count_gathers(parameters: Iterable[object], change: int) -> None:
    """Add ``change`` to each parameter's number of gathers that the user has open: 1 when a gather begins, -1 when it
    ends. Plain parameters are ignored."""
    for parameter in parameters:
        if isinstance(parameter, ZeroParameter):
            _facts(parameter).gathers += change


def mark_external(parameter: nn.Parameter) -> None:
    """Mark a parameter as used by a module that does not own it (`is_external_param`); do nothing for a plain one."""
    if isinstance(parameter, ZeroParameter):
        _facts(parameter).external = True


def _facts(parameter: nn.Parameter) -> _Facts:
    """Return the parameter's `_Facts`; ``parameter`` must be a `ZeroParameter`."""
    facts: _Facts = getattr(parameter, _FACTS)
    return facts


def _is_full(parameter: nn.Parameter) -> bool:
    """Return whether the parameter's ``data`` has the full values now; True for a plain parameter."""
    place, record = _find_unit(parameter), sharded_record(parameter)
    if place is not None:
        return not place[0].releasable or place[0].state is UnitState.GATHERED
    return record is None or record.is_full


def _shard_group(parameter: nn.Parameter) -> Group | None:
    """Return the group whose ranks hold the parameter's shards; None before an engine or `Init` set it."""
    owner: Partition | None = owner_of(parameter)
    return _facts(parameter).group if owner is None else owner.groups.gather


def _find_unit(parameter: nn.Parameter) -> tuple[Unit, int] | None:
    """Return (the parameter's unit, its index in the unit's layout); None for a parameter that no engine owns, and for
    a replicated one."""
    owner: Partition | None = owner_of(parameter)
    return None if owner is None else owner.find(parameter)
