"""Build the optimizer that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import UsageError

if TYPE_CHECKING:
    from .config import Config

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
_OURS_ONLY = frozenset(["torch_adam", "adam_w_mode", "fp32_optimizer_states", "bias_correction"])
_TORCH_NAMES = {"adagrad": "Adagrad"}
_LATER = {"lamb": "LAMB", "lion": "Lion", "muon": "Muon"}


def build_optimizer(
    given: Optimizer | Callable[[Any], Optimizer] | None,
    config: Config,
    model: nn.Module,
    parameters: Parameters | None,
) -> Optimizer | None:
    """Return the user's optimizer, the one that their function makes, or the one that the configuration names.

    ``parameters``: what to train; by default all of ``model`` that require gradients. None when neither names an
    optimizer.
    """
    if isinstance(given, Optimizer):
        return given
    chosen: Any = list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    if given is not None:
        made = given(chosen)
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"optimizer: the function given must return a torch.optim.Optimizer, got {type(made).__name__}"
            )
        return made
    if config.optimizer is None:
        return None
    if not chosen:
        raise UsageError("optimizer: there is nothing to train: no parameter of the model requires gradients")
    return _by_name(
        config.optimizer.type, config.optimizer.params.kwargs(), config.optimizer.decoupled_weight_decay, chosen
    )


def _by_name(name: str, arguments: dict[str, Any], decoupled: bool, parameters: list[Any]) -> Optimizer:
    if name in ("adam", "adamw"):
        if not arguments.get("bias_correction", True):
            raise UsageError("optimizer.params.bias_correction: false is not available for torch's Adam; remove it")
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        return kind(parameters, **{"fused": not arguments.get("foreach", False), **_without_ours(arguments)})
    if name in _LATER:
        raise UsageError(
            f"optimizer.type: {_LATER[name]} by name is not available yet; pass an optimizer object, or use AdamW"
        )
    kind = getattr(torch.optim, _TORCH_NAMES.get(name, name))
    made: Optimizer = kind(
        parameters, **_without_ours(arguments, also=frozenset(["amsgrad"]) if name == "adagrad" else frozenset())
    )
    return made


def _without_ours(arguments: dict[str, Any], also: frozenset[str] = frozenset()) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key not in _OURS_ONLY | also}
