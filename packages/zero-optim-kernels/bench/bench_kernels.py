"""Kernels against their peers, side by side in one run.

    python bench_kernels.py [--millions 32] [--rounds 15] [--threads 1 2] [--only lists,adam,offload,states,blocks]
    [--pause 0.02] [--cpu]

Needs torch, deepspeed and, as deepspeed does, a C compiler; exits with status 2 and their names when one is missing.
Every comparison runs its contestants round after round, each round in another order, and prints the median of the
rounds' time ratios with their 10 % and 90 % quantiles, so that other load on the machine hits both sides alike.
Contestants work on the same memory, and each begins after a pause: OpenMP's workers continue turning for some
milliseconds after their work, and whoever came next would share a processor with them. ``--pause 0`` leaves the pause
out. After it each runs twice, and the second run counts: by then processors that slept have their clock back. ``--cpu``
measures processor time instead of elapsed time, for a machine so busy that most of the elapsed time is waiting for a
processor; it says the same with one thread. The bounds are those that the project holds itself to; nothing fails when
one is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PEERS = ("torch", "deepspeed")
Contestants = dict[str, Callable[[], Any]]


def require_peers() -> None:
    """Exit with status 2 unless every peer can be imported."""
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"missing peers: {', '.join(missing)}; run: pip install {' '.join(missing)}\n")
        raise SystemExit(2)
    if shutil.which("cc") is None:
        sys.stderr.write("missing: cc, the C compiler that builds the copy with non-temporal stores\n")
        raise SystemExit(2)


class Bench:
    """Times contestants side by side and prints ratios."""

    def __init__(self, rounds: int, pause: float, clock: Callable[[], float]) -> None:
        self.rounds, self.pause, self.clock = rounds, pause, clock
        self.shuffle = random.Random(0).shuffle
        self.failed: list[str] = []

    def times(self, contestants: Contestants, *, pause: bool = True) -> dict[str, list[float]]:
        """Seconds of each contestant in each round; the first round is thrown away."""
        result: dict[str, list[float]] = {name: [] for name in contestants}
        order = list(contestants.items())
        for round_ in range(self.rounds + 1):
            self.shuffle(order)
            for name, run in order:
                if pause:
                    time.sleep(self.pause)
                run()
                start = self.clock()
                run()
                if round_:
                    result[name].append(self.clock() - start)
        return result

    def compare(
        self, title: str, contestants: Contestants, bounds: dict[str, float], ours: str = "ours"
    ) -> dict[str, list[float]]:
        """Print the ratio of ours to each peer's time, with the bound that it should not exceed; returns `times`."""
        taken = self.times(contestants)
        sys.stdout.write(f"\n{title}\n")
        for name, seconds in taken.items():
            sys.stdout.write(f"  {name:<43}{statistics.median(seconds) * 1e3:9.3f} ms\n")
        for peer, bound in bounds.items():
            self.ratio(taken, ours, peer, bound)
        return taken

    def ratio(self, taken: dict[str, list[float]], ours: str, peer: str, bound: float | None) -> None:
        """Print the ratio of two contestants' times, with the bound, if any, that it should not exceed."""
        ratios = [a / b for a, b in zip(taken[ours], taken[peer], strict=True)]
        self.report(f"{ours} / {peer}", ratios, bound, above=False)

    def report(self, name: str, values: list[float], bound: float | None, *, above: bool) -> None:
        """One line: median, spread and, if there is one, the bound."""
        values = sorted(values)
        median = statistics.median(values)
        low, high = values[len(values) // 10], values[-1 - len(values) // 10]
        line = f"  {name:<43}{median:9.3f} ({low:.3f} - {high:.3f})"
        if bound is None:
            sys.stdout.write(f"{line}\n")
            return
        met = median >= bound if above else median <= bound
        sign = ">=" if above else "<="
        sys.stdout.write(f"{line}  bound {sign} {bound:<5} {'met' if met else 'MISSED'}\n")
        if not met:
            self.failed.append(name)


def tensors(n: int) -> tuple[Any, Any, Any, Any]:
    """param, grad, exp_avg, exp_avg_sq in float32, touched."""
    import torch

    torch.manual_seed(0)
    param, grad, first = (torch.randn(n) for _ in range(3))
    return param, grad, first, first.square()


def deepspeed_adam(params: list[Any]) -> Any:
    """DeepSpeed's optimizer over these parameters, its extension built."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, lr=1e-3, weight_decay=0.01, adamw_mode=True)


def torch_fused(params: list[Any]) -> Any:
    """torch's optimizer over these parameters."""
    import torch

    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)


