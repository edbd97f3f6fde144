"""Statements about DeepSpeed's public names that hold for it and for this project, as functions.

`python peer_names_job.py FOLDER` calls each with a folder of its own and prints one JSON object: name -> "" or what
failed.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

STATEMENTS: dict[str, Callable[[Path], None]] = {}


def statement(function: Callable[[Path], None]) -> Callable[[Path], None]:
    STATEMENTS[function.__name__] = function
    return function


def refused(call: Callable[..., object], *arguments: object, **named: object) -> bool:
    try:
        call(*arguments, **named)
    except ValueError:
        return True
    return False


@statement
def a_hostfile_gives_hosts_with_their_slots(folder: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion

    path = folder / "hosts"
    path.write_text("# rack 3\n  alpha slots=3\n\n10.0.0.7\tslots=2\n")
    pool = fetch_hostfile(str(path))
    assert list(pool.items()) == [("alpha", 3), ("10.0.0.7", 2)]
    assert fetch_hostfile(str(folder / "absent")) is None
    assert parse_inclusion_exclusion(pool, "10.0.0.7@alpha:2", "") == {"alpha": [2], "10.0.0.7": [0, 1]}
    assert refused(parse_inclusion_exclusion, pool, "alpha:3", "")


@statement
def a_hostfile_with_another_line_is_refused(folder: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    for text in ("alpha slots=1\nalpha slots=2", "two words slots=1", "alpha", "", "alpha slots=2\nbeta"):
        path = folder / "hosts"
        path.write_text(text)
        assert refused(fetch_hostfile, str(path)), text


@statement
def filters_choose_slots_of_hosts(folder: Path) -> None:
    from deepspeed.launcher.runner import parse_resource_filter

    hosts = {"a": [0, 1, 2], "b": [0, 1]}
    assert parse_resource_filter(hosts) == hosts
    for text, expected in (
        ("a", {"a": [0, 1, 2]}),
        ("b:1@a:2", {"a": [2], "b": [1]}),
        ("a:2,0,2", {"a": [0, 2]}),
        ("a:1@a:2", {"a": [1, 2]}),
    ):
        assert dict(parse_resource_filter(hosts, include_str=text)) == expected, text
    for text, expected in (
        ("a", {"b": [0, 1]}),
        ("a:0,1@b:1", {"a": [2], "b": [0]}),
        ("a@b", {}),
        ("b:0,1", {"a": [0, 1, 2]}),
    ):
        assert dict(parse_resource_filter(hosts, exclude_str=text)) == expected, text
    assert list(parse_resource_filter(hosts, include_str="b@a")) == ["a", "b"]
    assert hosts == {"a": [0, 1, 2], "b": [0, 1]}


@statement
def filters_that_name_what_there_is_not_are_refused(folder: Path) -> None:
    from deepspeed.launcher.runner import parse_resource_filter

    hosts = {"a": [0, 1, 2], "b": [0, 1]}
    assert refused(parse_resource_filter, hosts, include_str="a", exclude_str="b")
    for text in ("c", "b:2", "a@b:0@1", "a:x"):
        assert refused(parse_resource_filter, hosts, include_str=text), text
        assert refused(parse_resource_filter, hosts, exclude_str=text), text


@statement
def lists_of_cores_are_numbers_and_ranges(folder: Path) -> None:
    from deepspeed.utils.numa import parse_range_list

    assert parse_range_list("1,4-6,9") == [1, 4, 5, 6, 9]
    for text in ("0,2-5,4", "6-3", "1-2-3", "x"):
        assert refused(parse_range_list, text), text


@statement
def a_monitor_has_the_values_of_its_section(folder: Path) -> None:
    from deepspeed.monitor.csv_monitor import csvMonitor
    from deepspeed.monitor.tensorboard import TensorBoardMonitor
    from deepspeed.monitor.wandb import WandbMonitor
    from deepspeed.runtime.config import DeepSpeedConfig

    where = {"enabled": True, "output_path": str(folder), "job_name": "one"}
    named = {"enabled": False, "group": "g", "team": "t", "project": "p"}
    config = DeepSpeedConfig({"train_batch_size": 1, "tensorboard": where, "csv_monitor": where, "wandb": named})
    sections = config.monitor_config
    for made in (TensorBoardMonitor(sections.tensorboard), csvMonitor(sections.csv_monitor)):
        assert (made.enabled, made.output_path, made.job_name) == (True, str(folder), "one")
    offline = WandbMonitor(sections.wandb)
    assert (offline.enabled, offline.group, offline.team, offline.project) == (False, "g", "t", "p")


@statement
def a_monitor_that_is_not_enabled_has_defaults_and_writes_nothing(folder: Path) -> None:
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.monitor.csv_monitor import csvMonitor
    from deepspeed.monitor.tensorboard import TensorBoardMonitor
    from deepspeed.runtime.config import DeepSpeedConfig

    defaults = DeepSpeedMonitorConfig()
    sections = DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": {}, "tensorboard": {}}).monitor_config
    assert not sections.enabled and not defaults.enabled
    for made, known in (
        (csvMonitor(sections.csv_monitor), defaults.csv_monitor),
        (TensorBoardMonitor(sections.tensorboard), defaults.tensorboard),
    ):
        assert (made.enabled, made.output_path, made.job_name) == (known.enabled, known.output_path, known.job_name)
        made.write_events([("Train/loss", 1.0, 1)])
    assert DeepSpeedMonitorConfig(csv_monitor={"enabled": True}).enabled


@statement
def groups_without_experts_are_not_split(folder: Path) -> None:
    import torch
    from deepspeed.moe.utils import has_moe_layers, is_moe_param, split_params_into_different_moe_groups_for_optimizer

    model = torch.nn.Linear(2, 2)
    group = {"params": list(model.parameters()), "lr": 0.5, "name": "dense"}
    for given in (dict(group), [dict(group)], (dict(group),)):
        (split,) = split_params_into_different_moe_groups_for_optimizer(given)
        assert split["lr"] == 0.5 and [id(p) for p in split["params"]] == [id(p) for p in model.parameters()]
    assert refused(split_params_into_different_moe_groups_for_optimizer, model.weight)
    assert has_moe_layers(model) == (False, 0)
    assert not is_moe_param(model.weight)
    model.weight.allreduce = False
    assert is_moe_param(model.weight)


@statement
def leaf_modules_of_a_configuration_are_lists(folder: Path) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for one in ("Block", ["Block"]):
        leaves = DeepSpeedZeroConfig(
            leaf_module={"classes": one, "names": ["a.b"], "name_suffixes": "tail"}
        ).leaf_module
        assert (leaves.classes, leaves.names, leaves.name_suffixes) == (["Block"], ["a.b"], ["tail"])


@statement
def each_builder_has_its_line_in_the_table_of_operators(folder: Path) -> None:
    import deepspeed
    from deepspeed.ops import op_builder

    for name in ("CPUAdam", "CPUAdagrad", "CPULion", "FusedAdam", "Utils", "Quantizer", "Transformer", "Inference"):
        builder = getattr(op_builder, f"{name}Builder")
        assert isinstance(deepspeed.ops.__compatible_ops__[builder.NAME], bool), name
    assert deepspeed.ops.__compatible_ops__["cpu_adam"]


@statement
def numbers_of_hosts_or_ranks_are_refused_beside_a_filter(folder: Path) -> None:
    from deepspeed.launcher.runner import main as command

    for numbers in (["--num_nodes", "2"], ["--num_gpus", "2"], ["--num_nodes", "2", "--num_gpus", "2"]):
        for choice in ("--include", "--exclude"):
            assert refused(command, [*numbers, choice, "localhost:0", str(folder / "train.py")])


@statement
def what_an_inner_init_built_has_names_before_the_outer_one_ends(folder: Path) -> None:
    import torch
    from deepspeed.runtime.zero import Init

    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    with Init(config_dict_or_path=config):
        with Init(config_dict_or_path=config):
            first = torch.nn.Linear(3, 3)
        assert first.weight.ds_id >= 0 and first.bias.ds_numel == 3
        second = torch.nn.Linear(3, 3)
    assert len({parameter.ds_id for model in (first, second) for parameter in model.parameters()}) == 4
    with Init(config_dict_or_path=config, enabled=False):
        with Init(config_dict_or_path=config):
            inside = torch.nn.Linear(3, 3)
        outside = torch.nn.Linear(3, 3)
    assert hasattr(inside.weight, "ds_id") and not hasattr(outside.weight, "ds_id")


@statement
def a_model_trains_with_gradients_that_are_accumulated_in_half(folder: Path) -> None:
    import deepspeed
    import torch

    for stage in (1, 2, 3):
        for mode, accumulated in ((None, "bf16"), (None, "fp16"), ("bf16", "fp16"), ("bf16", "bf16")):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 1)
            config = {
                "train_batch_size": 1,
                "zero_optimization": {"stage": stage},
                "data_types": {"grad_accum_dtype": accumulated},
                **({mode: {"enabled": True}} if mode else {}),
            }
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
            x = torch.ones(1, 4, dtype=torch.bfloat16 if mode else torch.float32, device=engine.device)
            losses = []
            for _ in range(3):
                loss = engine(x).square().sum()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            assert losses[0] > losses[1] > losses[2], (stage, mode, accumulated, losses)


def main(folder: Path) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    seen = {}
    for name, function in STATEMENTS.items():
        own = folder / name
        own.mkdir()
        try:
            function(own)
            seen[name] = ""
        except Exception:
            seen[name] = traceback.format_exc(limit=-2)
    print("seen " + json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
