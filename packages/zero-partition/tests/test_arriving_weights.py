"""Published weights are waited for at their first use, and nobody sees them before they are there."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import json
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from partition_models import groups
from torch import nn

from zero_comm import CommError, Group, PeerError, Tag, Work, run_ranks
from zero_partition import Partition, PartitionOptions, ShardedOptimizer, UnitLimits, full_parameter, partition
from zero_precision import PrecisionPolicy

LAYERS = 3


class Chain(nn.Module):
    """Layers that are a unit each; the last one's weight is used by the model itself too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.linear(x, self.layers[-1].weight).square().mean()


class HeldGroup:
    """The real group, whose other ranks take part in the all-gathers of weights only once rank 0 has allowed each."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.permits = dist.new_group()
        self._sent: list[Any] = []
        self._number = 0
        self.holds = False
        self._last: threading.Thread | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allow(self, number: int) -> None:
        """Let rank 1 take part in the held all-gather of this number, counted from 0."""
        for rank in range(1, self._group.world_size):
            permit = torch.ones(1)
            self._sent.append((permit, dist.isend(permit, rank, group=self.permits, tag=number)))

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Work:
        if tag.phase != "publish" or not self.holds:
            return self._group.all_gather(out, shard, tag)
        number, self._number = self._number, self._number + 1
        if self._group.rank == 0:
            return self._group.all_gather(out, shard, tag)
        held = _HeldWork(self, number, out, shard, tag, self._last)
        self._last = held.thread
        held.thread.start()
        return held  # type: ignore[return-value]


class _HeldWork:
    """Starts the real all-gather in a thread, when rank 0 allows it and the one before has started."""

    def __init__(self, held: HeldGroup, number: int, out: Any, shard: Any, tag: Tag, before: Any) -> None:
        def run() -> None:
            if before is not None:
                before.join()
            try:
                dist.recv(torch.zeros(1), 0, group=held.permits, tag=number)
            except (RuntimeError, ValueError):  # the groups are gone, as rank 0 never allows it
                return
            self._work = held._group.all_gather(out, shard, tag)

        self.thread = threading.Thread(target=run, daemon=True)

    def wait(self, patience: Any = None) -> None:
        self.thread.join(None if patience is None else patience.total_seconds())
        if self.thread.is_alive():
            raise PeerError("rank 0 has not allowed this all-gather")
        self._work.wait(patience)


def chain(stage: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Chain, Partition, ShardedOptimizer, HeldGroup]:
    model, opened = Chain(), groups()
    held = HeldGroup(opened.gather) if dist.is_initialized() else opened.gather
    options = PartitionOptions(
        stage=stage,
        policy=PrecisionPolicy.full(dtype),
        limits=UnitLimits(min_numel=1, max_numel=1),
        alignment=4,
    )
    parts = partition(model, dataclasses.replace(opened, gather=held), options)
    return model, parts, ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), parts), held  # type: ignore[return-value]


def batch(step: int) -> torch.Tensor:
    return torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def is_open(parts: Partition) -> list[bool]:
    return [unit.arrival.is_open for unit in parts.units]


def plain(steps: int) -> Chain:
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
    return model


def values(model: nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in model.parameters()]


def one_by_one(stage: int) -> Any:
    """On rank 0: which units' weights were still arriving after the step, and after each layer's forward."""
    model, parts, optimizer, held = chain(stage)
    model(batch(0)).backward()
    held.holds = True
    optimizer.step()
    seen = [is_open(parts)]
    x = batch(1)
    for number, layer in enumerate(model.layers):
        if dist.get_rank() == 0:
            held.allow(number)
        x = torch.tanh(layer(x))
        if dist.get_rank() == 0:
            seen.append(is_open(parts))
    held.holds = False
    found = values(model)
    parts.close()
    return seen, found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_returns_before_the_weights_are_there_and_each_unit_waits_for_its_own(stage: int) -> None:
    seen = [[n < done for n in range(LAYERS)] for done in range(LAYERS + 1)]
    expected = [[not there for there in one] for one in seen]
    answers = run_ranks(one_by_one, 2, stage, timeout=60)
    assert answers[0][0] == expected
    assert all(found == values(plain(1)) for _, found in answers)


def _into_buffer(model: Chain) -> Any:
    buffer = io.BytesIO()
    torch.save(model.layers[1].weight, buffer)
    gc.collect()  # torch 2.8's pickler holds the memory in a cycle, and the next step would wait for it itself
    buffer.seek(0)
    return torch.load(buffer, weights_only=False).detach()


def _changed(change: Callable[[nn.Parameter], object]) -> Callable[[Chain], Any]:
    def use(model: Chain) -> Any:
        with torch.no_grad():
            change(model.layers[1].weight)
        return model.layers[1].weight.detach().clone()

    return use


def _set_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter * 2


def _write_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(2)


def _average(parameter: nn.Parameter) -> None:
    average = torch.zeros_like(parameter)
    average.lerp_(parameter, 0.5)
    parameter.copy_(average)


def _load(model: Chain) -> Any:
    model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})
    return model.layers[1].weight.detach().clone()


def _fast_path(model: Chain) -> Any:
    with torch.no_grad():
        return model(batch(7))


READS: dict[str, Callable[[Chain], Any]] = {
    "data": lambda model: model.layers[1].weight.data.clone(),
    "sum": lambda model: model.layers[1].weight.sum().detach(),
    "detach": lambda model: model.layers[1].weight.detach().clone(),
    "list": lambda model: torch.tensor(model.layers[1].weight.tolist()),
    "array": lambda model: torch.from_numpy(model.layers[1].weight.detach().numpy().copy()),
    "data pointer": lambda model: torch.tensor(model.layers[1].weight.data_ptr() > 0),
    "item": lambda model: torch.tensor(model.layers[1].weight[1, 2].item()),
    "iteration": lambda model: torch.stack([row.detach() for row in model.layers[1].weight]),
    "state dict": lambda model: model.state_dict()["layers.1.weight"].clone(),
    "state dict of parameters": lambda model: model.state_dict(keep_vars=True)["layers.1.weight"].detach().clone(),
    "save": _into_buffer,
    "deepcopy of a parameter": lambda model: copy.deepcopy(model.layers[1].weight).detach(),
    "deepcopy of a module": lambda model: copy.deepcopy(model.layers[1])(batch(7)).detach(),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).detach(),
    "foreach": lambda model: torch.stack([n.detach() for n in torch._foreach_norm(list(model.parameters()))]),
    "copy of a parameter": lambda model: nn.Parameter(model.layers[1].weight).detach().clone(),
    "functional": lambda model: F.linear(batch(7), model.layers[1].weight).detach(),
    "functional_call": lambda model: torch.func.functional_call(
        model, dict(model.named_parameters()), (batch(7),)
    ).detach(),
    "layer": lambda model: model.layers[1](batch(7)).detach(),
    "forward of a layer": lambda model: model.layers[1].forward(batch(7)).detach(),
    "model": lambda model: model(batch(7)).detach(),
    "evaluation": _fast_path,
    "class of a parameter": lambda model: type(model.layers[1].weight)(model.layers[1].bias.data).sum().detach(),
    "forked process": lambda model: _in_fork(lambda: model.layers[1].weight.detach()),
    "thread": lambda model: _in_thread(lambda: model.layers[1].weight.detach().clone()),
}
WRITES: dict[str, Callable[[Chain], Any]] = {
    "in place": _changed(lambda parameter: parameter.mul_(2)),
    "data set": _changed(_set_data),
    "written through data": _changed(_write_data),
    "average": _changed(_average),
    "element": _changed(lambda parameter: parameter[0].fill_(3.0)),
    "initialised": _changed(lambda parameter: nn.init.constant_(parameter, 0.25)),
    "load_state_dict": _load,
}


def _in_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def _in_fork(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What ``call`` returns in a process that is forked now; ten zeros where it says nothing."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(there, json.dumps(call().tolist()).encode())
        os._exit(0)
    said = os.read(here, 10_000) if select.select([here], [], [], 20)[0] else b"[0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(here)
    os.close(there)
    return torch.tensor(json.loads(said), dtype=torch.float64)


def uses(names: list[str]) -> Any:
    """What each use finds right after a step whose all-gathers are held until it begins."""
    model, parts, optimizer, held = chain()
    reference = plain_uses(names)
    found, late = [], []
    for step, name in enumerate(names):
        model(batch(step)).backward()
        if dist.is_initialized():
            held.holds = True
        optimizer.step()
        if dist.is_initialized():
            late.append(all(is_open(parts)))
            if dist.get_rank() == 0:
                for number in range(LAYERS):
                    held.allow(step * LAYERS + number)
        found.append({**READS, **WRITES}[name](model).tolist())
    found.append(values(model))
    parts.close()
    return found == reference, late


def plain_uses(names: list[str]) -> list[Any]:
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step, name in enumerate(names):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
        found.append({**READS, **WRITES}[name](model).tolist())
    found.append(values(model))
    return found


def together(ranks: int, names: list[str]) -> list[Any]:
    return [uses(names)] if ranks == 1 else run_ranks(uses, ranks, names, timeout=60)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_read_after_a_step_finds_the_new_weights(ranks: int) -> None:
    for equal, late in together(ranks, list(READS)):
        assert equal
        assert all(late)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_write_after_a_step_finds_the_new_weights_and_counts(ranks: int) -> None:
    for equal, _ in together(ranks, list(WRITES)):
        assert equal


def with_alias(how: str) -> Any:
    """Whether the step waited for the unit of which an alias is held, for others, and what the alias reads."""
    model, parts, optimizer, held = chain()
    weight = model.layers[1].weight
    if how == "graph":
        alias: Any = weight.view(-1)
    elif how == "array":
        alias = weight.detach().numpy()
    elif how == "storage":
        alias = weight.untyped_storage()
    elif how == "data":
        alias = weight.data
    else:
        alias = weight.detach()
    model(batch(0)).backward()
    held.holds = True
    if dist.get_rank() == 0:
        held.allow(0)
        held.allow(1)
    optimizer.step()
    seen = is_open(parts)
    if dist.get_rank() == 0:
        held.allow(2)
    if how == "storage":
        read = torch.empty(0, dtype=weight.dtype).set_(alias).tolist()[: weight.numel()]
    elif how == "array":
        read = alias.flatten().tolist()
    else:
        read = alias.detach().flatten().tolist()
    parts.close()
    return seen, read


@pytest.mark.parametrize("how", ["detached", "graph", "array", "storage", "data"])
def test_a_step_waits_itself_for_a_unit_of_which_somebody_holds_an_alias(how: str) -> None:
    expected = plain(1).layers[1].weight.detach().flatten().tolist()
    for seen, read in run_ranks(with_alias, 2, how, timeout=60):
        assert seen == [True, False, True]
        assert read == expected


def read_unasked() -> Any:
    """What C++ code that does not ask the parameter's class reads before the weights are there, and after."""
    model, parts, optimizer, held = chain()
    double = torch.func.grad(lambda weight: weight.square().sum())
    model(batch(0)).backward()
    held.holds = True
    optimizer.step()
    early = double(model.layers[1].weight) if dist.get_rank() == 0 else torch.tensor(torch.nan)
    if dist.get_rank() == 0:
        for number in range(LAYERS):
            held.allow(number)
    model.layers[1].weight.sum()
    late = double(model.layers[1].weight)
    found = bool(early.isnan().all()), late.tolist()
    parts.close()
    return found


