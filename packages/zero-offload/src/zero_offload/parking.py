"""Move tensors to a store for a while and free their memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from . import malloc
from .errors import ShardError
from .host import HostStore
from .nvme import NvmeStore

__all__ = ["park", "unpark"]


def park(tensors: Mapping[str, torch.Tensor], store: HostStore | NvmeStore) -> int:
    """Copy tensors to a store and free their memory, also for other processes; return the bytes freed.

    The tensors stay the same objects, with their shapes; their content must not be touched until `unpark` (on an
    accelerator that is an illegal access, on the CPU a crash). Tensors that share memory are parked together; naming
    one of them suffices. Tensors already parked are left alone. ``tensors``: a model's ``state_dict()``, an optimizer's
    states by name, gradients.

    ValueError names a tensor whose memory torch cannot resize (made from NumPy, a file or shared memory).
    """
    storages = _storages(tensors)
    for name, storage in storages.items():
        if storage.nbytes() and not storage.resizable():
            raise ValueError(f"'{name}': its memory belongs to somebody else and cannot be freed; clone() it first")
    freed = 0
    for name, storage in storages.items():
        nbytes = storage.nbytes()
        if nbytes:
            store.put(name, torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            freed += nbytes
    store.flush()
    for storage in storages.values():
        storage.resize_(0)
    for kind in {storage.device.type for storage in storages.values()}:
        _return_free_memory(kind)
    return freed


def _return_free_memory(kind: str) -> None:
    """Return unused memory that torch's allocator caches for one kind of device ("cpu", "cuda") to the system."""
    if kind == "cpu":
        malloc.return_free_memory()
    else:
        torch.get_device_module(kind).empty_cache()


def unpark(tensors: Mapping[str, torch.Tensor], store: HostStore | NvmeStore) -> None:
    """Restore the tensors parked by `park` under the same names, and remove them from the store. Tensors that are not
    parked are left alone.

    ShardError names a tensor whose memory was freed and that is not in this store.
    """
    storages = {name: storage for name, storage in _storages(tensors).items() if not storage.nbytes()}
    parked = [name for name in storages if name in store]
    for number, (name, storage) in enumerate(storages.items()):
        tensor = tensors[name]
        store.prefetch([ahead for ahead in parked[number : number + 2] if ahead in store])
        if name not in store:
            if tensor.numel():
                raise ShardError(f"'{name}' is not parked in this store", tensor=name)
            continue
        content = store.acquire(name)
        storage.resize_(content.numel())
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(content)
        store.release(name, dirty=False)
        store.discard(name)


def _storages(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.UntypedStorage]:
    """Return each storage of these tensors once, under the name of the first tensor that uses it."""
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, (name, storage))
    return dict(found.values())
