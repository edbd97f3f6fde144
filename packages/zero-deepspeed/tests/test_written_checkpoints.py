"""Checkpoints in DeepSpeed's format: what is saved in it continues as what is saved in our own does.

test_written_checkpoints_peer.py lets DeepSpeed resume from them.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from named_cases import WIDTH, Net, settings, start, train
from test_foreign_checkpoints import HALF, OFFLOADED, HalfNet, continued, fresh
from torch import nn

import zero_core
from zero_ckpt import CheckpointError, Interval, open_any, save_sharded
from zero_ckpt.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zero_comm import run_ranks
from zero_core.errors import UsageError
from zero_deepspeed.initialization import initialize
from zero_settings import ConfigError

FORMAT = {"format": "deepspeed"}


def both_formats(folder: Path, stage: int, dtype: str, into: dict[str, Any]) -> tuple[Any, Any]:
    """Train two steps, save in both formats, and return how each continues in another engine."""
    for name, section in (("native", {}), ("deepspeed", FORMAT)):
        offload = OFFLOADED if stage == 3 and dtype == "fp32" else {}
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **offload}
        engine = start(0, fresh(0), **{"zero_optimization": zero, "checkpoint": section, **HALF[dtype]})
        train(engine, 0, 2)
        engine.save_checkpoint(folder / name, client_state={"best": torch.tensor([2.5]), "pair": (1, 2)})
        engine.destroy()
    found = []
    for name in ("native", "deepspeed"):
        engine = start(0, fresh(7), **{"zero_optimization": into, **HALF[dtype]})
        path, client = engine.load_checkpoint(folder / name)
        assert client is not None and torch.equal(client["best"], torch.tensor([2.5])) and client["pair"] == (1, 2)
        assert Path(str(path)).name == "global_step2" and engine.global_steps == 2
        found.append(continued(engine))
        engine.destroy()
    return found[0], found[1]


CASES = [
    (1, "fp32", 1, {"stage": 3, "stage3_param_persistence_threshold": 0}),
    (2, "bf16", 2, {"stage": 1}),
    (3, "fp32", 3, {"stage": 2}),
    (3, "bf16", 2, {"stage": 3}),
    (1, "fp16", 3, {"stage": 2}),
]


@pytest.mark.parametrize(("stage", "dtype", "size", "into"), CASES)
def test_what_is_saved_in_either_format_continues_alike(
    stage: int, dtype: str, size: int, into: dict[str, Any], tmp_path: Path
) -> None:
    for ours, theirs in run_ranks(both_formats, size, tmp_path, stage, dtype, into):
        assert ours[0] == theirs[0]
        assert all(map(torch.equal, ours[1], theirs[1]))
    names = {path.name for path in (tmp_path / "deepspeed" / "global_step2").iterdir()}
    prefix = "bf16_" if dtype == "bf16" else ""
    states = {f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(size)}
    models = {f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt" for rank in range(size)}
    assert names == states | models
    assert not [path for path in (tmp_path / "deepspeed").iterdir() if path.name.startswith(".")]


class Parts(Net):
    """A frozen layer, a tied weight, an unused parameter, and buffers of which one is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.tied = nn.Linear(WIDTH, 1)
        self.tied.weight = self.head.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("cached", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.tied(x).square().mean()


class Skipping(Net):
    """Leaves its second block out if it ``skips``."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: 1 if self.skips else 2]:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def build_parts(seed: int) -> Parts:
    torch.manual_seed(seed)
    return Parts()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_frozen_tied_and_unused_parameters_and_buffers_come_back(stage: int, tmp_path: Path) -> None:
    engine = start(stage, build_parts(0), checkpoint=FORMAT)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    expected = {name: engine.full_param(p).detach().clone() for name, p in engine.module.named_parameters()}
    losses = train(engine, 2, 4)
    engine.destroy()
    module = torch.load(next((tmp_path / "global_step2").glob("*model_states.pt")), weights_only=True)["module"]
    assert {"kept", "head.weight", "tied.weight"} < set(module) and "cached" not in module
    again = start(stage, build_parts(5))
    again.load_checkpoint(tmp_path)
    for name, parameter in again.module.named_parameters():
        assert torch.equal(again.full_param(parameter), expected[name]), name
    assert train(again, 2, 4) == losses
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(found["tied.weight"], expected["head.weight"])


class OddNames(torch.optim.Optimizer):
    """Momentum, kept under names that a model's own tensors have in checkpoints."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    for number, key in enumerate(("buffer", "param", "master", "state"), 1):
                        moment = state.setdefault(key, torch.zeros_like(parameter))
                        moment.mul_(0.9).add_(parameter.grad, alpha=number)
                        parameter.data.sub_(moment, alpha=group["lr"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("form", ("native", "deepspeed"))
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_states_under_the_names_of_other_tensors_come_back(form: str, dtype: str, tmp_path: Path) -> None:
    def engine_of(seed: int) -> Any:
        model = fresh(seed)
        sections = {"checkpoint": {"format": form}, "zero_allow_untested_optimizer": True, **HALF[dtype]}
        optimizer = OddNames(model.parameters(), {"lr": 0.01})
        config = {key: value for key, value in settings(2, **sections).items() if key != "optimizer"}
        return initialize(model=model, optimizer=optimizer, config=config)[0]

    engine = engine_of(0)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    losses = train(engine, 2, 4)
    again = engine_of(7)
    again.load_checkpoint(tmp_path)
    assert train(again, 2, 4) == losses


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", (1, 3))
def test_frozen_parameters_that_are_left_out_are_not_listed_as_those_of_the_file(stage: int, tmp_path: Path) -> None:
    engine = start(stage, build_parts(0), checkpoint=FORMAT)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    found = torch.load(next((tmp_path / "global_step0").glob("*model_states.pt")), weights_only=True)
    assert found["frozen_param_fragments"] is None and found["frozen_param_shapes"] is None
    assert "blocks.0.weight" not in found["module"]
    again = start(stage, build_parts(5))
    kept = again.full_param(again.module.blocks[0].weight).clone()
    again.load_checkpoint(tmp_path, load_module_strict=False)
    assert torch.equal(again.full_param(again.module.blocks[0].weight), kept)
    for block in ("blocks.1", "head"):
        one, other = (e.module.get_submodule(block).weight for e in (engine, again))
        assert torch.equal(engine.full_param(one), again.full_param(other))


@pytest.mark.usefixtures("alone")
def test_what_is_not_asked_for_stays_as_it_is(tmp_path: Path) -> None:
    engine = start(2, fresh(0), checkpoint=FORMAT)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    for options, steps in (({"load_optimizer_states": False}, 2), ({"load_module_only": True}, 0)):
        again = start(2, fresh(7))
        again.load_checkpoint(tmp_path, **options)
        assert again.global_steps == steps and all(map(torch.equal, weights, again.module.parameters()))
        assert not any(again.sharded_optimizer.state_of(owned) for owned in again.sharded_optimizer.fragments)
        again.destroy()


@pytest.mark.usefixtures("alone")
def test_an_engine_that_has_not_stepped_saves_no_states(tmp_path: Path) -> None:
    engine = start(3, fresh(0), checkpoint=FORMAT)
    engine.save_checkpoint(tmp_path)
    losses = train(engine, 0, 2)
    engine.destroy()
    again = start(2, fresh(7))
    again.load_checkpoint(tmp_path)
    assert train(again, 0, 2) == losses


@pytest.mark.usefixtures("alone")
def test_a_tag_is_saved_again_unless_something_else_lies_in_its_folder(tmp_path: Path) -> None:
    engine = start(2, fresh(0), checkpoint=FORMAT)
    for number in range(2):
        train(engine, number, number + 1)
        engine.save_checkpoint(tmp_path, "last")
        assert open_any(tmp_path).step == number + 1
    (tmp_path / "last" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="last exists and is no checkpoint, so it is not replaced"):
        engine.save_checkpoint(tmp_path, "last")
    assert open_any(tmp_path).step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "latest", "zero_to_fp32.py"]


@pytest.mark.usefixtures("alone")
def test_steps_that_differ_in_a_group_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(2, Skipping(), checkpoint=FORMAT)
    train(engine, 0, 1)
    engine.module.skips = True
    train(engine, 1, 2)
    with caplog.at_level(logging.WARNING, "zero_ckpt"):
        engine.save_checkpoint(tmp_path)
    assert "2 parameters (blocks.1.weight, blocks.1.bias, for example) have another step than blocks.0" in caplog.text
    assert {open_any(tmp_path).tensors[f"blocks.{n}.weight", "step.scalar"].dtype for n in range(2)} == {"F32"}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("key", ("global_steps", "module", "param_shapes", "optimizer", "lr_scheduler", "ds_config"))
def test_client_state_under_a_name_of_the_format_is_refused(key: str, tmp_path: Path) -> None:
    engine = start(2, fresh(0), checkpoint=FORMAT)
    with pytest.raises(CheckpointError, match=f"client state: DeepSpeed's files have '{key}' for entries of their own"):
        engine.save_checkpoint(tmp_path, client_state={key: 7, "ds_version": "mine", "best": 1})
    assert not list(tmp_path.iterdir())
    engine.save_checkpoint(tmp_path, client_state={"ds_version": "mine", "best": 1})
    assert engine.load_checkpoint(tmp_path)[1] == {"ds_version": "mine", "best": 1}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage"),
    ({"checkpoint": {**FORMAT, "writer": {"decoupled": True}}}, "checkpoint.writer.decoupled"),
    ({"checkpoint": {**FORMAT, "keep_last": 2}}, "checkpoint.keep_last"),
    ({"checkpoint": {**FORMAT, "use_node_local_storage": True}}, "checkpoint.use_node_local_storage"),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 1}}, "zero_optimization.mics_shard_size"),
    ({"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}, "optimizer.type"),
    (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "offload": {"state_dtype": "int8"},
        },
        "offload.state_dtype",
    ),
]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("changes", "path"), REFUSED)
def test_what_the_format_cannot_say_is_refused_when_the_configuration_is_read(
    changes: dict[str, Any], path: str
) -> None:
    with pytest.raises(ConfigError, match=f'{path}.*checkpoint.format "deepspeed"'):
        start(2, fresh(0), **{"checkpoint": FORMAT, **changes})


