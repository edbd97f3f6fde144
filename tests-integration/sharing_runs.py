"""Engines whose ranks share weights and gradients in groups: secondary shards, copies of the model, codecs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import training
import zoo
from training import Run

import zero_core
from zero_deepspeed.fragments import safe_get_local_fp32_param, safe_set_local_fp32_param

NODES = {"comm": {"ranks_per_node": 2}}


def batch(step: int, micro: int, rank: int = 0, world_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of twelve: world sizes 1, 2, 3, 4 and 6 divide them."""
    halves = [zoo.batch(step, 2 * micro + half) for half in (0, 1)]
    x, y = (torch.cat(parts) for parts in zip(*halves, strict=True))
    rows = slice(rank * len(x) // world_size, (rank + 1) * len(x) // world_size)
    return x[rows], y[rows]


def plain(run: Run) -> dict[str, torch.Tensor]:
    """One process, torch.optim, the whole batch."""
    model = zoo.build(run.variant, training.DTYPES[run.dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)
    for step in range(run.steps):
        for micro in range(run.accumulation):
            sum(model(*batch(step, micro))).div(run.accumulation).backward()  # type: ignore[union-attr]
        if run.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def start(run: Run, stage: int = 3, *, seed: int = 0, comm: dict[str, Any] | None = None, **zero: Any) -> Any:
    """An engine on two nodes' ranks; ``zero``: keys of zero_optimization."""
    dtype = training.DTYPES["fp32" if run.dtype == "bf16" else run.dtype]
    config = training.config(run, stage, dist.get_world_size(), **zero)
    config["comm"] = {**NODES["comm"], **(comm or {})}
    return zero_core.initialize(model=zoo.build(run.variant, dtype, seed), config=config)[0]


def step(engine: Any, run: Run, number: int) -> None:
    """One optimizer step."""
    for micro in range(run.accumulation):
        engine.backward(sum(engine(*batch(number, micro, dist.get_rank(), dist.get_world_size()))))
        engine.step()


def evaluate(engine: Any) -> float:
    """A loss without gradients; leaves every unit's secondary shards fresh."""
    with torch.no_grad():
        return float(sum(engine(*batch(99, 0))))


def trained(run: Run, stage: int, ways: list[dict[str, Any]]) -> list[dict[str, bytes]]:
    """Train once in each of the ``ways`` (keys of zero_optimization); the weights' bits."""
    found = []
    for way in ways:
        engine = start(run, stage, **way)
        for number in range(run.steps):
            step(engine, run, number)
        found.append(training.bits(training.weights(engine)))
        engine.destroy()
    return found


def across(run: Run, ways: list[dict[str, Any]]) -> list[dict[str, int]]:
    """For each of the ``ways``, bytes that left the node in one learned step: in forward, in backward by phase."""
    found = []
    for way in ways:
        engine = start(run, **way)
        for number in range(2):
            step(engine, run, number)
        engine.ledger.reset()
        loss = sum(engine(*batch(2, 0, dist.get_rank(), dist.get_world_size())))
        forward = engine.ledger.across_bytes("gather")
        engine.backward(loss)
        backward = engine.ledger.across_bytes("gather") - forward
        engine.step()
        found.append({"forward": forward, "backward": backward, "reduce": engine.ledger.across_bytes("reduce")})
        engine.destroy()
    return found


def changed(folder: str, way: dict[str, Any]) -> list[float]:
    """Losses after each way in which weights change while secondary shards are there."""
    run = Run("frozen", steps=2, dtype="fp32")
    engine = start(run, **way)
    other = start(run, seed=5)
    other.save_checkpoint(folder)
    weight = engine.module.blocks[0].up.weight
    losses = [evaluate(engine)]
    step(engine, run, 0)
    losses.append(evaluate(engine))
    with engine.gathered([weight], modifier_rank=1):
        if dist.get_rank() == 1:
            weight.data.mul_(2)
    losses.append(evaluate(engine))
    engine.set_full_param(weight, torch.full(weight.shape, 0.25))
    losses.append(evaluate(engine))
    with engine.gathered(list(engine.module.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            engine.module.load_state_dict(zoo.build("frozen", torch.float32, 7).state_dict())
    losses.append(evaluate(engine))
    if dist.get_rank() == 1:  # what one rank writes alone, all have to learn
        safe_set_local_fp32_param(weight, 3 * safe_get_local_fp32_param(weight))
    losses.append(evaluate(engine))
    engine.offload_states()
    engine.reload_states()
    losses.append(evaluate(engine))
    engine.load_checkpoint(folder)
    losses.append(evaluate(engine))
    assert losses[-1] == evaluate(other)
    step(engine, run, 1)
    losses.append(evaluate(engine))
    other.destroy()
    engine.destroy()
    return losses


def memory(way: dict[str, Any]) -> tuple[dict[str, int], int]:
    """The memory report after a step, and the bytes of all flat buffers."""
    run = Run(dtype="fp32")
    engine = start(run, **way)
    step(engine, run, 0)
    report = engine.memory_report()
    assert report["secondary shards"] == engine.partition.memory()["secondary shards"]
    total = engine.partition.layout.numel * 4
    engine.destroy()
    return report, total


Bits = dict[str, bytes]


def save(run: Run, folder: str, half: int, way: dict[str, Any]) -> tuple[Bits, Bits, list[str]]:
    """Train to ``half``, save, train to the end; the weights' bits at both, and the files written."""
    engine = start(run, **way)
    for number in range(half):
        step(engine, run, number)
    engine.save_checkpoint(folder)
    files = sorted(p.name for p in Path(folder, f"global_step{half}").rglob("*.safetensors"))
    return *_rest(engine, run, half), files


def resume(run: Run, folder: str, half: int, way: dict[str, Any]) -> tuple[Bits, Bits]:
    """Load into another model that has trained and evaluated, train to the end; the weights' bits at both."""
    engine = start(run, seed=9, **way)
    step(engine, run, 20)
    evaluate(engine)
    engine.load_checkpoint(folder)
    return _rest(engine, run, half)


def _rest(engine: Any, run: Run, half: int) -> tuple[Bits, Bits]:
    loaded = training.bits(training.weights(engine))
    for number in range(half, run.steps):
        step(engine, run, number)
    end = training.bits(training.weights(engine))
    engine.destroy()
    return loaded, end


def weights(run: Run, stage: int, way: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train; rank 0's whole weights, and on every rank the same bits."""
    engine = start(run, stage, **way)
    for number in range(run.steps):
        step(engine, run, number)
    found = training.weights(engine)
    bits = training.bits(found)
    assert all(rank_bits == bits for rank_bits in _everybody(bits))
    engine.destroy()
    return found if dist.get_rank() == 0 else {}


def rounded(way: dict[str, Any]) -> dict[str, Any]:
    """What a codec for weights changes, and what it leaves."""
    run = Run("frozen", dtype="fp32")
    engine, exact = start(run, **way), start(run)
    before = training.bits(training.weights(exact))
    found: dict[str, Any] = {"forward differs": evaluate(engine) != evaluate(exact)}
    found["whole differs"] = training.bits(training.weights(engine)) != before
    with engine.gathered(list(engine.module.parameters()), modifier_rank=0):
        evaluate(engine)
    found["after gathered differs"] = training.bits(training.weights(engine)) != before
    engine.destroy()
    found["whole differs"] |= training.bits(dict(engine.module.named_parameters())) != before
    frozen = start(run, zero_quantized_nontrainable_weights=True)
    found["frozen only"] = tuple(
        any(unit.route.rounds for unit in frozen.partition.units if unit.plan.trainable is trainable)
        for trainable in (True, False)
    )
    frozen.destroy()
    exact.destroy()
    return found


def _everybody(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
