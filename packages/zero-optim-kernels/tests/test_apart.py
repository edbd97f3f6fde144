"""Steps whose results have memory of their own: the bits of a step in place, on every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_support import BLOCK, STEPS, Step, call, make, same_bits

import zero_optim_kernels as zok

EMULATOR = os.environ.get("ZERO_EMULATOR", "").split()


@pytest.mark.parametrize("isa", zok.available_isas())
def test_results_apart_have_the_bits_of_results_in_place(isa: str) -> None:
    command = [*EMULATOR, sys.executable, str(Path(__file__).parent / "apart_check.py")]
    environment = {**os.environ, "ZERO_ISA": isa}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    name, count = result.stdout.split()
    assert name == isa and int(count) > 1000


@pytest.mark.parametrize("state", ["f32", "bf16", "int8"])
def test_a_list_of_tensors_with_rows_of_their_own(state: str) -> None:
    sizes = [5000, 3, 40_000, 0, 257]
    parts = [make(STEPS[0], n, state=state, copy="bf16", seed=n) for n in sizes]
    names = list(parts[0].arrays)
    rows = [(0, 1e-3 * (1 + i), 0.1, 0.9, 0.99) for i in range(len(sizes))]
    keys = {"param": "param", "first": "exp_avg", "second": "exp_avg_sq"}
    if state == "int8":
        keys |= {"first_scale": "exp_avg_scale", "second_scale": "exp_avg_sq_scale"}

    def run(own: list[Any], **more: Any) -> None:
        lists = {name: [part.arrays[name] for part in own] for name in names}
        scales = {f"{keys[k]}_scale": lists[f"{k}_scale"] for k in ("first", "second") if state == "int8"}
        zok.adam_step(
            lists["param"], lists["grad"], lists["first"], lists["second"], sizes, step=2, lr=0.0, segments=rows,
            copy_out=lists["copy"], **own[0].dtypes, **scales, **more,
        )  # fmt: skip

    inside, results = [part.clone() for part in parts], [part.clone() for part in parts]
    for part in results:
        for name in keys:
            part.arrays[name][...] = 0
    run(inside)
    run(parts, out={key: [part.arrays[name] for part in results] for name, key in keys.items()})
    for mine, theirs, part in zip(results, inside, parts, strict=True):
        mine.arrays["copy"] = part.arrays["copy"]
        assert same_bits(mine, theirs)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_results_may_be_the_operands_themselves(step: Step) -> None:
    x = make(step, 5000)
    inside = x.clone()
    call(step, inside)
    written = {"param": x.arrays["param"]}
    written |= {str(getattr(step, k)): x.arrays[k] for k in ("first", "second") if k in x.arrays}
    call(step, x, out=written)
    assert same_bits(x, inside)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ({}, "out: expected param, exp_avg, exp_avg_sq, got nothing"),
        ({"param": 1}, "out: expected param, exp_avg, exp_avg_sq, got param"),
        ({"param": 1, "exp_avg": 1, "exp_avg_sq": 1, "sum_sq": 1}, "got param, exp_avg, exp_avg_sq, sum_sq"),
    ],
)
def test_out_has_a_place_for_everything_that_is_written(out: dict[str, Any], said: str) -> None:
    x = make(STEPS[0], BLOCK)
    before = x.clone()
    with pytest.raises(ValueError, match=said):
        call(STEPS[0], x, out=out)
    assert same_bits(x, before)


def test_operands_that_are_only_read_may_be_read_only_and_results_may_not() -> None:
    x = make(STEPS[0], BLOCK)
    keys = {"param": "param", "first": "exp_avg", "second": "exp_avg_sq"}
    results = {keys[name]: np.zeros_like(x.arrays[name]) for name in keys}
    for array in x.arrays.values():
        array.flags.writeable = False
    call(STEPS[0], x, out=results)
    assert results["param"].any() and results["exp_avg_sq"].any()
    with pytest.raises(TypeError, match="param: expected .* writable"):
        call(STEPS[0], x)
    results["exp_avg"].flags.writeable = False
    with pytest.raises(TypeError, match="out: the first state: expected .* writable"):
        call(STEPS[0], x, out=results)
    with pytest.raises(ValueError, match="out: param: expected 1024 bytes"):
        call(STEPS[0], x, out={**results, "param": np.zeros(3, np.float32)})
