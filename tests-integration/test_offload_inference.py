"""ZeRO-Inference: stage 3 without an optimizer, the weights streamed from host memory or from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from _memory_count import counting_new_storages

from zero_comm import run_ranks

DTYPE = torch.bfloat16
BUFFERS = 3


def settings(device: str, drive: str) -> dict[str, Any]:
    place = {"device": device, "buffer_count": BUFFERS, **({"nvme_path": drive} if device == "nvme" else {})}
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 500,
        "unit_min_numel": 1,
        "offload_param": place,
    }
    return {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}


def losses(device: str, drive: str) -> tuple[list[bytes], dict[str, int], bool]:
    import zero_core

    model = zoo.build("plain", torch.float32)
    with counting_new_storages() as live_bytes, torch.no_grad():
        engine = zero_core.initialize(model=model, config=settings(device, drive))[0]
        engine.eval()
        found = [torch.stack(engine(*zoo.batch(step, 0))).float().numpy().tobytes() for step in range(3)]
        facts = {
            "live": live_bytes(),
            "store": engine.partition.residency.resident_bytes,
            "placeholders": engine.memory_report()["placeholders"],
            "largest": max(unit.layout.shard_numel for unit in engine.partition.units) * DTYPE.itemsize,
            "shards": sum(unit.layout.shard_numel for unit in engine.partition.units) * DTYPE.itemsize,
        }
        whole = engine.consolidated_state_dict()
    kept = dict(model.named_buffers())
    expected = zoo.build("plain", torch.float32).to(DTYPE).state_dict() | kept
    right = whole is None or all(torch.equal(value, whole[name]) for name, value in expected.items())
    engine.destroy(unshard=False)
    return found, facts, right


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_weights_are_streamed_without_changing_a_bit(device: str, ranks: int, tmp_path: Path) -> None:
    plain = zoo.build("plain", torch.float32)
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(DTYPE)
    with torch.no_grad():
        expected = [torch.stack(plain(*zoo.batch(step, 0))).float().numpy().tobytes() for step in range(3)]
    for found, facts, right in run_ranks(losses, ranks, device, str(tmp_path)):
        assert found == expected and right
        if device == "nvme":
            page = 4096
            assert facts["store"] == BUFFERS * -(-facts["largest"] // page) * page
            assert facts["store"] <= facts["live"] <= facts["store"] + facts["placeholders"] + page
        else:
            assert facts["store"] == facts["shards"]
    assert {path.suffix for path in tmp_path.rglob("*")} <= {".lock"}


def training_is_refused(drive: str) -> str:
    import zero_core

    engine = zero_core.initialize(model=zoo.build("plain", torch.float32), config=settings("nvme", drive))[0]
    loss = engine(*zoo.batch(0, 0, dist.get_rank(), dist.get_world_size()))[0]
    try:
        engine.backward(loss)
    except zero_core.UsageError as error:
        return str(error)
    finally:
        engine.destroy()
    return "accepted"


def test_training_without_an_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    for message in run_ranks(training_is_refused, 2, str(tmp_path)):
        assert "no optimizer" in message
