"""Prints a digest of what every kernel writes; run once per instruction set by test_isa.py."""

from __future__ import annotations

import hashlib
import itertools
import sys

import numpy as np
from kernel_support import BLOCK, STEPS, call, make

import zero_optim_kernels as zok
from zero_optim_kernels import reference


def absorb(digest: hashlib._Hash, array: np.ndarray, dtype: str = "") -> None:
    """Add the bytes; NaN counts as one value, because its sign and payload are the processor's."""
    if dtype == "bf16":
        array = reference.bf16_values(array)
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    digest.update(np.ascontiguousarray(array).tobytes())


def steps(digest: hashlib._Hash) -> None:
    formats = itertools.product(
        ["f32", "bf16"], ["f32", "bf16", "f16"], ["f32", "bf16", "int8"], ["f32", "bf16", "f16"]
    )
    for index, (param, grad, state, copy) in enumerate(formats):
        for step in STEPS:
            exact = param == "bf16" and index % 2 == 0
            x = make(
                step, 3 * 1024 + 13, param=param, grad=grad, state=state, copy=copy, exact=exact, spread=4.0, seed=index
            )
            call(step, x, number=1, seed=index, element_offset=BLOCK * index)
            call(step, x, number=2, seed=index, element_offset=BLOCK * index)
            dtypes = {"param": param, "grad": grad, "first": state, "second": state, "copy": copy}
            for name, array in x.arrays.items():
                absorb(digest, array, dtypes.get(name, ""))


def lamb(digest: hashlib._Hash) -> None:
    rng = np.random.default_rng(0)
    p, g, m, v, update = (abs(rng.standard_normal(70_001)).astype(np.float32) for _ in range(5))
    norms = zok.lamb_step(p, g, m, v, update, p.size, step=2, weight_decay=0.1)
    zok.lamb_apply(p, update, p.size, step=2, steps=[(p.size, 0.01)])
    digest.update(repr(norms).encode())
    for array in (p, m, v, update):
        absorb(digest, array)


def awkward(n: int) -> np.ndarray:
    """Every kind of float32: NaN, Inf, subnormal and ordinary ones."""
    return np.random.default_rng(5).integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32).view(np.float32)


def buffers(digest: hashlib._Hash) -> None:
    rng = np.random.default_rng(1)
    n = 140_003
    for dtype in ("f32", "bf16", "f16", "f64"):
        slices = [reference.stored(rng.standard_normal(n), dtype) for _ in range(3)]
        digest.update(repr(zok.l2_norm_squared(slices[0], n, dtype=dtype)).encode())
        norms = np.zeros(-(-n // 256))
        zok.l2_norms_squared(slices[0], norms, n, block=256, dtype=dtype)
        digest.update(norms.tobytes())
        for out_dtype in ("f32", "bf16", "f16", "f64"):
            out = reference.stored(np.zeros(n), out_dtype)
            zok.sum_slices(slices, out, n, dtype=dtype, out_dtype=out_dtype, divisor=3)
            absorb(digest, out)
        zok.scale(slices[1], n, 0.7, dtype=dtype)
        absorb(digest, slices[1])
    x = awkward(n)
    for dtype in ("bf16", "f16"):
        out = np.zeros(n, np.uint16)
        zok.cast(x, out, n, dtype="f32", out_dtype=dtype)
        digest.update(out.tobytes())
        digest.update(str(zok.count_nonfinite(out, n, dtype=dtype)).encode())


def blocks(digest: hashlib._Hash) -> None:
    n = 30_001
    normal = (
        np.random.default_rng(2).standard_normal(n) * np.exp(np.random.default_rng(3).standard_normal(n) * 3)
    ).astype(np.float32)
    for source, code, stochastic in itertools.product(
        (normal, awkward(n)), ("int8", "int4", "e4m3", "u5e3"), (False, True)
    ):
        payload = np.zeros((n + 1) // 2 if code == "int4" else n, np.uint8)
        scales, out = np.zeros(-(-n // 64), np.float32), np.zeros(n, np.float32)
        x = abs(source) if code == "u5e3" else source
        zok.quantize_blocks(x, payload, scales, n, code=code, block=64, stochastic=stochastic, seed=3)
        zok.dequantize_blocks(payload, scales, out, n, code=code, block=64)
        for array in (payload, scales, out):
            absorb(digest, array)
        low = np.zeros(n, np.uint16)
        for dtype in ("bf16", "f16"):
            zok.dequantize_blocks(payload, scales, low, n, code=code, block=64, dtype=dtype)
            absorb(digest, low if dtype == "bf16" else low.view(np.float16), dtype)
            zok.cast(x, low, n, dtype="f32", out_dtype=dtype)
            zok.quantize_blocks(
                low, payload, scales, n, code=code, block=64, dtype=dtype, stochastic=stochastic, seed=3
            )
            absorb(digest, payload)
            absorb(digest, scales)


def main() -> None:
    """One line: the instruction set and its digest."""
    digest = hashlib.sha256()
    with np.errstate(all="ignore"):
        for part in (steps, lamb, buffers, blocks):
            part(digest)
    sys.stdout.write(f"{zok.active_isa()} {digest.hexdigest()}\n")


if __name__ == "__main__":
    main()
