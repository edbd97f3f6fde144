"""One unit at run time: its flat buffer, this rank's shard, and whether the parameters are present."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from zero_comm import Tag, Work

from .arriving_weights import WeightArrival, WeightArrivals, can_wait_at_use
from .flat_memory import FlatMemory
from .host_facts import install, storage_address
from .layout import UnitLayout
from .live import LiveElements, UnitState
from .masters import TierMasters, copy_fragments, follow_weights
from .placeholder import Placeholders
from .released import mark_present
from .residency import Readers, Residency
from .route import Route
from .tier import StateTier
from .unit_edits import UnitEdits
from .units import UnitPlan


class Unit:
    """The parameters of one `UnitPlan` as views of one flat buffer in their compute dtype.

    [Note: the flat buffer keeps its storage object] Gather and release only resize the storage of `flat`, so views that
    autograd saved in forward are valid again after the gather in backward. Parameters are these views while gathered
    and placeholders otherwise.

    ``releasable``: the unit may be released; else it is always gathered. ``residency``: the store of this rank's shard,
    by the unit's name. ``device``: where modules compute. ``live``: counts gathered elements of all units.
    ``arrivals``: the published weights that are waited for at their first use. In all methods a parameter's number is
    its position in ``plan.parameters``.

    Attributes:
        index: position in the model's list of units; the same on every rank.
        arrival: waits for published weights at their first use.
        memory: tracks views of the flat buffer that code outside the unit holds.
        lent: the flat buffer's storage is shared with something that may outlive the gather (a module's output, a
            user's gather); `release` then leaves that storage alone and makes a new flat buffer.
        route: how the unit is gathered: over all ranks, through a codec, or from the secondary shards of the node.
        states: the tier that keeps this unit's masters and moments and updates its shard.
        edits: finds and keeps changes that user code made to the parameters.
        readers: background readers of shard, master and states (a checkpoint that is being written).
        pins: number of user gathers that keep the parameters gathered across passes.
        kept: the unit is released, but its flat buffer keeps its memory and the values of the last gather, for
            `restore_kept`.
        hidden: the parameters read NaN, because `hide` was called and `show` was not yet.
        keeps_masters: this rank's masters have a higher precision than the weights.
    """

    def __init__(
        self,
        index: int,
        plan: UnitPlan,
        layout: UnitLayout,
        route: Route,
        residency: Residency,
        *,
        device: torch.device,
        releasable: bool,
        states: StateTier | None = None,
        readers: Readers | None = None,
        live: LiveElements | None = None,
        arrivals: WeightArrivals | None = None,
    ) -> None:
        self.index = index
        self.readers = Readers() if readers is None else readers
        self.states = states if plan.trainable else None
        self._tier_masters: TierMasters | None = None
        if self.states is not None:
            self._tier_masters = TierMasters(plan.name, layout, route.rank, self.states)
        self.plan = plan
        self.layout = layout
        self.name = plan.name
        self.releasable = releasable
        self.state = UnitState.GATHERED
        self.parameters: list[nn.Parameter] = list(plan.parameters.values())
        self.names: list[str] = list(plan.parameters)
        self._master: torch.Tensor | None = None
        self.route = route
        self._residency = residency
        self._device = device
        self._live = LiveElements() if live is None else live
        if releasable:
            self._live.note_new_unit(layout.numel)
        self.lent = False
        self.kept = False
        self._work: Work | None = None
        self._is_exact = True
        self.hidden = False
        self.pins = 0
        self.keeps_masters = False
        self.edits = UnitEdits(self.names, self.parameters, plan.dtype)
        self._arrivals = WeightArrivals(device) if arrivals is None else arrivals
        self._late_waits = False
        self.arrival = WeightArrival(self.parameters, self._arrivals)

    @property
    def flat(self) -> torch.Tensor:
        """The flat buffer (1-D, ``layout.numel`` elements), once published weights have arrived; its storage is empty
        while released."""
        if self.arrival.is_open:
            self.arrival.wait()
        return self._flat

    @property
    def master(self) -> torch.Tensor | None:
        """The weights that the optimizer updates: all of the flat buffer's elements at stage 0, else this rank's shard.
        None for frozen units, and where ``states`` keeps them. Waits as `flat` does, as it may lie there."""
        if self.arrival.is_open:
            self.arrival.wait()
        return self._master

    @property
    def views(self) -> list[torch.Tensor]:
        """Each parameter's view of `flat`, by its number, once published weights have arrived."""
        if self.arrival.is_open:
            self.arrival.wait()
        return self._views

    def init_from_full(self, full: torch.Tensor, master_dtype: torch.dtype, *, full_master: bool) -> None:
        """Initialise the unit from its full values: store this rank's shard, make its master, make the parameters views
        of the flat buffer, and release the unit if it is releasable.

        ``full``: 1-D, ``layout.numel`` elements; its memory may become the flat buffer. ``master_dtype``: of masters
        that no tier keeps. ``full_master``: the master is unsharded (stage 0).
        """
        start, end = self.layout.shard_range(self.route.rank)
        self._make_views(full if full.dtype == self.plan.dtype else full.to(self.plan.dtype))
        shard = self.flat[start:end]
        if self.releasable:
            shard = shard.clone()
        self._residency.put(self.name, shard)
        if self._tier_masters is not None:
            self._tier_masters.store_masters(full, self.plan.dtype)
        elif self.plan.trainable:
            if master_dtype == self.plan.dtype:
                self._master = self.flat if full_master else shard
            else:
                self._master = (full if full_master else full[start:end]).to(master_dtype, copy=True)
        self.keeps_masters = self.master is not None and self.master.dtype != self.plan.dtype
        if self._tier_masters is not None:
            self.keeps_masters = self._tier_masters.has_masters()
        self._install_views()
        if self.releasable:
            self._placeholders = Placeholders(
                list(zip(self.names, self.parameters, strict=True)), self.plan.dtype, self._device
            )
            self.release()

    def issue_gather(self, step: int, *, exact: bool = False) -> None:
        """Start the gather of the parameters, which `wait_gather` ends. A gather in flight is finished first. A unit
        that is gathered already is gathered again, and what user code wrote into it is kept as edits.

        ``exact``: gather without the codec that passes may use; always so for a pinned unit. ``step``: number for the
        collective's tag. Collective: every rank issues gathers in the same order. Raises `ReleasedParameterError` if
        user code wrote a released parameter and that shows on the host (see `Placeholders.verify`).
        """
        exact = exact or self.pinned
        self.wait_gather()
        if self.state is UnitState.GATHERED and self.releasable:
            self.edits.collect_written(self.views, exact=self._is_exact)
        if self.state is UnitState.RELEASED:
            self._placeholders.verify(None if exact else self.edits.versions)
            self.drop_kept()
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        tag = Tag("gather", self.name, step)
        if self.route.can_use_secondary(exact=exact):
            self._work = self.route.all_gather_secondary(self.flat, tag)
        else:
            self._work = self.route.all_gather(self.flat, self._own_slice(), tag, exact=exact)
        self._is_exact = exact or not self.route.rounds
        self._live.note_issued(self.layout.numel, was_released=self.state is UnitState.RELEASED)
        self.state = UnitState.GATHERING

    def wait_gather(self) -> None:
        """Wait for the gather in flight, keep the secondary shard (`Route.arrived`), make the parameters views of the
        flat buffer, and apply pending edits of user code to them; do nothing if no gather is in flight."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.route.arrived(self.flat)
            self._install_views()
            self._live.note_arrived(self.layout.numel)
            self.state = UnitState.GATHERED
            self.edits.apply_pending(self.views)

    def drop_gather(self, *, keep_edits: bool) -> None:
        """Abandon a gather in flight, which will never complete, and release the unit; a unit that is never released,
        or is pinned and gathered, is not released. ``keep_edits``: keep changes that user code made to gathered
        parameters; else drop them."""
        work, self._work = self._work, None
        if work is not None:
            self._live.note_arrived(self.layout.numel)
            self.state = UnitState.GATHERED if not self.releasable else self.state
        del work  # the transport lets go of the memory before it is freed
        if not self.releasable or (self.pinned and self.state is UnitState.GATHERED):
            return
        if not keep_edits:
            self.edits.mark_clean()
        if self.state is UnitState.GATHERED and keep_edits:
            self.release()
            return
        self.edits.forget_lent()
        self._placeholders.install()
        self._free_flat()

    def release(self, *, keep: bool = False) -> None:
        """Free the flat buffer and make the parameters placeholders, even if the unit is pinned. Do nothing for a unit
        that is never released.

        A gather in flight is finished first, and what user code wrote is kept as edits. Memory of which code still
        holds a view is left to that view; see [Note: views that code keeps] in flat_memory.py. ``keep``: keep the flat
        buffer for `restore_kept`, unless code holds its memory or has changed the parameters.
        """
        if not self.releasable:
            return
        if self.state is UnitState.RELEASED:
            if not keep:
                self.drop_kept()
            return
        self.wait_gather()
        self.edits.collect_written(self.views, exact=self._is_exact)
        self.edits.forget_lent()
        self._placeholders.install()
        if keep and not (self.lent or self.memory.is_held or self.edits.pending or self.edits.refused):
            self.kept = True
            self.state = UnitState.RELEASED
        else:
            self._free_flat()

    def restore_kept(self) -> None:
        """Make the parameters views of the flat buffer that `release` has kept, so that the unit is gathered. Does not
        communicate. Raises `ReleasedParameterError` if user code wrote a placeholder and that shows on the host."""
        self._placeholders.verify(self.edits.versions)
        self.kept = False
        self._install_views()
        self.state = UnitState.GATHERED
        self.edits.apply_pending(self.views)

    def forget_copies(self) -> None:
        """Drop the weights that earlier gathers have left besides the shards (secondary shards, a kept flat buffer), as
        the weights have changed. For a releasable unit every rank calls it at the same point."""
        self.route.weights_changed()
        self.drop_kept()

    def drop_kept(self) -> None:
        """Free the flat buffer if `release` has kept it; `restore_kept` is not possible afterwards."""
        if self.kept:
            self._free_flat()

    def release_keeping_views(self) -> None:
        """Release the unit as `release` does, but leave the present storage, with its values, to the views that the
        user or autograd holds; the unit gets a new flat buffer."""
        self.lent = self.state is not UnitState.RELEASED
        self.release()

    def _free_flat(self) -> None:
        """Mark the unit as released and empty the flat buffer's storage; if other code holds that storage, leave it to
        that code and make a new, empty flat buffer."""
        if self.lent or self.memory.is_held:
            with torch.inference_mode(False):
                self._make_views(torch.empty_like(self.flat))
        self.lent = False
        self.flat.untyped_storage().resize_(0)
        if self.kept or self.state is not UnitState.RELEASED:
            self._live.note_released(self.layout.numel)
        self.kept = False
        self.state = UnitState.RELEASED

    @property
    def pinned(self) -> bool:
        """True if user gathers keep the parameters gathered across passes."""
        return self.pins > 0

    def pin(self) -> None:
        """Count one more user gather that keeps the parameters gathered across passes, until `unpin`."""
        self.pins += 1

    def unpin(self) -> None:
        """Count one user gather less; after the last one release the unit, if it is releasable. Views that the user
        holds keep their values."""
        self.pins -= 1
        if not self.pinned:
            self.release_keeping_views()

    def hide(self) -> None:
        """Make the parameters read NaN until `show`, as the caller is about to free the flat buffer's memory. Only for
        a unit that is never released."""
        self.arrival.wait()
        self.hidden = True
        for parameter in self.parameters:
            parameter.data = torch.full((), torch.nan, dtype=self.plan.dtype, device=self._device).expand(
                parameter.shape
            )

    def show(self) -> None:
        """Make the parameters views of the flat buffer again, after `hide`; the caller has restored its memory."""
        self.hidden = False
        self._install_views()

    def publish(self, step: int) -> Work | None:
        """Write the weights that the optimizer updated back to where forward reads them, and mark secondary shards as
        out of date; ``step``: number for the tag. Collective.

        Return the all-gather in flight, which the caller waits for, if parameters stay gathered but have sharded
        masters; None if the first use of the parameters waits for it ([Note: weights that arrive] in
        arriving_weights.py), or there is none. Does nothing for frozen units; weights that a tier has updated are in
        the shard already.
        """
        self.arrival.wait()
        if self.plan.trainable:
            self.forget_copies()
        if self.master is not None and self.master.numel() == self.layout.numel:
            if self.master is not self.flat:
                self.flat.copy_(self.master)
            return None
        if self.master is not None:
            shard = self.acquire_shard()
            if not self.master.is_set_to(shard):
                shard.copy_(self.master)
            self._residency.release(self.name, dirty=True)
        if self.releasable or not self.plan.trainable:
            return None
        waits_at_use = self._may_wait_at_use()  # looked at before the all-gather holds the memory too
        work = self.route.all_gather(self.flat, self._own_slice(), Tag("publish", self.name, step), exact=True)
        if not waits_at_use:
            return work
        self.arrival.begin(work, self._views)
        return None

    def _may_wait_at_use(self) -> bool:
        """Return whether the wait for published weights can be left to the first use of the parameters: nobody reads
        them in another way."""
        return (
            self._late_waits
            and self._arrivals.may_defer
            and not self.hidden
            and self.memory.is_private(self.edits.count_lent(self._views))
            and self.edits.are_in_place(self._views)
            and can_wait_at_use(self.parameters)
        )

    def allow_late_waits(self) -> None:
        """Leave waits for published weights to the parameters' first use from now on, where that is possible; for a
        unit of which other ranks hold shards."""
        self.arrival.prepare()
        self.memory.note_residents([*self.parameters, self.acquire_shard()])
        self._residency.release(self.name, dirty=False)
        self._late_waits = True

    def write_back(self) -> None:
        """Copy the gathered parameters' present values into the shard and the master, after user code changed them.
        Elements of the master that round to the present value stay, as they have more digits. Waits for `readers`;
        drops what `forget_copies` drops. Does not communicate."""
        self.readers.wait()
        self.forget_copies()
        start, end = self.layout.shard_range(self.route.rank)
        shard = self.acquire_shard()
        if not shard.is_set_to(self.flat[start:end]):
            shard.copy_(self.flat[start:end])
        own_master = self.master is not None and not any(map(self.master.is_set_to, (shard, self.flat)))
        self._residency.release(self.name, dirty=True)
        self._note_weights_changed()
        if self.master is not None and own_master:
            follow_weights(self.master, self.flat if self.master.numel() == self.flat.numel() else self.flat[start:end])

    @property
    def weights_with_master(self) -> torch.Tensor | None:
        """The weights (1-D) that correspond to this rank's `master`: all of them, or those of its shard.

        A view of the flat buffer, so it follows later steps. None unless the weights are always gathered, in host
        memory, and apart from their master.
        """
        if self.releasable or self.states is not None or self.master is None or not self.keeps_masters:
            return None
        start, end = self.layout.shard_range(self.route.rank)
        is_view = self.acquire_shard().data_ptr() == self.flat[start:end].data_ptr()
        self._residency.release(self.name, dirty=False)
        if not is_view or self.flat.device.type != "cpu":
            return None
        return self.flat if self.master.numel() == self.flat.numel() else self.flat[start:end]

    def update_master(self, weights: torch.Tensor) -> None:
        """Update the master from ``weights``, a copy of `weights_with_master`, in the elements that do not round to
        them; do nothing without a master. May run on any thread that `readers` waits for."""
        if self.master is not None:
            follow_weights(self.master.data, weights)  # .data: leaves the version counter alone, which readers compare

    def adopt_values(self, values: Mapping[int, torch.Tensor | None]) -> None:
        """Make ``values`` the weights in the flat buffer (unless released), the shard and the master, and restore the
        views, or placeholders. Waits for `readers`.

        ``values``: full values by parameter number; None if the parameter's view already holds them. Every rank calls
        it with the same values at the same point.
        """
        with torch.no_grad():
            for number, given in values.items():
                if given is not None and self.state is not UnitState.RELEASED:
                    self.views[number].copy_(given)
            if self.releasable:
                self._take_into_shard({n: v if v is not None else self.views[n] for n, v in values.items()})
            else:
                self.write_back()
        self.restore_views()

    def restore_views(self) -> None:
        """Undo replacements of the parameters' storage by user code: make them placeholders again if the unit is
        released, views of the flat buffer if it is gathered."""
        if self.state is UnitState.RELEASED:
            self._placeholders.install()
        elif self.state is UnitState.GATHERED:
            self._install_views()

    def collect_placeholder_edits(self) -> None:
        """Keep as edits the tensors that user code put in place of placeholders, and reinstall the placeholders; for a
        released unit. Do nothing if all are in place. Writes into a placeholder are left for `issue_gather` to find."""
        if not self._placeholders.installed():
            self.edits.note_replaced(self._placeholders.views)
            self._placeholders.install()

    def collect_gathered_edits(self) -> None:
        """Keep as edits what user code wrote into the parameters of this gathered unit: pending, or refused where a
        codec rounded the elements that were not written. Do nothing if nothing was written. The parameters stay
        gathered. Does not communicate."""
        self.edits.collect_written(self.views, exact=self._is_exact)

    def settle_masters(self) -> None:
        """Update this rank's masters on a tier now, from the shard, if weights were changed and no step has updated the
        masters since; else do nothing. Does not communicate."""
        if self._tier_masters is None or not self._tier_masters.stale:
            return
        self.readers.wait()
        self._tier_masters.follow_now(self.acquire_shard())
        self._residency.release(self.name, dirty=False)

    def _note_weights_changed(self) -> None:
        """Tell the tier, if one keeps the masters, that something other than its step has changed the weights."""
        if self._tier_masters is not None:
            self._tier_masters.note_weights_changed()

    def _take_into_shard(self, values: Mapping[int, torch.Tensor]) -> None:
        """Copy this rank's fragments of ``values``, full values by parameter number, into the shard and the master.
        Waits for `readers`; secondary shards, and masters on a tier, count as out of date then."""
        self.readers.wait()
        self.forget_copies()
        shard = self.acquire_shard()
        copy_fragments(self.layout.fragments(self.route.rank), self.names, values, shard, self.master)
        self._residency.release(self.name, dirty=True)
        self._note_weights_changed()

    def acquire_shard(self) -> torch.Tensor:
        """Return this rank's shard (1-D) on the compute device, valid until the residency's `release`; first wait for
        an update that still writes it."""
        self.arrival.wait()
        if self.states is not None:
            self.states.await_update(self.name)
        return self._residency.acquire(self.name)

    def borrow_shard(self) -> torch.Tensor:
        """Return this rank's shard (1-D) for the caller to write, valid until `give_back_shard`. Waits for `readers`;
        drops checksums and secondary shards of the old values. Every rank calls it at the same point."""
        self.readers.wait()
        self.edits.forget_checksums()
        self.forget_copies()
        return self.acquire_shard()

    def give_back_shard(self) -> None:
        """End `borrow_shard`, as the shard holds new weights; its store writes them to its tier."""
        self._residency.release(self.name, dirty=True)

    @property
    def placeholders(self) -> list[Placeholders]:
        """The `Placeholders` of the released parameters, in a list of one; empty if the unit is never released."""
        return [self._placeholders] if self.releasable else []

    def holds_storage(self, address: int) -> bool:
        """Return whether ``address`` (from `host_facts.storage_address`) is that of the flat buffer's storage; False
        while the unit is released."""
        if self.state is UnitState.RELEASED:
            return False
        return (self._flat.untyped_storage().data_ptr() or storage_address(self._flat)) == address

    def _own_slice(self) -> torch.Tensor:
        """Return this rank's slice of the flat buffer, after copying its shard there unless the shard is that memory.
        Waits until the store has the shard on the device."""
        start, end = self.layout.shard_range(self.route.rank)
        mine = self.flat[start:end]
        shard = self.acquire_shard()
        if not shard.is_set_to(mine):
            mine.copy_(shard)  # what the store lent is given back while the gather runs
        self._residency.release(self.name, dirty=False)
        return mine

    def _make_views(self, flat: torch.Tensor) -> None:
        """Make ``flat`` the flat buffer and slice it into one view per parameter; the parameters themselves do not
        change."""
        self._flat = flat
        self._views = [flat[e.offset : e.end].view(e.shape) for e in self.layout.entries]
        self.memory = FlatMemory(flat, self._views)

    def _install_views(self) -> None:
        """Make every parameter its view of the flat buffer, with the class that it has while gathered."""
        with torch._C.DisableTorchFunctionSubclass():
            install(self.parameters, self.views)
            mark_present(self.parameters)
