"""LAMB in its two calls."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_support import unit_in_last_place

import zero_optim_kernels as zok
from zero_optim_kernels import reference

OPTIONS = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def operands(n: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    p, g, m = (rng.standard_normal(n).astype(np.float32) for _ in range(3))
    return [p, g, m, abs(rng.standard_normal(n)).astype(np.float32)]


def ratio(norms: tuple[float, float]) -> float:
    weight, update = norms
    return float(np.sqrt(weight / update)) if weight > 0 and update > 0 else 1.0


@pytest.mark.parametrize("n", [1, 100, 40_000])
def test_two_calls_are_the_papers_step(n: int) -> None:
    p, g, m, v = operands(n)
    wanted = reference.lamb(p, g, m, v, step=4, lr=0.01, **OPTIONS)
    update = np.empty(n, np.float32)
    norms = zok.lamb_step(p, g, m, v, update, n, step=4, **OPTIONS)
    assert norms[0][0] == zok.l2_norm_squared(p, n) or n > 1024  # the same sum; larger ones are summed tile by tile
    assert np.allclose(update, wanted.direction, rtol=1e-5, atol=1e-6)
    zok.lamb_apply(p, update, n, step=4, steps=[(n, 0.01 * ratio(norms[0]))])
    assert np.all(abs(p - wanted.param) <= 4 * unit_in_last_place(wanted.param_term))
    assert np.all(abs(m - wanted.first) <= 2 * unit_in_last_place(wanted.first_term))
    assert np.all(abs(v - wanted.second) <= 2 * unit_in_last_place(wanted.second_term))


def test_norms_are_per_row_and_add_up_over_a_split() -> None:
    n, rows = 200_000, [(1000, 0.0, 0.1, 0.9, 0.99), (150_001, 0.0, 0.0, 0.9, 0.99), (200_000, 0.0, 0.2, 0.8, 0.9)]
    whole, parts = operands(n), operands(n)
    update, pieces = np.empty(n, np.float32), np.empty(n, np.float32)
    norms = zok.lamb_step(*whole, update, n, step=1, segments=rows, threads=1)
    assert norms == zok.lamb_step(*operands(n), update, n, step=1, segments=rows, threads=3)
    total = np.zeros((3, 2))
    for begin, end in ((0, 70_000), (70_000, n)):
        table = [(min(row[0], end) - begin, *row[1:]) for row in rows if row[0] > begin]
        table = table[: next(i for i, row in enumerate(table) if row[0] == end - begin) + 1]
        got = zok.lamb_step(
            *(x[begin:end] for x in parts), pieces[begin:end], end - begin, step=1, segments=table, element_offset=begin
        )
        first = sum(row[0] <= begin for row in rows)
        total[first : first + len(got)] += got
    assert np.array_equal(update, pieces)
    assert np.allclose(total, norms, rtol=1e-13)
    begin = 0
    for (end, *_), (weight, direction) in zip(rows, norms, strict=True):
        assert weight == pytest.approx(reference.l2_norm_squared(whole[0][begin:end]), rel=1e-13)
        assert direction == pytest.approx(reference.l2_norm_squared(update[begin:end]), rel=1e-13)
        begin = end


def test_a_list_has_norms_and_factors_per_tensor() -> None:
    sizes = [10, 0, 5000]
    tensors = [operands(n, seed) for seed, n in enumerate(sizes)]
    updates = [np.empty(n, np.float32) for n in sizes]
    columns = [list(column) for column in zip(*tensors, strict=True)]
    norms = zok.lamb_step(*columns, updates, sizes, step=1, **OPTIONS)
    for (weight, direction), p, update in zip(norms, columns[0], updates, strict=True):
        assert weight == pytest.approx(reference.l2_norm_squared(p), rel=1e-13)
        assert direction == pytest.approx(reference.l2_norm_squared(update), rel=1e-13)
    before = [p.copy() for p in columns[0]]
    copies = [np.empty(n, np.uint16) for n in sizes]
    zok.lamb_apply(
        columns[0], updates, sizes, step=1, steps=[(0, 0.1), (0, 0.2), (0, 0.3)], copy_out=copies, copy_dtype="bf16"
    )
    for p, old, update, factor in zip(columns[0], before, updates, (0.1, 0.2, 0.3), strict=True):
        assert np.array_equal(p, old - np.float32(factor) * update)


def test_the_direction_may_replace_the_gradient() -> None:
    p, g, m, v = operands(3000)
    update = np.empty(3000, np.float32)
    zok.lamb_step(p, g, m.copy(), v.copy(), update, 3000, step=1, **OPTIONS)
    zok.lamb_step(p, g, m, v, g, 3000, step=1, **OPTIONS)
    assert np.array_equal(g, update)
