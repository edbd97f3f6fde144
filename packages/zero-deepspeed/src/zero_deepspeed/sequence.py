"""DeepSpeed's names for Ulysses, over `zero_sequence`: spread a model of Transformers, and its batches. A spread model
computes on this rank's shard of sequences that several ranks share, and its attention on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from zero_core.errors import UsageError
from zero_sequence import SequenceGroups, SequenceLoader, Ulysses

from .communication import init_distributed
from .groups import open_sequence_groups, register_mpu, registered_mpu

_SPREAD: WeakKeyDictionary[nn.Module, Ulysses] = WeakKeyDictionary()


class UlyssesMpu:
    """The mpu that `UlyssesSPAttentionHF.register_with_transformers` returns: it has the methods of `SequenceGroups`,
    and spreads the model that `initialize` gets.

    ``groups``, also an attribute: the groups whose methods it has. ``attention``: the name in Transformers of the
    attention to compute; None for the model's. ``disable_in_eval``: a model in eval mode computes what it is given,
    without its peers.
    """

    def __init__(self, groups: SequenceGroups, attention: str | None, disable_in_eval: bool) -> None:
        self.groups = groups
        self._attention = attention
        self._disable_in_eval = disable_in_eval

    def __getattr__(self, name: str) -> Any:
        """Return the attribute ``name`` of ``groups``. Raises AttributeError for a name that begins with "_" or that
        they do not have."""
        if name.startswith("_"):  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.groups, name)

    def spread(self, model: nn.Module) -> None:
        """Spread the models of Transformers in ``model``, in place, after undoing an earlier spread of it, and set its
        attention if one was chosen. Raises `SequenceError` for a model that cannot be spread.
        """
        known = _SPREAD.pop(model, None)
        if known is not None:
            known.detach()
        if self._attention is not None:
            model.set_attn_implementation(self._attention)  # type: ignore[operator]
        _SPREAD[model] = Ulysses(model, self.groups, disable_in_eval=self._disable_in_eval)


class UlyssesSPAttentionHF:
    """Spreads models of Transformers over ranks that share sequences, by `register_with_transformers`. Named as
    DeepSpeed's; there is nothing to construct.
    """

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: nn.Module | str,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
    ) -> UlyssesMpu | None:
        """Return the mpu for `initialize` under which every ``sequence_parallel_size`` consecutive ranks share a
        sequence; None for 1. Collective.

        ``model_name_or_path``: a model of Transformers, which is spread at once; for a name, `initialize` spreads the
        model that it gets. ``core_attn_implementation``: the attention to compute; by default the model's.
        ``disable_in_eval``: a model in eval mode computes what it is given, without its peers. ``micro_batch_size``
        and the lengths are not read: batches of any size and length will do. Raises `SequenceError` for a model or a
        size that does not fit.
        """
        if sequence_parallel_size == 1:
            return None
        init_distributed()
        mpu = UlyssesMpu(open_sequence_groups(sequence_parallel_size), core_attn_implementation, disable_in_eval)
        if isinstance(model_name_or_path, nn.Module):
            mpu.spread(model_name_or_path)
        return mpu


class UlyssesSPDataLoaderAdapter(SequenceLoader):
    """Yields this rank's shards of the batches of ``dl``, on ``device``: `SequenceLoader` with source "each".

    ``sp_rank``, ``sp_group``, ``sp_world_size``: of the ranks that share a sequence, as the mpu has them. Raises
    `UsageError` for others, and before there is an mpu.
    """

    def __init__(
        self,
        dl: Iterable[Any],
        sp_rank: int,
        sp_group: dist.ProcessGroup | None,
        sp_world_size: int,
        device: torch.device | str | None = None,
    ) -> None:
        groups = registered_mpu()
        if not isinstance(groups, SequenceGroups):
            raise UsageError("UlyssesSPDataLoaderAdapter: call UlyssesSPAttentionHF.register_with_transformers first")
        if (groups.rank, groups.size) != (sp_rank, sp_world_size):
            raise UsageError(
                f"UlyssesSPDataLoaderAdapter: expected rank {groups.rank} of {groups.size}, as the mpu has them, got "
                f"rank {sp_rank} of {sp_world_size}"
            )
        super().__init__(dl, groups, device=device)
        self.dl = dl


def mpu_for(given: Any, model: Any) -> Any:
    """Return the mpu to use for the argument ``mpu`` of `initialize`, ``given``, and register it for `groups.py`; a
    `UlyssesMpu` also spreads ``model`` unless that is done already.

    ``given``: an mpu; or None, for which None is returned and nothing is registered; or the module `parallel_state_sp`,
    which stands for the groups that it opened. Raises `SequenceError` for a model that cannot be spread.
    """
    mpu = registered_mpu() if hasattr(given, "initialize_sequence_parallel") else given
    if isinstance(mpu, UlyssesMpu) and isinstance(model, nn.Module) and model not in _SPREAD:
        mpu.spread(model)
    if mpu is not None:
        register_mpu(mpu.groups if isinstance(mpu, UlyssesMpu) else mpu)
    return mpu


def sequence_size(mpu: Any) -> int:
    """Return the number of ranks that share a sequence under ``mpu``; 1 if that is None or has no method for it."""
    return int(getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)())
