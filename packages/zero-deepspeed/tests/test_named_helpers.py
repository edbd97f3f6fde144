"""The smaller modules behind DeepSpeed's names."""

from __future__ import annotations

import base64
import contextvars
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_core.errors import UsageError
from zero_deepspeed.accelerator import Accelerator, compute_device, get_accelerator
from zero_deepspeed.communication import get_all_ranks_from_group, get_global_rank, init_distributed
from zero_deepspeed.configuration import DeepSpeedConfig
from zero_deepspeed.estimators import zero2_cold, zero3_live
from zero_deepspeed.helpers import OnDevice, clone_tensors_for_torch_save, move_to_device
from zero_deepspeed.logging_names import log_dist_once
from zero_deepspeed.settings import load_for_construction, raw_config
from zero_settings import ConfigError


def test_aio_handle_moves_tensors_to_files_and_back(tmp_path: Path) -> None:
    pytest.importorskip("zero_nvme_aio")
    from zero_deepspeed.aio import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle(1 << 16, 4, False, True, 2)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (1 << 16, 4, 2)
    source = torch.arange(50_001, dtype=torch.float32)
    assert handle.sync_pwrite(source, tmp_path / "a") == 1
    target = handle.new_cpu_locked_tensor(50_001, source)
    assert handle.async_pread(target, str(tmp_path / "a")) == 0 and handle.wait() == 1
    assert torch.equal(source, target)
    part = torch.zeros(3)
    handle.sync_pread(part, tmp_path / "a", file_offset=4 * 10)
    assert part.tolist() == [10.0, 11.0, 12.0]
    with pytest.raises(UsageError, match="contiguous"):
        handle.sync_pwrite(torch.zeros(4, 4).t()[1:], tmp_path / "b")


def test_aio_handle_works_after_a_transfer_that_failed(tmp_path: Path) -> None:
    pytest.importorskip("zero_nvme_aio")
    from zero_deepspeed.aio import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle()
    handle.sync_pwrite(torch.arange(8.0), tmp_path / "a")
    target = torch.zeros(8)
    handle.async_pread(torch.zeros(8), tmp_path / "a", file_offset=1 << 20)
    handle.async_pread(target, tmp_path / "a")
    with pytest.raises(OSError):
        handle.wait()
    assert target.tolist() == list(range(8))
    assert handle.sync_pread(target, tmp_path / "a") == 1


@pytest.mark.parametrize("begin", ["async_pread", "async_pwrite"])
def test_a_transfer_that_cannot_begin_leaves_no_file_open_and_makes_none(tmp_path: Path, begin: str) -> None:
    pytest.importorskip("zero_nvme_aio")
    from zero_deepspeed.aio import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle()
    (tmp_path / "a").write_bytes(bytes(64))
    kept = []  # what is raised holds the frames, and so a file that nobody closed
    for tensor, name, offset in ((torch.zeros(4, 4).t()[1:], "a", 0), (torch.zeros(4), "a", -8)):
        with pytest.raises(ValueError if offset else UsageError) as raised:
            getattr(handle, begin)(tensor, tmp_path / name, offset)
        kept.append(raised)
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert str(tmp_path / "a") not in opened
    with pytest.raises(UsageError):
        getattr(handle, begin)(torch.zeros(4, 4).t()[1:], tmp_path / "new")
    assert os.listdir(tmp_path) == ["a"] and handle.wait() == 0


def test_a_long_configuration_may_come_as_base64() -> None:
    data = {"train_batch_size": 1, "zero_optimization": {"stage": 1}, "tensorboard": {"output_path": "p" * 5000}}
    assert raw_config(base64.urlsafe_b64encode(json.dumps(data).encode()).decode()) == data


def test_a_message_for_some_ranks_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="DeepSpeed"):
        for _ in range(2):
            log_dist_once("told once", ranks=[0])
    assert [record.message for record in caplog.records] == ["[Rank 0] told once"]


def test_models_on_device_take_no_memory_and_the_dtype() -> None:
    with OnDevice(torch.bfloat16):
        layer = nn.Linear(4, 4)
        counts = torch.zeros(3, dtype=torch.int64)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    assert counts.is_meta and counts.dtype == torch.int64
    with OnDevice(torch.float16, enabled=False):
        assert torch.zeros(1).dtype == torch.float32


