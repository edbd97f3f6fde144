"""Descriptions of a user's buffers as memory that the engine can use: a flat memoryview of bytes, or a tuple (address,
bytes, owner to be kept alive). torch and NumPy are recognised but never imported.
"""

from __future__ import annotations

import sys

from . import _native
from .errors import InvalidBufferError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeAlias

    # What the native engine takes: a flat memoryview of bytes, or (address, nbytes, owner).
    Item: TypeAlias = Any

_OBJECTS = "expected plain numbers, got an array of Python objects, whose bytes are addresses"
_CPU, _CUDA_HOST, _ROCM_HOST = 1, 3, 11


def describe_all(buffers: Any, writable: bool) -> list[Item]:
    """Return the description of each buffer; `buffers` is one buffer, or a list or tuple of them. `writable`: the
    engine will write into them. InvalidBufferError says why a buffer cannot be used.
    """
    if isinstance(buffers, (list, tuple)):
        return [describe(buffer, writable) for buffer in buffers]
    return [describe(buffers, writable)]


def describe(buffer: Any, writable: bool) -> Item:
    """Return the memory of one C-contiguous host buffer (bytes-like, NumPy, torch or DLPack), without a copy.

    The description keeps the buffer alive; it does not keep a tensor's storage from being resized (see `Lent`).
    InvalidBufferError says why memory cannot be used; with `writable` that includes read-only memory.
    """
    if is_tensor(buffer):
        return _from_tensor(buffer)
    try:
        view = memoryview(buffer)
    except TypeError:
        return _from_interface(buffer, writable)
    except (ValueError, BufferError):
        # NumPy does not export element types that the buffer protocol has no letter for (bfloat16, datetime64).
        return _from_interface(buffer, writable)
    if "O" in view.format:
        raise InvalidBufferError(_OBJECTS)
    _require_usable(view.c_contiguous, writable and view.readonly, buffer)
    try:
        return _as_flat_bytes(view)
    except (TypeError, ValueError, NotImplementedError):
        return _from_interface(buffer, writable)


def nbytes_of(item: Item) -> int:
    """Return the bytes of a described buffer."""
    return item[1] if isinstance(item, tuple) else item.nbytes  # type: ignore[no-any-return]


def slice_item(item: Item, begin: int, end: int) -> Item:
    """Return bytes [begin, end) of a described buffer as a description, without a copy."""
    if isinstance(item, tuple):
        address, _, owner = item
        return (address + begin, end - begin, owner)
    return item[begin:end]


def slice_items(items: Sequence[Item], begin: int, end: int) -> list[Item]:
    """Return bytes [begin, end) of described buffers laid end to end, as descriptions, without a copy; empty parts are
    left out.
    """
    out = []
    position = 0
    for item in items:
        size = nbytes_of(item)
        low, high = max(begin - position, 0), min(end - position, size)
        if low < high:
            out.append(slice_item(item, low, high))
        position += size
    return out


def checksum_of(item: Item) -> int:
    """Return the xxh3_64 of a described buffer's bytes."""
    if isinstance(item, tuple):
        return _native.checksum_at(item[0], item[1])
    return _native.checksum(item)


def is_tensor(buffer: Any) -> bool:
    """Return whether this is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(buffer, torch.Tensor)


def is_device_tensor(buffer: Any) -> bool:
    """Return whether this is a torch tensor in an accelerator's memory."""
    return is_tensor(buffer) and buffer.device.type not in ("cpu", "meta")


class Lent:
    """Remembers the address of a torch tensor's storage while a request uses it, since the storage could be resized
    meanwhile.
    """

    __slots__ = ("_address", "_tensor")

    def __init__(self, tensor: Any) -> None:
        self._tensor, self._address = tensor, tensor.untyped_storage().data_ptr()

    def require_unchanged(self, kind: str, path: str) -> None:
        """Raise InvalidBufferError when the storage was resized or replaced since this was made. `kind` ("read" or
        "write") and `path` of the request are for the message.
        """
        storage = self._tensor.untyped_storage()
        needed = (self._tensor.storage_offset() + self._tensor.numel()) * self._tensor.element_size()
        if storage.data_ptr() != self._address or storage.nbytes() < needed:
            raise InvalidBufferError(
                f"the storage of a tensor of shape {tuple(self._tensor.shape)} was resized or replaced during the "
                f"{kind} of '{path}', so what was moved is not known; wait for the request before the tensor's memory "
                "is given back"
            )


