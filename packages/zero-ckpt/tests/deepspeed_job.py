"""Run as a script, one process per rank: train with DeepSpeed and save, or load a universal checkpoint and continue.

    deepspeed_job.py save ROOT STAGE DTYPE STEPS

writes ROOT/ds, ROOT/expected.pt (fp32, by DeepSpeed's own function) and ROOT/next.pt (parameters after one more step).

    deepspeed_job.py plain ROOT STAGE DTYPE STEPS

trains on one rank without DeepSpeed, saves ROOT/ours with zero_ckpt, and writes ROOT/expected.pt and ROOT/next.pt.

    deepspeed_job.py resume ROOT STAGE DTYPE DIR

loads the universal checkpoint DIR, takes one more step (number $STEPS), and writes ROOT/resumed.pt. The optimizer has
$PARAM_GROUPS param groups, 1 or 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

import zero_ckpt

SCHEDULE = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10}


class Model(nn.Module):
    """Tied head, a frozen layer, one that is trained but unused, buffers of two dtypes, sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.mid = nn.Linear(7, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 1.5))
        self.register_buffer("count", torch.arange(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.embed(x)))
        return self.head(self.out(torch.relu(self.mid(hidden))) * self.scale[0])


def param_groups(model: Model) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [model.embed.weight, *model.frozen.parameters()], "weight_decay": 0.0},
        {"params": [*model.mid.parameters(), model.out.weight, *model.unused.parameters()]},
    ]
    whole = {"params": [parameter for group in groups for parameter in group["params"]]}
    return groups if os.environ["PARAM_GROUPS"] == "2" else [whole]


def make_engine(stage: int, dtype: str, universal: bool) -> Any:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "scheduler": {"type": "WarmupLR", "params": SCHEDULE},
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if universal:
        config["checkpoint"] = {"load_universal": True}
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=param_groups(model), config=config)
    return engine


def loss_of(model: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed * 100 + int(os.environ["RANK"]))
    x = torch.randint(0, 13, (2, 6))
    return nn.functional.cross_entropy(model(x).float().view(-1, 13), x.view(-1))


def step(engine: Any, seed: int) -> None:
    engine.backward(loss_of(engine, seed))
    engine.step()


def train_plain(root: str, steps: int) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(param_groups(model), lr=0.01, weight_decay=0.1)
    schedule = WarmupLR(optimizer, **SCHEDULE)
    for number in range(steps + 1):
        if number == steps:
            state = {"model": model, "optimizer": optimizer, "scheduler": schedule}
            zero_ckpt.save(f"{root}/ours", state, step=steps)
            torch.save(model.state_dict(), f"{root}/expected.pt")
        optimizer.zero_grad()
        loss_of(model, number).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    torch.save(model.state_dict(), f"{root}/next.pt")


def full_parameters(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            master = safe_get_full_fp32_param(parameter)
            found[name] = (parameter.detach() if master is None else master).clone()
    return found


def main() -> None:
    task, root, stage, dtype, argument = sys.argv[1:6]
    if task == "plain":
        train_plain(root, int(argument))
        return
    engine = make_engine(int(stage), dtype, task == "resume")
    first = os.environ["RANK"] == "0"
    if task == "save":
        for number in range(int(argument)):
            step(engine, number)
        engine.save_checkpoint(f"{root}/ds", tag="tag1", client_state={"note": "hello", "epoch": 3})
        step(engine, int(argument))
        after = full_parameters(engine)
        if first:
            torch.save(after, f"{root}/next.pt")
            expected = get_fp32_state_dict_from_zero_checkpoint(f"{root}/ds") if int(stage) else None
            torch.save(expected, f"{root}/expected.pt")
    else:
        path, _ = engine.load_checkpoint(str(Path(argument).parent), tag=Path(argument).name)
        if path is None:
            raise RuntimeError(f"DeepSpeed did not load {argument}")
        loaded = full_parameters(engine)
        step(engine, int(os.environ["STEPS"]))
        after = full_parameters(engine)
        if first:
            torch.save({"loaded": loaded, "after": after}, f"{root}/resumed.pt")


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # the process group's teardown aborts now and then
