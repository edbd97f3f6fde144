"""Gradients on their way from autograd into the units' buffers, and parameters that are read unannounced."""

from __future__ import annotations

import pytest
import torch
from memory_groups import MemoryRank, run_threads
from pass_parts import Parts

from zero_comm import CommError
from zero_partition import PartitionError, ReleasedParameterError
from zero_partition.live import UnitState


def taken(rank: MemoryRank) -> dict[str, object]:
    parts = Parts(rank)
    hooks = parts.hooks(1)
    parts.begin()
    parts.gatherer.gather(parts.units[1])
    first, second = parts.units[1].parameters
    (first.sum() * (1 + rank.rank)).backward()
    after_one = parts.units[1].state
    (second.sum() * (1 + rank.rank)).backward()
    seen = {
        "after one": after_one,
        "after both": parts.units[1].state,
        "none shown": first.grad is None and second.grad is None,
        "told": list(parts.backward_done),
    }
    parts.end()
    return {**seen, "averages": parts.averages(), "hooks": len(hooks)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gradient_is_taken_and_the_last_one_of_a_unit_releases_it(world_size: int) -> None:
    mean = (world_size + 1) / 2
    for seen in run_threads(taken, world_size):
        assert seen["after one"] is UnitState.GATHERED and seen["after both"] is UnitState.RELEASED
        assert seen["none shown"] and seen["told"] == [1] and seen["averages"] == [0.0, mean, 0.0]


def tenfold(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(10)


def left(rank: MemoryRank) -> list[object]:
    parts = Parts(rank)
    hooks = parts.hooks(0)
    parts.begin()
    parts.gatherer.gather(parts.units[0])
    first, second = parts.units[0].parameters
    behind = first.register_post_accumulate_grad_hook(tenfold)
    first.sum().backward()
    seen: list[object] = [None if first.grad is None else float(first.grad[0])]
    second.sum().backward()  # the hooks on the first one are over now
    seen += [first.grad is None, second.grad is None, parts.gradients[0].has_unreduced]
    parts.end()
    behind.remove()
    assert len(hooks) == 2
    return [*seen, float(parts.gradients[0].reduced[0])]


def test_a_gradient_on_which_the_users_hooks_run_is_taken_when_the_next_one_is_ready() -> None:
    assert run_threads(left, 1) == [[10.0, True, True, True, 10.0]]


def forgotten(rank: MemoryRank) -> tuple[bool, bool]:
    parts = Parts(rank)
    hooks = parts.hooks(0)
    parts.begin()
    parts.gatherer.gather(parts.units[0])
    first = parts.units[0].parameters[0]
    first.register_post_accumulate_grad_hook(lambda p: None)
    first.sum().backward()
    there = first.grad is not None
    parts.arrivals.forget_left()
    parts.arrivals.take_left()
    parts.end()
    assert len(hooks) == 2
    return there, first.grad is None and not parts.gradients[0].touched[0]


def test_what_a_failed_pass_has_left_is_dropped() -> None:
    assert run_threads(forgotten, 1) == [(True, True)]


def graphed(rank: MemoryRank) -> tuple[str, list[BaseException]]:
    parts = Parts(rank)
    hooks = parts.hooks(0)
    parts.begin()
    parts.gatherer.gather(parts.units[0])
    with pytest.raises(PartitionError, match=r"create_graph=True\) reached parameter 'u0\.a'") as caught:
        parts.units[0].parameters[0].square().sum().backward(create_graph=True)
    assert len(hooks) == 2
    with pytest.raises(CommError, match="failed earlier"):
        parts.liveness.check()
    return str(caught.value), parts.ended


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_is_refused_by_name_and_ends_the_engine() -> None:
    ((_, ended),) = run_threads(graphed, 1)
    assert len(ended) == 1


def read(rank: MemoryRank) -> list[object]:
    parts = Parts(rank)
    parameter = parts.units[2].parameters[0]
    parts.unannounced.parameter_read(parameter)
    seen: list[object] = [list(rank.gather.issued)]
    parts.gatherer.begin("forward")
    parts.unannounced.trains = True
    if rank.rank == 0:
        parts.unannounced.parameter_read(parameter)
        parts.unannounced.parameter_read(parameter)
        seen.append(torch.isnan(parameter.detach().as_subclass(torch.Tensor)).any().item())
    else:
        seen.append(False)
    parts.gatherer.end()
    return [*seen, list(rank.gather.issued), parts.reducer.pending()]


def test_reading_a_parameter_gathers_its_unit_inside_a_pass_alone_and_in_the_agreed_order() -> None:
    first, second = run_threads(read, 2)
    every = [f"gather u{index}" for index in range(3)]
    assert first == [[], False, every, [2]] and second == [[], False, every, []]


def refused(rank: MemoryRank) -> None:
    parts = Parts(rank)
    parameter = parts.units[1].parameters[1]
    with pytest.raises(ReleasedParameterError, match=r"parameter 'u1\.b' is released"):
        parts.unannounced.refuse_pickle([parameter])
    parts.gatherer.begin("forward")
    parts.unannounced.gather(parts.units[1])
    parts.unannounced.refuse_pickle([parameter])
    parts.gatherer.end()
    assert Parts(rank, releasable=False).unannounced.unit_of(parameter) is None
    parts.liveness.end(RuntimeError("gone"))
    with pytest.raises(CommError, match="gone"):
        parts.unannounced.gather(parts.units[1])


def test_a_pickle_of_a_released_parameter_is_refused_by_name_and_nothing_is_gathered_after_a_failure() -> None:
    run_threads(refused, 1)


@pytest.mark.parametrize(("bucket", "in_flight"), [(1, [0, 1]), (1000, [0, 0])])
def test_one_reduction_is_in_flight_whatever_its_size(bucket: int, in_flight: list[int]) -> None:
    def check(rank: MemoryRank) -> list[int]:
        parts = Parts(rank, bucket_numel=bucket)
        parts.begin()
        oldest = []
        for _ in range(2):
            parts.interleaving.start_next()
            assert parts.reductions.oldest is not None
            oldest.append(parts.reductions.oldest.number)
        parts.interleaving.finish_all()
        return oldest

    assert run_threads(check, 1) == [in_flight]
