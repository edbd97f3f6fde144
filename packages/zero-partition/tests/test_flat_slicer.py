"""Views of many places of a flat tensor."""

from __future__ import annotations

import torch

from zero_partition.flat_slicer import FlatSlicer


def test_views_are_those_of_slices_in_the_order_given() -> None:
    flat = torch.arange(30)
    places, shapes = [(12, 18), (2, 2), (2, 6), (6, 12)], [(2, 3), (0, 4), (4,), (6, 1)]
    views = FlatSlicer(places, 30, shapes)(flat)
    for (start, end), shape, view in zip(places, shapes, views, strict=True):
        assert view.is_set_to(flat[start:end].view(shape))
    assert [v.shape for v in FlatSlicer(places, 30)(flat)] == [(6,), (0,), (4,), (6,)]


def test_views_can_be_written_and_the_flat_tensor_is_one() -> None:
    flat = torch.zeros(6)
    first, second = FlatSlicer([(0, 2), (4, 6)], 6)(flat)
    first.add_(1)
    second.copy_(torch.ones(2, requires_grad=True).detach() * 2)
    assert flat.tolist() == [1, 1, 0, 0, 2, 2]
