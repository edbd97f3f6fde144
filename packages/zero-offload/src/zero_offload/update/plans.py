"""Plans of an update: shards of weights and the fragments in them. No memory, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ..errors import ShardError

__all__ = [
    "ExpectingWeights",
    "FragmentPlan",
    "KERNEL_DTYPES",
    "ShardPlan",
    "Weights",
    "check_plans",
    "check_shard_tensor",
    "wide_dtype",
]

KERNEL_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}


@dataclass(frozen=True)
class FragmentPlan:
    """Elements [start, start + numel) of a shard: the part of one parameter in it, updated with the options of one
    parameter group.

    ``name`` is unique over all shards; files have extents ``<name>/<kind>``. ``group``: the number of the parameter
    group. ``element_offset``: the global position of its first element, which anchors random numbers and 8-bit blocks,
    so that results are the same on every tier and for every way of cutting; a multiple of 256 where states are 8-bit.
    """

    name: str
    start: int
    numel: int
    group: int
    element_offset: int = 0


@dataclass(frozen=True)
class ShardPlan:
    """A shard of ``numel`` weights of one dtype, and the fragments in it, in order; elements outside of these are not
    updated.

    The last ``padding`` elements belong to no fragment and may be set to zero.

    ``dtype``: of the weights that forward reads. ``grad_dtype``: of the gradients that are handed over. ``in_place``:
    the weights are lent in host memory and in the dtype of the update (float32, or float64 for float64), so they are
    updated in place; otherwise every fragment has a ``master`` on the tier. ``read_at_once``: the weights are asked for
    as soon as a step has returned, so updating them later gains nothing.
    """

    name: str
    numel: int
    dtype: torch.dtype
    grad_dtype: torch.dtype
    fragments: tuple[FragmentPlan, ...]
    in_place: bool = False
    padding: int = 0
    read_at_once: bool = False


class Weights(Protocol):
    """Lends the shards that forward reads; a step borrows each at most once. `HostStore` and `NvmeStore` satisfy it."""

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """Return the shard (1-D) in host memory or on the accelerator, writable until `give_back`.

        With ``fresh`` the borrower writes all of it, so its content may be arbitrary.
        """

    def give_back(self, name: str, *, dirty: bool) -> None:
        """End one `borrow`; ``dirty``: the borrower wrote the shard, which must be kept. The borrower does not use the
        tensor any more.
        """


@runtime_checkable
class ExpectingWeights(Weights, Protocol):
    """Weights that can be prefetched, as those of `NvmeStore`."""

    def expect(self, names: Sequence[str]) -> None:
        """Start bringing the shards with these names, which will be borrowed soon, in this order. A hint, which must
        not block.
        """


@runtime_checkable
class BoundedWeights(Weights, Protocol):
    """Weights of which only a limited number of shards can be borrowed at a time, as those of `NvmeStore`."""

    @property
    def lends_at_most(self) -> int:
        """Return how many shards can be borrowed at a time."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which weights of ``dtype`` are updated: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_shard_tensor(tensor: torch.Tensor, shard: ShardPlan, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Return ``tensor`` if it is 1-D, contiguous, of the shard's size and of ``dtype``; else ShardError, naming the
    shard. ``what`` names the tensor in the message.
    """
    if tensor.shape != (shard.numel,) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ShardError(
            f"'{shard.name}': expected {what} of shape ({shard.numel},), {dtype}, contiguous; "
            f"got {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}",
            tensor=shard.name,
        )
    return tensor


def check_plans(shards: Sequence[ShardPlan], groups: int) -> None:
    """Raise ValueError or TypeError, naming the shard or the fragment, for plans that cannot be updated.

    Refused are names given twice, dtypes without a kernel, fragments that overlap, are out of order or reach beyond
    their shard, groups not below ``groups``, the number of parameter groups, and padding that reaches into a fragment.
    """
    shard_names: set[str] = set()
    names: set[str] = set()
    for shard in shards:
        if shard.name in shard_names:
            raise ValueError(f"'{shard.name}': two parameters or shards have this name; give each its own")
        shard_names.add(shard.name)
        _check_dtypes(shard)
        end = 0
        for fragment in shard.fragments:
            if fragment.name in names:
                raise ValueError(f"'{fragment.name}': two parameters or shards have this name; give each its own")
            names.add(fragment.name)
            if fragment.start < end or fragment.start + fragment.numel > shard.numel or fragment.numel < 0:
                raise ValueError(
                    f"'{fragment.name}': expected elements between {end} and {shard.numel} of shard '{shard.name}', "
                    f"got {fragment.start} to {fragment.start + fragment.numel}"
                )
            end = fragment.start + fragment.numel
            if not 0 <= fragment.group < groups:
                raise ValueError(f"'{fragment.name}': expected a group below {groups}, got {fragment.group}")
        if not 0 <= shard.padding <= shard.numel - end:
            raise ValueError(
                f"'{shard.name}': expected at most {shard.numel - end} elements of padding, got {shard.padding}"
            )


def _check_dtypes(shard: ShardPlan) -> None:
    """Raise TypeError, naming the shard, for a dtype without a kernel, for gradients that are float64 where the weights
    are not, or the reverse, and for 16-bit weights that are to be updated in place.
    """
    wide = wide_dtype(shard.dtype)
    if shard.dtype not in KERNEL_DTYPES:
        raise TypeError(f"'{shard.name}': expected float32, bfloat16, float16 or float64, got {shard.dtype}")
    if shard.grad_dtype not in KERNEL_DTYPES or wide_dtype(shard.grad_dtype) != wide:
        raise TypeError(f"'{shard.name}': gradients of {shard.grad_dtype} do not fit weights of {shard.dtype}")
    if shard.in_place and shard.dtype != wide:
        raise TypeError(f"'{shard.name}': only float32 and float64 weights are updated in place, got {shard.dtype}")
