"""Shard a model over ranks and gather it again; this file puts the parts of the package together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from zero_comm import EngineGroups, Tag

from .added_parameters import AddedParameters
from .arriving_weights import WeightArrivals
from .data_watch import unwatch_data, watch_data
from .errors import PartitionError
from .external import external_parameters
from .flat_memory import leave_memory
from .gradients import UnitGradients
from .hints import refuse_wrapped
from .host_facts import storage_address
from .layout import Layout, UnitLayout
from .leaves import LeafTree
from .live import LiveElements
from .model_buffers import share_buffers
from .moving import set_data
from .ownership import GradientAccess, detach_record, disown, find_owner, own
from .placeholder_buffers import refuse_buffers_in, refuse_placeholder_buffers
from .planning import PartitionOptions, agree_on_model, kept_fp32, plan_sharding, unit_layout, update_dtype
from .residency import DeviceResidency, Readers, Residency
from .route import Route, Secondary
from .runtime import Runtime
from .scripted import takes_hooks
from .sharded_parameter import sharded_record
from .shared_storage import refuse_shared_storage, warn_of_aliases
from .tier import MakeStates, ShardNeeds
from .unit import Unit
from .units import UnitPlan, check_trainable_shards, replicated_parameters
from .wrappers import refuse_wrappers


class UpdatesWeights(Protocol):
    """An optimizer that updates the weights of a `Partition`."""

    def synchronise(self) -> bool:
        """Make weights equal on all ranks after steps that each rank took alone; return whether there were such steps.
        Called before anything but training reads or writes the weights. Collective."""


class Partition:
    """A model sharded over the ranks of ``groups``, unit by unit; made by `partition`. Constructing it is collective.

    Refers weakly to ``model``, whose parameters it changes in place, but its units hold their member modules. A pass is
    one forward or backward pass of the model. ``options``: how to shard. ``device``: where modules compute.
    ``trainable``: ids of the parameters to train, None for all that require gradients. ``residency``: the store that
    keeps the shards. ``make_states``: makes `states`, None for none.

    Attributes:
        layout: maps parameters to units, and elements to ranks.
        units: the units at run time, in module order.
        runtime: runs the forward and backward passes.
        added: knows the parameters that came into the model later.
        replicated: parameter name -> why it is replicated on every rank.
        states: the tier that keeps masters, moments and gradients; None if they are on the device.
        readers: background readers of shards, masters and states.
        arrivals: the published weights that are still arriving.
        rank, world_size: among the ranks that shard one replica of the model.
        data_rank, data_world_size: among the ranks of all replicas.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: EngineGroups,
        options: PartitionOptions,
        *,
        device: torch.device,
        trainable: set[int] | None,
        residency: Residency,
        make_states: MakeStates | None,
    ) -> None:
        self.options = options
        self.groups = groups
        self.device = device
        self.residency = residency
        self.readers = Readers()
        self._live = LiveElements()
        self.arrivals = WeightArrivals(device)
        self._optimizer: weakref.ref[UpdatesWeights] | None = None
        self._user: weakref.ref[object] | None = None
        self.rank = groups.gather.rank
        self.world_size = groups.gather.world_size
        self.data_rank = groups.control.rank
        self.data_world_size = groups.control.world_size
        refuse_wrapped(model)
        _refuse_owned(model)
        self.replicated = replicated_parameters(model)
        check_trainable_shards(model)
        refuse_shared_storage(model)
        kept = kept_fp32(model, options.policy)
        plans = plan_sharding(model, options, trainable, kept)
        self.layout = Layout(tuple(unit_layout(plan, self.world_size, options) for plan in plans))
        agree_on_model(model, plans, groups.control)
        if self.data_rank == 0:
            warn_of_aliases(model)
        share_buffers(model, groups, device, policy=options.policy, kept_fp32=kept, replicated=self.replicated)
        self.states = make_states(self._shard_needs(plans), residency) if make_states is not None else None
        self.units = [
            self._make_unit(index, plan, layout)
            for index, (plan, layout) in enumerate(zip(plans, self.layout.units, strict=True))
        ]
        self.runtime = Runtime(
            model,
            self.units,
            [self._make_gradients(unit) for unit in self.units if unit.plan.trainable],
            groups,
            residency,
            self._live,
            self.arrivals,
            device=device,
            prefetch_numel=options.prefetch_numel,
            max_live_numel=options.max_live_numel,
            bucket_numel=options.bucket_numel,
            complete=options.virtual_ranks > 0,
        )
        for unit in self.units:
            for parameter in unit.parameters:
                own(parameter, self)
                watch_data(parameter)
        self.runtime.edits.watch_for_swaps()
        self.added = AddedParameters(model)
        self.runtime.on_close(self.added.close)
        self._model = weakref.ref(model)
        self.runtime.on_close(refuse_wrappers(self))
        self.runtime.passes.before_evaluation(self.refuse_placeholder_buffers)
        self._names = {id(module): name for name, module in model.named_modules()}
        self._by_parameter = {id(p): (unit, i) for unit in self.units for i, p in enumerate(unit.parameters)}
        for module in model.modules():
            for parameter in external_parameters(module):
                self.add_use(module, parameter)
        in_scripts = {id(p) for module in model.modules() if not takes_hooks(module) for p in module.parameters()}
        for unit in self.units if options.stage > 0 and self.world_size > 1 else ():
            if unit.plan.trainable and not unit.releasable and in_scripts.isdisjoint(map(id, unit.parameters)):
                unit.allow_late_waits()

    def refuse_placeholder_buffers(self) -> None:
        """Raise `ReleasedParameterError` if user code has set a buffer of the model to the ``.data`` of a released
        parameter, as the buffer would read NaN. Do nothing once the model is gone."""
        if (model := self._model()) is not None:
            refuse_placeholder_buffers(model, self.units)

    def refuse_buffers_in(self, units: Iterable[Unit]) -> None:
        """Raise `PartitionError` if a buffer of the model lies in the memory of ``units``, which are gathered and about
        to be released; do nothing once the model is gone."""
        if (model := self._model()) is not None:
            refuse_buffers_in(model, units)

    def find(self, parameter: nn.Parameter) -> tuple[Unit, int] | None:
        """Return the unit that holds ``parameter`` and the parameter's index in that unit; None if no unit holds it."""
        return self._by_parameter.get(id(parameter))

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """Return the first name that ``parameter`` has in the model now; None if it has none, or the model is gone."""
        named = model.named_parameters() if (model := self._model()) is not None else ()
        return next((name for name, one in named if one is parameter), None)

    @property
    def optimizer(self) -> UpdatesWeights | None:
        """The optimizer that updates this partition; None if there is none, or it is gone."""
        return None if self._optimizer is None else self._optimizer()

    @property
    def user(self) -> object:
        """The object that trains with this partition (an engine), set by `set_user`; None if none is set or it
        is gone."""
        return None if self._user is None else self._user()

    def set_optimizer(self, optimizer: UpdatesWeights) -> None:
        """Make ``optimizer`` the one that updates this partition, in place of an earlier one; the reference is weak."""
        self._optimizer = weakref.ref(optimizer)

    def set_user(self, user: object) -> None:
        """Make ``user`` the object that trains with this partition; the reference is weak."""
        self._user = weakref.ref(user)

    def trains(self, module: nn.Module) -> bool:
        """Return whether ``module`` is the model or its `user`, or has a parameter of the model."""
        if module is self._model() or module is self.user:  # whose parameters a wrapper may have taken away
            return True
        return any(self.find(parameter) is not None for parameter in module.parameters())

    def owned_ranks(self) -> range:
        """Return the ranks whose shards this rank's optimizer updates: all at stage 0, else only this one."""
        return range(self.world_size) if self.options.stage == 0 else range(self.rank, self.rank + 1)

    def add_use(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Gather ``parameter`` whenever ``module`` runs from now on; do nothing if either was not in the model when it
        was sharded."""
        found = self.find(parameter)
        name = self._names.get(id(module))
        if found is not None and name is not None:
            self.runtime.add_use(name, module, found[0])

    def gradient_accessed(self, parameter: nn.Parameter, access: GradientAccess, /) -> None:
        """Record that user code is about to access ``parameter.grad``, or refuse the access.

        ``access``: "read"; "cancelled" (set to None), which discards the gradient; or "written", for which nothing is
        done outside the optimizer's step hooks. Raises `PartitionError` for a read of a gradient that the engine holds,
        and in step hooks for any access if the optimizer's own tensor has the gradient.
        """
        if self.runtime.step_hook_watch.is_on:
            self.runtime.step_hook_watch.gradient_used(parameter)
        elif access != "written":
            self.runtime.gradient_watch.accessed(parameter, cancels=access == "cancelled")

    def lend_data(self, parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
        """Return an alias of ``data`` for user code that reads ``parameter.data``. Writes through the alias are found
        until the parameter, one of this partition, is released."""
        unit, number = self._by_parameter[id(parameter)]
        return unit.edits.lend(number, data)

    def values_used(self, parameter: nn.Parameter, call: str, *, writes: bool) -> None:
        """Gather ``parameter``, of which ``call`` (a torch function's name) is about to use the values, if it is
        released.

        ``writes``: the call writes them. Raises `PartitionError` for a use in the optimizer's step hooks that would
        read old weights or be lost, and `ReleasedParameterError` where the parameter cannot be gathered.
        """
        if self.runtime.step_hook_watch.is_on:
            self.runtime.step_hook_watch.values_used(parameter, call, writes=writes)
        self.runtime.released_use.used(parameter, call, writes=writes)

    def gathers_for_copies(self, parameter: nn.Parameter) -> bool:
        """Return whether code that copies ``parameter`` now has to open `unsharded` first, on every rank: it belongs to
        a unit, no pass gathers units now, and the user does not keep the unit gathered."""
        found = self.find(parameter)
        return found is not None and not self.runtime.gathers.active and not found[0].pinned

    @contextmanager
    def unsharded(self, parameter: nn.Parameter) -> Iterator[None]:
        """Gather ``parameter``, one of this partition, for reading inside the block; wait first for updates that still
        run, and publish them. Only outside passes. Collective: every rank enters at the same point, or `DesyncError` is
        raised."""
        unit, _ = self._by_parameter[id(parameter)]
        self.runtime.agree("gathered", str(unit.index), None)
        self.finish_updates()
        unit.issue_gather(self.runtime.step, exact=True)
        unit.wait_gather()
        try:
            yield
        finally:
            unit.release()

    def publish(self) -> None:
        """Write the weights that the optimizer updated back to where forward reads them, in all units, and count the
        step in ``runtime.edits``.

        All-gathers are issued in the order of the units. Their first use waits for the weights, where nobody can read
        them in another way ([Note: weights that arrive] in arriving_weights.py); the others are waited for here.
        Collective.
        """
        step = self.runtime.step
        works = [work for unit in self.units if (work := unit.publish(step)) is not None]
        for work in works:
            work.wait()
        self.runtime.edits.published()

    def finish_updates(self) -> None:
        """Wait for updates that still run and publish their weights, so that all ranks have the weights of the last
        step.

        Such updates are those that a tier runs during passes, and those of an optimizer whose ranks took steps alone.
        Waits for `readers` too. Collective.
        """
        self.readers.wait()
        self.arrivals.wait()
        with self.runtime.writing("a step beside training"):
            finished = self.states is not None and self.states.finish()
            if finished or (self.optimizer is not None and self.optimizer.synchronise()):
                self.publish()

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of model state that this rank holds in memory now, by kind, without optimizer states.

        The kinds are "gathered parameters", "parameter shards", "secondary shards", "masters", "gradients" and
        "placeholders". Memory that two of them share counts for the first one only.
        """
        seen: set[int] = set()

        def nbytes(tensor: torch.Tensor | None) -> int:
            """Return the bytes of a tensor's storage, 0 for None and for a storage that was counted."""
            if tensor is None or (address := storage_address(tensor)) in seen:
                return 0
            seen.add(address)
            return tensor.untyped_storage().nbytes()

        gathered = sum(nbytes(u.flat) for u in self.units)
        if isinstance(self.residency, DeviceResidency):
            shards = sum(nbytes(self.residency.acquire(unit.name)) for unit in self.units)
        else:
            shards = self.residency.resident_bytes
        secondary = sum(nbytes(u.route.secondary_shard) for u in self.units)
        masters = sum(nbytes(u.master) for u in self.units)
        gradients = sum(nbytes(t) for g in self.runtime.gradients.values() for t in g.tensors())
        placeholders = sum(nbytes(t) for u in self.units for p in u.placeholders for t in p.tensors())
        placeholders += sum(nbytes(t) for t in self.arrivals.blanks())
        return {
            "gathered parameters": gathered,
            "parameter shards": shards,
            "secondary shards": secondary,
            "masters": masters,
            "gradients": gradients,
            "placeholders": placeholders,
        }

    def close(self, *, unshard: bool = True) -> None:
        """Finish updates, gather all parameters for good, remove every hook, and close the tiers. Gathered parameters
        keep their memory. Collective.

        ``unshard``: False leaves released parameters as placeholders, for models that do not fit into memory unsharded.
        After an earlier failure (`Runtime.failed`) nothing is finished or gathered, and nothing is collective.
        """
        if not self.runtime.failed:
            self.runtime.agree("close", "", None)
            self.finish_updates()
            self.runtime.held_gradients.hide()
            for unit in self.units:
                if unit.releasable and unshard:
                    unit.issue_gather(self.runtime.step, exact=True)
                    unit.wait_gather()
        self.arrivals.abandon()  # after a failure; else there are none
        self.runtime.close()
        self.readers.wait()
        if self.states is not None:
            self.states.close()
        self.residency.close()
        for unit in self.units:
            unit.drop_kept()
            leave_memory(unit.flat)
            for parameter in unit.parameters:
                disown(parameter)
                unwatch_data(parameter)

    def _make_unit(self, index: int, plan: UnitPlan, layout: UnitLayout) -> Unit:
        """Return the unit planned by ``plan``, with rank 0's values or those that `Init` has sharded; ``index``: its
        position among the units. Frees the memory that its parameters had, and detaches them from `Init`. Collective.
        """
        releasable = self._may_release(plan)
        unit = Unit(
            index,
            plan,
            layout,
            self._route(plan, layout, releasable=releasable),
            self.residency,
            device=self.device,
            releasable=releasable,
            states=self.states,
            readers=self.readers,
            live=self._live,
            arrivals=self.arrivals,
        )
        dtype = update_dtype(plan, self.options.policy)
        source = torch.zeros(layout.numel, dtype=dtype, device=self.device)
        equal = True
        for entry, parameter in zip(layout.entries, unit.parameters, strict=True):
            record = sharded_record(parameter)
            values = parameter.data if record is None else record.read()
            source[entry.offset : entry.end].view(entry.shape).copy_(values)
            set_data(parameter, torch.empty(0, dtype=plan.dtype, device=self.device), entry.name)
            equal = equal and record is not None and not record.is_full
            if record is not None:
                detach_record(parameter)
        if not equal:
            self.groups.broadcast(source, 0, Tag("broadcast", plan.name))
        unit.init_from_full(source, dtype, full_master=self.options.stage == 0)
        return unit

    def _may_release(self, plan: UnitPlan) -> bool:
        """Return whether the planned unit may be released between its uses: at stage 3, unless it is persistent or this
        rank's device store keeps all of it anyway (world size 1)."""
        elsewhere = self.world_size > 1 or not isinstance(self.residency, DeviceResidency)
        return self.options.stage >= 3 and not plan.persistent and elsewhere

    def _route(self, plan: UnitPlan, layout: UnitLayout, *, releasable: bool) -> Route:
        """Return the `Route` by which a planned unit is gathered. ``releasable``: the unit may be released; only then
        the route quantizes, and has secondary shards where there is a group for them."""
        group, near = self.groups.gather, self.groups.secondary
        if not releasable:
            return Route(group)
        codec = self.options.weight_codec if plan.trainable else self.options.frozen_codec
        return Route(group, codec=codec, secondary=None if near is None else Secondary(near, layout))

    def _shard_needs(self, plans: list[UnitPlan]) -> list[ShardNeeds]:
        """Return descriptions of this rank's shards of the trained units, for the tier that will keep their states."""
        return [
            ShardNeeds(layout, plan, self.rank, self._accumulate_dtype(plan), not self._may_release(plan))
            for plan, layout in zip(plans, self.layout.units, strict=True)
            if plan.trainable
        ]

    def _accumulate_dtype(self, plan: UnitPlan) -> torch.dtype:
        """Return the dtype in which the gradients of the unit of ``plan`` are accumulated: the policy's, or the unit's
        own if that is wider."""
        return torch.promote_types(plan.dtype, self.options.policy.accumulate_dtype)

    def _make_gradients(self, unit: Unit) -> UnitGradients:
        """Return a new object that collects and reduces the gradients of ``unit``. Gradients travel in the policy's
        dtype, or in the unit's own if that differs from the policy's parameter dtype."""
        options, policy, dtype = self.options, self.options.policy, unit.plan.dtype
        own = dtype == policy.param_dtype
        return UnitGradients(
            unit,
            self.groups.reduce,
            accumulate_dtype=self._accumulate_dtype(unit.plan),
            wire_dtype=policy.wire_dtype if own else dtype,
            keep_flat=options.stage < 2,
            full_group=self.groups.gather if options.stage == 0 else None,
            states=unit.states,
            leaves=self._new_leaf_tree(),
        )

    def _new_leaf_tree(self) -> LeafTree | None:
        """Return a new tree that sums one unit's gradients over micro-batches, for virtual ranks; None without
        those."""
        ranks = self.options.virtual_ranks
        return LeafTree(ranks // self.data_world_size, ranks) if ranks else None


def owner_of(parameter: object) -> Partition | None:
    """Return the partition that ``parameter`` belongs to; None if it belongs to none, once that is gone, and for any
    other object."""
    owner = find_owner(parameter)
    return owner if isinstance(owner, Partition) else None


def partition(
    model: nn.Module,
    groups: EngineGroups,
    options: PartitionOptions,
    *,
    device: torch.device | None = None,
    trainable: Iterator[nn.Parameter] | list[nn.Parameter] | None = None,
    residency: Residency | None = None,
    make_states: MakeStates | None = None,
) -> Partition:
    """Shard ``model`` in place over ``groups`` and install the hooks that gather its parameters when modules compute.

    ``options``: the stage, dtypes and sizes. ``device``: where modules compute (default: the CPU). ``trainable``: the
    parameters that an optimizer will update (default: all that require gradients). ``residency``: keeps the shards
    (default: on the device). ``make_states``: makes the tier for masters, moments and gradients at stages 1 to 3
    (default: they are on the device). Parameters keep their identity. Every rank ends up with rank 0's values.
    Collective. Raises `PartitionError` by name if ranks have different models or a parameter cannot be sharded.
    """
    chosen = None if trainable is None else {id(p) for p in trainable}
    where = device if device is not None else torch.device("cpu")
    return Partition(
        model,
        groups,
        options,
        device=where,
        trainable=chosen,
        residency=residency if residency is not None else DeviceResidency(),
        make_states=make_states,
    )


def _refuse_owned(model: nn.Module) -> None:
    """Raise `PartitionError`, naming the parameter, if a parameter of ``model`` belongs to a partition already."""
    for name, parameter in model.named_parameters():
        if owner_of(parameter) is not None:
            raise PartitionError(f"parameter '{name}' belongs to an engine already; call that engine's destroy() first")
