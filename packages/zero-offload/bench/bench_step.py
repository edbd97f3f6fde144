"""The offloaded step beside its peers, in one run: ratios with their spread, bytes written, bandwidth.

    python bench_step.py [--elements N] [--folder PATH] [--rounds N]

* Host tier: bfloat16 weights and gradients, clipping, float32 master and states, against the same work as separate
  passes with torch's fused AdamW, and with DeepSpeedCPUAdam where DeepSpeed is installed.
* NVMe tier, in slices too many for the ring to hold: against the larger of the host tier's step, and of reading and
  writing the same bytes at once without computing. Its overlap report is printed.
* A whole training step (forward, backward, clipping, update), against FSDP2 with CPUOffloadPolicy and, where DeepSpeed
  is installed, its stage 2 with the optimizer on the CPU and its stage 3 with the optimizer on NVMe: the same model,
  bfloat16 compute, float32 master and states, one rank.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from zero_nvme_aio import AlignedBuffer, Engine
from zero_offload import OffloadedOptimizer, Trace

TENSOR = 1 << 20
MAX_NORM = 1.0


def weights(elements: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(TENSOR).to(torch.bfloat16)) for _ in range(elements // TENSOR)]
    for param in found:
        param.grad = torch.randn(TENSOR).to(torch.bfloat16)
    return found


def offloaded(params: list[nn.Parameter], **options: object) -> tuple[OffloadedOptimizer, Callable[[], None]]:
    optimizer = OffloadedOptimizer(params, "AdamW", lr=1e-4, **options)  # type: ignore[arg-type]

    def step() -> None:
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.flush()

    return optimizer, step


def separate_passes(params: list[nn.Parameter], kind: str) -> Callable[[], None]:
    """Cast, clip, update, cast back: how a 16-bit model is trained with a float32 optimizer on the host."""
    masters = [nn.Parameter(param.detach().float()) for param in params]
    if kind == "torch":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(masters, lr=1e-4, adamw_mode=True, weight_decay=1e-2)
    for master in masters:
        master.grad = torch.empty_like(master)

    def step() -> None:
        for master, param in zip(masters, params, strict=True):
            master.grad.copy_(param.grad)  # type: ignore[union-attr, arg-type]
        nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                param.copy_(master)

    return step


def read_and_write_at_once(folder: Path, nbytes: int) -> Callable[[], None]:
    """The state's bytes read from one file while as many are written to another, in large requests."""
    source, target = (
        memoryview(AlignedBuffer(min(nbytes, 256 << 20))),
        memoryview(AlignedBuffer(min(nbytes, 256 << 20))),
    )
    engine = Engine()
    reading, writing = (engine.open(folder / name, "rw") for name in ("read", "write"))
    spans = [(offset, min(len(source), nbytes - offset)) for offset in range(0, nbytes, len(source))]
    for offset, length in spans:
        engine.write(reading, source[:length], offset).wait()

    def step() -> None:
        for offset, length in spans:
            requests = [
                engine.read(reading, source[:length], offset),
                engine.write(writing, target[:length], offset),
            ]
            for request in requests:
                request.wait()

    return step


def blocks(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth))
    )


def training_offloaded(width: int, depth: int, batch: torch.Tensor, **options: Any) -> Callable[[], None]:
    model = blocks(width, depth).to(torch.bfloat16)
    optimizer = OffloadedOptimizer(model, "AdamW", lr=1e-4, **options)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()

    return step


def training_fsdp(width: int, depth: int, batch: torch.Tensor) -> Callable[[], None]:
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = blocks(width, depth)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    return step


def training_deepspeed(
    width: int, depth: int, batch: torch.Tensor, stage: int, offload: dict[str, Any]
) -> Callable[[], None]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": len(batch),
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, "offload_optimizer": offload},
    }
    model = blocks(width, depth)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        engine.backward(engine(batch).float().square().mean())
        engine.step()

    return step


