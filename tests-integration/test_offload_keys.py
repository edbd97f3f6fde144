"""The section `offload`: delayed updates, narrow states, activations on a tier, the overlap report and the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import training
import zoo
from offload_runs import facts, start, tiers
from training import Run

from zero_comm import run_ranks


def run(case: Run, stage: int, zero: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    engine = start(case, stage, zero, **more)
    training.train(engine, case, 0, case.steps)
    result = {
        "facts": facts(engine),
        "activations": engine.offloading.memory(),
        "plan": None if engine.offloading.update is None else dict(engine.offloading.update.plan),
        "gradient_bytes": sum(4 * u.layout.shard_numel for u in engine.partition.units if u.plan.trainable),
    }
    engine.destroy()
    return result


@pytest.mark.parametrize(
    ("variant", "stage"), [pytest.param("plain", 3, marks=pytest.mark.soak), ("recomputed", 2), ("recomputed", 3)]
)
def test_activations_on_nvme_change_no_bit(variant: str, stage: int, tmp_path: Path) -> None:
    case = Run(variant, steps=3, dtype="bf16", clip=0.5)
    expected = run_ranks(run, 2, case, stage, {}, {})
    section = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 64}
    for zero in ({}, tiers(tmp_path, stage)["nvme"]):
        results = run_ranks(run, 2, case, stage, zero, {"offload": {"activations": section, "verify": True}})
        for ours, theirs in zip(results, expected, strict=True):
            assert ours["facts"] == theirs["facts"]
            assert ours["activations"]["nvme"] > 0
    assert {path.suffix for path in tmp_path.rglob("*")} <= {".lock"}


def late(case: Run, ranks: int) -> dict[str, torch.Tensor]:
    """torch's AdamW in one process: every gradient is taken one update before it is applied."""
    model = zoo.build(case.variant, torch.float64)
    named = dict(model.named_parameters())
    masters = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=training.LR, weight_decay=0.01)
    shown = {name: master.detach().clone() for name, master in masters.items()}
    for step in range(case.steps):
        for p, value in zip(named.values(), shown.values(), strict=True):
            p.data.copy_(value)
        losses = [sum(model(*zoo.batch(step, 0, rank, ranks))) / ranks for rank in range(ranks)]
        gradients = torch.autograd.grad(sum(losses), list(named.values()))  # type: ignore[arg-type]
        shown = {name: master.detach().clone() for name, master in masters.items()}
        for master, gradient in zip(masters.values(), gradients, strict=True):
            master.grad = gradient
        optimizer.step()
    return {name: master.detach() for name, master in masters.items()}


def delayed(case: Run, stage: int, zero: dict[str, Any], folder: str) -> tuple[dict[str, torch.Tensor], bool]:
    engine = start(case, stage, zero, offload={"delayed_update": True})
    training.train(engine, case, 0, case.steps)
    result = training.weights(engine)
    engine.save_checkpoint(folder)
    training.train(engine, case, case.steps, case.steps + 2)
    went_on = training.bits(training.weights(engine))
    engine.load_checkpoint(folder)
    training.train(engine, case, case.steps, case.steps + 2)
    again = training.bits(training.weights(engine))
    engine.destroy()
    return result, again == went_on


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.soak), 3])
def test_a_delayed_update_applies_each_gradient_one_step_late(stage: int, tmp_path: Path) -> None:
    case = Run("plain", steps=4)
    expected = late(case, 2)
    for name, zero in tiers(tmp_path, stage).items():
        results = run_ranks(delayed, 2, case, stage, zero, str(tmp_path / f"saved-{name}".replace(" ", "-")))
        for weights, repeats in results:
            assert training.deviation(weights, expected) < 1e-12, name
            assert repeats, name


