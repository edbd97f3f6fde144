"""Checkpoints in DeepSpeed's formats load directly, at any world size and stage, and training continues as from ours.

The files are written here as DeepSpeed lays them out; test_foreign_checkpoints_peer.py takes DeepSpeed's own.
"""

from __future__ import annotations

import shutil
import sys
import types
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from named_cases import BATCH, Net, start, train
from torch import nn

from zero_ckpt import Checkpoint, CheckpointError, convert, open_checkpoint
from zero_ckpt.torch import torch_dtype
from zero_comm import run_ranks
from zero_deepspeed.engine import DeepSpeedEngine

RANKS = 2
"""Ranks of the run whose files are written."""
KINDS = ("exp_avg", "exp_avg_sq")


class HalfNet(Net):
    """Takes float32 samples in any dtype of its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.head.weight.dtype))


def fresh(seed: int) -> HalfNet:
    torch.manual_seed(seed)
    return HalfNet()


class DynamicLossScaler:
    """Pickled under the name of DeepSpeed's class."""


@pytest.fixture
def scaler(monkeypatch: pytest.MonkeyPatch) -> DynamicLossScaler:
    place = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    place.DynamicLossScaler = DynamicLossScaler  # type: ignore[attr-defined]
    monkeypatch.setattr(DynamicLossScaler, "__module__", place.__name__)
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, place.__name__, place)
    made = DynamicLossScaler()
    vars(made).update(dynamic=True, cur_scale=512.0, cur_iter=7, last_overflow_iter=4, cur_hysteresis=1)
    return made


