"""Device memory that zero-core's engine needs during a step, beyond the states that the papers count: averaged
gradients, buffers of reductions in flight, gathered units.

A step is followed from the loss through backward, unit by unit in reverse order, to the averaged gradients; the moment
that needs most counts. The dry run (`zero_plan.plan`) runs the engine itself; these formulas follow its default
configuration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .activations import activation_bytes, block_activation_bytes, loss_bytes
from .setup import Setup
from .states import StateRow
from .transformer import Transformer

PERSISTENT_BELOW = 100_000
"""Parameters of fewer elements are never released: the default of `stage3_param_persistence_threshold`."""
PREFETCHED = 50_000_000
"""Elements gathered ahead of use: the default of `stage3_prefetch_bucket_size`."""
MOST_GATHERED = 1_000_000_000
"""Elements gathered at once: the default of `stage3_max_live_parameters`."""
MOST_REDUCED = 500_000_000
"""Elements of gradients in flight: the default of `reduce_bucket_size`."""
REDUCTIONS = 2
"""Reductions in flight when another one starts (`zero_partition.ordered_reductions`)."""
FLOAT32 = 4
"""Bytes of an element while a norm without a fused operation computes."""
ACCUMULATED = 4
"""Least bytes per element of averaged and of accumulated gradients (`zero_precision.PrecisionPolicy`)."""


class EngineUnit(NamedTuple):
    """One unit of the engine: its ``elements``, those of its ``largest`` parameter, and whether it is ``persistent``
    (never released). ``ends_block``: backward is done with a block when it has the unit's gradients.
    """

    elements: int
    largest: int
    persistent: bool = False
    ends_block: bool = False


@dataclass(frozen=True)
class MomentLoad:
    """Device memory of one micro-batch beside the engine, in bytes: ``kept``, the activations of one block; ``rest``,
    those outside blocks; ``again``, a recomputed block; ``passing``, the gradients of activations in a block's MLP;
    ``loss``, the logits while the loss is computed; ``logits``, the model's output until backward has ended.
    """

    kept: int
    rest: int
    again: int
    passing: int
    loss: int
    logits: int

    @classmethod
    def of(
        cls, shape: Transformer, micro_batch: int, *, checkpointing: str, itemsize: int, on_host: bool
    ) -> MomentLoad:
        """Return the device memory that ``micro_batch`` sequences need beside the engine.

        ``itemsize``: bytes of an activation element. ``on_host``: the inputs of blocks wait on the host. A norm without
        bias (RMSNorm) counts as it computes in eager mode, in float32: its input in float32 and its normalized input
        stay for backward too. Raises the errors of `activation_bytes`.
        """
        tokens = micro_batch * shape.sequence
        norm = 0 if shape.bias else (itemsize + (FLOAT32 if itemsize < FLOAT32 else 0)) * tokens * shape.hidden
        again = 0
        if checkpointing != "none":
            again = block_activation_bytes(shape, micro_batch, itemsize=itemsize) + 2 * norm
        block = block_activation_bytes(shape, micro_batch, checkpointing=checkpointing, itemsize=itemsize)
        every = activation_bytes(shape, micro_batch, checkpointing=checkpointing, itemsize=itemsize)
        rest = every - shape.layers * block + norm
        block += 2 * norm if checkpointing in ("none", "attention") else 0
        return cls(
            kept=0 if on_host else block,
            rest=0 if on_host else rest,
            again=again,
            passing=itemsize * tokens * (shape.hidden + (2 if shape.gated else 1) * shape.width),
            loss=loss_bytes(shape, micro_batch, itemsize=itemsize),
            logits=itemsize * tokens * shape.vocabulary,
        )


def engine_units(shape: Transformer, stage: int) -> tuple[EngineUnit, ...]:
    """Return the units that zero-partition makes of a transformer, in the order in which backward completes them: the
    head (if it is not tied), the last norm, the blocks, the embedding.

    At stage 3 small parameters are units of their own, which are complete after the rest of their block, as the block's
    first norm is among them.
    """
    matrices = [shape.hidden * shape.hidden] * 2 + [shape.hidden * shape.kv] * 2
    matrices += [shape.hidden * shape.width] * (3 if shape.gated else 2)
    vectors = [shape.hidden] * ((shape.block_params - sum(matrices)) // shape.hidden)
    norm = shape.hidden * (2 if shape.bias else 1)
    head = [] if shape.tied else _units_of([shape.vocabulary * shape.hidden], stage)
    ends = [*head, *_units_of([norm], stage)]
    *before, last = _units_of(matrices + vectors, stage)
    block = [*before, last._replace(ends_block=True)]
    return (*ends, *block * shape.layers, *_units_of([shape.embedding_params], stage))


def _units_of(parameters: Sequence[int], stage: int) -> list[EngineUnit]:
    """Return the units of parameters with these numbers of elements: one, or at stage 3 two, the second one with the
    parameters that are persistent.
    """
    small = [size for size in parameters if stage >= 3 and size < PERSISTENT_BELOW]
    large = [size for size in parameters if stage < 3 or size >= PERSISTENT_BELOW]
    found = [EngineUnit(sum(large), max(large))] if large else []
    return found + ([EngineUnit(sum(small), max(small), persistent=True)] if small else [])


@dataclass(frozen=True)
class GradientBytes:
    """Bytes per element of the gradients that the engine holds (`zero_partition.gradients.UnitGradients`).

    ``flat``: full flat buffers that stay from step to step, at stages 0 and 1: autograd's gradients, in which several
    micro-batches add up in the accumulated dtype. ``shown``: casts of averages for ``.grad``, those of the step before,
    at stage 0 with 16-bit parameters and accumulation; as many again are made when backward ends. ``averaged``: the
    averages beside the flat buffers, full at stage 0, else a shard. ``collects``: the averages of all units are there
    from the first micro-batch on. ``payload``, ``wire``: in flight, a buffer that is sent, and what other ranks send.
    ``adding``: a sum that is added to the average.
    """

    flat: int
    shown: int
    averaged: int
    collects: bool
    payload: int
    wire: int
    adding: int

    @classmethod
    def of(cls, setup: Setup) -> GradientBytes:
        """Return the bytes per element of the gradients that the engine holds with ``setup``."""
        parameter, wire = setup.bytes.parameter, setup.bytes.gradient
        accumulated = max(ACCUMULATED, wire)
        several, wider = setup.accumulation > 1, accumulated != parameter
        arriving = accumulated if several and setup.stage < 2 else parameter
        overlaps = setup.stage < 2 and arriving == accumulated  # the average is in the flat buffer
        return cls(
            flat=arriving if setup.stage < 2 else 0,
            shown=parameter if setup.stage == 0 and several and wider else 0,
            averaged=0 if overlaps and setup.offload_optimizer == "device" else accumulated,
            collects=several and setup.stage >= 2,
            payload=(arriving if setup.stage >= 2 else 0) + (wire if wire != arriving else 0),
            wire=wire,
            adding=accumulated if several and setup.stage >= 2 else 0,
        )


def engine_memory(shape: Transformer, setup: Setup, load: MomentLoad) -> tuple[StateRow, ...]:
    """Return the bytes on one rank that come on top of parameters, masters and moments, by kind, at the moment of a
    step that needs most on the device.

    ``load``: the memory of one micro-batch beside the engine. From stage 1 on the averaged gradients of an offloaded
    optimizer are on the host (`zero_offload`). Reductions in flight receive the other ranks' slices, as `zero_comm` has
    them on a CPU; NCCL needs less.
    """
    averaged_at = "device" if setup.offload_optimizer == "device" else "host"
    units, kept = engine_units(shape, setup.stage), GradientBytes.of(setup)
    shards = sum(setup.shard(unit.elements) for unit in units)
    on_host = StateRow("averaged gradients", "host", kept.averaged * shards if averaged_at == "host" else 0)
    moments = list(_device_bytes_over_step(shape, units, setup, load, kept, averaged=averaged_at == "device"))
    most = max(moments, key=lambda rows: sum(rows.values()))
    return (
        *(StateRow(kind, "device", nbytes) for kind, nbytes in most.items() if nbytes),
        *[on_host] * bool(on_host.nbytes),
    )


def _device_bytes_over_step(
    shape: Transformer,
    units: tuple[EngineUnit, ...],
    setup: Setup,
    load: MomentLoad,
    kept: GradientBytes,
    *,
    averaged: bool,
) -> Iterator[dict[str, int]]:
    """Yield the bytes on the device by kind at the end of forward, at each unit of backward, and after backward.

    ``units``: in the order of backward. ``load``: the memory of one micro-batch beside the engine. ``kept``: bytes per
    element of gradients. ``averaged``: averaged gradients are on the device.
    """
    ranks = setup.world_size
    full = [ranks * setup.shard(unit.elements) for unit in units]
    share = ranks if setup.stage else 1  # averages are full at stage 0
    held = {"gradients": (kept.flat + kept.shown) * sum(full)}
    gathered = list(_gathered_bytes(units, setup))
    collected = kept.averaged * (sum(full) // share) * (averaged and kept.collects)
    blocks = shape.layers
    yield {
        **held,
        "averaged gradients": collected,
        "activations": load.rest + blocks * load.kept,
        "logits and loss": load.loss,
        "gathered units": gathered[0],
    }
    travelling: deque[int] = deque()
    for unit, numel, live in zip(units, full, gathered, strict=True):
        travelling.append(numel)
        in_flight = (kept.payload + kept.wire * (ranks - 1) / ranks) * sum(travelling)
        collected += kept.averaged * (numel // share) * (averaged and not kept.collects)
        yield {
            **held,
            "averaged gradients": collected,
            "activations": load.rest + blocks * load.kept,
            "a block, recomputed": load.again if unit.ends_block else 0,
            "gradients of activations": load.passing if unit.ends_block else 0,
            "logits and loss": load.logits * (2 if blocks == shape.layers else 1),
            "gathered units": live,
            "reductions in flight": int(in_flight) + kept.adding * max(travelling) // ranks,
            "a gradient of autograd": setup.bytes.parameter * unit.largest,
        }
        blocks -= unit.ends_block
        while len(travelling) > REDUCTIONS or (len(travelling) > 1 and sum(travelling) > MOST_REDUCED):
            travelling.popleft()
    yield {
        "gradients": (kept.flat + 2 * kept.shown) * sum(full),
        "averaged gradients": collected,
        "logits and loss": load.logits,
    }


def _gathered_bytes(units: Sequence[EngineUnit], setup: Setup) -> Iterator[int]:
    """Yield the bytes of gathered parameters while backward is at each of ``units``, in their order; 0 below stage 3.

    The next units are gathered ahead as `zero_partition.gatherer.Gatherer` does; parameters that are never released
    count beyond their shard on the device.
    """
    if setup.stage < 3:
        yield from [0] * len(units)
        return
    small = [unit.elements for unit in units if unit.persistent]
    always = sum(small) - (sum(map(setup.shard, small)) if setup.offload_parameters == "device" else 0)
    sizes = [0 if unit.persistent else unit.elements for unit in units]
    issued = coming = live = 0
    for number, size in enumerate(sizes):
        if issued == number:
            issued, coming, live = issued + 1, coming + size, live + size
        coming -= size
        while issued < len(sizes):
            ahead = sizes[issued]
            if coming and ahead and (coming + ahead > PREFETCHED or live + ahead > MOST_GATHERED):
                break
            issued, coming, live = issued + 1, coming + ahead, live + ahead
        yield setup.bytes.parameter * (always + live)
        live -= size
