"""The tensors in param groups stand where the user listed their parameters, on every rank, stage and tier."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import training
import zoo
from training import DTYPES, LR, Run, deviation

import zero_core
from zero_comm import run_ranks
from zero_partition import PartitionError

STAGES = (0, 1, 2, 3)
SOAK = pytest.mark.soak


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups, not in the model's order; the first has a frozen parameter in it."""
    model.blocks[1].up.weight.requires_grad_(False)
    parameters = list(model.parameters())
    return [{"params": parameters[::2][::-1]}, {"params": parameters[1::2], "lr": LR / 2}]


def by_position(optimizer: Any, model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Each listed parameter's name beside the tensor at its place."""
    names = {id(p): name for name, p in model.named_parameters()}
    listed = [names[id(p)] for group in groups_of(model) for p in group["params"]]
    return list(zip(listed, (t for group in optimizer.param_groups for t in group["params"]), strict=True))


def in_hooks(optimizer: Any, model: torch.nn.Module) -> None:
    """Give one parameter, found by its place, twice its gradient before each step, and take a tenth of another's weight
    after it. No gradient is looked for twice: in torch each of these has one."""
    order = [name for name, _ in by_position(optimizer, model)]
    doubled, shrunk = order.index("blocks.0.down.weight"), order.index("blocks.1.down.weight")

    def tensors(opt: Any) -> list[torch.Tensor]:
        return [t for group in opt.param_groups for t in group["params"]]

    def double(opt: Any, *_: Any) -> None:
        tensors(opt)[doubled].grad.mul_(2.0)

    def shrink(opt: Any, *_: Any) -> None:
        tensors(opt)[shrunk].data.mul_(0.9)
        for tensor in tensors(opt):  # a state of the hook's own
            opt.state[tensor].setdefault("first", tensor.detach().clone())

    optimizer.register_step_pre_hook(double)
    optimizer.register_step_post_hook(shrink)


def plain(steps: int, *, hooked: bool) -> tuple[dict[str, torch.Tensor], Any]:
    model = zoo.build("plain")
    optimizer = torch.optim.AdamW(groups_of(model), lr=LR)
    if hooked:
        in_hooks(optimizer, model)
    for step in range(steps):
        sum(model(*zoo.batch(step, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, copy.deepcopy(optimizer.state_dict())


def positions(stages: tuple[int, ...], zero: dict[str, Any], dtype: str) -> list[Any]:
    """By stage: (name, full shape, this rank's tensor's elements, its weights' and states' elements by place)."""
    found = []
    for stage in stages:
        model = zoo.build("plain", DTYPES["fp32" if dtype == "bf16" else dtype])
        optimizer = torch.optim.AdamW(groups_of(model), lr=LR)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        settings = training.config(Run(dtype=dtype), stage, torch.distributed.get_world_size(), **zero)
        engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
        training.train(engine, Run(dtype=dtype), 0, 2)
        rows = []
        state = engine.optimizer.state_dict()["state"]
        for place, (name, tensor) in enumerate(by_position(engine.optimizer, engine.module)):
            kept = state.get(place, {}).get("exp_avg")
            full = engine.full_state(dict(engine.module.named_parameters())[name], "exp_avg") if kept_by(name) else None
            part = (
                None
                if kept is None or full is None
                else bool(torch.isin(kept.flatten(), full.flatten().to(kept)).all())
            )
            assert tensor.shape == shapes[name]
            rows.append((name, shapes[name], held_shape(tensor), 0 if kept is None else kept.numel(), part))
        found.append(rows)
        engine.destroy(unshard=False)
    return found


def held_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the part that this rank has of a parameter, whose shape its tensor gives."""
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(tensor.shape)


def kept_by(name: str) -> bool:
    return name != "blocks.1.up.weight"


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("tier", ["device", "cpu", pytest.param("nvme", marks=SOAK)])
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_listed_parameters_keep_their_places(world: int, tier: str, dtype: str, tmp_path: Path) -> None:
    if tier != "device" and dtype == "fp64":
        dtype = "fp32"
    zero = {} if tier == "device" else {"offload_optimizer": {"device": tier, "nvme_path": str(tmp_path)}}
    stages = STAGES if tier == "device" else STAGES[1:]
    results = run_ranks(positions, world, stages, zero, dtype)
    for number, stage in enumerate(stages):
        for place, (name, shape, _, _, _) in enumerate(results[0][number]):
            ranks = [result[number][place] for result in results]
            assert all(row[:2] == (name, shape) for row in ranks)
            elements = [torch.Size(row[2]).numel() for row in ranks]
            trained = shape.numel() if kept_by(name) else 0
            if stage == 0:
                assert all(row[2] == (tuple(shape) if trained else (0,)) for row in ranks), (name, ranks)
                assert elements == [row[3] for row in ranks] == [trained] * world
            else:
                assert sum(elements) == trained == sum(row[3] for row in ranks), (stage, name, ranks)
            assert all(row[4] is not False for row in ranks), (stage, name)


def hooked(stages: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in stages:
        model = zoo.build("plain")
        optimizer = torch.optim.AdamW(groups_of(model), lr=LR)
        settings = training.config(Run(), stage, torch.distributed.get_world_size())
        engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
        in_hooks(engine.optimizer, engine.module)
        training.train(engine, Run(), 0, 2)
        engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
        training.train(engine, Run(), 2, 3)
        found.append(training.weights(engine))
        engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_hooks_find_gradients_and_weights_by_place(world: int) -> None:
    expected, _ = plain(3, hooked=True)
    for result in run_ranks(hooked, world, STAGES):
        assert max(deviation(weights, expected) for weights in result) < 1e-12


def changes_groups(stages: tuple[int, ...], zero: dict[str, Any]) -> list[tuple[list[str], dict[str, torch.Tensor]]]:
    """By stage: what the step says about each change of the param groups, and the weights after it was put back."""
    found = []
    for stage in stages:
        model = zoo.build("plain")
        settings = training.config(Run(), stage, torch.distributed.get_world_size(), **(zero if stage else {}))
        optimizer = torch.optim.AdamW(groups_of(model), lr=LR)
        engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
        training.train(engine, Run(), 0, 1)
        texts = []
        for change in CHANGES:
            groups = engine.optimizer.param_groups
            present = [list(group["params"]) for group in groups]
            change(groups)
            with pytest.raises(PartitionError) as refused:
                training.train(engine, Run(), 1, 2)
            texts.append(str(refused.value))
            del groups[2:]
            for group, tensors in zip(groups, present, strict=True):
                group["params"] = tensors
            engine.zero_grad()
        training.train(engine, Run(), 1, 2)
        found.append((texts, training.weights(engine)))
        engine.destroy(unshard=False)
    return found


def move(groups: Any) -> None:
    """The last of the first group becomes the first of the second, so that the order of all stays."""
    groups[1]["params"].insert(0, groups[0]["params"].pop())


CHANGES = (
    move,
    lambda groups: groups[1]["params"].append(groups[0]["params"].pop(0)),
    lambda groups: groups[1]["params"].append(groups[0]["params"][0]),
    lambda groups: groups[0]["params"].pop(0),
    lambda groups: groups[0]["params"].reverse(),
    lambda groups: groups[0]["params"].append(torch.nn.Parameter(torch.ones(2))),
    lambda groups: groups.append({**groups[0], "params": []}),
)


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["device", "cpu"])
def test_a_parameter_moved_between_groups_is_refused_by_name_and_both_groups(zero: dict[str, Any]) -> None:
    model = zoo.build("plain")
    names = {id(p): name for name, p in model.named_parameters()}
    listed = [[names[id(p)] for p in group["params"]] for group in groups_of(model)]
    last, first = listed[0][-1], listed[0][0]
    expected = (
        f"parameter '{last}' is in param_groups[1], expected in param_groups[0]",
        f"parameter '{first}' is in param_groups[1], expected in param_groups[0]",
        f"parameter '{first}' is in param_groups[0] and again in param_groups[1]",
        f"parameter '{first}' is no longer in param_groups[0]",
        "the parameters of param_groups[0] are in another order",
        "param_groups[0] has a tensor of shape (2,) that initialize did not put there",
        "there are 3 groups, expected 2",
    )
    weights, _ = plain(2, hooked=False)
    for found in run_ranks(changes_groups, 2, STAGES, zero):
        for texts, trained in found:
            assert all(part in text for part, text in zip(expected, texts, strict=True)), texts
            assert deviation(trained, weights) <= 1e-12


def gradients_in_a_step_hook(zero: dict[str, Any]) -> list[str]:
    """By stage: what became of a step whose pre-hook reads the gradients of the param groups' tensors."""
    found = []
    for stage in STAGES[1:]:
        engine = training.start(Run(), stage, **zero)
        handle = engine.optimizer.register_step_pre_hook(
            lambda optimizer, *_: [t.grad for group in optimizer.param_groups for t in group["params"]]
        )
        with pytest.raises(PartitionError) as refused:
            training.train(engine, Run(), 0, 1)
        handle.remove()
        found.append(str(refused.value))
        engine.destroy(unshard=False)
    return found


def test_a_step_hook_that_reads_gradients_is_refused_by_the_tier_that_updates() -> None:
    for texts in run_ranks(gradients_in_a_step_hook, 2, {"offload_optimizer": {"device": "cpu"}}):
        for text in texts:
            assert "belongs to parameter 'embedding.weight'" in text, text
            assert "was read in a step hook. Where a tier updates the weights, step hooks have no gradients." in text
            assert "engine.full_grad(p)" in text