def parameter(data: Any, grad: Any) -> Any:
    """A parameter with a gradient, over this memory."""
    import torch

    result = torch.nn.Parameter(data)
    result.grad = grad
    return result


def share(optimizer: Any, param: Any, first: Any, second: Any) -> Any:
    """The optimizer with its state in this memory: on what pages memory lies decides more than the arithmetic."""
    optimizer.step()
    optimizer.state[param].update(exp_avg=first, exp_avg_sq=second)
    return optimizer


def flat_adam(bench: Bench, n: int, threads: int) -> None:
    """Large flat float32 Adam: against the memory's ceiling, DeepSpeed and torch."""
    import zero_optim_kernels as zok

    p, g, m, v = tensors(n)
    param = parameter(p, g)
    theirs, fused = (share(make([param]), param, m, v) for make in (deepspeed_adam, torch_fused))
    pointers = [t.data_ptr() for t in (p, g, m, v)]

    def ours() -> None:
        zok.adam_step(*pointers, n, step=7, lr=1e-3, weight_decay=0.01, threads=threads)

    contestants = {
        "in-place scale": lambda: g.mul_(1.0),
        "ours": ours,
        "DeepSpeedCPUAdam": theirs.step,
        "torch AdamW(fused)": fused.step,
    }
    bench.compare(
        f"float32 Adam, {n >> 20} Mi parameters, {threads} threads",
        contestants,
        {"DeepSpeedCPUAdam": 1.03, "torch AdamW(fused)": 1.03},
    )
    taken = bench.times({"scale": contestants["in-place scale"], "ours": ours})
    bandwidth = [(28 / b) / (8 / a) for a, b in zip(taken["scale"], taken["ours"], strict=True)]
    bench.report("bandwidth / in-place scale", bandwidth, 0.90, above=True)


def offload_step(bench: Bench, n: int, threads: int) -> None:
    """bf16 gradient in, norm, unscale and clip, Adam, bf16 weights out."""
    import torch

    import zero_optim_kernels as zok

    p, g, m, v = tensors(n)
    low_grad, low_param = g.bfloat16(), torch.empty(n, dtype=torch.bfloat16)
    master = parameter(p, g)
    theirs = share(deepspeed_adam([master]), master, m, v)

    def ours() -> None:
        norm = zok.l2_norm(low_grad.data_ptr(), n, dtype="bf16", threads=threads)
        zok.adam_step(
            *(t.data_ptr() for t in (p, low_grad, m, v)),
            n,
            step=7,
            lr=1e-3,
            weight_decay=0.01,
            grad_scale=min(1.0, 1.0 / (norm + 1e-6)),
            grad_dtype="bf16",
            copy_out=low_param.data_ptr(),
            copy_dtype="bf16",
            threads=threads,
        )

    def sequence() -> None:
        master.grad.copy_(low_grad)
        norm = float(master.grad.norm())
        master.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
        theirs.step()
        low_param.copy_(master.data)

    bench.compare(
        f"offload step (bf16 in, norm, clip, Adam, bf16 out), {n >> 20} Mi, {threads} threads",
        {"ours": ours, "DeepSpeed's sequence": sequence},
        {"DeepSpeed's sequence": 0.60},
    )


