"""Attacks by user code on a save that is written in the background, right after its call.

The checkpoint is compared, to the bit, with one that was written at once just before.
"""

from __future__ import annotations

import copy
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_core
from zero_ckpt import CheckpointError, open_checkpoint
from zero_core.checkpoint import Saver
from zero_core.checkpoint.saving import OwnDialect

WIDTH = 1 << 14
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    "nvme elsewhere": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}
"""Checkpoints of the last lie on another file system than the tier's files, and cannot link them."""
HOLD_SECONDS = 0.3
"""For so long nothing is copied once a save has returned: what is done meanwhile is done before its copy."""


class Net(nn.Module):
    """Two units at stage 3, a tied weight, a frozen parameter, a buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, 16)
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))) * self.frozen[:16]


def start(folder: Path, stage: int, tier: str, dtype: str, changes: dict[str, Any]) -> zero_core.Engine:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1}
    for key, section in TIERS[tier].items():
        if stage == 3 or (stage and key == "offload_optimizer"):
            zero[key] = {**section, **({"nvme_path": str(folder)} if "nvme" in tier else {})}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bf16"},
        "checkpoint": {"writer": {"decoupled": True}},
        **changes,
    }
    torch.manual_seed(0)
    return zero_core.initialize(model=Net(), config=settings)[0]


def step(engine: zero_core.Engine, number: int = 0) -> None:
    dtype = torch.bfloat16 if engine.resolved_config.bf16.enabled else torch.float32
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(number)).to(dtype)
    engine.backward(engine(x).float().square().mean())
    engine.step()


# -- what user code does right after the call; each returns nothing and leaves an engine that trains on ----------------


def trains(engine: zero_core.Engine, folder: Path) -> None:
    step(engine, 7)


def writes_in_place(engine: zero_core.Engine, folder: Path) -> None:
    if engine.zero_optimization_stage() < 3:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.add_(1.0)
    else:
        with engine.gathered(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.add_(1.0)


def writes_by_data(engine: zero_core.Engine, folder: Path) -> None:
    if engine.zero_optimization_stage() < 3:
        for parameter in engine.module.parameters():
            parameter.data.mul_(2.0)
    engine.module.norm.running_mean.zero_()


def assigns_data(engine: zero_core.Engine, folder: Path) -> None:
    weight = engine.module.second.bias
    weight.data = torch.full_like(weight, 3.0)


def writes_states(engine: zero_core.Engine, folder: Path) -> None:
    weight = engine.module.first.weight
    engine.set_full_state(weight, "exp_avg", torch.zeros(weight.shape))
    engine.set_full_param(weight, torch.ones(weight.shape))


def loads(engine: zero_core.Engine, folder: Path) -> None:
    engine.load_checkpoint(folder, tag="warm")


def saves_again(engine: zero_core.Engine, folder: Path) -> None:
    step(engine, 8)
    engine.save_checkpoint(folder, tag="another")


def fails_in_forward(engine: zero_core.Engine, folder: Path) -> None:
    try:
        engine(torch.ones(2, 3))
    except (RuntimeError, ValueError):
        pass
    step(engine, 9)


def freezes(engine: zero_core.Engine, folder: Path) -> None:
    engine.module.first.weight.requires_grad_(False)
    engine.module.first.weight.requires_grad_(True)
    if engine.zero_optimization_stage() < 3:  # elsewhere it is released, and a write is refused
        engine.module.frozen.data.zero_()


def parks(engine: zero_core.Engine, folder: Path) -> None:
    engine.offload_states()
    engine.reload_states()
    step(engine, 10)


def reads(engine: zero_core.Engine, folder: Path) -> None:
    engine.full_param(engine.module.first.weight)
    engine.full_state(engine.module.first.weight, "exp_avg")
    engine.consolidated_state_dict()
    step(engine, 11)


def loads_optimizer(engine: zero_core.Engine, folder: Path) -> None:
    optimizer: Any = engine.optimizer
    if engine.offloading.update is None:
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["exp_avg"].zero_()
        optimizer.load_state_dict(state)
    step(engine, 12)


def writes_states_by_data(engine: zero_core.Engine, folder: Path) -> None:
    """A write that leaves no trace on the tensor."""
    optimizer: Any = engine.optimizer
    for state in optimizer.state.values():
        state["exp_avg"].data.fill_(3.0)
    for state in optimizer.state.values():
        assert engine.zero_optimization_stage() == 0 or bool((state["exp_avg"] == 3.0).all())
    step(engine, 13)


def writes_copied_states(engine: zero_core.Engine, folder: Path) -> None:
    """Writes through a shallow copy of ``optimizer.state``, which holds the same tensors."""
    optimizer: Any = engine.optimizer
    for state in copy.copy(optimizer.state).values():
        state["exp_avg"].data.fill_(3.0)
    step(engine, 14)


def writes_states_of_copy(engine: zero_core.Engine, folder: Path) -> None:
    """The same through the dict's own ``copy``."""
    optimizer: Any = engine.optimizer
    for state in optimizer.state.copy().values():
        state["exp_avg"].data.fill_(3.0)
    step(engine, 15)


