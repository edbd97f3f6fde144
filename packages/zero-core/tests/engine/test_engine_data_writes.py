"""In-place writes through ``p.data``, which leave no trace in torch, count whenever they begin, or are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import user_edit_cases as cases
from torch import nn

import zero_core
from zero_comm import run_ranks
from zero_partition import PartitionError

SOAK = pytest.mark.soak
STEPS = 7
WRITES = (3, 4, 6)  # nothing is written in the first passes and steps
TOLERANCE = {"float64": 1e-12, "bfloat16": 2e-6}
Run = tuple[int, str, str]
"""Stage, dtype, and tier or "persistent": stage 3 with units that are never released."""


class Late(cases.Net):
    """A network whose forward writes a weight and a codebook through ``.data`` in the passes of `WRITES`."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.passes in WRITES:
            self.first.weight.data.clamp_(-0.2, 0.2)
            self.codes.data[1].fill_(0.5)
        self.passes += 1
        return super().forward(x, tokens)


def write(t: cases.Trainer, step: int, held: dict[str, torch.Tensor]) -> None:
    """What a script writes after step ``step``: through an alias, a view of one, several at once, and a kept one."""
    if step == 1:
        held["bias"] = t.model.second.bias.data
    if step in WRITES:
        t.model.second.weight.data.clamp_(-0.1, 0.1)
        t.model.frozen.weight.data.view(-1)[:3].mul_(0.5)
        torch._foreach_mul_([p.data for p in t.model.router.parameters()], 0.9)
        held["bias"].add_(0.25)


def deviation(run: Run, folder: str) -> float:
    """The largest difference from one process after `STEPS` steps."""
    stage, name, tier = run
    dtype, persistent = getattr(torch, name), tier == "persistent"
    between = stage < 3 or persistent
    plain = cases.Plain(Late(), dtype)
    where = "none" if persistent else tier
    ours = cases.Sharded(Late(), dtype, stage, where, folder, persistent=persistent)
    found = []
    for t in (plain, ours):
        held: dict[str, torch.Tensor] = {}
        for step in range(STEPS):
            t.step(step)
            if between:
                write(t, step, held)
        found.append(t.weights())
    ours.engine.destroy()
    return max(float((found[1][n] - v).abs().nan_to_num(nan=1e9).max()) for n, v in found[0].items())


def deviations(runs: Sequence[Run], folder: str) -> dict[Run, float]:
    return {run: deviation(run, folder) for run in runs}


EVERY = [
    *product((0,), TOLERANCE, ("none",)),
    *product((1, 2, 3), TOLERANCE, ("none", "cpu", "nvme")),
    *product((3,), TOLERANCE, ("persistent",)),
]
REPRESENTATIVES: dict[int, list[Run]] = {
    1: [(0, "bfloat16", "none"), (2, "float64", "cpu"), (3, "bfloat16", "none")],
    2: [(0, "float64", "none"), (1, "bfloat16", "none"), (3, "bfloat16", "persistent"), (3, "float64", "none")],
    3: [(1, "bfloat16", "cpu"), (2, "bfloat16", "nvme"), (3, "bfloat16", "nvme")],
}


@pytest.mark.parametrize(
    ("world_size", "runs"),
    [*REPRESENTATIVES.items(), *(pytest.param(n, EVERY, marks=SOAK) for n in (1, 2, 3))],
)
def test_writes_through_data_count_whenever_they_begin(world_size: int, runs: list[Run], tmp_path: Path) -> None:
    for found in run_ranks(deviations, world_size, runs, str(tmp_path), timeout=300):
        wrong = {run: apart for run, apart in found.items() if not apart <= TOLERANCE[run[1]]}
        assert not wrong, wrong


