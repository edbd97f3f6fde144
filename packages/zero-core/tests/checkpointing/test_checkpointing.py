"""Segments run again in backward, and their inputs wait where the options say; the weights are those without."""

from __future__ import annotations

import contextvars
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_cases import RANKS, STAGES, WIDTH, Net, adamw, batch, build, config, distance, outcome, plain, weights
from torch import nn

import zero_core
from zero_comm import run_ranks
from zero_core import checkpointing
from zero_core.checkpointing.activation_stores import ContiguousStore, PartitionedStore, PlainStore
from zero_offload import offload_activations
from zero_settings import ActivationCheckpointing

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "partitioned": {"partition_activations": True},
    "contiguous": {"contiguous_checkpointing": True, "num_checkpoints": 3, "profile": True, "synchronize": True},
    "partitioned and contiguous": {
        "partition_activations": True,
        "contiguous_checkpointing": True,
        "num_checkpoints": 3,
    },
    "all on the host": {
        "partition_activations": True,
        "checkpoint_in_cpu": True,
        "contiguous_checkpointing": True,
        "num_checkpoints": 3,
    },
}


class Recomputed(Net):
    """Every block is a segment; the last one gets its weights as arguments."""

    reentrant = False

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.enter(x) + self.shift)
        for block in self.blocks:
            h = checkpointing.checkpoint(self._layer, block, h, use_reentrant=self.reentrant)
        last = self.blocks[-1]
        return self.head(checkpointing.checkpoint(self._functional, h, last.weight, last.bias))

    def _layer(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return h + torch.tanh(block(h)) / 8

    def _functional(self, h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return h + torch.tanh(F.linear(h, weight, bias)) / 8


class Stored(Recomputed):
    """The same without recomputation."""

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.enter(x) + self.shift)
        for block in [*self.blocks, self.blocks[-1]]:
            h = self._layer(block, h)
        return self.head(h)


def made(kind: type[Net]) -> Net:
    model = kind().double()
    model.load_state_dict(build().state_dict())
    return model


class WorldIsOneLayer:
    """An mpu whose model-parallel group is all ranks, which get the same samples in these tests."""

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD


def trained(stage: int, every: bool) -> dict[tuple[str, bool], Any]:
    """By option and kind: the weights after three steps; unless ``every``, of the option that does most alone."""
    found = {}
    for name, options in OPTIONS.items():
        if not every and name != "partitioned and contiguous":
            continue
        for reentrant in (False, True):
            model = made(Recomputed)
            model.reentrant = reentrant

            def steps(model: Net = model, options: dict[str, Any] = options) -> Any:
                checkpointing.configure(WorldIsOneLayer(), **options)
                engine = zero_core.initialize(model=model, config=config(stage))[0]
                for number in range(3):
                    engine.backward(engine(*batch(number, whole=True)))
                    engine.step()
                result = weights(engine)
                engine.destroy(unshard=False)
                return result

            found[name, reentrant] = contextvars.copy_context().run(steps)
    assert not checkpointing.is_configured()
    return found


@pytest.mark.parametrize(
    ("stage", "every"),
    [*((s, s == 3) for s in STAGES), *(pytest.param(s, True, marks=pytest.mark.soak) for s in STAGES if s < 3)],
)
def test_recomputation_changes_no_weight_wherever_inputs_wait(stage: int, every: bool) -> None:
    reference = made(Stored)
    plain(reference, adamw(reference), 0, 3)
    for found in run_ranks(trained, RANKS, stage, every):
        for case, result in found.items():
            assert distance(result, weights(reference)) <= 1e-12, case


class Watched(Recomputed):
    """Notes the memory of the inputs of segments."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[weakref.ref[torch.UntypedStorage]] = []

    def _layer(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        self.inputs.append(weakref.ref(h.untyped_storage()))
        return super()._layer(block, h)


def alive_after_forward(stage: int, folder: str) -> dict[str, tuple[int, int]]:
    """By option: how many inputs of segments that nothing else saves are in memory after forward, and the bytes that a
    tier holds for segments."""
    found = {}
    for name, options in OPTIONS.items():
        model = made(Watched)

        def steps(model: Watched = model, options: dict[str, Any] = options, on_tier: bool = "host" in name) -> Any:
            checkpointing.configure(WorldIsOneLayer(), **options)
            tier = offload_activations(
                lambda _: False, tier="nvme", path=f"{folder}/{dist.get_rank()}", device="cpu", min_bytes=1
            )
            if on_tier:  # the host is no other place than the CPU
                current: Any = checkpointing.api._current()
                current._offload = tier
            engine = zero_core.initialize(model=model, config=config(stage))[0]
            loss = engine(*batch(0, whole=True))
            counts = sum(storage() is not None for storage in model.inputs[1:]), tier.memory()["nvme"]
            engine.backward(loss)
            engine.destroy(unshard=False)
            tier.close()
            return counts

        found[name] = contextvars.copy_context().run(steps)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_inputs_wait_where_the_options_say_at_every_stage(stage: int, tmp_path: Path) -> None:
    for found in run_ranks(alive_after_forward, RANKS, stage, str(tmp_path)):
        alive = {name: count for name, (count, _) in found.items()}
        assert alive == {name: int(name == "plain") for name in OPTIONS}
        assert {name for name, (_, nbytes) in found.items() if nbytes} == {"all on the host"}


def kept() -> dict[str, Any]:
    """What the stores hold of an input, and what they make of it again."""
    x = torch.arange(15.0).view(3, 5)
    seen: dict[str, Any] = {}
    for name, inner in (("plain", PlainStore()), ("contiguous", ContiguousStore(2))):
        store = PartitionedStore(dist.group.WORLD, inner)
        part, restore = store.keep(x, 1)
        again = store.keep(x, 1)[0]
        seen[name] = part.tolist(), torch.equal(restore(part), x), part.untyped_storage().nbytes() // 4, again.sum()
    small = torch.tensor(3.0)
    assert store.keep(small, 1)[0].equal(small)
    return seen


def test_partitioned_inputs_are_held_in_parts() -> None:
    first, second = run_ranks(kept, RANKS)
    for name, numel in (("plain", 8), ("contiguous", 16)):
        assert first[name][:3] == ([0.0, 1, 2, 3, 4, 5, 6, 7], True, numel)
        assert second[name][:3] == ([8.0, 9, 10, 11, 12, 13, 14, 0], True, numel)


def test_contiguous_inputs_share_a_buffer_whose_places_are_used_again() -> None:
    store = ContiguousStore(2)
    first, second = (store.keep(torch.full((2, 3), float(n)), 1)[0] for n in (1, 2))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert (first == 1).all() and (second == 2).all() and first.shape == (2, 3)
    refusal = outcome(lambda: store.keep(torch.zeros(2, 3), 1))
    assert refusal.startswith("UsageError") and "shape (2, 3)" in refusal and "number_checkpoints" in refusal
    address = first.data_ptr()
    del first
    assert store.keep(torch.zeros(2, 3), 1)[0].data_ptr() == address


def test_what_waits_elsewhere_comes_back_through_hooks_inside_and_outside() -> None:
    """Any saved-tensor hooks can stand where host offload does on an accelerator, and where the caller has some."""
    moved: list[torch.Size] = []

    class Counting(torch.autograd.graph.save_on_cpu):
        def __init__(self) -> None:
            super().__init__()
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (moved.append(tensor.shape), pack(tensor))[1]

    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(torch.tanh(x @ weight).sum(), (x, weight))
    owner: Any = checkpointing.Checkpointing()
    owner._offload = Counting()
    loss = owner.checkpoint(lambda h, w: torch.tanh(h @ w).sum(), x, weight)
    assert moved == [(2, 4), (4, 4)]
    assert all(map(torch.equal, torch.autograd.grad(loss, (x, weight)), expected))
    with Counting():
        loss = owner.checkpoint(lambda h, w: torch.tanh(h @ w).sum(), x, weight)
    assert moved == [(2, 4), (4, 4)] * 2
    assert all(map(torch.equal, torch.autograd.grad(loss, (x, weight)), expected))


def test_inputs_that_offloading_outside_leaves_alone_wait_where_the_section_says(tmp_path: Path) -> None:
    section = ActivationCheckpointing(contiguous_memory_optimization=True, number_checkpoints=1)
    x = torch.randn(2, 4, requires_grad=True)
    for min_bytes in (1, 1 << 20):
        owner = checkpointing.Checkpointing(section)
        with offload_activations(nn.Identity(), tier="nvme", path=tmp_path, min_bytes=min_bytes, device="cpu") as tier:
            loss = owner.checkpoint(torch.tanh, x)
            refusal = outcome(lambda owner=owner: owner.checkpoint(torch.tanh, x))  # type: ignore[misc]
        assert (tier.memory()["nvme"] > 0, refusal.startswith("UsageError")) == (min_bytes == 1, min_bytes != 1)
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), x)[0], 1 - torch.tanh(x.detach()) ** 2)
        tier.close()


def test_the_engine_s_section_holds_inside_its_forward(alone: None, caplog: Any) -> None:
    section = {"contiguous_memory_optimization": True, "number_checkpoints": 1, "profile": True}
    engine = zero_core.initialize(model=made(Recomputed), config=config(0, activation_checkpointing=section))[0]
    refusal = outcome(lambda: engine(*batch(0)))
    assert f"1 segments with an input of shape (4, {WIDTH}) wait for backward already" in refusal
    section["number_checkpoints"] = 3
    engine = zero_core.initialize(model=made(Recomputed), config=config(0, activation_checkpointing=section))[0]
    with caplog.at_level(logging.INFO, "zero_core"):
        engine.backward(engine(*batch(0)))
        engine.step()
    (line,) = (r.getMessage() for r in caplog.records if "activation checkpointing:" in r.getMessage())
    assert "3 segments in" in line and "3 recomputed in" in line
    with torch.no_grad():
        for _ in range(4):  # nothing is kept without gradients
            engine(*batch(0))


def test_configure_reads_a_configuration_and_says_what_is_wrong(caplog: Any) -> None:
    def configured(*arguments: Any, **options: Any) -> str:
        return contextvars.copy_context().run(lambda: outcome(lambda: checkpointing.configure(*arguments, **options)))

    asked = {"activation_checkpointing": {"contiguous_memory_optimization": True}}
    assert "activation_checkpointing.number_checkpoints" in configured(None, asked)
    assert configured(None, asked, num_checkpoints=2) == "no error"
    assert "get_model_parallel_group" in configured(object())
    assert "partition_activationss" in configured(None, {"activation_checkpointing": {"partition_activationss": 1}})
    assert configured(partition_activations=True) == "no error"
    assert "no model-parallel group" in caplog.text


def test_the_names_that_frameworks_call_are_there() -> None:
    assert zero_core.checkpointing is checkpointing
    x = torch.ones(3, requires_grad=True)
    for call in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        (gradient,) = torch.autograd.grad(call(torch.sin, x).sum(), x)
        assert torch.equal(gradient, torch.cos(x))
    checkpointing.reset()
