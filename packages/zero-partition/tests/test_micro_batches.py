"""Micro-batches of a step: where the loss is found in a model's output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero_partition import PartitionError
from zero_partition.micro_batches import loss_in

LOSS = torch.tensor(2.0)


@pytest.mark.parametrize("output", [LOSS, (LOSS, 1), {"logits": 1, "loss": LOSS}, SimpleNamespace(loss=LOSS)], ids=type)
def test_the_loss_is_found_in_what_models_return(output: Any) -> None:
    assert loss_in(output, None) is LOSS


@pytest.mark.parametrize(("output", "has"), [({"logits": 1, "hidden": 2}, "'logits', 'hidden'"), ((), "empty tuple")])
def test_an_output_without_a_loss_is_refused_by_name(output: Any, has: str) -> None:
    with pytest.raises(PartitionError, match=has) as caught:
        loss_in(output, None)
    assert "loss_fn" in str(caught.value)
