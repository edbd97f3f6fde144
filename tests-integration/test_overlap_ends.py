"""`overlap`: "exact" beside saves, kills, failures, and on the simulated accelerator."""

from __future__ import annotations

import dataclasses
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import simulated_engines as engines
import torch
import torch.distributed as dist
import training
import twin_flow_runs as runs
import zoo
from offload_runs import facts, start
from simulated_accelerator.ranks import run_simulated
from training import Run

from zero_comm import CommError, run_ranks
from zero_comm.testing import RanksFailedError
from zero_offload import OffloadError

EXACT = {"offload_optimizer": {"device": "cpu", "overlap": "exact"}}


def saved_at_every_step(run: Run, stage: int, overlap: str, folder: str, decoupled: bool) -> list[Any]:
    """Train with a save after every step; go on from one in the middle; return the bits of both ends."""
    zero = {"offload_optimizer": {"device": "cpu", "overlap": overlap}}
    more = {"checkpoint": {"writer": {"decoupled": decoupled}}, "gradient_clipping": 0.5}
    engine = start(run, stage, zero, **more)
    for step in range(run.steps):
        training.train(engine, run, step, step + 1)
        engine.save_checkpoint(folder, tag=f"step{step}")
    ends = [facts(engine)]
    middle = run.steps // 2
    engine.load_checkpoint(folder, tag=f"step{middle - 1}")
    training.train(engine, run, middle, run.steps)
    ends.append(facts(engine))
    engine.destroy()
    return ends


@pytest.mark.parametrize(
    ("stage", "ranks", "decoupled"),
    [
        (3, 2, True),
        pytest.param(3, 2, False, marks=pytest.mark.soak),
        pytest.param(2, 3, True, marks=pytest.mark.soak),
        pytest.param(1, 1, True, marks=pytest.mark.soak),
    ],
)
def test_saves_at_every_step_hold_whole_steps(stage: int, ranks: int, decoupled: bool, tmp_path: Path) -> None:
    run = Run(steps=10, dtype="bf16")
    off, exact = (
        run_ranks(saved_at_every_step, ranks, run, stage, overlap, str(tmp_path / overlap), decoupled)
        for overlap in ("off", "exact")
    )
    for ours, theirs in zip(exact, off, strict=True):
        assert ours == theirs
        assert ours[0] == ours[1]


TRAINING = """
    import hashlib, sys
    import torch, zero_core
    from torch import nn

    overlap, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    settings = {
        "train_batch_size": 4, "gradient_clipping": 0.02, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "unit_max_numel": 5000, "unit_min_numel": 1,
                              "stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"},
                              "offload_optimizer": {"device": "cpu", "overlap": overlap}},
        "checkpoint": {"path": folder, "interval": 1, "keep_last": 2},
    }
    engine = zero_core.initialize(model=model, config=settings)[0]
    engine.resume(folder)
    while engine.global_steps < steps:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(engine.global_steps)).bfloat16()
        engine.backward((engine(x) - x).float().square().mean())
        engine.step()
        print("step", engine.global_steps, flush=True)
    found = [engine.full_param(p) for p in model.parameters()]
    found += [engine.full_state(p, "exp_avg") for p in model.parameters()]
    print("bits", hashlib.sha256(b"".join(t.numpy().tobytes() for t in found)).hexdigest(), flush=True)
"""


def killed(overlap: str, folder: Path, steps: int, kills: int, seed: int) -> str:
    """Train to the end in processes of which ``kills`` are killed at a random step; return the last one's bits."""
    numbers = random.Random(seed)
    command = [sys.executable, "-c", textwrap.dedent(TRAINING), overlap, str(folder), str(steps)]
    for _ in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(numbers.randint(1, steps // (2 * kills))):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return next(line for line in done.stdout.splitlines() if line.startswith("bits"))


@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 1), *(pytest.param(seed, 3, marks=pytest.mark.soak) for seed in range(1, 6))]
)
def test_a_run_that_is_killed_ends_with_the_same_bits(seed: int, kills: int, tmp_path: Path) -> None:
    expected = killed("off", tmp_path / "off", 20, 0, seed)
    assert killed("exact", tmp_path / "exact", 20, kills, seed) == expected


