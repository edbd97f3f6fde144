"""Block quantisation and 8-bit optimizer state."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_support import BLOCK, STEPS, call, make

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
    out = reference.stored(np.zeros(n), dtype)
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
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("block", [2, 64, 256, 2048, 5000])
def test_payloads_scales_and_values_are_the_references_bit_for_bit(
    code: str, stochastic: bool, dtype: str, block: int
) -> None:
    n = 10_001
    stored = reference.stored(sample(n, code), dtype)
    where = {"seed": 5, "step": 3, "element_offset": (1 << 33) - 2**12} if stochastic else {}
    payload, scales = encode(stored, code, block, dtype=dtype, stochastic=stochastic, **where)
    wanted = reference.quantize(reference.values(stored, dtype), code, block, stochastic=stochastic, **where)
    assert np.array_equal(payload, wanted[0]) and np.array_equal(scales, wanted[1])
    got = decode(payload, scales, n, code, block)
    assert np.array_equal(got, reference.dequantize(payload, scales, n, code, block))


def table(code: str) -> np.ndarray:
    """The value of every code that is not negative, in order."""
    if code in ("int8", "int4"):
        return np.arange(LARGEST[code] + 1)
    if code == "e4m3":
        return np.array([reference.decode_e4m3(c) for c in range(0x7F)])
    return np.array([reference.decode_u5e3(c) for c in range(256)])


def critical(code: str) -> np.ndarray:
    """Every code's value, every tie, their neighbours in float32, all bf16 numbers, and a fine sweep."""
    points = table(code)
    exact = np.concatenate([points, (points[1:] + points[:-1]) / 2]).astype(np.float32)
    beside = [np.nextafter(exact, np.float32(to)) for to in (-np.inf, np.inf)]
    every_bf16 = reference.bf16_values(np.arange(0x7F80, dtype=np.uint32).astype(np.uint16))
    sweep = np.exp(np.linspace(np.log(2.0**-40), np.log(points[-1]), 200_000)).astype(np.float32)
    return np.concatenate([exact, *beside, every_bf16, sweep])


# The largest value of u5e3 is no bf16 number.
@pytest.mark.parametrize(("code", "dtype"), [*((c, "f32") for c in CODES), *((c, "bf16") for c in CODES[:3])])
@pytest.mark.parametrize("scale", [1.0, 2.0**-80, 2.0**70])
def test_codes_are_the_nearest_and_the_even_one_at_a_tie(code: str, scale: float, dtype: str) -> None:
    top = np.float32(LARGEST[code]) if code != "u5e3" else np.float32(1.875) * np.float32(1 - 2.0**-22)
    x = critical(code)
    x = x[(x >= 0) & (x <= top)]
    x = np.concatenate([[top], x] if code == "u5e3" else [[top], x, -x]).astype(np.float32)
    if dtype == "bf16":
        x = np.unique(reference.bf16_values(reference.bf16_nearest(x)))
        x = x[: x.size // 2 * 2]
    stored = reference.stored(x * np.float32(scale), dtype)
    payload, scales = encode(stored, code, x.size + x.size % 2, dtype=dtype)
    assert scales.tolist() == [scale]
    values = decode(payload, np.ones(1, np.float32), x.size, code, x.size + x.size % 2).astype(np.float64)
    points = table(code)
    magnitude = abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(points, magnitude), 1, points.size - 1)
    low, high = magnitude - points[above - 1], points[above] - magnitude
    nearest = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    assert np.array_equal(abs(values), points[nearest])
    assert np.array_equal(np.signbit(values), np.signbit(x)) or code in ("int8", "int4")
    assert np.all(values * x >= 0)


def test_e4m3_codes_are_torchs_float8_casts() -> None:
    torch = pytest.importorskip("torch")
    x = critical("e4m3")
    x = np.concatenate([[448], x[x <= 448], -x[x <= 448]]).astype(np.float32)
    payload, _ = encode(x, "e4m3", x.size + x.size % 2)
    assert np.array_equal(payload, torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy())


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
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("block", [64, 2048])
@pytest.mark.parametrize("scale", [1e-3, np.inf, np.nan])
def test_dequantising_to_16_bits_rounds_the_float32_value(code: str, dtype: str, block: int, scale: float) -> None:
    n = 3 * 2048 + 331
    payload = np.random.default_rng(0).integers(0, 256, -(-n // 2) if code == "int4" else n, np.uint8)
    payload[:256] = np.arange(256)
    scales = np.full(-(-n // block), scale, np.float32)
    scales[-1] = 1e-39
    wanted = reference.stored(decode(payload, scales, n, code, block), dtype)
    wanted = reference.values(wanted, dtype)
    for first in range(5):
        memory = reference.stored(np.full(n + 32, 3.0), dtype)
        zok.dequantize_blocks(payload, scales, memory[first : first + n], n, code=code, block=block, dtype=dtype)
        got = reference.values(memory, dtype)
        assert np.array_equal(got[first : first + n], wanted, equal_nan=True)
        assert np.all(got[:first] == 3) and np.all(got[first + n :] == 3)


@EVERY_CODE
@pytest.mark.parametrize("n", [4096, 4094, 4093])
def test_payloads_of_bf16_do_not_depend_on_where_memory_lies(code: str, n: int) -> None:
    x = np.zeros(n + 8, np.uint16)
    wanted = None
    for first, shift in ((0, 0), (1, 0), (0, 1), (3, 2), (0, 16)):
        x[first : first + n] = reference.bf16_nearest(sample(n, code))
        memory = np.full(n + 64, 0xAA, np.uint8)
        scales = np.zeros(2, np.float32)
        payload = memory[shift : shift + (-(-n // 2) if code == "int4" else n)]
        zok.quantize_blocks(x[first : first + n], payload, scales, n, code=code, block=2048, dtype="bf16")
        assert np.all(memory[:shift] == 0xAA) and np.all(memory[shift + payload.size :] == 0xAA)
        wanted = wanted or payload.tobytes()
        assert payload.tobytes() == wanted


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
