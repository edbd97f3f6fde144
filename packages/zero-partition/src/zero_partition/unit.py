"""One unit at run time: its flat buffer, this rank's shard, and whether the parameters are present."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch
from torch import nn

from zero_comm import Tag, Work

from .flat_memory import FlatMemory
from .host_facts import install, storage_address
from .layout import UnitLayout
from .live import LiveElements
from .masters import TierMasters, follow
from .placeholder import Placeholders
from .released import mark_present
from .residency import Readers, Residency
from .route import Route
from .tier import StateTier
from .unit_edits import UnitEdits
from .units import UnitPlan


class UnitState(enum.Enum):
    """Where a unit's parameters are.

    RELEASED (or GATHERED) -> GATHERING by `issue_gather`; GATHERING -> GATHERED by `wait_gather`; GATHERED -> RELEASED
    by `release`. Units that are never released stay GATHERED.
    """

    RELEASED = enum.auto()
    GATHERING = enum.auto()
    GATHERED = enum.auto()


class Unit:
    """The parameters of one `UnitPlan` as views of one flat buffer in their compute dtype.

    [Note: the flat buffer keeps its storage object] Gather and release only resize the storage of `flat`, so views
    that autograd saved in forward are valid again after the gather in backward. Parameters are these views while
    gathered and placeholders otherwise.

    Attributes:
        index: position in the model's list of units; the same on every rank.
        flat: 1-D, ``layout.numel`` elements; its storage is empty while released.
        memory: who holds the flat buffer.
        lent: an output that the user may keep shares the flat buffer's storage.
        route: how the ranks' shards come together.
        master: the weights that the optimizer updates: all of the flat buffer's elements at stage 0, else this rank's
            shard. None for frozen units, and where ``states`` keeps them.
        states: the tier that keeps this unit's masters and moments and updates its shard.
        edits: what user code did to the parameters.
        readers: who reads shard, master and states beside training.
        pins: how many gathers of the user's keep the parameters through passes.
        hidden: between `hide` and `show`.
        keeps_masters: this rank has masters that are more than the weights.
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
        self.master: torch.Tensor | None = None
        self.route = route
        self._residency = residency
        self._device = device
        self._live = LiveElements() if live is None else live
        if releasable:
            self._live.made(layout.numel)
        self.lent = False
        self._work: Work | None = None
        self._is_exact = True
        self.hidden = False
        self.pins = 0
        self.keeps_masters = False
        self.edits = UnitEdits(self.names, self.parameters, plan.dtype)

    def materialise(self, source: torch.Tensor, update_dtype: torch.dtype, *, full_master: bool) -> None:
        """Take the full values in ``source`` (1-D, ``layout.numel`` elements) and keep what this rank holds of them.

        ``update_dtype``: dtype of the weights that the optimizer updates. ``full_master``: keep all of them (stage 0).
        """
        start, end = self.layout.shard_range(self.route.rank)
        self._make_views(source if source.dtype == self.plan.dtype else source.to(self.plan.dtype))
        shard = self.flat[start:end]
        if self.releasable:
            shard = shard.clone()
        self._residency.put(self.name, shard)
        if self._tier_masters is not None:
            self._tier_masters.hand_over(source, self.plan.dtype)
        elif self.plan.trainable:
            if update_dtype == self.plan.dtype:
                self.master = self.flat if full_master else shard
            else:
                self.master = (source if full_master else source[start:end]).to(update_dtype, copy=True)
        self.keeps_masters = self.master is not None and self.master.dtype != self.plan.dtype
        if self._tier_masters is not None:
            self.keeps_masters = self._tier_masters.kept()
        self._install_views()
        if self.releasable:
            self._placeholders = Placeholders(
                list(zip(self.names, self.parameters, strict=True)), self.plan.dtype, self._device
            )
            self.release()

    def issue_gather(self, step: int, *, exact: bool = False) -> None:
        """Start bringing the parameters, or refreshing them where they are present already.

        ``exact``: bring the weights themselves also where passes compute with what a codec leaves of them, as for a
        unit that is pinned. Every rank of the group issues gathers in the same order.
        """
        exact = exact or self.pinned
        self.wait_gather()
        if self.state is UnitState.GATHERED and self.releasable:
            self.edits.leaving(self.views, exact=self._is_exact)
        if self.state is UnitState.RELEASED:
            self._placeholders.verify()
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        tag = Tag("gather", self.name, step)
        if self.route.is_near(exact=exact):
            self._work = self.route.all_gather_near(self.flat, tag)
        else:
            self._work = self.route.all_gather(self.flat, self._own_slice(), tag, exact=exact)
        self._is_exact = exact or not self.route.rounds
        self._live.issued(self.layout.numel, was_released=self.state is UnitState.RELEASED)
        self.state = UnitState.GATHERING

    def wait_gather(self) -> None:
        """Finish the gather: the parameters are full."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.route.arrived(self.flat)
            self._install_views()
            self._live.arrived(self.layout.numel)
            self.state = UnitState.GATHERED
            self.edits.arrived(self.views)

    def drop_gather(self, *, keep_edits: bool) -> None:
        """Give up a gather that will not arrive, and release a unit that is not pinned; what code wrote into gathered
        parameters since is dropped, unless ``keep_edits``."""
        work, self._work = self._work, None
        if work is not None:
            self._live.arrived(self.layout.numel)
            self.state = UnitState.GATHERED if not self.releasable else self.state
        del work  # the transport lets go of the memory before it is freed
        if not self.releasable or (self.pinned and self.state is UnitState.GATHERED):
            return
        if not keep_edits:
            self.edits.forget()
        if self.state is UnitState.GATHERED and keep_edits:
            self.release()
            return
        self.edits.gone()
        self._placeholders.install()
        self._gone()

    def release(self) -> None:
        """Make the parameters absent; finishes a gather in flight first. Does nothing when they are absent already.

        The memory is left to those who hold a view of it, if any; see [Note: views that code keeps].
        """
        if not self.releasable or self.state is UnitState.RELEASED:
            return
        self.wait_gather()
        self.edits.leaving(self.views, exact=self._is_exact)
        self.edits.gone()
        self._placeholders.install()
        self._gone()

    def hand_over(self) -> None:
        """Like `release`, but leaves the memory to whoever holds a view of it: the user, after a gather of their own or
        when a module's output shares it, and autograd, whose saved views keep their values."""
        self.lent = self.state is not UnitState.RELEASED
        self.release()

    def _gone(self) -> None:
        """Give the flat buffer's memory back, or leave it to those who hold it."""
        if self.lent or self.memory.is_held:
            with torch.inference_mode(False):
                self._make_views(torch.empty_like(self.flat))
        self.lent = False
        self.flat.untyped_storage().resize_(0)
        if self.state is not UnitState.RELEASED:
            self._live.released(self.layout.numel)
        self.state = UnitState.RELEASED

    @property
    def pinned(self) -> bool:
        """Return whether the parameters stay gathered through passes."""
        return self.pins > 0

    def pin(self) -> None:
        """Keep the gathered parameters through passes until `unpin`; pins count."""
        self.pins += 1

    def unpin(self) -> None:
        """Take one pin away; the last one releases the unit, whose values the user may still hold."""
        self.pins -= 1
        if not self.pinned:
            self.hand_over()

    def hide(self) -> None:
        """Have gathered parameters that are never released read NaN, until `show`: their memory is about to go."""
        self.hidden = True
        for parameter in self.parameters:
            parameter.data = torch.full((), torch.nan, dtype=self.plan.dtype, device=self._device).expand(
                parameter.shape
            )

    def show(self) -> None:
        """The parameters are views of the flat buffer again."""
        self.hidden = False
        self._install_views()

    def publish(self, step: int) -> Work | None:
        """After the optimizer's update: write the weights back to where forward reads them.

        Returns the all-gather in flight where the parameters stay gathered and are sharded for the optimizer.
        """
        if self._tier_masters is not None:
            self._tier_masters.published()
        if self.plan.trainable:
            self.route.weights_changed()
        if self.master is not None and self.master.numel() == self.layout.numel:
            if self.master is not self.flat:
                self.flat.copy_(self.master)
            return None
        if self.master is not None:
            shard = self._residency.acquire(self.name)
            if not self.master.is_set_to(shard):
                shard.copy_(self.master)
            self._residency.release(self.name, dirty=True)
        if self.releasable or not self.plan.trainable:
            return None
        return self.route.all_gather(self.flat, self._own_slice(), Tag("publish", self.name, step), exact=True)

    def write_back(self) -> None:
        """Take the gathered parameters' present values into the shard and the master (after the user changed them).

        Elements of the master that round to the present value stay: they know more digits.
        """
        self.readers.wait()
        self.route.weights_changed()
        start, end = self.layout.shard_range(self.route.rank)
        shard = self._residency.acquire(self.name)
        if not shard.is_set_to(self.flat[start:end]):
            shard.copy_(self.flat[start:end])
        own_master = self.master is not None and not any(map(self.master.is_set_to, (shard, self.flat)))
        self._residency.release(self.name, dirty=True)
        self._note_weights_changed()
        if self.master is not None and own_master:
            follow(self.master, self.flat if self.master.numel() == self.flat.numel() else self.flat[start:end])

    @property
    def mastered(self) -> torch.Tensor | None:
        """The gathered weights of which this rank has the master, 1-D, where both are in host memory for good and apart
        from each other; None elsewhere."""
        if self.releasable or self.states is not None or self.master is None or not self.keeps_masters:
            return None
        start, end = self.layout.shard_range(self.route.rank)
        is_view = self._residency.acquire(self.name).data_ptr() == self.flat[start:end].data_ptr()
        self._residency.release(self.name, dirty=False)
        if not is_view or self.flat.device.type != "cpu":
            return None
        return self.flat if self.master.numel() == self.flat.numel() else self.flat[start:end]

    def follow(self, weights: torch.Tensor) -> None:
        """Have the master follow ``weights``, a copy of `mastered`, as a write of the user's. On any thread, while
        `readers` wait for it."""
        if self.master is not None:
            follow(self.master.data, weights)  # with a version counter of its own: readers of the master look at that

    def take_over(self, values: Mapping[int, torch.Tensor | None]) -> None:
        """Have full ``values`` (by parameter number; None for those that its view holds) as the weights, here and in
        shard and master, and the views back. Every rank calls it with the same values at the same point."""
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
        """Have parameters that user code gave other storage be what this unit makes them, with the unit's values."""
        if self.state is UnitState.RELEASED:
            self._placeholders.install()
        elif self.state is UnitState.GATHERED:
            self._install_views()

    def look_at_placeholders(self) -> None:
        """Keep what released parameters were given, and have the placeholders back."""
        if not self._placeholders.installed():
            self.edits.note_replaced(self._placeholders.views)
            self._placeholders.install()

    def look_at_gathered(self) -> None:
        """Keep what was written into gathered parameters, which stay gathered."""
        self.edits.leaving(self.views, exact=self._is_exact)

    def settle_masters(self) -> None:
        """Have masters on a tier follow weights that were changed since the last step, which it would do itself."""
        if self._tier_masters is None or not self._tier_masters.stale:
            return
        self.readers.wait()
        self._tier_masters.settle(self._residency.acquire(self.name))
        self._residency.release(self.name, dirty=False)

    def _note_weights_changed(self) -> None:
        if self._tier_masters is not None:
            self._tier_masters.weights_changed()

    def _take_into_shard(self, values: Mapping[int, torch.Tensor]) -> None:
        self.readers.wait()
        self.route.weights_changed()
        shard = self._residency.acquire(self.name)
        for fragment in self.layout.fragments(self.route.rank):
            number = self.names.index(fragment.entry.name)
            if number in values:
                end = fragment.param_offset + fragment.length
                new = values[number].flatten()[fragment.param_offset : end]
                place = slice(fragment.shard_offset, fragment.shard_offset + fragment.length)
                apart = self.master is not None and not self.master.is_set_to(shard)
                shard[place].copy_(new)
                if self.master is not None and apart:
                    follow(self.master[place], shard[place])
        self._residency.release(self.name, dirty=True)
        self._note_weights_changed()

    def load_shard(self) -> torch.Tensor:
        """This rank's shard, lent to be written; `shard_loaded` gives it back. On every rank at the same point."""
        self.readers.wait()
        self.edits.forget_sums()
        self.route.weights_changed()
        return self._residency.acquire(self.name)

    def shard_loaded(self) -> None:
        """Give back what `load_shard` lent: it holds the new weights."""
        self._residency.release(self.name, dirty=True)

    def placeholder_tensors(self) -> list[torch.Tensor]:
        """The tensors that released parameters stand on."""
        return self._placeholders.tensors() if self.releasable else []

    def placeholder_views(self) -> list[torch.Tensor]:
        """Return what each parameter is while it is released; none where it never is."""
        return self._placeholders.views if self.releasable else []

    def holds_storage(self, address: int) -> bool:
        """Return whether a storage (by `host_facts.storage_address`) is the gathered flat buffer's."""
        if self.state is UnitState.RELEASED:
            return False
        return (self.flat.untyped_storage().data_ptr() or storage_address(self.flat)) == address

    def _own_slice(self) -> torch.Tensor:
        """This rank's slice of the flat buffer, holding its shard."""
        start, end = self.layout.shard_range(self.route.rank)
        mine = self.flat[start:end]
        shard = self._residency.acquire(self.name)
        if not shard.is_set_to(mine):
            mine.copy_(shard)  # what the store lent is given back while the gather runs
        self._residency.release(self.name, dirty=False)
        return mine

    def _make_views(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.views = [flat[e.offset : e.end].view(e.shape) for e in self.layout.entries]
        self.memory = FlatMemory(flat, self.views)

    def _install_views(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            install(self.parameters, self.views)
            mark_present(self.parameters)
