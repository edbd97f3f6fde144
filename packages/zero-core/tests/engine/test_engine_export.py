"""The whole weights on rank 0: as a state dict, and as a file that plain torch loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import OUTPUTS, RANKS, WIDTH, Net, build, config, outcome, start, train, weights, without
from torch import nn

import zero_core
from zero_ckpt import CheckpointError
from zero_comm import run_ranks


class Tied(Net):
    """With a frozen layer, a tied one, a scalar parameter and a buffer that is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.blocks[0]
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.enter.requires_grad_(False)
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) * self.scale


def export(stage: int, folder: str) -> dict[str, Any]:
    engine = start(stage, Tied().double())
    train(engine, 0, 2)
    whole = engine.consolidated_state_dict()
    trained = engine.consolidated_state_dict(exclude_frozen_parameters=True)
    saved = engine.save_16bit_model(folder, "model.bin")
    values = weights(engine)
    refused = outcome(lambda: engine.save_16bit_model(folder, "model.safetensors"))
    train(engine, 2, 3)
    tied = whole is not None and whole["again.weight"].data_ptr() == whole["blocks.0.weight"].data_ptr()
    return {"whole": whole, "trained": trained and list(trained), "values": values, "saved": saved, "refused": refused,
            "tied": tied}  # fmt: skip


@pytest.mark.parametrize("stage", (0, 3))
def test_rank_0_has_the_whole_weights_under_the_modules_names(stage: int, tmp_path: Path) -> None:
    first, second = run_ranks(export, RANKS, stage, str(tmp_path / "new"))
    plain = Tied().double()
    assert list(first["whole"]) == list(plain.state_dict()) and second["whole"] is second["trained"] is None
    assert set(plain.state_dict()) - set(first["trained"]) == {"enter.weight", "enter.bias"} and first["tied"]
    assert all(torch.equal(first["whole"][name], value) for name, value in first["values"].items())
    assert first["saved"] and second["saved"] and "zero-ckpt convert" in first["refused"]
    plain.load_state_dict(torch.load(tmp_path / "new" / "model.bin", weights_only=True))
    assert all(torch.equal(value, first["whole"][name]) for name, value in plain.state_dict().items())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.bin"]


def test_half_precision_weights_are_exported_as_they_compute(alone: None) -> None:
    settings = {**without(config(3), "data_types"), "bf16": {"enabled": True}}
    engine = zero_core.initialize(model=build(torch.float32), config=settings)[0]
    found = engine.consolidated_state_dict()
    assert found is not None
    buffers = {name: value.dtype for name, value in engine.module.named_buffers()}
    assert buffers and all(value.dtype == buffers.get(name, torch.bfloat16) for name, value in found.items())
    assert set(buffers.values()) == {torch.float32}
    assert found["head.weight"].shape == (OUTPUTS, WIDTH)


def export_into_a_file(folder: str) -> list[str]:
    """Save below a path that is a file, then where it works; return what the first raised and the files of the
    second."""
    engine = start(3, Tied().double())
    with pytest.raises(CheckpointError) as error:
        engine.save_16bit_model(f"{folder}/taken/below")
    engine.save_16bit_model(f"{folder}/free")
    return [str(error.value), *(path.name for path in Path(folder, "free").iterdir())]


def test_a_file_that_rank_0_cannot_write_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    here, there = run_ranks(export_into_a_file, RANKS, str(tmp_path))
    assert here == there and here[1:] == ["pytorch_model.bin"]
    assert "save_16bit_model failed" in here[0] and "NotADirectoryError" in here[0]
