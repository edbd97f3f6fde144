"""Search for the setups of a transformer that fit on a machine, the lowest bound on the step's time first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .errors import PlanError, at_least_one
from .estimate import CAPACITY, StepEstimate, estimate_step
from .machine import Machine
from .quantities import format_quantity
from .setup import STAGES, TIERS, Setup, StateBytes, Tier
from .transformer import CHECKPOINTING, Transformer

CLIPPING = 1.0
"""The largest norm of gradients in written configurations. The defaults of zero-core and DeepSpeed differ."""


@dataclass(frozen=True)
class Choice:
    """One combination of the options that the search varies, with the meaning that they have in `Setup` and
    `estimate_step`; ``micro_batch``: sequences per rank.
    """

    stage: int
    micro_batch: int
    checkpointing: str = "none"
    offload_optimizer: Tier = "device"
    offload_parameters: Tier = "device"
    hpz: bool = False
    qwz: bool = False
    qgz: bool = False

    def __str__(self) -> str:
        """Return the choice in words, such as "stage 3, micro-batch 4, checkpointing none, optimizer on host"."""
        words = [f"stage {self.stage}", f"micro-batch {self.micro_batch}", f"checkpointing {self.checkpointing}"]
        for name, tier in (("optimizer", self.offload_optimizer), ("parameters", self.offload_parameters)):
            if tier != "device":
                words.append(f"{name} on {tier}")
        return ", ".join(words + [name for name in ("hpz", "qwz", "qgz") if getattr(self, name)])


@dataclass(frozen=True)
class EstimatedChoice:
    """A choice of the search, and the estimate of its step."""

    choice: Choice
    estimate: StepEstimate

    @property
    def seconds(self) -> float:
        """The lower bound on the step's time, in seconds."""
        return self.estimate.time.least

    def unfit_reason(self) -> str:
        """Return the reason why the choice does not fit on the machine; "" if it fits. A tier of unknown capacity does
        not fit.
        """
        for row in self.estimate.fits:
            if row.capacity is None:
                return f"{CAPACITY[row.tier]} is not given"
            if row.needed > row.capacity:
                return f"{row.tier}: {format_quantity(row.needed - row.capacity, 'B')} too many"
        return ""


@dataclass(frozen=True)
class Rejected:
    """A neighbour of the fastest choice, one change away, and the reason why it was not chosen."""

    change: str
    reason: str


@dataclass(frozen=True)
class Search:
    """The result of `search`.

    ``fitting``: the choices that fit, the lowest bound on the step's time first. ``rejected``: neighbours of the first,
    with reasons. ``tried``: the number of choices.
    """

    fitting: tuple[EstimatedChoice, ...]
    rejected: tuple[Rejected, ...]
    tried: int


