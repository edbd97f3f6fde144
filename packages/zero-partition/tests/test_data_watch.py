"""Parameters whose ``data`` is watched are what parameters are to torch."""

from __future__ import annotations

import torch
from torch import nn

from zero_partition import change_class, present_class
from zero_partition.data_watch import unwatch_data, watch_data


class Named(nn.Parameter):
    """A user's class."""


def test_a_watched_parameter_has_its_users_class_again_afterwards() -> None:
    p = nn.Parameter(torch.ones(2))
    watch_data(p)
    assert isinstance(p, nn.Parameter) and present_class(p) is nn.Parameter and type(p) is not nn.Parameter
    change_class(p, Named)
    assert present_class(p) is Named and isinstance(p, Named) and type(p) is not Named
    unwatch_data(p)
    assert type(p) is Named


def test_a_parameter_that_no_engine_owns_any_more_has_plain_data() -> None:
    p = nn.Parameter(torch.ones(2))
    watch_data(p)
    p.data.mul_(2)
    p.data = p.data + 1
    assert p.tolist() == [3.0, 3.0] and type(p.data) is torch.Tensor and p.data_ptr() == p.data.data_ptr()


def test_a_compiled_model_has_as_many_graphs_and_the_same_values() -> None:
    import torch._dynamo as dynamo

    x, found = torch.ones(2, 4), []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        if watched:
            for p in model.parameters():
                watch_data(p)
        dynamo.reset()
        dynamo.utils.counters.clear()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        values = [compiled(x) for _ in range(3)]
        values[-1].sum().backward()
        gradients = [p.grad for p in model.parameters()]
        found.append((dynamo.utils.counters["stats"]["unique_graphs"], values[-1], *gradients))
    dynamo.reset()
    assert found[0][0] == found[1][0] == 1
    assert all(torch.equal(a, b) for a, b in zip(found[0][1:], found[1][1:], strict=True))