def break_updates(engine: Any) -> None:
    """Let what follows `step` fail in the update, on the last rank only; earlier updates have ended before."""
    update = engine.offloading.update
    update.finish()

    def fail(*_: Any) -> None:
        raise OSError("the arithmetic broke")

    if dist.get_rank() == dist.get_world_size() - 1:
        update.rate.is_on = False
        update._rule = dataclasses.replace(update._rule, run=fail)


def fail_late(engine: Any, run: Run) -> None:
    """Let the update of step 3 fail on the last rank only, after its step has returned."""
    training.train(engine, run, 0, 2)
    break_updates(engine)
    training.train(engine, run, 2, 3)  # which returns


def failed_late(run: Run) -> None:
    """Let an update fail; train on."""
    engine = start(run, 3, EXACT)
    fail_late(engine, run)
    training.train(engine, run, 3, 4)


def test_a_late_failure_is_raised_with_step_and_unit_on_every_rank() -> None:
    with pytest.raises(RanksFailedError) as found:
        run_ranks(failed_late, 2, Run(dtype="bf16"))
    for rank in range(2):
        text = found.value.failures[rank]
        assert "step 3: the update of '" in text
        assert "failed beside forward: the arithmetic broke" in text
        assert text.count("training.train(engine, run, 3, 4)") == 1


def told_after_a_late_failure(run: Run, folder: str) -> list[str]:
    """What forward, a save and zero_grad say, by then, on this rank."""
    engine = start(run, 3, EXACT)
    fail_late(engine, run)
    told = []
    for call in (
        lambda: training.train(engine, run, 3, 4),
        lambda: engine.save_checkpoint(folder, tag="torn"),
        lambda: engine.zero_grad(),
    ):
        with pytest.raises((CommError, OffloadError)) as found:
            call()
        told.append(str(found.value))
    return told


@pytest.mark.parametrize("ranks", [2, 3])
def test_after_a_late_failure_every_rank_says_what_the_state_is_and_nothing_is_saved(
    ranks: int, tmp_path: Path
) -> None:
    for told in run_ranks(told_after_a_late_failure, ranks, Run(dtype="bf16"), str(tmp_path / "saves")):
        forward, *later = told
        assert "step 3: the update of '" in forward and "have taken that step and others not" in forward
        for text in later:
            assert f"rank {ranks - 1} failed while the update of '" in text and "' in step 3 was writing" in text
            assert "a mixture of two steps" in text and "load the last checkpoint" in text
    assert not list(tmp_path.glob("saves/torn*"))


def recovered(run: Run, overlap: str, folder: str) -> list[Any]:
    """Break an update of the only rank, save, load the checkpoint of step 2 into a new engine, train on."""
    zero = {"offload_optimizer": {"device": "cpu", "overlap": overlap}}
    engine = start(run, 3, zero)
    told: list[str] = []
    training.train(engine, run, 0, 2)
    if overlap == "exact":
        engine.save_checkpoint(folder, tag="good")
        break_updates(engine)
        with pytest.raises(OSError, match="the arithmetic broke"):
            training.train(engine, run, 2, 3)  # one rank has no weights to gather, so its step updates them
        with pytest.raises(CommError) as refused:
            engine.save_checkpoint(folder, tag="torn")
        told.append(str(refused.value))
        engine.destroy()
        engine = start(run, 3, zero)
        engine.load_checkpoint(folder, tag="good")
    training.train(engine, run, 2, 6)
    ends = [facts(engine), told]
    engine.destroy()
    return ends


