"""Checkpoints of the engine: atomic, bitwise, and loadable at any world size and stage."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import training
import zoo
from torch import nn
from training import Run

import zero_ckpt
import zero_core
from zero_comm import run_ranks

HALF, END = 3, 5


def each_stage(even: str, odd: str) -> list[Any]:
    """Every stage with one dtype, and with the other one under `soak`: what is saved at a stage depends on no dtype."""
    by_stage = [(stage, (even, odd) if stage % 2 == 0 else (odd, even)) for stage in range(4)]
    other = [pytest.param(stage, dtypes[1], marks=pytest.mark.soak) for stage, dtypes in by_stage]
    return [*((stage, dtypes[0]) for stage, dtypes in by_stage), *other]


def states(engine: Any) -> dict[str, torch.Tensor]:
    """Weights as the optimizer sees them, and its moments, whole."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        place = engine.partition.find(parameter)
        if place is not None and place[0].plan.trainable:
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{key}"] = engine.full_state(parameter, key)
    return {**training.weights(engine), **found}


def save(run: Run, stage: int, path: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Train to HALF, save, continue to END; return the states at both."""
    engine = training.start(run, stage)
    training.train(engine, run, 0, HALF)
    engine.save_checkpoint(path, client_state={"epoch": 3, "names": ["a", "b"]})
    at_half = training.bits(states(engine))
    training.train(engine, run, HALF, END)
    return at_half, training.bits(states(engine))


def load(run: Run, stage: int, path: str) -> tuple[dict[str, bytes], dict[str, bytes], Any]:
    """Load into a differently seeded model; return the states then and after training on to END."""
    model = zoo.build(run.variant, training.DTYPES["fp32" if run.dtype == "bf16" else run.dtype], seed=9)
    engine = training.start(run, stage, model)
    _, client_state = engine.load_checkpoint(path)
    at_half = training.bits(states(engine))
    counters = (engine.global_steps, engine.micro_steps, client_state)
    training.train(engine, run, HALF, END)
    return at_half, training.bits(states(engine)), counters


Place = tuple[int, int, str]
"""A stage, a world size and a dtype."""


def places(world_size: int) -> list[Place]:
    return [(stage, world_size, dtype) for stage in range(4) for dtype in ("fp32", "bf16")]


def digests(engine: Any) -> tuple[str, str]:
    """Of all states, and of what has to survive another dtype too: masters, moments, and frozen weights as bf16."""
    found = states(engine)
    frozen = {n: found[n].bfloat16() for n, p in engine.module.named_parameters() if not p.requires_grad}
    both = [training.bits(values) for values in (found, {**found, **frozen})]
    exact, rounded = (hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest() for values in both)
    return exact, rounded


def save_some(root: str, chosen: list[Place]) -> dict[Place, tuple[str, str]]:
    """Train and save at the chosen stages and dtypes; return digests of the states."""
    saved = {}
    for place in chosen:
        run = Run("frozen and unused", accumulation=2, clip=0.1, dtype=place[2])
        engine = training.start(run, place[0])
        training.train(engine, run, 0, 2)
        engine.save_checkpoint(root, tag=repr(place), client_state={"place": list(place)}, save_latest=False)
        saved[place] = digests(engine)
        engine.destroy()
    return saved


def is_chosen(saved: Place, loaded: Place) -> bool:
    """Four checkpoints for each stage and world size: all pairs of stages, of world sizes and of dtypes occur."""
    apart = (saved[0] - loaded[0]) % 4
    dtypes = ("bf16" if apart % 2 else "fp32", "bf16" if sum(loaded[:2]) % 2 else "fp32")
    return (saved[1] - loaded[1] - loaded[0] - apart) % 4 == 0 and (saved[2], loaded[2]) == dtypes


def load_some(root: str, pairs: list[tuple[Place, Place]]) -> dict[tuple[Place, Place], tuple[str, str]]:
    """Load checkpoints at other stages and dtypes; return digests of the states by (saved, loaded)."""
    loaded = {}
    for place in sorted({place for _, place in pairs}):
        run = Run("frozen and unused", accumulation=2, clip=0.1, dtype=place[2])
        engine = training.start(run, place[0], zoo.build(run.variant, torch.float32, seed=9))
        for other in (saved for saved, there in pairs if there == place):
            _, client_state = engine.load_checkpoint(root, tag=repr(other))
            assert client_state == {"place": list(other)}
            assert (engine.global_steps, engine.micro_steps) == (2, 4)
            loaded[other, place] = digests(engine)
        engine.destroy()
    return loaded


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[Place, tuple[str, str]]]:
    """A folder for checkpoints, and digests of what is in those that tests have saved there so far."""
    return str(tmp_path_factory.mktemp("everywhere")), {}


ALL = (1, 2, 3, 4)
SAVED_AND_LOADED = [
    (ALL, 2, is_chosen),
    *(pytest.param(ALL, loaded_by, is_chosen, marks=pytest.mark.soak) for loaded_by in (1, 3, 4)),
    *(pytest.param(ALL, loaded_by, lambda saved, loaded: True, marks=pytest.mark.soak) for loaded_by in ALL),
]
"""World sizes that save, the one that loads, and which pairs of the two."""


@pytest.mark.parametrize(("saved_by", "loaded_by", "chosen"), SAVED_AND_LOADED)
def test_weights_masters_and_moments_are_bitwise_equal_at_any_stage_world_size_and_dtype(
    everywhere: tuple[str, dict[Place, tuple[str, str]]],
    saved_by: tuple[int, ...],
    loaded_by: int,
    chosen: Callable[[Place, Place], bool],
) -> None:
    root, saved = everywhere
    every = [place for world_size in saved_by for place in places(world_size)]
    pairs = [(one, other) for other in places(loaded_by) for one in every if chosen(one, other)]
    for world_size in saved_by:
        missing = {one for one, _ in pairs if one[1] == world_size} - saved.keys()
        saved.update(run_ranks(save_some, world_size, root, sorted(missing))[0] if missing else {})
    loaded = run_ranks(load_some, loaded_by, root, pairs)[0]
    assert len(loaded) == len(pairs) >= 8
    used = {one for one, _ in pairs}
    assert len({saved[one][0] for one in used}) >= len({one[1:] for one in used})  # each trains to its own values
    for (one, other), (exact, rounded) in loaded.items():
        assert rounded == saved[one][1], (one, other)
        assert exact == saved[one][0] or one[2] != other[2], (one, other)


@pytest.mark.parametrize(("stage", "dtype"), each_stage("fp32", "bf16"))
def test_training_goes_on_bitwise_as_if_never_interrupted(tmp_path: Path, stage: int, dtype: str) -> None:
    run = Run("reused", clip=0.1, dtype=dtype)
    path = str(tmp_path / "ckpt")
    _, uninterrupted = run_ranks(save, 2, run, stage, path)[0]
    _, resumed, _ = run_ranks(load, 2, run, stage, path)[0]
    assert resumed == uninterrupted


def load_wrong(path: str, variant: str) -> str:
    engine = training.start(Run(variant), 3)
    try:
        engine.load_checkpoint(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_checkpoint_of_another_model_is_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    run_ranks(save, 2, Run(), 3, path)
    for message in run_ranks(load_wrong, 2, path, "frozen and unused"):
        assert message.startswith("MismatchError") and "unused.weight" in message


def test_no_checkpoint_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    for message in run_ranks(load_wrong, 2, str(tmp_path / "nothing"), "plain"):
        assert message.startswith("NotFoundError")


def test_tag_and_latest_follow_the_step(tmp_path: Path) -> None:
    run_ranks(save, 2, Run(), 3, str(tmp_path))
    assert (tmp_path / "latest").read_text().strip() == f"global_step{HALF}"
    assert (tmp_path / f"global_step{HALF}" / "manifest.msgpack").exists()


class Sampler:
    """Visits eight samples in another order each epoch; where it is, is plain data."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def draw(self) -> int:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        index = order[self.position]
        self.position = (self.position + 1) % 8
        self.epoch += not self.position
        return index


def everything(path: str, stage: int, dtype: str, resume: bool) -> tuple[list[Any], dict[str, bytes], int]:
    """Train with dropout, noise of three generators, a schedule, a loss scale and a sampler; return what came after
    HALF: losses, loss scales and learning rates by step, the final states, and the steps skipped then."""
    torch.manual_seed(9 if resume else 1)
    model = nn.Sequential(nn.Linear(6, 11), nn.Dropout(0.3), nn.Tanh(), nn.Linear(11, 1))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 30, "warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1},
    }
    if dtype == "fp16":  # so large a scale that steps are skipped all along
        settings["fp16"] = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
    engine = zero_core.initialize(model=model, config=settings)[0]
    sampler, seed = Sampler(), 10 * dist.get_rank() + resume
    for generator in (torch.manual_seed, random.seed, numpy.random.seed):
        generator(seed)
    if resume:
        vars(sampler).update(engine.load_checkpoint(path)[1]["sampler"])
    trace = []
    for step in range(2 * HALF if resume else 0, 4 * HALF):
        if step == 2 * HALF and not resume:
            engine.save_checkpoint(path, client_state={"sampler": dict(vars(sampler))})
            trace.clear()
        x = torch.full((1, 6), float(sampler.draw())) + torch.rand(6) + random.random() + numpy.random.rand()
        loss = engine(x.to(engine.module[0].weight.dtype)).square().mean()
        engine.backward(loss)
        engine.step()
        trace.append((loss.item(), engine.loss_scale(), engine.get_lr(), engine.skipped_steps, engine.global_samples))
    return trace, training.bits(states(engine)), trace[-1][3] - trace[0][3]


