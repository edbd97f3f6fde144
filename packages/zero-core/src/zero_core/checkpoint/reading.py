"""Read many intervals of a checkpoint at once, into tensors of any dtype and device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_ckpt import Checkpoint, ReadRequest
from zero_ckpt.torch import tensor_buffer, torch_dtype

_STAGED_BYTES = 256 << 20


class BatchedRead:
    """Collects requests to read from ``checkpoint``; `run` performs them with several reads in flight. CPU tensors of
    the stored dtype are read in place, others through staging memory; once that reaches 256 MiB, the requests so far
    are performed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._requests: list[ReadRequest] = []
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._then: list[Callable[[], None]] = []
        self._staged_bytes = 0

    def add(self, name: str, kind: str, offset: int, out: torch.Tensor) -> None:
        """Request to fill the 1-D ``out`` with a parameter's elements from ``offset`` on, cast. ``kind``: param,
        master, a moment."""
        dtype = torch_dtype(self.checkpoint.entry(name, kind).dtype)
        target = out
        if out.device.type != "cpu" or out.dtype != dtype or not out.is_contiguous():
            target = torch.empty(out.numel(), dtype=dtype)
            self._staged.append((out, target))
            self._staged_bytes += target.nbytes
        self._requests.append(ReadRequest(name, kind, offset, tensor_buffer(target)))
        if self._staged_bytes >= _STAGED_BYTES:
            self.run()

    def add_weights(self, name: str, offset: int, out: torch.Tensor) -> None:
        """Request to fill the 1-D ``out`` with a parameter's elements from ``offset`` on, cast. They are read from its
        weight or its master: the one of ``out``'s dtype, else the wider."""
        tensors = self.checkpoint.tensors
        dtypes = {k: torch_dtype(tensors[name, k].dtype) for k in ("param", "master") if (name, k) in tensors}
        exact = [kind for kind, dtype in dtypes.items() if dtype == out.dtype]
        self.add(name, (exact or sorted(dtypes, key=lambda kind: -dtypes[kind].itemsize))[0], offset, out)

    def then(self, action: Callable[[], None]) -> None:
        """Have `run` call ``action`` once all requests added so far are performed."""
        self._then.append(action)

    def run(self) -> None:
        """Perform all requests, then the actions. Raises `zero_ckpt.DamagedError`, naming tensor and file."""
        self.checkpoint.read_many(self._requests)
        for out, target in self._staged:
            with torch.no_grad():
                out.copy_(target.view(out.shape))
        actions, self._then = self._then, []
        self._requests, self._staged, self._staged_bytes = [], [], 0
        for action in actions:
            action()
