"""What all ranks of a sequence group know of one forward pass: lengths, padding and positions of the full sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zero_comm import NO_STEP, Group, Tag

_TAG = Tag("exchange", "masks and positions", NO_STEP)


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of one forward pass over sequence shards.

    ``length``: tokens of a shard. ``full_length``: of the sequence. ``padding``: (batch, full length), False where a
    token is padding; None if the caller gave no mask. ``positions``: (batch, full length), as the caller gave them;
    None if there were none, and they count from 0.
    """

    length: int
    full_length: int
    padding: torch.Tensor | None = None
    positions: torch.Tensor | None = None


class SequenceInputs:
    """The inputs of the forward pass that runs, and for each shard of positions the full positions of the sequence.

    ``group``: the N ranks that share the sequence, of length S.

    Attributes:
        current: of the forward pass that runs; None outside.
        attention_calls: number of attentions computed over sequence shards since the pass began.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._full_positions = WeakIdKeyDictionary()
        self.current: ForwardInputs | None = None
        self.attention_calls = 0

    def begin(self) -> None:
        """Begin a forward pass: forget the full positions of earlier ones, whose tensors may hold other values now, and
        count attention calls from 0."""
        self._full_positions = WeakIdKeyDictionary()
        self.attention_calls = 0

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the full sequence (batch, S) of which every rank holds a ``shard`` (batch, S/N). Collective over the
        sequence group; waits."""
        ranks = self._group.world_size
        full = shard.new_empty(ranks, *shard.shape)
        self._group.all_gather(full.view(-1), shard.contiguous().view(-1), _TAG).wait()
        return full.transpose(0, 1).flatten(1)

    def full_positions(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the positions (batch, S) of the full sequence of which ``shard`` (batch, S/N) is this rank's.
        Collective for a tensor that was not seen since `begin`."""
        if shard not in self._full_positions:
            self._full_positions[shard] = self.gather(shard)
        found: torch.Tensor = self._full_positions[shard]
        return found

    def count_positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return this rank's shard (1, ``length``) of positions that count from 0, as a new tensor on ``device``, for
        which `full_positions` will not communicate. Sends nothing."""
        full = torch.arange(length * self._group.world_size, device=device)[None]
        shard = full[:, length * self._group.rank :][:, :length].clone()
        self._full_positions[shard] = full
        return shard