@pytest.mark.usefixtures("alone")
def test_other_engines_refuse_the_format_by_name() -> None:
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "checkpoint": FORMAT}
    config["zero_optimization"] = {"stage": 2}
    with pytest.raises(UsageError, match='checkpoint.format "deepspeed" is for deepspeed.initialize'):
        zero_core.initialize(model=HalfNet(), config=config)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from named_cases import start, train
from test_foreign_checkpoints import fresh

engine = start(2, fresh(0), checkpoint={"format": "deepspeed"})
train(engine, 0, 1)
engine.save_checkpoint(sys.argv[1])
train(engine, 1, 2)
place = sys.argv[3]

def trace(frame, event, argument):
    if event == "call" and frame.f_code.co_name == place:
        os.kill(os.getpid(), signal.SIGKILL)

sys.setprofile(trace)
engine.save_checkpoint(sys.argv[1])
"""


@pytest.mark.parametrize("place", ("write_rank_files", "_set_checksums", "leave_script", "write_latest"))
def test_a_save_that_is_killed_leaves_the_last_one(place: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent), place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr[-2000:]
    assert open_any(tmp_path).step == 1 and open_any(tmp_path, "global_step1").step == 1
    assert (tmp_path / "global_step2").exists() == (place == "write_latest")
    save_sharded(tmp_path, "next", [Interval("w", "param", (4,), "U8", 0, b"data")], step=3)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
