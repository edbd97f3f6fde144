"""DeepSpeed's memory estimators, which print a table, over `zero_plan`."""

from __future__ import annotations

from torch import nn

from zero_plan import estimate_zero2, estimate_zero2_live, estimate_zero3, estimate_zero3_live


def zero2_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that stage 2 needs for ``model``, as `zero_plan.estimate_zero2_live`
    returns it; that explains the arguments."""
    print(
        estimate_zero2_live(
            model, gpus_per_node=num_gpus_per_node, nodes=num_nodes, additional_buffer_factor=additional_buffer_factor
        )
    )


def zero2_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that stage 2 needs for ``total_params`` parameters (elements), as `zero_plan.estimate_zero2`
    returns it; that explains the arguments."""
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
    """Print the memory that stage 3 needs for ``model``, as `zero_plan.estimate_zero3_live`
    returns it; that explains the arguments."""
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
    """Print the memory that stage 3 needs, as `zero_plan.estimate_zero3` returns it; that explains the other arguments.

    ``total_params`` and ``largest_layer_params``: elements of the model and of its largest layer.
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
