"""Build models that never fit in one piece: `Init` shards parameters while the model is being constructed.

The record of a parameter is its `ShardedParameter`. A touched parameter is a sharded one that code has used, so that it
was gathered. Ranks meet to agree on what happens to which records; a rank may request a gather of its own
(init_meetings.py).
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zero_comm import Control, Group, Message, Tag

from .errors import PartitionError, name_first
from .init_meetings import END, EVICT, GATHER, SHARD, USE, InitMeetings
from .sharded_parameter import (
    NewShard,
    ShardedParameter,
    in_memory,
    next_number,
    number_from,
    sharded_record,
    shared_with_others,
)
from .units import reason_replicated

logger = logging.getLogger("zero_partition")

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_Facts = tuple[str, str, bool]
_METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim")]
    + [getattr(torch.Tensor, name).__get__ for name in ("grad", "grad_fn", "layout", "is_meta")]
    + [getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__")]
)


class Init:
    """Context in which models are built with every parameter sharded over the ranks of ``group``.

    A submodule is sharded when it is attached to its parent; parameters that are still full at the end are sharded
    then. Code that touches the data of a sharded parameter (init functions, ``module.apply``) gets it full. At most
    ``max_full_numel`` elements of touched parameters stay full at a time; the oldest are resharded with their present
    values. Every rank makes the same modules and draws the same values as one process with the same seed would.
    Generator states are compared on entry, and a parameter's values, by digest, whenever it is sharded. Where ranks
    differ (they drew with another generator, or only one of them drew), rank 0's values are used, and a warning names
    the first parameter. A parameter stays full while other code holds a tensor or an array in its memory. ``control``:
    carries the messages among these ranks. When a module is attached, a parameter used, and at the end, `DesyncError`
    is raised where ranks build different models, `PartitionError` where a parameter has other shapes.

    A model on the meta device may be given memory inside (``model.to_empty(device=…)``): each parameter gets its memory
    only when code writes its values, and is sharded from those. ``new_shard``: makes the memory in which shards live
    until the model is partitioned (default: in memory, on the parameter's device; without it, nothing is sharded on a
    single rank).
    """

    def __init__(
        self,
        group: Group,
        control: Control,
        *,
        max_full_numel: int = 1 << 26,
        new_shard: NewShard | None = None,
    ) -> None:
        self._group = group
        self._control = control
        self._max_full_numel = max_full_numel
        self._shards = group.world_size > 1 or new_shard is not None
        self._new_shard: NewShard = new_shard if new_shard is not None else in_memory
        self._open = False
        self._handles: list[RemovableHandle] = []
        self._built: dict[int, weakref.ref[nn.Module]] = {}
        self._touched: dict[int, ShardedParameter] = {}  # by number, as the next ones
        self._kept: dict[int, ShardedParameter] = {}
        self._alone: dict[int, ShardedParameter] = {}
        self._meetings = InitMeetings(control, self._take_part)
        self._differed: dict[int, str] = {}
        self._blanks: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._mode = _TouchMode(self._make_full, self._new_blank, self._allocate_blank)

    def __enter__(self) -> Init:
        """Begin to shard what is built, by hooks of torch on registrations and a torch function mode; return this
        object.

        With several ranks their random generators are compared first, and rank 0's state is used where they differ.
        Collective. On a single rank without ``new_shard`` it does nothing.
        """
        if self._shards:
            self._agree_on_generators()
            self._handles = [
                register_module_module_registration_hook(self._attached),
                register_module_parameter_registration_hook(self._registered),
            ]
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shard parameters that are still full, log which parameters differed between ranks or stay full, and stop
        sharding. Collective.

        After an exception (``error``) nothing more is sharded, and nothing is collective.
        """
        if not self._shards:
            return
        self._open = False
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        if error is None:
            for reference in self._built.values():
                module = reference()
                if module is not None:
                    own = {f"{n} of {type(module).__name__}": p for n, p in module._parameters.items() if p is not None}
                    self._shard_all(own)
            self._shard_records(list((self._touched | self._kept).values()))
            self._meet_all(END, [])
            self._warn_differed()
            self._warn_kept()
        for known in (self._built, self._touched, self._kept, self._alone):
            known.clear()

    def shard(self, module: nn.Module) -> None:
        """Shard the parameters of a module that was built outside `Init`, with their present values, whether the
        context is open or not. Collective. Does nothing on a single rank without ``new_shard``."""
        if self._shards:
            self._shard_all(dict(module.named_parameters()))

    def meet(self, records: list[ShardedParameter]) -> None:
        """Wait until all ranks have come here for ``records``: to gather them for the user, or to end that. Gathers
        nothing itself, but serves requests of single ranks meanwhile. Does nothing once the context is closed.

        Raises `DesyncError` on every rank if they have come for different things. Collective.
        """
        if self._open:
            self._meet_all(GATHER, records)

    def _attached(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Shard the parameters of ``child``, which is being attached to ``parent`` as ``name``: torch's hook on
        registering a module. Collective."""
        if child is not None:
            owner = type(parent).__name__
            self._shard_all({f"{name}.{inner} of {owner}": p for inner, p in child.named_parameters()})

    def _registered(self, module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        """Remember ``module``, which registers a parameter, so that its own parameters are sharded at the end: torch's
        hook on registering a parameter."""
        seen = self._built.get(id(module))
        if seen is None or seen() is not module:  # ids come again, in another order on each rank
            self._built.pop(id(module), None)
            self._built[id(module)] = weakref.ref(module)

    def _shard_all(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Shard ``parameters`` (by a name for messages), and reshard those of them that were sharded and are full now.
        Collective.

        Those that stay replicated (one element or none, on the meta device, or see `reason_replicated`) are left as
        they are.
        """
        records = []
        with torch._C.DisableTorchFunction():
            for name, parameter in parameters.items():
                record = sharded_record(parameter)
                shardable = parameter.numel() > 1 and not parameter.is_meta
                if record is None and shardable and reason_replicated(parameter) is None:
                    record = ShardedParameter(parameter, self._group, self._new_shard, self)
                if record is not None:
                    record.set_name(name)
                    records.append(record)
        self._shard_records(records)

    def _shard_records(self, records: Sequence[ShardedParameter]) -> None:
        """Reshard those of ``records`` that are full, with rank 0's values where ranks differ, and then the parameters
        that requests of single ranks have gathered. Collective."""
        while full := [record for record in self._full_unpinned(records) if record.number not in self._alone]:
            facts = [_facts(full)] if self._is_only_rank else self._meetings.meet(SHARD, full, _facts(full))
            if facts is not None:
                self._reshard(full, facts)
                self._reshard_used_alone()
                return

    def _reshard(self, full: list[ShardedParameter], facts: list[list[_Facts]]) -> None:
        """Reshard the parameters of ``full``, with rank 0's values where ranks differ. Collective.

        ``facts``: by rank, those of `_facts` for each parameter. A parameter stays full if other code holds a view of
        it on any rank, through which it may be written. Such parameters, and those that differ, are remembered for the
        warnings of `__exit__`. Raises `PartitionError`, which names the parameter, if the shapes or dtypes of one
        differ.
        """
        for record, *seen in zip(full, *facts, strict=True):
            kinds, digests, held = map(list, zip(*seen, strict=True))
            if len(set(kinds)) > 1:
                raise PartitionError(f"parameter '{record.name}' has other shapes on other ranks: {', '.join(kinds)}")
            for known in (self._touched, self._kept, self._alone, self._differed):
                known.pop(record.number, None)
            if len(set(digests)) > 1:
                self._differed[record.number] = record.name
                record.broadcast_from(0)
            if any(held):
                self._kept[record.number] = record
            else:
                record.reshard()

    def _full_unpinned(self, records: Sequence[ShardedParameter]) -> list[ShardedParameter]:
        """Return those of ``records`` whose parameters are full and not gathered by the user, each once, in order of
        creation, which is the same on all ranks."""
        full = {record.number: record for record in records if record.is_full and not record.pinned}
        return [full[number] for number in sorted(full)]

    def _make_full(self, records: list[ShardedParameter]) -> None:
        """Gather the parameters of ``records`` that are not full, and reshard the oldest touched ones while more than
        ``max_full_numel`` of their elements are full. Blocks until all ranks join, each at its next meeting; sends
        nothing where all ``records`` are full and the bound is kept."""
        while True:
            if absent := [record for record in records if not record.is_full]:
                if self._is_only_rank or self._meetings.meet(USE, absent) is not None:
                    self._gather(absent)
            elif oldest := self._full_unpinned(self._oldest_above_bound(records)):
                facts = [_facts(oldest)] if self._is_only_rank else self._meetings.meet(EVICT, oldest, _facts(oldest))
                if facts is not None:
                    self._reshard(oldest, facts)
            else:
                self._touched.update((record.number, record) for record in records)
                return

    def _oldest_above_bound(self, records: list[ShardedParameter]) -> list[ShardedParameter]:
        """Return the touched parameters, oldest first and none of ``records``, that have to be resharded so that at
        most ``max_full_numel`` elements stay full."""
        held = sum(record.numel for record in self._touched.values())
        oldest: list[ShardedParameter] = []
        for record in self._touched.values():
            if held <= self._max_full_numel or record in records:
                break
            oldest.append(record)
            held -= record.numel
        return oldest

    def _gather(self, records: list[ShardedParameter]) -> None:
        """Gather ``records``, which become the newest touched ones. Collective."""
        for record in records:
            record.gather()
            self._touched[record.number] = record

    def _take_part(self, call: str, records: list[ShardedParameter]) -> None:
        """Carry out the request ``call`` (`USE` or `EVICT`) of some rank for ``records``; see [Note: what one rank does
        alone] in init_meetings.py. Collective."""
        if call == USE:
            self._gather(records)
            self._alone.update((record.number, record) for record in records)
        else:
            self._reshard(records, self._meetings.exchange(EVICT, _facts(records)))

    def _meet_all(self, call: str, records: list[ShardedParameter]) -> None:
        """Wait until all ranks have come for ``call`` on ``records``, serving requests meanwhile; then reshard what
        requests have gathered. Does nothing on a single rank. Collective."""
        if not self._is_only_rank:
            while self._meetings.meet(call, records) is None:
                pass
            self._reshard_used_alone()

    def _reshard_used_alone(self) -> None:
        """Reshard the parameters that a request of a single rank has gathered, with rank 0's values. Collective: all
        ranks call it at the same point."""
        alone = self._full_unpinned(list(self._alone.values()))
        if alone:
            self._reshard(alone, self._meetings.exchange(SHARD, _facts(alone)))

    @property
    def _is_only_rank(self) -> bool:
        """Return whether the group has one rank only."""
        return self._group.world_size == 1

    def _warn_differed(self) -> None:
        """Warn on rank 0 of the parameters whose values differed between ranks, and forget them."""
        if self._differed and self._group.rank == 0:
            logger.warning(
                "Init: initialised differently on the ranks: %s; all ranks have rank 0's values",
                name_first(self._differed[min(self._differed)], len(self._differed)),
            )
        self._differed.clear()

    def _warn_kept(self) -> None:
        """Warn on rank 0 of the parameters that stay full because other code holds their memory."""
        if self._kept and self._group.rank == 0:
            logger.warning(
                "Init: full on every rank until initialize: %s; other code holds a tensor or an array in that memory "
                "(what `.data`, `.detach()`, `.numpy()` or an index gave)",
                name_first(next(iter(self._kept.values())).name, len(self._kept)),
            )

    def _new_blank(self, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the tensor that ``to_empty`` gets for ``parameter``, which is on the meta device: of its shape,
        ``dtype`` and ``device``, over a single NaN. Such a parameter is a blank until `_allocate_blank`."""
        key = (dtype, device)
        if key not in self._blanks:
            self._blanks[key] = torch.full((), torch.nan, dtype=dtype, device=device)
        return self._blanks[key].expand(parameter.shape)

    def _allocate_blank(self, parameter: nn.Parameter) -> None:
        """Give ``parameter``, if it is a blank of `_new_blank`, memory of its own, before its values are written, and a
        record (`ShardedParameter`) if it has several elements; do nothing for any other."""
        blank = self._blanks.get((parameter.dtype, parameter.device))
        if blank is not None and parameter.untyped_storage().data_ptr() == blank.untyped_storage().data_ptr():
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            if parameter.numel() > 1:
                ShardedParameter(parameter, self._group, self._new_shard, self)

    def _agree_on_generators(self) -> None:
        """Set every rank's default CPU random generator to rank 0's state if they differ, with a warning. Collective.

        Also has the records (`ShardedParameter`) made from now on numbered alike on every rank.
        """
        state = torch.get_rng_state()
        digest = hashlib.sha256(bytes(state.numpy())).hexdigest()
        told = self._control.agree(Message("init", "generator state", 0, [digest, next_number()]))
        number_from(max(number for _, number in told))
        if len({digest for digest, _ in told}) > 1:
            if self._group.rank == 0:
                logger.warning("Init: the ranks' random generators differ; all continue with rank 0's state")
            self._group.broadcast(state, 0, Tag("broadcast", "generator state")).wait()
            torch.set_rng_state(state)


def _facts(records: list[ShardedParameter]) -> list[_Facts]:
    """Return, for the full parameters of ``records``, what ranks compare of each: (dtype and shape, digest of the
    values, whether other code holds its memory)."""
    held = shared_with_others(records)
    return [(record.kind, record.digest(), other) for record, other in zip(records, held, strict=True)]


class _TouchMode(TorchFunctionMode):
    """Makes parameters full before torch functions use them, while `Init` is open.

    ``touch``: called, before a function runs, with the records of the sharded parameters among its arguments.
    ``adopt``: called with each parameter among them that is not sharded. ``blank``: makes the tensor for a parameter
    that leaves the meta device. Functions that only read facts such as the shape call none of them.
    """

    def __init__(
        self,
        touch: Callable[[list[ShardedParameter]], None],
        blank: Callable[[nn.Parameter, torch.dtype, torch.device], torch.Tensor],
        adopt: Callable[[nn.Parameter], None],
    ) -> None:
        super().__init__()
        self._touch = touch
        self._blank = blank
        self._adopt = adopt

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run torch function ``func`` with ``args`` and ``kwargs``, after calling ``touch`` or ``adopt`` for the
        parameters among them; ``adopt`` neither for ``p.data = value`` nor for parameters on the meta device.
        ``empty_like`` of one of these for another device returns a ``blank`` instead."""
        keywords = kwargs or {}
        if func in _METADATA:
            return func(*args, **keywords)
        if func is torch.empty_like and _leaves_meta(args, keywords):
            return self._blank(args[0], keywords.get("dtype") or args[0].dtype, torch.device(keywords["device"]))
        parameters = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, nn.Parameter)]
        for parameter in parameters if func != _SET_DATA else ():
            if sharded_record(parameter) is None and not parameter.is_meta:
                self._adopt(parameter)
        records = [r for parameter in parameters if (r := sharded_record(parameter)) is not None]
        if records:
            self._touch(records)
        return func(*args, **keywords)


def _leaves_meta(args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Return whether a call of ``empty_like`` with ``args`` and ``keywords`` gives a parameter on the meta device
    floating-point memory elsewhere, as `nn.Module.to_empty` does."""
    there, like = keywords.get("device"), args[0] if args else None
    if not isinstance(like, nn.Parameter) or not like.is_meta or there is None:
        return False
    return (keywords.get("dtype") or like.dtype).is_floating_point and torch.device(there).type != "meta"