def test_code_that_does_not_ask_reads_nan_and_never_half_a_step() -> None:
    expected = (2 * plain(1).layers[1].weight.detach()).tolist()
    assert run_ranks(read_unasked, 2, timeout=60) == [(True, expected)] * 2


def accesses() -> Any:
    """What the engine's own calls give right after steps, on three ranks."""
    model, parts, optimizer, _ = chain(1)
    seen = []
    for step in range(3):
        model(batch(step)).backward()
        optimizer.step()
        seen.append(all(is_open(parts)))
        if step == 0:
            seen.append(full_parameter(parts, model.layers[2].weight).flatten().tolist())
        if step == 1:
            parts.units[1].hide()
            seen.append(bool(model.layers[1].weight.isnan().all()))
            parts.units[1].show()
    parts.close()
    return [*seen, values(model)]


def test_full_values_hiding_and_closing_wait_for_weights() -> None:
    first, last = (run_ranks(trains, 3, 0, steps, timeout=60)[0] for steps in (1, 3))
    for answer in run_ranks(accesses, 3, timeout=60):
        assert answer == [True, first[4], True, True, True, last]


def trains(stage: int, steps: int) -> Any:
    model, parts, optimizer, _ = chain(stage)
    for step in range(steps):
        model(batch(step)).backward()
        optimizer.step()
    found = values(model)
    parts.close()
    return found