def on_one_rank(runs: Sequence[Run]) -> dict[Run, tuple[str, bool]]:
    """What a step says after rank 1 alone has written through ``.data``, and whether weights stayed."""
    found = {}
    for run in runs:
        stage, name, tier = run
        between = stage < 3 or tier == "persistent"
        model = cases.Net() if between else Late()
        t = cases.Sharded(model, getattr(torch, name), stage, "none", "", persistent=tier == "persistent")
        t.step(0)
        t.step(1)
        before = t.weights()
        if between and dist.get_rank() == 1:
            t.model.second.weight.data.mul_(0.5)
        elif not between:
            t.model.passes = 3 if dist.get_rank() == 1 else 100
        try:
            t.step(2)
            found[run] = "nothing", False
        except PartitionError as refusal:
            after = t.weights() if between else before
            same = all(torch.equal(after[n], v) for n, v in before.items() if n != "second.weight")
            found[run] = str(refusal), same
        t.engine.destroy(unshard=False)
    return found


ALONE = [*product((0, 1, 2, 3), TOLERANCE, ("none",)), *product((3,), TOLERANCE, ("persistent",))]
ALONE_HERE: list[Run] = [
    (0, "float64", "none"),
    (1, "bfloat16", "none"),
    (2, "float64", "none"),
    (3, "float64", "none"),
]
ALONE_HERE += [(3, "bfloat16", "persistent")]


@pytest.mark.parametrize(
    ("world_size", "runs"), [(2, ALONE_HERE), *(pytest.param(n, ALONE, marks=SOAK) for n in (2, 3))]
)
def test_a_write_through_data_on_one_rank_is_refused_on_every_rank(world_size: int, runs: list[Run]) -> None:
    for found in run_ranks(on_one_rank, world_size, runs, timeout=120):
        for run, (text, same) in found.items():
            assert "parameter '" in text and "only rank 1 wrote it" in text and same, (run, text)


def looks(stage: int) -> dict[str, bool]:
    """What code sees that looks closely at an engine's parameters."""
    t = cases.Sharded(cases.Net(), torch.float64, stage, "none", "")
    t.step(0)
    facts: dict[str, bool] = {}
    with t.gathered(list(t.model.parameters())):
        p = t.model.first.weight
        stream, again = io.BytesIO(), nn.Parameter(p)
        torch.save(p, stream)
        stream.seek(0)
        facts["wrapped"] = isinstance(again, nn.Parameter) and torch.equal(again.data, p.data) and again.is_leaf
        facts["copied"] = type(copy.deepcopy(p)) is nn.Parameter and type(copy.copy(p)) is nn.Parameter
        facts["pickled"] = torch.equal(torch.load(stream, weights_only=True), p)
        facts["plain data"] = type(p.data) is torch.Tensor and not p.data.requires_grad
        facts["plain detached"] = type(p.detach()) is torch.Tensor
        facts["same memory"] = p.data.data_ptr() == p.data_ptr()
        facts["named"] = repr(p).startswith("Parameter containing") and type(p).__name__ == "Parameter"
    t.engine.destroy()
    facts["own class again"] = all(type(p) is nn.Parameter for p in t.model.parameters())
    return facts


@pytest.mark.parametrize("stage", (0, 3))
def test_parameters_of_an_engine_look_like_parameters(stage: int) -> None:
    for facts in run_ranks(looks, 2, stage):
        assert all(facts.values()), facts


class Clamping(nn.Module):
    """A layer that clamps its weight through ``.data`` while it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.clamp_(-0.2, 0.2)
        return torch.tanh(self.linear(x))


def compiled(stage: int) -> float:
    """How far weights are off that compiled regions write through ``.data``."""
    plain, ours = Clamping(), Clamping()
    engine = zero_core.initialize(model=ours, config=cases.config(torch.float64, stage, "none", ""))[0]
    engine.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=cases.LR, weight_decay=0.01)
    for step in range(3):
        x = cases.given(torch.Size([3, 4]), torch.float64, step)
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()
    with engine.gathered(list(ours.parameters())):
        return max(float((p - q).abs().max()) for p, q in zip(plain.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize(
    ("world_size", "stage"), [(1, 0), *(pytest.param(n, s, marks=SOAK) for n in (1, 2) for s in (0, 1, 2, 3))]
)
def test_compiled_regions_write_through_data(world_size: int, stage: int) -> None:
    assert max(run_ranks(compiled, world_size, stage, timeout=120)) <= 1e-12