def test_one_rank_goes_on_after_a_failed_update_from_a_checkpoint(tmp_path: Path) -> None:
    run = Run(dtype="bf16")
    ((off, _),), ((exact, told),) = (run_ranks(recovered, 1, run, o, str(tmp_path)) for o in ("off", "exact"))
    assert exact == off
    assert "the ranks have a mixture of two steps" in told[0]
    assert not list(tmp_path.glob("torn*"))


def written_between(run: Run, stage: int, overlap: str, way: str) -> Any:
    """Train; between backward and step, write weights or states in one of the ways of things-that-bite.md."""
    engine = start(run, stage, {"offload_optimizer": {"device": "cpu", "overlap": overlap}})
    rank, world_size = dist.get_rank(), dist.get_world_size()
    name, weight = max(engine.module.named_parameters(), key=lambda item: item[1].numel())
    for step in range(run.steps):
        engine.backward(sum(engine(*zoo.batch(step, 0, rank, world_size))))
        if step % 3 == 1 and way == "numpy":
            weight.detach().numpy()[...] *= -0.5
        elif step % 3 == 1 and way == "data":
            weight.data.mul_(-0.5)
        elif step % 3 == 1 and way == "no_grad":
            with torch.no_grad():
                weight.clamp_(-0.01, 0.01)
        elif step % 3 == 1 and way == "state":
            tensor = engine.optimizer.param_groups[0]["params"][names(engine).index(name)]
            if tensor in engine.optimizer.state:
                engine.optimizer.state[tensor]["exp_avg"].mul_(0.5)
        elif step % 3 == 1 and way == "set_full_param":
            engine.set_full_param(weight, engine.full_param(weight) * -0.5)
        engine.step()
    found = facts(engine)
    engine.destroy()
    return found


def names(engine: Any) -> list[str]:
    return [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("way", ["numpy", "data", "no_grad", "state", "set_full_param"])
@pytest.mark.parametrize(
    ("stage", "ranks", "dtype"), [(2, 1, "fp32"), (2, 2, "fp32"), pytest.param(1, 2, "fp64", marks=pytest.mark.soak)]
)
def test_what_is_written_between_backward_and_step_counts(stage: int, ranks: int, dtype: str, way: str) -> None:
    run = Run(steps=8, dtype=dtype)
    off, exact, plain = (
        run_ranks(written_between, ranks, run, stage, overlap, how)
        for overlap, how in (("off", way), ("exact", way), ("exact", "nothing"))
    )
    assert exact == off
    assert exact != plain


def simulated(stage: int, dtype: str, overlap: str, **more: Any) -> dict[str, Any]:
    settings = runs.config(stage, dtype, 1.0, **more)
    settings["zero_optimization"]["offload_optimizer"]["overlap"] = overlap
    settings["gradient_clipping"] = 0.0
    return settings


@pytest.mark.parametrize(
    ("stage", "dtype", "more"),
    [
        (2, "bf16", {}),
        pytest.param(3, "fp32", {"offload_param": {"device": "cpu", "pin_memory": True}}, marks=pytest.mark.soak),
        pytest.param(3, "bf16", {}, marks=pytest.mark.soak),
        pytest.param(1, "fp32", {}, marks=pytest.mark.soak),
        pytest.param(3, "bf16", {"offload_param": {"device": "cpu", "pin_memory": True}}, marks=pytest.mark.soak),
    ],
)
def test_on_an_accelerator_no_bit_changes_and_nothing_races(stage: int, dtype: str, more: dict[str, Any]) -> None:
    off, exact = (
        run_simulated(runs.trained, 2, simulated(stage, dtype, overlap, **more), 8) for overlap in ("off", "exact")
    )
    for ours, theirs in zip(exact, off, strict=True):
        assert ours.losses == theirs.losses
        assert [name for name in theirs.values if not ours.values[name].equal(theirs.values[name])] == []
        assert [str(race) for report in ours.reports for race in report.races] == []
    races = run_simulated(engines.races_by_seed, 2, simulated(stage, dtype, "exact", **more), range(10))
    assert races == [[], []]
