"""Tensor parallelism by the user's own layers and mpu: 2 x 2 ranks follow one process."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _tensor_parallel import CLASSES, WIDTH, Grid, Net, whole_of

import zero_core
from zero_ckpt import CheckpointError, MismatchError
from zero_comm import run_ranks
from zero_core.supervision import supervised
from zero_sequence import SequenceGroups
from zero_verify import Bitwise, Recording, Variant, compare
from zero_verify.recorder import AllStepsTaken, Recorder

SAMPLES, STEPS, CLIP, LR = 4, 6, 2.8, 1e-2
SOAK = pytest.mark.soak


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES * STEPS * 2, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (len(x),), generator=generator)
    return list(zip(x, y, strict=True))


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES // 2,
        "gradient_clipping": CLIP,
        "data_types": {"param_dtype": "fp64"},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1},
        **more,
    }


@functools.cache
def one_process() -> tuple[dict[str, torch.Tensor], list[float]]:
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    order = torch.randperm(len(data()), generator=torch.Generator().manual_seed(0)).tolist()
    norms = []
    for step in range(STEPS):
        rows = [data()[i] for i in order[step * SAMPLES : (step + 1) * SAMPLES]]
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        model(x, y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def start(mpu: Any, stage: int, **more: Any) -> zero_core.Engine:
    made: list[Net] = []

    def recompute(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return zero_core.checkpointing.checkpoint(layer, x)

    with zero_core.Init(settings(stage), mpu=mpu):
        made.append(Net(mpu, recompute=recompute if "activation_checkpointing" in more else None).double())
    return zero_core.initialize(model=made[0], config=settings(stage, **more), mpu=mpu, training_data=data())[0]


def steps(engine: zero_core.Engine, count: int) -> list[float]:
    norms: list[float] = []
    batches = iter(engine.training_dataloader)
    for _ in range(count):
        engine.backward(engine(*next(batches)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def trained(stage: int, more: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = start(Grid(2), stage, **more)
    assert engine.train_batch_size() == SAMPLES and engine.training_dataloader.data_sampler.ranks == 2
    cut = type(engine.checkpointing._store).__name__ == "PartitionedStore"
    assert cut == ("activation_checkpointing" in more)
    norms = steps(engine, STEPS)
    result = {name: engine.full_param(p) for name, p in engine.module.named_parameters()}
    engine.destroy()
    return result, norms


def together(answers: list[Any]) -> dict[str, torch.Tensor]:
    """The whole model's weights; ranks 0 and 1 have one copy of the two parts, ranks 2 and 3 another."""
    for one, two in ((0, 2), (1, 3)):
        assert all(torch.equal(answers[one][name], answers[two][name]) for name in answers[one])
    return {name: whole_of(name, [answers[0][name], answers[1][name]]) for name in answers[0]}


@pytest.mark.parametrize(
    ("stage", "recompute"),
    [
        (1, False),
        (3, False),
        (0, True),
        *(pytest.param(*case, marks=SOAK) for case in ((0, False), (2, False), (3, True))),
    ],
    ids=str,
)
def test_two_times_two_ranks_follow_one_process(stage: int, recompute: bool) -> None:
    more = {"activation_checkpointing": {"partition_activations": True}} if recompute else {}
    answers = run_ranks(trained, 4, stage, more)
    weights, norms = one_process()
    got = together([answer[0] for answer in answers])
    assert max(float((got[name] - weights[name]).abs().max()) for name in weights) <= 1e-12
    for answer in answers:
        assert answer[1] == pytest.approx(norms, abs=1e-12, rel=0)
    assert max(norms) > CLIP > min(norms)


def recorded(folder: str, variant: Variant) -> None:
    recorder = Recorder(Path(folder), variant, steps=2)
    with supervised(recorder), pytest.raises(AllStepsTaken):
        steps(start(Grid(2), 3), STEPS)
    recorder.close()


