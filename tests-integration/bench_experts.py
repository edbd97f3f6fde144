"""A mixture of experts at stage 3 beside DeepSpeed with leaf modules: bytes gathered in a step, and the peak of them.

Two ranks, a Qwen3-MoE whose experts are packed or modules, AdamW, gloo; each contestant is a job of its own. "Bounded"
is DeepSpeed with `stage3_max_live_parameters`, `stage3_max_reuse_distance` and `stage3_prefetch_bucket_size` of 10^5,
as a model that does not fit needs it; ours prefetches as much, and experts that are modules are units. Bytes are those
that collectives bring to a rank, of DeepSpeed's as torch's dispatcher sees them, in the step after three that learn.
The peak is of the memory behind the model's parameters, looked at after every module's forward and backward. Times are
not taken.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path += [str(HERE.parent), str(HERE.parents[1] / "tools")]

CONTESTANTS = ("ours", "DeepSpeed", "DeepSpeed, leaf modules", "DeepSpeed, leaf modules, bounded")
KINDS = {"packed": 64, "modules": 4}
"""How experts are held, and the tokens of a rank."""
BOUND = 10**5
SIZES = {"hidden_size": 128, "num_hidden_layers": 6, "num_experts": 16, "moe_intermediate_size": 128, "vocab_size": 512}
RANKS, LEARNING = 2, 3
GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "allgather_coalesced_")


def measured(kind: str, name: str) -> dict[str, float]:
    """Train as contestant ``name`` on this rank, with experts of ``kind``; return MiB gathered in one step, at
    most at a time, and of the model."""
    import _experts_training as experts
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    model = experts.build("Qwen3Moe", **SIZES)
    if kind == "modules":
        for layer in model.model.layers:
            layer.mlp.experts = experts.SeparateExperts(SIZES["num_experts"], 128, 128)
    rank = int(os.environ["RANK"])
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": zero,
    }
    if name == "ours":
        import zero_core

        del config["optimizer"]["params"]["torch_adam"]
        zero |= {"stage3_prefetch_bucket_size": BOUND}
        zero |= {"unit_max_numel": BOUND, "unit_min_numel": 1} if kind == "modules" else {}
        engine: Any = zero_core.initialize(model=model, config=config)[0]
    else:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        if name.endswith("bounded"):
            names = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
            zero |= dict.fromkeys(names, BOUND)
        if "leaf" in name:
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0].mlp)])
        engine = deepspeed.initialize(model=model, config=config)[0]
    seen = {"gathered": 0.0, "peak": 0.0}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "c10d" and function._opname in GATHERS:
                tensors = [one for one in tree_leaves(args[0]) if isinstance(one, torch.Tensor)]
                seen["gathered"] += sum(one.nbytes for one in tensors) * (RANKS - 1) / RANKS
            return function(*args, **(kwargs or {}))

    parameters = list(model.parameters())

    def look(*_: Any) -> None:
        held = {s.data_ptr(): s.nbytes() for s in (p.data.untyped_storage() for p in parameters) if s.nbytes() > 64}
        seen["peak"] = max(seen["peak"], float(sum(held.values())))

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(look)
            module.register_full_backward_hook(look)
    tokens = torch.randint(512, (1, KINDS[kind]), generator=torch.Generator().manual_seed(rank))
    for _ in range(LEARNING + 1):
        seen.update(gathered=0.0, peak=0.0)
        before = engine.ledger.sent_bytes("gather") if name == "ours" else 0
        with Counting():
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        if name == "ours":
            seen["gathered"] = float(engine.ledger.sent_bytes("gather") - before)
    whole = 4 * sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    return {**{key: value / 2**20 for key, value in seen.items()}, "model": whole / 2**20}


def main() -> None:
    print(f"{'experts':8} {'contestant':34} {'MiB gathered per step':>22} {'of the model':>13} {'peak, MiB':>10}")
    for kind, name in itertools.product(KINDS, CONTESTANTS):
        if (kind, name) == ("modules", "DeepSpeed"):
            continue  # ranks that choose other experts wait for each other there
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}", str(HERE), kind, name]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *launch], capture_output=True, text=True, env=environment)
        found = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not found:
            raise SystemExit(done.stdout + done.stderr)
        told = json.loads(found[0])
        part = told["gathered"] / told["model"]
        print(f"{kind:8} {name:34} {told['gathered']:22.1f} {part:13.2f} {told['peak']:10.1f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        told = measured(*sys.argv[1:])
        if os.environ["RANK"] == "0":
            print(json.dumps(told), flush=True)
    else:
        main()
