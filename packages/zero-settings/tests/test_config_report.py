from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import SAMPLES, TRANSFORMERS_STAGE_3

import zero_settings as config_package
from zero_settings import Config
from zero_settings.features import leaves

MODEL_HINTS = [
    64,
    type("Model", (), {"config": type("C", (), {"hidden_size": 64})}),
    type("C", (), {"hidden_sizes": [16, 64, 32]}),
    type("C", (), {"text_config": type("T", (), {"hidden_size": 64})}),
]


@pytest.mark.parametrize("name", SAMPLES)
def test_configurations_as_frameworks_and_tutorials_write_them_load(name):
    source = SAMPLES[name]
    before = copy.deepcopy(source)
    config = Config.load(source, world_size=2)
    assert source == before and config.raw == before
    assert {row.path for row in config.report()} == {path for path, _ in leaves(config)}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_resolved_configuration_is_plain_data_that_loads_to_itself(name):
    config = Config.load(SAMPLES[name], world_size=2)
    plain = config.to_plain()
    again = Config.load(json.loads(json.dumps(plain)), world_size=2)
    assert again.to_plain() == plain
    assert pickle.loads(pickle.dumps(config)).to_plain() == plain


LEAVES = st.sampled_from(sorted(SAMPLES))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), world_size=st.integers(1, 8))
def test_any_mixture_of_valid_parts_round_trips(data, world_size):
    mixed = {"train_micro_batch_size_per_gpu": data.draw(st.integers(1, 64))}
    sizes = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    modes = {"fp16", "bf16", "bfloat16", "torch_autocast", "data_types", "communication_data_type"}
    mode_source = SAMPLES[data.draw(LEAVES)]
    mixed.update({key: value for key, value in mode_source.items() if key in modes})
    for _ in range(data.draw(st.integers(0, 8))):
        sample = SAMPLES[data.draw(LEAVES)]
        key = data.draw(st.sampled_from(sorted(sample)))
        if key not in sizes | modes:
            mixed[key] = sample[key]
    config = Config.load(mixed, world_size=world_size)
    plain = config.to_plain()
    assert Config.load(plain, world_size=world_size).to_plain() == plain
    assert Config.load(config, world_size=world_size).report() == config.report()


def test_every_value_says_where_it_came_from():
    source = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    found = {row.path: (row.value, row.provenance) for row in Config.load(source, world_size=2).report()}
    assert found["train_micro_batch_size_per_gpu"] == (2, "user")
    assert found["train_batch_size"] == (4, "derived")
    assert found["gradient_clipping"] == (0.0, "auto->default")
    assert found["zero_optimization.stage"] == (3, "user")
    assert found["zero_optimization.overlap_comm"] == (True, "derived")
    assert found["zero_optimization.reduce_bucket_size"] == (500_000_000, "auto->default")
    assert found["optimizer.params.lr"] == (0.1, "user")
    assert found["fp16.enabled"] == (False, "default")
    assert found["scheduler"] == (None, "default")


def test_the_short_report_leaves_out_defaults():
    rows = Config.load({"train_batch_size": 2}, world_size=2).report(defaults=False)
    assert {row.path for row in rows} == {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "zero_optimization.overlap_comm",
    }


@pytest.mark.parametrize("hint", MODEL_HINTS, ids=["number", "model", "sizes", "text"])
def test_a_model_fills_the_bucket_sizes_that_are_auto(hint):
    config = Config.load(TRANSFORMERS_STAGE_3, world_size=2, model_hint=hint)
    zero = config.zero_optimization
    assert (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (4096, 3686)
    assert zero.stage3_param_persistence_threshold == 640
    assert config.provenance("zero_optimization.reduce_bucket_size") == "auto->derived"


def test_a_model_never_overrides_what_the_user_wrote():
    source = {"train_batch_size": 2, "zero_optimization": {"reduce_bucket_size": 10}}
    assert Config.load(source, world_size=2, model_hint=64).zero_optimization.reduce_bucket_size == 10


def test_a_config_loads_again_for_another_world_size():
    config = Config.load({"train_micro_batch_size_per_gpu": 3}, world_size=2)
    assert (config.world_size, config.train_batch_size) == (2, 6)
    again = Config.load(config, world_size=5)
    assert (again.world_size, again.train_batch_size) == (5, 15)


def test_a_configuration_cannot_be_changed_after_it_was_loaded():
    source = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "autotuning": {}}
    source["data_efficiency"] = {"data_sampling": {"curriculum_learning": {"enabled": False}}}
    config = Config.load(source, world_size=2)
    for change in (
        lambda: setattr(config, "train_batch_size", 4),
        lambda: setattr(config.zero_optimization, "stage", 1),
        lambda: setattr(config.optimizer.params, "lr", 1.0),
        lambda: config.data_efficiency.data_sampling.curriculum_learning.update(enabled=True),
    ):
        with pytest.raises((ValueError, AttributeError)):
            change()
    config.raw["train_batch_size"] = 9
    config.optimizer.params.kwargs()["lr"] = 9
    source["train_batch_size"] = 9
    assert config.raw["train_batch_size"] == config.train_batch_size == 2
    assert config.optimizer.params.lr == 0.1


def test_the_public_names_are_sorted_and_exist():
    assert config_package.__all__ == sorted(config_package.__all__)
    assert all(getattr(config_package, name) for name in config_package.__all__)
    assert dir(config_package) == config_package.__all__
    with pytest.raises(AttributeError, match="Confog"):
        config_package.Confog  # noqa: B018


def test_importing_the_package_does_not_import_pydantic():
    code = "import torch, sys; import zero_settings; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("written", "path", "note"),
    [
        (
            {"sub_group_size": 10**9, "offload_optimizer": {"device": "cpu"}},
            "sub_group_size",
            "8388608 elements are in force",
        ),
        ({"sub_group_size": 7, "offload_optimizer": {"device": "cpu"}}, "sub_group_size", "4096 elements are in force"),
        ({"sub_group_size": 5000, "offload_optimizer": {"device": "cpu"}}, "sub_group_size", ""),
        ({"sub_group_size": 5000}, "sub_group_size", "no effect"),
        (
            {"offload_optimizer": {"device": "cpu", "pipeline_read": False}},
            "offload_optimizer.pipeline_read",
            "for files",
        ),
        ({"stage": 3, "offload_param": {"device": "cpu", "max_in_cpu": 9}}, "offload_param.max_in_cpu", "for files"),
    ],
)
def test_a_value_that_is_not_in_force_carries_a_note(written, path, note):
    report = Config.load(
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1, **written}}, world_size=1
    ).report()
    (row,) = (row for row in report if row.path == f"zero_optimization.{path}")
    assert note in row.note and bool(row.note) == bool(note)


def test_moments_on_the_device_follow_the_weights_and_the_report_says_so():
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    for device, noted in (("none", True), ("cpu", False)):
        zero = {"stage": 1, "offload_optimizer": {"device": device}}
        config = Config.load(
            {"train_micro_batch_size_per_gpu": 1, "bf16": bf16, "zero_optimization": zero}, world_size=1
        )
        (row,) = (row for row in config.report() if row.path == "bf16.bf16_optimizer_states")
        assert ("in any case" in row.note) is noted


def test_checking_a_configuration_does_not_import_torch(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    values = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "torch_autocast": {"dtype": "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    file.write_text(json.dumps(values))
    code = "import sys; from zero_settings import Config; Config.load(sys.argv[1], world_size=1).report()"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
