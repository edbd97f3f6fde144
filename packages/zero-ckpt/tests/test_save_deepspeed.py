"""A save in DeepSpeed's format refuses, or warns of, state that the format cannot hold, by name."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from ranks import ThreadCoordinator, on_ranks  # noqa: E402

from zero_ckpt import CheckpointError, DamagedError, Interval, open_any  # noqa: E402
from zero_ckpt.conversion.deepspeed_pickle import ConstantScaler  # noqa: E402
from zero_ckpt.conversion.deepspeed_sink import DeepSpeedForm  # noqa: E402
from zero_ckpt.deepspeed_saving import save_deepspeed  # noqa: E402
from zero_ckpt.torch import dtype_name, tensor_buffer  # noqa: E402


def save(
    root: Path,
    stage: int,
    groups: Sequence[Sequence[str]],
    step: int = 4,
    coordinator: ThreadCoordinator | None = None,
    **tensors: torch.Tensor,
) -> Path:
    """Save ``step`` steps of these flat parameters; of those in `groups`, or that are named `was_…`, with moments."""
    intervals = []
    for name, tensor in tensors.items():
        kinds = ["param", "exp_avg"] if name.startswith("was_") or any(name in group for group in groups) else ["param"]
        for kind in kinds:
            data = tensor_buffer(tensor)
            intervals.append(Interval(name, kind, tuple(tensor.shape), dtype_name(tensor.dtype), 0, data))
        if len(kinds) > 1:
            intervals.append(Interval(name, "step.scalar", (), "F32", 0, struct.pack("<f", step)))
    form = DeepSpeedForm(
        stage=stage,
        groups=groups,
        options=[{"lr": 0.1}] * len(groups),
        bf16=False,
        sub_group_numel=100,
        round_robin=False,
        aligned=False,
        left_out=frozenset(),
        scaler=ConstantScaler(cur_scale=1.0, dynamic=False),
        optimizer={},
        model={"global_steps": step},
        beside={"ds_version": "0"},
    )
    return save_deepspeed(
        root, f"global_step{step}", intervals, lambda checkpoint: form, coordinator=coordinator, step=step
    )


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_float64_beside_float32_in_a_param_group_is_refused(stage: int, tmp_path: Path) -> None:
    single, double = torch.ones(4) / 3, torch.ones(8, dtype=torch.float64) / 3
    with pytest.raises(CheckpointError, match=r"'a' \(master\) is F32 and 'b' is F64, in one param group"):
        save(tmp_path, stage, [["a", "b"]], a=single, b=double)
    assert list(tmp_path.iterdir()) == []
    save(tmp_path, stage, [["a"], ["b"]], a=single, b=double)
    found = open_any(tmp_path)
    data = bytearray(64)
    found.read_into("b", "master" if ("b", "master") in found.tensors else "param", 0, data)
    assert torch.equal(torch.frombuffer(data, dtype=torch.float64), double)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_states_of_parameters_that_were_frozen_later_are_told(
    stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "zero_ckpt"):
        save(tmp_path, stage, [["a"]], a=torch.ones(4), always_frozen=torch.ones(4), was_trained=torch.ones(4))
    assert "1 parameters (was_trained, for example) are frozen, but have states of earlier steps" in caplog.text
    caplog.clear()
    save(tmp_path, stage, [["a"]], a=torch.ones(4), always_frozen=torch.ones(4))
    assert not caplog.records


@pytest.mark.parametrize(("stage", "kind"), ((1, "optim"), (3, "optim"), (3, "model")))
def test_files_of_two_saves_in_one_folder_are_no_checkpoint(stage: int, kind: str, tmp_path: Path) -> None:
    """As a save of DeepSpeed leaves them that dies while it writes a tag again."""

    def part(group: ThreadCoordinator, root: Path, step: int) -> None:
        mine = {"a": torch.ones(4)} if group.rank == 0 else {}
        save(root, stage, [["a"]], step, group, **mine)

    for root, step in ((tmp_path, 4), (tmp_path / "older", 3)):
        on_ranks(2, lambda group, root=root, step=step: part(group, root, step))
    assert open_any(tmp_path).step == 4
    old = sorted((tmp_path / "older" / "global_step3").glob(f"*{kind}_states.pt"))
    old[1].replace(tmp_path / "global_step4" / old[1].name)
    with pytest.raises(DamagedError, match=f"rank_1.*{kind}_states.pt is of another save than .*rank_0.*3 inst"):
        open_any(tmp_path, "global_step4")
