"""Sequence parallelism and tiled compute, for sequences that one rank cannot hold.

Read `heads.py` and `exchange.py` first: which heads go where, and how. Then `attention.py` and `ulysses.py`.
"""

from __future__ import annotations

from .attention import AttentionOptions
from .batches import split_batch
from .errors import SequenceError
from .exchange import heads_to_sequence, sequence_to_heads
from .groups import SequenceGroups
from .loader import SequenceLoader
from .loss import sequence_loss, shift_labels
from .tiled_budget import tokens_per_tile
from .tiled_causal import TiledCausalLoss
from .tiled_loss import tiled_cross_entropy
from .tiled_modules import tiled
from .ulysses import Ulysses

__all__ = [
    "AttentionOptions",
    "SequenceError",
    "SequenceGroups",
    "SequenceLoader",
    "TiledCausalLoss",
    "Ulysses",
    "heads_to_sequence",
    "sequence_loss",
    "sequence_to_heads",
    "shift_labels",
    "split_batch",
    "tiled",
    "tiled_cross_entropy",
    "tokens_per_tile",
]