def lent(items: Sequence[Item]) -> tuple[Lent, ...]:
    """Return a `Lent` for each of these described buffers that is a torch tensor whose storage can be resized; the
    request calls their `require_unchanged` when it ends.
    """
    return tuple(
        Lent(item[2])
        for item in items
        if isinstance(item, tuple) and is_tensor(item[2]) and item[2].untyped_storage().resizable()
    )


def _as_flat_bytes(view: memoryview) -> memoryview:
    """Return a contiguous view of any format as a one-dimensional view of the same bytes; a new empty one if it has no
    bytes.
    """
    if view.nbytes == 0:
        return memoryview(bytearray())
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _require_usable(contiguous: bool, read_only_target: bool, buffer: Any) -> None:
    """Raise InvalidBufferError if a buffer's memory is not `contiguous`, or if it is a `read_only_target`: read-only
    memory that is to be written into. The message names the type of `buffer`.
    """
    kind = type(buffer).__name__
    if not contiguous:
        message = f"expected C-contiguous memory, got a strided {kind}; copy it first (.contiguous())"
        raise InvalidBufferError(message)
    if read_only_target:
        raise InvalidBufferError(f"expected writable memory to read into, got a read-only {kind}")


def _from_tensor(tensor: Any) -> Item:
    """Return the memory of a torch tensor, as (address, bytes, tensor); InvalidBufferError unless it is dense,
    contiguous, in host memory, of plain values, and its storage holds all of it.
    """
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise InvalidBufferError(f"expected a dense tensor, got layout {tensor.layout}")
    if tensor.device.type != "cpu":
        raise InvalidBufferError(f"expected a tensor in host memory, got one on '{tensor.device}'")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidBufferError(
            "expected plain memory, got a tensor with a lazy conjugate or negation; call .resolve_conj()"
        )
    _require_usable(tensor.is_contiguous(), False, tensor)
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > 0 and tensor.untyped_storage().nbytes() < nbytes:
        raise InvalidBufferError(
            f"the tensor claims {nbytes} bytes but its storage holds {tensor.untyped_storage().nbytes()}; "
            "was it released (resized to nothing) meanwhile?"
        )
    return (tensor.data_ptr(), nbytes, tensor)


def _from_interface(buffer: Any, writable: bool) -> Item:
    """Return the memory of a buffer through NumPy's array interface or DLPack, as (address, bytes, owner).
    InvalidBufferError if it offers neither, is strided, holds Python objects, or, with `writable`, is read-only.
    """
    interface = getattr(buffer, "__array_interface__", None)
    if interface is not None:
        if interface["typestr"][1] == "O" or getattr(getattr(buffer, "dtype", None), "hasobject", False):
            raise InvalidBufferError(_OBJECTS)
        address, read_only = interface["data"]
        _require_usable(interface.get("strides") is None, writable and read_only, buffer)
        return (address, buffer.nbytes, buffer)
    if hasattr(buffer, "__dlpack__"):
        return _from_dlpack(buffer, writable)
    raise InvalidBufferError(
        f"expected a contiguous buffer (bytes-like, NumPy, torch or DLPack), got {type(buffer).__name__}"
    )


def _from_dlpack(buffer: Any, writable: bool) -> Item:
    """Return the memory of a buffer through DLPack, as (address, bytes, capsule that keeps it alive).
    InvalidBufferError if it is strided, not in host memory, or, with `writable`, read-only.
    """
    device = buffer.__dlpack_device__()[0]
    if device not in (_CPU, _CUDA_HOST, _ROCM_HOST):
        raise InvalidBufferError(f"expected DLPack memory of the host, got device type {int(device)}")
    try:
        capsule = buffer.__dlpack__(max_version=(1, 0))
    except TypeError:  # producers older than DLPack 1.0 know no such argument
        capsule = buffer.__dlpack__()
    address, nbytes, contiguous, read_only = _native.describe_dlpack(capsule)
    _require_usable(contiguous, writable and read_only, buffer)
    return (address, nbytes, capsule)


def copy_into(item: Item, source: memoryview) -> None:
    """Copy the bytes of `source` into a described buffer of the same size, which must be writable."""
    if isinstance(item, tuple):
        import ctypes

        target = (ctypes.c_char * item[1]).from_address(item[0])
        memoryview(target).cast("B")[:] = source
        return
    item[:] = source
