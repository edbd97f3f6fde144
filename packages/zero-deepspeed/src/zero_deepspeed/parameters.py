"""Attributes of a parameter under stage 3, by DeepSpeed's names."""

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
    """How a parameter is kept; here those of `Init` and of stage 3 are PARTITIONED, all others NORMAL."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Where the full values are: here (AVAILABLE), not here, or on their way."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _Facts:
    """The facts that a `ZeroParameter` keeps besides its data; copies and pickles of the parameter carry none of it."""

    def __init__(self, group: Group | None) -> None:
        self.number = next(_NUMBERS)
        self.group = group
        self.gathers = 0
        self.external = False
        self.active: set[Any] = set()
        self.held: Any = None

    def __deepcopy__(self, _memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class ZeroParameter(nn.Parameter):
    """The class that parameters have while stage 3 or `Init` keeps them; every name is computed when it is read.

    Under one rank a parameter is always full; ``ds_status`` still says NOT_AVAILABLE outside of
    `GatheredParameters`, so that scripts take the path that they take under more ranks.
    """

    @property
    def ds_id(self) -> int:
        """A number of its own, in order of creation: the same on all ranks."""
        return _facts(self).number

    @property
    def ds_shape(self) -> torch.Size:
        """The shape of the full parameter."""
        return self.shape

    @property
    def ds_numel(self) -> int:
        """Elements of the full parameter."""
        return self.shape.numel()

    @property
    def ds_param_type(self) -> ZeroParamType:
        """PARTITIONED."""
        return ZeroParamType.PARTITIONED

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Return whether the full values are in ``data`` now."""
        place = _place(self)
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
        """A copy of the part that this rank holds, 1-D."""
        place = _place(self)
        if place is None:
            record = sharded_record(self)
            return self.data.flatten() if record is None else record.shard
        partition, (unit, index) = owner_of(self), place
        if partition is None:
            return self.data.flatten()
        entry = unit.layout.entries[index]
        shard = partition.residency.acquire(unit.name)
        fragment = unit.layout.fragment_of(entry, partition.rank)
        start, length = (0, 0) if fragment is None else (fragment.shard_offset, fragment.length)
        part = shard[start : start + length].detach().clone()
        partition.residency.release(unit.name, dirty=False)
        return part

    @property
    def ds_persist(self) -> bool:
        """Return whether it is replicated, as small parameters do."""
        place = _place(self)
        return place is not None and place[0].plan.persistent

    @property
    def ds_active_sub_modules(self) -> set[Any]:
        """A set that scripts may clear; nothing here depends on it."""
        return _facts(self).active

    @property
    def is_external_param(self) -> bool:
        """Return whether a module that does not own it registered it."""
        return _facts(self).external

    @property
    def ds_process_group(self) -> dist.ProcessGroup:
        """The process group whose ranks hold the shards: a replica's under MiCS, the data-parallel one under an mpu."""
        group = _shard_group(self)
        return get_world_group() if group is None else group.torch_group()

    @property
    def ds_zero_partition_rank(self) -> int:
        """This rank's number in `ds_process_group`."""
        group = _shard_group(self)
        return dist.get_rank() if group is None else group.rank

    @property
    def ds_zero_partition_world_size(self) -> int:
        """The number of ranks in `ds_process_group`."""
        group = _shard_group(self)
        return dist.get_world_size() if group is None else group.world_size

    @property
    def ds_secondary_tensor(self) -> torch.Tensor | None:
        """A copy of this rank's part in the secondary shards of its node (hpZ), 1-D, as the last gather left it; None
        without them, and before the first gather."""
        place = _place(self)
        secondary = None if place is None else place[0].route.secondary
        if place is None or secondary is None or secondary.part is None:
            return None
        unit, index = place
        entry = unit.layout.entries[index]
        begin, end = entry.offset - secondary.start, entry.offset + entry.numel - secondary.start
        return secondary.part[max(begin, 0) : max(end, 0)].clone()

    @property
    def nvme_swapper(self) -> None:
        """None: the store that keeps the part belongs to the engine."""
        return

    def all_gather(self, param_list: Iterable[nn.Parameter] | None = None, **_options: Any) -> None:
        """Have this parameter (or those of ``param_list``) gathered until `partition`. Collective."""
        for parameter in [self] if param_list is None else list(param_list):
            if isinstance(parameter, ZeroParameter) and _facts(parameter).held is None:
                _facts(parameter).held = gathered_anywhere(parameter)
                _facts(parameter).held.__enter__()
                note_gather([parameter], 1)

    def all_gather_coalesced(self, params: Iterable[nn.Parameter], **_options: Any) -> None:
        """`all_gather` of ``params``. Collective."""
        self.all_gather(params)

    def partition(self, param_list: Iterable[nn.Parameter] | None = None, **_options: Any) -> None:
        """Let go what `all_gather` brought. Collective."""
        for parameter in [self] if param_list is None else list(param_list):
            if isinstance(parameter, ZeroParameter) and _facts(parameter).held is not None:
                held, _facts(parameter).held = _facts(parameter).held, None
                held.__exit__(None, None, None)
                note_gather([parameter], -1)

    def partition_numel(self) -> int:
        """Elements of a rank's part, the last one's padding included."""
        return math.ceil(self.ds_numel / self.ds_zero_partition_world_size)

    def aligned_size(self) -> int:
        """Elements of all parts together."""
        return self.partition_numel() * self.ds_zero_partition_world_size

    def padding_size(self) -> int:
        """Elements of padding."""
        return self.aligned_size() - self.ds_numel

    def ds_summary(self, **_options: Any) -> dict[str, Any]:
        """The facts about this parameter as a dict."""
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
        """A plain parameter with the full values. Collective where they are not here."""
        if id(self) not in memo:
            with nullcontext() if _is_whole(self) else gathered_anywhere(self):
                memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            data = self.data
        return nn.Parameter(data, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def adopt(parameters: Iterable[nn.Parameter], group: Group | None = None) -> None:
    """Give plain parameters the names of `ZeroParameter`; others are left as they are. ``group``: the ranks that hold
    their shards until an engine owns them."""
    for parameter in parameters:
        if present_class(parameter) is nn.Parameter:
            change_class(parameter, ZeroParameter)
            setattr(parameter, _FACTS, _Facts(group))


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Take the names away again."""
    for parameter in parameters:
        if present_class(parameter) is ZeroParameter:
            change_class(parameter, nn.Parameter)
            delattr(parameter, _FACTS)


def note_gather(parameters: Iterable[object], change: int) -> None:
    """A gather of ``parameters`` begins (1) or ends (-1)."""
    for parameter in parameters:
        if isinstance(parameter, ZeroParameter):
            _facts(parameter).gathers += change


def note_external(parameter: nn.Parameter) -> None:
    """A module that does not own the parameter registered it."""
    if isinstance(parameter, ZeroParameter):
        _facts(parameter).external = True


def _facts(parameter: nn.Parameter) -> _Facts:
    facts: _Facts = getattr(parameter, _FACTS)
    return facts


def _is_whole(parameter: nn.Parameter) -> bool:
    place, record = _place(parameter), sharded_record(parameter)
    if place is not None:
        return not place[0].releasable or place[0].state is UnitState.GATHERED
    return record is None or record.is_full


def _shard_group(parameter: nn.Parameter) -> Group | None:
    """The ranks that hold the parameter's shards, or would if it were not replicated; None: nobody said."""
    owner: Partition | None = owner_of(parameter)
    return _facts(parameter).group if owner is None else owner.groups.gather


def _place(parameter: nn.Parameter) -> tuple[Unit, int] | None:
    """The unit that holds the parameter, and its number there."""
    owner: Partition | None = owner_of(parameter)
    return None if owner is None else owner.find(parameter)
