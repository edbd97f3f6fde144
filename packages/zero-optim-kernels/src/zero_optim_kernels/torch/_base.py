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
    decode,
    encode,
    local,
    parse_state_dtype,
    storage_dtype,
    zero_moment,
    zero_scales,
)
from ._plan import Cohort, CohortPlan, gradients, neighbours

__all__ = ["Bf16Weights", "KernelOptimizer", "Settings", "check_range"]

Bf16Weights = Literal["stochastic", "exact"]
_LOW = "param_low"


@dataclass(frozen=True)
class Settings:
    """How an optimizer stores its state; the same for all parameter groups."""

    state_dtype: StateDtype
    bf16_weights: Bf16Weights
    seed: int
    threads: int


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raise ``ValueError`` unless low <= value < high."""
    if not low <= float(value) < high:
        raise ValueError(f"{name}: expected a number in [{low}, {high}), got {value}")


def _check_shape(name: str, value: torch.Tensor, like: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a saved tensor has the shape that this optimizer gives it, whole and here."""
    if value.shape == like.shape and local(value).shape == local(like).shape:
        return
    raise ValueError(
        f"state {name!r}: expected shape {tuple(like.shape)}, of it {tuple(local(like).shape)} on this rank, got "
        f"{tuple(value.shape)} and {tuple(local(value).shape)}; 8-bit state loads with the sharding that it was saved "
        "with, any other state once it is sharded as its parameter is"
    )


