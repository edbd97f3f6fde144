"""Bytes of residual states: activations that wait for backward, and working memory that is freed within a pass."""

from __future__ import annotations

from .errors import at_least_one, one_of
from .setup import Setup, unit_sizes
from .transformer import CHECKPOINTING, Transformer, matrix_products

MASK_BYTES = 1
"""Bytes per element of a dropout mask."""
LOG_SUM_BYTES = 4
"""Bytes per token and head of the log-sum-exp that fused attention keeps for backward."""
LOGIT_COPY_BYTES = 4 + 4 + 4
"""Bytes per logit of its float32 copy, log-probability and gradient."""


def block_activation_bytes(
    shape: Transformer, micro_batch: int, *, checkpointing: str = "none", itemsize: int = 2
) -> int:
    """Return the bytes that one block keeps from forward to backward, for ``micro_batch`` sequences.

    ``itemsize``: bytes of an activation element. The terms are those of Korthikanti et al. 2022 (Reducing Activation
    Recomputation, arXiv 2205.05198, section 4.1, equations 1 and 2), written for any widths: with dropout, stored
    scores and a plain GPT they add up to s·b·h (34 + 5·a·s/h) bytes, with ``checkpointing="attention"`` to 34·s·b·h,
    with "full" to 2·s·b·h. "operators" keeps the block's input, the attention's output and the output of every second
    matrix product, as torchtitan's selective mode does. Raises `PlanError` for an unknown ``checkpointing``.
    """
    at_least_one(micro_batch=micro_batch, itemsize=itemsize)
    one_of("checkpointing", checkpointing, CHECKPOINTING)
    tokens = micro_batch * shape.sequence
    hidden, mask = shape.hidden, MASK_BYTES if shape.dropout else 0
    statistics = LOG_SUM_BYTES * shape.heads * tokens if shape.fused_attention else 0
    if checkpointing == "full":
        return itemsize * tokens * hidden
    if checkpointing == "operators":
        kept = hidden + hidden + sum(outputs for _, outputs in matrix_products(shape)[::2])
        return itemsize * tokens * kept + statistics
    norms = 2 * itemsize * hidden
    attention = itemsize * (hidden + hidden + 2 * shape.kv + hidden) + mask * hidden
    mlp = itemsize * (hidden + (4 if shape.gated else 2) * shape.width) + mask * hidden
    stored = 0
    if checkpointing == "none" and not shape.fused_attention:
        scores = tokens * shape.sequence * shape.heads
        stored = scores * (2 * itemsize + MASK_BYTES if shape.dropout else itemsize)
    return tokens * (norms + attention + mlp) + statistics + stored


def activation_bytes(shape: Transformer, micro_batch: int, *, checkpointing: str = "none", itemsize: int = 2) -> int:
    """Return the bytes of activations that the whole model keeps for backward, at the end of forward.

    All blocks, and the inputs of the last norm and of the head (Korthikanti et al. 2022, section 4.3). The arguments
    and the error are those of `block_activation_bytes`.
    """
    block = block_activation_bytes(shape, micro_batch, checkpointing=checkpointing, itemsize=itemsize)
    return shape.layers * block + 2 * itemsize * micro_batch * shape.sequence * shape.hidden


def loss_bytes(shape: Transformer, micro_batch: int, *, itemsize: int = 2) -> int:
    """Return the bytes of the logits of ``micro_batch`` sequences while the loss is computed.

    The head's output, ``itemsize`` bytes per logit, its float32 copy, the log-probabilities that backward reads and the
    gradient, as eager `torch.nn.functional.cross_entropy` on float32 logits makes them. (Korthikanti et al. 2022,
    section 4.3, count only the float32 copy.) A fused or chunked loss needs less. Raises `PlanError` for a
    ``micro_batch`` below 1.
    """
    at_least_one(micro_batch=micro_batch)
    return micro_batch * shape.sequence * shape.vocabulary * (itemsize + LOGIT_COPY_BYTES)


def working_bytes(units: int | tuple[int, ...] | list[int], setup: Setup, *, ahead: int = 1) -> int:
    """Return the bytes of the units that are gathered at the same time, and of the full gradients of one unit.

    ``units``: elements of each unit (the parameters that are gathered together), or of the only one. At stage 3 the
    largest unit and ``ahead`` prefetched units of its size are gathered while the largest unit's gradients are full; at
    stage 2 only the full gradients count; below stage 2 the result is 0. This bounds the device memory from below when
    everything else is offloaded (Rajbhandari et al. 2021, ZeRO-Infinity, arXiv 2104.07857, section 3, model state
    working memory). Raises `PlanError` for no units, or one without elements.
    """
    largest = max(unit_sizes(units))
    if setup.stage < 2:
        return 0
    gathered = (1 + ahead) * largest * setup.bytes.parameter if setup.stage >= 3 else 0
    return gathered + largest * setup.bytes.gradient
