"""Block quantisation and 8-bit optimizer state."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_support import BLOCK, STEPS, bf16_bits, bf16_values, call, make, store

import zero_optim_kernels as zok
from zero_optim_kernels import reference

ADAMW, ADAGRAD, LION = STEPS[0], STEPS[4], STEPS[5]
CODES = ("int8", "int4", "e4m3", "u5e3")
LARGEST = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0, "u5e3": 1.875}
EVERY_CODE = pytest.mark.parametrize("code", CODES)


def sample(n: int, code: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * np.exp(rng.standard_normal(n))).astype(np.float32)
    return abs(x) if code == "u5e3" else x


def encode(x: np.ndarray, code: str, block: int, **more: object) -> tuple[np.ndarray, np.ndarray]:
    n = x.size
    payload = np.full(-(-n // 2) if code == "int4" else n, 0xAA, np.uint8)
    scales = np.full(-(-n // block), -1, np.float32)
    zok.quantize_blocks(x, payload, scales, n, code=code, block=block, **more)
    return payload, scales


def decode(payload: np.ndarray, scales: np.ndarray, n: int, code: str, block: int, dtype: str = "f32") -> np.ndarray:
    out = store(np.zeros(n), dtype)
    zok.dequantize_blocks(payload, scales, out, n, code=code, block=block, dtype=dtype)
    return out


def spacing(values: np.ndarray, scales: np.ndarray, code: str, block: int) -> np.ndarray:
    """The distance between the two codes around each value."""
    scale = np.repeat(scales.astype(np.float64), block)[: values.size]
    if code in ("int8", "int4"):
        return scale
    smallest = 2.0**-6 if code == "e4m3" else 2.0**-31
    exponent = np.floor(np.log2(np.maximum(abs(values) / np.maximum(scale, 1e-300), smallest)))
    return scale * 2.0**exponent / 8


@EVERY_CODE
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("block", [2, 64, 256, 2048, 5000])
def test_codes_are_nearest_and_scales_are_the_blocks_largest_magnitude(code: str, dtype: str, block: int) -> None:
    n = 10_001
    stored = store(sample(n, code), dtype)
    x = (bf16_values(stored) if dtype == "bf16" else stored).astype(np.float64)
    payload, scales = encode(stored, code, block, dtype=dtype)
    wanted = [abs(x[b : b + block]).max() / LARGEST[code] for b in range(0, n, block)]
    assert np.allclose(scales, wanted, rtol=1e-6)
    got = decode(payload, scales, n, code, block)
    assert np.allclose(got, reference.dequantize(payload, scales, n, code, block), rtol=1e-6)
    slack = 1.01 if code == "e4m3" else 1.0001  # e4m3 passes through half precision
    assert np.all(abs(got - x) <= slack * spacing(x, scales, code, block) / 2 + 1e-30)


@EVERY_CODE
def test_stochastic_codes_are_a_neighbour_and_right_on_average(code: str) -> None:
    n, draws = 4096, 300
    x = sample(n, code, 3)
    total = np.zeros(n)
    for seed in range(draws):
        payload, scales = encode(x, code, BLOCK, stochastic=True, seed=seed)
        got = decode(payload, scales, n, code, BLOCK).astype(np.float64)
        assert np.all(abs(got - x) <= 1.001 * spacing(np.maximum(abs(got), abs(x)), scales, code, BLOCK) + 1e-30)
        total += got
    gap = spacing(x, scales, code, BLOCK)
    assert np.all(abs(total / draws - x) <= 8 * gap / np.sqrt(draws))
    assert abs(np.mean((total / draws - x) / gap)) < 5 / np.sqrt(draws * n)


def test_random_numbers_of_neighbours_and_of_steps_are_unrelated() -> None:
    n = 1 << 16
    x = np.full(n, 0.5, np.float32)
    x[::BLOCK] = 127.0
    ups = []
    for step in range(8):
        payload, _ = encode(x, "int8", BLOCK, stochastic=True, step=step)
        ups.append(np.delete(payload, np.arange(0, n, BLOCK)).astype(np.float64) - 0.5)
    for bits in ups:
        assert abs(bits.mean()) < 0.01
        for lag in (1, 2, 3, 15, 16, 255):
            assert abs(np.mean(bits[lag:] * bits[:-lag])) < 0.006
    for a in range(8):
        for b in range(a):
            assert abs(np.mean(ups[a] * ups[b])) < 0.006


@EVERY_CODE
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_nan_or_inf_is_not_finite_afterwards_and_others_are_untouched(code: str, bad: float) -> None:
    x = sample(4 * BLOCK, code)
    clean = decode(*encode(x, code, BLOCK), x.size, code, BLOCK)
    x[BLOCK + 7] = bad
    got = decode(*encode(x, code, BLOCK), x.size, code, BLOCK)
    assert not np.isfinite(got[BLOCK : 2 * BLOCK]).any()
    assert np.array_equal(got[2 * BLOCK :], clean[2 * BLOCK :])


@EVERY_CODE
def test_blocks_of_zeros_and_of_tiny_numbers_are_zero(code: str) -> None:
    x = np.zeros(2 * BLOCK, np.float32)
    x[BLOCK:] = 1e-40
    payload, scales = encode(x, code, BLOCK)
    assert not payload.any() and not scales.any()
    assert not decode(payload, scales, x.size, code, BLOCK).any()


@EVERY_CODE
def test_dequantising_to_bf16_rounds_the_float32_value(code: str) -> None:
    x = sample(3001, code)
    payload, scales = encode(x, code, 64)
    single = decode(payload, scales, x.size, code, 64)
    assert np.array_equal(decode(payload, scales, x.size, code, 64, "bf16"), bf16_bits(single))


@EVERY_CODE
@pytest.mark.parametrize("stochastic", [False, True])
def test_payloads_do_not_depend_on_threads(code: str, stochastic: bool) -> None:
    x = sample(300_001, code)
    one = encode(x, code, BLOCK, stochastic=stochastic, threads=1)
    many = encode(x, code, BLOCK, stochastic=stochastic, threads=4)
    assert all(np.array_equal(a, b) for a, b in zip(one, many, strict=True))


def test_the_second_moment_has_no_zero_beside_larger_elements() -> None:
    x = np.full(BLOCK, 1e-30, np.float32)
    x[0] = 1.0
    payload, scales = encode(x, "u5e3", BLOCK)
    assert np.all(decode(payload, scales, BLOCK, "u5e3", BLOCK) > 0)


def test_8_bit_state_starts_at_zero_and_zero_blocks_stay_zero() -> None:
    n = 4 * BLOCK
    x = make(ADAMW, n, state="int8")
    for name in ("first", "second", "first_scale", "second_scale"):
        x.arrays[name][:] = 0
    x.arrays["grad"][: 2 * BLOCK] = 0
    for step in (1, 2, 3):
        call(ADAMW, x, number=step)
    for name in ("first", "second"):
        assert not x.values(name)[: 2 * BLOCK].any()
        assert x.values(name)[2 * BLOCK :].any()


def test_8_bit_state_takes_at_most_2_1_bytes_per_parameter() -> None:
    x = make(ADAMW, 1 << 16, state="int8")
    held = sum(x.arrays[name].nbytes for name in ("first", "second", "first_scale", "second_scale"))
    assert held / (1 << 16) <= 2.1


def test_8_bit_steps_stay_close_to_float32_steps() -> None:
    n = 8192
    single, coded = make(ADAMW, n), make(ADAMW, n, state="int8")
    coded.arrays["param"] = single.arrays["param"].copy()
    for x in (single, coded):
        for name in ("first", "second", "first_scale", "second_scale"):
            if name in x.arrays:
                x.arrays[name][:] = 0
    rng = np.random.default_rng(0)
    start = single.arrays["param"].copy()
    for step in range(1, 31):
        gradient = (rng.standard_normal(n) + 0.5).astype(np.float32)
        single.arrays["grad"] = coded.arrays["grad"] = gradient
        call(ADAMW, single, number=step)
        call(ADAMW, coded, number=step, seed=1)
    moved = np.linalg.norm(single.arrays["param"] - start)
    assert np.linalg.norm(single.arrays["param"] - coded.arrays["param"]) < 0.05 * moved


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_the_second_moment_follows_a_tenfold_drop_of_the_gradients(state: str) -> None:
    n, beta2 = 4096, 0.99
    rng = np.random.default_rng(1)
    x = make(ADAMW, n, state=state)
    magnitude = np.exp(rng.standard_normal(n)).astype(np.float32)
    exact = np.zeros(n)
    for name in ("first", "second", "first_scale", "second_scale"):
        if name in x.arrays:
            x.arrays[name][:] = 0
    a = x.arrays
    for step in range(1, 1501):
        gradient = magnitude * rng.standard_normal(n).astype(np.float32) * np.float32(1.0 if step <= 500 else 0.1)
        exact = beta2 * exact + (1 - beta2) * gradient.astype(np.float64) ** 2
        scales = {"exp_avg_scale": a["first_scale"], "exp_avg_sq_scale": a["second_scale"]} if state == "int8" else {}
        zok.adam_step(
            *(a["param"], gradient, a["first"], a["second"], n),
            step=step,
            lr=1e-3,
            betas=(0.9, beta2),
            state_dtype=state,
            **scales,
        )
    assert abs(np.median(x.values("second") / exact) - 1) < 0.1


@pytest.mark.parametrize("step", [ADAGRAD, LION], ids=str)
def test_other_rules_keep_8_bit_state_close(step: object) -> None:
    single, coded = make(step, 4096, spread=0.5), make(step, 4096, spread=0.5, state="int8")
    call(step, single)
    call(step, coded)
    name = "second" if step is ADAGRAD else "first"
    wanted = single.arrays[name]
    assert np.linalg.norm(coded.values(name) - wanted) < 0.06 * np.linalg.norm(wanted)
