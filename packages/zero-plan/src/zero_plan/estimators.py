"""DeepSpeed's memory estimators: host memory per node and device memory per GPU for every choice of offload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .errors import PlanError, at_least_one

Tier = Literal["cpu", "none"]


@dataclass(frozen=True)
class EstimateRow:
    """The memory that one choice of offload needs.

    `cpu_bytes`: main memory of one node. `gpu_bytes`: memory of one device. `zero_init`: the model is built inside
    `zero_core.Init`. `offload_param` and `zero_init` are None below stage 3, where they make no difference.
    """

    cpu_bytes: int
    gpu_bytes: int
    offload_optimizer: Tier
    offload_param: Tier | None = None
    zero_init: bool | None = None

    @property
    def options(self) -> str:
        """The choice as text, by the names of the configuration, padded so that rows align."""
        param = [] if self.offload_param is None else [f"offload_param={self.offload_param:4}"]
        init = [] if self.zero_init is None else [f"zero_init={int(self.zero_init)}"]
        return ", ".join([*param, f"offload_optimizer={self.offload_optimizer:4}", *init])


@dataclass(frozen=True)
class Estimate:
    """The memory of parameters, optimizer states and gradients, one row per choice of offload.

    ``str()`` is DeepSpeed's table, in GB of 2**30 bytes.
    """

    stage: int
    total_params: int
    largest_layer_params: int | None
    gpus_per_node: int
    nodes: int
    rows: tuple[EstimateRow, ...]

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        gpus = f"{self.gpus_per_node} GPU{'s' if self.gpus_per_node > 1 else ''}"
        model = f"{self.total_params // 10**6}M total params"
        if self.largest_layer_params is not None:
            model += f", {self.largest_layer_params // 10**6}M largest layer params"
        return "\n".join(
            [
                "Estimated memory needed for params, optim states and gradients for a:",
                f"HW: Setup with {nodes}, {gpus} per node.",
                f"SW: Model with {model}.",
                "  per CPU  |  per GPU |   Options",
                *(f" {r.cpu_bytes / 2**30:7.2f}GB | {r.gpu_bytes / 2**30:6.2f}GB | {r.options}" for r in self.rows),
            ]
        )


def estimate_zero1(
    total_params: int, *, gpus_per_node: int = 1, nodes: int = 1, additional_buffer_factor: float = 1.5
) -> Estimate:
    """Return the needs of stage 1: as `estimate_zero2`, with full 16-bit gradients on every device.

    For P parameters on G devices of N nodes, f the buffer factor, in bytes: offloaded 4P on the device and P * max(4G,
    16) * f on the host; otherwise 4P + 16P/G, and P * 4 * (G/N) * f to build the model. Raises `PlanError` for counts
    below 1 and for a buffer factor that is not above 0.
    """
    return _below_stage_3(1, total_params, gpus_per_node, nodes, additional_buffer_factor)


def estimate_zero2(
    total_params: int, *, gpus_per_node: int = 1, nodes: int = 1, additional_buffer_factor: float = 1.5
) -> Estimate:
    """Return the needs of stage 2, with the optimizer on the CPU or not, as DeepSpeed's estimator gives them.

    For P parameters on G devices of N nodes, f the buffer factor, in bytes: offloaded 2P on the device and P * max(4G,
    16) * f on the host; otherwise 2P + 18P/G, and P * 4 * (G/N) * f to build the model. Raises `PlanError` for counts
    below 1 and for a buffer factor that is not above 0.
    """
    return _below_stage_3(2, total_params, gpus_per_node, nodes, additional_buffer_factor)


def _below_stage_3(stage: int, total_params: int, gpus_per_node: int, nodes: int, factor: float) -> Estimate:
    """Return the estimate of ``stage`` 1 or 2. ``factor``: the buffer factor. Raises `PlanError` for counts below 1 and
    a factor that is not above 0.
    """
    at_least_one(total_params=total_params, gpus_per_node=gpus_per_node, nodes=nodes)
    _check_factor(factor)
    devices = gpus_per_node * nodes
    # Bytes per parameter: its own 16 bits are full; float32 gradient, master and two moments are sharded; the 16-bit
    # gradient is full at stage 1 and sharded at stage 2.
    full, sharded = (4, 16) if stage == 1 else (2, 18)
    offloaded = EstimateRow(
        cpu_bytes=int(total_params * max(4 * devices, 16) * factor),
        gpu_bytes=full * total_params,
        offload_optimizer="cpu",
    )
    on_device = EstimateRow(
        cpu_bytes=int(total_params * 4 * gpus_per_node * factor),
        gpu_bytes=full * total_params + int(sharded * total_params / devices),
        offload_optimizer="none",
    )
    return Estimate(stage, total_params, None, gpus_per_node, nodes, (offloaded, on_device))


def estimate_zero3(
    total_params: int,
    largest_layer_params: int,
    *,
    gpus_per_node: int = 1,
    nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> Estimate:
    """Return the needs of stage 3 for each choice of offload and of `Init`, as DeepSpeed's estimator gives them.

    For P parameters, l of them in the largest layer, on G devices of N nodes, f the buffer factor, in bytes: with
    everything offloaded 4l on the device and 18P/N * f on the host; with the optimizer offloaded 4l + 2P/G and 16P/N *
    f; without offload 4l + 18P/G and l * 4 * (G/N) * f. Without `Init` every process of a node builds the full float32
    model on the host, which needs at least P * 4 * (G/N) * f then. Raises `PlanError` for counts below 1, a buffer
    factor that is not above 0, or a largest layer larger than the model.
    """
    at_least_one(
        total_params=total_params, largest_layer_params=largest_layer_params, gpus_per_node=gpus_per_node, nodes=nodes
    )
    _check_factor(additional_buffer_factor)
    if largest_layer_params > total_params:
        raise PlanError(
            f"largest_layer_params: expected at most total_params ({total_params}), got {largest_layer_params}; "
            "are the two swapped?"
        )
    rows = tuple(_zero3_rows(total_params, largest_layer_params, gpus_per_node, nodes, additional_buffer_factor))
    return Estimate(3, total_params, largest_layer_params, gpus_per_node, nodes, rows)


def _zero3_rows(total: int, largest: int, gpus_per_node: int, nodes: int, factor: float) -> Iterator[EstimateRow]:
    """Yield the rows of stage 3, the most offload first.

    ``total``, ``largest``: parameters of the model, and of its largest layer. ``factor``: the buffer factor.
    """
    devices = gpus_per_node * nodes
    per_node = 1 / nodes
    layer = 4 * largest
    choices: tuple[tuple[Tier, Tier, int, int], ...] = (
        ("cpu", "cpu", layer, 18),
        ("none", "cpu", layer + int(2 * total / devices), 16),
    )
    for param, optimizer, gpu_bytes, host in choices:
        yield EstimateRow(int(total * host * per_node * factor), gpu_bytes, optimizer, param, True)
        least = max(4 * gpus_per_node, host * per_node)
        yield EstimateRow(int(total * least * factor), gpu_bytes, optimizer, param, False)
    gpu_bytes = layer + int(18 * total / devices)
    yield EstimateRow(int(largest * 4 * gpus_per_node * factor), gpu_bytes, "none", "none", True)
    yield EstimateRow(int(total * 4 * gpus_per_node * factor), gpu_bytes, "none", "none", False)


def _check_factor(factor: float) -> None:
    """Raise `PlanError` unless ``factor``, the buffer factor, is above 0."""
    if not factor > 0:
        raise PlanError(f"additional_buffer_factor: expected a number > 0, got {factor!r}")