def pieces(values: list[torch.Tensor], stage: int, rank: int) -> torch.Tensor:
    """Rank ``rank``'s flat tensor of one param group: below stage 3 of all together, else of each parameter."""
    flat = [value.reshape(-1).float() for value in values]
    flat = flat if stage == 3 else [torch.cat(flat)]
    step = 1 if stage == 3 else 2  # partitions begin at even elements
    sizes = [-(-value.numel() // (RANKS * step)) * step for value in flat]
    padded = [torch.cat([v, torch.zeros(RANKS * size - v.numel())]) for v, size in zip(flat, sizes, strict=True)]
    return torch.cat([value[rank * size :][:size] for value, size in zip(padded, sizes, strict=True)])


def value(saved: Checkpoint, name: str, kind: str) -> torch.Tensor:
    """A tensor of a checkpoint of ours, in full; a parameter without a master of its own is its own."""
    kind = "param" if (name, kind) not in saved.tensors else kind
    entry = saved.entry(name, kind)
    return torch.frombuffer(saved.read(name, kind), dtype=torch_dtype(entry.dtype)).reshape(entry.shape)


def write(engine: DeepSpeedEngine, root: Path, stage: int, client: dict[str, Any], loss_scaler: Any = None) -> Path:
    """Write the newest checkpoint in ``root``/native as ``RANKS`` ranks of DeepSpeed would; return the tag's folder."""
    saved = open_checkpoint(root / "native")
    shapes = [OrderedDict((name, parameter.shape) for name, parameter in engine.module.named_parameters())]
    names = list(shapes[0])
    held = {name: value(saved, name, "param") for name in names}
    folder = root / "theirs" / f"global_step{saved.step}"
    folder.mkdir(parents=True)
    counted = {"global_steps": saved.step, "global_samples": BATCH * saved.step, "skipped_steps": 1}
    schedule = {"last_batch_iteration": saved.step - 1}
    for rank in range(RANKS if stage == 3 else 1):
        module = OrderedDict((n, torch.empty(0, dtype=v.dtype) if stage == 3 else v) for n, v in held.items())
        model = {"module": module, "param_shapes": shapes, "shared_params": {}, "buffer_names": [], "optimizer": None}
        model |= {**counted, "lr_scheduler": schedule, "dp_world_size": RANKS, "ds_version": "0.19.8", **client}
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(model, folder / name)
    options = {key: kept for key, kept in engine.basic_optimizer.param_groups[0].items() if key != "params"}
    for rank in range(RANKS):
        states = {kind: pieces([value(saved, name, kind) for name in names], stage, rank) for kind in KINDS}
        base = {"state": {0: {**states, "step": saved.step}}, "param_groups": [{**options, "lr": 0.02, "params": [0]}]}
        master = [pieces([value(saved, name, "master") for name in names], stage, rank)]
        own = (
            {"fp32_flat_groups": master, "optimizer_state_dict": base}
            if stage == 3
            else {"single_partition_of_fp32_groups": master, "base_optimizer_state": base}
        )
        inner = {"zero_stage": stage, "partition_count": RANKS, "loss_scaler": loss_scaler, **own}
        torch.save({"optimizer_state_dict": inner}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "theirs" / "latest").write_text(folder.name)
    return folder


HALF = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def continued(engine: DeepSpeedEngine) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of the next steps at one learning rate, and the weights after them."""
    for group in engine.basic_optimizer.param_groups:
        group["lr"] = 1e-2
    losses = train(engine, 2, 4)
    return losses, [engine.full_param(parameter).detach().clone() for parameter in engine.module.parameters()]


def saved_run(folder: Path, stage: int, dtype: str, client: dict[str, Any], loss_scaler: Any = None) -> None:
    """Train two steps, save here, and write the same as DeepSpeed would, on the first rank."""
    engine = start(2, fresh(0), **HALF[dtype])
    train(engine, 0, 2)
    engine.save_checkpoint(folder / "native")
    if engine.global_rank == 0:
        write(engine, folder, stage, client, loss_scaler)
    engine.destroy()
    if dist.is_initialized():
        dist.barrier()


def both_ways(folder: Path, stage: int, dtype: str, into: dict[str, Any]) -> tuple[Any, Any]:
    """Return the continuation from our checkpoint, and from the same one in DeepSpeed's format."""
    saved_run(folder, stage, dtype, {"epoch": 3})
    found = []
    for root in ("native", "theirs"):
        engine = start(0, fresh(7), **{"zero_optimization": into, **HALF[dtype]})
        path, client = engine.load_checkpoint(folder / root)
        assert Path(str(path)).name == "global_step2" and engine.global_steps == 2
        assert client is not None and (root == "native" or client == {"epoch": 3, "ds_version": "0.19.8"})
        found.append(continued(engine))
        engine.destroy()
    return found[0], found[1]


CASES = [
    (1, "fp32", 1, {"stage": 3, "stage3_param_persistence_threshold": 0}),
    (2, "bf16", 2, {"stage": 1}),
    (3, "fp32", 3, {"stage": 2}),
    (3, "bf16", 3, {"stage": 3, "stage3_param_persistence_threshold": 0}),
    (1, "fp16", 2, {"stage": 2, **OFFLOADED}),
    (3, "fp32", 1, {"stage": 3, "stage3_param_persistence_threshold": 0, **OFFLOADED}),
]


@pytest.mark.parametrize(("stage", "dtype", "size", "into"), CASES)
def test_a_checkpoint_of_deepspeed_continues_as_ours_does(
    stage: int, dtype: str, size: int, into: dict[str, Any], tmp_path: Path
) -> None:
    into = {key: entry for key, entry in into.items() if key != "offload_param" or into["stage"] == 3}
    for ours, theirs in run_ranks(both_ways, size, tmp_path, stage, dtype, into):
        assert ours[0] == theirs[0]
        assert all(map(torch.equal, ours[1], theirs[1]))


@pytest.mark.usefixtures("alone")
def test_a_universal_checkpoint_loads_directly(tmp_path: Path) -> None:
    engine = start(2, fresh(0))
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "universal", to="deepspeed-universal")
    engine.destroy()
    for stage in (1, 3):
        found = []
        for root in ("native", "universal"):
            again = start(stage, fresh(7), checkpoint={"load_universal": root == "universal"})
            path, _ = again.load_checkpoint(tmp_path / root)
            assert Path(str(path)).name == "global_step2"
            found.append(continued(again))
            again.destroy()
        assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.usefixtures("alone")
def test_parameters_without_states_in_the_files_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(2, fresh(0))
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "universal", to="deepspeed-universal")
    engine.destroy()
    engine = start(2, fresh(7))
    engine.load_checkpoint(tmp_path / "universal")
    assert "no optimizer state" not in caplog.text
    for file in (tmp_path / "universal" / "global_step2" / "zero" / "head.weight").glob("*.pt"):
        if file.name != "fp32.pt":
            file.unlink()
    engine.load_checkpoint(tmp_path / "universal")
    assert "no optimizer state for 1 of 6 trained parameters (head.weight" in caplog.text


