"""Compute in tiles; backward computes every tile again and differentiates it, so that one tile is alive at a time.

[Note: gradients of tiles] Forward runs the computation on each tile and keeps the result alone. Backward runs it again,
tile by tile in the same order, and differentiates it with a nested call of autograd whose inputs are the tile and the
leaves (parameters) that its graph reaches. Nothing is accumulated into a leaf there. The sum over the tiles, taken in
the order of the tiles and in float32 for dtypes that are narrower, is the gradient that the one node of the outer graph
returns for the leaf: hooks of the leaf run once, and an engine or DDP gets its gradient once.

The leaves are found in the graph of each tile, so no list of parameters is asked for, and those of a closure count too.
Forward runs with gradients enabled where they are enabled around it, although its graphs are dropped: that is how the
leaves are found, how an engine sees that it trains, and how autocast caches casts that backward can go through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from .errors import SequenceError
from .tiled_surroundings import TileSurroundings


class TileSpan(NamedTuple):
    """Where a tile lies along the tiled dimension."""

    start: int
    length: int


def spans_of(length: int, size: int) -> list[TileSpan]:
    """Return the spans of tiles of ``size`` positions that cover ``length`` positions; the last may be smaller. One
    empty span for a length of 0."""
    return [TileSpan(start, min(size, length - start)) for start in range(0, max(length, 1), size)]


class TileWork(Protocol):
    """A computation that is done tile by tile.

    Call order: forward calls `compute` and `collect` for each span, then `take_result`; each backward calls `compute`
    and `gradient_of` for each span.

    Attributes:
        dim: the dimension of the inputs that is tiled.
        spans: the tiles, in order.
    """

    dim: int
    spans: Sequence[TileSpan]

    def compute(self, tiles: Sequence[torch.Tensor], /) -> torch.Tensor:
        """Return the output for one tile of each input, with its graph where gradients are enabled."""

    def collect(self, span: TileSpan, output: torch.Tensor, /) -> None:
        """Take the output of ``span``, without its graph, into the result."""

    def take_result(self) -> torch.Tensor:
        """Return the result and keep no reference to it."""

    def gradient_of(self, span: TileSpan, output: torch.Tensor, gradient: torch.Tensor, /) -> torch.Tensor:
        """Return the gradient of ``output``, that of ``span`` without its graph, given the ``gradient`` of the result.

        It may have a wider dtype than the output, and is cast when the output's memory is free.
        """


def run_tiles(work: TileWork, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Do ``work`` tile by tile over ``inputs`` (tensors of equal size along ``work.dim``), and return its result, which
    is differentiable once, and only if gradients are enabled; see [Note: gradients of tiles]."""
    trains = torch.is_grad_enabled()
    surroundings = TileSurroundings.of(inputs)
    leaves: dict[int, torch.Tensor] = {}
    for span in work.spans:
        tiles = _tiles_of(work, span, inputs, [trains and tensor.requires_grad for tensor in inputs])
        with _saved_as_they_are():
            output = work.compute(tiles)
        if output.requires_grad:
            found = [node.variable for node in _leaf_nodes(output)]
            leaves.update((id(leaf), leaf) for leaf in found if not any(leaf is tile for tile in tiles))
        work.collect(span, output.detach())
        del output
    if not trains:
        return work.take_result()
    result: torch.Tensor = _Recomputed.apply(work, surroundings, len(inputs), *inputs, *leaves.values())  # type: ignore[no-untyped-call]
    return result


class _Recomputed(Function):
    """The node of the outer graph: its inputs are the tiled tensors and the leaves that the tiles' graphs reach."""

    @staticmethod
    def forward(ctx: Any, work: TileWork, surroundings: TileSurroundings, count: int, *tensors: torch.Tensor) -> Any:
        """Return the result of ``work``, whose tiles are computed already. Save the first ``count`` of ``tensors``, the
        inputs, for backward; of the others, the leaves, keep only dtype and `id`. ``surroundings``: those in which the
        tiles were computed."""
        ctx.work, ctx.surroundings = work, surroundings
        ctx.leaves = [(tensor.dtype, id(tensor)) for tensor in tensors[count:]]
        ctx.save_for_backward(*tensors[:count])
        return work.take_result()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of all arguments of `forward`, None for the first three, by computing every tile again.
        ``gradient``: of the result. Raises `SequenceError` with ``create_graph=True``."""
        if torch.is_grad_enabled():
            raise SequenceError(
                "create_graph=True reached a computation in tiles, whose gradients are numbers without a graph. Call "
                "the module itself where second derivatives are needed."
            )
        inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[3 : 3 + len(inputs)]
        totals = _LeafTotals(ctx.leaves, len(ctx.work.spans))
        found = [torch.empty_like(tensor) if needs else None for tensor, needs in zip(inputs, needed, strict=True)]
        with ctx.surroundings.restored(inputs):
            for span in ctx.work.spans:
                _differentiate_tile(ctx.work, span, inputs, gradient, found, totals)
        return None, None, None, *found, *totals.take()


class _LeafTotals:
    """Adds up the gradients of leaves over ``tiles`` tiles. ``leaves``: (dtype, `id`) of each, in the order of
    `take`."""

    def __init__(self, leaves: Sequence[tuple[torch.dtype, int]], tiles: int) -> None:
        self._leaves = leaves
        self._alone = tiles == 1
        self._totals: dict[int, torch.Tensor] = {}

    def add(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient of ``leaf`` from one more tile: in float32 at least where there are several tiles, into
        memory of its own; a single tile's is kept as it is."""
        total = self._totals.get(id(leaf))
        if total is not None:
            total.add_(gradient)
        elif self._alone:
            self._totals[id(leaf)] = gradient
        else:  # a gradient may share memory with another, so the sum has its own
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._totals[id(leaf)] = gradient.to(wide, copy=True)

    def take(self) -> list[torch.Tensor | None]:
        """Return the sums in the leaves' dtypes and order; None for a leaf without a gradient."""
        totals = [(self._totals.pop(key, None), dtype) for dtype, key in self._leaves]
        return [None if total is None else total.to(dtype) for total, dtype in totals]


