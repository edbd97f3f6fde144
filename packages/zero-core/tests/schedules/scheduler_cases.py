"""One case of every schedule, and an optimizer to drive."""

from __future__ import annotations

from typing import Any

import torch

Case = tuple[str, dict[str, Any]]

CHOSEN: list[Case] = [
    ("LRRangeTest", {"lr_range_test_min_lr": [1e-4, 3e-3], "lr_range_test_step_size": 7}),
    ("OneCycle", {"cycle_min_lr": [1e-4, 1e-3], "cycle_max_lr": [1e-2, 3e-2], "cycle_first_step_size": 9}),
    ("WarmupLR", {"warmup_min_lr": [1e-5, 1e-4], "warmup_max_lr": [1e-3, 5e-3], "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 1500, "warmup_max_lr": None, "warmup_num_steps": 10}),
    ("WarmupCosineLR", {"total_num_steps": 1500, "warmup_num_steps": 1, "warmup_min_ratio": 0.3}),
]


def optimizer(*, tensor_rates: bool = False) -> torch.optim.Optimizer:
    """Return an optimizer of two param groups."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(2))], "lr": torch.tensor(rate) if tensor_rates else rate}
        for rate in (0.02, 0.3)
    ]
    return torch.optim.AdamW(groups, lr=0.1)
