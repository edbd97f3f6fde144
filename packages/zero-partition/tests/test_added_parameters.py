"""Parameters that were put into a model after it was sharded: their digest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_partition.added_parameters import AddedParameters


def digest_of_added(values: torch.Tensor) -> int:
    """Return the digest of the added parameters of a model that gets ``values`` as its only one."""
    model = nn.Module()
    added = AddedParameters(model)
    try:
        model.register_parameter("added", nn.Parameter(values))
        return added.digest()
    finally:
        added.close()


@pytest.mark.parametrize(
    "lazy",
    [torch.tensor([1 + 2j, 3 - 4j]).conj(), torch.tensor([1 + 2j]).conj().imag],
    ids=["conjugate", "negative"],
)
def test_the_digest_is_of_the_values_also_of_a_lazy_view(lazy):
    assert lazy.is_conj() or lazy.is_neg()
    plain = lazy.resolve_conj().resolve_neg().clone()
    assert digest_of_added(lazy) == digest_of_added(plain) != 0
    assert digest_of_added(lazy) != digest_of_added(plain + 1)