def reads_all_states(engine: zero_core.Engine, folder: Path) -> None:
    """Everything that reads ``optimizer.state`` as a whole, while nothing is copied yet."""
    optimizer: Any = engine.optimizer
    assert len(repr(optimizer.state)) > 100
    copied = copy.deepcopy(optimizer.state)
    assert len(pickle.dumps(optimizer.state)) > 100 and len(copied) == len(optimizer.state)
    for state in copied.values():
        for value in state.values():
            value.data.fill_(3.0)
    step(engine, 16)


def destroys(engine: zero_core.Engine, folder: Path) -> None:
    module = engine.module
    engine.destroy()
    for parameter in module.parameters():
        parameter.data.zero_()


ACTIONS: tuple[Callable[[zero_core.Engine, Path], None], ...] = (
    trains,
    writes_in_place,
    writes_by_data,
    assigns_data,
    writes_states,
    loads,
    saves_again,
    fails_in_forward,
    freezes,
    parks,
    reads,
    loads_optimizer,
    writes_states_by_data,
    writes_copied_states,
    writes_states_of_copy,
    reads_all_states,
    destroys,
)


def differences_after_unseen_writes(root: str, stage: int) -> list[str]:
    """Where a background save, after a write that leaves no trace, has another checkpoint or other weights behind
    it than one at once."""
    found, weights = [], []
    for name, decoupled in (("behind", True), ("at once", False)):
        changes = {"checkpoint": {"writer": {"decoupled": decoupled}}}
        engine = start(Path(root), stage, "device", "bf16", changes)
        for number in range(2):
            step(engine, number)
        for parameter in engine.module.parameters():
            if parameter.requires_grad and stage < 3:
                parameter.detach().view(torch.int16).view(-1)[::3].numpy()[:] = 0x3FC0  # 1.5, and torch sees no write
        engine.save_checkpoint(root, tag=name)
        step(engine, 5)
        engine.save_checkpoint(root, tag=f"{name} and a step")
        weights.append([engine.full_param(p) for p in engine.module.parameters() if p.requires_grad])
        engine.destroy()
    if not all(map(torch.equal, *weights)):
        found.append("the weights after the next step")
    for suffix in ("", " and a step"):
        one, other = (open_checkpoint(root, name + suffix) for name in ("behind", "at once"))
        assert one.tensors.keys() == other.tensors.keys()
        found += [f"{key}{suffix}" for key in one.tensors if one.read(*key) != other.read(*key)]
    if stage < 3:
        written = torch.frombuffer(
            bytearray(open_checkpoint(root, "behind").read("first.weight", "master")), dtype=torch.float32
        )
        assert bool((written[::3] == 1.5).all())
    return found


def refusal_of_traced_write(root: str, what: str) -> str:
    """The words of a background save when a state or a master taken before it is written right after it."""
    engine = start(Path(root), 2, "device", "bf16", {})
    step(engine)
    engine.save_checkpoint(root, tag="good")
    step(engine, 1)
    optimizer: Any = engine.optimizer
    masters = [unit.master for unit in engine.training_state.partition.units if unit.master is not None]
    kept = {"exp_avg": next(iter(optimizer.state.values()))["exp_avg"], "master": masters[0]}
    behind = engine._parts.checkpoints._saver._background_saver
    assert behind is not None
    behind.wait()
    returned = threading.Event()
    behind._copier.submit(returned.wait, 60)
    engine.save_checkpoint(root, tag="torn")
    kept[what].mul_(0.5)
    returned.set()
    try:
        behind.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def attack(root: str, stage: int, tier: str, dtype: str, changes: dict[str, Any], names: list[str]) -> list[str]:
    """Actions after which the checkpoint held anything but the state at its call, or that raised."""
    wrong = []
    for number, action in enumerate(a for a in ACTIONS if not names or a.__name__ in names):
        folder = Path(root) / f"{action.__name__}{number}"
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        engine = start(folder, stage, tier, dtype, changes)
        target = folder if "elsewhere" not in tier else Path(f"/dev/shm/{folder.parent.name}-{folder.name}")
        try:
            wrong += differences(engine, target, action)
        except Exception as error:
            wrong.append(f"{action.__name__}: {type(error).__name__}: {str(error)[:300]}")
            raise
        else:
            engine.destroy()
        finally:
            if target != folder and dist.get_rank() == 0:
                shutil.rmtree(target, ignore_errors=True)
    return wrong


def differences(engine: zero_core.Engine, folder: Path, action: Callable[[zero_core.Engine, Path], None]) -> list[str]:
    for number in range(2):
        step(engine, number)
    engine.save_checkpoint(folder, tag="warm")
    step(engine, 2)
    at_once = Saver(engine.training_state, engine.offloading, OwnDialect())
    at_once._decoupled = False
    at_once.save(folder, "at once", {}, save_latest=False, exclude_frozen=False)
    behind = engine._parts.checkpoints._saver._background_saver
    assert behind is not None
    behind.wait()
    returned = threading.Event()
    behind._copier.submit(lambda: returned.wait(60) and time.sleep(HOLD_SECONDS))
    engine.save_checkpoint(folder, tag="behind", save_latest=False)
    returned.set()
    action(engine, folder)
    behind.wait()
    if dist.get_rank():
        return []
    one, other = (open_checkpoint(folder, tag) for tag in ("behind", "at once"))
    different = one.tensors.keys() ^ other.tensors.keys()
    different |= {key for key in one.tensors if key in other.tensors and one.read(*key) != other.read(*key)}
    return [] if not different else [f"{action.__name__}: {sorted(different)} of {len(one.tensors)}"]
