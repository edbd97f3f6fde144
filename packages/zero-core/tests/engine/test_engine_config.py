"""The configuration on its way into the engine, and back out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_cases import BATCH, build, config, outcome, train

import zero_core
from zero_core.process_groups import codec_lines


@pytest.mark.parametrize("how", ("dict", "path", "string", "Config"))
def test_the_configuration_may_come_in_every_form(how: str, tmp_path: Path, alone: None) -> None:
    settings = config(1)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(settings))
    arguments: dict[str, Any] = {
        "dict": {"config": settings},
        "path": {"config": path},
        "string": {"config": str(path)},
        "Config": {"config": zero_core.Config.load(settings, world_size=1)},
    }[how]
    engine = zero_core.initialize(model=build(), **arguments)[0]
    assert engine.zero_optimization_stage() == 1 and engine.config == settings
    train(engine, 0, 1)


def test_no_configuration_is_refused(alone: None) -> None:
    message = outcome(lambda: zero_core.initialize(model=build()))
    assert message.startswith("UsageError") and "config" in message and "none was given" in message, message


def test_the_engine_gives_back_what_the_user_wrote_and_what_became_of_it(alone: None) -> None:
    settings = {**config(2), "gradient_accumulation_steps": 3}
    engine = zero_core.initialize(model=build(), config=settings)[0]
    assert engine.config == settings
    engine.config["gradient_accumulation_steps"] = 99  # a copy
    assert engine.config == settings
    sizes = (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
    assert sizes == (3 * BATCH, BATCH, 3) and engine.resolved_config.zero_optimization.stage == 2
    rows = {line.split()[0]: line.split()[1:] for line in engine.config_report().splitlines()}
    assert rows["train_batch_size"] == ["12", "derived"]
    assert rows["gradient_accumulation_steps"] == ["3", "user"]
    assert rows["fp16.enabled"] == ["False", "default"]
    assert set(rows) == {row.path for row in engine.resolved_config.report()}


def test_one_rank_needs_no_launcher_and_leaves_the_environment_alone(alone: None) -> None:
    before = dict(os.environ)
    engine = zero_core.initialize(model=build(), config=config(3))[0]
    first, *_, last = train(engine, 0, 3) + train(engine, 0, 1)
    assert dist.get_world_size() == 1 and last < first and dict(os.environ) == before
    engine.destroy()


def test_a_script_alone_ends_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, zero_core\n"
        "model = torch.nn.Linear(4, 1)\n"
        "settings = {'train_batch_size': 2, 'optimizer': {'type': 'AdamW'}, 'zero_optimization': {'stage': 3}}\n"
        "engine, *_ = zero_core.initialize(model=model, config=settings)\n"
        "engine.backward(engine(torch.ones(2, 4)).mean())\n"
        "engine.step()\n"
        "print('steps', engine.global_steps)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment)
    said = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # up to torch 2.10 it says who is there
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert said[0].startswith("ZeRO stage 3, 1 rank") and said[1:] == ["steps 1"]


def test_the_start_says_what_travels_quantized_and_what_encodes_it():
    def loaded(zero: dict[str, Any]) -> zero_core.Config:
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        return zero_core.Config.load(settings, world_size=2)

    keys = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    cpu = torch.device("cpu")
    by = "by CPU kernels"
    for stage, said in (
        (3, f"codecs: weights in int8, gradients in int4, {by}"),
        (2, f"codecs: gradients in int4, {by}"),
    ):
        assert codec_lines(loaded({"stage": stage, **keys}), cpu) == [said]
    elsewhere = codec_lines(loaded({"stage": 3, **keys}), torch.device("cuda"))
    assert re.search(r", by (triton \d|plain torch, because triton cannot be imported)", *elsewhere)
    assert codec_lines(loaded({}), cpu) == []
