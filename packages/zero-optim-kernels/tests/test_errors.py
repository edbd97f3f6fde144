"""Wrong arguments raise a typed error, and nothing is written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from kernel_support import STEPS, call, make, same_bits

import zero_optim_kernels as zok

N = 512
ADAMW = STEPS[0]


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"number": 0}, ValueError, "step"),
        ({"number": 1.5}, TypeError, "step"),
        ({"element_offset": -1}, ValueError, "element_offset"),
        ({"seed": -1}, ValueError, "seed"),
        ({"threads": -1}, ValueError, "threads"),
        ({"segments": [(N, -1.0, 0.0, 0.9, 0.9)]}, ValueError, "lr"),
        ({"segments": [(N, 1.0, -1.0, 0.9, 0.9)]}, ValueError, "weight_decay"),
        ({"segments": [(N, 1.0, 0.0, 1.0, 0.9)]}, ValueError, "beta1"),
        ({"segments": [(N, 1.0, 0.0, 0.9, math.nan)]}, ValueError, "beta2"),
        ({"segments": []}, ValueError, "segments"),
        ({"segments": [(N - 1, 1.0, 0.0, 0.9, 0.9)]}, ValueError, "segments"),
        ({"segments": [(N, 1.0, 0.0, 0.9, 0.9), (N - 1, 1.0, 0.0, 0.9, 0.9)]}, ValueError, "segments"),
        ({"segments": [(N + 1, 1.0, 0.0, 0.9, 0.9)]}, ValueError, "segments"),
    ],
)
def test_wrong_numbers_are_refused(more: dict[str, Any], error: type[Exception], message: str) -> None:
    x = make(ADAMW, N)
    before = x.clone()
    with pytest.raises(error, match=message):
        call(ADAMW, x, **more)
    assert same_bits(x, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-3),
        ("lr", math.nan),
        ("weight_decay", -0.1),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, -0.1)),
        ("eps", -1.0),
    ],
)
def test_wrong_hyperparameters_are_refused(name: str, value: object) -> None:
    x = make(ADAMW, N)
    before = x.clone()
    a = x.arrays
    with pytest.raises(ValueError, match=name.rstrip("s")):
        zok.adam_step(a["param"], a["grad"], a["first"], a["second"], N, **{"step": 1, "lr": 1e-3, name: value})
    assert same_bits(x, before)


@pytest.mark.parametrize("name", ["param", "grad", "first", "second", "copy", "low", "first_scale", "second_scale"])
def test_buffers_of_the_wrong_size_are_refused(name: str) -> None:
    x = make(ADAMW, N, param="bf16", state="int8", copy="bf16", exact=True)
    x.arrays[name] = x.arrays[name][:-1]
    before = x.clone()
    with pytest.raises(ValueError, match="expected .* bytes"):
        call(ADAMW, x)
    assert same_bits(x, before)


@pytest.mark.parametrize("name", ["param", "grad", "first", "second"])
@pytest.mark.parametrize(
    ("replace", "error", "message"),
    [
        (lambda a: None, TypeError, "None"),
        (lambda a: 0, ValueError, "address 0"),
        (lambda a: -5, ValueError, "64 unsigned bits"),
        (lambda a: a.ctypes.data + 1, ValueError, "multiple of the item size"),
        (lambda a: np.repeat(a, 2)[::2], TypeError, "contiguous"),
        (lambda a: a.astype(np.int32), TypeError, "item format"),
        (lambda a: a.tolist(), TypeError, "expected an integer address"),
        (lambda a: "text", TypeError, "expected an integer address"),
    ],
)
def test_operands_that_are_not_memory_of_the_dtype_are_refused(
    name: str, replace: Any, error: type, message: str
) -> None:
    x = make(ADAMW, N)
    before = x.clone()
    kept = x.arrays[name]
    x.arrays[name] = replace(kept)
    with pytest.raises(error, match=message):
        call(ADAMW, x)
    x.arrays[name] = kept
    assert same_bits(x, before)


def test_read_only_memory_is_refused_where_the_step_writes() -> None:
    x = make(ADAMW, N)
    x.arrays["grad"].flags.writeable = False
    call(ADAMW, x)
    with pytest.raises(TypeError, match="writable"):
        call(ADAMW, x, zero_grad=True)
    x.arrays["first"].flags.writeable = False
    with pytest.raises(TypeError, match="the first state"):
        call(ADAMW, x)


@pytest.mark.parametrize(
    "dtypes",
    [
        {"param_dtype": "f16"},
        {"param_dtype": "int8"},
        {"param_dtype": "f64"},
        {"grad_dtype": "f64"},
        {"grad_dtype": "int8"},
        {"state_dtype": "f16"},
        {"state_dtype": "f64"},
        {"state_dtype": "int8"},
        {"copy_dtype": "bf16"},
        {"param_dtype": "float"},
    ],
    ids=str,
)
def test_dtypes_that_do_not_go_together_are_refused(dtypes: dict[str, str]) -> None:
    x = make(ADAMW, N)
    before = x.clone()
    x.dtypes = {**x.dtypes, **dtypes}
    with pytest.raises(ValueError, match="dtype"):
        call(ADAMW, x)
    assert same_bits(x, before)


def test_8_bit_state_cannot_start_inside_a_block() -> None:
    with pytest.raises(ValueError, match="multiple of 256"):
        call(ADAMW, make(ADAMW, N, state="int8"), element_offset=100)


def test_lists_must_have_one_operand_per_tensor() -> None:
    x = make(ADAMW, N)
    a = x.arrays
    before = x.clone()
    with pytest.raises(TypeError, match="list"):
        zok.adam_step(a["param"], [a["grad"]], [a["first"]], [a["second"]], [N], step=1, lr=1e-3)
    with pytest.raises(ValueError, match="expected 1 operands"):
        zok.adam_step([a["param"]], [a["grad"]] * 2, [a["first"]], [a["second"]], [N], step=1, lr=1e-3)
    with pytest.raises(TypeError, match=r"grad\[0\]"):
        zok.adam_step([a["param"]], [None], [a["first"]], [a["second"]], [N], step=1, lr=1e-3)
    with pytest.raises(ValueError, match="one row or one per tensor"):
        rows = [(1, 1e-3, 0.0, 0.9, 0.9)] * 3
        zok.adam_step(
            [a["param"]] * 2,
            [a["grad"]] * 2,
            [a["first"]] * 2,
            [a["second"]] * 2,
            [N] * 2,
            step=1,
            lr=1.0,
            segments=rows,
        )
    assert same_bits(x, before)


@pytest.mark.parametrize("n", [-1, 2**60, 1.5, "8", None, True, [N, -1]])
def test_counts_that_are_not_counts_are_refused(n: Any) -> None:
    a = make(ADAMW, N).arrays
    with pytest.raises((TypeError, ValueError), match="n:|expected"):
        zok.adam_step(a["param"], a["grad"], a["first"], a["second"], n, step=1, lr=1e-3)


def test_buffer_functions_check_their_arguments() -> None:
    x = np.ones(8, np.float32)
    with pytest.raises(ValueError, match="dtype"):
        zok.l2_norm(x, 8, dtype="int8")
    with pytest.raises(TypeError, match="x:"):
        zok.l2_norm(None, 8)
    with pytest.raises(TypeError, match="slices"):
        zok.sum_slices([], x, 8, dtype="f32")
    with pytest.raises(ValueError, match="divisor"):
        zok.sum_slices([x], x, 8, dtype="f32", divisor=0)
    with pytest.raises(ValueError, match="expected 16 bytes"):
        zok.cast(x, np.ones(7, np.uint16), 8, dtype="f32", out_dtype="bf16")
    with pytest.raises(ValueError, match="block"):
        zok.quantize_blocks(x, np.zeros(8, np.uint8), np.zeros(3, np.float32), 8, block=3)
    with pytest.raises(ValueError, match="code"):
        zok.quantize_blocks(x, np.zeros(8, np.uint8), np.zeros(1, np.float32), 8, code="int3")
    for name in ("step", "seed", "element_offset"):
        with pytest.raises(ValueError, match=f"{name}: expected 0 or more"):
            zok.quantize_blocks(x, np.zeros(8, np.uint8), np.zeros(1, np.float32), 8, **{name: -1})
    with pytest.raises(TypeError, match="payload"):
        zok.dequantize_blocks(None, np.zeros(1, np.float32), x, 8)


def test_momentum_and_its_buffer_go_together() -> None:
    x = np.ones(8, np.float32)
    with pytest.raises(ValueError, match="momentum_buffer"):
        zok.sgd_step(x, x, None, 8, step=1, lr=1.0, momentum=0.9)
    with pytest.raises(ValueError, match="momentum_buffer"):
        zok.sgd_step(x, x, x.copy(), 8, step=1, lr=1.0)
    with pytest.raises(ValueError, match="nesterov"):
        zok.sgd_step(x, x, x.copy(), 8, step=1, lr=1.0, momentum=0.9, dampening=0.1, nesterov=True)
