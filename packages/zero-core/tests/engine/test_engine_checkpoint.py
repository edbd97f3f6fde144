"""Saving and loading what the user's loop needs to go on: groups, schedules, counters, client state."""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine_cases import RANKS, STAGES, build, config, outcome, train, weights
from torch import nn

import zero_core
from zero_ckpt import open_checkpoint
from zero_comm import DesyncError, PeerError, run_ranks


def engine_of(stage: int, how: str, model: nn.Module | None = None) -> zero_core.Engine:
    """Two param groups, and a schedule of this package or of torch."""
    model = model if model is not None else build()
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 5e-3},
    ]
    settings = config(stage)
    arguments: dict[str, Any] = {}
    if how == "ours":
        settings["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}}
    else:
        arguments["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.01, 0.02], total_steps=10
        )
    return zero_core.initialize(model=model, model_parameters=groups, config=settings, **arguments)[0]


def bits(engine: zero_core.Engine) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in weights(engine).items()}


def save_and_go_on(folder: str, stage: int, how: str) -> dict[str, Any]:
    engine = engine_of(stage, how)
    train(engine, 0, 3)
    engine.optimizer.param_groups[1]["weight_decay"] = 0.25  # type: ignore[union-attr]
    engine.save_checkpoint(folder, client_state={"epoch": 2, "seen": [1, 2.5, "x", None]})
    first = train(engine, 3, 5), bits(engine), engine.get_lr()

    fresh = engine_of(stage, how, build(seed=1))
    path, client_state = fresh.load_checkpoint(folder)
    group = {k: v for k, v in fresh.optimizer.param_groups[1].items() if k != "params"}  # type: ignore[union-attr]
    counters = (fresh.global_steps, fresh.micro_steps, fresh.skipped_steps)
    second = train(fresh, 3, 5), bits(fresh), fresh.get_lr()
    return {"same": first == second, "client": client_state, "path": path, "group": group, "counters": counters}


@pytest.mark.parametrize("how", ("ours", "torch's"))
@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_bitwise_with_groups_and_schedules(stage: int, how: str, tmp_path: Path) -> None:
    for seen in run_ranks(save_and_go_on, RANKS, str(tmp_path), stage, how):
        assert seen["same"] and seen["client"] == {"epoch": 2, "seen": [1, 2.5, "x", None]}
        assert seen["group"]["weight_decay"] == 0.25 and isinstance(seen["group"]["betas"], tuple)
        assert seen["counters"] == (3, 3, 0) and seen["path"].endswith("global_step3")


def save(folder: str, stage: int) -> dict[str, Any]:
    engine = engine_of(stage, "ours")
    train(engine, 0, 3)
    engine.save_checkpoint(folder, tag="mine", save_latest=False)
    return {"weights": bits(engine), "lr": engine.get_lr()}


def load(folder: str, stage: int, options: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(stage, "ours", build(seed=1))
    engine.load_checkpoint(folder, tag="mine", **options)
    state = engine.full_state(engine.module.head.weight, "exp_avg")
    return {
        "weights": bits(engine),
        "lr": engine.get_lr(),
        "state": bool(state.any()),
        "scheduler": engine.lr_scheduler.state_dict()["last_batch_iteration"],  # type: ignore[union-attr]
        "steps": engine.global_steps,
    }


@pytest.mark.parametrize(
    ("options", "state", "iteration", "steps"),
    [
        ({}, True, 2, 3),
        ({"load_optimizer_states": False}, False, 2, 3),
        ({"load_lr_scheduler_states": False}, True, -1, 3),
        ({"load_module_only": True}, False, -1, 0),
    ],
)
def test_parts_of_a_checkpoint_can_be_left_out(
    options: dict[str, Any], state: bool, iteration: int, steps: int, tmp_path: Path
) -> None:
    saved = run_ranks(save, RANKS, str(tmp_path), 3)[0]
    for seen in run_ranks(load, RANKS, str(tmp_path), 3, options):
        assert seen["weights"] == saved["weights"] and seen["state"] is state and seen["steps"] == steps
        assert seen["scheduler"] == iteration


def differing_choices(folder: str, call: str, on_one: dict[str, Any]) -> str:
    """The error where rank 1 calls the same with ``on_one`` too."""
    engine = engine_of(1, "ours")
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="mine")
    with pytest.raises(DesyncError) as info:
        getattr(engine, call)(folder, tag="mine", **(on_one if dist.get_rank() == 1 else {}))
    return str(info.value)


