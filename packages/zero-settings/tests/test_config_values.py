from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from zero_settings import Config, ConfigError, absolute_path


@pytest.mark.parametrize(
    ("config", "path", "expected"),
    [
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage", "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": -1}}, "zero_optimization.stage", "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage", "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage", "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2.5}}, "zero_optimization.stage", "0, 1, 2 or 3"),
        (
            {"zero_optimization": {"offload_param": {"nvme_path": ["/fast", "~/nvme"]}}},
            "zero_optimization.offload_param.nvme_path",
            "written out: no shell is there to replace `~`",
        ),
        ({"zero_optimization": 3}, "zero_optimization", "an object"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "zero_optimization.reduce_bucket_size", "greater than 0"),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "zero_optimization.reduce_bucket_size", "an integer"),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "zero_optimization.reduce_bucket_size", "an integer"),
        ({"zero_optimization": {"overlap_comm": "true"}}, "zero_optimization.overlap_comm", "true or false"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "zero_optimization.offload_param.device", "cpu"),
        ({"train_batch_size": True}, "train_batch_size", "an integer"),
        ({"train_batch_size": 0}, "train_batch_size", "greater than 0"),
        ({"gradient_clipping": -1}, "gradient_clipping", "greater than or equal to 0"),
        ({"gradient_clipping": math.inf}, "gradient_clipping", "a finite number"),
        ({"gradient_clipping": math.nan}, "gradient_clipping", "a number"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping", "a number"),
        ({"steps_per_print": math.nan}, "steps_per_print", "a number"),
        ({"fp16": None}, "fp16", "an object"),
        ({"fp16": [True]}, "fp16", "an object"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled", "true or false"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale", "greater than or equal to 0"),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale", "a number"),
        ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window", "greater than 0"),
        ({"fp16": {"min_loss_scale": 0.5}}, "fp16.min_loss_scale", "an integer"),
        ({"communication_data_type": "int8"}, "communication_data_type", "'fp16', 'bf16', 'fp32' or 'fp64'"),
        ({"torch_autocast": {"dtype": "fp32"}}, "torch_autocast.dtype", "'bfloat16' or 'float16'"),
        ({"data_types": {"keep_in_fp32_modules": "norm"}}, "data_types.keep_in_fp32_modules", "'auto' or a list"),
        ({"data_types": {"keep_in_fp32_modules": [3]}}, "data_types.keep_in_fp32_modules[0]", "a string"),
        ({"checkpoint": {"tag_validation": "maybe"}}, "checkpoint.tag_validation", "'Ignore', 'Warn' or 'Fail'"),
        ({"datastates_ckpt": True}, "datastates_ckpt", "an object"),
        ({"optimizer": {}}, "optimizer.type", "required"),
        ({"optimizer": {"type": 3}}, "optimizer.type", "a string"),
        ({"optimizer": {"type": "AdamWW"}}, "optimizer.type", "the name of an optimizer"),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 0}}},
            "optimizer.params.freeze_step",
            "greater",
        ),
        ({"optimizer": {"type": "Optimizer"}}, "optimizer.type", "the name of an optimizer"),
        ({"optimizer": {"type": "adam", "params": 3}}, "optimizer.params", "an object"),
        ({"optimizer": {"type": "adam", "params": {"lr": "1e-4"}}}, "optimizer.params.lr", "a number"),
        ({"optimizer": {"type": "adam", "params": {"lr": -1}}}, "optimizer.params.lr", "greater than or equal to 0"),
        ({"optimizer": {"type": "adam", "params": {"betas": [0.9]}}}, "optimizer.params.betas[1]", "required"),
        ({"optimizer": {"type": "adam", "params": {"betas": [0.9, 1]}}}, "optimizer.params.betas[1]", "less than 1"),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 1}}}, "optimizer.params.momentun", "argument of SGD"),
        ({"optimizer": {"type": "SGD", "params": 3}}, "optimizer.params", "an object"),
        ({"scheduler": {"type": "WarmupRL"}}, "scheduler.type", "the name of a schedule"),
        ({"scheduler": {"type": "warmuplr"}}, "scheduler.type", "the name of a schedule"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps", "required"),
        ({"scheduler": {"type": "StepLR"}}, "scheduler.params", "step_size, which StepLR needs"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
            "scheduler.params.warmup_num_steps",
            "greater than 0",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cos"}}},
            "scheduler.params.warmup_type",
            "'log' or 'linear'",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_what_was_expected(config, path, expected, refused):
    error = refused(config)
    assert error.path == path, str(error)
    assert expected in error.expected, str(error)
    assert path in str(error)


@pytest.mark.parametrize(
    ("config", "nearest"),
    [
        ({"optimizer": {"type": "AdamWW"}}, "adamw"),
        ({"optimizer": {"type": "sgd"}}, "SGD"),
        ({"scheduler": {"type": "warmuplr"}}, "WarmupLR"),
        ({"scheduler": {"type": "CosineAnealingLR"}}, "CosineAnnealingLR"),
        ({"zero_optimization": {"offload_param": {"device": "nvm"}}}, "nvme"),
        ({"checkpoint": {"tag_validation": "warning"}}, "Warn"),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 1}}}, "momentum"),
    ],
)
def test_the_nearest_valid_value_is_named(config, nearest, refused):
    error = refused(config)
    assert error.nearest == nearest and f"did you mean {nearest!r}" in str(error)


