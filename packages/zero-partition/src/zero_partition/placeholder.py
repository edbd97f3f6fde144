"""Placeholders of released parameters: the true shape over a single NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .errors import ReleasedParameterError
from .host_facts import are_set_to, dtypes, install
from .released import mark_released


class Placeholders:
    """Zero-stride views of one NaN per parameter, and the proof that nobody wrote them.

    ``parameters``: (name, parameter) of one unit, all of one dtype and device. Shape, numel and iteration over a
    placeholder are truthful, memory is one element; reading gives NaN; most writes raise in torch (overlapping
    memory), `fill_` and `zero_` do not, and neither does assigning ``.data``: `verify` finds those.
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
        """The NaNs, one tensor of as many elements as there are parameters."""
        return [self._nans]

    @property
    def views(self) -> list[torch.Tensor]:
        """The views that the parameters are while they are released."""
        return self._views

    def install(self) -> None:
        """Make every parameter of the unit its placeholder."""
        with torch._C.DisableTorchFunctionSubclass():
            install(self._parameters, self._views)
            mark_released(self._parameters)

    def installed(self) -> bool:
        """Return True when every parameter is its placeholder."""
        with torch._C.DisableTorchFunctionSubclass():
            return are_set_to(self._parameters, self._views) and dtypes(self._parameters) == self._dtypes

    def verify(self) -> None:
        """Raise `ReleasedParameterError` by name when a parameter is not its untouched placeholder any more."""
        if not self.installed():
            raise self._replaced()
        if not bool(torch.isnan(self._nans).all()):
            index = int(torch.isnan(self._nans).logical_not().nonzero()[0, 0])
            raise ReleasedParameterError(
                f"parameter '{self._names[index]}' was written while it was released; the value is lost. "
                "Change it inside `gathered([...], modifier_rank=0)`."
            )

    def _replaced(self) -> ReleasedParameterError:
        with torch._C.DisableTorchFunctionSubclass():
            pairs = enumerate(zip(self._parameters, self._views, strict=True))
            number = next(n for n, (p, view) in pairs if not p.is_set_to(view) or p.dtype is not view.dtype)
            parameter, view = self._parameters[number], self._views[number]
            return ReleasedParameterError(
                f"parameter '{self._names[number]}' was replaced while it was released: expected its placeholder of "
                f"shape {tuple(view.shape)} and dtype {view.dtype}, got a tensor of shape {tuple(parameter.shape)} and "
                f"dtype {parameter.dtype}. Change it inside `gathered([...], modifier_rank=0)`."
            )
