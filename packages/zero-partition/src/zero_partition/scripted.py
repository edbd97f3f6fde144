"""torch.jit modules, which take no hooks, so that hooks of the module around them are used instead.

A scripted module is one made by torch.jit, by scripting or tracing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .errors import PartitionError
from .units import UnitPlan


def takes_hooks(module: nn.Module) -> bool:
    """Return whether torch lets hooks be registered on ``module``: True for all but scripted modules."""
    return not isinstance(module, torch.jit.ScriptModule)


def report_by_enclosing_modules(model: nn.Module, plans: Iterable[UnitPlan], *, released: bool) -> None:
    """Replace each scripted member of ``plans`` (a module whose forward uses the unit), in place, by the innermost
    module around it that takes hooks and is called.

    ``released``: parameters are sharded (stage 3). Then raises `PartitionError` if ``model`` itself is scripted, as no
    hook tells when it runs; at lower stages such a member is removed.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for plan in plans:
        for name in [n for n, module in plan.members.items() if not takes_hooks(module)]:
            del plan.members[name]
            around = name
            while around and not reports_calls(modules[around]):
                around = around.rpartition(".")[0]
            if takes_hooks(modules[around]):
                plan.members[around] = modules[around]
            elif released:
                raise PartitionError(
                    f"parameter '{next(iter(plan.parameters))}' belongs to a torch.jit module that is the model "
                    "itself: it takes no hooks, so at stage 3 nothing says when its parameters are needed. Make it a "
                    "submodule of a plain nn.Module, or use stage 2."
                )


def reports_calls(module: nn.Module) -> bool:
    """Return whether hooks on ``module`` tell when it runs: not if it is scripted, nor if it is a ModuleList or
    ModuleDict, which is never called."""
    return takes_hooks(module) and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
