"""Every step against the reference, and what must not change its bits."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_support import (
    BLOCK,
    STEPS,
    Operands,
    Step,
    call,
    expect,
    make,
    same_bits,
    unit_in_last_place,
)

import zero_optim_kernels as zok
from zero_optim_kernels import reference

SIZES = (0, 1, 5, 16, 33, 255, 256, 257, 1023, 1025, 40_000)
ADAMW = STEPS[0]
EVERY_STEP = pytest.mark.parametrize("step", STEPS, ids=str)
EVERY_FORMAT = pytest.mark.parametrize(
    "formats",
    [
        {},
        {"grad": "bf16", "copy": "bf16"},
        {"grad": "f16", "copy": "f16"},
        {"state": "bf16"},
        {"state": "int8", "grad": "bf16", "copy": "bf16"},
        {"param": "bf16", "grad": "bf16", "state": "int8"},
        {"param": "bf16", "grad": "bf16", "state": "bf16", "exact": True},
        {"param": "f64", "grad": "f64", "state": "f64", "copy": "f32"},
    ],
    ids=lambda f: "-".join(f"{k}={v}" for k, v in f.items()) or "f32",
)


@EVERY_STEP
@pytest.mark.parametrize("grad", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("n", SIZES)
def test_float32_steps_are_within_two_ulp_of_the_largest_term(step: Step, grad: str, n: int) -> None:
    x = make(step, n, grad=grad, seed=n)
    wanted = expect(step, x)
    call(step, x)
    for name, value, term in (
        ("param", wanted.param, wanted.param_term),
        ("first", wanted.first, wanted.first_term),
        ("second", wanted.second, wanted.second_term),
    ):
        if value is not None:
            assert np.all(abs(x.arrays[name] - value) <= 2 * unit_in_last_place(term)), name


@EVERY_STEP
def test_float64_steps_agree_with_the_reference(step: Step) -> None:
    x = make(step, 1000, param="f64", grad="f64", state="f64")
    rounded = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in step.options.items()}
    wanted = expect(step, x)
    call(step, x)
    assert np.allclose(x.arrays["param"], wanted.param, rtol=1e-6, atol=1e-7), rounded


@EVERY_STEP
def test_the_gradient_is_unscaled_and_cleared_in_the_same_pass(step: Step) -> None:
    x = make(step, 3000)
    wanted = expect(step, x, grad_scale=0.125)
    call(step, x, grad_scale=0.125, zero_grad=True)
    assert np.all(abs(x.arrays["param"] - wanted.param) <= 2 * unit_in_last_place(wanted.param_term))
    assert not x.arrays["grad"].any()


@EVERY_STEP
@EVERY_FORMAT
def test_bits_do_not_depend_on_threads_split_or_alignment(step: Step, formats: dict[str, object]) -> None:
    n, offset = 100_000 + 77, 3 * BLOCK
    whole = make(step, n, **formats)
    parts, threaded = whole.clone(), whole.clone()
    call(step, whole, element_offset=offset, seed=5, threads=1)
    call(step, threaded, element_offset=offset, seed=5, threads=3)
    for begin, end in ((0, BLOCK), (BLOCK, 70 * BLOCK), (70 * BLOCK, n)):
        call(step, parts.part(begin, end), element_offset=offset + begin, seed=5)
    assert same_bits(whole, threaded)
    assert same_bits(whole, parts)


@EVERY_STEP
@EVERY_FORMAT
def test_bits_do_not_depend_on_the_address(step: Step, formats: dict[str, object]) -> None:
    n = 2000
    straight = make(step, n, **formats)
    shifted = straight.clone()
    for name, array in straight.arrays.items():
        memory = np.empty(array.nbytes + 128, np.uint8)
        begin = -memory.ctypes.data % 64 + array.itemsize
        shifted.arrays[name] = memory[begin : begin + array.nbytes].view(array.dtype)
        shifted.arrays[name][:] = array
    call(step, straight)
    call(step, shifted)
    assert same_bits(straight, shifted)


@EVERY_STEP
@EVERY_FORMAT
def test_a_list_of_tensors_is_the_flat_call_on_padded_tensors(step: Step, formats: dict[str, object]) -> None:
    sizes = [1, 300, 0, 256, 5000]
    places = np.concatenate([[0], np.cumsum([-(-n // BLOCK) * BLOCK for n in sizes])])
    flat = make(step, int(places[-1]), **formats)
    inside = np.zeros(flat.n, bool)
    for place, n in zip(places, sizes, strict=False):
        inside[place : place + n] = True
    for name in ("param", "low", "grad", "first", "second"):
        if name in flat.arrays:
            flat.arrays[name][~inside] = 0
    listed = flat.clone()
    pieces = [listed.part(int(place), int(place) + n) for place, n in zip(places, sizes, strict=False)]
    call(step, flat, seed=9)
    lists = {name: [piece.arrays[name] for piece in pieces] for name in flat.arrays}
    call(step, Operands(sizes, flat.dtypes, lists), seed=9)
    for name in flat.arrays:
        if name.endswith("_scale"):
            assert np.array_equal(flat.arrays[name], listed.arrays[name])
        else:
            assert np.array_equal(flat.arrays[name][inside], listed.arrays[name][inside]), name


@pytest.mark.parametrize("formats", [{}, {"state": "bf16", "grad": "f16"}, {"param": "bf16", "copy": "f16"}], ids=str)
def test_one_call_serves_groups_by_a_segment_table(formats: dict[str, object]) -> None:
    rows = [
        (100, 1e-2, 0.1, 0.9, 0.999),
        (356, 1e-3, 0.0, 0.8, 0.99),
        (356, 9.0, 9.0, 0.0, 0.0),
        (9000, 5e-3, 0.2, 0.4, 0.9),
    ]
    together = make(ADAMW, 9000, **formats)
    x = together.clone()
    call(ADAMW, together, segments=rows, seed=2)
    begin = 0
    for end, lr, decay, beta1, beta2 in rows:
        if end == begin:
            continue
        views = Operands(end - begin, x.dtypes, {name: array[begin:end] for name, array in x.arrays.items()})
        one = Step(
            "row",
            zok.adam_step,
            ADAMW.oracle,
            "exp_avg",
            "exp_avg_sq",
            {"lr": lr, "weight_decay": decay, "betas": (beta1, beta2)},
        )
        call(one, views, element_offset=begin, seed=2)
        begin = end
    assert same_bits(together, x)


def test_a_segment_boundary_inside_a_block_keeps_one_scale() -> None:
    x = make(ADAMW, 4 * BLOCK, state="int8")
    before = x.clone()
    rows = [(300, 1e-2, 0.0, 0.9, 0.999), (4 * BLOCK, 1e-3, 0.1, 0.5, 0.9)]
    call(ADAMW, x, segments=rows)
    for begin, end, row in ((0, 300, rows[0]), (300, 4 * BLOCK, rows[1])):
        options = {"lr": row[1], "weight_decay": row[2], "betas": row[3:]}
        wanted = expect(Step("row", zok.adam_step, ADAMW.oracle, "exp_avg", "exp_avg_sq", options), before)
        assert np.allclose(x.values("param")[begin:end], wanted.param[begin:end], rtol=1e-5, atol=1e-6)
        assert np.allclose(
            x.values("first")[begin:end], wanted.first[begin:end], rtol=0.07, atol=1e-3 * abs(wanted.first).max()
        )


@pytest.mark.parametrize("copy", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("misalignment", [0, 1])
def test_the_copy_is_the_new_weights_rounded_to_nearest(copy: str, misalignment: int) -> None:
    n = 5003
    x = make(ADAMW, n, copy=copy)
    memory = np.zeros(n + 64, x.arrays["copy"].dtype)
    x.arrays["copy"] = memory[misalignment : misalignment + n]
    call(ADAMW, x)
    param = x.arrays["param"]
    wanted = reference.bf16_nearest(param) if copy == "bf16" else param.astype(x.arrays["copy"].dtype)
    assert np.array_equal(x.arrays["copy"], wanted)
    assert not memory[:misalignment].any() and not memory[misalignment + n :].any()


def encoded(x: np.ndarray, name: str, dtype: str, **where: int) -> dict[str, np.ndarray]:
    """The memory of a moment that is stored in 16 or 8 bits, as the reference writes it."""
    stream = {"stochastic": name == "second", "stream": "second_moment", **where}
    if dtype == "int8":
        code = "u5e3" if name == "second" else "e4m3"
        return dict(zip((name, f"{name}_scale"), reference.quantize(x, code, BLOCK, **stream), strict=True))
    if name == "first":
        return {name: reference.bf16_nearest(x)}
    index = where["element_offset"] + np.arange(x.size)
    random = reference.random_bits(where["seed"], where["step"], "second_moment", index)
    return {name: reference.bf16_stochastic(x, random >> 16)}


@EVERY_STEP
@pytest.mark.parametrize("state", ["bf16", "int8"])
@pytest.mark.parametrize("param", ["f32", "bf16", "exact"])
def test_low_precision_steps_are_the_float32_step_between_decode_and_encode(step: Step, state: str, param: str) -> None:
    n, where = 5003, {"seed": 11, "step": 3, "element_offset": (1 << 32) - 8 * BLOCK}
    dtype = "f32" if param == "f32" else "bf16"
    low = make(step, n, param=dtype, grad="bf16", state=state, exact=param == "exact", spread=4.0)
    wide = make(step, n, grad="bf16")
    for name in ("param", "first", "second"):
        if name in wide.arrays:
            wide.arrays[name] = low.values(name).astype(np.float32)
    wide.arrays["grad"] = low.arrays["grad"]
    for x in (low, wide):
        call(step, x, number=where["step"], seed=where["seed"], element_offset=where["element_offset"])
    wanted = {"param": wide.arrays["param"], "grad": low.arrays["grad"]}
    if param == "exact":
        wanted["param"], wanted["low"] = reference.bf16_split(wide.arrays["param"])
    elif param == "bf16":
        index = where["element_offset"] + np.arange(n)
        random = reference.random_bits(where["seed"], where["step"], "parameter", index)
        wanted["param"] = reference.bf16_stochastic(wide.arrays["param"], random >> 16)
    for name in ("first", "second"):
        if name in wide.arrays:
            wanted |= encoded(wide.arrays[name], name, state, **where)
    assert wanted.keys() == low.arrays.keys()
    for name, array in wanted.items():
        assert np.array_equal(array, low.arrays[name]), name


def test_bf16_weights_round_to_a_neighbour_and_are_right_on_average() -> None:
    n, draws = 4096, 400
    x = make(ADAMW, n, param="bf16")
    wanted = expect(ADAMW, x).param
    total = np.zeros(n)
    for seed in range(draws):
        y = x.clone()
        call(ADAMW, y, seed=seed)
        values = y.values("param").astype(np.float64)
        total += values
        assert np.all(abs(values - wanted) <= abs(wanted) * 2**-7 + 1e-12)
    gap = abs(wanted) * 2**-7
    assert np.all(abs(total / draws - wanted) <= gap * 6 / np.sqrt(draws) + 1e-12)
    assert abs(np.mean((total / draws - wanted) / gap)) < 5 / np.sqrt(draws * n)


def test_a_weight_that_bf16_holds_does_not_move_without_an_update() -> None:
    x = make(STEPS[6], 4096, param="bf16")
    before = x.arrays["param"].copy()
    zok.sgd_step(x.arrays["param"], np.zeros(4096, np.float32), None, 4096, step=1, lr=1.0, param_dtype="bf16")
    assert np.array_equal(x.arrays["param"], before)


def test_bf16_with_a_remainder_is_the_float32_step() -> None:
    single = make(ADAMW, 3000)
    rng = np.random.default_rng(4)
    single.arrays["param"] = rng.integers(0, 0x7F000000, 3000).astype(np.uint32).view(np.float32)
    bits = single.arrays["param"].view(np.uint32).astype(np.uint64)
    split = Operands(3000, {**single.dtypes, "param_dtype": "bf16"}, {k: v.copy() for k, v in single.arrays.items()})
    split.arrays["param"] = ((bits + 0x8000) >> 16).astype(np.uint16)
    split.arrays["low"] = (bits & 0xFFFF).astype(np.uint16)
    for number in (1, 2, 3):
        call(ADAMW, single, number=number)
        call(ADAMW, split, number=number)
    assert np.array_equal(split.values("param"), single.arrays["param"])
    high = reference.bf16_values(split.arrays["param"])
    assert np.all(abs(high - single.arrays["param"]) <= abs(single.arrays["param"]) * 2**-8)


@EVERY_STEP
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["param", "grad", "first", "second"])
def test_nan_and_inf_reach_the_results_that_exact_arithmetic_gives_them(step: Step, bad: float, place: str) -> None:
    x = make(step, 64)
    if place not in x.arrays or (place == "second" and bad < 0):
        pytest.skip("this rule has no such operand, or it cannot be negative")
    x.arrays[place][[0, 17, 63]] = bad
    wanted = expect(step, x)
    call(step, x)
    for name, value in (("param", wanted.param), ("first", wanted.first), ("second", wanted.second)):
        if value is None:
            continue
        got = x.arrays[name]
        assert np.array_equal(np.isnan(got), np.isnan(value)), name
        assert np.array_equal(np.isinf(got), np.isinf(value)), name
        assert np.all(np.sign(got[np.isinf(got)]) == np.sign(value[np.isinf(got)])), name
