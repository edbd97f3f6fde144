"""Parameter sets of the five schedules: some that matter, many drawn at random."""

from __future__ import annotations

import random
from typing import Any

import torch

Case = tuple[str, dict[str, Any]]

RATES = (0.02, 0.3)
"""The rates of the two param groups of `optimizer`."""

CHOSEN: list[Case] = [
    ("LRRangeTest", {}),
    ("LRRangeTest", {"lr_range_test_min_lr": [1e-4, 3e-3], "lr_range_test_step_size": 7}),
    ("LRRangeTest", {"lr_range_test_step_size": 7, "lr_range_test_staircase": True, "lr_range_test_step_rate": 0.3}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}),
    ("OneCycle", {"cycle_min_lr": [1e-4, 1e-3], "cycle_max_lr": (1e-2, 3e-2), "cycle_first_step_size": 333}),
    ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1e-2, "cycle_second_step_size": 0, "cycle_momentum": False}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 700,
            "cycle_second_step_size": 300,
            "cycle_first_stair_count": 7,
            "cycle_second_stair_count": 11,
            "decay_step_size": 13,
            "decay_lr_rate": 0.1,
            "decay_mom_rate": 0.0001,
        },
    ),
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupLR", {"warmup_min_lr": [1e-5, 1e-4], "warmup_max_lr": [1e-3, 5e-3], "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 2000}),
    ("WarmupDecayLR", {"total_num_steps": 1500, "warmup_max_lr": None, "warmup_num_steps": 10}),
    ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 100}),
    ("WarmupCosineLR", {"total_num_steps": 2000}),
    ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 100}),
    ("WarmupCosineLR", {"total_num_steps": 1500, "warmup_num_steps": 1, "warmup_min_ratio": 0.3, "cos_min_ratio": 0.2}),
]


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, *, tensor_rates: bool = False) -> Any:
    """Return an optimizer of two param groups."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(2))], "lr": torch.tensor(rate) if tensor_rates else rate}
        for rate in RATES
    ]
    return kind(groups, lr=0.1)


def drawn(count: int, seed: int) -> list[Case]:
    """Return `count` parameter sets of each schedule, the same ones for the same seed."""
    draw = random.Random(seed)
    return [(name, make(draw)) for name, make in _DRAW.items() for _ in range(count)]


def _rate(draw: random.Random) -> float:
    return 10 ** draw.uniform(-6, -1)


def _rates(draw: random.Random) -> Any:
    return draw.choice([_rate(draw), [_rate(draw), _rate(draw)]])


def _steps(draw: random.Random) -> int:
    return draw.choice([1, 2, 3, draw.randint(4, 100), draw.randint(101, 2500)])


def _range_test(draw: random.Random) -> dict[str, Any]:
    return {
        "lr_range_test_min_lr": _rates(draw),
        "lr_range_test_step_size": _steps(draw),
        "lr_range_test_step_rate": draw.uniform(0.01, 20),
        "lr_range_test_staircase": draw.random() < 0.5,
    }


def _one_cycle(draw: random.Random) -> dict[str, Any]:
    return {
        "cycle_min_lr": _rates(draw),
        "cycle_max_lr": _rates(draw),
        "decay_lr_rate": draw.choice([0.0, draw.uniform(0, 2)]),
        "cycle_first_step_size": _steps(draw),
        "cycle_second_step_size": draw.choice([None, _steps(draw)]),
        "cycle_first_stair_count": draw.choice([0, draw.randint(1, 12)]),
        "cycle_second_stair_count": draw.choice([None, 0, draw.randint(1, 12)]),
        "decay_step_size": draw.choice([0, _steps(draw)]),
        "cycle_momentum": draw.random() < 0.7,
        "cycle_min_mom": draw.choice([draw.uniform(0.5, 0.9), [0.7, 0.8]]),
        "cycle_max_mom": draw.choice([draw.uniform(0.5, 0.99), [0.9, 0.95]]),
        "decay_mom_rate": draw.choice([0.0, draw.uniform(0, 1e-4)]),
    }


def _warmup(draw: random.Random) -> dict[str, Any]:
    return {
        "warmup_min_lr": draw.choice([0, 0.0, _rates(draw)]),
        "warmup_max_lr": draw.choice([None, _rates(draw)]),
        "warmup_num_steps": _steps(draw),
        "warmup_type": draw.choice(["log", "linear"]),
    }


def _cosine(draw: random.Random) -> dict[str, Any]:
    return {
        "total_num_steps": _steps(draw),
        "warmup_min_ratio": draw.choice([0.0, draw.random()]),
        "warmup_num_steps": _steps(draw),
        "cos_min_ratio": draw.choice([0.0, draw.random()]),
        "warmup_type": draw.choice(["log", "linear"]),
    }


_DRAW = {
    "LRRangeTest": _range_test,
    "OneCycle": _one_cycle,
    "WarmupLR": _warmup,
    "WarmupDecayLR": lambda draw: {**_warmup(draw), "total_num_steps": _steps(draw)},
    "WarmupCosineLR": _cosine,
}
