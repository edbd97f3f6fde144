"""Sequence parallelism under the engine: ranks that share sequences follow one process, at every stage."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from sequence_runs import MICRO, MODELS, STEPS, Run, make, one_process, over_ranks, settings, start, steps

import zero_core
from zero_comm import run_ranks
from zero_report import SpanKind, read_run
from zero_sequence import SequenceGroups

STAGES = (0, 1, 2, 3)
SOAK = pytest.mark.soak


def check(answers: list[Any], runs: list[Run], data: int) -> None:
    """Every rank has the weights, norms and, for the first data group, losses of one process."""
    for place, run in enumerate(runs):
        weights, losses, norms = one_process(run, data)
        for rank, answer in enumerate(ranks[place] for ranks in answers):
            assert training.deviation(answer["weights"], weights) <= 1e-12, run
            assert answer["norms"] == pytest.approx(norms, abs=1e-12, rel=0)
            assert answer["group"] == rank // run.sequence
            if answer["group"] == 0:
                assert answer["losses"] == pytest.approx(losses, abs=1e-12, rel=0)
            batch = MICRO * data * run.accumulation
            assert answer["sizes"] == (batch, batch * STEPS, rank // run.sequence, data)


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("sequence", "data"), [(2, 1), (2, 2), *(pytest.param(*sizes, marks=SOAK) for sizes in ((1, 2), (4, 1), (4, 2)))]
)
def test_every_stage_follows_one_process_bit_for_bit_alike(sequence: int, data: int, model: str) -> None:
    runs = [Run(sequence, stage, model=model) for stage in STAGES]
    answers = run_ranks(over_ranks, sequence * data, runs, timeout=280.0)
    check(answers, runs, data)
    first = answers[0][0]
    for ranks in answers:
        assert all(same_bits(first["weights"], answer["weights"]) for answer in ranks)
        assert all(answer["norms"] == first["norms"] for answer in ranks)
        assert all(answer["losses"] == ranks[0]["losses"] for answer in ranks)


COMPOSED = [
    Run(2, 1, accumulation=2),
    Run(2, 3, accumulation=2, recompute=True),
    Run(2, 2, recompute=True),
    Run(2, 1, lora=True),
    Run(2, 3, lora=True, recompute=True),
    Run(2, 2, offload=True),
    Run(2, 3, offload=True, built_sharded=True),
    Run(2, 3, built_sharded=True, recompute=True),
    Run(2, 1, recompute=True, tiled=True),
    Run(2, 3, accumulation=2, recompute=True, tiled=True),
]


def test_what_else_an_engine_does_is_done_over_shards(tmp_path: Path) -> None:
    check(run_ranks(over_ranks, 2, COMPOSED, str(tmp_path)), COMPOSED, 1)


@pytest.mark.soak
def test_what_else_an_engine_does_is_done_over_shards_of_several_samples(tmp_path: Path) -> None:
    check(run_ranks(over_ranks, 4, COMPOSED, str(tmp_path)), COMPOSED, 2)


def reported(folder: str) -> tuple[str, bool, float]:
    """The table of what was sent, whether it is of the groups' own ledger, and the seconds that exchanges were waited
    for."""
    run = Run(2, 1)
    groups = SequenceGroups.open(run.sequence)
    engine = start(run, groups, run_record={"path": folder})
    steps(engine, groups, 3)
    found = engine.communication_table(), groups.ledger is engine.ledger, engine.ledger.seconds("exchange")[1]
    engine.destroy()
    return found


def test_the_engines_report_names_the_exchanges_which_nothing_hides(tmp_path: Path) -> None:
    parts = [f"LlamaAttention of layer {n}: {what}" for n in (0, 1) for what in ("queries, keys, values", "outputs")]
    for table, same, waited in run_ranks(reported, 2, str(tmp_path)):
        assert same and waited > 0
        assert "exchange" in table and all(part in table for part in parts)
    spans = read_run(tmp_path).last.first.block(2).spans
    exchanges = [span.name for span in spans if span.kind == SpanKind.EXCHANGE and span.waited]
    assert exchanges.count(parts[0]) == 2 and set(parts) <= set(exchanges)


def failing_in_forward(run: Run) -> tuple[str, float]:
    """Train until rank 1 fails in the forward pass of step 2, catches that, and does nothing more; return what the
    other rank raised, and after how many seconds."""
    groups = SequenceGroups.open(run.sequence)
    engine = start(run, groups)
    steps(engine, groups, 1)
    if dist.get_rank() == 1:

        def fail(*_: Any) -> None:
            raise ValueError("no such expert")

        engine.module.model.layers[1].mlp.register_forward_pre_hook(fail)
    began = time.monotonic()
    try:
        steps(engine, groups, 1)
    except Exception as error:
        said, seconds = f"{type(error).__name__}: {error}", time.monotonic() - began
    if dist.get_rank() == 1:
        time.sleep(20)
    return said, seconds


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=SOAK)])
def test_a_rank_that_fails_and_lives_on_ends_the_exchanges_of_its_sequence_with_its_cause(stage: int) -> None:
    (said, seconds), (own, _) = run_ranks(failing_in_forward, 2, Run(2, stage))
    assert "no such expert" in own
    assert "rank 1 failed: ValueError: no such expert" in said, said
    assert seconds < 18


class WithoutStates:
    """An mpu that does not say over which ranks states are sharded."""

    def __init__(self, groups: SequenceGroups) -> None:
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        if name == "get_sequence_data_parallel_group":
            raise AttributeError(name)
        return getattr(self._groups, name)


class Strided(SequenceGroups):
    """Ranks 0 and 2, and 1 and 3, share a sequence."""

    def get_sequence_parallel_group(self) -> Any:
        return super().get_data_parallel_group()


def refused() -> list[str]:
    pairs, own = SequenceGroups.open(2), Run(2, 1)
    others = Run(1, 1) if dist.get_rank() == 3 else own
    said = []
    for mpu, config in (
        (None, settings(own)),
        (pairs, settings(Run(1, 1))),
        (pairs, settings(Run(4, 1))),
        (pairs, settings(Run(3, 1))),
        (pairs, settings(others)),
        (WithoutStates(pairs), settings(own)),
        (Strided.open(2), settings(own)),
        (pairs, settings(own, deterministic={"across_world_sizes": 4})),
    ):
        try:
            zero_core.initialize(model=make(own), config=config, mpu=mpu)
            said.append("made")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


EXPECTED = (
    ("UsageError", "sequence_parallel_size is 2 in the configuration, but 1 by the mpu", "SequenceGroups"),
    ("UsageError", "sequence_parallel_size is 1 in the configuration, but 2 by the mpu", "mpu=…"),
    ("UsageError", "sequence_parallel_size is 4 in the configuration, but 2 by the mpu", "groups of 4 ranks"),
    ("ConfigError", "sequence_parallel_size", "a divisor of the number of ranks, 4 (1, 2, 4)"),
    ("sequence_parallel_size is 1 in the configuration, but 2 by the mpu",),
    ("UsageError", "get_sequence_data_parallel_group", "WithoutStates"),
    ("UsageError", "that share a sequence must be 2 consecutive ones of [0, 1, 2, 3]"),
    ("ConfigError", "expected 1 with deterministic.across_world_sizes"),
)


def test_what_does_not_fit_is_refused_by_name_on_every_rank() -> None:
    for answers in run_ranks(refused, 4):
        for said, expected in zip(answers, EXPECTED, strict=True):
            assert all(part in said for part in expected), said
