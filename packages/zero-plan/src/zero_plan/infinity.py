"""The formulas of ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857, sections 3 and 4), as printed there.

They describe a GPT of ``layers`` blocks of width ``hidden``, Adam in mixed precision with float32 gradients as well (20
bytes per parameter), and full checkpointing every ``interval`` blocks. ``batch``: sequences; ``sequence``: tokens of
each; ``heads``: attention heads. All raise `PlanError` for counts below 1. `states.py` and `activations.py` are more
exact; these formulas reproduce the paper's tables and give a first estimate.
"""

from __future__ import annotations

from .errors import PlanError, at_least_one


def params(layers: int, hidden: int) -> int:
    """Return the number of parameters: 12·nl·hd² (section 3, equation 1)."""
    at_least_one(layers=layers, hidden=hidden)
    return 12 * layers * hidden**2


def model_state_bytes(layers: int, hidden: int) -> int:
    """Return the bytes of all model states: 240·nl·hd², 20 per parameter (section 3, equation 2)."""
    return 20 * params(layers, hidden)


def checkpoint_bytes(layers: int, hidden: int, *, batch: int, sequence: int, interval: int = 1) -> int:
    """Return the bytes of activation checkpoints: 2·bsz·seq·hd·nl/ci, rounded down (section 3, equation 3)."""
    at_least_one(layers=layers, hidden=hidden, batch=batch, sequence=sequence, interval=interval)
    return 2 * batch * sequence * hidden * layers // interval


def state_working_bytes(hidden: int) -> int:
    """Return the bytes of model state working memory: parameter and gradient of the largest linear, 4·hd·4hd (equation
    4).
    """
    at_least_one(hidden=hidden)
    return 4 * hidden * 4 * hidden


def activation_working_bytes(hidden: int, heads: int, *, batch: int, sequence: int, interval: int = 1) -> int:
    """Return the bytes of activation working memory: bsz·seq·ci·(16·hd + 2·heads·seq) (section 3, equation 5)."""
    at_least_one(hidden=hidden, heads=heads, batch=batch, sequence=sequence, interval=interval)
    return batch * sequence * interval * (16 * hidden + 2 * heads * sequence)


def intensity_of_parameters(*, batch: int, sequence: int) -> int:
    """Return the operations per byte of parameters and gradients moved: seq·bsz (section 4.1, equation 9)."""
    at_least_one(batch=batch, sequence=sequence)
    return sequence * batch


def intensity_of_optimizer_states(*, batch: int, sequence: int) -> float:
    """Return the operations per byte of optimizer states moved: seq·bsz/4 (section 4.1, equation 10)."""
    return intensity_of_parameters(batch=batch, sequence=sequence) / 4


def intensity_of_checkpoints(hidden: int, *, interval: int = 1) -> int:
    """Return the operations per byte of activation checkpoints moved: 24·hd·ci (section 4.1, equation 11)."""
    at_least_one(hidden=hidden, interval=interval)
    return 24 * hidden * interval


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Return the share of ``peak`` that is reached without overlap: ait·bw / (ait·bw + peak) (section 4, equation 6).

    ``intensity``: operations per byte. ``bandwidth``: bytes/s. ``peak``: operations/s, 70e12 in the paper (V100).
    Raises `PlanError` unless all are above 0.
    """
    if min(intensity, bandwidth, peak) <= 0:
        raise PlanError(f"expected numbers > 0, got intensity={intensity}, bandwidth={bandwidth}, peak={peak}")
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth_for(share: float, intensity: float, peak: float) -> float:
    """Return the bytes/s at which `efficiency` is ``share`` (0 to 1, both excluded). Raises `PlanError` for other
    shares, and for an ``intensity`` or ``peak`` not above 0.
    """
    if not 0 < share < 1 or min(intensity, peak) <= 0:
        raise PlanError(f"expected 0 < share < 1 and numbers > 0, got {share}, {intensity}, {peak}")
    return share / (1 - share) * peak / intensity