def test_nested_containers_are_copied_and_moved() -> None:
    base = torch.arange(10.0)
    state = {"a": base[:2], "b": [base[2:4], "text"]}
    copied = clone_tensors_for_torch_save(state)
    assert copied["a"].untyped_storage().nbytes() == 8 and copied["b"][1] == "text"
    assert move_to_device(state, "meta")["b"][0].is_meta


def test_the_device_is_the_one_that_the_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    device = get_accelerator()
    assert compute_device() == torch.device("cpu")
    assert (device.device_name(), device.current_device_name(), device.communication_backend_name()) == (
        "cpu",
        "cpu",
        "gloo",
    )
    assert device.is_bf16_supported() and device.total_memory() > device.available_memory() > 0
    assert device.FloatTensor([1.0]).dtype == torch.float32
    for index in (None, 0):
        with device.device(index):
            assert torch.zeros(1).device == torch.device("cpu")
    with pytest.raises(NotImplementedError, match=r"torch\.accelerator"):
        device.capture_to_graph()
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    with pytest.raises(UsageError, match="npu"):
        compute_device()


def test_total_memory_is_the_current_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [80, 24]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=sizes[index]))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    device = Accelerator(torch.device("cuda"))
    assert (device.total_memory(), device.total_memory(None), device.total_memory(0)) == (24, 24, 80)


@pytest.mark.usefixtures("alone")
def test_init_distributed_starts_one_rank_and_refuses_a_lone_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="dist_init_required"):
        init_distributed(dist_init_required=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="mpirun"):
        init_distributed()
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    init_distributed()
    assert dist.get_backend() == "gloo" and get_all_ranks_from_group() == [0] and get_global_rank(None, 0) == 0


def test_a_configuration_is_resolved_by_name() -> None:
    config = DeepSpeedConfig({"train_batch_size": 4, "zero_optimization": {"stage": 2}})
    assert (config.train_micro_batch_size_per_gpu, config.zero_optimization_stage) == (4, 2)
    assert config.zero_enabled and config.gradient_clipping == 1.0
    with pytest.raises(AttributeError):
        config.no_such_key  # noqa: B018


def test_what_frameworks_leave_unresolved_is_tolerated_while_a_model_is_built() -> None:
    template = {
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    assert load_for_construction(template, 3).zero_optimization.stage == 3


def test_a_configuration_file_may_be_hjson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4, # a note\n "zero_optimization": {"stage": 2},}')
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ValueError, match=r"zero-deepspeed\[hjson\]"):
        raw_config(tmp_path / "ds.json")
    monkeypatch.undo()
    pytest.importorskip("hjson")
    assert raw_config(tmp_path / "ds.json") == {"train_batch_size": 4, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text('{"fp16": {"enabled": true, "enabled": false,},}')
    with pytest.raises(ValueError, match=r"enabled: expected the key once"):
        raw_config(tmp_path / "ds.json")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4')
    with pytest.raises(ValueError, match="expected JSON"):
        raw_config(tmp_path / "ds.json")


def test_the_estimators_print_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    zero2_cold(10**9, num_gpus_per_node=8)
    zero3_live(nn.Linear(1000, 1000), num_gpus_per_node=8)
    printed = capsys.readouterr().out
    assert printed.count("per CPU  |  per GPU") == 2 and "1M largest layer params" in printed


def test_activation_checkpointing_is_configured_by_deepspeeds_call() -> None:
    from zero_core import checkpointing
    from zero_deepspeed.helpers import configure

    def configured(*arguments: Any, **options: Any) -> bool:
        configure(*arguments, **options)
        return checkpointing.is_configured()

    section = {"activation_checkpointing": {"cpu_checkpointing": True}}
    assert contextvars.copy_context().run(configured, None, deepspeed_config=section)
    assert contextvars.copy_context().run(configured, None, None, False)
    with pytest.raises(ConfigError, match="cpu_checkpointing"):
        configured(None, {"activation_checkpointing": {"cpu_checkpointing": "yes"}})
