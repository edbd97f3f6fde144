"""A source whose tensors are put together from runs of another's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..types import ITEMSIZE
from .deepspeed_layout import ParameterRun
from .dtypes import convert_dtype
from .sources import Source, SourceTensor

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class ComposedTensor:
    """A flat tensor of `numel` elements: zeros, apart from its runs, whose values are those of `kinds[name]`."""

    numel: int
    dtype: str
    runs: tuple[ParameterRun, ...]
    kinds: Mapping[str, str]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, (`numel`,)."""
        return (self.numel,)


class ComposedSource:
    """A `Source` with the tensors of `source` and, beside them, `composed` and `given` ones, by (name, kind).

    Composed tensors are put together from runs of the source's tensors. Given tensors have their bytes in memory.
    Values are rounded to the dtype of the composed tensor. A run is zeros if its parameter has no tensor of the kind.
    """

    def __init__(
        self,
        source: Source,
        composed: Mapping[tuple[str, str], ComposedTensor],
        given: Mapping[tuple[str, str], GivenTensor],
    ) -> None:
        self._source, self._composed, self._given = source, composed, given
        self.tensors: Mapping[tuple[str, str], SourceTensor] = {**source.tensors, **composed, **given}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Return the tied names of the other source, each with the name that is stored; the properties below are that
        source's too.
        """
        return self._source.aliases

    @property
    def step(self) -> int:
        """Return the optimizer steps taken."""
        return self._source.step

    @property
    def client_state(self) -> Any:
        """Return the client state."""
        return self._source.client_state

    @property
    def frozen(self) -> Collection[str] | None:
        """Return the names of parameters that are not trained."""
        return self._source.frozen

    @property
    def fingerprint(self) -> str:
        """Return text that differs when the other source's contents do."""
        return self._source.fingerprint

    def cuts(self, name: str, kind: str) -> Sequence[int]:
        """Return the elements at which reads of a tensor should begin to be cheap (see `Source.cuts`); an empty list
        for composed tensors."""
        if (name, kind) in self._composed or (name, kind) in self._given:
            return ()
        return self._source.cuts(name, kind)

    def read_into(self, name: str, kind: str, offset: int, out: Buffer) -> None:
        """Fill `out` with a tensor's elements from flat element `offset` on. Raises CheckpointError when they cannot be
        read."""
        view = memoryview(out).cast("B")
        if (name, kind) in self._given:
            begin = offset * ITEMSIZE[self._given[name, kind].dtype]
            view[:] = self._given[name, kind].data[begin : begin + view.nbytes]
        elif (name, kind) in self._composed:
            self._compose(self._composed[name, kind], offset, view)
        else:
            self._source.read_into(name, kind, offset, view)

    def _compose(self, tensor: ComposedTensor, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a composed tensor's elements from element `offset` on."""
        size = ITEMSIZE[tensor.dtype]
        end = offset + view.nbytes // size
        view[:] = bytes(view.nbytes)
        for run in tensor.runs:
            low, high = max(offset, run.begin), min(end, run.begin + run.length)
            kind = tensor.kinds.get(run.name)
            if low >= high or kind is None:
                continue
            stored = self._source.tensors[run.name, kind].dtype
            raw = bytearray((high - low) * ITEMSIZE[stored])
            self._source.read_into(run.name, kind, run.offset + low - run.begin, raw)
            view[(low - offset) * size : (high - offset) * size] = convert_dtype(raw, stored, tensor.dtype)


@dataclass(frozen=True)
class GivenTensor:
    """A tensor in memory; `data` are its elements' bytes in order."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes
