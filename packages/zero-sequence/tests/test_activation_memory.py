"""The activations that a rank keeps for backward fall as one over the ranks of a sequence."""

from __future__ import annotations

import pytest
import torch
import transformers
from live_storages import LiveStorages

from zero_comm import run_ranks
from zero_sequence import SequenceGroups, Ulysses

__import_ahead__ = ["transformers.models.llama.modeling_llama"]
LENGTH = 256
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def kept(size: int) -> int:
    """Bytes of the storages that a forward pass made and that its graph keeps, with ``size`` ranks to a sequence."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, attn_implementation="sdpa"))
    groups = SequenceGroups.open(size)
    Ulysses(model, groups)
    shard = torch.randint(0, 64, (1, LENGTH // size))
    with LiveStorages() as storages:
        loss = model(input_ids=shard, use_cache=False).logits.square().mean()
        found = storages.live
    loss.backward()
    groups.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_fall_as_one_over_the_ranks_of_a_sequence(ranks: int) -> None:
    whole = run_ranks(kept, 1, 1)[0]
    for shard in run_ranks(kept, ranks, ranks):
        assert whole / ranks * 0.95 <= shard <= whole / ranks * 1.1
