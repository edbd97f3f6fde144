"""Counts the memory that tensors hold, by asking Python and autograd for every live storage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def counting_new_storages() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the bytes of all storages that tensors made since then stand on.

    Counted are the storages of every tensor that Python's collector knows, and of their gradients; each once. What was
    there before is put out of the collector's sight, which also makes counting fast.
    """
    gc.collect()
    gc.freeze()
    try:
        yield _live_bytes
    finally:
        gc.unfreeze()


def _live_bytes() -> int:
    gc.collect()
    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # a count of memory is none of the reads of .grad that are refused
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and not thing.is_meta:
                for tensor in (thing, thing.grad if thing.is_leaf else None):
                    if tensor is not None and (nbytes := tensor.untyped_storage().nbytes()):
                        found[tensor.untyped_storage().data_ptr()] = nbytes
    return sum(found.values())
