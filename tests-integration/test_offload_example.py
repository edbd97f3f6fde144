"""The forty lines of offloaded_optimizer.py train, clip, accumulate, save and resume, along torch's own trajectory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "examples" / "offloaded_optimizer.py"


def trained(folder: Path, *stops: int) -> dict[str, torch.Tensor]:
    for steps in stops:
        subprocess.run([sys.executable, str(SCRIPT), str(folder), str(steps)], check=True)
    return torch.load(folder / "state.pt", weights_only=True)["model"]  # type: ignore[no-any-return]


def torch_alone(steps: int) -> dict[str, torch.Tensor]:
    """The same run with torch.optim.AdamW, uninterrupted."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + micro))
            ((model(x) - x).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    return model.state_dict()


def test_forty_lines_train_and_resume(tmp_path: Path) -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 45  # forty lines of code below the docstring
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = trained(tmp_path / "whole", 12)
    resumed = trained(tmp_path / "parts", 5, 12)
    want = torch_alone(12)
    for name, weight in want.items():
        assert torch.equal(resumed[name], whole[name]), name
        assert float((whole[name] - weight).norm() / weight.norm()) < 1e-6, name
