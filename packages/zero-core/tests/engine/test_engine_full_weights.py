"""Full weights in buckets: what save_16bit_model writes, one unit at a time, on every rank or on none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_cases import BLOCK, Net, batch, build, config, outcome, start, train, without
from torch import nn

import zero_core
from zero_comm import WeightBucket, run_ranks

STAGES = (0, 1, 2, 3)


class Odd(Net):
    """Tied layers, a frozen unit, a scalar, an empty and an integer parameter, buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.blocks[0]
        self.tail = nn.Linear(96, 96)
        self.tail.weight = self.blocks[1].weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.table = nn.Parameter(torch.tensor([3, 1]), requires_grad=False)
        self.blocks[1].bias.requires_grad_(False)
        self.enter.requires_grad_(False)
        self.register_buffer("wide", torch.linspace(0, 1, 5, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(4))
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) * self.scale + self.tail(torch.ones_like(self.shift, dtype=x.dtype)).sum() / 1e3


def settings(stage: int, dtype: str, tier: str, folder: str, persistent: int = 0) -> dict[str, Any]:
    chosen = config(stage)
    zero = chosen["zero_optimization"]
    zero["stage3_param_persistence_threshold"] = persistent
    where = {"device": tier} | ({"nvme_path": folder} if tier == "nvme" else {})
    if tier != "device":
        zero["offload_optimizer"] = where
        if stage == 3:
            zero["offload_param"] = where
    ranks = dist.get_world_size()
    chosen["train_micro_batch_size_per_gpu"] = 4 // ranks
    chosen = {**chosen, "train_batch_size": 4 // ranks * ranks}
    if dtype == "bf16":
        return {**without(chosen, "data_types"), "bf16": {"enabled": True}}
    return {**chosen, "data_types": {"param_dtype": dtype}}


def copied(buckets: Iterator[WeightBucket]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for bucket in buckets for name, value in bucket}


def exported(stage: int, dtype: str, tier: str, folder: str, persistent: int) -> dict[str, Any]:
    model = Odd()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                nn.init.normal_(parameter)
    engine = zero_core.initialize(model=model, config=settings(stage, dtype, tier, folder, persistent))[0]
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for number in range(2):
        engine.backward(engine(*batch(number, compute)))
        engine.step()
    engine.save_16bit_model(folder, "model.bin")
    described = engine.full_weights(buffers=True).metadata()
    found = copied(engine.iter_full_weights(BLOCK, buffers=True))
    wide = copied(engine.iter_full_weights(1 << 30, dtype=torch.float32))
    single = dict(iter(engine.full_weights()))
    engine.backward(engine(*batch(3, compute)))
    engine.step()
    return {"described": described, "found": found, "wide": wide, "single": single}


CASES = [
    *(pytest.param(stage, 2, "bf16", "device", 0) for stage in STAGES),
    pytest.param(3, 1, "fp32", "device", 0),
    pytest.param(3, 3, "fp32", "device", 100),
    pytest.param(1, 3, "bf16", "cpu", 0),
    pytest.param(3, 2, "bf16", "cpu", 100),
    pytest.param(2, 2, "fp32", "nvme", 0),
    pytest.param(3, 2, "bf16", "nvme", 0),
    *(
        pytest.param(stage, ranks, dtype, tier, 0, marks=pytest.mark.soak)
        for stage in STAGES
        for ranks in (1, 2, 3)
        for dtype in ("fp32", "bf16")
        for tier in ("device", "cpu", "nvme")
        if stage or tier == "device"
    ),
]


@pytest.mark.parametrize(("stage", "ranks", "dtype", "tier", "persistent"), CASES)
def test_buckets_hold_what_save_16bit_model_writes(
    stage: int, ranks: int, dtype: str, tier: str, persistent: int, tmp_path: Path
) -> None:
    if tier == "nvme":
        pytest.importorskip("zero_nvme_aio")
    results = run_ranks(exported, ranks, stage, dtype, tier, str(tmp_path), persistent)
    saved = torch.load(tmp_path / "model.bin", weights_only=True)
    parameters = [name for name, _ in Odd().named_parameters()]
    tied = {"again.weight", "again.bias", "tail.weight"}
    for told in results:
        found = told["found"]
        assert set(found) == set(saved) - tied and set(parameters) == set(found) - {"shift", "wide", "seen"}
        assert all(torch.equal(found[n], saved[n]) and found[n].dtype is saved[n].dtype for n in found)
        assert [(i.name, i.dtype, i.shape) for i in told["described"]] == [
            (name, value.dtype, tuple(value.shape)) for name, value in found.items()
        ]
        floats = [name for name in parameters if name != "table"]
        assert all(torch.equal(told["wide"][n], saved[n].float()) for n in floats)
        assert told["wide"]["table"].dtype is torch.int64
        assert list(told["single"]) == list(told["wide"])
        assert all(torch.equal(value, saved[name]) for name, value in told["single"].items())


def counted(bucket_bytes: int) -> dict[str, Any]:
    engine = start(3, build(torch.float64, blocks=6))
    train(engine, 0, 1)
    parts = engine.partition
    units = [unit for unit in parts.units if unit.releasable]
    most = {"buckets": 0, "gathered": 0, "storage": set()}
    before = engine.ledger.calls("gather")
    for bucket in engine.iter_full_weights(bucket_bytes):
        most["buckets"] = max(most["buckets"], bucket.memory.untyped_storage().nbytes())
        most["gathered"] = max(most["gathered"], parts.memory()["gathered parameters"])
        most["storage"].add(bucket.memory.data_ptr())
    after = engine.ledger.calls("gather")
    return {
        **most,
        "storage": len(most["storage"]),
        "gathers": after - before,
        "units": len(units),
        "largest unit": max(unit.layout.numel for unit in units) * 8,
        "left": parts.memory()["gathered parameters"],
        "persistent": sum(u.layout.numel for u in parts.units if not u.releasable) * 8,
    }


@pytest.mark.parametrize("bucket_bytes", (1, 2 * BLOCK * 8, 1 << 30))
def test_memory_is_one_bucket_and_one_unit_and_each_unit_is_gathered_once(bucket_bytes: int) -> None:
    for told in run_ranks(counted, 2, bucket_bytes):
        total = 8 * sum(p.numel() for p in build(blocks=6).parameters())
        assert told["units"] >= 6 and told["gathers"] == told["units"]
        assert told["gathered"] - told["persistent"] <= told["largest unit"] < total / 5
        assert told["buckets"] <= min(max(bucket_bytes, 96 * 96 * 8), total + 16 * 20) and told["storage"] == 1
        assert told["left"] == told["persistent"]


def stopped_alone(stage: int, how: str) -> dict[str, Any]:
    engine = start(stage)
    train(engine, 0, 1)

    def loop() -> None:
        for bucket in engine.iter_full_weights(1):
            if dist.get_rank() == 1 and bucket.number == 2:
                if how == "break":
                    break
                raise KeyError("of the script")

    said = outcome(loop)
    whole = copied(engine.iter_full_weights())
    losses = train(engine, 1, 3)
    return {
        "said": said,
        "names": len(whole),
        "losses": losses,
        "held": engine.memory_report().get("gathered parameters"),
    }


@pytest.mark.parametrize("how", ("break", "raise"))
@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_rank_that_stops_alone_is_named_on_the_others_and_the_engine_goes_on(stage: int, how: str) -> None:
    first, second = run_ranks(stopped_alone, 2, stage, how)
    assert "PartitionError: full weights: rank 1 stopped iterating after bucket 3 of 8" in first["said"]
    assert second["said"] == ("no error" if how == "break" else "KeyError: 'of the script'")
    expected = run_ranks(undisturbed, 2, stage)
    assert [one["losses"] for one in (first, second)] == expected and first["names"] == 8


def undisturbed(stage: int) -> list[float]:
    engine = start(stage)
    train(engine, 0, 1)
    return train(engine, 1, 3)


def stopped_together() -> list[str]:
    engine = start(3)
    said = []

    def failing() -> None:
        for bucket in engine.iter_full_weights(1):
            if bucket.number == 1:
                raise KeyError("on every rank")

    said.append(outcome(failing))
    for bucket in engine.iter_full_weights(1):
        if bucket.number == bucket.count - 1:
            break
    said.append(str(len(copied(engine.iter_full_weights()))))
    train(engine, 0, 1)
    return said


def test_ranks_that_stop_together_go_on_together() -> None:
    assert run_ranks(stopped_together, 2) == [["KeyError: 'on every rank'", "8"]] * 2


def misused(which: str, folder: str) -> str:
    engine = start(3)
    train(engine, 0, 1)
    if which == "arguments":
        return outcome(lambda: copied(engine.iter_full_weights(100 + dist.get_rank())))
    if which == "buffers":
        return outcome(lambda: copied(engine.iter_full_weights(buffers=dist.get_rank() == 1)))
    if which == "forward":
        held = engine.iter_full_weights(1)
        next(held)
        call = (lambda: next(held)) if dist.get_rank() else (lambda: engine(*batch(1)))
        said = outcome(call)
        del held
        return said
    if which == "step":
        return outcome(lambda: [train(engine, 1, 2) for _ in engine.iter_full_weights(1)])
    if which in CHANGES:
        weight = engine.module.head.weight
        engine.save_checkpoint(folder)
        for _ in engine.iter_full_weights(1):
            engine.full_state(weight, "exp_avg")  # changes nothing
        changes = {
            "load": lambda: engine.load_checkpoint(folder),
            "set": lambda: engine.set_full_param(weight, torch.ones_like(engine.full_param(weight))),
            "gathered": lambda: edit(engine, weight),
        }
        return outcome(lambda: [changes[which]() for _ in engine.iter_full_weights(1)])
    if which == "pass":
        handle = engine.module.head.register_forward_hook(lambda *_: copied(engine.iter_full_weights()))
        said = outcome(lambda: engine(*batch(1)))
        handle.remove()
        return said
    if which == "dtype":
        return outcome(lambda: engine.full_weights(torch.int8))
    if which == "bound":
        return outcome(lambda: engine.iter_full_weights(0))
    engine.destroy()
    return outcome(lambda: engine.iter_full_weights())


def edit(engine: Any, weight: torch.Tensor) -> None:
    with engine.gathered(weight, modifier_rank=0):
        weight.data.fill_(0.5)


CHANGES = ("load", "set", "gathered")
REFUSALS = {
    "load": ("PartitionError", "load_checkpoint has changed weights after bucket 1 of 8"),
    "set": ("PartitionError", "set_full_param has changed weights after bucket 1 of 8"),
    "gathered": ("PartitionError", "gathered has changed weights after bucket 1 of 8"),
    "arguments": ("DesyncError", "in buckets of 100 bytes", "in buckets of 101 bytes"),
    "buffers": ("PartitionError", "rank 1 has other weights than rank 0 (9 and 8)"),
    "forward": ("DesyncError", "full weights", "forward"),
    "step": ("PartitionError", "the optimizer has stepped after bucket 1 of 8"),
    "pass": ("PartitionError", "inside a forward or backward pass"),
    "dtype": ("PartitionError", "got torch.int8"),
    "bound": ("PartitionError", "at least 1, got 0"),
    "destroyed": ("UsageError", "engine.full_weights: this engine was destroyed"),
}


@pytest.mark.parametrize("which", REFUSALS)
def test_misuse_is_refused_on_every_rank(which: str, tmp_path: Path) -> None:
    for said in run_ranks(misused, 2, which, str(tmp_path)):
        assert all(part in said for part in REFUSALS[which]), said


def edited() -> bool:
    """Weights that user code has changed after the step, in place and by another storage, are those handed on."""
    engine = start(3)
    train(engine, 0, 1)
    weight = engine.module.blocks[0].weight
    with engine.gathered(weight, modifier_rank=0):
        weight.data.fill_(0.5)
    engine.set_full_param(engine.module.head.bias, torch.full((3,), 0.25))
    found = copied(engine.iter_full_weights())
    with engine.gathered(list(engine.module.parameters())):
        inside = copied(engine.iter_full_weights())
        still = bool((weight == 0.5).all())
    same = all(torch.equal(inside[name], value) for name, value in found.items())
    return still and same and bool((found["blocks.0.weight"] == 0.5).all() and (found["head.bias"] == 0.25).all())


def test_changes_of_user_code_are_handed_on_and_gathered_weights_stay() -> None:
    assert run_ranks(edited, 2) == [True, True]


def evaluated() -> bool:
    """Passes without a step between two buckets leave what is gathered as it is."""
    engine = start(3)
    expected = copied(engine.iter_full_weights())
    found = {}
    for bucket in engine.iter_full_weights(1):
        with torch.no_grad():
            engine(*batch(bucket.number))
        found.update({name: value.clone() for name, value in bucket})
    return all(torch.equal(found[name], value) for name, value in expected.items())


def test_forward_passes_between_two_buckets_are_allowed() -> None:
    assert run_ranks(evaluated, 2) == [True, True]
