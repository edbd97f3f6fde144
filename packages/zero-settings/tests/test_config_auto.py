"""`resolve_auto`: the rules of the frameworks, for scripts without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zero_settings import Config, ConfigError, resolve_auto

TEMPLATE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
        **dict.fromkeys(
            ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
        ),
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}

ANSWERS: dict[str, Any] = {
    "model": SimpleNamespace(config=SimpleNamespace(hidden_size=50)),
    "world_size": 4,
    "micro_batch_size": 3,
    "accumulation_steps": 2,
    "learning_rate": 2e-4,
    "betas": (0.8, 0.99),
    "eps": 1e-7,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "warmup_steps": 0,
    "total_steps": 100,
    "precision": "bf16",
}


def test_every_auto_gets_the_value_that_the_frameworks_give_it() -> None:
    filled = resolve_auto(TEMPLATE, **ANSWERS)
    assert (filled["train_batch_size"], filled["train_micro_batch_size_per_gpu"]) == (24, 3)
    assert (filled["gradient_accumulation_steps"], filled["gradient_clipping"]) == (2, 0.5)
    assert (filled["fp16"]["enabled"], filled["bf16"]["enabled"]) == (False, True)
    assert filled["optimizer"]["params"] == {"lr": 2e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1}
    assert list(filled["scheduler"]["params"].values()) == [0, 2e-4, 1, 100]
    zero = filled["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "none", "nvme_path": None}
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (2500, 2250)
    assert zero["stage3_param_persistence_threshold"] == 500
    assert zero["stage3_gather_16bit_weights_on_model_save"] is False
    assert "auto" in str(TEMPLATE) and "auto" not in str(filled)
    assert Config.load(filled, world_size=4).train_batch_size == 24


def test_values_that_are_given_stay_and_decide_for_the_others() -> None:
    filled = resolve_auto({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 5}, world_size=2)
    assert filled == {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 5}


def test_every_auto_without_an_answer_is_named_with_its_argument() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_auto(TEMPLATE)
    for path, argument in (
        ("train_micro_batch_size_per_gpu", "micro_batch_size"),
        ("optimizer.params.lr", "learning_rate"),
        ("scheduler.params.total_num_steps", "total_steps"),
        ("zero_optimization.reduce_bucket_size", "model"),
    ):
        assert path in str(caught.value) and f"{argument}=" in str(caught.value)
