"""State on an accelerator goes through pinned staging and comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import zero_ckpt  # noqa: E402
from zero_ckpt.torch import RngState  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator"),
]


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {"foreach": True}])
@pytest.mark.parametrize("also_through", ["cpu", "accelerator"])
def test_the_next_step_is_bitwise_the_uninterrupted_one(
    tmp_path: Path, options: dict[str, bool], also_through: str
) -> None:
    device = torch.accelerator.current_accelerator()

    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Dropout(), torch.nn.Linear(65, 7)).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 33, device=device)).square().sum().backward()
        optimizer.step()

    model, optimizer = build(1)
    step(model, optimizer)
    zero_ckpt.save(tmp_path, {"model": model, "optimizer": optimizer, "rng": RngState()}, step=1)
    if also_through == "cpu":  # a round through another device changes nothing
        plain = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Dropout(), torch.nn.Linear(65, 7))
        zero_ckpt.load(tmp_path, {"model": plain})
        for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs.cpu())
    step(model, optimizer)
    other, restored = build(2)
    zero_ckpt.load(tmp_path, {"model": other, "optimizer": restored, "rng": RngState()})
    step(other, restored)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_tensors_larger_than_the_staging_buffer(tmp_path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    tensor = torch.randn((70 << 20) // 4 + 3, device=device)
    zero_ckpt.save(tmp_path, {"t": tensor})
    loaded = torch.zeros_like(tensor)
    zero_ckpt.load(tmp_path, {"t": loaded})
    assert torch.equal(loaded, tensor)