@pytest.mark.parametrize(("stage", "dtype"), each_stage("fp32", "fp16"))
def test_generators_schedule_loss_scale_and_data_position_resume(tmp_path: Path, dtype: str, stage: int) -> None:
    path = str(tmp_path / "ckpt")
    uninterrupted = run_ranks(everything, 2, path, stage, dtype, False)
    assert run_ranks(everything, 2, path, stage, dtype, True) == uninterrupted
    assert uninterrupted[0][0][0][0] != uninterrupted[1][0][0][0]  # the ranks' generators differ
    assert bool(uninterrupted[0][2]) == (dtype == "fp16")


@pytest.mark.parametrize("stage", (1, 3))
def test_plain_torch_goes_on_from_an_engines_checkpoint(tmp_path: Path, stage: int) -> None:
    run, path = Run("frozen and unused", dtype="bf16"), tmp_path / "ckpt"
    saved, _ = run_ranks(save, 3, run, stage, str(path))[0]
    model = zoo.build(run.variant, torch.float32, seed=9)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    report = zero_ckpt.load(path, {"model": model, "optimizer": optimizer})
    assert report.step == HALF and not report.ignored and optimizer.param_groups[0]["lr"] == training.LR
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found = {name: parameter.detach(), **{f"{name}.{k}": v for k, v in optimizer.state[parameter].items()}}
            assert found.pop(f"{name}.step", None) == (None if name.startswith("unused") else HALF)
            assert training.bits(found) == {key: saved[key] for key in found}
    (file,) = zero_ckpt.convert(path, tmp_path / "out.safetensors")
    exported = zero_ckpt.conversion.open_source(file)
    assert exported.aliases["head.weight"] == "embedding.weight"
    assert {name for name, _ in exported.tensors} == set(dict(model.named_parameters())) | {"shift"}


