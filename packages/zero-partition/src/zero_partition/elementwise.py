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


def check_elementwise(optimizer: Optimizer, *, sharded: bool) -> None:
    """Refuse by name an optimizer whose result on fragments differs from its result on whole parameters.

    torch's own elementwise optimizers are known; any other is run once on a small matrix, whole and split.
    ``sharded``: whether the optimizer sees fragments of single ranks only (stage >= 1). Raises `PartitionError`.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE:
        return
    if kind.__name__ in _WHOLE_MODEL:
        reason = _WHOLE_MODEL[kind.__name__]
        raise PartitionError(f"{kind.__name__} cannot run in an engine: {reason}. Use AdamW or another elementwise one.")
    if not _split_equals_whole(optimizer):
        where = "on shards of parameters" if sharded else "on the fragments that every stage uses"
        raise PartitionError(
            f"{kind.__name__} gives other results {where} than on whole parameters, because it looks at whole matrices or at the whole "
            "model. Use an elementwise optimizer such as AdamW."
        )


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
            raise PartitionError(
                f"{type(optimizer).__name__} failed on a small probe that asks whether it may run on fragments: {error}"
            ) from error
        results.append(torch.cat([piece.detach().flatten() for piece in pieces]))
    return bool(torch.allclose(results[0], results[1], rtol=1e-6, atol=1e-7))