def narrow(case: Run, zero: dict[str, Any], dtype: str, folder: str, load: bool) -> dict[str, bytes]:
    engine = start(case, 3, zero, offload={"state_dtype": dtype})
    if load:
        engine.load_checkpoint(folder)
    else:
        training.train(engine, case, 0, 2)
        engine.save_checkpoint(folder)
    training.train(engine, case, 2, 4)
    result = training.bits(training.weights(engine))
    engine.destroy()
    return result


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.soak), "int8"])
def test_narrow_states_are_the_same_on_every_tier_and_survive_checkpoints(dtype: str, tmp_path: Path) -> None:
    case = Run("plain", steps=4, dtype="bf16")
    found = [
        run_ranks(narrow, 2, case, zero, dtype, str(tmp_path / f"saved-{name}".replace(" ", "-")), False)[0]
        for name, zero in tiers(tmp_path, 3).items()
    ]
    assert found[0] == found[1] == found[2]
    expected = run_ranks(first_steps, 2, case, {}, None, str(tmp_path / "saved-host"))[0]
    for ranks in (1, 2, 3):
        zero = tiers(tmp_path, 3)["nvme"]
        assert run_ranks(first_steps, ranks, case, zero, dtype, str(tmp_path / "saved-host"))[0] == expected


def first_steps(case: Run, zero: dict[str, Any], dtype: str | None, folder: str) -> dict[str, bytes]:
    """Weights as they are loaded, and moments as far as both hold them exactly."""
    engine = start(case, 3, zero, **({} if dtype is None else {"offload": {"state_dtype": dtype}}))
    engine.load_checkpoint(folder)
    result = training.bits(training.weights(engine))
    engine.destroy()
    return result