def test_verify_compares_every_part_with_its_own(tmp_path: Path) -> None:
    runs = {}
    for variant in (Variant.REFERENCE, Variant.GIVEN):
        run_ranks(recorded, 4, str(tmp_path / variant.value), variant)
        runs[variant] = Recording(tmp_path / variant.value)
        assert [place.name for place in runs[variant].engines] == ["engine 000 part 000", "engine 000 part 001"]
        assert [runs[variant].count(part) for part in (0, 1)] == [2, 2]
    assert compare(runs[Variant.REFERENCE], runs[Variant.GIVEN], Bitwise()) is None
    first = next(runs[Variant.GIVEN].steps(0))
    assert len(first.losses) == 2 and first.config["train_batch_size"] == SAMPLES


def overflow(stage: int) -> tuple[list[float], list[int]]:
    """Rank 3 alone has a gradient that is not finite, in a part; every rank skips, and halves its scale alike."""
    mpu = Grid(2)
    config = settings(stage, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    del config["data_types"]
    engine = zero_core.initialize(model=Net(mpu), config=config, mpu=mpu)[0]
    scales = []
    for step in range(3):
        x = torch.ones(2, WIDTH, dtype=torch.float16)
        loss = engine(x, torch.zeros(2, dtype=torch.int64))
        if step == 1 and dist.get_rank() == 3:
            engine.module.layers[1].up.register_hook(lambda g: g * float("inf"))
        engine.backward(loss)
        engine.step()
        scales.append(engine.loss_scale())
    engine.destroy()
    return scales, [engine.skipped_steps]


@pytest.mark.parametrize("stage", (pytest.param(0, marks=SOAK), 3))
def test_an_overflow_in_one_part_skips_the_step_of_all(stage: int) -> None:
    answers = run_ranks(overflow, 4, stage)
    assert answers == [answers[0]] * 4
    assert answers[0][1] == [2] and answers[0][0][0] > answers[0][0][1]


def resumed(stage: int, folder: str) -> Any:
    mpu = Grid(2)
    engine = start(mpu, stage)
    steps(engine, 2)
    engine.save_checkpoint(folder, tag="two")
    steps(engine, 1)
    engine.save_checkpoint(folder, tag="three")
    engine.destroy()
    dist.barrier()
    if dist.get_rank() == 0:  # as if the job had died when only one part was written
        shutil.rmtree(Path(folder) / "mp_rank_01" / "three")
    dist.barrier()
    engine = start(mpu, 3 - stage)
    path, _ = engine.load_checkpoint(folder)
    norms = steps(engine, STEPS - 2)
    result = {name: engine.full_param(p) for name, p in engine.module.named_parameters()}
    engine.destroy()
    whole = zero_core.initialize(model=Net().double(), config=settings(0, train_batch_size=2 * SAMPLES))[0]
    try:
        whole.load_checkpoint(folder)
        refusal = "loaded"
    except CheckpointError as error:
        refusal = str(error)
    return result, norms, path, refusal


@pytest.mark.parametrize("stage", (pytest.param(0, marks=SOAK), 3))
def test_every_part_has_its_own_checkpoints_and_all_parts_resume_from_the_same(stage: int, tmp_path: Path) -> None:
    answers = run_ranks(resumed, 4, stage, str(tmp_path))
    weights, norms = one_process()
    got = together([answer[0] for answer in answers])
    assert max(float((got[name] - weights[name]).abs().max()) for name in weights) <= 1e-12
    for rank, (_, later, path, refusal) in enumerate(answers):
        assert later == pytest.approx(norms[2:], abs=1e-12, rel=0)
        assert path == str(tmp_path / f"mp_rank_{rank % 2:02d}" / "two")
        assert "model in 2 parts" in refusal and "mpu" in refusal


def fewer(folder: str) -> tuple[list[str], list[str]]:
    """Return what four parts say of checkpoints in two, on every call, and where two parts resume theirs."""
    said = []
    engine = start(Grid(4), 1)
    for call in (engine.load_checkpoint, engine.resume, engine.save_checkpoint):
        with pytest.raises(MismatchError) as error:
            call(folder)
        said.append(str(error.value))
    engine.save_checkpoint(f"{folder}/new", "one")
    engine.save_checkpoint(f"{folder}/new", "two")
    engine.destroy()
    parts = sorted(str(path.relative_to(folder)) for path in Path(folder, "new").glob("mp_*"))
    return said, parts


def two_parts(folder: str) -> None:
    engine = start(Grid(2), 1)
    engine.save_checkpoint(folder, "two")
    engine.destroy()


def test_checkpoints_of_fewer_parts_are_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(two_parts, 4, str(tmp_path))
    answers = run_ranks(fewer, 4, str(tmp_path))
    assert answers == [answers[0]] * 4
    said, parts = answers[0]
    assert all("in 2 parts" in text and "here has 4" in text for text in said)
    assert parts == [f"new/mp_rank_{part:02d}" for part in range(4)]


def begun(folder: str) -> str:
    """Begin where the first save of one part alone had made its folder, as if it had been killed then."""
    engine = start(Grid(2), 1)
    assert engine.resume(folder) is None
    engine.save_checkpoint(folder, "one")
    path, _ = engine.load_checkpoint(folder)
    engine.destroy()
    return str(path)


def test_a_first_save_that_was_killed_in_one_part_keeps_no_job_from_beginning_again(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    answers = run_ranks(begun, 4, str(tmp_path))
    assert answers == [str(tmp_path / f"mp_rank_{rank % 2:02d}" / "one") for rank in range(4)]


class Wrong(Grid):
    def get_pipeline_model_parallel_world_size(self) -> int:
        return 2


class Odd(Grid):
    """Rank 3 names itself twice."""

    def get_data_parallel_group(self) -> Any:
        return self._model_group if dist.get_rank() == 3 else super().get_data_parallel_group()


class Unset(Grid):
    """Rank 3 has not set its groups up."""

    def get_data_parallel_group(self) -> Any:
        return self._groups if dist.get_rank() == 3 else super().get_data_parallel_group()


class Elsewhere(Grid):
    """Rank 3 names a group that it is not in."""

    def get_data_parallel_group(self) -> Any:
        others = dist.new_group([0, 2])
        return others if dist.get_rank() == 3 else super().get_data_parallel_group()


class DataOnly:
    """An mpu without the model-parallel half."""

    def __init__(self) -> None:
        self.get_data_parallel_group = lambda: dist.group.WORLD


def refused() -> list[str]:
    said = []
    for mpu, config in (
        (Unset(2), settings(0)),
        (Elsewhere(2), settings(0)),
        (DataOnly(), settings(0)),
        (Wrong(2), settings(0)),
        (Odd(2), settings(0)),
        (object(), settings(0)),
        (Grid(2), settings(1, optimizer={"type": "Lamb", "params": {"lr": LR}})),
        (Grid(2), settings(1, optimizer={"type": "Muon", "params": {"lr": LR}})),
    ):
        try:
            zero_core.initialize(model=Net(mpu if isinstance(mpu, Grid) else None).double(), config=config, mpu=mpu)
            said.append("made")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_what_an_mpu_cannot_say_is_refused_by_name_on_every_rank() -> None:
    for unset, elsewhere, half, pipeline, odd, none, lamb, muon in run_ranks(refused, 4):
        for said, name in ((unset, "AttributeError: 'Unset' object has no"), (elsewhere, "ValueError: ")):
            assert said.startswith(f"UsageError: mpu: on rank 3 it raised {name}"), said
        assert half.startswith("UsageError: mpu: expected an mpu with get_tensor_model_parallel_group or")
        assert "UsageError" in pipeline and "pipeline parallelism" in pipeline
        assert "UsageError" in odd and "rank 1's data-parallel group is [1, 3], rank 3's is [2, 3]" in odd
        assert "get_data_parallel_group" in none
        for said in (lamb,) if torch.__version__ < (2, 9) else (lamb, muon):  # torch 2.9 brought Muon
            assert "PartitionError" in said and "layers.0.up" in said and "model_parallel" in said


def with_an_mpu_on_one_rank() -> list[str]:
    said = []
    for mpu in (Grid(1), SequenceGroups.open(1)):
        given = mpu if dist.get_rank() == 0 else None
        for make in (
            lambda given=given: zero_core.initialize(model=Net(None).double(), config=settings(2), mpu=given),
            lambda given=given: zero_core.Init(settings(3), mpu=given).__enter__(),
        ):
            try:
                make()
                said.append("made")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def test_an_mpu_on_some_ranks_only_is_refused_on_every_rank() -> None:
    for answers in run_ranks(with_an_mpu_on_one_rank, 2):
        for said in answers:
            assert "DesyncError" in said and "an mpu" in said and "None" in said, said
