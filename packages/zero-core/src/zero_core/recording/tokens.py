"""Record the number of tokens per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zero_report import RecordWriter

_NAMES = ("input_ids", "decoder_input_ids")
_INTEGERS = (torch.int32, torch.int64)


class TokenCount:
    """Counts the tokens in the arguments of ``module``'s training forward passes, until `close`. Tokens are the
    elements of ``input_ids`` (or ``decoder_input_ids``), else of the first argument, if that is a two-dimensional int32
    or int64 tensor. A rank records its own times ``ranks``: their mean over ranks is the total."""

    def __init__(self, module: nn.Module, ranks: int, writer: RecordWriter) -> None:
        self._ranks = ranks
        self._writer = writer
        self._hook = module.register_forward_pre_hook(self._count, with_kwargs=True)

    def close(self) -> None:
        """Stop counting: remove the hook from the module."""
        self._hook.remove()

    def _count(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add the tokens of one training call of the module to the record's step. The forward pre-hook."""
        if torch.is_grad_enabled():
            named = (kwargs[name] for name in _NAMES if name in kwargs)
            given = next(named, args[0] if args else None)
            if isinstance(given, torch.Tensor) and given.dim() == 2 and given.dtype in _INTEGERS:
                self._writer.count("tokens", given.numel() * self._ranks)
