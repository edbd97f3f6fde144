"""What the tests of the kernels share: one description of every step, and operands for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import zero_optim_kernels as zok
from zero_optim_kernels import reference

BLOCK = 256


def unit_in_last_place(x: np.ndarray) -> np.ndarray:
    """The distance between neighbouring float32 numbers at |x|."""
    return np.spacing(np.maximum(abs(x), np.finfo(np.float32).tiny).astype(np.float32)).astype(np.float64)


@dataclass
class Step:
    """One rule with hyperparameters: how to call the kernel and the reference."""

    name: str
    kernel: Callable[..., Any]
    oracle: Callable[..., reference.Result]
    first: str | None
    second: str | None
    options: dict[str, Any]
    counts: bool = True  # the oracle takes the step number

    def __str__(self) -> str:
        return self.name


STEPS = [
    Step("adamw", zok.adam_step, reference.adam, "exp_avg", "exp_avg_sq", {"lr": 1e-2, "weight_decay": 0.1}),
    Step(
        "adam_l2",
        zok.adam_step,
        reference.adam,
        "exp_avg",
        "exp_avg_sq",
        {"lr": 1e-2, "weight_decay": 0.1, "adamw_mode": False},
    ),
    Step(
        "adam_low_beta",
        zok.adam_step,
        reference.adam,
        "exp_avg",
        "exp_avg_sq",
        {"lr": 1e-2, "betas": (0.3, 0.5), "eps": 1e-4},
    ),
    Step(
        "adam_uncorrected",
        zok.adam_step,
        reference.adam,
        "exp_avg",
        "exp_avg_sq",
        {"lr": 1e-2, "bias_correction": False},
    ),
    Step(
        "adagrad",
        zok.adagrad_step,
        reference.adagrad,
        None,
        "sum_sq",
        {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1},
    ),
    Step("lion", zok.lion_step, reference.lion, "exp_avg", None, {"lr": 1e-2, "weight_decay": 0.1}, counts=False),
    Step("sgd", zok.sgd_step, reference.sgd, None, None, {"lr": 1e-2, "weight_decay": 0.1}, counts=False),
    Step(
        "sgd_momentum",
        zok.sgd_step,
        reference.sgd,
        "momentum_buffer",
        None,
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
        counts=False,
    ),
    Step(
        "sgd_nesterov",
        zok.sgd_step,
        reference.sgd,
        "momentum_buffer",
        None,
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
        counts=False,
    ),
]


@dataclass
class Operands:
    """Memory of one step. Arrays of bf16 are uint16, 8-bit state is uint8 with scales."""

    n: Any  # elements, or a list of them
    dtypes: dict[str, str]
    arrays: dict[str, Any]  # param, grad, and where present first, second, first_scale, second_scale, low, copy

    def clone(self) -> Operands:
        """A copy of the memory."""
        return Operands(self.n, dict(self.dtypes), {name: array.copy() for name, array in self.arrays.items()})

    def part(self, begin: int, end: int) -> Operands:
        """A view of elements [begin, end); begin is a multiple of the block."""
        views = {}
        for name, array in self.arrays.items():
            size = BLOCK if name.endswith("_scale") else 1
            views[name] = array[begin // size : -(-end // size)]
        return Operands(end - begin, self.dtypes, views)

    def values(self, name: str) -> np.ndarray:
        """The numbers that are stored, as float32 or float64."""
        array = self.arrays[name]
        if name in ("first", "second") and self.dtypes["state_dtype"] == "int8":
            code = "e4m3" if name == "first" else "u5e3"
            return reference.dequantize(array, self.arrays[f"{name}_scale"], self.n, code, BLOCK)
        if name == "param" and "low" in self.arrays:
            return reference.bf16_join(array, self.arrays["low"])
        key = {"param": "param_dtype", "grad": "grad_dtype", "copy": "copy_dtype"}.get(name, "state_dtype")
        return reference.values(array, self.dtypes[key])


def make(
    step: Step,
    n: int,
    *,
    param: str = "f32",
    grad: str = "f32",
    state: str = "f32",
    copy: str | None = None,
    exact: bool = False,
    seed: int = 0,
    spread: float = 1.0,
) -> Operands:
    """Random operands; magnitudes are spread over exp(spread x normal)."""
    rng = np.random.default_rng(seed)
    gradient = rng.standard_normal(n) * np.exp(spread * rng.standard_normal(n))
    arrays = {"param": reference.stored(rng.standard_normal(n), param), "grad": reference.stored(gradient, grad)}
    dtypes = {"param_dtype": param, "grad_dtype": grad, "state_dtype": state}
    moments = {
        "first": rng.standard_normal(n) * 0.1 * abs(gradient),
        "second": 0.3 * gradient**2 * rng.uniform(0.5, 2, n),
    }
    for name, value in moments.items():
        if getattr(step, name) is None:
            continue
        if state == "int8":
            wide = value.astype(np.float32)
            arrays[name] = np.zeros(n, np.uint8)
            arrays[f"{name}_scale"] = np.zeros(-(-n // BLOCK), np.float32)
            code = "e4m3" if name == "first" else "u5e3"
            zok.quantize_blocks(wide, arrays[name], arrays[f"{name}_scale"], n, code=code, block=BLOCK)
        else:
            arrays[name] = reference.stored(value, state)
    if exact:
        arrays["low"] = rng.integers(0, 1 << 16, n).astype(np.uint16)
    if copy is not None:
        arrays["copy"] = reference.stored(np.zeros(n), copy)
        dtypes["copy_dtype"] = copy
    return Operands(n, dtypes, arrays)


def call(step: Step, x: Operands, *, number: int = 3, **more: Any) -> None:
    """Run the kernel on the operands."""
    a = x.arrays
    moments = [a.get(name) for name in ("first", "second") if getattr(step, name) is not None]
    if step.kernel is zok.sgd_step and not moments:
        moments = [None]
    scales = {
        f"{getattr(step, name)}_scale": a[f"{name}_scale"] for name in ("first", "second") if f"{name}_scale" in a
    }
    step.kernel(
        a["param"],
        a["grad"],
        *moments,
        x.n,
        step=number,
        param_low=a.get("low"),
        copy_out=a.get("copy"),
        **step.options,
        **x.dtypes,
        **scales,
        **more,
    )


def expect(step: Step, x: Operands, *, number: int = 3, **more: Any) -> reference.Result:
    """What exact arithmetic gives for the operands."""
    moments = [x.values(name) for name in ("first", "second") if getattr(step, name) is not None]
    if step.kernel is zok.sgd_step and not moments:
        moments = [None]
    options = {**step.options, **({"step": number} if step.counts else {}), **more}
    with np.errstate(all="ignore"):
        return step.oracle(x.values("param"), x.values("grad"), *moments, **options)


def same_bits(a: Operands, b: Operands) -> bool:
    """Return whether all memory is equal byte for byte."""
    return all(np.array_equal(array.view(np.uint8), b.arrays[name].view(np.uint8)) for name, array in a.arrays.items())
