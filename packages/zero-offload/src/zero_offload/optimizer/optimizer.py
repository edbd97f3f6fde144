"""The optimizer as its users see it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from .._extents import NvmePath, folders
from .._lanes import compute_device
from ..budget import HostBudget
from ..errors import OffloadError
from ._couriers import Courier, DirectCourier, StagingCourier, staging_bytes
from ._entries import GRAIN, KERNEL_DTYPES, Entry, cut, needs_master, wide_dtype
from ._gradients import GradientHost, check_gradient, current_gradient, gradient_bytes, total_norm
from ._rules import find_rule
from ._states import check_states, read_states, write_states
from ._tiers import HostTier, NvmeTier, Tier, host_bytes, ring_bytes
from ._update import update

__all__ = ["OffloadedOptimizer"]

ModelOrParams = nn.Module | Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class OffloadedOptimizer(torch.optim.Optimizer):
    """Adam, AdamW, SGD, Adagrad or Lion with masters and states on the host or on NVMe, for one device.

    ``model_or_params``: a module, or what a torch optimizer takes. ``optimizer``: a name or a torch class; ``options``
    are its own (``lr``, ``betas``, …; not ``amsgrad``). Parameters are float32, bfloat16, float16 or (on the CPU)
    float64, contiguous, on one device; states are float32 (float64 for float64), 16-bit parameters have a float32
    master. Parameters that do not require gradients when this is made are never updated.

    ``tier="host"``: one block of host memory of exactly the size of masters and states. ``tier="nvme"``: files under
    ``path`` (one folder, or several to stripe over) behind a ring of ``buffer_count`` buffers, so that reading,
    computing and writing overlap; ``checksums`` are recorded, ``verify`` compares them on every read; ``prefix`` tells
    two optimizers in one folder apart; ``engine`` is a ``zero_nvme_aio.Engine`` to share. ``sub_group_size`` is the
    number of elements updated at a time.

    ``offload_gradients`` takes each gradient to host memory as backward finishes it, so that ``p.grad`` is None; clip
    with `clip_grad_norm_`, which works either way. ``budget`` collects and checks what is needed before anything is
    allocated (BudgetError); by default one made from the limits of this process.

    A step that fails in the middle (ShardError and its kinds name tensor, file and offset) leaves weights of both
    sides of it; further steps are refused until `load_state_dict`.
    """

    def __init__(
        self,
        model_or_params: ModelOrParams,
        optimizer: str | type[torch.optim.Optimizer] = "AdamW",
        *,
        tier: Literal["host", "nvme"] = "host",
        path: NvmePath | None = None,
        sub_group_size: int = 1 << 23,
        buffer_count: int = 4,
        offload_gradients: bool = False,
        checksums: bool = True,
        verify: bool = False,
        prefix: str = "optimizer",
        engine: Any = None,
        budget: HostBudget | None = None,
        **options: Any,
    ) -> None:
        if tier not in ("host", "nvme"):
            raise ValueError(f"tier: expected 'host' or 'nvme', got {tier!r}")
        if (tier == "nvme") != (path is not None):
            raise ValueError(
                f"path: names the folder of tier='nvme' and only of that, got tier={tier!r}, path={path!r}"
            )
        if sub_group_size < GRAIN:
            raise ValueError(f"sub_group_size: expected {GRAIN} elements or more, got {sub_group_size}")
        self._closed = False
        self._failed = False
        self._clip = 1.0
        self._sealed_groups = False
        self._rule = find_rule(optimizer)
        params: Any = model_or_params
        if isinstance(model_or_params, nn.Module):
            params = list(model_or_params.named_parameters())
        super().__init__(params, self._rule.defaults(options))
        self._sealed_groups = True
        self._entries = self._make_entries()
        device = self._one_device()
        self._slices = cut(self._entries, sub_group_size)
        staged = device.type != "cpu"
        budget = HostBudget() if budget is None else budget
        self._declare_needs(budget, path, buffer_count, staged, offload_gradients)
        budget.check()
        self._tier = self._make_tier(path, buffer_count, checksums, verify, prefix, engine, staged)
        self._courier: Courier = StagingCourier(device, self._slices) if staged else DirectCourier()
        self._gradients = GradientHost(device, self._entries) if offload_gradients else None
        self._finalizer = weakref.finalize(self, _let_go, self._tier, self._gradients)

    # Construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is made: its memory is of exactly the size needed. ValueError later."""
        if self._sealed_groups:
            raise ValueError(
                "parameter groups cannot be added to an offloaded optimizer; make a new one with all groups"
            )
        super().add_param_group(param_group)
        self._rule.check_group(self.param_groups[-1])

    def _make_entries(self) -> list[Entry]:
        entries: list[Entry] = []
        seen: set[str] = set()
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"param_{number}_{i}" for i in range(len(group["params"]))]
            moments = self._rule.moments(group)
            for name, param in zip(names, group["params"], strict=True):
                if not param.requires_grad:
                    continue
                if param.dtype not in KERNEL_DTYPES or (param.dtype == torch.float64 and param.device.type != "cpu"):
                    raise TypeError(
                        f"'{name}': expected float32, bfloat16 or float16 (float64 on the CPU), "
                        f"got {param.dtype} on {param.device}"
                    )
                if name in seen:
                    raise ValueError(f"'{name}': two parameters have this name; give each its own")
                seen.add(name)
                kinds = (*(("master",) if needs_master(param) else ()), *moments)
                entries.append(Entry(name, param, number, kinds, wide_dtype(param)))
        return entries

    def _one_device(self) -> torch.device:
        devices = {entry.param.device for entry in self._entries}
        if len(devices) > 1:
            told = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"expected all parameters on one device, got {told}; make one optimizer per device")
        return devices.pop() if devices else compute_device(None)

    def _declare_needs(
        self, budget: HostBudget, path: NvmePath | None, buffer_count: int, staged: bool, offload_gradients: bool
    ) -> None:
        if path is None:
            budget.need("masters and optimizer states", host_bytes(self._entries))
        else:
            budget.need(f"{buffer_count} ring buffers", ring_bytes(self._slices, buffer_count))
            paths = folders(path)
            for folder in paths:
                budget.need(
                    "masters and optimizer states", -(-host_bytes(self._entries) // len(paths)), "disk", path=folder
                )
        if staged:
            budget.need("staging of gradients and weights", staging_bytes(self._slices))
        if offload_gradients:
            budget.need("gradients", gradient_bytes(self._entries))

    def _make_tier(
        self,
        path: NvmePath | None,
        buffer_count: int,
        checksums: bool,
        verify: bool,
        prefix: str,
        engine: Any,
        staged: bool,
    ) -> Tier:
        if path is None:
            return HostTier(self._entries, self._slices, pin=staged)
        return NvmeTier(
            self._entries,
            self._slices,
            paths=folders(path),
            buffer_count=buffer_count,
            checksums=checksums,
            verify=verify,
            prefix=prefix,
            engine=engine,
        )

    # The step

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, grad_scale: float = 1.0, error_if_nonfinite: bool = False) -> float:
        """Have the next `step` clip all gradients together to ``max_norm``; returns their norm before.

        ``grad_scale`` multiplies the gradients first, as in `step`. The gradients are not touched: the factor, that of
        ``torch.nn.utils.clip_grad_norm_``, is applied in the step's one pass. `zero_grad` forgets it.
        """
        self._usable()
        self._collect()
        grads = [grad for grad in map(current_gradient, self._entries) if grad is not None]
        norm = total_norm(grads) * abs(grad_scale)
        finite = norm < float("inf")
        if error_if_nonfinite and not finite:
            raise RuntimeError(f"the norm of the gradients is {norm}; skip this step or lower the loss scale")
        self._clip = min(1.0, max_norm / (norm + 1e-6)) if norm == norm else norm
        return norm

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float = 1.0
    ) -> float | None:
        """Update every parameter that has a gradient; ``grad_scale`` multiplies gradients (1 / loss scale).

        Weights that were changed in place since the last step (loaded, clamped) are taken over into the masters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._usable()
        if self._failed:
            raise OffloadError("an earlier step failed in the middle; load a saved state with load_state_dict first")
        for number, group in enumerate(self.param_groups):
            self._check_group(number, group)
        self._collect()
        self._failed = True
        update(
            self._rule,
            self.param_groups,
            self._slices,
            self._tier,
            self._courier,
            grad_scale=grad_scale * self._clip,
        )
        self._failed = False
        self._clip = 1.0
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, those on the host included, and the factor of `clip_grad_norm_`."""
        super().zero_grad(set_to_none)
        self._clip = 1.0
        if self._gradients is not None:
            self._gradients.clear()

    def _check_group(self, number: int, group: dict[str, Any]) -> None:
        self._rule.check_group(group)
        moments = self._rule.moments(group)
        for entry in self._entries:
            kept = tuple(kind for kind in entry.kinds if kind != "master")
            if entry.group == number and kept != moments:
                raise ValueError(
                    f"'{entry.name}': the options of group {number} change which states there are, from "
                    f"{list(kept)} to {list(moments)}; make a new optimizer with them"
                )

    def _collect(self) -> None:
        known = {id(entry.param) for entry in self._entries}
        for entry in self._entries:
            check_gradient(entry)
        for number, group in enumerate(self.param_groups):
            for position, param in enumerate(group["params"]):
                if id(param) not in known and param.grad is not None:
                    raise ValueError(
                        f"parameter {position} of group {number} has a gradient but did not require one when this "
                        "optimizer was made; make a new one after unfreezing"
                    )
        if self._gradients is not None:
            self._gradients.settle()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors on the host, for torch.save or safetensors; the whole state passes through memory.

        float32 states are what torch's optimizer of the same name loads; 16-bit parameters have a ``master`` besides.
        """
        self._usable()
        if self._failed:
            raise OffloadError("an earlier step failed in the middle; its state is not worth saving")
        result = super().state_dict()
        states = read_states(self._slices, self._tier)
        numbers = self._numbers()
        result["state"] = {numbers[id(entry.param)]: state for entry, state in states.items()}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, at any tier, or of torch's optimizer of the same name.

        A master that is missing is made from the parameter. ValueError when groups or shapes do not fit; nothing was
        changed then.
        """
        self._usable()
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        by_param = {id(entry.param): entry for entry in self._entries}
        states: dict[Entry, dict[str, Any]] = {}
        for saved_id, param in zip(saved_ids, params, strict=False):
            state = state_dict["state"].get(saved_id)
            if state and id(param) in by_param:
                states[by_param[id(param)]] = state
        check_states(states)
        groups = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        for number, group in enumerate(groups):
            self._check_group(number, group)
        super().load_state_dict({"state": {}, "param_groups": groups})
        self._failed = True
        write_states(self._rule, self.param_groups, self._slices, self._tier, states)
        self._failed = False
        self._clip = 1.0

    def _numbers(self) -> dict[int, int]:
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        return {id(param): number for number, param in enumerate(params)}

    # Accounts

    def memory(self) -> dict[str, int]:
        """Bytes held between steps: ``host`` (masters and states, or ring buffers), ``staging``, ``gradients`` and
        ``nvme`` (files).
        """
        found = self._tier.memory()
        return {
            "gradients": 0 if self._gradients is None else self._gradients.resident_bytes,
            "host": found["host"],
            "nvme": found["nvme"],
            "staging": self._courier.resident_bytes,
        }

    def bytes_written(self) -> int:
        """Bytes written to drives so far: what wears them."""
        return self._tier.bytes_written()

    def flush(self) -> None:
        """Return when everything is on the tier; raise the first write that failed."""
        self._usable()
        self._tier.flush()

    def close(self) -> None:
        """Let memory go and remove the files. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._finalizer()

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an offloaded optimizer cannot be pickled or copied; save its state_dict()")

    def _usable(self) -> None:
        if self._closed:
            raise OffloadError("the optimizer is closed")


def _let_go(tier: Tier, gradients: GradientHost | None) -> None:
    if gradients is not None:
        gradients.close()
    tier.close()
