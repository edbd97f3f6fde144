"""An optimizer for plain PyTorch, with masters and states on the host or in files, and gradients there too if asked
for.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, cast

import torch
from torch import nn

from ._copy_streams import compute_device
from ._params import (
    GradientHooks,
    Member,
    ParameterWeights,
    check_gradient,
    check_parameter,
    flat_gradient,
    shard_plans,
)
from ._protocols import PathUse
from ._saved_states import flat_state, shaped_state
from .budget import HostBudget
from .errors import OffloadError
from .sealed import Sealed
from .trace import Trace
from .update import DelayedUpdate, OffloadedUpdate, TierOptions
from .update._gradients import norm_squared
from .update._rules import find_rule
from .update._slices import MASTER
from .update.plans import wide_dtype

__all__ = ["OffloadedOptimizer"]

ModelOrParams = nn.Module | Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]

_TIER_OPTIONS = frozenset(TierOptions.__dataclass_fields__)


class OffloadedOptimizer(torch.optim.Optimizer):
    """Adam, AdamW, SGD, Adagrad or Lion with masters and states on the host or on NVMe, for one device.

    ``model_or_params``: a module, or what a torch optimizer takes. ``optimizer``: a name or a torch class. ``options``
    are the optimizer's own (``lr``, ``betas``, …; not ``amsgrad``) and those of `TierOptions` (``tier``, ``path``,
    ``sub_group_size``, ``buffer_count``, ``ratio``, ``state_dtype``, ``verify``, …). Parameters are float32, bfloat16,
    float16 or (on the CPU) float64, contiguous, on one device. States are float32 (float64 for float64) unless
    ``state_dtype`` says otherwise; 16-bit parameters have a float32 master. Parameters that do not require gradients at
    construction are never updated.

    ``gradients``: ``"keep"`` leaves them in ``p.grad``; ``"host"`` and ``"nvme"`` move each gradient there as soon as
    backward has finished it, and ``p.grad`` becomes None. Clip with `clip_grad_norm_`, which works either way.
    ``delayed`` runs each step beside the next forward and backward, so that weights arrive one step late (see
    `DelayedUpdate`); it needs ``gradients="host"``. Call `finish` before reading the weights.

    ``budget`` collects the needs and checks them before anything is allocated (BudgetError); by default one with the
    limits of this process. ``trace`` records the transfers.

    A step that fails in the middle (ShardError and its subclasses name tensor, file and offset) leaves some weights
    updated and others not; further steps are refused until `load_state_dict`.
    """

    def __init__(
        self,
        model_or_params: ModelOrParams,
        optimizer: str | type[torch.optim.Optimizer] = "AdamW",
        *,
        gradients: Literal["keep", "host", "nvme"] = "keep",
        delayed: bool = False,
        budget: HostBudget | None = None,
        trace: Trace | None = None,
        **options: Any,
    ) -> None:
        if gradients not in ("keep", "host", "nvme"):
            raise ValueError(f"gradients: expected 'keep', 'host' or 'nvme', got {gradients!r}")
        if delayed and gradients != "host":
            raise ValueError(f"delayed: expected gradients='host' with it, got {gradients!r}")
        tier_options = TierOptions(**{name: value for name, value in options.items() if name in _TIER_OPTIONS})
        self._closed = False
        self._clip = 1.0
        self._sealed_groups = False
        self._rule = find_rule(optimizer)
        params: Any = model_or_params
        if isinstance(model_or_params, nn.Module):
            params = list(model_or_params.named_parameters())
        own = {name: value for name, value in options.items() if name not in _TIER_OPTIONS}
        super().__init__(params, self._rule.defaults(own))
        self._sealed_groups = True
        self._members = self._make_members()
        weights, device = ParameterWeights(self._members), self._one_device()
        shards, groups = shard_plans(self._members), partial(_groups_of, weakref.ref(self))
        self._update: DelayedUpdate | OffloadedUpdate
        if delayed:
            self._update = DelayedUpdate(
                shards, optimizer, groups, weights, tier_options, device=device, budget=budget, trace=trace
            )
        else:
            self._update = OffloadedUpdate(
                shards,
                optimizer,
                groups,
                weights,
                tier_options,
                gradients="caller" if gradients == "keep" else gradients,
                device=device,
                budget=budget,
                trace=trace,
            )
        self._hooks = None if gradients == "keep" else GradientHooks(self._members, self._update.add_gradient)
        self._finalizer = weakref.finalize(self, _release_all, self._update, self._hooks)

    # Construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group while the base class's constructor runs; ValueError afterwards, since memory has been
        allocated in exact sizes.
        """
        if self._sealed_groups:
            raise ValueError(
                "parameter groups cannot be added to an offloaded optimizer; make a new one with all groups"
            )
        super().add_param_group(param_group)

    def _make_members(self) -> list[Member]:
        """Return a `Member` for each parameter that requires gradients, in order, named as in the group or
        ``param_<group>_<position>``; TypeError for a parameter of an unsupported dtype.
        """
        members: list[Member] = []
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"param_{number}_{i}" for i in range(len(group["params"]))]
            for name, param in zip(names, group["params"], strict=True):
                if param.requires_grad:
                    members.append(Member(name, param, number))
                    check_parameter(members[-1])
        return members

    def _one_device(self) -> torch.device:
        """Return the device of all parameters that require gradients; if there are none, the current accelerator, else
        the CPU. ValueError if they are on several devices.
        """
        devices = {member.param.device for member in self._members}
        if len(devices) > 1:
            told = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"expected all parameters on one device, got {told}; make one optimizer per device")
        return devices.pop() if devices else compute_device(None)

    # The step

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, grad_scale: float = 1.0, error_if_nonfinite: bool = False) -> float:
        """Have the next `step` clip all gradients together to the 2-norm ``max_norm``; return their norm before
        clipping.

        Reads every gradient, from files too. ``grad_scale`` multiplies the gradients first; give `step` the same. The
        gradients stay unchanged: the factor, that of ``torch.nn.utils.clip_grad_norm_``, is applied while the step
        reads them. Another call replaces it; `step`, `zero_grad` and `load_state_dict` reset it. With
        ``error_if_nonfinite``, RuntimeError for a norm that is not finite, and the factor stays as it was. TypeError or
        ValueError for gradients that the kernels cannot read; ValueError for one of a parameter that was unfrozen after
        construction; OffloadError after `close`.
        """
        self._check_open()
        self._check_gradients()
        norm = math.sqrt(self._norm_squared()) * abs(grad_scale)
        finite = norm < float("inf")
        if error_if_nonfinite and not finite:
            raise RuntimeError(f"the norm of the gradients is {norm}; skip this step or lower the loss scale")
        self._clip = min(1.0, max_norm / (norm + 1e-6)) if norm == norm else norm
        return norm

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float = 1.0
    ) -> float | None:
        """Update every parameter that has a gradient. ``closure`` is called first, with autograd on; its loss is
        returned, else None. ``grad_scale`` multiplies gradients (1 / loss scale). Gradients stay until `zero_grad`,
        unless ``delayed``; the factor of `clip_grad_norm_` is used up.

        Weights that were changed in place since the last step (loaded, clamped) replace their masters first. TypeError
        or ValueError for gradients that the kernels cannot read; nothing was changed then. OffloadError after a step
        that failed, and after `close`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_open()
        self._check_gradients()
        gradients = self._kept_gradients() if self._hooks is None else None
        updated = [m for m in self._members if m.param.numel() and self._has_gradient(m, gradients)]
        for member in updated:
            if member.version != member.param._version:
                self._update.weights_changed(member.name)
        if gradients is None:
            self._update.step(grad_scale=grad_scale * self._clip)
        else:
            cast(OffloadedUpdate, self._update).step(grad_scale=grad_scale * self._clip, gradients=gradients)
        self._note_written(updated)
        self._clip = 1.0
        return loss

    @torch.no_grad()
    def finish(self) -> None:
        """With ``delayed``, wait for the running step, raising its error, write its weights to the parameters, and
        raise the parameters' version counters. Do nothing if no step is running. OffloadError after `close`.
        """
        self._check_open()
        if isinstance(self._update, DelayedUpdate):
            known = [member for member in self._members if member.version == member.param._version]
            if self._update.finish():
                self._note_written(known)

    def _note_written(self, members: Sequence[Member]) -> None:
        """Record that the weights of these members now equal their masters, and raise the parameters' version counters,
        so that autograd refuses graphs that saved the old weights.
        """
        for member in members:
            torch.autograd.graph.increment_version(member.param)
        for member in members:  # parameters may share one counter
            member.version = member.param._version

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also those moved to the host or to files, and the factor of `clip_grad_norm_`. With
        ``set_to_none`` false, ``p.grad`` is zeroed instead of set to None. Gradients that a running delayed step uses
        stay.
        """
        super().zero_grad(set_to_none)
        self._clip = 1.0
        self._update.clear_gradients()

    def _kept_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients in ``p.grad``, 1-D, by parameter name, without a copy unless they are not contiguous;
        parameters that have none are left out.
        """
        found = {member.name: flat_gradient(member) for member in self._members}
        return {name: grad for name, grad in found.items() if grad is not None}

    def _has_gradient(self, member: Member, kept: dict[str, torch.Tensor] | None) -> bool:
        """Return whether a member has a gradient: one in ``kept``, what `_kept_gradients` returned, or one that the
        update has collected if ``kept`` is None.
        """
        return self._update.has_gradient(member.name) if kept is None else member.name in kept

    def _norm_squared(self) -> float:
        """Return the sum of squares of all gradients; those in files are read, one parameter at a time."""
        if self._hooks is None:
            return norm_squared(list(self._kept_gradients().values()))
        squared = 0.0
        for member in self._members:
            if self._update.has_gradient(member.name):
                with self._update.gradient(member.name) as gradient:
                    squared += norm_squared([gradient])
        return squared

    def _check_gradients(self) -> None:
        """Raise TypeError or ValueError for gradients that the kernels cannot read, and for gradients of parameters
        that did not require one when this optimizer was made.
        """
        known = {id(member.param) for member in self._members}
        for member in self._members:
            check_gradient(member)
        for number, group in enumerate(self.param_groups):
            for position, param in enumerate(group["params"]):
                if id(param) not in known and param.grad is not None:
                    raise ValueError(
                        f"parameter {position} of group {number} has a gradient but did not require one when this "
                        "optimizer was made; make a new one after unfreezing"
                    )

    # State

    def state_dict(self) -> dict[str, Any]:
        """`finish`, then return the state as plain tensors on the host, for torch.save or safetensors; all of it is in
        memory at once.

        torch's optimizer of the same name loads float32 states; 16-bit parameters have a ``master`` in addition.
        """
        self.finish()
        result = super().state_dict()
        by_name = {member.name: member for member in self._members}
        numbers = self._parameter_numbers()
        for name, state in self._update.states():
            if not state["step"]:
                continue
            member = by_name[name]
            if member.param.dtype == wide_dtype(member.param.dtype):
                state.pop(MASTER, None)
            result["state"][numbers[id(member.param)]] = shaped_state(member, state, self._update.kinds(name))
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, from any tier, or of torch's optimizer of the same name; return once it is on
        the tier.

        A missing master is made from the parameter at the next step; an option that is missing in a saved group gets
        the constructor's value. A running delayed step is dropped. ValueError when groups, shapes or dtypes do not fit;
        nothing was changed then. OffloadError after `close`.
        """
        self._check_open()
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        by_param = {id(member.param): member for member in self._members if member.param.numel()}
        states: dict[str, dict[str, Any]] = {}
        for saved_id, param in zip(saved_ids, params, strict=False):
            state = state_dict["state"].get(saved_id)
            if state and id(param) in by_param:
                member = by_param[id(param)]
                states[member.name] = flat_state(member, state, self._update.kinds(member.name))
        groups = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        for group in groups:
            self._rule.check_group(group)
        self._update.check_states(states)
        super().load_state_dict({"state": {}, "param_groups": groups})
        self._update.reset()
        self._update.write(states)
        self._update.flush()
        for member in self._members:
            member.version = None  # the next step compares the masters with the weights that are there then
        self._clip = 1.0

    def _parameter_numbers(self) -> dict[int, int]:
        """Return the number that each parameter has in a state dict, by the parameter's id()."""
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        return {id(param): number for number, param in enumerate(params)}

    def seal(self) -> Sealed | None:
        """`finish`, then make the files of the state permanent, so that a checkpoint can link to them, and return them;
        None if there are no files. See `OffloadedUpdate.seal`.
        """
        self.finish()
        return self._update.seal()

    # Accounts

    @property
    def plan(self) -> dict[str, int]:
        """Return the bytes that are held from construction on: ``states``, ``ring`` (buffers in front of files),
        ``gradients`` and ``staging`` in host memory, ``nvme`` in files, ``device`` on the device.
        """
        return dict(self._update.plan)

    def memory(self) -> dict[str, int]:
        """Return the bytes held now: ``states``, ``ring`` (buffers in front of files), ``gradients`` and ``staging`` in
        host memory, ``nvme`` in files, ``device`` on the device.
        """
        return self._update.memory()

    def bytes_written(self) -> int:
        """Return the bytes written to drives so far, which is what wears them."""
        return self._update.bytes_written()

    def bytes_written_per_day(self) -> float:
        """Return `bytes_written` at the average rate since this optimizer was made, in bytes per day."""
        return self._update.bytes_written_per_day()

    def path_use(self) -> Sequence[PathUse]:
        """Return, for each folder of masters and moments, the bytes written and read so far, its speed and its state;
        empty without files.
        """
        return self._update.path_use()

    def flush(self) -> None:
        """Finish a delayed step and block until all states are on their tier; raise the first write that failed."""
        self.finish()
        self._update.flush()

    def close(self) -> None:
        """Remove the hooks and the files and free the memory; a running delayed step is waited for and its weights are
        dropped. May be called twice.
        """
        if self._closed:
            return
        self._closed = True
        self._finalizer()

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Raise TypeError: an offloaded optimizer cannot be pickled or copied."""
        raise TypeError("an offloaded optimizer cannot be pickled or copied; save its state_dict()")

    def _check_open(self) -> None:
        """Raise OffloadError after `close`."""
        if self._closed:
            raise OffloadError("the optimizer is closed")


def _groups_of(optimizer: weakref.ref[OffloadedOptimizer]) -> list[dict[str, Any]]:
    """Return the present parameter groups of the optimizer that a weak reference refers to; an empty list if it was
    garbage-collected.
    """
    alive = optimizer()
    return [] if alive is None else alive.param_groups


def _release_all(update: DelayedUpdate | OffloadedUpdate, hooks: GradientHooks | None) -> None:
    """Remove the hooks, if any, and close the update."""
    if hooks is not None:
        hooks.close()
    update.close()
