"""The autograd graph of a loss, and the part of it that one call of a module recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node

_LEAF = "torch::autograd::AccumulateGrad"


class Edge(NamedTuple):
    """An edge along which backward passes a gradient: from ``source`` to ``target``, for its output ``number``."""

    source: Node
    target: Node
    number: int


class LossGraph:
    """The edges of the autograd graph of ``loss``; gradients flow along them from the loss to its leaves."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._edges = _edges_from([] if loss.grad_fn is None else [loss.grad_fn], stops=())

    def leaves(
        self, outputs: Iterable[tuple[Node, int]], inputs: Iterable[Node], parameters: Sequence[nn.Parameter]
    ) -> list[Node] | str:
        """Return the leaf nodes of ``parameters`` if their gradient comes from one call of a module alone; else a
        message that says why not. ``outputs``: (node, output number) of the tensors that the call returned; ``inputs``:
        nodes of its arguments. The gradient comes from the call alone if every edge into the parameters, and into nodes
        that the call computed from them, begins inside the call, apart from the edges into its outputs, which must all
        begin outside."""
        results = set(outputs)
        inner = _edges_from([node for node, _ in results], stops=inputs)
        held = {id(p) for p in parameters}
        leaves = [node for node in {e.target for e in inner} if _is_leaf_of(node, held)]
        call = _leading_to(leaves, inner)
        if not any((edge.target, edge.number) in results and edge.target in call for edge in self._edges):
            return "no gradient reaches its weights through its module's outputs"
        for edge in self._edges:
            inside = edge.source in call
            if (edge.target, edge.number) in results and edge.target in call:
                if inside:
                    return "its module returns a tensor beside another that is computed from it"
            elif not inside and (edge.target in call or _is_leaf_of(edge.target, held)):
                return "its weights, or what its module computes from them, are used beside the module's call"
        return leaves


def _edges_from(roots: Iterable[Node], stops: Iterable[Node]) -> list[Edge]:
    """Return all edges on paths from ``roots`` that pass through no node in ``stops``; they may end at one."""
    found, seen = [], {*stops}
    waiting = [node for node in dict.fromkeys(roots) if node not in seen]
    seen.update(waiting)
    while waiting:
        source = waiting.pop()
        for target, number in source.next_functions:
            if target is not None:
                found.append(Edge(source, target, number))
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
    return found


def _leading_to(leaves: Iterable[Node], edges: Iterable[Edge]) -> set[Node]:
    """Return the nodes, except ``leaves``, from which one of ``leaves`` can be reached along ``edges``."""
    sources: dict[Node, list[Node]] = {}
    for edge in edges:
        sources.setdefault(edge.target, []).append(edge.source)
    found: set[Node] = set()
    waiting = list(leaves)
    while waiting:
        for source in sources.get(waiting.pop(), ()):
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _is_leaf_of(node: Node, held: set[int]) -> bool:
    """Return whether ``node`` accumulates the gradient of a parameter whose `id` is in ``held``."""
    return not node.next_functions and node.name() == _LEAF and id(node.variable) in held  # type: ignore[attr-defined]