def test_training_is_that_of_plain_torch_and_of_stage_0() -> None:
    for stage in (1, 2):
        assert run_ranks(trains, 2, stage, 6, timeout=60) == [values(plain(6))] * 2
        assert run_ranks(trains, 3, stage, 6, timeout=60) == run_ranks(trains, 3, 0, 6, timeout=60)


def scripted() -> Any:
    model = Chain()
    model.layers[1] = torch.jit.script(model.layers[1])
    parts = partition(
        model,
        groups(),
        PartitionOptions(
            stage=2,
            policy=PrecisionPolicy.full(torch.float64),
            limits=UnitLimits(min_numel=1, max_numel=1),
            alignment=4,
        ),
    )
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), parts)
    model(batch(0)).backward()
    optimizer.step()
    names = [unit.name for unit in parts.units if not unit.arrival.is_open]
    found = values(model)
    parts.close()
    return [name.split()[0] for name in names], found


def test_a_step_waits_itself_for_parameters_of_scripted_modules() -> None:
    for names, found in run_ranks(scripted, 2, timeout=60):
        assert names == ["layers.1"]
        assert found == values(plain(1))


def compiled() -> Any:
    model, parts, optimizer, _ = chain()
    fast = torch.compile(model, backend="eager")
    late = []
    for step in range(4):
        (model if step == 0 else fast)(batch(step)).backward()
        optimizer.step()
        late.append(any(is_open(parts)))
    found = values(model)
    parts.close()
    return late, found


def test_steps_wait_themselves_once_the_model_is_compiled() -> None:
    for late, found in run_ranks(compiled, 2, timeout=60):
        assert late == [True, False, False, False]
        torch.testing.assert_close(found, values(plain(4)), rtol=0, atol=1e-12)


def losing(lost: str) -> Any:
    """Rank 0's error where rank 1 never sends the weights, at ``lost``."""
    model, parts, optimizer, held = chain()
    model(batch(0)).backward()
    held.holds = True
    optimizer.step()
    if dist.get_rank() == 1:
        parts.runtime.abort(RuntimeError("rank 1 has had enough"))
        return "", ""
    said = []
    for _ in range(2):
        with pytest.raises(CommError) as raised:
            model.layers[1].weight.sum() if lost == "read" else model(batch(1))
        said.append(str(raised.value))
    assert parts.runtime.failed
    parts.close()
    return said


@pytest.mark.parametrize("lost", ["read", "forward"])
def test_weights_that_never_arrive_are_an_error_by_name_at_every_use(lost: str) -> None:
    first, second = run_ranks(losing, 2, lost, timeout=60)[0]
    assert first == second
    assert "publish" in first or "enough" in first