def moments_read(case: Run, zero: dict[str, Any], dtype: str | None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Both moments of every parameter after one step, and after the first one was set to 0.5 everywhere."""
    engine = start(case, 3, zero, **({} if dtype is None else {"offload": {"state_dtype": dtype}}))
    training.train(engine, case, 0, 1)
    result = {}
    for name, parameter in engine.module.named_parameters():
        first, second = (engine.full_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq"))
        engine.set_full_state(parameter, "exp_avg", torch.full_like(first, 0.5))
        assert (engine.full_state(parameter, "exp_avg") == 0.5).all(), name
        result[name] = first, second
    engine.destroy()
    return result


def test_eight_bit_moments_are_read_as_numbers(tmp_path: Path) -> None:
    case = Run("plain", steps=1)
    wanted = run_ranks(moments_read, 2, case, {}, None)[0]
    for zero in (tiers(tmp_path, 3)["host"], tiers(tmp_path, 3)["nvme"]):
        for read in run_ranks(moments_read, 2, case, zero, "int8"):
            for name, moments in read.items():
                for value, exact in zip(moments, wanted[name], strict=True):
                    # Codes have three bits after the point, and are less exact far below the largest of 256 elements.
                    assert ((value - exact).abs() <= exact.abs() / 16 + exact.abs().max() / 2**16).all(), name


def recorded(zero: dict[str, Any], folder: str) -> str:
    case = Run("plain", steps=3, dtype="bf16")
    trace = str(Path(folder) / "traces" / "offload.json")
    section = {"report": True, "trace": trace, "trace_steps": 2}
    engine = start(case, 3, zero, offload=section, steps_per_print=1)
    training.train(engine, case, 0, 3)
    table = engine.offloading.table()
    engine.destroy()
    return table


def test_what_moves_is_reported_and_traced(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    tables = run_ranks(recorded, 2, tiers(drive, 3)["all nvme"], str(tmp_path))
    for rank, table in enumerate(tables):
        assert "hidden" in table and "bytes written to drives" in table
        file = tmp_path / "traces" / f"offload.rank{rank}.json"
        rows = json.loads(file.read_text())["traceEvents"]
        hops = {row["cat"] for row in rows if row["ph"] == "X"}
        assert {"states out", "shards in", "shards out", "gradients out", "compute"} <= hops
        assert all(row["pid"] == rank for row in rows)


def parked(case: Run, zero: dict[str, Any], offload: dict[str, Any], drive: str) -> dict[str, Any]:
    """Half of the steps, everything that the device has in files and back, the other half."""
    engine = start(case, 3, zero, offload=offload)
    training.train(engine, case, 0, case.steps // 2)
    before = engine.memory_report()
    engine.offload_states(device="nvme")
    found: dict[str, Any] = {
        "freed": sum(before.values()) - sum(engine.memory_report().values()),
        "files": [path.name for path in Path(drive).glob("parked.*.extents")],
    }
    engine.reload_states()
    found["back"] = engine.memory_report() == before
    training.train(engine, case, case.steps // 2, case.steps)
    found["facts"] = facts(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_states_wait_in_files_whatever_tier_they_are_on(tier: str, tmp_path: Path) -> None:
    case = Run("plain", steps=4, dtype="bf16")
    expected = run_ranks(run, 2, case, 3, {}, {})[0]["facts"]
    zero = tiers(tmp_path, 3)["nvme"] if tier == "nvme" else {}
    offload = {"activations": {"device": "nvme", "nvme_path": str(tmp_path)}} if tier == "device" else {}
    for rank, found in enumerate(run_ranks(parked, 2, case, zero, offload, str(tmp_path))):
        assert found["facts"] == expected
        assert found["freed"] > 0 and found["back"]
        assert any(name.startswith(f"parked.rank{rank}.") for name in found["files"])
    assert {path.suffix for path in tmp_path.rglob("*")} <= {".lock"}


def kept(case: Run, place: dict[str, Any]) -> dict[str, Any]:
    engine = start(case, 3, {"offload_param": place, "unit_min_numel": 1})
    training.train(engine, case, 0, case.steps)
    store = engine.offloading.store
    result = {
        "facts": facts(engine),
        "resident": store.resident_bytes,
        "stored": store.stored_bytes,
        "shards": sum(u.layout.shard_numel * u.plan.dtype.itemsize for u in engine.partition.units),
    }
    engine.destroy()
    return result


def test_shards_fill_the_host_memory_given_and_buffers_have_the_size_given(tmp_path: Path) -> None:
    case = Run("plain", steps=2, dtype="bf16")
    expected = run_ranks(run, 2, case, 3, {}, {})[0]["facts"]
    place = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 4, "buffer_size": 10_000}
    ring = 4 * -(-20_000 // 4096) * 4096
    for given in (0, 1500):
        for found in run_ranks(kept, 2, case, {**place, "max_in_cpu": given}):
            assert found["facts"] == expected
            in_host = found["resident"] - ring
            assert in_host + found["stored"] == found["shards"]
            assert given <= in_host <= 2 * given


def striped(case: Run, folders: list[str]) -> tuple[dict[str, bytes], list[bool]]:
    place = {"device": "nvme", "nvme_path": folders}
    engine = start(case, 3, {"offload_optimizer": place, "offload_param": place})
    training.train(engine, case, 0, case.steps)
    used = [any(Path(folder).glob("*.extents")) for folder in folders]
    result = facts(engine), used
    engine.destroy()
    return result


def test_several_paths_are_striped_over(tmp_path: Path) -> None:
    case = Run("plain", steps=3, dtype="bf16")
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    expected = run_ranks(run, 2, case, 3, {}, {})[0]["facts"]
    for found, used in run_ranks(striped, 2, case, [str(folder) for folder in folders]):
        assert found == expected
        assert all(used)


@pytest.mark.parametrize(
    ("device", "ratios"),
    [
        ("cpu", (0.0, 1.0)),
        ("nvme", (0.4,)),
        *(pytest.param(device, (0.0, 0.4, 1.0), marks=pytest.mark.soak) for device in ("cpu", "nvme")),
    ],
)
def test_the_ratio_is_kept_to_the_byte(device: str, ratios: tuple[float, ...], tmp_path: Path) -> None:
    case = Run("plain", steps=2, dtype="bf16")
    expected = run_ranks(run, 2, case, 2, {}, {})[0]["facts"]
    place = {"nvme_path": str(tmp_path)} if device == "nvme" else {}
    for ratio in ratios:
        zero = {"offload_optimizer": {"device": device, "ratio": ratio, **place}}
        for rank in run_ranks(run, 2, case, 2, zero, {}):
            assert rank["facts"] == expected
            plan, in_files = rank["plan"], rank["plan"]["nvme"]
            in_files -= rank["gradient_bytes"] if device == "nvme" else 0
            whole = plan["states"] + plan["device"] + in_files
            assert (plan["states"] if device == "cpu" else in_files) == 12 * round(whole // 12 * ratio)