@pytest.mark.usefixtures("alone")
def test_counters_options_schedule_loss_scale_and_client_state_come_back(
    scaler: DynamicLossScaler, tmp_path: Path
) -> None:
    client = {"best": torch.tensor([1.5, 2.5]), "pair": (1, [torch.tensor(True)]), "milestones": {10: "a"}}
    saved_run(tmp_path, 2, "fp16", client, scaler)
    warm = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 0.1}}}
    fp16 = {"fp16": {"enabled": True, "hysteresis": 2}}
    engine = start(2, fresh(7), **fp16, **warm)
    _, found = engine.load_checkpoint(tmp_path / "theirs")
    assert found is not None and torch.equal(found.pop("best"), client.pop("best"))
    assert found == {**client, "ds_version": "0.19.8"}
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (2, 1, 2 * BATCH)
    assert engine.basic_optimizer.param_groups[0]["lr"] == 0.02
    assert engine.lr_scheduler.last_batch_iteration == 1
    state = engine.sharded_optimizer.loss_scale.state_dict()
    assert state == {"kind": "dynamic", "scale": 512.0, "calls": 7, "last_overflow": 4, "hysteresis_left": 1}


@pytest.mark.usefixtures("alone")
def test_what_is_not_asked_for_stays(tmp_path: Path) -> None:
    saved_run(tmp_path, 3, "fp32", {})
    engine = start(2, fresh(7))
    engine.load_checkpoint(tmp_path / "theirs", load_optimizer_states=False)
    assert engine.global_steps == 2 and engine.basic_optimizer.param_groups[0]["lr"] == 1e-2
    assert not any(engine.sharded_optimizer.state_of(owned) for owned in engine.sharded_optimizer.fragments)
    engine.load_checkpoint(tmp_path / "theirs")
    engine.destroy()
    engine = start(2, fresh(7))
    engine.load_checkpoint(tmp_path / "theirs", load_module_only=True)
    assert engine.global_steps == 0
    saved = open_checkpoint(tmp_path / "native")
    assert torch.equal(engine.module.head.weight, value(saved, "head.weight", "param"))


@pytest.mark.usefixtures("alone")
def test_a_run_saves_on_beside_the_checkpoints_it_came_from(tmp_path: Path) -> None:
    saved_run(tmp_path, 2, "fp32", {})
    engine = start(2, fresh(7))
    resumed = engine.resume(tmp_path / "theirs")
    assert resumed is not None and (resumed.step, resumed.source) == (2, "disk")
    train(engine, 2, 3)
    engine.save_checkpoint(tmp_path / "theirs")
    assert Path(str(engine.load_checkpoint(tmp_path / "theirs")[0])).name == "global_step3"
    assert Path(str(engine.load_checkpoint(tmp_path / "theirs", "global_step2")[0])).name == "global_step2"
    with pytest.raises(CheckpointError, match="global_step2 exists and is no checkpoint, so it is not replaced"):
        engine.save_checkpoint(tmp_path / "theirs", "global_step2")


def flip(folder: Path) -> str:
    """Change one bit of the data of the second rank's optimizer file."""
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(path.read_bytes())
    place = content.index(b"/data/0") + 300
    content[place] ^= 1
    path.write_bytes(bytes(content))
    return "Bad CRC-32.*restore it from another copy, or load another tag"


