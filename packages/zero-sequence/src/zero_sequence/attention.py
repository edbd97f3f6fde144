"""Attention over sequence shards: exchange heads, compute the full sequence, exchange back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import pad

from zero_comm import NO_STEP, Group, Tag

from .errors import SequenceError
from .exchange import heads_to_sequence, sequence_to_heads
from .heads import HeadPlan, plan_heads
from .inputs import SequenceInputs
from .interfaces import Attention, eager_attention
from .masks import check_mask

AttentionDropout = Literal["refuse", "independent"]
_SEEDS = 2**62
# Arguments of an attention function that describe the full sequence, or nothing of the sequence.
_UNSHARDED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids"}
# Arguments that models hand down with all others, and that only their loss reads.
_OF_THE_LOSS = {"labels", "shift_labels", "num_items_in_batch"}


@dataclass(frozen=True)
class AttentionOptions:
    """The options of attention over sequence shards.

    ``disable_in_eval``: in eval mode a model computes what it is given, without its peers. ``attention_dropout``:
    "refuse" raises for dropout inside attention; "independent" draws another mask on every rank, which is as good a
    draw as one process makes, but not the same. ``pad_heads``: where the ranks do not divide the query heads, heads of
    zeros are added; without it such a model is refused.
    """

    disable_in_eval: bool = False
    attention_dropout: AttentionDropout = "refuse"
    pad_heads: bool = False


class UlyssesAttention:
    """The attention function that is registered with Transformers in place of the core attention, which is the model's
    own. ``name``: of the core attention. ``core``: its function; None for the eager one, which each model brings.

    Queries, keys and values of all heads over this rank's shard of the sequence are exchanged for those of some heads
    over the full sequence; ``core`` computes these; the outputs are exchanged back. That is one exchange there, where
    the head sizes are equal, and one back; as many in backward. ``group``: the N ranks that share the sequence.
    ``inputs``: of the forward pass that runs. ``options``: how heads that do not divide, and dropout, are handled. In
    shapes S is the length of the full sequence; a "place" text names an attention module in errors and in the ledger.
    """

    def __init__(
        self, name: str, core: Attention | None, group: Group, inputs: SequenceInputs, options: AttentionOptions
    ) -> None:
        self._name = name
        self._core = core
        self._group = group
        self._inputs = inputs
        self._options = options

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (attention output (batch, S/N, heads, size), None in place of the attention weights) for this rank's
        ``query``, ``key`` and ``value`` (batch, heads, S/N, size).

        ``module``: the attention module that calls. ``attention_mask``: over the full sequence, or None. ``named``:
        Transformers' further arguments, handed on to the core attention. Collective; but in eval mode, with
        ``disable_in_eval``, it only calls the core attention. Raises `SequenceError` for what cannot be spread.
        """
        core = self._core if self._core is not None else eager_attention(module)
        if self._options.disable_in_eval and not module.training:
            return core(module, query, key, value, attention_mask, **named)
        named = {name: given for name, given in named.items() if name not in _OF_THE_LOSS}
        place = _place_text(module)
        full_length = query.shape[2] * self._group.world_size
        self._check_call(place, module, query, key, named)
        check_mask(attention_mask, full_length, place)
        plan = plan_heads(query.shape[1], key.shape[1], self._group.world_size, pad=self._options.pad_heads)
        if isinstance(named.get("position_ids"), torch.Tensor):
            named["position_ids"] = self._inputs.full_positions(named["position_ids"])
        full = self._exchange_heads(plan, query, key, value, place)
        with self._rank_dropout(named.get("dropout", 0.0), query.device):
            seen = _LocalModule(module, full[0].shape[1] // full[1].shape[1], self._name)
            output, _ = core(seen, *full, attention_mask, **named)
        back = heads_to_sequence(output, self._group, Tag("exchange", f"{place}: outputs", NO_STEP))
        self._inputs.attention_calls += 1
        return back[:, :, : query.shape[1]] if plan.padding else back, None

    def _exchange_heads(
        self, plan: HeadPlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, place: str
    ) -> tuple[torch.Tensor, ...]:
        """Return (queries, keys, values) of this rank's heads over the full sequence, each (batch, this rank's heads,
        S, size), for those of all heads over this rank's shard. ``plan``: which heads each rank computes. ``place``:
        the module's name, for the ledger. Collective."""
        if plan.padding:
            query = pad(query, (0, 0, 0, 0, 0, plan.padding))
        sent = [query, _heads_in_rank_order(plan, key), _heads_in_rank_order(plan, value)]
        here = sequence_to_heads(sent, self._group, Tag("exchange", f"{place}: queries, keys, values", NO_STEP))
        if plan.places is None:
            return tuple(here)
        mine = torch.tensor(plan.places[self._group.rank], device=query.device)
        return here[0], here[1].index_select(1, mine), here[2].index_select(1, mine)

    def _check_call(
        self, place: str, module: nn.Module, query: torch.Tensor, key: torch.Tensor, named: dict[str, Any]
    ) -> None:
        """Raise `SequenceError` for a call that cannot be computed head by head over a sharded sequence: one with a
        cache, cross-attention, dropout unless the options allow it, attention weights as output, attention sinks, or
        further tensors among the arguments ``named``. ``place``: the module's name, for the message."""
        if key.shape[2] != query.shape[2]:
            raise SequenceError(
                f"{place}: expected keys for as many places as queries, got {key.shape[2]} and {query.shape[2]}: "
                "caches and cross-attention are not spread over ranks"
            )
        if self._options.attention_dropout == "refuse" and module.training and named.get("dropout"):
            raise SequenceError(
                f"{place}: dropout of {named['dropout']} inside attention: no rank can draw what one process would. "
                'Set it to 0 in the model\'s configuration, or give attention_dropout="independent"'
            )
        for name, given in named.items():
            if isinstance(given, torch.Tensor) and name not in _UNSHARDED:
                raise SequenceError(f"{place}: its attention takes a tensor {name!r}, which is not known to be sharded")
        if named.get("output_attentions") or hasattr(module, "sinks"):
            what = "attention sinks" if hasattr(module, "sinks") else "output_attentions"
            raise SequenceError(f"{place}: {what}: not available where heads are spread over ranks")

    @contextmanager
    def _rank_dropout(self, probability: float, device: torch.device) -> Iterator[None]:
        """Context manager for the core attention's dropout: inside it torch draws from a generator of this rank alone,
        seeded by a number from torch's default generator plus the rank. Does nothing for a ``probability`` of 0.

        If the forward pass is computed again with its random state restored, dropout draws the same again.
        """
        if not probability:
            yield
            return
        seed = int(torch.randint(_SEEDS, ())) + self._group.rank
        kind = "cuda" if device.type == "cpu" else device.type  # without devices, the CPU's generator alone is forked
        with torch.random.fork_rng([] if device.type == "cpu" else [device.index], device_type=kind):
            torch.manual_seed(seed)
            yield


class _LocalModule:
    """What the core attention gets in place of the attention ``module``: the same attributes, but ``groups``, this
    rank's number of query heads per key head, as `num_key_value_groups`, and a configuration that names the attention
    ``core`` (FlashAttention loads its kernels by that name)."""

    def __init__(self, module: nn.Module, groups: int, core: str) -> None:
        self._module = module
        self._groups = groups
        self._core = core

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute ``name``; for ``num_key_value_groups`` this rank's number instead, and for
        ``config`` a configuration that names the core attention."""
        found = getattr(self._module, name)
        if name == "num_key_value_groups":
            return self._groups
        return _LocalConfiguration(found, self._core) if name == "config" else found


class _LocalConfiguration:
    """Has the attributes of a model's configuration ``config``, but names ``core`` as its attention."""

    def __init__(self, config: Any, core: str) -> None:
        self._config = config
        self._attn_implementation = core

    def __getattr__(self, name: str) -> Any:
        """Return the configuration's own attribute ``name``; called for all but ``_attn_implementation``."""
        return getattr(self._config, name)


def _heads_in_rank_order(plan: HeadPlan, tensor: torch.Tensor) -> torch.Tensor:
    """Return the heads of keys or values ``tensor`` (batch, heads, S/N, size) as `sequence_to_heads` is to send them:
    in the order of the ranks that need them by ``plan``, a head that several need several times. Differentiable."""
    if plan.copies == 1:
        return tensor
    if plan.copies:
        return tensor.unsqueeze(2).expand(-1, -1, plan.copies, -1, -1).flatten(1, 2)
    return tensor.index_select(1, torch.tensor(plan.sent, device=tensor.device))


def _place_text(module: nn.Module) -> str:
    """Return the name of an attention module for errors and the ledger: its class and, if known, the number of its
    layer."""
    number = getattr(module, "layer_idx", None)
    return type(module).__name__ if number is None else f"{type(module).__name__} of layer {number}"
