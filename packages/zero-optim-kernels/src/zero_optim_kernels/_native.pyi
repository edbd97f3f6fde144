# The compiled module, see csrc/bindings.cpp. Operands (Any) are addresses or buffers, or lists where `n` is a list.
from typing import Any

def active_isa() -> str: ...
def targets() -> list[tuple[str, str]]: ...
def default_threads() -> int: ...
def step(
    rule: int,
    apply: bool,
    n: Any,
    param: Any,
    param_low: Any,
    grad: Any,
    state1: Any,
    state2: Any,
    scale1: Any,
    scale2: Any,
    copy_out: Any,
    update: Any,
    param_dtype: str,
    grad_dtype: str,
    state_dtype: str,
    copy_dtype: str | None,
    rows: list[tuple[int, tuple[float, ...]]],
    zero_grad: bool,
    element_offset: int,
    seed: int,
    step_number: int,
    threads: int,
    out: tuple[Any, ...] | None,
) -> list[tuple[float, float]] | None: ...
def norm_squared(x: Any, n: Any, dtype: str, threads: int) -> float: ...
def norms_squared(x: Any, out: Any, n: int, block: int, dtype: str, threads: int) -> None: ...
def digests(x: Any, out: Any, n: int, block: int, threads: int) -> None: ...
def count_nonfinite(x: Any, n: Any, dtype: str, threads: int) -> int: ...
def scale(x: Any, n: Any, factor: float, dtype: str, threads: int) -> None: ...
def cast(x: Any, out: Any, n: int, dtype: str, out_dtype: str, threads: int) -> None: ...
def sum_slices(slices: Any, out: Any, n: int, dtype: str, out_dtype: str, divisor: float, threads: int) -> None: ...
def quantize(
    x: Any,
    payload: Any,
    scales: Any,
    n: int,
    code: str,
    block: int,
    dtype: str,
    stochastic: bool,
    seed: int,
    step: int,
    element_offset: int,
    threads: int,
) -> None: ...
def dequantize(
    payload: Any, scales: Any, out: Any, n: int, code: str, block: int, dtype: str, threads: int
) -> None: ...
