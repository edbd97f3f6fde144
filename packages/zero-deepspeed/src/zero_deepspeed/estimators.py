"""DeepSpeed's memory estimators, which print a table, over `zero_plan`."""

from __future__ import annotations

from torch import nn

from zero_plan import estimate_zero2, estimate_zero2_live, estimate_zero3, estimate_zero3_live


def zero2_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table of the memory of a GPU and of a node's host that stage 2 needs to train ``model``, with and without
    offload, on ``num_gpus_per_node`` times ``num_nodes`` ranks. ``additional_buffer_factor`` multiplies the host
    memory, for buffers. Raises `PlanError` for a model without parameters and for counts below 1."""
    print(
        estimate_zero2_live(
            model, gpus_per_node=num_gpus_per_node, nodes=num_nodes, additional_buffer_factor=additional_buffer_factor
        )
    )


def zero2_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory of a GPU and of a node's host that stage 2 needs to train a model of ``total_params`` parameters
    (elements), on ``num_gpus_per_node`` times ``num_nodes`` ranks. ``additional_buffer_factor`` multiplies the host
    memory. Raises `PlanError` for counts below 1."""
    print(
        estimate_zero2(
            int(total_params),
            gpus_per_node=num_gpus_per_node,
            nodes=num_nodes,
            additional_buffer_factor=additional_buffer_factor,
        )
    )


def zero3_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table of the memory of a GPU and of a node's host that stage 3 needs to train ``model``, with and without
    offload, on ``num_gpus_per_node`` times ``num_nodes`` ranks. ``additional_buffer_factor`` multiplies the host
    memory. Raises `PlanError` for a model without parameters and for counts below 1."""
    print(
        estimate_zero3_live(
            model, gpus_per_node=num_gpus_per_node, nodes=num_nodes, additional_buffer_factor=additional_buffer_factor
        )
    )


def zero3_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory of a GPU and of a node's host that stage 3 needs to train a model of ``total_params`` parameters
    (elements), of which the largest layer has ``largest_layer_params``, on ``num_gpus_per_node`` times ``num_nodes``
    ranks. ``additional_buffer_factor`` multiplies the host memory. Raises `PlanError` for counts below 1.
    """
    print(
        estimate_zero3(
            int(total_params),
            int(largest_layer_params),
            gpus_per_node=num_gpus_per_node,
            nodes=num_nodes,
            additional_buffer_factor=additional_buffer_factor,
        )
    )
