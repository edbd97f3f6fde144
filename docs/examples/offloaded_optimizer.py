"""Plain PyTorch with its optimizer's state on NVMe: train, clip, accumulate, save and resume.

python offloaded_optimizer.py FOLDER STEPS    # trains up to step STEPS, from FOLDER/state.pt where there is one
"""

import sys
from pathlib import Path

import torch

from zero_offload import OffloadedOptimizer


def batch(number: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(number))


folder, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
optimizer = OffloadedOptimizer(model, torch.optim.AdamW, tier="nvme", path=folder / "swap", lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
begin = 0
if (folder / "state.pt").exists():
    saved = torch.load(folder / "state.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    begin = saved["step"]
for step in range(begin, steps):
    optimizer.zero_grad()
    for micro in range(2):
        x = batch(2 * step + micro)
        ((model(x) - x).square().mean() / 2).backward()
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    schedule.step()
parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
torch.save({"step": steps, **{name: part.state_dict() for name, part in parts.items()}}, folder / "state.pt")
optimizer.close()
