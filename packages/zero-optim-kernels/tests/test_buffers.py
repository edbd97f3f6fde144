"""Norms, scans, casts, scaling and sums against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

import zero_optim_kernels as zok
from zero_optim_kernels import reference

SIZES = (0, 1, 7, 31, 33, 1000, 1024, 65535, 65537, 200_003)


def awkward_floats() -> np.ndarray:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(0x8000)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        between = (halves[:-1].astype(np.float64) + halves[1:].astype(np.float64)) / 2
        return np.concatenate([bits.view(np.float32), ties.view(np.float32), halves, between.astype(np.float32)])


def equal_or_both_nan(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.all((a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("n", SIZES)
def test_norm_is_the_float64_sum_whatever_the_threads(dtype: str, n: int) -> None:
    x = reference.stored(np.random.default_rng(n).standard_normal(n), dtype)
    got = zok.l2_norm_squared(x, n, dtype=dtype, threads=1)
    wide = reference.values(x, dtype).astype(np.float64)
    assert got == pytest.approx(reference.l2_norm_squared(wide), rel=1e-14)
    assert got == zok.l2_norm_squared(x, n, dtype=dtype, threads=2)
    assert got == zok.l2_norm_squared(x, n, dtype=dtype, threads=7)
    assert zok.l2_norm(x, n, dtype=dtype) == math.sqrt(got)


def test_norm_of_a_list_is_the_sum_in_order() -> None:
    parts = [np.random.default_rng(i).standard_normal(70_000 + i).astype(np.float32) for i in range(5)]
    one_by_one = 0.0
    for part in parts:
        for begin in range(0, part.size, 65536):
            piece = part[begin : begin + 65536]
            one_by_one += zok.l2_norm_squared(piece, piece.size)
    assert zok.l2_norm_squared(parts, [p.size for p in parts]) == one_by_one


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("block", [1, 31, 256, 65536])
def test_norms_of_blocks_are_added_in_the_documented_order(dtype: str, block: int) -> None:
    for n in SIZES:
        x = reference.stored(np.random.default_rng(n).standard_normal(n), dtype)
        wanted = reference.l2_norms_squared(reference.values(x, dtype), block)
        for threads in (1, 3):
            got = np.full(-(-n // block), np.nan)
            zok.l2_norms_squared(x, got, n, block=block, dtype=dtype, threads=threads)
            assert np.array_equal(got, wanted)


def test_a_block_that_is_no_block_is_refused() -> None:
    x, out = np.ones(10, np.float32), np.full(10, 7.0)
    for block in (0, 65537):
        with pytest.raises(ValueError, match="block must be from 1 to 65536, got"):
            zok.l2_norms_squared(x, out, 10, block=block)
    with pytest.raises(ValueError, match="out"):
        zok.l2_norms_squared(x, out[:4], 10, block=2)
    assert (out == 7).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
def test_nonfinite_elements_are_counted_and_reach_the_norm(dtype: str, bad: float) -> None:
    x = np.ones(100_001)
    x[[0, 33, 100_000]] = bad
    data = reference.stored(x, dtype)
    assert zok.count_nonfinite(data, data.size, dtype=dtype) == reference.count_nonfinite(data, dtype) == 3
    assert not math.isfinite(zok.l2_norm_squared(data, data.size, dtype=dtype))
    clean = reference.stored(np.full(5000, 65504.0), dtype)
    assert zok.count_nonfinite(clean, clean.size, dtype=dtype) == 0


def test_casts_round_to_nearest_even_and_keep_nan() -> None:
    x = awkward_floats()
    for out_dtype in ("bf16", "f16", "f64"):
        wanted = reference.cast(x, "f32", out_dtype)
        got = np.empty(x.size, wanted.dtype)
        zok.cast(x, got, x.size, dtype="f32", out_dtype=out_dtype)
        assert equal_or_both_nan(got, wanted)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64"])
@pytest.mark.parametrize("out_dtype", ["f32", "bf16", "f16", "f64"])
def test_casts_between_other_dtypes_go_through_float32(dtype: str, out_dtype: str) -> None:
    rng = np.random.default_rng(3)
    x = reference.stored(rng.standard_normal(5003) * np.exp(12 * rng.standard_normal(5003)), dtype)
    wanted = reference.cast(x, dtype, out_dtype)
    got = np.empty(x.size, wanted.dtype)
    zok.cast(x, got, x.size, dtype=dtype, out_dtype=out_dtype)
    assert equal_or_both_nan(got, wanted)


def test_every_16_bit_pattern_widens_exactly_and_comes_back() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    out = np.empty(patterns.size, np.float32)
    zok.cast(patterns, out, patterns.size, dtype="bf16", out_dtype="f32")
    assert np.array_equal(out.view(np.uint32), patterns.astype(np.uint32) << 16)
    zok.cast(patterns, out, patterns.size, dtype="f16", out_dtype="f32")
    assert equal_or_both_nan(out, patterns.view(np.float16).astype(np.float32))
    back = np.empty(patterns.size, np.uint16)
    zok.cast(out, back, patterns.size, dtype="f32", out_dtype="f16")
    assert equal_or_both_nan(back.view(np.float16), patterns.view(np.float16))


@pytest.mark.parametrize("misalignment", [0, 1, 3, 8])
@pytest.mark.parametrize("n", SIZES)
def test_casts_write_exactly_n_elements_at_any_alignment(n: int, misalignment: int) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    memory = np.full(n + misalignment + 5, 0xABCD, np.uint16)
    zok.cast(x, memory[misalignment : misalignment + n], n, dtype="f32", out_dtype="bf16", threads=2)
    assert np.array_equal(memory[misalignment : misalignment + n], reference.bf16_nearest(x))
    assert np.all(memory[:misalignment] == 0xABCD)
    assert np.all(memory[misalignment + n :] == 0xABCD)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
def test_scale_multiplies_in_the_wider_dtype(dtype: str) -> None:
    x = reference.stored(np.random.default_rng(2).standard_normal(5001), dtype)
    expected = reference.scale(x, 0.3, dtype)
    zok.scale(x, x.size, 0.3, dtype=dtype)
    assert np.array_equal(x, expected)


@pytest.mark.parametrize("out_dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_sum_of_slices_adds_in_order_and_divides_once(dtype: str, out_dtype: str, count: int) -> None:
    n = 70_001
    rng = np.random.default_rng(count)
    slices = [reference.stored(rng.standard_normal(n), dtype) for _ in range(count)]
    expected = reference.sum_slices(slices, dtype, out_dtype, count)
    for threads in (1, 3):
        out = np.empty(n, expected.dtype)
        zok.sum_slices(slices, out, n, dtype=dtype, out_dtype=out_dtype, divisor=count, threads=threads)
        assert np.array_equal(out, expected)


def test_sum_of_slices_may_write_to_one_of_them() -> None:
    a, b = (np.random.default_rng(i).standard_normal(5000).astype(np.float32) for i in (1, 2))
    expected = (a + b) / np.float32(3)
    zok.sum_slices([a, b], b, 5000, dtype="f32", divisor=3)
    assert np.array_equal(b, expected)


def test_addresses_and_buffers_are_the_same_operands() -> None:
    x = np.random.default_rng(3).standard_normal(100).astype(np.float32)
    assert zok.l2_norm(x.ctypes.data, 100) == zok.l2_norm(x, 100) == zok.l2_norm(memoryview(x).cast("B"), 100)
