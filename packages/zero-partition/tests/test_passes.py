"""The order of events of a forward and a backward pass, on ranks that are threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_groups import MemoryRank, run_threads
from torch import nn

from zero_partition import PartitionError
from zero_partition.arriving_weights import WeightArrivals
from zero_partition.layout import UnitLayout
from zero_partition.live import UnitState
from zero_partition.route import Route
from zero_partition.runtime import Runtime
from zero_partition.unit import Unit
from zero_partition.units import UnitPlan

LAYERS, WIDTH = 3, 4


def build() -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).view_as(parameter) + number)
    return model


def batch(rank: int) -> torch.Tensor:
    return torch.linspace(0, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH) + rank


class Made:
    """A model of one unit per layer, and what runs it."""

    def __init__(self, rank: MemoryRank) -> None:
        self.rank = rank
        self.model = build()
        units = [self._unit(index, layer) for index, layer in enumerate(self.model)]
        for name in ("record_call", "record_forward", "record_failed_call"):
            setattr(rank.control, name, lambda *_: None)
        groups: Any = SimpleNamespace(
            control=rank.control,
            broadcast=rank.broadcast,
            abort=lambda *_args, **_more: None,
            can_reopen=False,
        )
        self.runtime = Runtime(
            self.model,
            units,
            [rank.gradients(unit) for unit in units],
            groups,
            rank.residency,
            rank.live,
            WeightArrivals(),
            device=torch.device("cpu"),
            prefetch_numel=0,
            max_live_numel=1000,
            bucket_numel=1000,
        )

    def _unit(self, index: int, layer: nn.Module) -> Unit:
        parameters = {f"{index}.{key}": p for key, p in layer.named_parameters()}
        plan = UnitPlan(str(index), torch.float64, True, False, parameters, {str(index): layer})
        layout = UnitLayout.from_shapes(
            plan.name, {n: p.shape for n, p in parameters.items()}, self.rank.gather.world_size
        )
        route = Route(self.rank.gather)  # type: ignore[arg-type]
        residency, device = self.rank.residency, torch.device("cpu")
        unit = Unit(index, plan, layout, route, residency, device=device, releasable=True, live=self.rank.live)
        source = torch.zeros(layout.numel, dtype=torch.float64)
        for entry, parameter in zip(layout.entries, parameters.values(), strict=True):
            source[entry.offset : entry.end] = parameter.detach().flatten()
        unit.init_from_full(source, torch.float64, full_master=False)
        return unit

    def released(self) -> bool:
        return all(unit.state is UnitState.RELEASED for unit in self.runtime.units)


def passes(rank: MemoryRank) -> dict[str, Any]:
    made = Made(rank)
    loss = made.model(batch(rank.rank)).sum()
    released = [made.released()]
    forward = list(rank.gather.issued)
    loss.backward()
    released.append(made.released())
    kinds = [message.kind for message in rank.control.sent]
    averages = torch.cat([g.reduced for g in made.runtime.gradients.values() if g.reduced is not None])
    made.runtime.close()
    return {
        "forward": forward,
        "backward": rank.gather.issued[len(forward) :],
        "reduced": rank.reduce.issued,
        "kinds": list(dict.fromkeys(kinds)),
        "released": released,
        "averages": averages,
    }


def test_units_come_in_order_go_and_come_back_in_reverse_while_their_gradients_are_averaged() -> None:
    results = run_threads(passes, 2)
    model = build()
    for rank in range(2):
        (model(batch(rank)).sum() / 2).backward()
    for rank, result in enumerate(results):
        assert result["forward"] == ["gather 0", "gather 1", "gather 2"]
        assert result["backward"] == ["gather 1", "gather 0"]  # unit 2 has stayed since forward
        assert result["reduced"] == ["reduce 2", "reduce 1", "reduce 0"]
        assert result["kinds"] == ["forward", "end", "backward", "learning"]
        assert result["released"] == [True, True]
        shards = [torch.cat([p.grad.flatten() for p in layer.parameters()]).chunk(2)[rank] for layer in model]
        assert torch.allclose(result["averages"], torch.cat(shards), rtol=1e-12, atol=1e-12)


def test_refusals_inside_passes_leave_them_as_they_were() -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank)
        runtime = made.runtime
        with runtime.synced(), pytest.raises(PartitionError, match="inside synced"):
            runtime.begin_backward()
        loss = made.model(batch(0)).sum()
        runtime.begin_backward()
        with pytest.raises(PartitionError, match="zero_grad was called inside a backward pass"):
            runtime.held_gradients.discard()
        with pytest.raises(PartitionError, match="switched off inside a forward or backward pass"):
            runtime.pause()
        torch.autograd.backward(loss)
        runtime.end_backward()
        assert made.released()
        runtime.close()

    run_threads(check, 1)


def test_a_failed_forward_ends_the_pass_and_the_next_one_finds_everything_as_before() -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank)
        expected = made.model(batch(0)).detach()
        with pytest.raises(RuntimeError):
            made.model(torch.zeros(2, WIDTH + 1, dtype=torch.float64))
        assert made.released() and not made.runtime.gathers.active
        assert torch.equal(made.model(batch(0)).detach(), expected)
        made.runtime.close()

    run_threads(check, 1)


class NoReduction:
    """A loop that accumulates."""

    def reduces_now(self) -> bool:
        return False

    def refuse_plain_backward(self) -> str | None:
        return None

    def refuse_written_gradients(self) -> str | None:
        return None


def test_the_loop_that_is_followed_decides_whether_a_pass_reduces() -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank)
        made.runtime.loop.follow(NoReduction())
        made.model(batch(0)).sum().backward()
        assert not rank.reduce.issued and all(g.has_unreduced for g in made.runtime.gradients.values())
        made.runtime.held_gradients.flush()
        assert len(rank.reduce.issued) == LAYERS
        made.runtime.close()

    run_threads(check, 1)