def lose_a_rank(folder: Path) -> str:
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    return r"of \*_optim_states.pt only the ranks \[1\] are there"


def cut_off(folder: Path) -> str:
    path = folder / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:-100])
    return "mp_rank_00_model_states.pt"


def another_number_of_ranks(folder: Path) -> str:
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    return "1 optimizer files, 2 ranks wrote it"


def parallel(folder: Path) -> str:
    (folder / "mp_rank_01_model_states.pt").write_bytes(b"")
    return "tensor, pipeline and expert parallel checkpoints are not read"


def foreign_object(folder: Path) -> str:
    path = folder / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), "args": Namespace(lr=1)}, path)
    return r"holds objects that are not read: argparse.Namespace.*add_safe_globals"


def swapped_out(folder: Path) -> str:
    (folder / "offloaded_tensors" / "rank00").mkdir(parents=True)
    return "optimizer states are in DeepSpeed's swap files.*offloaded to the CPU"


def without_stages(folder: Path) -> str:
    """Make it one of stage 0."""
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()
    path = folder / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), "optimizer": {"state": {}, "param_groups": [{}]}}, path)
    return "stage 0 keeps the states of an optimizer by position.*load_optimizer_states=False.*train a step at stage 1"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "harm", (flip, lose_a_rank, cut_off, another_number_of_ranks, parallel, foreign_object, swapped_out, without_stages)
)
def test_what_cannot_be_loaded_is_named_and_changes_nothing(harm: Callable[[Path], str], tmp_path: Path) -> None:
    saved_run(tmp_path, 2, "fp32", {})
    said = harm(tmp_path / "theirs" / "global_step2")
    engine = start(2, fresh(7))
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    for tag in (None, "global_step2"):
        with pytest.raises(CheckpointError, match=f"(?s){said}"):
            engine.load_checkpoint(tmp_path / "theirs", tag)
    assert all(map(torch.equal, before, engine.module.parameters()))


@pytest.mark.usefixtures("alone")
def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    saved_run(tmp_path, 3, "fp32", {})
    engine = start(2, nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match=r"'weight' \(param\) of shape \(3, 3\) is not in the checkpoint"):
        engine.load_checkpoint(tmp_path / "theirs")


@pytest.mark.usefixtures("alone")
def test_damage_on_disk_falls_back_to_the_copy_in_memory_and_to_older_folders(tmp_path: Path) -> None:
    saved_run(tmp_path, 2, "fp32", {})
    folder = tmp_path / "theirs" / "global_step2"
    memory = {"checkpoint": {"in_memory": {"every": 1, "path": str(tmp_path / "memory")}}}
    engine = start(2, fresh(7), **memory)
    engine.resume(tmp_path / "theirs")
    train(engine, 2, 3)
    engine.destroy()
    newer = tmp_path / "theirs" / "global_step4"
    shutil.copytree(folder, newer)
    model = torch.load(newer / "mp_rank_00_model_states.pt", weights_only=True)
    torch.save({**model, "global_steps": 4}, newer / "mp_rank_00_model_states.pt")
    flip(newer)
    (tmp_path / "theirs" / "latest").write_text(newer.name)
    for changes, expected in ((memory, ("memory", 3)), ({}, ("disk", 2))):
        engine = start(2, fresh(7), **changes)
        resumed = engine.resume(tmp_path / "theirs")
        assert resumed is not None and (resumed.source, resumed.step) == expected
        engine.destroy()
    shutil.rmtree(folder)
    engine = start(2, fresh(7), **memory)
    resumed = engine.resume(tmp_path / "theirs")
    assert resumed is not None and (resumed.source, resumed.step) == ("memory", 3)
    engine.destroy()
    with pytest.raises(CheckpointError, match="Bad CRC-32"):
        start(2, fresh(7)).resume(tmp_path / "theirs")
