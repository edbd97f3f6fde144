"""Slice one flat tensor into many views with one call of torch instead of two for each view."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FlatSlicer:
    """Slices 1-D tensors of ``numel`` elements into views at the same ``places``, each time it is called.

    ``places``: the views' ranges [first element, end), in any order, without overlap. ``shapes``: the views' shapes, in
    the order of ``places``; without them the views are 1-D.
    """

    def __init__(
        self, places: Sequence[tuple[int, int]], numel: int, shapes: Sequence[Sequence[int]] | None = None
    ) -> None:
        self._sizes: list[int] = []
        self._parts = [0] * len(places)
        self._shapes = shapes
        covered = 0
        for number in sorted(range(len(places)), key=places.__getitem__):
            start, end = places[number]
            if start > covered:
                self._sizes.append(start - covered)
            self._parts[number] = len(self._sizes)
            self._sizes.append(end - start)
            covered = end
        if numel > covered:
            self._sizes.append(numel - covered)

    def __call__(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of ``flat``, a 1-D tensor of ``numel`` elements, in the order of ``places``."""
        parts = flat.split_with_sizes(self._sizes)
        views = map(parts.__getitem__, self._parts)
        return list(views if self._shapes is None else map(torch.Tensor.view, views, self._shapes))
