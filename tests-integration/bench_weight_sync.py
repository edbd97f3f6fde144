"""Full weights for an inference server: `iter_full_weights`, and the two ways of TRL with `GatheredParameters`.

TRL gathers each parameter by itself, and the whole model where it has adapters. Two ranks at stage 3, a Llama of two
million parameters; the ways take turns, and every ratio is of two passes of one round. Bytes are counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import zero_core
from zero_comm import run_ranks
from zero_partition import gathered_anywhere

ROUNDS, BUCKET = 9, 1 << 20


def model() -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=2, **sizes))


def measured() -> dict[str, Any]:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine = zero_core.initialize(model=model(), config=settings)[0]
    parameters = list(engine.module.parameters())
    sink = torch.empty(max(p.numel() for p in parameters))
    peak = dict.fromkeys(("buckets", "each", "whole"), 0)

    def note(way: str, extra: int = 0) -> None:
        peak[way] = max(peak[way], extra + engine.partition.memory()["gathered parameters"])

    def read(parameter: torch.Tensor) -> None:
        sink[: parameter.numel()].copy_(parameter.detach().flatten())

    def buckets() -> None:
        for bucket in engine.iter_full_weights(BUCKET):
            note("buckets", bucket.memory.untyped_storage().nbytes())
            for _, tensor in bucket:
                read(tensor)

    def each() -> None:
        for parameter in parameters:
            with gathered_anywhere(parameter):
                note("each")
                read(parameter)

    def whole() -> None:
        with gathered_anywhere(parameters):
            note("whole")
            for parameter in parameters:
                read(parameter)

    ways: dict[str, Callable[[], None]] = {"buckets": buckets, "each": each, "whole": whole}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    gathers: dict[str, int] = {}
    for _ in range(ROUNDS):
        for way, run in ways.items():
            dist.barrier()
            before, calls = time.perf_counter(), engine.ledger.calls("gather")
            run()
            seconds[way].append(time.perf_counter() - before)
            gathers[way] = engine.ledger.calls("gather") - calls
    total = sum(p.numel() * p.element_size() for p in parameters)
    return {"seconds": seconds, "peak": peak, "gathers": gathers, "total": total}


def main() -> None:
    told = run_ranks(measured, 2, timeout=600)[0]
    print(f"stage 3, 2 ranks, {told['total'] / 2**20:.1f} MiB of weights, buckets of {BUCKET / 2**20:.0f} MiB")
    print(f"{'way':>10} {'gathers':>8} {'peak MiB':>9} {'ms':>8} {'to buckets':>12} {'spread':>13}")
    for way, seconds in told["seconds"].items():
        ratios = sorted(a / b for a, b in zip(seconds, told["seconds"]["buckets"], strict=True))
        print(
            f"{way:>10} {told['gathers'][way]:>8} {told['peak'][way] / 2**20:>9.2f} "
            f"{statistics.median(seconds) * 1e3:>8.1f} {statistics.median(ratios):>12.2f} "
            f"{ratios[0]:>6.2f}-{ratios[-1]:<6.2f}"
        )


if __name__ == "__main__":
    main()
