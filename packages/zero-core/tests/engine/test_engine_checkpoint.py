"""Saving and loading what the user's loop needs to continue: groups, schedules, counters, client state."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine_cases import RANKS, STAGES, bits, build, config, outcome, train
from torch import nn

import zero_core
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