def lists(bench: Bench, counts: list[int]) -> None:
    """4,096 tensors of 1 Ki elements where torch puts those of a model: parameters one after the other, gradients by a
    backward pass, moments as each optimizer makes its own. Comes first, once for all numbers of threads: memory that
    was used before is given out in no order, as in the shuffled list.
    """
    import torch

    import zero_optim_kernels as zok
    from zero_optim_kernels.torch import CPUAdamW

    count, each = 4096, 1024
    small = [torch.nn.Parameter(torch.randn(each)) for _ in range(count)]
    torch.stack([(p * p).sum() for p in small]).sum().backward()
    ours, theirs = CPUAdamW(small, lr=1e-3, weight_decay=0.01), deepspeed_adam(small)
    held = tensors(count * each)
    flat = [t.data_ptr() for t in held]
    ours.step()
    moments = [[ours.state[p][name].data_ptr() for p in small] for name in ("exp_avg", "exp_avg_sq")]
    columns = [[p.data_ptr() for p in small], [p.grad.data_ptr() for p in small], *moments]
    cut = [[address + 4 * each * i for i in range(count)] for address in flat]
    anywhere = [torch.rand(each) for _ in range(4 * count)]
    random.Random(0).shuffle(anywhere)
    shuffled = [[t.data_ptr() for t in anywhere[i : i + count]] for i in range(0, 4 * count, count)]
    sizes = [each] * count
    for threads in counts:
        torch.set_num_threads(threads)
        options = {"step": 7, "lr": 1e-3, "weight_decay": 0.01, "threads": threads}
        contestants = {
            "one list call": functools.partial(zok.adam_step, *columns, sizes, **options),
            "a list in the flat memory": functools.partial(zok.adam_step, *cut, sizes, **options),
            "a list in shuffled memory": functools.partial(zok.adam_step, *shuffled, sizes, **options),
            "one flat call": functools.partial(zok.adam_step, *flat, count * each, **options),
            "CPUAdamW.step": ours.step,
            "DeepSpeedCPUAdam": theirs.step,
        }
        title = f"4,096 tensors of 1 Ki elements, {threads} threads"
        taken = bench.compare(title, contestants, {"DeepSpeedCPUAdam": 0.5, "one flat call": 1.5}, "one list call")
        bench.ratio(taken, "CPUAdamW.step", "DeepSpeedCPUAdam", 0.5)
        bench.ratio(taken, "a list in the flat memory", "one flat call", 1.5)
        bench.ratio(taken, "a list in shuffled memory", "one flat call", None)