def _differentiate_tile(
    work: TileWork,
    span: TileSpan,
    inputs: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    found: Sequence[torch.Tensor | None],
    totals: _LeafTotals,
) -> None:
    """Compute the tile at ``span`` again and differentiate it, given ``gradient``, that of the result. Write the
    gradients of the inputs' tiles to their place in ``found`` (by input, None for one that needs none), and add those
    of leaves to ``totals``.
    """
    tiles = _tiles_of(work, span, inputs, [into is not None for into in found])
    with torch.enable_grad(), _saved_as_they_are():
        output = work.compute(tiles)
    wanted = [(tile, into) for tile, into in zip(tiles, found, strict=True) if into is not None]
    grads: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if output.requires_grad:
        nodes = [node for node in _leaf_nodes(output) if not any(node.variable is tile for tile in tiles)]
        seed = work.gradient_of(span, output.detach(), gradient)
        edge, dtype = get_gradient_edge(output), output.dtype
        del output  # its memory is free from here on, unless the graph has saved it
        seed = seed.to(dtype)
        leaves = [node.variable for node in nodes]
        edges = [*(get_gradient_edge(tile) for tile, _ in wanted), *(GradientEdge(node, 0) for node in nodes)]
        with _hooks_silent(leaves):
            grads = _gradients_at(edge, edges, seed)
        for leaf, of_leaf in zip(leaves, grads[len(wanted) :], strict=True):
            if of_leaf is not None:
                totals.add(leaf, of_leaf)
    for (_, into), of_tile in zip(wanted, grads, strict=False):
        target = into.narrow(work.dim, span.start, span.length)
        if of_tile is None:
            target.zero_()
        else:
            target.copy_(of_tile)


def _gradients_at(edge: GradientEdge, edges: list[GradientEdge], seed: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """Return the gradients at ``edges``, given ``seed``, that of the tile's output at ``edge``; None for an edge that
    the output does not depend on, an empty sequence for no edges. Frees the graph.

    Raises `SequenceError` if the graph reaches a computation of before the tile, which a tile has differentiated
    already.
    """
    if not edges:
        return ()
    try:
        return torch.autograd.grad([edge], edges, [seed], allow_unused=True)
    except RuntimeError as failure:
        if "second time" not in str(failure):
            raise
        raise SequenceError(
            "the tiled function uses a tensor that was computed from parameters or activations before the call, so "
            "every tile would have to differentiate that computation again. Compute it inside the function, or give "
            "the tensor as one more input if it has a value for each position."
        ) from failure


def _tiles_of(
    work: TileWork, span: TileSpan, inputs: Sequence[torch.Tensor], requires: Sequence[bool]
) -> list[torch.Tensor]:
    """Return the tiles of ``inputs`` at ``span``, as leaves that require gradients where ``requires`` says so.

    They are contiguous, as hidden states are: modules view them in other shapes.
    """
    narrow = [tensor.detach().narrow(work.dim, span.start, span.length).contiguous() for tensor in inputs]
    return [tile.requires_grad_(needs) for tile, needs in zip(narrow, requires, strict=True)]


def _leaf_nodes(output: torch.Tensor) -> Iterator[Any]:
    """Yield the nodes in the graph of ``output`` that accumulate into leaves; ``node.variable`` is the leaf."""
    waiting: list[Node] = [get_gradient_edge(output).node]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if not node.next_functions and isinstance(getattr(node, "variable", None), torch.Tensor):
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


@contextmanager
def _saved_as_they_are() -> Iterator[None]:
    """Context manager: inside it the saved-tensor hooks of the code around (offloading, for example) do not see the
    tensors that a tile's graph saves, as these live too briefly to be moved."""
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


@contextmanager
def _hooks_silent(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context manager: inside it, where a tile is differentiated, the hooks that are registered on ``leaves`` do not
    run. They run once afterwards, for the sum over all tiles."""
    kept = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)
