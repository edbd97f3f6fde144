"""Compares every step that writes apart with the same step in place, bit for bit; run once per instruction set by
test_apart.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from kernel_support import BLOCK, STEPS, Operands, Step, call, make, same_bits

import zero_optim_kernels as zok

GUARD = 64  # bytes around each result that must stay as they are
SIZES = (0, 1, 7, 16, 31, 255, 256, 257, 1023, 1025, 3 * 1024 + 13, 32768 + 300, 70_001)
WRITTEN = ("param", "low", "first", "second", "first_scale", "second_scale")


def formats() -> Iterator[dict[str, Any]]:
    """Every combination of dtypes that the kernels take."""
    lower = itertools.product(
        ("f32", "bf16"), ("f32", "bf16", "f16"), ("f32", "bf16", "int8"), (None, "f32", "bf16", "f16")
    )
    for param, grad, state, copy in lower:
        for exact in (False, True) if param == "bf16" else (False,):
            yield {"param": param, "grad": grad, "state": state, "copy": copy, "exact": exact}
    for copy in (None, "f32", "bf16", "f16"):
        yield {"param": "f64", "grad": "f64", "state": "f64", "copy": copy}


def argument(step: Step, name: str) -> str:
    """The kernel's argument for an array of the operands."""
    if name in ("param", "low"):
        return {"param": "param", "low": "param_low"}[name]
    kind, *rest = name.split("_")
    return "_".join([str(getattr(step, kind)), *rest])


class Apart:
    """Memory for results, filled with one byte, each ``shift`` items behind a multiple of 64 bytes."""

    def __init__(self, x: Operands, shift: int) -> None:
        self.memory: dict[str, np.ndarray] = {}
        self.arrays: dict[str, np.ndarray] = {}
        for name in WRITTEN:
            if name not in x.arrays:
                continue
            like = x.arrays[name]
            raw = np.full(like.nbytes + 2 * GUARD + 64 + shift * like.itemsize, 0xA5, np.uint8)
            begin = -raw.ctypes.data % 64 + GUARD + shift * like.itemsize
            self.memory[name] = raw
            self.arrays[name] = raw[begin : begin + like.nbytes].view(like.dtype)

    def untouched_around(self) -> bool:
        """Whether every byte that is no result has its first value."""
        return all(
            int((raw != 0xA5).sum()) <= int((self.arrays[name].view(np.uint8) != 0xA5).sum())
            for name, raw in self.memory.items()
        )


def compare(step: Step, x: Operands, shift: int, **more: Any) -> None:
    """Run a step in place and apart, and compare all memory."""
    inside, before = x.clone(), x.clone()
    call(step, inside, **more)
    apart = Apart(x, shift)
    call(step, x, **more, out={argument(step, name): array for name, array in apart.arrays.items()})
    what = f"{step} {x.dtypes} {x.n} elements, shifted by {shift}"
    found = Operands(x.n, x.dtypes, {**inside.arrays, **apart.arrays})
    assert same_bits(found, inside), what
    kept = {name: array for name, array in before.arrays.items() if name != "copy"}
    assert same_bits(Operands(x.n, x.dtypes, kept), x), f"operands of {what}"
    copies = [one.arrays["copy"].tobytes() for one in (x, inside) if "copy" in x.arrays]
    assert len(set(copies)) <= 1, f"copy of {what}"
    assert apart.untouched_around(), f"around the results of {what}"


def main() -> None:
    """One line: the instruction set and the number of comparisons."""
    count = 0
    with np.errstate(all="ignore"):
        for index, (step, format_) in enumerate(itertools.product(STEPS, formats())):
            sizes = SIZES if index % 29 == 0 or format_["param"] == "f64" else (3 * 1024 + 13,)
            for n in sizes:
                x = make(step, n, **format_, spread=4.0, seed=index)
                compare(step, x, index % 5, number=1 + index % 3, seed=index, element_offset=BLOCK * index, threads=2)
                count += 1
    sys.stdout.write(f"{zok.active_isa()} {count}\n")


if __name__ == "__main__":
    main()