def add_deepspeed(steps: dict[str, Callable[[], None]], folder: Path, width: int, depth: int, batch: Any) -> None:
    """DeepSpeed's training steps, as far as they can be built here; says which cannot, and why."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    logging.disable(logging.INFO)
    nvme = {"device": "nvme", "nvme_path": str(folder), "pipeline_read": True, "pipeline_write": True}
    for kind, stage, offload in (("host", 2, {"device": "cpu"}), ("NVMe", 3, nvme)):
        name = f"training, DeepSpeed stage {stage}, {kind}"
        try:
            steps[name] = training_deepspeed(width, depth, batch, stage, offload)
        except Exception as error:
            print(f"{name} is missing: {type(error).__name__}: {error}".splitlines()[0])


def measured(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, interleaved; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def line(name: str, seconds: list[float], elements: int) -> str:
    middle = statistics.median(seconds)
    return (
        f"{name:<40} {middle * 1e3:9.1f} ms  ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})"
        f"  {elements / middle / 1e9:6.3f} G elements/s"
    )


def ratio(ours: list[float], theirs: list[float]) -> str:
    rounds = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(rounds):.2f} ({rounds[0]:.2f} to {rounds[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=32 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--trace", type=Path, help="write what moved in the NVMe tier there, for ui.perfetto.dev")
    arguments = parser.parse_args()
    elements = max(TENSOR, arguments.elements // TENSOR * TENSOR)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        host, host_step = offloaded(weights(elements))
        trace = Trace()
        slice_elements = max(TENSOR, elements // arguments.slices)
        nvme, nvme_step = offloaded(
            weights(elements), tier="nvme", path=folder / "swap", sub_group_size=slice_elements, trace=trace
        )
        steps = {
            "host tier": host_step,
            "torch fused AdamW, separate passes": separate_passes(weights(elements), "torch"),
            "NVMe tier": nvme_step,
            "read and write at once": read_and_write_at_once(folder, 12 * elements),
        }
        try:
            steps["DeepSpeedCPUAdam, separate passes"] = separate_passes(weights(elements), "deepspeed")
        except ImportError as error:
            print(f"DeepSpeed is not here, so its ratio is missing: {error}")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        batch = torch.randn(arguments.tokens, arguments.width).to(torch.bfloat16)
        steps["training, host tier"] = training_offloaded(arguments.width, arguments.depth, batch)
        steps["training, NVMe tier"] = training_offloaded(
            arguments.width, arguments.depth, batch, tier="nvme", path=folder / "training", sub_group_size=TENSOR
        )
        steps["training, FSDP2 CPUOffloadPolicy, host"] = training_fsdp(arguments.width, arguments.depth, batch)
        add_deepspeed(steps, folder, arguments.width, arguments.depth, batch)
        seconds = measured(steps, arguments.rounds)
        dist.destroy_process_group()
        numels = {kind: 8 * arguments.width**2 * arguments.depth if "training" in kind else elements for kind in steps}
        for kind, found in seconds.items():
            print(line(kind, found, numels[kind]))
        for peer in (kind for kind in seconds if "separate" in kind):
            print(f"host tier / {peer}: {ratio(seconds['host tier'], seconds[peer])}")
        bound = [max(pair) for pair in zip(seconds["read and write at once"], seconds["host tier"], strict=True)]
        print(f"NVMe tier / max(read and write at once, compute): {ratio(seconds['NVMe tier'], bound)}")
        moved = sum(row.nbytes for row in trace.report()) / (arguments.rounds + 1) / 1e9
        print(
            f"NVMe tier: {moved:.2f} GB read and written in a step, "
            f"{moved / statistics.median(seconds['NVMe tier']):.2f} GB/s; what the ring still has is not read again"
        )
        print(f"{nvme.bytes_written()} bytes written, {nvme.memory()['ring']} bytes of host memory")
        for peer in (kind for kind in seconds if kind.startswith(("training, FSDP2", "training, DeepSpeed"))):
            tier = "training, NVMe tier" if peer.endswith("NVMe") else "training, host tier"
            print(f"{tier} / {peer.removeprefix('training, ')}: {ratio(seconds[tier], seconds[peer])}")
        print(f"NVMe tier, all {arguments.rounds + 1} rounds:\n{trace.table()}")
        if arguments.trace is not None:
            trace.save(arguments.trace)
        nvme.close()
        host.close()


if __name__ == "__main__":
    main()
