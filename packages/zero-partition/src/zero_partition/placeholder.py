"""Placeholders of released parameters: tensors of the parameter's shape over a single NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .errors import ReleasedParameterError
from .host_facts import are_set_to, dtypes, install, versions
from .released import mark_released


class Placeholders:
    """The placeholders of a unit's parameters: zero-stride views of one NaN per parameter.

    ``parameters``: (name, parameter) of one unit; ``dtype`` and ``device`` are the placeholders'. A placeholder has the
    parameter's shape and numel but one element of memory, and reads NaN. Most writes raise in torch (overlapping
    memory); `fill_`, `zero_` and assigning ``.data`` do not, but `verify` finds those.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._dtypes = [dtype] * len(self._parameters)
        self._nans = torch.full((len(self._parameters),), torch.nan, dtype=dtype, device=device)
        self._views = [self._nans[i].expand(p.shape) for i, p in enumerate(self._parameters)]

    def tensors(self) -> list[torch.Tensor]:
        """Return the memory of all placeholders, in a list: one 1-D tensor with a NaN per parameter."""
        return [self._nans]

    @property
    def views(self) -> list[torch.Tensor]:
        """Return the placeholder of each parameter, in order: the tensors that `install` puts into the parameters. The
        list is this object's own.
        """
        return self._views

    def install(self) -> None:
        """Replace every parameter's values by its placeholder, and mark the parameters as released."""
        with torch._C.DisableTorchFunctionSubclass():
            install(self._parameters, self._views)
            mark_released(self._parameters)

    def installed(self) -> bool:
        """Return whether every parameter is its placeholder now, with the placeholder's dtype."""
        with torch._C.DisableTorchFunctionSubclass():
            return are_set_to(self._parameters, self._views) and dtypes(self._parameters) == self._dtypes

    def verify(self, known_versions: Sequence[int] | None = None) -> None:
        """Raise `ReleasedParameterError`, naming the first such parameter, if a released parameter was replaced or
        written.

        ``known_versions``: the parameters' version counters at the last check. If given, values on an accelerator, for
        which the host would have to wait, are read only if a counter has changed; `any_written` finds other writes
        later. None: values are always read.
        """
        if not self.installed():
            raise self._replaced_error()
        if known_versions is None or self._nans.device.type == "cpu" or not self._have_versions(known_versions):
            self.verify_values()

    def verify_values(self) -> None:
        """Raise `ReleasedParameterError`, naming the first such parameter, if a placeholder's value is not NaN any
        more. Waits for the device."""
        released = torch.isnan(self._nans)  # once: what still writes may make a second look another
        if not bool(released.all()):
            index = int(released.logical_not_().nonzero()[0, 0])
            raise ReleasedParameterError(
                f"parameter '{self._names[index]}' was written while it was released; the value is lost. "
                "Change it inside `gathered([...], modifier_rank=0)`."
            )

    def _have_versions(self, known_versions: Sequence[int]) -> bool:
        """Return whether the parameters' version counters equal ``known_versions``; True for inference tensors, which
        have none."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._parameters[0].is_inference() or versions(self._parameters) == known_versions

    def _replaced_error(self) -> ReleasedParameterError:
        """Return the error for the first parameter that no longer is its placeholder; there must be one."""
        with torch._C.DisableTorchFunctionSubclass():
            pairs = enumerate(zip(self._parameters, self._views, strict=True))
            number = next(n for n, (p, view) in pairs if not p.is_set_to(view) or p.dtype is not view.dtype)
            parameter, view = self._parameters[number], self._views[number]
            return ReleasedParameterError(
                f"parameter '{self._names[number]}' was replaced while it was released: expected its placeholder of "
                f"shape {tuple(view.shape)} and dtype {view.dtype}, got a tensor of shape {tuple(parameter.shape)} and "
                f"dtype {parameter.dtype}. Change it inside `gathered([...], modifier_rank=0)`."
            )


def any_written(memory: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether any value in ``memory`` (1-D, from `Placeholders.tensors`; not empty) is not NaN.

    The result is a bool of 0 dimensions on their device; nothing waits for it.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for nans in memory:
        by_dtype.setdefault(nans.dtype, []).append(nans)
    written = [torch.cat(alike).isnan().logical_not_().any() for alike in by_dtype.values()]
    return written[0] if len(written) == 1 else torch.stack(written).any()
