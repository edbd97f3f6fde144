"""Which optimizers may run on fragments of parameters."""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import PartitionError

_ELEMENTWISE = frozenset(
    ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
_WHOLE_MODEL = {"LBFGS": "it needs a closure and the whole model's gradient", "SparseAdam": "it needs sparse gradients"}


def must_be_whole(optimizer: Optimizer, *, sharded: bool) -> bool:
    """Whether the optimizer needs whole parameters because its result on fragments would differ.

    torch's own elementwise optimizers are known; any other is run once on a small matrix, whole and split. ``sharded``:
    this rank has only fragments (stage >= 1); then, and for optimizers that no engine can run, raises `PartitionError`.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE:
        return False
    if kind.__name__ in _WHOLE_MODEL:
        reason = _WHOLE_MODEL[kind.__name__]
        raise PartitionError(f"{kind.__name__} cannot run in an engine: {reason}. Use AdamW, for example.")
    if _split_equals_whole(optimizer):
        return False
    if sharded:
        raise PartitionError(
            f"{kind.__name__} gives other results on shards of parameters than on whole ones, because it looks at "
            "whole matrices or at the whole model. Use stage 0, or an elementwise optimizer such as AdamW."
        )
    return True


def _split_equals_whole(optimizer: Optimizer) -> bool:
    """Two steps on a 6 x 4 matrix, whole and as two fragments, with the first group's hyperparameters."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(24, generator=generator)
    gradients = [torch.randn(24, generator=generator) for _ in range(2)]
    results = []
    for cuts in ((24,), (9, 15)):
        pieces = [nn.Parameter(piece.clone()) for piece in torch.split(values, list(cuts))]
        if len(pieces) == 1:
            pieces = [nn.Parameter(pieces[0].detach().view(6, 4))]
        probe = copy.copy(optimizer)
        probe.state = defaultdict(dict)
        hyperparameters = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[0].items() if k != "params"}
        probe.param_groups = [{**hyperparameters, "params": pieces}]
        try:
            for gradient in gradients:
                for piece, part in zip(pieces, torch.split(gradient, list(cuts)), strict=True):
                    piece.grad = part.clone().view(piece.shape)
                probe.step()
        except Exception as error:
            if len(pieces) > 1:
                return False  # it cannot even run on fragments
            raise PartitionError(
                f"{type(optimizer).__name__} failed on a small probe, one matrix of 6 x 4: {error}"
            ) from error
        results.append(torch.cat([piece.detach().flatten() for piece in pieces]))
    return bool(torch.allclose(results[0], results[1], rtol=1e-6, atol=1e-7))