@pytest.mark.parametrize(
    ("call", "on_one", "words"),
    [
        ("load_checkpoint", {"load_module_strict": False}, "without names that must fit"),
        ("load_checkpoint", {"load_optimizer_states": False}, "without optimizer states"),
        ("load_checkpoint", {"load_lr_scheduler_states": False}, "without the schedule"),
        (
            "load_checkpoint",
            {"load_module_only": True},
            "without optimizer states, without the schedule, without count",
        ),
        ("load_checkpoint", {"custom_load_fn": print}, "weights by custom_load_fn"),
        ("save_checkpoint", {"save_latest": False}, "without latest"),
        ("save_checkpoint", {"exclude_frozen_parameters": True}, "without frozen parameters"),
    ],
)
def test_ranks_that_choose_differently_are_refused(
    call: str, on_one: dict[str, Any], words: str, tmp_path: Path
) -> None:
    for message in run_ranks(differing_choices, 2, str(tmp_path), call, on_one):
        assert f"rank 1: {call[:4]} '{tmp_path}/mine, {words}" in message


def resumes_on_one_rank(folder: str, saved: bool) -> str:
    engine = engine_of(3, "ours")
    if saved:
        engine.save_checkpoint(folder)
    with pytest.raises(DesyncError) as info:
        if dist.get_rank() == 0:
            engine.resume(folder)
        else:
            train(engine, 0, 1)
    return str(info.value)


@pytest.mark.parametrize("saved", (False, True), ids=("nothing saved", "saved"))
def test_a_rank_that_resumes_alone_is_named_on_all(saved: bool, tmp_path: Path) -> None:
    for message in run_ranks(resumes_on_one_rank, 2, str(tmp_path), saved):
        assert "rank 0: resume ''" in message and "rank 1: forward ''" in message


def resumes_after_a_failure_of_one_rank(folder: str) -> dict[str, bytes]:
    engine = engine_of(3, "ours")
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    saved = bits(engine)
    try:
        if dist.get_rank() == 1:
            engine.module.head.register_forward_pre_hook(lambda *given: 1 / 0)
        train(engine, 2, 3)
    except (ZeroDivisionError, PeerError):
        engine.module.head._forward_pre_hooks.clear()
        resumed = engine.resume(folder)
    assert resumed is not None and resumed.step == 2 and bits(engine) == saved
    train(engine, 2, 3)
    return bits(engine)


def test_ranks_resume_after_a_failure_of_one_of_them(tmp_path: Path) -> None:
    one, other = run_ranks(resumes_after_a_failure_of_one_rank, 2, str(tmp_path))
    assert one == other


def refused(folder: str) -> list[str]:
    engine = engine_of(1, "ours")
    return [
        outcome(lambda: engine.load_checkpoint(folder)),
        outcome(lambda: engine.load_checkpoint(folder, tag="no such tag")),
        outcome(lambda: engine.save_checkpoint("")),
        outcome(lambda: engine.save_checkpoint(folder, client_state={"model": build()})),
    ]


def test_a_checkpoint_that_is_not_there_or_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for messages in run_ranks(refused, RANKS, str(tmp_path)):
        assert all("Error" in message.split(":")[0] for message in messages), messages
        assert "no such tag" in messages[1] and "directory" in messages[2] and "client_state" in messages[3], messages


def save_behind(folder: str, stage: int) -> dict[str, Any]:
    """Save while training goes on; what is saved is the state at the call."""
    settings = {**config(stage), "checkpoint": {"writer": {"decoupled": True}}}
    engine = zero_core.initialize(model=build(), config=settings)[0]
    train(engine, 0, 2)
    saved = bits(engine)
    engine.save_checkpoint(folder)
    train(engine, 2, 4)
    fresh = zero_core.initialize(model=build(seed=1), config=settings)[0]
    engine.save_checkpoint(folder)
    after = bits(engine)
    path, _ = engine.load_checkpoint(folder, tag="global_step2")
    found = {"same": bits(engine) == saved, "path": path}
    engine.destroy()
    fresh.load_checkpoint(folder)
    return {**found, "newest": bits(fresh) == after, "steps": fresh.global_steps}


@pytest.mark.parametrize("stage", (0, 3))
def test_a_save_behind_training_holds_the_state_at_its_call(stage: int, tmp_path: Path) -> None:
    for seen in run_ranks(save_behind, RANKS, str(tmp_path), stage):
        assert seen["same"] and seen["newest"] and seen["steps"] == 4
        assert seen["path"].endswith("global_step2")


WIDE = 1 << 21
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}