def test_a_number_in_quotes_is_told_to_lose_them(refused):
    assert "remove the quotes" in str(refused({"optimizer": {"type": "adam", "params": {"lr": "1e-4"}}}))


@pytest.mark.parametrize("number", [5e8, 500000000, np.int64(500000000), np.float32(5e8)])
def test_integers_may_be_written_as_integral_floats(number, loaded):
    size = loaded({"zero_optimization": {"reduce_bucket_size": number}}).zero_optimization.reduce_bucket_size
    assert size == 500_000_000 and type(size) is int


@pytest.mark.parametrize("steps", [10, 10.0, math.inf, None])
def test_steps_per_print_may_be_infinite_or_null(steps, loaded):
    assert loaded({"steps_per_print": steps}).steps_per_print == steps


def test_names_of_optimizers_are_case_insensitive_and_those_of_torch_are_torchs(loaded):
    assert loaded({"optimizer": {"type": "ADAMW"}}).optimizer.type == "adamw"
    sgd = loaded({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": "auto"}}}).optimizer
    assert (sgd.type, sgd.params.kwargs()) == ("SGD", {"lr": 0.1})


@pytest.mark.parametrize(
    ("optimizer", "decoupled", "weight_decay"),
    [
        ({"type": "AdamW"}, True, 0.0),
        ({"type": "AdamW", "params": {"torch_adam": True}}, True, 0.01),
        ({"type": "AdamW", "params": {"torch_adam": True, "weight_decay": 0.0}}, True, 0.0),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, True, 0.0),
        ({"type": "Adam"}, True, 0.0),
        ({"type": "Adam", "params": {"adam_w_mode": False, "torch_adam": True}}, False, 0.0),
        ({"type": "Lion"}, False, 0.0),
    ],
)
def test_adam_means_adamw_unless_told_otherwise(optimizer, decoupled, weight_decay, loaded):
    config = loaded({"optimizer": optimizer})
    assert config.optimizer.decoupled_weight_decay is decoupled
    assert config.optimizer.params.weight_decay == weight_decay


def test_the_report_says_that_adam_means_adamw(loaded):
    notes = {row.path: row.note for row in loaded({"optimizer": {"type": "Adam"}}).report()}
    assert "AdamW" in notes["optimizer.type"]


def test_a_required_value_that_is_auto_waits_for_somebody_to_fill_it(loaded):
    config = loaded({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})
    assert config.scheduler.params.total_num_steps is None


def test_null_sections_are_absent_where_they_are_optional(loaded):
    zero = loaded({"zero_optimization": {"offload_param": None, "offload_optimizer": None, "zenflow": None}})
    assert zero.zero_optimization.offload_param.device == "none"
    assert loaded({"optimizer": None, "scheduler": None}).optimizer is None


def test_clipping_is_off_unless_asked_for(loaded):
    assert loaded({}).gradient_clipping == 0.0 and loaded({"gradient_clipping": "auto"}).gradient_clipping == 0.0


def test_relative_paths_become_those_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nvme = {"device": "nvme", "nvme_path": ["a", "/b"]}
    written = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 2, "offload_optimizer": nvme},
        "checkpoint": {"interval": 9, "path": "out/ck", "in_memory": {"every": 1, "path": "/dev/shm/x"}},
    }
    config = Config.load(written, world_size=1)
    absolute = config.with_absolute_paths()
    assert absolute.checkpoint.path == str(tmp_path / "out/ck")
    assert absolute.checkpoint.in_memory.path == "/dev/shm/x"
    assert absolute.zero_optimization.offload_optimizer.nvme_path == (str(tmp_path / "a"), "/b")
    assert absolute.zero_optimization.offload_param.nvme_path is None
    assert absolute.raw == written and absolute.provenance("checkpoint.path") == "user"
    assert config.checkpoint.path == "out/ck"


def test_a_relative_path_says_when_the_working_directory_no_longer_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    gone = "the working directory no longer exists"
    config = Config.load({"train_batch_size": 1, "checkpoint": {"interval": 9, "path": "out"}}, world_size=1)
    with pytest.raises(FileNotFoundError, match=f"'out' is a relative path, but {gone}"):
        config.with_absolute_paths()
    with pytest.raises(ConfigError, match=gone):
        Config.load("ds.json", world_size=1)
    assert absolute_path("/a/../b") == "/b"


def test_copies_in_memory_need_no_folder_but_an_empty_name_is_none(loaded):
    section = loaded({"checkpoint": {"in_memory": {"every": 20}}}).checkpoint.in_memory
    assert section.every == 20 and section.path is None
    with pytest.raises(ConfigError, match="checkpoint.in_memory.path: expected a folder"):
        loaded({"checkpoint": {"in_memory": {"every": 20, "path": ""}}})


def test_an_empty_text_is_not_corrected_to_an_empty_text():
    with pytest.raises(ConfigError) as caught:
        Config.load({"zero_optimization": {"offload_param": {"nvme_path": ""}}}, world_size=1)
    assert "did you mean" not in str(caught.value)


def test_a_message_is_short_whatever_is_wrong():
    with pytest.raises(ConfigError) as caught:
        Config.load({f"{'k' * 20_000}{number}": 1 for number in range(200)}, world_size=1)
    assert len(caught.value.problems) == 200 and "\nand 150 more" in str(caught.value)
    assert len(str(caught.value)) < 100_000
