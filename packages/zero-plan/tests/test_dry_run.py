"""The dry run of the engine against real runs of it, to the byte."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from tempfile import TemporaryDirectory

import dry_models
import pytest
import torch
from dry_models import Case, Measured, decoder, frozen_decoder, tied_decoder

from zero_comm import run_ranks
from zero_plan import PlanError, RankPlan, fits, load_machine, plan, step_bounds

BF16 = (("bf16", {"enabled": True}),)
HOST = {"device": "cpu"}
OPTIMIZER_ON_HOST = (("offload_optimizer", HOST),)
PARAMETERS_ON_HOST = (("offload_param", HOST),)
BOTH_ON_HOST = (*OPTIMIZER_ON_HOST, *PARAMETERS_ON_HOST)
NVME = {"device": "nvme"}
TWO_VIRTUAL_RANKS = (("deterministic", {"across_world_sizes": 2}),)
BOTH_ON_NVME = (("offload_optimizer", NVME), ("offload_param", NVME))
NODES = (("comm", {"ranks_per_node": 2}),)
HPZ = (("zero_hpz_partition_size", 2),)
QGZ = (("zero_quantized_gradients", True),)
HPZ_QGZ = (*HPZ, *QGZ)
FP16 = (("fp16", {"enabled": True, "initial_scale_power": 4}),)
SUM = (("gradient_allreduce_op", "sum"),)
MICS = (("mics_shard_size", 2),)
MIXED = (("offload_optimizer", {"device": "nvme", "ratio": 0.5}), ("offload_param", HOST))
SOAK = pytest.mark.soak


class Recurrent(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0].sum()


def warned_of(kind: type[torch.nn.RNNBase], **changes: object) -> str:
    settings = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **changes}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plan(lambda: Recurrent(kind), settings, batch=torch.zeros(7, 3, 4), world_size=1)
    return " ".join(str(warning.message) for warning in found if "zero-plan" in str(warning.message))


def test_memory_that_no_plan_counts_is_named() -> None:
    assert "the model has a torch.nn.LSTM" in warned_of(torch.nn.LSTM)
    assert warned_of(torch.nn.GRU) == "" == warned_of(torch.nn.RNN)
    copies = {"in_memory": {"every": 10}, "path": "somewhere"}
    assert "checkpoint.in_memory is not in this plan" in warned_of(torch.nn.GRU, checkpoint=copies)
    assert "audit_every is not in this plan" in warned_of(torch.nn.GRU, audit_every=10)


def check(cases: list[Case], world_size: int, ranks: Iterable[int] | None = None) -> None:
    with TemporaryDirectory() as folder:
        by_rank: list[list[Measured]] = run_ranks(dry_models.train, world_size, cases, folder)
    for number, case in enumerate(cases):
        found = plan(case.model, case.config(), batch=dry_models.tokens(), world_size=world_size, ranks=ranks)
        for planned in found.ranks:
            assert_equal(case, planned, by_rank[planned.rank][number])


def assert_equal(case: Case, planned: RankPlan, measured: Measured) -> None:
    assert sorted(map(tuple, planned.held)) == sorted(measured.held), (case, planned.rank)
    sent = {row[:2]: row[2:] for row in measured.sent}
    assert {tuple(row[:2]): tuple(row[2:]) for row in planned.sent} == sent, (case, planned.rank)
    assert dict(planned.files) == measured.files, (case, planned.rank)
    assert planned.needs().get("pageable host", 0) == measured.host, (case, planned.rank)
    assert (planned.read, planned.written) == measured.moved, (case, planned.rank)
    data = [row for row in measured.sent if row[0] != "control"]
    across, links = sum(row[4] for row in data), planned.bytes_by_link()
    assert (links["inside a node"], links["between nodes"]) == (sum(row[3] for row in data) - across, across)


@pytest.mark.parametrize(
    ("world_size", "rank", "cases"),
    [
        (1, 0, [Case(stage=3), Case(stage=3, settings=BF16, zero=BOTH_ON_NVME)]),
        (
            2,
            1,
            [
                Case(stage=0, settings=TWO_VIRTUAL_RANKS),
                Case(tied_decoder, stage=2, accumulation=3, settings=BF16, zero=OPTIMIZER_ON_HOST),
            ],
        ),
        (
            3,
            2,
            [
                Case(stage=1, accumulation=3, settings=BF16, zero=(("offload_optimizer", NVME),)),
                Case(tied_decoder, stage=3, accumulation=3, zero=BOTH_ON_NVME),
            ],
        ),
        (4, 3, [Case(stage=3, settings=BF16, zero=BOTH_ON_HOST), Case(accumulation=3, settings=NODES, zero=HPZ_QGZ)]),
    ],
)
def test_states_and_what_a_step_sends_are_those_of_a_real_run_to_the_byte(
    world_size: int, rank: int, cases: list[Case]
) -> None:
    check(cases, world_size, [rank])


def test_fits_says_whether_what_the_plan_needs_is_there() -> None:
    asked = {"batch": dry_models.tokens(), "world_size": 2, "ranks": [1]}
    case = Case(zero=BOTH_ON_HOST)
    needs = plan(case.model, case.config(), **asked).ranks[0].needs()
    sizes = {"device.memory": needs["device"], "node.host_memory": 2 * needs["pageable host"] - 1}
    machine = load_machine("dgx-2").with_values({key: f"{nbytes} B" for key, nbytes in sizes.items()})
    found = fits(case.model, case.config(), machine=machine, **asked)
    assert [(row.tier, row.fits) for row in found.rows] == [("device", True), ("host", False)] and not found
    assert "the device fits, 0 B free" in str(found)
    assert "host of a node does not fit, 1 B too many" in str(found)


def test_who_cannot_be_planned_is_told_the_line() -> None:
    with pytest.raises(PlanError, match=r"dry_models.py, line \d+: .* asks for one\. "):
        plan(dry_models.Branching, Case().config(), batch=torch.zeros(2, 4), world_size=2)
    with pytest.raises(PlanError, match="ranks: expected ranks from 0 to 1, got 2"):
        plan(decoder, Case().config(), batch=dry_models.tokens(), world_size=2, ranks=[2])
    without = {key: value for key, value in Case().config().items() if key != "optimizer"}
    with pytest.raises(PlanError, match='has to name an "optimizer"'):
        plan(decoder, without, batch=dry_models.tokens(), world_size=2)
    assert not torch.distributed.is_initialized()


def test_operations_and_the_least_time_of_each_resource() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False))

    config = {**Case(stage=1, accumulation=3, settings=NODES).config(), "gradient_accumulation_steps": 3}
    [rank] = plan(model, config, batch=torch.zeros(2, 8), loss=torch.sum, world_size=4, ranks=[1]).ranks
    first, second = 2 * 2 * 8 * 16, 2 * 2 * 16 * 4
    assert rank.flops == {"float32": 3 * (2 * first + 3 * second)}  # nobody asks for the gradient of the input
    values = {"device.fp32": "1 kFLOP/s", "network.per_node": "10 B/s", "node.devices": 2, "disk.read": "1 B/s"}
    rows = {row.resource: row for row in step_bounds(rank, load_machine("dgx-2").with_values(values), world_size=4)}
    assert rows["matrix products, float32"].seconds == rank.flops["float32"] / 1000
    assert rows["network between nodes"].seconds == rank.bytes_by_link()["between nodes"] / 10
    states = sum(row.nbytes for row in rank.held if row.kind in ("masters", "optimizer states"))
    assert rows["device memory, update"].amount == 2 * states
    assert "disk read" not in rows


@SOAK
@pytest.mark.parametrize("world_size", (2, 4))
def test_what_compression_and_nodes_send_is_what_a_real_run_sends(world_size: int) -> None:
    shared = (HPZ, QGZ, HPZ_QGZ, (("zero_quantized_weights", True),))
    cases = [
        Case(decoder, 3, accumulation, (*NODES, *dtype), zero)
        for zero in shared
        for accumulation in (1, 3)
        for dtype in ((), BF16)
    ]
    cases += [Case(decoder, stage, 1, NODES) for stage in range(4)]
    check(cases, world_size, range(world_size))


@SOAK
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("stage", range(4))
def test_states_and_sends_match_for_every_stage_accumulation_and_dtype(stage: int, world_size: int) -> None:
    dtypes = ((), BF16, (("fp16", {"enabled": True}),)) if stage else ((), (("bf16", {"enabled": False}),))
    zero = ((), (("stage3_prefetch_bucket_size", 500),), (("unit_max_numel", 3000),))
    cases = [
        Case(model, stage, accumulation, dtype, options)
        for model in (decoder, tied_decoder)
        for accumulation in (1, 3)
        for dtype in dtypes
        for options in zero
    ]
    check(cases, world_size, range(world_size))


@SOAK
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("model", (decoder, tied_decoder))
def test_states_sends_and_files_match_with_offload(model: object, world_size: int) -> None:
    tiers = [(stage, (("offload_optimizer", device),)) for stage in (1, 2, 3) for device in (HOST, NVME)]
    tiers += [(3, PARAMETERS_ON_HOST), (3, BOTH_ON_HOST), (3, BOTH_ON_NVME), (3, (("offload_param", NVME),))]
    cases = [
        Case(model, stage, accumulation, dtype, zero)
        for stage, zero in tiers
        for accumulation in (1, 3)
        for dtype in ((), BF16)
    ]
    check(cases, world_size, range(world_size))


@SOAK
@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (4, Case(frozen_decoder, 3, 3, (*FP16, *NODES), HPZ)),
        (4, Case(tied_decoder, 3, 3, (*BF16, *SUM, *NODES), MICS)),
        (4, Case(frozen_decoder, 3, 1, BF16, (*MICS, ("offload_optimizer", NVME)))),
        (3, Case(frozen_decoder, 2, 3, FP16, (("offload_optimizer", {**HOST, "ratio": 0.5}),))),
        (3, Case(decoder, 3, 1, BF16, MIXED)),
        (4, Case(decoder, 3, 3, (*NODES, *FP16), (*HPZ_QGZ, ("zero_quantized_weights", True), *OPTIMIZER_ON_HOST))),
        (2, Case(frozen_decoder, 0, 3, (*SUM, ("reduce_each_micro_batch", True)))),
        (4, Case(tied_decoder, 3, 3, (*BF16, ("optimizer", {"type": "Muon", "params": {"lr": 1e-3}})))),
        (4, Case(tied_decoder, 2, 1, (("deterministic", {"across_world_sizes": 4}),))),
    ],
)
def test_settings_that_are_rarely_together_are_planned_to_the_byte(world_size: int, case: Case) -> None:
    check([case], world_size, range(world_size))