def save_and_change(folder: Path, case: tuple[int, str, bool], decoupled: bool) -> None:
    """Two steps and a save, after each of two rounds; right behind the save all that can change changes."""
    stage, tier, bf16 = case
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": WIDE // 4}
    for key, section in TIERS[tier].items():
        if stage == 3 or (stage and key == "offload_optimizer"):
            zero[key] = {**section, **({"nvme_path": str(folder.parent)} if tier == "nvme" else {})}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        "checkpoint": {"writer": {"decoupled": decoupled}},
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, WIDE // 16), nn.Tanh(), nn.BatchNorm1d(WIDE // 16))
    engine = zero_core.initialize(model=model, config=settings)[0]
    x = torch.randn(2, 16, dtype=torch.bfloat16 if bf16 else torch.float32)
    for number in range(2):
        for _ in range(2):
            engine.backward(engine(x).float().square().mean())
            engine.step()
        engine.save_checkpoint(folder, tag=f"{number}")
        if stage < 3:
            for parameter in engine.module.parameters():
                parameter.data.add_(1.0)
        engine.backward(engine(x).float().square().mean())
        if number:
            engine.set_full_state(engine.module[0].weight, "exp_avg", torch.zeros(WIDE // 16, 16))
            engine.set_full_param(engine.module[0].weight, torch.ones(WIDE // 16, 16))
        engine.step()
    engine.destroy()


def behind_and_at_once(root: str, cases: list[tuple[int, str, bool]]) -> list[str]:
    """Cases in which a save behind training holds other bits than one that training waits for."""
    wrong = []
    for number, case in enumerate(cases):
        folders = [Path(root) / f"{number}" / how for how in ("behind", "at once")]
        folders[0].parent.mkdir(exist_ok=True)
        for folder in folders:
            save_and_change(folder, case, folder.name == "behind")
        for tag in ("0", "1") if dist.get_rank() == 0 else ():
            one, other = (open_checkpoint(folder, tag) for folder in folders)
            different = one.tensors.keys() ^ other.tensors.keys()
            different |= {key for key in one.tensors if one.read(*key) != other.read(*key)}
            if different or len(one.tensors) < 13:
                wrong.append(f"{case}, save {tag}: {sorted(different)} of {len(one.tensors)}")
    return wrong


REPRESENTATIVE = [(0, "device", False), (1, "nvme", True), (2, "device", True), (3, "cpu", False), (3, "device", True)]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, REPRESENTATIVE[1:4]),
        (2, REPRESENTATIVE),
        *(
            pytest.param(world_size, list(itertools.product(STAGES, TIERS, (False, True))), marks=pytest.mark.soak)
            for world_size in (1, 2, 3)
        ),
    ],
)
def test_what_is_copied_behind_training_has_the_bits_of_the_step(
    world_size: int, cases: list[tuple[int, str, bool]], tmp_path: Path
) -> None:
    assert run_ranks(behind_and_at_once, world_size, str(tmp_path), cases)[0] == []


def fail_behind(folder: str) -> tuple[list[str], list[str]]:
    settings = {**config(2), "checkpoint": {"writer": {"decoupled": True}}}
    engine = zero_core.initialize(model=build(), config=settings)[0]
    Path(folder).write_text("a file where the directory should be")
    engine.save_checkpoint(folder)
    failures = []
    for step in range(200):
        failures.append(outcome(lambda step=step: train(engine, step, step + 1)))  # type: ignore[misc]
        if failures[-1] != "no error":
            break
        time.sleep(0.01)
    after = [outcome(lambda: train(engine, 200, 202)), outcome(engine.destroy)]
    return failures[-1:], after


def test_what_a_save_behind_met_surfaces_at_a_later_step_and_training_goes_on(tmp_path: Path) -> None:
    for failures, after in run_ranks(fail_behind, RANKS, str(tmp_path / "taken")):
        assert "CheckpointError" in failures[0] and "taken" in failures[0], failures
        assert after == ["no error", "no error"], after


DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}
PRECISION: dict[str, Any] = {
    "fp64": config,
    "bf16": lambda stage: config(stage, bf16={"enabled": True}, data_types={}),
}


def on_nodes(root: str, stage: int, how: str) -> dict[str, Any]:
    """Each rank is a node with a file system of its own."""
    name, before = f"node{dist.get_rank()}", Path.cwd()
    Path(root, name).mkdir(exist_ok=True)
    os.chdir(Path(root, name))
    try:  # later tests run in the same process
        with mock.patch.object(socket, "gethostname", lambda: name):
            return saves_and_loads(stage, how)
    finally:
        os.chdir(before)


