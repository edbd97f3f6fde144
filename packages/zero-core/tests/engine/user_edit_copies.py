"""Casts, copies, loads and ties of edited weights, for plain torch and for the engine."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from user_edit_cases import LR, STEPS, WIDTH, Net, Plain, Sharded, casts_its_router, config, given, rows

import zero_core
from zero_partition import PartitionError


def routers(stage: int, tier: str, folder: str) -> dict[str, Any]:
    """A router that forward casts to float32 (Switch Transformers, NLLB-MoE): its movement, and its distance from one
    process that casts it from bfloat16 in every forward."""
    expected = Plain(Net(), torch.bfloat16)
    ours = Sharded(Net(casts_its_router), torch.bfloat16, stage, tier, folder)
    start = ours.weights()["router.weight"]
    for step in range(STEPS):
        router = expected.model.router
        cast = router.weight.detach().float().requires_grad_()
        batch = rows(step, torch.bfloat16, own=False)
        torch.func.functional_call(expected.model, {"router.weight": cast}, batch).backward()
        router.weight.grad = cast.grad.to(torch.bfloat16)
        for p, m in expected.masters:
            m.grad, p.grad = p.grad.float(), None
        expected.optimizer.step()
        with torch.no_grad():
            for p, m in expected.masters:
                p.copy_(m)
        with torch.no_grad():
            ours.engine(*rows(step, torch.bfloat16, own=True))  # a pass without a step
        ours.step(step)
    after = ours.weights()
    distance = max(float((after[n] - v).abs().max()) for n, v in expected.weights().items())
    return {"moved": float((after["router.weight"] - start).abs().max()), "distance": distance}


def copies(stage: int, tier: str, folder: str) -> dict[str, Any]:
    """Deep copies, pickles and state dicts of a model whose parameters may be released."""
    t = Sharded(Net(), torch.float64, stage, tier, folder)
    t.step(0)
    copied = copy.deepcopy(t.model)
    facts: dict[str, Any] = {
        "copy": all(torch.equal(p, t.weights()[n]) for n, p in copied.named_parameters()),
        "plain": type(copied.first._parameters) is dict and not hasattr(copied.first.weight, "_zero_partition"),
        "trains": bool(copied(*rows(0, torch.float64, own=False)).isfinite()),
    }
    for name, act in (
        ("pickle", lambda: pickle.dumps(t.model)),
        ("load", lambda: t.model.load_state_dict(copied.state_dict())),
    ):
        try:
            act()
            facts[name] = "done"
        except PartitionError as refusal:
            facts[name] = str(refusal)
    average = torch.optim.swa_utils.AveragedModel(t.model)
    with t.gathered(list(t.model.parameters())):
        average.update_parameters(t.model)
        if dist.get_rank() == 0:
            facts["inside"] = bool(copy.deepcopy(t.model).first.weight.isfinite().all())
    t.step(1)
    facts["average"] = all(p.isfinite().all() for p in average.module.parameters())
    return facts


def writes_after_use(stage: int, folder: str) -> str:
    """Return backward's error after forward has used a weight and then written it."""

    class Late(Net):
        def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            h = self.first(torch.tanh(self.first(x)))
            with torch.no_grad():
                self.first.weight.clamp_(-0.1, 0.1)
            return h.square().mean()

    try:
        Sharded(Late(), torch.float64, stage, "none", folder).step(0)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def saves_after_an_edit(stage: int, tier: str, name: str, folder: str) -> bool:
    """Return whether weights that were edited before a save are those of the checkpoint, masters too."""
    dtype: torch.dtype = getattr(torch, name)
    t = Sharded(Net(), dtype, stage, tier, folder)
    t.step(0)
    if stage < 3:
        t.model.first.weight.data.clamp_(-0.1, 0.1)
    with t.gathered([t.model.second.weight]):
        t.model.second.weight.data.clamp_(-0.1, 0.1)
    t.model.frozen.weight.data = given(t.model.frozen.weight.shape, dtype)
    edited = t.weights()
    master = t.engine.full_param(t.model.second.weight)
    t.engine.save_checkpoint(f"{folder}/saved")
    t.step(1)
    t.engine.load_checkpoint(f"{folder}/saved")
    again = t.weights()
    masters = t.engine.full_param(t.model.second.weight)
    clamped = float(masters.abs().max()) <= float(torch.tensor(0.1, dtype=dtype)) and torch.equal(master, masters)
    return clamped and all(torch.equal(again[n], v) for n, v in edited.items())