def search(
    shape: Transformer,
    machine: Machine,
    *,
    train_batch: int,
    world_size: int | None = None,
    dtype: str = "bf16",
    gradient: str | None = None,
) -> Search:
    """Estimate every choice of stage, offload, micro-batch, checkpointing and ZeRO++ for a model on a machine, and
    return those that fit.

    ``train_batch``: sequences of a step on all ranks; micro-batches divide it. ``world_size``: default one node.
    ``gradient``: dtype of gradients, default ``dtype``. Of two choices with the same bound, the one that changes less
    about plain training comes first: less offload, no compression, less recomputation, a lower stage. Raises
    `PlanError` for a batch that is no multiple of the ranks, and the errors of `estimate_step`.
    """
    per_node = int(machine.need("node.devices"))
    ranks = world_size or per_node
    at_least_one(train_batch=train_batch, world_size=ranks)
    if train_batch % ranks:
        raise PlanError(f"train_batch: expected a multiple of {ranks} ranks, got {train_batch}")
    base = Setup(world_size=ranks, ranks_per_node=min(per_node, ranks), bytes=StateBytes.of(dtype, gradient=gradient))
    found: dict[Choice, EstimatedChoice] = {}
    for choice in _choices(train_batch // ranks, base.nodes):
        setup = replace(base, accumulation=train_batch // ranks // choice.micro_batch, **_setup_fields(choice))
        options: dict[str, Any] = {"micro_batch": choice.micro_batch, "checkpointing": choice.checkpointing}
        found[choice] = EstimatedChoice(choice, estimate_step(shape, setup, machine, dtype=dtype, **options))
    fitting = sorted(
        (c for c in found.values() if not c.unfit_reason()), key=lambda c: (c.seconds, _plainness(c.choice))
    )
    return Search(tuple(fitting), tuple(_rejected_neighbours(fitting, found)), len(found))


def configuration(candidate: EstimatedChoice, *, dtype: str = "bf16", nvme_path: str | None = None) -> dict[str, Any]:
    """Return ``candidate``, a result of `search`, as a configuration for `zero_core.initialize` and DeepSpeed.

    ``dtype``: of the search. ``nvme_path``: the folder for offload to NVMe. The configuration has no learning rate, and
    does not turn on activation checkpointing, which is up to the model. Raises `PlanError` if a folder is needed and
    not given.
    """
    choice, setup = candidate.choice, candidate.estimate.setup
    zero: dict[str, Any] = {"stage": choice.stage}
    for section, tier in (
        ("offload_optimizer", choice.offload_optimizer),
        ("offload_param", choice.offload_parameters),
    ):
        if tier == "nvme" and nvme_path is None:
            raise PlanError(f"{section} is on NVMe: expected --nvme-path, the folder of its files")
        if tier != "device":
            zero[section] = {"device": "cpu"} if tier == "host" else {"device": "nvme", "nvme_path": nvme_path}
    if choice.hpz:
        zero["zero_hpz_partition_size"] = setup.per_node
    if choice.qwz:
        zero["zero_quantized_weights"] = True
    if choice.qgz:
        zero["zero_quantized_gradients"] = True
    found: dict[str, Any] = {
        "train_batch_size": choice.micro_batch * setup.accumulation * setup.world_size,
        "train_micro_batch_size_per_gpu": choice.micro_batch,
        "gradient_accumulation_steps": setup.accumulation,
        "optimizer": {"type": "AdamW", "params": {}},
        "gradient_clipping": CLIPPING,
        "zero_optimization": zero,
    }
    return found if dtype == "fp32" else {**found, dtype: {"enabled": True}}


def _choices(samples: int, nodes: int) -> Iterator[Choice]:
    """Yield all choices that the search tries.

    ``samples``: sequences of one rank in a step; micro-batches are the powers of two that divide it. ``nodes``: ZeRO++
    is a choice only if there are several. The optimizer is offloaded only from stage 1; parameters and ZeRO++ vary only
    at stage 3.
    """
    micro_batches = [2**power for power in range(samples.bit_length()) if samples % 2**power == 0]
    compressions = list(product((False, True), repeat=3)) if nodes > 1 else [(False, False, False)]
    for stage, micro_batch, checkpointing in product(STAGES, micro_batches, CHECKPOINTING):
        for optimizer in TIERS if stage else TIERS[:1]:
            for parameters in TIERS if stage == 3 else TIERS[:1]:
                for compression in compressions if stage == 3 else compressions[:1]:
                    yield Choice(stage, micro_batch, checkpointing, optimizer, parameters, *compression)


def _setup_fields(choice: Choice) -> dict[str, Any]:
    """Return, by name, those fields of ``choice`` that are fields of `Setup` too."""
    names = ("stage", "offload_optimizer", "offload_parameters", "hpz", "qwz", "qgz")
    return {name: getattr(choice, name) for name in names}


def _plainness(choice: Choice) -> tuple[int, ...]:
    """Return a sort key by which choices that change less about plain training come first."""
    tiers = TIERS.index(choice.offload_optimizer) + TIERS.index(choice.offload_parameters)
    compressed = choice.hpz + choice.qwz + choice.qgz
    return tiers, compressed, CHECKPOINTING.index(choice.checkpointing), choice.stage, -choice.micro_batch


def _rejected_neighbours(fitting: list[EstimatedChoice], found: dict[Choice, EstimatedChoice]) -> Iterator[Rejected]:
    """Yield the neighbours of the fastest choice, those tried choices that differ in one field, each with the reason
    why it was not chosen; nothing if no choice fits.

    ``fitting``: the choices that fit, the fastest first. ``found``: all that were tried.
    """
    if not fitting:
        return
    best = fitting[0]
    for name in Choice.__dataclass_fields__:
        values = {getattr(choice, name) for choice in found} - {getattr(best.choice, name)}
        for value in sorted(values, key=str):
            other = found.get(replace(best.choice, **{name: value}))
            if other is not None:
                slower = other.seconds / best.seconds
                reason = other.unfit_reason() or (
                    f"its bound is {slower:.2f} times as long, by {other.estimate.time.binding}"
                    if slower > 1
                    else "its bound is the same, and it changes more"
                )
                yield Rejected(f"{name.replace('_', ' ')} {value}", reason)
