"""Run as a script, one process per rank, with `deepspeed` of either kind: load or not, train, save, and tell what is
there.

    peer_checkpoint_job.py FOLDER JSON

JSON is a list of objects with the keys of `Job`, done one after another. For each, rank 0 writes FOLDER/<name>.pt: the
state before the first step and after the last one.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

SAMPLES = 12
"""Of a global batch: divides by 1, 2 and 3 ranks."""
CLIENT = {"epoch": 3, "best": torch.tensor([1.5, 2.5]), "pair": (1, "two"), "milestones": {10: "a"}}


@dataclass(frozen=True)
class Job:
    """``name``: of the result. ``raw``: also keep what DeepSpeed's optimizer holds on each rank.

    ``config``: laid over the default one. ``load``, ``save``: folders, None for neither.
    ``options``, ``save_options``: further arguments of `load_checkpoint` and `save_checkpoint`.
    ``first``, ``last``: the batches to train on, ``save_at``: before which of them to save."""

    name: str
    config: dict[str, Any]
    first: int
    last: int
    load: str | None = None
    tag: str | None = None
    save: str | None = None
    save_at: int | None = None
    options: dict[str, Any] | None = None
    save_options: dict[str, Any] | None = None
    groups: int = 2
    seed: int = 0
    raw: bool = False


class Model(nn.Module):
    """Tied head, a frozen layer, buffers of two dtypes, sizes that nothing divides, a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.mid = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 1.5))
        self.register_buffer("count", torch.arange(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.embed(x)))
        return self.head(self.out(torch.relu(self.mid(hidden)) * self.gain) * self.scale[0])


def groups_of(model: Model, count: int) -> list[dict[str, Any]]:
    decayed = [*model.mid.parameters(), model.out.weight]
    plain = [model.embed.weight, *model.frozen.parameters(), model.gain]
    if count == 1:
        return [{"params": plain + decayed}]
    return [{"params": plain, "weight_decay": 0.0}, {"params": decayed}]


def start(job: Job) -> Any:
    torch.manual_seed(job.seed)
    model = Model()
    ranks = int(os.environ["WORLD_SIZE"])
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10},
        },
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
        **job.config,
    }
    if "accumulate" in config:
        config["gradient_accumulation_steps"] = config.pop("accumulate")
        config["train_micro_batch_size_per_gpu"] //= config["gradient_accumulation_steps"]
    return deepspeed.initialize(model=model, model_parameters=groups_of(model, job.groups), config=config)[0]


def step(engine: Any, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    every = torch.randint(0, 13, (SAMPLES, 6), generator=generator)
    each = SAMPLES // dist.get_world_size()
    mine = every[dist.get_rank() * each : (dist.get_rank() + 1) * each]
    whole = torch.zeros(())
    for x in mine.split(engine.train_micro_batch_size_per_gpu()):
        loss = nn.functional.cross_entropy(engine(x).float().view(-1, 13), x.view(-1))
        engine.backward(loss)
        engine.step()
        whole += loss.detach() * len(x) / each
    dist.all_reduce(whole)
    return float(whole / dist.get_world_size())


def raw(engine: Any) -> dict[str, Any]:
    """Return the masters, moments and steps of DeepSpeed's optimizer on this rank, as copies."""
    held = engine.optimizer
    stage3 = engine.zero_optimization_stage() == 3
    masters = held.fp32_partitioned_groups_flat if stage3 else held.single_partition_of_fp32_groups
    states = [dict(held.optimizer.state.get(master, {})) for master in masters]
    scaler = {key: value for key, value in vars(held.loss_scaler).items() if key != "dtype"}
    copied = [{key: torch.as_tensor(value).clone() for key, value in state.items()} for state in states]
    return {"masters": [master.detach().clone() for master in masters], "states": copied, "scaler": scaler}


def seen(engine: Any, *, moments: bool) -> dict[str, Any]:
    """The full state of an engine, by the functions that both kinds have; ``moments``: also those."""
    found: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[f"{name} param"] = parameter.detach().clone()
        if parameter.requires_grad:
            found[f"{name} master"] = _copied(safe_get_full_fp32_param(parameter), found[f"{name} param"])
            for key in ("exp_avg", "exp_avg_sq") if moments else ():
                found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).detach().clone()
    for name, buffer in engine.module.named_buffers():
        found[f"{name} buffer"] = buffer.clone()
    kept = ("lr", "betas", "eps", "weight_decay")
    options = [{key: group[key] for key in kept} for group in engine.optimizer.param_groups]
    found["facts"] = {
        "steps": (engine.global_steps, engine.skipped_steps, engine.global_samples),
        "rate": engine.get_lr(),
        "groups": options,
        "schedule": engine.lr_scheduler.state_dict(),
        "loss scale": float(getattr(engine.optimizer, "cur_scale", 1.0)),
    }
    return found


def _copied(value: torch.Tensor | None, instead: torch.Tensor | None) -> torch.Tensor | None:
    return instead if value is None else value.detach().clone().float()


def do(job: Job, folder: Path) -> None:
    engine = start(job)
    result: dict[str, Any] = {}
    if job.load is not None:
        path, client = engine.load_checkpoint(job.load, job.tag, **(job.options or {}))
        own = {key: client[key] for key in CLIENT if key in client} if client else client
        result |= {"path": path, "client": own}
    moments = job.load is not None and not job.raw  # DeepSpeed's function knows none before it has stepped twice
    result["before"] = seen(engine, moments=moments)
    held = {"before": raw(engine)} if job.raw else {}
    losses = []
    for number in range(job.first, job.last):
        if number == job.save_at:
            engine.save_checkpoint(job.save, job.tag, client_state=CLIENT, **(job.save_options or {}))
            result["saved"] = seen(engine, moments=moments)
            held |= {"saved": raw(engine)} if job.raw else {}
        losses.append(step(engine, number))
    result |= {"losses": losses, "after": seen(engine, moments=moments)}
    held |= {"after": raw(engine)} if job.raw else {}
    torch.save(held, folder / f"{job.name}.rank{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        torch.save(result, folder / f"{job.name}.pt")
    engine.destroy()


def main() -> None:
    for job in json.loads(sys.argv[2]):
        do(Job(**job), Path(sys.argv[1]))
        print("done", job["name"], flush=True)


if __name__ == "__main__":
    main()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the process group's teardown aborts now and then
