"""Apply a module to its input in tiles: an MLP, RMSNorm, LayerNorm, or whatever computes each position by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from .errors import SequenceError
from .tiled_recompute import TileSpan, run_tiles, spans_of

Computes = Callable[..., torch.Tensor]


def tiled(
    module: Computes,
    *inputs: torch.Tensor,
    tiles: int,
    dim: int = -2,
    output_dim: int | None = None,
    stack: bool = False,
) -> torch.Tensor:
    """Return ``module(*inputs)``, computed in ``tiles`` tiles along ``dim`` so that one tile's activations exist at a
    time.

    ``module``: a module, or a function of tensors, that computes each position along ``dim`` by itself, like an MLP or
    a norm over the last dimension. One that mixes positions (attention, a convolution, BatchNorm, experts with a
    capacity) gives other results in tiles; only the size of its output is checked. ``inputs``: tensors of equal size
    along ``dim``, by default the last but one (of hidden states, the sequence), each cut into pieces of
    ceil(size / ``tiles``) positions, so there may be fewer; what is not to be cut is left to a closure or
    `functools.partial`. The output has as many positions as the inputs along ``output_dim``, by default ``dim``. With
    ``stack`` the result is instead the outputs of the tiles, a sum for example, stacked along a new dimension 0.

    Backward computes each tile again, in the same order, with the random numbers and the autocast of forward. Gradients
    are those of the whole call up to rounding; those of parameters are added up over the tiles in float32 at least, and
    hooks see each once. The activations kept from forward to backward are the inputs alone; with gradients disabled
    nothing is kept. The result is differentiable once.

    Raises `SequenceError` for inputs that do not fit, and for an output that is no tensor or has another size.
    """
    if not inputs:
        raise SequenceError("tiled: expected at least one tensor after the module, got none")
    if tiles < 1:
        raise SequenceError(f"tiled: expected 1 or more tiles, got {tiles}")
    sizes = [_size_along(tensor, number, dim) for number, tensor in enumerate(inputs)]
    if len(set(sizes)) > 1:
        raise SequenceError(f"tiled: expected inputs of equal size along dimension {dim}, got {sizes}")
    spans = spans_of(sizes[0], max(1, -(-sizes[0] // tiles)))
    if stack:
        return run_tiles(_StackedWork(module, spans, dim), inputs)
    return run_tiles(_JoinedWork(module, spans, dim, dim if output_dim is None else output_dim), inputs)


def _size_along(tensor: object, number: int, dim: int) -> int:
    """Return the size of ``tensor``, the input with this ``number``, along ``dim``. Raises `SequenceError` if it is no
    tensor or has no such dimension."""
    if not isinstance(tensor, torch.Tensor):
        raise SequenceError(f"tiled: expected input {number} to be a tensor, got {type(tensor).__name__}")
    if not -tensor.dim() <= dim < tensor.dim():
        raise SequenceError(
            f"tiled: expected input {number} to have a dimension {dim}, got the shape {tuple(tensor.shape)}"
        )
    return tensor.size(dim)


def name_of(module: object) -> str:
    """Return the name of a module or function for an error: its ``__name__``, else that of its class."""
    return getattr(module, "__name__", type(module).__name__)


def call_on(module: Computes, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``module(*tiles)``. Raises `SequenceError` if the result is no tensor."""
    output: object = module(*tiles)
    if not isinstance(output, torch.Tensor):
        raise SequenceError(
            f"expected {name_of(module)} to return one tensor for a tile, got {type(output).__name__}; give a function "
            "that returns the tensor alone"
        )
    return output


class _JoinedWork:
    """The `TileWork` that puts the outputs of tiles one behind the other along ``output_dim``.

    ``module``: computes the output of a tile. ``spans``: the tiles, along dimension ``dim`` of every input.
    """

    def __init__(self, module: Computes, spans: Sequence[TileSpan], dim: int, output_dim: int) -> None:
        self.dim = dim
        self.spans = spans
        self._module = module
        self._output_dim = output_dim
        self._joined: torch.Tensor | None = None

    def compute(self, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the module's output for the tiles."""
        return call_on(self._module, tiles)

    def collect(self, span: TileSpan, output: torch.Tensor) -> None:
        """Copy ``output`` to the place of ``span`` in the result, which the first tile allocates. Raises
        `SequenceError` if the output has another size along ``output_dim`` than the span."""
        dim = self._output_dim
        fits = -output.dim() <= dim < output.dim() and output.size(dim) == span.length
        if not fits:
            raise SequenceError(
                f"tiled: expected {name_of(self._module)} to return {span.length} positions along dimension {dim} for "
                f"a tile of {span.length}, got the shape {tuple(output.shape)}; stack=True takes outputs of any shape"
            )
        if self._joined is None:
            shape = list(output.shape)
            shape[dim] = sum(one.length for one in self.spans)
            self._joined = output.new_empty(shape)
        self._joined.narrow(dim, span.start, span.length).copy_(output)

    def take_result(self) -> torch.Tensor:
        """Return the joined outputs, and keep no reference to them."""
        joined, self._joined = self._joined, None
        return cast(torch.Tensor, joined)

    def gradient_of(self, span: TileSpan, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the part of the result's ``gradient`` that belongs to the span, a view."""
        return gradient.narrow(self._output_dim, span.start, span.length)


class _StackedWork:
    """The `TileWork` that stacks the outputs of tiles, of any shape, along a new dimension 0.

    ``module``: computes the output of a tile. ``spans``: the tiles, along dimension ``dim`` of every input.
    """

    def __init__(self, module: Computes, spans: Sequence[TileSpan], dim: int) -> None:
        self.dim = dim
        self.spans = spans
        self._module = module
        self._outputs: list[torch.Tensor] = []

    def compute(self, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the module's output for the tiles."""
        return call_on(self._module, tiles)

    def collect(self, span: TileSpan, output: torch.Tensor) -> None:
        """Keep the ``output`` of a tile, of any shape, for the stack; tiles come in order."""
        self._outputs.append(output)

    def take_result(self) -> torch.Tensor:
        """Return the outputs, stacked in the order of the tiles, and keep no reference to them."""
        outputs, self._outputs = self._outputs, []
        return torch.stack(outputs)

    def gradient_of(self, span: TileSpan, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the tile's own slice of the result's ``gradient``, a view."""
        return gradient[self.spans.index(span)]