def saves_and_loads(stage: int, how: str) -> dict[str, Any]:
    settings = {**PRECISION[how](stage), "checkpoint": {"use_node_local_storage": True}}
    dtype = DTYPES[how]

    def make(seed: int) -> zero_core.Engine:
        model = build(seed=seed)
        model.register_buffer("running", torch.full((3,), float(seed)))
        return zero_core.initialize(model=model, config=settings)[0]

    engine = make(0)
    train(engine, 0, 2, dtype)
    engine.save_checkpoint("ckpt")
    train(engine, 2, 4, dtype)
    fresh = make(1)
    fresh.load_checkpoint("ckpt")
    train(fresh, 2, 4, dtype)
    files = sorted(path.name for path in Path("ckpt", "global_step2").glob("rank-*"))
    return {"same": bits(fresh) == bits(engine), "files": files, "buffer": fresh.module.running.tolist()}


@pytest.mark.parametrize("how", ("fp64", "bf16"))
@pytest.mark.parametrize("stage", STAGES)
def test_nodes_without_a_common_file_system_keep_what_their_ranks_need(stage: int, how: str, tmp_path: Path) -> None:
    for rank, seen in enumerate(run_ranks(on_nodes, RANKS, str(tmp_path), stage, how)):
        assert seen["same"] and seen["files"] == [f"rank-{rank:05d}.safetensors"] and seen["buffer"] == [0.0] * 3


def load_by(folder: str, stage: int, how: str) -> dict[str, Any]:
    settings, dtype = PRECISION[how](stage), DTYPES[how]
    engine = zero_core.initialize(model=build(), config=settings)[0]
    train(engine, 0, 3, dtype)
    engine.save_checkpoint(folder)
    train(engine, 3, 5, dtype)

    other = nn.Module()  # another tree: the same model one level deeper
    other.inner = build(seed=1)
    fresh = zero_core.initialize(model=_Wrapped(other), config=settings)[0]
    seen: list[Any] = []

    def custom(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        seen.append(sorted(src))
        found = dict(dst.named_parameters())
        found_names = {name.removeprefix("inner.inner.") for name in found}
        for name, value in src.items():
            if name in found_names:
                found[f"inner.inner.{name}"].copy_(value)

    fresh.load_checkpoint(folder, load_optimizer_states=False, custom_load_fn=custom)
    names = [name for name, _ in [*engine.module.named_parameters(), *engine.module.named_buffers()]]
    engine.load_checkpoint(folder)
    ours = {f"inner.inner.{name}": value for name, value in bits(engine).items()}
    same_names = sorted(seen[0]) == sorted(names)

    def zeros(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        for name, parameter in dst.named_parameters():
            parameter.copy_(src[name])

    again = zero_core.initialize(model=build(seed=2), config=settings)[0]
    again.load_checkpoint(folder, custom_load_fn=zeros)
    train(again, 3, 5, dtype)
    train(engine, 3, 5, dtype)
    return {"weights": ours, "fresh": bits(fresh), "names": same_names, "goes_on": bits(again) == bits(engine)}


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner.inner(*args)


@pytest.mark.parametrize("how", ("fp64", "bf16"))
@pytest.mark.parametrize("stage", STAGES)
def test_a_function_of_the_users_loads_the_weights_under_other_names(stage: int, how: str, tmp_path: Path) -> None:
    for seen in run_ranks(load_by, RANKS, str(tmp_path), stage, how):
        assert seen["names"] and seen["goes_on"]
        if how == "fp64":
            assert seen["fresh"] == seen["weights"]


def report_of_partial(folder: str) -> dict[str, Any]:
    engine = zero_core.initialize(model=build(), config=config(3))[0]
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    model = build(seed=1)
    model.extra = nn.Linear(2, 2)
    other = zero_core.initialize(model=model, config=PRECISION["bf16"](1))[0]
    other.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False)
    report = other.load_report
    assert report is not None
    return {name: getattr(report, name) for name in ("loaded", "defaulted", "ignored", "converted", "not_requested")}


def test_what_a_load_did_is_kept_name_by_name(tmp_path: Path) -> None:
    names = {f"{name} (param)" for name, _ in build().named_parameters()}
    for seen in run_ranks(report_of_partial, RANKS, str(tmp_path)):
        assert set(seen["loaded"]) == {*names, "shift (buffer)"} and not seen["ignored"]
        assert set(seen["converted"]) == names
        assert sorted(seen["defaulted"]) == ["extra.bias (param)", "extra.weight (param)"]
        assert "exp_avg" in seen["not_requested"]


def save_callable(folder: str) -> str:
    engine = zero_core.initialize(model=build(), config=config(1))[0]
    engine.optimizer.param_groups[0]["hook"] = {"inner": print}  # type: ignore[union-attr]
    return outcome(lambda: engine.save_checkpoint(folder))


def test_a_function_in_a_param_group_is_refused_with_its_path(tmp_path: Path) -> None:
    for message in run_ranks(save_callable, RANKS, str(tmp_path)):
        assert "client_state['param_groups'][0]['hook']['inner']" in message
