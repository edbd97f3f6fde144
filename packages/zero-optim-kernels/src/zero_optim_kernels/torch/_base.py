"""The base of the optimizers: checks, state, plans and the interchange of state dicts with torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Literal, cast

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from ._formats import (
    NAMES,
    Moment,
    StateDtype,
    check_shape,
    decode,
    encode,
    local,
    parse_state_dtype,
    storage_dtype,
    zero_moment,
    zero_scales,
    zero_state,
)
from ._plan import Cohort, CohortPlan, adjacent_runs, gradients

__all__ = ["Bf16Weights", "KernelOptimizer", "Settings", "check_range"]

Bf16Weights = Literal["stochastic", "exact"]
_LOW = "param_low"


@dataclass(frozen=True)
class Settings:
    """The storage options of an optimizer's groups. ``threads``: of a kernel call; 0 for torch's number."""

    state_dtype: StateDtype
    bf16_weights: Bf16Weights
    seed: int
    threads: int


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raise ``ValueError``, naming the option ``name``, unless low <= value < high; NaN is refused too."""
    if not low <= float(value) < high:
        raise ValueError(f"{name}: expected a number in [{low}, {high}), got {value}")


class KernelOptimizer(Optimizer):
    """Base of the optimizers over CPU parameters of dtype float32, bfloat16 or float64 (or DTensors with such shards).

    Subclasses set `moments` and implement `_run`. Parameters must be contiguous and on the CPU; ``TypeError`` or
    ``ValueError`` names one that is not, before anything is written. ``params`` and ``defaults`` are those of torch's
    class. ``state_dtype``: of the moments, ``float32``, ``bfloat16`` or ``int8``. ``bf16_weights``: how bfloat16
    weights are rounded, ``"stochastic"`` by ``seed`` or ``"exact"``. ``threads`` of a kernel: 0 for torch's number.

    The owner may fill the attribute ``positions`` before the first step: for each parameter the global index of its
    first element over all processes, a multiple of 256. With an entry for every parameter, stochastic rounding gives
    the same bits however parameters are sharded. When empty, parameters count as adjacent.
    """

    moments: tuple[Moment, ...] = ()

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        state_dtype: str | torch.dtype,
        bf16_weights: Bf16Weights,
        seed: int,
        threads: int,
    ) -> None:
        if bf16_weights not in ("stochastic", "exact"):
            raise ValueError(f"bf16_weights: expected 'stochastic' or 'exact', got {bf16_weights!r}")
        if threads < 0:
            raise ValueError(f"threads: expected 0 (torch's number) or a positive number, got {threads}")
        self._settings = Settings(parse_state_dtype(state_dtype), bf16_weights, seed, threads)
        self.positions: Mapping[torch.Tensor, int] = {}
        self._plans: dict[int, CohortPlan] = {}
        self._known_states: list[dict[str, Any]] = []
        super().__init__(params, defaults)

    def _run(self, group: dict[str, Any], cohort: Cohort, grads: list[int], step: int, common: dict[str, Any]) -> None:
        """Update a cohort (see `Cohort`) and its states in place, by one kernel call or several, in step ``step`` (from
        1). ``grads``: the addresses of its gradients. ``common``: keyword arguments that all kernels take."""
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` if the param group has options that the kernel does not support."""
        raise NotImplementedError

    def _group_moments(self, group: dict[str, Any]) -> tuple[Moment, ...]:
        """Return the moments that this group's parameters have; by default `moments`."""
        return self.moments

    def _initial_moment(self, group: dict[str, Any], moment: Moment) -> float:
        """Return the value that every element of a new moment of this group has; by default 0."""
        return 0.0

    # Parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does. Raises ``TypeError`` or ``ValueError`` for options or parameters not supported."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            self._check_group(added)
            for position, param in enumerate(added["params"]):
                self._check_param(len(self.param_groups) - 1, position, param)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _param_name(self, group: int, position: int) -> str:
        """Return the name of a parameter in errors; ``group``, ``position``: indices of its group, and in it."""
        names = self.param_groups[group].get("param_names")
        return f"parameter {names[position]!r}" if names else f"parameter {position} of group {group}"

    def _check_param(self, group: int, position: int, param: torch.Tensor) -> None:
        """Raise ``TypeError`` or ``ValueError``, naming the parameter by `_param_name`, for a device, dtype or strides
        that are not supported. ``group``, ``position``: indices of its group, and in it."""
        name = self._param_name(group, position)
        own = local(param)
        if own.device.type != "cpu":
            raise ValueError(
                f"{name}: expected a tensor on the CPU, got device {own.device}; "
                "for accelerators use torch.optim with fused=True"
            )
        if own.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise TypeError(
                f"{name}: expected dtype float32, bfloat16 or float64, got {own.dtype}; keep a float32 master of it"
            )
        if own.dtype == torch.float64 and self._settings.state_dtype != "f32":
            raise TypeError(
                f"{name}: float64 parameters have float64 state; got state_dtype {self._settings.state_dtype!r}"
            )
        if not own.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor, got strides {own.stride()} for shape {tuple(own.shape)}"
            )

    def _check_grad(self, name: str, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Raise ``TypeError`` or ``ValueError``, in which the parameter is called ``name``, unless the kernel can read
        ``grad``, the gradient of ``param``."""
        if grad.layout != torch.strided:
            raise TypeError(
                f"{name}: sparse gradients are not supported, got layout {grad.layout}; "
                "use sparse=False or torch.optim.SparseAdam"
            )
        wide = param.dtype == torch.float64
        if grad.dtype not in NAMES or (grad.dtype == torch.float64) != wide:
            raise TypeError(f"{name}: the gradient's dtype {grad.dtype} does not fit the parameter's {param.dtype}")
        if grad.shape != param.shape or grad.device != param.device:
            raise ValueError(
                f"{name}: expected a gradient of shape {tuple(param.shape)} on {param.device}, "
                f"got {tuple(grad.shape)} on {grad.device}"
            )
        if not grad.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous gradient, got strides {grad.stride()} for shape {tuple(grad.shape)}"
            )

    # State

    def _ensure_states(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """Create what the states of ``params`` lack: steps, moments (one of all parameters, then the next), and the low
        bits of exact bfloat16 weights. Then each moment lies in a region of its own, which a call reads in order and
        the processor prefetches. If moments alternated, a step over many small tensors would take half as long
        again."""
        states: list[dict[str, Any]] = [self.state[param] for param in params]
        for state in states:
            state.setdefault("step", torch.tensor(0.0))
        for moment in self._group_moments(group):
            for param, state in zip(params, states, strict=True):
                if state.get(moment.name) is None:
                    self._init_moment(moment, param, state, self._initial_moment(group, moment))
        if self._settings.bf16_weights != "exact":
            return
        for param, state in zip(params, states, strict=True):
            if param.dtype == torch.bfloat16 and _LOW not in state:
                state[_LOW] = zero_moment(param, torch.int16)

    def _init_moment(self, moment: Moment, param: torch.Tensor, state: dict[str, Any], start: float) -> None:
        """Put a new moment of ``param`` into ``state``, its scales too if state is 8-bit; every element is
        ``start``."""
        dtype = storage_dtype(param, self._settings.state_dtype)
        state.update(zero_state(moment, param, dtype))
        if dtype == torch.uint8:
            wide = torch.full(local(param).shape, start)
            encode(moment, wide, state[moment.name], state[moment.scale_name])
        elif start:
            local(state[moment.name]).fill_(start)

    def _build_plan(
        self, index: int, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor | None]
    ) -> CohortPlan:
        """Check the parameters that have a gradient, create their missing states, and return their cohorts, each of
        which shares one tensor as its step. ``params`` are those of ``group``, number ``index``, and ``grads`` their
        gradients or None."""
        for position, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is not None:
                self._check_param(index, position, param)
                self._check_grad(self._param_name(index, position), local(param), local(grad))
        moments = self._group_moments(group)
        present = [position for position, grad in enumerate(grads) if grad is not None]
        new = {i for i in present if any(self.state[params[i]].get(moment.name) is None for moment in moments)}
        self._ensure_states(group, [params[i] for i in present])
        states = {i: cast(dict[str, Any], self.state[params[i]]) for i in present}
        members: dict[tuple[Any, ...], list[int]] = {}
        for i in present:
            param, grad = params[i], cast(torch.Tensor, grads[i])
            key = (int(states[i]["step"].item()), param.dtype, grad.dtype, local(param) is not param, i in new)
            members.setdefault(key, []).append(i)
        cohort_of = [-1] * len(params)
        cohorts: list[Cohort] = []
        for (step, dtype, grad_dtype, sharded, first), together in members.items():
            names = [moment.name for moment in moments]
            if dtype != torch.float64 and self._settings.state_dtype == "int8":
                names += [moment.scale_name for moment in moments]
            if dtype == torch.bfloat16 and self._settings.bf16_weights == "exact":
                names.append(_LOW)
            for numbers, place in self._adjacent_runs(index, params, together, dtype):
                shared = torch.tensor(float(step))
                for number in numbers:
                    states[number]["step"] = shared
                    cohort_of[number] = len(cohorts)
                cohorts.append(
                    Cohort(
                        params=[params[i] for i in numbers],
                        param_dtype=NAMES[dtype],
                        grad_dtype=grad_dtype,
                        sharded=sharded,
                        states=[states[i] for i in numbers],
                        names=tuple(names),
                        step=shared,
                        first=first,
                        position=place,
                    )
                )
        return CohortPlan(list(params), cohort_of, cohorts)

    def _adjacent_runs(
        self, group: int, params: list[torch.Tensor], numbers: list[int], dtype: torch.dtype
    ) -> Iterator[tuple[list[int], int]]:
        """Yield (those of ``numbers`` whose parameters one call can update, global index of the first one's first
        element). ``numbers`` are indices into ``params``. They are one run, at an index of the group's own, if
        `positions` is empty or ``dtype`` and state need no random numbers."""
        rounds = dtype == torch.bfloat16 or (dtype != torch.float64 and self._settings.state_dtype != "f32")
        if not self.positions or not rounds:
            yield numbers, group << 44
            return
        positions = [self.positions.get(param, 0) for param in params]
        for run in adjacent_runs(numbers, positions, [local(param).numel() for param in params]):
            yield run, positions[run[0]]

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run ``closure``, if given, with autograd on, then update all parameters that have a gradient; return the
        closure's result or None. Raises ``TypeError`` or ``ValueError``, before any update, if one cannot be."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._plans and not (
            len(self._known_states) == len(self.state) and all(map(is_, self.state.values(), self._known_states))
        ):
            self._plans.clear()
        work: list[tuple[int, dict[str, Any], CohortPlan, list[list[int]]]] = []
        for index, group in enumerate(self.param_groups):
            self._check_group(group)
            params = group["params"]
            grads = gradients(params)
            if all(grad is None for grad in grads):
                continue
            plan = self._plans.get(index)
            pointers = None if plan is None else plan.grad_pointers(params, grads)
            if plan is None or pointers is None:
                plan = self._plans[index] = self._build_plan(index, group, params, grads)
                pointers = plan.grad_pointers(params, grads)
            work.append((index, group, plan, pointers or []))
        if self._plans:  # without plans, states need no watching (listing them takes time)
            self._known_states = list(self.state.values())
        for index, group, plan, pointers in work:
            for cohort, addresses in zip(plan.cohorts, pointers, strict=True):
                self._step_cohort(group, cohort, addresses)
            if any(cohort.first for cohort in plan.cohorts):
                del self._plans[index]
        return loss

    def _step_cohort(self, group: dict[str, Any], cohort: Cohort, grads: list[int]) -> None:
        """Update the parameters and states of one cohort of ``group`` in place and count its step; ``grads``: the
        gradients' addresses, in the cohort's order."""
        number = int(cohort.step.item()) + 1
        wide = cohort.param_dtype == "f64"
        common = {
            "step": number,
            "param_dtype": cohort.param_dtype,
            "grad_dtype": NAMES[cohort.grad_dtype],
            "state_dtype": "f64" if wide else self._settings.state_dtype,
            "param_low": cohort.pointers.get(_LOW),
            "seed": self._settings.seed,
            "element_offset": cohort.position,
            "threads": self._settings.threads or torch.get_num_threads(),
        }
        self._run(group, cohort, grads, number, common)
        cohort.step.fill_(float(number))

    # State dicts

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `torch.optim.Optimizer`; float32 state loads into torch's optimizer of the same name."""
        result = super().state_dict()
        result["state"] = {
            key: {**state, "step": state["step"].clone()} if "step" in state else dict(state)
            for key, state in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class or of torch's optimizer of the same name, converted from any ``state_dtype``.

        Raises ``ValueError`` when the parameter groups differ, or when a tensor's shape or sharding does not fit its
        parameter; its state and groups are unchanged then.
        """
        loaded: dict[str, Any] = {}
        before = {"state": self.state, "param_groups": self.param_groups}
        handle = self.register_load_state_dict_pre_hook(lambda _, given: loaded.update(given))
        try:
            super().load_state_dict(state_dict)
            saved_ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
            with torch._C.DisableTorchFunctionSubclass():  # subclasses may show another shape than that of the memory
                for group in self.param_groups:
                    found: list[tuple[torch.Tensor, dict[str, Any]]] = []
                    for param in group["params"]:
                        saved = loaded["state"].get(next(saved_ids))
                        if saved is not None:
                            found.append((param, saved))
                    self._load_states(group, found)
        except Exception:
            self.__dict__.update(before)
            raise
        finally:
            handle.remove()
        self._plans.clear()

    def _load_states(self, group: dict[str, Any], found: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """Set the states of one group's parameters from saved ones, converted to this optimizer's formats. ``found``:
        parameters with their saved states, as they were before torch cast them to the parameters' dtypes. Tensors are
        created in the order that `_ensure_states` describes."""
        states: list[dict[str, Any]] = []
        for _, saved in found:
            step = torch.as_tensor(saved.get("step", 0.0), dtype=torch.float32)
            states.append({"step": step.detach().clone().cpu().reshape(())})
        for moment in self._group_moments(group):
            for (param, saved), state in zip(found, states, strict=True):
                if saved.get(moment.name) is not None:
                    self._load_moment(moment, param, saved, storage_dtype(param, self._settings.state_dtype), state)
        for (param, saved), state in zip(found, states, strict=True):
            if _LOW in saved and param.dtype == torch.bfloat16 and self._settings.bf16_weights == "exact":
                check_shape(_LOW, saved[_LOW], param)
                state[_LOW] = saved[_LOW].detach().clone()
            self.state[param] = state

    def _load_moment(
        self, moment: Moment, param: torch.Tensor, saved: dict[str, Any], dtype: torch.dtype, state: dict[str, Any]
    ) -> None:
        """Copy one moment from a saved state to ``state``, converted to ``dtype`` (uint8: 8-bit). Raises ``ValueError``
        for another shape than the parameter's, and for 8-bit state without scales."""
        value: torch.Tensor = saved[moment.name].detach()
        check_shape(moment.name, value, param)
        scales: torch.Tensor | None = None
        if value.dtype == torch.uint8:
            if moment.scale_name not in saved:
                raise ValueError(f"state {moment.name!r} is 8-bit but {moment.scale_name!r} is missing")
            scales = saved[moment.scale_name].detach().float()
            check_shape(moment.scale_name, scales, zero_scales(param))
        state.update(zero_state(moment, param, dtype))
        if value.dtype == dtype:
            local(state[moment.name]).copy_(local(value))
            if scales is not None:
                local(state[moment.scale_name]).copy_(local(scales))
            return
        wide = local(value) if scales is None else decode(moment, value, scales)
        if dtype == torch.uint8:
            encode(moment, wide, state[moment.name], state[moment.scale_name])
        else:
            local(state[moment.name]).copy_(wide)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickles and copies hold: torch's state, the storage options and `positions`; no plans."""
        return {**super().__getstate__(), "_settings": self._settings, "positions": self.positions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned, or what torch loads; plans are made anew at the next step."""
        self.__dict__.setdefault("positions", {})  # load_state_dict calls this, too, and its state has none
        super().__setstate__(state)
        self._plans = {}
        self._known_states = []