class KernelOptimizer(Optimizer):
    """Base of the optimizers over CPU parameters of dtype float32, bfloat16 or float64 (or DTensors with such local
    parts).

    Subclasses set `moments` and implement `_run`. Parameters must be contiguous and on the CPU; ``TypeError`` or
    ``ValueError`` says which one is not, before anything is written. ``threads=0`` uses ``torch.get_num_threads()``.

    ``positions``: by parameter, the place of its first element among those of all processes, a multiple of 256. Where
    all parameters have one, an element is rounded as on one process, however parameters are sharded; without them
    parameters lie one after the other.
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
        self._seen: list[dict[str, Any]] = []
        super().__init__(params, defaults)

    def _run(self, group: dict[str, Any], cohort: Cohort, grads: list[int], step: int, common: dict[str, Any]) -> None:
        """Update one cohort; ``common`` has the arguments that every kernel takes."""
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` for options of a group that the kernel cannot serve."""
        raise NotImplementedError

    def _group_moments(self, group: dict[str, Any]) -> tuple[Moment, ...]:
        """The moments that this group's parameters have."""
        return self.moments

    def _initial_moment(self, group: dict[str, Any], moment: Moment) -> float:
        return 0.0

    # Parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer.add_param_group`; its options and parameters are checked first."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            self._check_group(added)
            for position, param in enumerate(added["params"]):
                self._check_param(len(self.param_groups) - 1, position, param)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _name(self, group: int, position: int) -> str:
        names = self.param_groups[group].get("param_names")
        return f"parameter {names[position]!r}" if names else f"parameter {position} of group {group}"

    def _check_param(self, group: int, position: int, param: torch.Tensor) -> None:
        name = self._name(group, position)
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
        """Give the parameters' states what the kernel needs, one moment of all parameters after the other.

        Then the tensors that a call reads side by side lie in as many regions of memory, each read in order, which
        is what a processor fetches ahead. Moments that alternate in one region cost a list of small tensors half as
        much time again.
        """
        states: list[dict[str, Any]] = [self.state[param] for param in params]
        for state in states:
            state.setdefault("step", torch.tensor(0.0))
        for moment in self._group_moments(group):
            for param, state in zip(params, states, strict=True):
                if state.get(moment.name) is None:
                    self._start_moment(moment, param, state, self._initial_moment(group, moment))
        if self._settings.bf16_weights != "exact":
            return
        for param, state in zip(params, states, strict=True):
            if param.dtype == torch.bfloat16 and _LOW not in state:
                state[_LOW] = zero_moment(param, torch.int16)

    def _start_moment(self, moment: Moment, param: torch.Tensor, state: dict[str, Any], start: float) -> None:
        """A moment, and its scales in 8-bit state, every element of which is ``start``."""
        dtype = storage_dtype(param, self._settings.state_dtype)
        state[moment.name] = zero_moment(param, dtype)
        if dtype == torch.uint8:
            state[moment.scale_name] = zero_scales(param)
            wide = torch.full(local(param).shape, start)
            encode(moment, wide, state[moment.name], state[moment.scale_name])
        elif start:
            local(state[moment.name]).fill_(start)

    def _make_plan(
        self, index: int, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor | None]
    ) -> CohortPlan:
        for position, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is not None:
                self._check_param(index, position, param)
                self._check_grad(self._name(index, position), local(param), local(grad))
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
        where = [-1] * len(params)
        cohorts: list[Cohort] = []
        for (step, dtype, grad_dtype, sharded, first), together in members.items():
            names = [moment.name for moment in moments]
            if dtype != torch.float64 and self._settings.state_dtype == "int8":
                names += [moment.scale_name for moment in moments]
            if dtype == torch.bfloat16 and self._settings.bf16_weights == "exact":
                names.append(_LOW)
            for numbers, place in self._runs(index, params, together, dtype):
                shared = torch.tensor(float(step))
                for number in numbers:
                    states[number]["step"] = shared
                    where[number] = len(cohorts)
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
        return CohortPlan(list(params), where, cohorts)

    def _runs(
        self, group: int, params: list[torch.Tensor], numbers: list[int], dtype: torch.dtype
    ) -> Iterator[tuple[list[int], int]]:
        """Yield the numbers of parameters that one call updates, and the position of the first one's first element."""
        rounds = dtype == torch.bfloat16 or (dtype != torch.float64 and self._settings.state_dtype != "f32")
        if not self.positions or not rounds:
            yield numbers, group << 44
            return
        positions = [self.positions.get(param, 0) for param in params]
        for run in neighbours(numbers, positions, [local(param).numel() for param in params]):
            yield run, positions[run[0]]

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; everything is checked before the first one is written."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._plans and not (len(self._seen) == len(self.state) and all(map(is_, self.state.values(), self._seen))):
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
                plan = self._plans[index] = self._make_plan(index, group, params, grads)
                pointers = plan.grad_pointers(params, grads)
            work.append((index, group, plan, pointers or []))
        if self._plans:  # else the states may be elsewhere, and looking at them costs something
            self._seen = list(self.state.values())
        for index, group, plan, pointers in work:
            for cohort, addresses in zip(plan.cohorts, pointers, strict=True):
                self._advance(group, cohort, addresses)
            if any(cohort.first for cohort in plan.cohorts):
                del self._plans[index]
        return loss

    def _advance(self, group: dict[str, Any], cohort: Cohort, grads: list[int]) -> None:
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
        """As `torch.optim.Optimizer.state_dict`; with float32 state, what torch's optimizer of the same name loads."""
        result = super().state_dict()
        result["state"] = {
            key: {**state, "step": state["step"].clone()} if "step" in state else dict(state)
            for key, state in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class or of torch's optimizer of the same name, in any state precision; it is
        converted to this one's.

        Raises ``ValueError`` when the parameter groups differ, or when a part of the state does not have the shape
        that its parameter, sharded as it is, calls for.
        """
        loaded: dict[str, Any] = {}
        before = {"state": self.state, "param_groups": self.param_groups}
        handle = self.register_load_state_dict_pre_hook(lambda _, given: loaded.update(given))
        try:
            super().load_state_dict(state_dict)
            saved_ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
            for group in self.param_groups:
                found: list[tuple[torch.Tensor, dict[str, Any]]] = []
                for param in group["params"]:
                    saved = loaded["state"].get(next(saved_ids))
                    if saved is not None:
                        found.append((param, saved))
                self._adopt(group, found)
        except Exception:
            self.__dict__.update(before)
            raise
        finally:
            handle.remove()
        self._plans.clear()

    def _adopt(self, group: dict[str, Any], found: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """Give parameters of one group their saved states, in this optimizer's formats and in the order of memory that
        `_ensure_states` describes; torch has cast the saved ones to the parameters' dtypes meanwhile.
        """
        states: list[dict[str, Any]] = []
        for _, saved in found:
            step = torch.as_tensor(saved.get("step", 0.0), dtype=torch.float32)
            states.append({"step": step.detach().clone().cpu().reshape(())})
        for moment in self._group_moments(group):
            for (param, saved), state in zip(found, states, strict=True):
                if saved.get(moment.name) is not None:
                    self._adopt_moment(moment, param, saved, storage_dtype(param, self._settings.state_dtype), state)
        for (param, saved), state in zip(found, states, strict=True):
            if _LOW in saved and param.dtype == torch.bfloat16 and self._settings.bf16_weights == "exact":
                _check_shape(_LOW, saved[_LOW], param)
                state[_LOW] = saved[_LOW].detach().clone()
            self.state[param] = state

    def _adopt_moment(
        self,
        moment: Moment,
        param: torch.Tensor,
        saved: dict[str, Any],
        dtype: torch.dtype,
        state: dict[str, Any],
    ) -> None:
        """Copy one moment from a saved state to a new one, in ``dtype`` (uint8 means 8-bit)."""
        value: torch.Tensor = saved[moment.name].detach()
        _check_shape(moment.name, value, param)
        scales: torch.Tensor | None = None
        if value.dtype == torch.uint8:
            if moment.scale_name not in saved:
                raise ValueError(f"state {moment.name!r} is 8-bit but {moment.scale_name!r} is missing")
            scales = saved[moment.scale_name].detach().float()
            _check_shape(moment.scale_name, scales, zero_scales(param))
        state[moment.name] = zero_moment(param, dtype)
        if dtype == torch.uint8:
            state[moment.scale_name] = zero_scales(param)
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
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.positions = {}
        self._plans = {}
        self._seen = []
