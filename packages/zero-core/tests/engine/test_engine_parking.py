"""States that wait in host memory, and ranks that call the engine a different number of times."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from engine_cases import RANKS, batch, outcome, start, train, weights
from torch import nn

import zero_core
from zero_comm import run_ranks
from zero_core.parking import KINDS

BF16 = {"bf16": {"enabled": True}, "data_types": {}}


def parked(stage: int, include: list[str] | None, changes: dict[str, Any], park: bool) -> dict[str, Any]:
    engine = start(stage, **changes)
    dtype = torch.bfloat16 if changes else torch.float64
    train(engine, 0, 2, dtype)
    engine.backward(engine(*batch(2, dtype)))
    before = sum(engine.memory_report().values())
    facts: dict[str, Any] = {}
    if park:
        engine.offload_states(include)
        facts["freed"] = before - sum(engine.memory_report().values())
        facts["refused"] = outcome(lambda: engine(*batch(0, dtype)))
        facts["twice"] = outcome(engine.offload_states)
        facts["nan"] = all(bool(p.isnan().all()) for p in engine.module.parameters()) if include is None else True
        engine.reload_states()
        engine.reload_states()
        facts["back"] = sum(engine.memory_report().values()) == before
    engine.step()
    train(engine, 3, 5, dtype)
    facts["weights"] = {name: value.double().tolist() for name, value in weights(engine).items()}
    engine.destroy()
    return facts


@pytest.mark.parametrize("include", [None, ["optim_states"], ["hp_params", "lp_grads"]])
@pytest.mark.parametrize(("stage", "changes"), [(1, {}), (3, BF16)])
def test_training_goes_on_from_parked_states_as_if_nothing_had_happened(
    stage: int, include: list[str] | None, changes: dict[str, Any]
) -> None:
    expected = run_ranks(parked, RANKS, stage, include, changes, False)
    for ours, theirs in zip(run_ranks(parked, RANKS, stage, include, changes, True), expected, strict=True):
        assert ours["weights"] == theirs["weights"]
        assert ours["freed"] > 0 and ours["back"] and ours["nan"]
        assert "reload_states" in ours["refused"] and "reload_states" in ours["twice"]


def refused_while_an_array_is_held(stage: int, held: bool) -> tuple[str, dict[str, Any]]:
    engine = start(stage, zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 10**6})
    train(engine, 0, 2)
    array = next(engine.module.parameters()).detach().numpy() if held else None
    message = outcome(engine.offload_states) if array is not None else ""
    train(engine, 2, 4)
    facts = {name: value.tolist() for name, value in weights(engine).items()}
    engine.destroy()
    return message, facts


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_after_states_could_not_be_parked(stage: int) -> None:
    expected = run_ranks(refused_while_an_array_is_held, RANKS, stage, False)
    for (message, ours), (_, theirs) in zip(
        run_ranks(refused_while_an_array_is_held, RANKS, stage, True), expected, strict=True
    ):
        assert "cannot be freed" in message
        assert ours == theirs


def gathered_after_parking(stage: int) -> tuple[int, int]:
    engine = start(stage, **BF16)
    train(engine, 0, 2, torch.bfloat16)
    engine(*batch(2, torch.bfloat16))
    before = engine.memory_report()["gathered parameters"]
    engine.offload_states(["lp_params"])
    after = engine.memory_report()["gathered parameters"]
    engine.reload_states()
    engine.destroy()
    return before, after


def test_the_unit_that_stays_for_backward_is_freed_by_parking() -> None:
    for before, after in run_ranks(gathered_after_parking, RANKS, 3):
        assert before > 0 == after


def test_what_cannot_be_parked_is_refused_by_name(alone: None) -> None:
    engine = start(2)
    assert "offload_optimizer.nvme_path" in outcome(lambda: engine.offload_states(device="nvme"))
    assert "'disk'" in outcome(lambda: engine.offload_states(device="disk"))
    message = outcome(lambda: engine.offload_states(["weights"]))
    assert "'weights'" in message and all(kind in message for kind in KINDS)


def generate(stage: int) -> tuple[int, str]:
    engine = start(stage)
    rank = dist.get_rank()
    with torch.no_grad(), engine.synced():
        values = [engine(*batch(n)) for n in range(1 + 3 * rank)]
    train(engine, 0, 1)
    message = outcome(lambda: inside(engine))
    return sum(int(bool(v.isfinite())) for v in values), message


def inside(engine: zero_core.Engine) -> None:
    with engine.synced():
        engine.backward(engine(*batch(0)))


def test_ranks_generate_different_lengths_inside_synced() -> None:
    results = run_ranks(generate, RANKS, 3)
    assert [count for count, _ in results] == [1 + 3 * rank for rank in range(RANKS)]
    assert all("inside synced()" in message for _, message in results)


class Choosing(nn.Module):
    """Runs one of its parts, and holds another module's weight where nothing shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[dist.get_rank() % 3](x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose = Choosing()
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.choose(x)).square().mean()


def leaf(how: str) -> list[list[str]]:
    model = Model().double()
    zero: dict[str, Any] = {"stage": 3, "unit_min_numel": 1, "unit_max_numel": 40}
    if how == "call":
        zero_core.set_leaf_modules(model, [Choosing])
    elif how:
        zero["leaf_module"] = {how: ["Choosing" if how == "classes" else "choose"]}
    engine = start(3, model, zero_optimization=zero)
    engine.backward(engine(torch.ones(2, 6, dtype=torch.float64)))
    engine.step()
    return [unit.names for unit in engine.partition.units]


@pytest.mark.parametrize("how", ["call", "classes", "names", "name_suffixes"])
def test_leaf_modules_are_one_unit(how: str) -> None:
    assert max(map(len, run_ranks(leaf, RANKS, "")[0])) == 2
    assert max(map(len, run_ranks(leaf, RANKS, how)[0])) == 6


def live_bytes() -> int:
    """Bytes of the storages of all tensors that exist in this process, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def measured(stage: int, folder: str) -> dict[str, int]:
    model = nn.Sequential(*(nn.Linear(1200, 1200, bias=False) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "offload_param": {"device": "none", "nvme_path": folder}},
    }
    engine = zero_core.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 1200, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    engine.backward(engine(torch.ones(2, 1200, dtype=torch.bfloat16)).float().square().mean())
    facts = {"before": live_bytes(), "resident before": resident_bytes()}
    engine.offload_states(device="nvme")
    facts |= {"parked": live_bytes(), "resident parked": resident_bytes()}
    engine.reload_states()
    facts |= {"after": live_bytes(), "resident after": resident_bytes()}
    engine.step()
    engine.destroy()
    return facts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parking_in_files_frees_the_memory_of_every_state(stage: int, tmp_path: Path) -> None:
    for facts in run_ranks(measured, 2, stage, str(tmp_path)):
        states = 3 * 4 * 4 * 1200 * 1200 // 2  # this rank's half of masters and two moments, float32
        buffers = 5 * 2 * 1200 * 1200  # of the files, each for the largest tensor
        assert facts["before"] - facts["parked"] > states and facts["parked"] < 1.1 * buffers
        assert facts["after"] == facts["before"]
        freed = facts["resident before"] - facts["resident parked"]
        assert freed > states // 2 and facts["resident after"] - facts["resident parked"] > states // 2