def states(bench: Bench, n: int, threads: int) -> None:
    """8-bit and bf16 state against float32 state."""
    import torch

    import zero_optim_kernels as zok

    p, g, m, v = tensors(n)
    m8, v8 = (torch.zeros(n, dtype=torch.uint8) for _ in range(2))
    s1, s2 = (torch.zeros(-(-n // 256)) for _ in range(2))
    m16, v16 = (torch.zeros(n, dtype=torch.bfloat16) for _ in range(2))
    options = {"step": 7, "lr": 1e-3, "weight_decay": 0.01, "threads": threads}
    coded = [t.data_ptr() for t in (p, g, m8, v8)]
    scales = {"exp_avg_scale": s1.data_ptr(), "exp_avg_sq_scale": s2.data_ptr()}
    bound = 0.95 if zok.active_isa() == "avx512" else 1.5
    held = sum(t.numel() * t.element_size() for t in (m8, v8, s1, s2)) / n
    bench.compare(
        f"8-bit state ({held:.3f} state bytes per parameter), {n >> 20} Mi, {threads} threads, {zok.active_isa()}",
        {
            "8-bit": lambda: zok.adam_step(*coded, n, state_dtype="int8", **scales, **options),
            "bf16": lambda: zok.adam_step(*(t.data_ptr() for t in (p, g, m16, v16)), n, state_dtype="bf16", **options),
            "float32": lambda: zok.adam_step(*(t.data_ptr() for t in (p, g, m, v)), n, **options),
        },
        {"float32": bound},
        "8-bit",
    )


COPY = """
#include <stddef.h>
#if defined(__x86_64__)
#include <immintrin.h>
void copy(char *to, const char *from, size_t bytes) { /* of 64-byte lines */
    for (size_t i = 0; i < bytes; i += 64) {
#if defined(__AVX512F__)
        _mm512_stream_si512((void *)(to + i), _mm512_loadu_si512((const void *)(from + i)));
#else
        for (int j = 0; j < 64; j += 16)
            _mm_stream_si128((__m128i *)(to + i + j), _mm_loadu_si128((const __m128i *)(from + i + j)));
#endif
    }
    _mm_sfence();
}
#else
#include <string.h>
void copy(char *to, const char *from, size_t bytes) { memcpy(to, from, bytes); }
#endif
"""


def streaming_copy(folder: str) -> Any:
    """A function (to, from, bytes) that copies with non-temporal stores, compiled for this processor. The C library's
    copy uses them only beyond a size that it takes from the cache's, which virtual machines overstate.
    """
    library = f"{folder}/copy.so"
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=COPY, text=True, check=True)
    copy = ctypes.CDLL(library).copy
    copy.argtypes, copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    return copy


def blocks(bench: Bench, n: int, threads: int) -> None:
    """bf16 to codes and back in blocks of 2048, against a copy with non-temporal stores; the bounds are for all
    processors. Bytes are those read and written, each once.
    """
    import torch

    import zero_optim_kernels as zok

    source, back = torch.randn(n).bfloat16(), torch.empty(n, dtype=torch.bfloat16)
    payload, scales = torch.empty(n, dtype=torch.uint8), torch.empty(-(-n // 2048))
    a, b = (torch.ones(3 * n // 2, dtype=torch.uint8) for _ in range(2))  # a copy moves as much as the others
    part = a.numel() // threads // 64 * 64
    coded = (payload.data_ptr(), scales.data_ptr())
    with tempfile.TemporaryDirectory() as folder:
        streaming = streaming_copy(folder)

    def copy(i: int) -> None:
        streaming(b.data_ptr() + i * part, a.data_ptr() + i * part, part)

    sys.stdout.write(
        f"\nbf16 to codes in blocks of 2048 and back, {n >> 20} Mi, {threads} threads (bandwidth, of a copy's)\n"
    )
    with ThreadPoolExecutor(threads) as pool:
        for code, size in (("int8", 3), ("e4m3", 3), ("int4", 2.5)):
            options = {"code": code, "block": 2048, "dtype": "bf16", "threads": threads}
            taken = bench.times(
                {
                    "copy": lambda: list(pool.map(copy, range(threads))),
                    "quantise": functools.partial(zok.quantize_blocks, source.data_ptr(), *coded, n, **options),
                    "dequantise": functools.partial(zok.dequantize_blocks, *coded, back.data_ptr(), n, **options),
                },
                pause=False,  # there is no OpenMP here, and after a pause what computes is slower and a copy is not
            )
            for name, bound in (("quantise", 0.75), ("dequantise", 0.80)):
                ratio = [(size * n / t) / (2 * a.numel() / c) for t, c in zip(taken[name], taken["copy"], strict=True)]
                every = threads == len(os.sched_getaffinity(0))
                bench.report(f"{name} {code} / copy", ratio, bound if every else None, above=True)


def main() -> None:
    """Parse the command line and run the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=32, help="Mi parameters of the large buffers")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--only", default="lists,adam,offload,states,blocks")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds before each measurement")
    parser.add_argument("--cpu", action="store_true", help="measure processor time")
    arguments = parser.parse_args()
    require_peers()
    import torch

    import zero_optim_kernels as zok

    sys.stdout.write(
        f"instruction set {zok.active_isa()}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors\n"
    )
    clock = time.process_time if arguments.cpu else time.perf_counter
    bench, n = Bench(arguments.rounds, arguments.pause, clock), arguments.millions << 20
    wanted = set(arguments.only.split(","))
    counts = list(dict.fromkeys(arguments.threads))
    if "lists" in wanted:
        lists(bench, counts)
    for threads in counts:
        torch.set_num_threads(threads)
        for name, run in (("adam", flat_adam), ("offload", offload_step), ("states", states), ("blocks", blocks)):
            if name in wanted:
                run(bench, n, threads)
    sys.stdout.write(f"\n{len(bench.failed)} bounds missed{': ' + ', '.join(bench.failed) if bench.failed else ''}\n")


if __name__ == "__main__":
    main()
