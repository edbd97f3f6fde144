"""Activations that wait for backward on the host or in files."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ._activation_tiers import ActivationTier, FiledActivations, HostActivations, TensorForm
from ._copy_streams import compute_device
from .errors import OffloadError
from .swap_paths import NvmePath, swap_paths
from .trace import Trace

__all__ = ["offload_activations"]


class _Saved:
    """A tensor that was moved to the tier; the `_Packed` objects of the operations that saved it share this one.

    ``number``: its position in the order of saving. ``form``: its shape, strides, dtype and device. ``handle``: by
    which the tier finds it. ``started``: what the tier's `start` returned, while the tensor is on its way back.
    ``restored``: refers to the tensor, once it is back, for as long as it lives.
    """

    def __init__(self, number: int, form: TensorForm, handle: Any) -> None:
        self.number = number
        self.form = form
        self.handle = handle
        self.started: Any = None
        self.restored: weakref.ref[torch.Tensor] | None = None


class _Packed:
    """The object that autograd holds in place of a tensor that an operation saved.

    ``moved``: the tensor on the tier, None if it stays. ``stays``: whether it stays; saved-tensor hooks that wrap those
    of this context read it, to store such a tensor elsewhere. ``tensor``: shares the version counter of the saved
    tensor, and its memory if it stays; it has no graph, as one that saves its own result would never be freed.
    """

    def __init__(self, tensor: torch.Tensor, moved: _Saved | None) -> None:
        self.moved = moved
        self.stays = moved is None
        self.tensor = tensor.detach()
        if moved is not None:
            self.tensor.data = self.tensor.new_empty(0)
        self._version = self.tensor._version

    def check(self) -> None:
        """Raise the RuntimeError that torch raises for a saved tensor that was written in place after it was saved;
        torch does not check tensors that go through hooks.
        """
        if self.tensor._version != self._version:
            shape = self.tensor.shape if self.moved is None else self.moved.form.shape
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of {self.tensor.dtype} and shape {list(shape)} is at version {self.tensor._version}; expected "
                f"version {self._version} instead. Write out of place, or after backward."
            )


class offload_activations:
    """A context for the forward pass that moves tensors which autograd saves to a tier and brings them back for
    backward.

    ``keep``: the model, whose parameters and buffers stay where they are, or a function that returns True for a tensor
    that stays. ``tier="host"`` needs an accelerator to be of use: on the CPU everything is on the host already and
    nothing moves. ``tier="nvme"`` writes files under ``path`` (one folder, or several to stripe over); buffers being
    written hold at most ``in_flight_bytes`` of host memory. ``device``: of the tensors, by default the current
    accelerator, else the CPU; others stay, and so do those below ``min_bytes``. When backward uses a saved tensor, the
    next ``prefetch`` ones start on their way back. ``checksums`` are recorded as files are written, ``verify`` compares
    them on every read, ``prefix`` begins the file names, ``engine`` is a ``zero_nvme_aio.Engine`` to share, and
    ``trace`` records the transfers.

    Enter the context again for every forward pass; backward runs outside or inside of it. `close`, or garbage
    collection, removes the files and frees the host memory of free blocks; entering the context after `close` raises
    OffloadError. Works with torch.utils.checkpoint (the inputs of its segments are moved). Backward raises
    RuntimeError, as without this context, for a tensor that was written in place after it was saved. ShardError and its
    subclasses name the tensor, the file and the offset.
    """

    def __init__(
        self,
        keep: nn.Module | Callable[[torch.Tensor], bool],
        *,
        tier: Literal["host", "nvme"] = "host",
        path: NvmePath | None = None,
        device: torch.device | str | None = None,
        min_bytes: int = 1 << 16,
        prefetch: int = 2,
        in_flight_bytes: int = 256 << 20,
        checksums: bool = True,
        verify: bool = False,
        prefix: str = "activations",
        engine: Any = None,
        trace: Trace | None = None,
    ) -> None:
        if tier not in ("host", "nvme"):
            raise ValueError(f"tier: expected 'host' or 'nvme', got {tier!r}")
        if (tier == "nvme") != (path is not None):
            raise ValueError(
                f"path: names the folder of tier='nvme' and only of that, got tier={tier!r}, path={path!r}"
            )
        if prefetch < 0:
            raise ValueError(f"prefetch: expected 0 or more tensors, got {prefetch}")
        self._device = compute_device(device)
        self._tier: ActivationTier
        if path is None:
            self._tier = HostActivations(self._device, trace)
        else:
            self._tier = FiledActivations(
                self._device,
                swap_paths(path),
                in_flight_bytes=in_flight_bytes,
                checksums=checksums,
                verify=verify,
                prefix=prefix,
                engine=engine,
                trace=trace,
            )
        self._moves = path is not None or self._device.type != "cpu"
        self._keep = keep
        self._kept_storages: set[int] = set()
        self._min_bytes = min_bytes
        self._prefetch = prefetch
        self._count = 0
        self._saved: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Saved]]] = {}
        self._contexts: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._finalizer = weakref.finalize(self, self._tier.close)

    def __enter__(self) -> offload_activations:
        """Install the hooks that move saved tensors, note which memory the model's parameters and buffers use now, and
        forget which tensors were saved earlier. Return this object. OffloadError after `close`.
        """
        if not self._finalizer.alive:
            raise OffloadError("offload_activations: it is closed; make a new one for further forward passes")
        if isinstance(self._keep, nn.Module):
            tensors = [*self._keep.parameters(), *self._keep.buffers()]
            self._kept_storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._known.clear()
        context = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        context.__enter__()
        self._contexts.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        """Remove the hooks that the last `__enter__` installed; tensors on the tier stay there for backward. ``error``
        is ignored.
        """
        self._contexts.pop().__exit__(*error)
        self._known.clear()

    def memory(self) -> dict[str, int]:
        """Return the bytes held now: ``host`` (saved tensors and free blocks, or buffers being written to files) and
        ``nvme`` (files). After `close`: the host memory of tensors that a graph still holds, and no files.
        """
        return self._tier.memory()

    def flush(self) -> None:
        """Block until every saved tensor has arrived on its tier; raise the first write that failed, a ShardError."""
        self._tier.flush()

    def close(self) -> None:
        """Free what no graph needs, and remove the files. Waits for copies and writes under way.

        With ``tier="host"`` the memory of a saved tensor is freed with its graph, on which backward can still run. With
        ``tier="nvme"`` backward can no longer run on graphs whose tensors were moved. May be called twice.
        """
        self._finalizer()

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        """Start moving a tensor that autograd saves to the tier, unless it is to stay, or was moved already in this
        forward pass; return what autograd keeps instead of the tensor.
        """
        return _Packed(tensor, self._move(tensor) if self._moves and self._is_movable(tensor) else None)

    def _move(self, tensor: torch.Tensor) -> _Saved:
        """Start moving a tensor to the tier and return the object that represents it there; if the same tensor was
        saved in this forward pass already, return the object made then.
        """
        storage = tensor.untyped_storage()
        place = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (*place, tensor.is_conj(), tensor.is_neg(), tensor._version)
        if key in self._known:
            alive, reference = self._known[key]
            found = reference()
            if found is not None and not alive.expired():  # type: ignore[no-untyped-call]
                return found  # several operations saved the same tensor
        form = TensorForm.of(tensor)
        saved = _Saved(self._count, form, self._tier.save(tensor, form))
        self._count += 1
        self._saved[saved.number] = saved
        self._known[key] = (StorageWeakRef(storage), weakref.ref(saved))  # type: ignore[no-untyped-call]
        weakref.finalize(saved, self._tier.free, saved.handle).atexit = False
        return saved

    def _unpack(self, packed: _Packed) -> torch.Tensor:
        """Return the tensor for which `_pack` returned ``packed``, after waiting for its way back, and start bringing
        back the ones saved just before it, which backward uses next. RuntimeError if the tensor was written in place
        after it was saved.
        """
        packed.check()
        return packed.tensor if packed.moved is None else self._bring_back(packed.moved)

    def _bring_back(self, saved: _Saved) -> torch.Tensor:
        """Return a moved tensor, after waiting for its way back; if it came back earlier and still lives, return that
        object. Otherwise also start bringing back the ``prefetch`` tensors saved just before it.
        """
        tensor = None if saved.restored is None else saved.restored()
        if tensor is None:
            self._start(saved)
            for number in range(saved.number - 1, saved.number - 1 - self._prefetch, -1):
                ahead = self._saved.get(number)
                if ahead is not None and (ahead.restored is None or ahead.restored() is None):
                    self._start(ahead)
            tensor = self._tier.finish(saved.started)
            saved.started = None
            saved.restored = weakref.ref(tensor)
        return tensor

    def _start(self, saved: _Saved) -> None:
        """Start bringing a saved tensor back; do nothing if it is on its way already."""
        if saved.started is None:
            saved.started = self._tier.start(saved.handle, saved.form)

    def _is_movable(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is dense, of class torch.Tensor itself, on the device, of ``min_bytes`` or more, and
        not one that ``keep`` excludes.
        """
        if tensor.device.type != self._device.type or tensor.layout != torch.strided:
            return False
        if tensor.numel() * tensor.element_size() < max(1, self._min_bytes) or type(tensor) is not torch.Tensor:
            return False
        if isinstance(self._keep, nn.Module):
            return tensor.untyped_storage()._cdata not in self._kept_storages
        return not self._keep(tensor)