class Switched(nn.Module):
    """One unit with a weight that every forward uses, and one that a flag switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(given(torch.Size((4, WIDTH)), torch.bfloat16, 1))
        self.at_times = nn.Parameter(given(torch.Size((4, WIDTH)), torch.bfloat16, 2))
        self.on = True

    def forward(self, x: torch.Tensor, _tokens: torch.Tensor) -> torch.Tensor:
        weight = self.always + self.at_times if self.on else self.always
        return (x @ weight.t()).float().square().mean()


def skips_a_parameter_after_an_edit(stage: int, tier: str, folder: str) -> list[bool]:
    """Return whether a master keeps its digits over an edit of its unit's other weight and a step that gives it no
    gradient, and over checkpoints in memory and on disk after that."""
    in_memory = {"in_memory": {"every": 3, "path": f"{folder}/memory"}}
    t = Sharded(Switched(), torch.bfloat16, stage, tier, folder, checkpoint=in_memory)  # type: ignore[arg-type]
    t.step(0)
    master = t.engine.full_param(t.model.at_times)
    with t.gathered([t.model.always], modifier_rank=0):
        t.model.always.data.clamp_(-0.1, 0.1)
    t.model.on = False
    t.step(1)
    found = [
        not torch.equal(master, master.bfloat16().float()),
        torch.equal(t.engine.full_param(t.model.at_times), master),
    ]
    t.model.on = True
    with t.gathered([t.model.always], modifier_rank=0):
        t.model.always.data.clamp_(-0.1, 0.1)
    t.model.on = False
    t.step(2)
    t.model.on = True
    t.step(3)
    assert t.engine.resume(f"{folder}/none").source == "memory"
    found.append(torch.equal(t.engine.full_param(t.model.at_times), master))
    with t.gathered([t.model.always], modifier_rank=0):
        t.model.always.data.clamp_(-0.05, 0.05)
    t.model.on = False
    t.step(4)
    t.engine.save_checkpoint(f"{folder}/saved")
    t.model.on = True
    t.step(5)
    t.engine.load_checkpoint(f"{folder}/saved")
    return [*found, torch.equal(t.engine.full_param(t.model.at_times), master)]


def exchanges_a_parameter(stage: int, folder: str) -> str:
    """Return the error of a save after a module got a new `nn.Parameter`."""
    t = Sharded(Net(), torch.float64, stage, "none", folder)
    t.model.first.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
    try:
        t.engine.save_checkpoint(folder)
    except zero_core.UsageError as refusal:
        return str(refusal)
    return "saved"


def ties(kind: str) -> Net:
    """A model with two tensors over one memory."""
    net = Net().double()
    if kind == "data":
        net.second.weight.data = net.first.weight.data
    elif kind == "transposed":
        net.second.weight = nn.Parameter(net.first.weight.data.t())
    elif kind == "row":
        net.second.bias = nn.Parameter(net.first.weight.data[2])
    elif kind == "buffer":
        net.register_buffer("kept", net.first.weight.data[1:3])
    elif kind == "columns":
        both = torch.randn(WIDTH, 2 * WIDTH, dtype=torch.float64)
        net.first.weight, net.second.weight = nn.Parameter(both[:, :WIDTH]), nn.Parameter(both[:, WIDTH:])
    elif kind == "buffers":
        base = torch.ones(WIDTH, 2, dtype=torch.float64)
        net.register_buffer("one", base)
        net.register_buffer("other", base.t())
    return net


def tied(stage: int, tier: str, kind: str, folder: str) -> str:
    """What the engine says to a model of `ties`."""
    own = Path(folder, kind)  # a store has one owner
    own.mkdir(exist_ok=True)
    try:
        t = Sharded(ties(kind), torch.float64, stage, tier, str(own))
    except PartitionError as refusal:
        return str(refusal)
    if kind == "buffers":
        t.model.one.fill_(3.0)
        return "tied" if bool((t.model.other == 3).all()) else "apart"
    t.step(0)
    return "trains"


def ties_of(stage: int, tier: str, folder: str) -> dict[str, str]:
    return {k: tied(stage, tier, k, folder) for k in ("data", "transposed", "row", "buffer", "columns", "buffers")}


# -- PEFT ------------------------------------------------------------------------------------------------------------


def adapters(stage: int, dora: bool, tier: str, folder: str) -> dict[str, float]:
    """Merge, unmerge and train on: the distances from one process."""
    from peft import LoraConfig, get_peft_model

    def build() -> Any:
        torch.manual_seed(5)
        base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        options = LoraConfig(r=2, target_modules=["0", "2"], use_dora=dora, init_lora_weights=False)
        return get_peft_model(base, options).double()

    def loss(module: nn.Module, step: int, own: bool) -> torch.Tensor:
        return module(rows(step, torch.float64, own=own)[0]).square().mean()

    plain, ours = build(), build()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=LR, weight_decay=0.01)
    engine = zero_core.initialize(model=ours, config=config(torch.float64, stage, tier, folder))[0]
    for step in range(3):
        loss(plain, step, False).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(loss(engine, step, True))
        engine.step()
        if step == 1:
            plain.merge_adapter(safe_merge=True)
            with engine.gathered(list(ours.parameters())) if stage == 3 else nullcontext():
                ours.merge_adapter(safe_merge=True)
            merged = float((loss(plain, 9, False) - loss(engine, 9, False)).abs())
            plain.unmerge_adapter()
            with engine.gathered(list(ours.parameters())) if stage == 3 else nullcontext():
                ours.unmerge_adapter()
    with engine.gathered(list(ours.parameters())):
        pairs = zip(plain.parameters(), ours.parameters(), strict=True)
        apart = max(float((p - q).abs().nan_to_num(nan=1e9).max()) for p, q in pairs)
    return {"merged": merged, "apart": apart}