def from_plain(path: str, stage: int) -> tuple[dict[str, torch.Tensor], tuple[int, Any]]:
    engine = training.start(Run(), stage, zoo.build("plain", seed=9))
    _, client_state = engine.load_checkpoint(path)
    facts = engine.global_steps, client_state
    training.train(engine, Run(), HALF, END)
    return training.weights(engine), facts


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the ranks run: torch sums a LayerNorm's gradients by thread, so their last bits depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stage", (0, 3))
def test_an_engine_goes_on_from_plain_torchs_checkpoint(tmp_path: Path, stage: int) -> None:
    model = zoo.build("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)
    for step in range(END):
        if step == HALF:
            zero_ckpt.save(tmp_path, {"model": model, "optimizer": optimizer}, step=HALF)
        sum(model(*zoo.batch(step, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    weights, (steps, client_state) = run_ranks(from_plain, 1, str(tmp_path), stage)[0]
    assert steps == HALF and isinstance(client_state, dict)
    assert training.bits(weights) == training.bits(expected)


def test_an_engine_goes_on_from_its_checkpoint_by_way_of_deepspeeds_format(tmp_path: Path) -> None:
    run, path = Run(dtype="fp32"), tmp_path / "ckpt"
    at_half, at_end = run_ranks(save, 2, run, 3, str(path))[0]
    zero_ckpt.convert(path, tmp_path / "universal", to="deepspeed-universal")
    zero_ckpt.convert(tmp_path / "universal", tmp_path / "back", to="zero-ckpt")
    loaded = run_ranks(load, 2, run, 2, str(tmp_path / "back"))[0]
    assert loaded[:2] == (at_half, at_end)
    assert loaded[2] == (HALF, HALF, {"epoch": 3, "names": ["a", "b"]})
