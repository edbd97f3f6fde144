"""Digests of blocks of bytes: they tell whether memory was changed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import zero_optim_kernels as zok

BLOCK = 1000


def digests(x: np.ndarray, threads: int = 1) -> list[int]:
    out = np.zeros(-(-x.nbytes // BLOCK), np.uint64)
    zok.digests(x.view(np.uint8), out.view(np.uint8), x.nbytes, block=BLOCK, threads=threads)
    return [int(value) for value in out]


def weights(n: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(n).astype(np.float32)


def test_every_flipped_bit_changes_the_digest_of_its_block_alone() -> None:
    x = weights(700).view(np.uint8)
    before = digests(x)
    for byte in range(0, x.size, 7):
        for bit in range(8):
            x[byte] ^= 1 << bit
            changed = [a != b for a, b in zip(digests(x), before, strict=True)]
            assert changed == [block == byte // BLOCK for block in range(len(before))]
            x[byte] ^= 1 << bit


@pytest.mark.parametrize("n", [1, 2, 16, 17, 250])
def test_changes_of_many_elements_change_it(n: int) -> None:
    x = weights(n)
    with np.errstate(all="ignore"):
        others = [-x, x[::-1].copy(), np.roll(x, 1), np.roll(x, 8), np.roll(x, 16), x * 0, np.abs(x) * -1, x + 1, x * 2]
    others = [y for y in others if y.tobytes() != x.tobytes()]
    for y in others:
        assert digests(x) != digests(y)
    pairs = [(i, j) for i in range(n) for j in range(i)]
    for i, j in pairs[:500]:  # two signs
        y = x.copy()
        y[[i, j]] *= -1
        assert digests(x) != digests(y)


def changed_signs(x: np.ndarray, first: int, offsets: tuple[int, ...]) -> np.ndarray:
    y = x.copy()
    y[[first + offset for offset in offsets]] *= -1
    return y


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_signs_that_change_in_a_pattern_change_it(dtype: type) -> None:
    x = weights(128).astype(dtype)
    near = [0, 1, 2, 4, 8, 15, 16, 17, 31, 32, 33, 34, 63, 64]
    patterns = [p for size in (1, 2, 3, 4) for p in itertools.combinations(near, size)]
    for first in (0, 1, 3):
        for pattern in patterns:
            assert digests(changed_signs(x, first, pattern)) != digests(x), (first, pattern)


def test_zeros_of_different_lengths_differ() -> None:
    assert len({digests(np.zeros(n, np.uint8))[0] for n in range(1, 200)}) == 199


def test_threads_and_alignment_do_not_matter() -> None:
    x = weights(50_000)
    moved = np.zeros(x.nbytes + 3, np.uint8)[3:]
    moved[:] = x.view(np.uint8)
    assert digests(x, 1) == digests(x, 4) == digests(moved, 2)


def test_wrong_arguments() -> None:
    x, out = np.zeros(10, np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="block must be 1 or more"):
        zok.digests(x, out, 10, block=0)
    with pytest.raises(ValueError, match="expected 11 bytes"):
        zok.digests(x, out, 11, block=100)
    with pytest.raises(ValueError, match="out: expected 16 bytes"):
        zok.digests(x, out, 10, block=5)
    with pytest.raises(TypeError, match="x: expected an address or buffer, got None"):
        zok.digests(None, out, 10, block=10)  # type: ignore[arg-type]
