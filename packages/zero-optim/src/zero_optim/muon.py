"""Muon for matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .base import ClosureOptimizer
from .compat import muon_class

_FLAG = "use_muon"


class MuonWithAdam(ClosureOptimizer):
    """torch.optim.Muon and torch.optim.AdamW behind one list of param groups; a group's ``use_muon`` selects one.

    ``groups``: dicts with ``params``, ``use_muon``, and the hyperparameters of the optimizer that it selects. Raises
    ImportError for a group with ``use_muon`` before torch 2.9, which brought Muon.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        given = [dict(group) for group in groups]
        made: list[dict[str, Any]] = []
        for group in given:
            matrix = group.pop(_FLAG)
            kind = muon_class() if matrix else torch.optim.AdamW
            made += [{**filled, _FLAG: matrix} for filled in kind([group]).param_groups]
        super().__init__(made, {})

    @classmethod
    def from_model(cls, model: nn.Module, parameters: Any, arguments: dict[str, Any]) -> MuonWithAdam:
        """Return an optimizer of ``parameters`` (a list, or param groups as dicts), matrices by Muon, others by AdamW.

        A parameter's own attribute ``use_muon``, where it has one, decides instead. Weights of ``model``'s embeddings,
        also where another module shares them, go to AdamW. ``arguments``: ``lr``, ``momentum``, ``betas``, ``eps``,
        ``weight_decay``, and optionally ``muon_lr`` and ``adam_lr``, by which each of the two replaces ``lr``; a
        group's own options come before them. Raises ImportError for a matrix before torch 2.9.
        """
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        listed = parameters if any(isinstance(p, dict) for p in parameters) else [{"params": parameters}]
        rate = arguments["lr"]
        muon = {"lr": arguments.get("muon_lr", rate), "momentum": arguments["momentum"]}
        adam = {"lr": arguments.get("adam_lr", rate), "betas": arguments["betas"], "eps": arguments["eps"]}
        groups: list[dict[str, Any]] = []
        for group in listed:
            own = {key: value for key, value in group.items() if key != "params"}
            by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
            for given in group["params"]:
                p = given[1] if isinstance(given, tuple) else given
                by_kind[bool(getattr(p, _FLAG, p.ndim == 2 and id(p) not in embeddings))].append(p)
            for matrix, params in by_kind.items():
                if params:
                    base = {**(muon if matrix else adam), "weight_decay": arguments["weight_decay"]}
                    groups.append({**base, **own, "params": params, _FLAG: matrix})
        return cls(groups)

    def update(self) -> None:
        """Update every parameter that has a gradient in place, by the optimizer that its group selects. That optimizer
        is made anew for each step; its states are kept in ``self.state``."""
        for group, trained in self.groups_with_gradients():
            kind = muon_class() if group[_FLAG] else torch.optim.AdamW
            part = kind([{**{k: v for k, v in group.items() if k != _FLAG}, "params": trained}])
            part.state = self.state
            part.step(None)  # type: ignore[no-untyped-call]
