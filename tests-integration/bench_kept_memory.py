"""Page faults and seconds of a step of a real Transformers model on a CPU, with and without offloading.

    python tests-integration/bench_kept_memory.py [--rounds 3] [--steps 10] [--stages 0 2 3] [--layers 24]

A Llama of 0.37 billion parameters in float32, one sequence of 64 tokens, AdamW, clipping 1.0, one rank with all cores.
Contestants take turns, each in a process of its own: the engine with nothing offloaded; the same with
``keep_freed_memory`` false; with the optimizer in host memory; torch's own AdamW without an engine. Steps after the
fourth count. The aims are at most 1,000 page faults a step, and at most the time with the optimizer in host memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from bench_results import save

WARM = 4
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


class Steps(NamedTuple):
    """Medians over the steps of one process; ``peak``: its largest resident set in GB."""

    faults: float
    seconds: float
    peak: float


def llama(layers: int, width: int, vocabulary: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            max_position_embeddings=256,
        )
    )


def engine_step(model: torch.nn.Module, x: torch.Tensor, settings: dict[str, Any]) -> Callable[[], object]:
    import zero_core

    common = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "steps_per_print": 0}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    engine = zero_core.initialize(model=model, config={**common, "optimizer": optimizer, **settings})[0]

    def step() -> None:
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()

    return step


def plain_step(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(input_ids=x, labels=x).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(case: dict[str, Any]) -> None:
    """Take ``case["steps"]`` steps and print the page faults and seconds of each as a line of JSON."""
    model = llama(case["layers"], case["width"], case["vocabulary"])
    x = torch.randint(0, case["vocabulary"], (1, 64))
    settings = case["settings"]
    step = plain_step(model, x) if settings is None else engine_step(model, x, settings)
    faults, seconds = [], []
    for _ in range(case["steps"]):
        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        step()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        seconds.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("\nRESULT " + json.dumps({"faults": faults, "seconds": seconds, "peak": peak}), flush=True)


def measured(case: dict[str, Any], *launcher: str) -> list[Steps]:
    """Run a case in processes of its own, by ``launcher`` or alone; return the result of each."""
    command = [sys.executable, *launcher, __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise RuntimeError(f"{case} ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    rows = [json.loads(line.partition("RESULT ")[2]) for line in done.stdout.splitlines() if "RESULT " in line]
    return [
        Steps(statistics.median(row["faults"][WARM:]), statistics.median(row["seconds"][WARM:]), row["peak"] / 1e9)
        for row in rows
    ]


def settings_of(stage: int, more: dict[str, Any]) -> dict[str, Any]:
    return {**more, "zero_optimization": {"stage": stage, **more.get("zero_optimization", {})}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        return work(arguments.case)
    contestants: dict[str, dict[str, Any] | None] = {"plain torch": None}
    for stage in arguments.stages:
        contestants[f"stage {stage}"] = settings_of(stage, {})
        contestants[f"stage {stage}, returned"] = settings_of(stage, {"keep_freed_memory": False})
        if stage:
            contestants[f"stage {stage}, offloaded"] = settings_of(stage, OFFLOADED)
    shape = {"layers": arguments.layers, "width": 1024, "vocabulary": 32_000, "steps": arguments.steps}
    rounds = [
        {name: measured({**shape, "settings": settings})[0] for name, settings in contestants.items()}
        for _ in range(arguments.rounds)
    ]
    kept = []
    for name in contestants:
        found = [row[name] for row in rounds]
        stage = name.partition(",")[0]
        ratios = sorted(row[stage].seconds / row[name].seconds for row in rounds)
        spread = "" if name == stage else f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"
        faults = f"{statistics.median(f.faults for f in found):,.0f}"
        seconds = f"{statistics.median(f.seconds for f in found):.2f}"
        peak = f"{max(f.peak for f in found):.2f} GB"
        print(f"{name:20} {faults:>9} faults {seconds:>6} s  peak {peak}  {spread and f'kept / this {spread}'}")
        kept.append((name, faults, seconds, peak, spread))
    save(__file__, "kept-memory", ("contestant", "page faults a step", "seconds", "peak resident", "kept / this"), kept)


if __name__ == "__main__":
    main()
